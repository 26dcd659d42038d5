//! Parallel, page-aligned transfer between memory and files, with a checksum per block.
//!
//! Buffers of this module: each thread owns one [`PageBuffer`] of at most [`WRITE_BYTES`] for the
//! duration of a call; no other buffer is allocated, for any size of the state. A page-aligned
//! source is written without a copy.

use std::convert::Infallible;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::format::encoding::Encoding;
use crate::format::file_layout::{BLOCK_BYTES, checksum};
use crate::io::counts;
use crate::io::dir::DIRECT;
use crate::io::page_buffer::{PAGE_BYTES, PageBuffer};

/// Threads of one transfer.
const THREADS: u64 = 4;

/// Bytes that a thread writes at a time; a multiple of [`BLOCK_BYTES`].
const WRITE_BYTES: u64 = 4 << 20;

/// Bytes after which buffered writes are synced.
const SYNC_BYTES: u64 = 1 << 30;

/// Bytes that a thread reads at a time; a multiple of [`BLOCK_BYTES`]. The fresh pages of larger
/// buffers cost more than their fewer requests save.
const READ_BYTES: u64 = 1 << 20;

/// The number of threads for a transfer of `bytes`.
pub(crate) fn threads_for(bytes: u64) -> usize {
    THREADS.min(bytes.div_ceil(BLOCK_BYTES)) as usize
}

/// The state bytes of a file to be written.
pub(crate) trait ByteSource: Sync {
    /// Total number of bytes.
    fn len(&self) -> u64;

    /// The bytes of `range` if they are contiguous in memory.
    fn contiguous(&self, _range: &Range<u64>) -> Option<&[u8]> {
        None
    }

    /// Copies the bytes `start..start + out.len()` to `out`. Called from several threads.
    fn fill(&self, start: u64, out: &mut [u8]) -> io::Result<()>;
}

/// A slice in memory.
#[derive(Clone, Copy)]
pub(crate) enum Slice<'a> {
    /// The bytes of a file.
    Bytes(&'a [u8]),
    /// Elements from the start of a block on, to be encoded.
    Values(Encoding, &'a [f32]),
}

impl Slice<'_> {
    fn len(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Values(encoding, values) => encoding.bytes(values.len() as u64),
        }
    }

    /// Copies the bytes `start..start + out.len()` to `out`.
    fn fill(&self, start: u64, out: &mut [u8]) {
        match self {
            Self::Bytes(bytes) => out.copy_from_slice(&bytes[start as usize..][..out.len()]),
            Self::Values(encoding, values) => {
                let encode = |elems: Range<u64>, bytes: &mut [u8]| {
                    encoding.encode(&values[elems.start as usize..elems.end as usize], bytes);
                    Ok::<_, Infallible>(())
                };
                let Ok(()) = encoding.fill_range(values.len() as u64, start, out, encode);
            }
        }
    }
}

/// The concatenation of slices in memory.
pub(crate) struct Slices<'a> {
    parts: Vec<Slice<'a>>,
    starts: Vec<u64>,
    len: u64,
}

impl<'a> Slices<'a> {
    pub(crate) fn new(parts: Vec<Slice<'a>>) -> Self {
        let mut len = 0;
        let mut start_of = |part: &Slice<'_>| {
            len += part.len();
            len - part.len()
        };
        let starts = parts.iter().map(&mut start_of).collect();
        Self { parts, starts, len }
    }
}

impl ByteSource for Slices<'_> {
    fn len(&self) -> u64 {
        self.len
    }

    fn contiguous(&self, range: &Range<u64>) -> Option<&[u8]> {
        let i = self
            .starts
            .partition_point(|s| *s <= range.start)
            .checked_sub(1)?;
        let Slice::Bytes(part) = self.parts[i] else {
            return None;
        };
        part.get((range.start - self.starts[i]) as usize..(range.end - self.starts[i]) as usize)
    }

    fn fill(&self, start: u64, out: &mut [u8]) -> io::Result<()> {
        let mut i = self
            .starts
            .partition_point(|s| *s <= start)
            .saturating_sub(1);
        let mut done = 0;
        while done < out.len() {
            let part = self.parts[i];
            let skip = start + done as u64 - self.starts[i];
            let n = (part.len() - skip).min((out.len() - done) as u64) as usize;
            part.fill(skip, &mut out[done..done + n]);
            done += n;
            i += 1;
        }
        Ok(())
    }
}

/// Writes `source` at `offset`, a multiple of [`PAGE_BYTES`], and returns the checksum of each of
/// its blocks. The last page is padded with zeros; the caller truncates the file. Adds the written
/// bytes to `progress`.
pub(crate) fn write(
    file: &File,
    offset: u64,
    source: &dyn ByteSource,
    progress: &AtomicU64,
) -> io::Result<Vec<u64>> {
    let len = source.len();
    let checksums: Vec<AtomicU64> = (0..len.div_ceil(BLOCK_BYTES))
        .map(|_| AtomicU64::new(0))
        .collect();
    in_parallel(
        chunks(0..len, WRITE_BYTES),
        threads_for(len),
        |range, buffer| {
            let n = (range.end - range.start) as usize;
            let aligned = |b: &&[u8]| {
                b.as_ptr().addr().is_multiple_of(PAGE_BYTES) && n.is_multiple_of(PAGE_BYTES)
            };
            let bytes = match source.contiguous(&range).filter(aligned) {
                Some(bytes) => bytes,
                None => {
                    let whole = buffer
                        .get_or_insert_with(|| PageBuffer::new(WRITE_BYTES.min(len) as usize))
                        .whole();
                    source.fill(range.start, &mut whole[..n])?;
                    let padded = n.next_multiple_of(PAGE_BYTES);
                    whole[n..padded].fill(0);
                    &whole[..padded]
                }
            };
            let first = (range.start / BLOCK_BYTES) as usize;
            for (entry, block) in checksums[first..]
                .iter()
                .zip(bytes[..n].chunks(BLOCK_BYTES as usize))
            {
                entry.store(checksum(block), Ordering::Relaxed);
            }
            write_at(file, bytes, offset + range.start)?;
            let before = progress.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            sync_buffered(file, before..before + bytes.len() as u64)
        },
    )?;

    Ok(checksums.into_iter().map(AtomicU64::into_inner).collect())
}

/// Writes page-aligned bytes; switches to buffered I/O if the file system rejects direct I/O.
pub(crate) fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    counts::wrote(bytes.len());
    match file.write_all_at(bytes, offset) {
        Err(e) if e.kind() == io::ErrorKind::InvalidInput && disable_direct(file) => {
            file.write_all_at(bytes, offset)
        }
        other => other,
    }
}

/// Without direct I/O, syncs the file each time that the written bytes pass a multiple of
/// [`SYNC_BYTES`]: the last sync of a large file would otherwise make no progress for minutes.
fn sync_buffered(file: &File, written: Range<u64>) -> io::Result<()> {
    let is_due = written.start / SYNC_BYTES < written.end / SYNC_BYTES;
    let is_direct = || rustix::fs::fcntl_getfl(file).is_ok_and(|flags| flags.intersects(DIRECT));
    if is_due && !is_direct() {
        file.sync_data()
    } else {
        Ok(())
    }
}

/// Reads at least `need` bytes into a page-aligned buffer that may reach past the end of the file.
pub(crate) fn read_at(file: &File, buffer: &mut [u8], offset: u64, need: usize) -> io::Result<()> {
    let mut done = 0;
    while done < need {
        match file.read_at(&mut buffer[done..], offset + done as u64) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                counts::read(n);
                done += n;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::InvalidInput && disable_direct(file) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Disables direct I/O; returns whether it was enabled.
fn disable_direct(file: &File) -> bool {
    rustix::fs::fcntl_getfl(file).is_ok_and(|flags| {
        flags.intersects(DIRECT) && rustix::fs::fcntl_setfl(file, flags - DIRECT).is_ok()
    })
}

/// Splits a range to read at multiples of [`READ_BYTES`], so that no block is read twice.
pub(crate) fn chunks_to_read(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    chunks(range, READ_BYTES)
}

fn chunks(range: Range<u64>, chunk_bytes: u64) -> impl Iterator<Item = Range<u64>> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let end = range.end.min((at / chunk_bytes + 1) * chunk_bytes);
        (at < range.end).then(|| std::mem::replace(&mut at, end)..end)
    })
}

/// Runs `work` on each item until one fails, on up to `threads` threads (this one included), each
/// with its own buffer; returns the first error.
pub(crate) fn in_parallel<I: Send, E: Send>(
    items: impl Iterator<Item = I> + Send,
    threads: usize,
    work: impl Fn(I, &mut Option<PageBuffer>) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let items = Mutex::new(items);
    let stop = AtomicBool::new(false);
    let run = || {
        let mut buffer = None;
        loop {
            // The lock is poisoned if a thread panicked; joining that thread propagates the panic.
            let item = items.lock().map_or(None, |mut items| items.next());
            let Some(item) = item.filter(|_| !stop.load(Ordering::Relaxed)) else {
                return Ok(());
            };
            work(item, &mut buffer).inspect_err(|_| stop.store(true, Ordering::Relaxed))?;
        }
    };

    std::thread::scope(|scope| {
        let builder = || std::thread::Builder::new().name("zero-ckpt-io".into());
        // A thread that fails to start is skipped; the others do its share.
        let others: Vec<_> = (1..threads)
            .filter_map(|_| builder().spawn_scoped(scope, run).ok())
            .collect();
        let mut result = run();
        for other in others {
            match other.join() {
                Ok(theirs) => result = result.and(theirs),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        result
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_read_as_their_concatenation() {
        let bytes: Vec<u8> = (0..20).collect();
        let parts = [&[], &bytes[..7], &[], &[], &bytes[7..8], &bytes[8..], &[]];
        let slices = Slices::new(parts.map(Slice::Bytes).to_vec());

        assert_eq!(slices.len(), 20);
        for start in 0..=20 {
            for end in start..=20 {
                let mut out = vec![0xff; end - start];
                slices.fill(start as u64, &mut out).unwrap();
                assert_eq!(out, bytes[start..end]);
                if let Some(bytes_of_range) = slices.contiguous(&(start as u64..end as u64)) {
                    assert_eq!(bytes_of_range, &bytes[start..end]);
                }
            }
        }

        assert!(slices.contiguous(&(8..20)).is_some() && slices.contiguous(&(6..9)).is_none());
    }

    #[test]
    fn chunks_are_aligned_and_cover_the_range() {
        let found: Vec<_> = chunks_to_read(5..2 * READ_BYTES + 1).collect();
        assert_eq!(
            found,
            [
                5..READ_BYTES,
                READ_BYTES..2 * READ_BYTES,
                2 * READ_BYTES..2 * READ_BYTES + 1
            ]
        );
        assert_eq!(chunks_to_read(7..7).count(), 0);
    }

    #[test]
    fn work_is_distributed_until_the_first_error() {
        let done = AtomicU64::new(0);
        let all = in_parallel(0..100u64, 4, |i, _| {
            done.fetch_add(i, Ordering::Relaxed);
            Ok::<_, String>(())
        });
        assert_eq!((all, done.into_inner()), (Ok(()), 4950));
        assert_eq!(
            in_parallel(0.., 3, |i, _| if i == 50 { Err(i) } else { Ok(()) }),
            Err(50)
        );
    }
}
