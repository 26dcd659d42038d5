//! Moving state between memory and a shard file: several threads, page-aligned buffers, a checksum a block.
//!
//! Buffers of this module: each thread owns one [`Pages`] of `chunk_bytes` for the length of a call; nothing
//! else is allocated, however large the state. A source that is page-aligned itself is written without a copy.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::OFlags;

use crate::pages::{PAGE_BYTES, Pages};
use crate::plan::{BLOCK_BYTES, checksum};

/// How files are read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoOptions {
    /// Threads of one call, at least 1.
    pub threads: usize,
    /// Bytes that a thread moves at once; a multiple of [`BLOCK_BYTES`] is used.
    pub chunk_bytes: u64,
    /// Bypass the page cache where the file system can.
    pub direct: bool,
}

impl Default for IoOptions {
    fn default() -> Self {
        Self { threads: 4, chunk_bytes: 4 << 20, direct: true }
    }
}

impl IoOptions {
    fn chunk(&self) -> u64 {
        self.chunk_bytes.next_multiple_of(BLOCK_BYTES).clamp(BLOCK_BYTES, 1 << 30)
    }
}

/// The state bytes of a file to be written, from wherever they come.
pub(crate) trait Source: Sync {
    /// How many.
    fn len(&self) -> u64;

    /// The bytes of `range`, where they lie in memory in one run.
    fn whole(&self, _range: &Range<u64>) -> Option<&[u8]> {
        None
    }

    /// Puts the bytes of `start..start + out.len()` into `out`. Called from several threads.
    fn fill(&self, start: u64, out: &mut [u8]) -> io::Result<()>;
}

/// Slices in memory that are one run of bytes, end to end.
pub(crate) struct Slices<'a> {
    parts: Vec<&'a [u8]>,
    starts: Vec<u64>,
    len: u64,
}

impl<'a> Slices<'a> {
    pub(crate) fn new(parts: Vec<&'a [u8]>) -> Self {
        let mut len = 0;
        let mut start_of = |part: &&[u8]| {
            len += part.len() as u64;
            len - part.len() as u64
        };
        let starts = parts.iter().map(&mut start_of).collect();
        Self { parts, starts, len }
    }

    /// The slices, in order.
    pub(crate) fn parts(&self) -> &[&'a [u8]] {
        &self.parts
    }
}

impl Source for Slices<'_> {
    fn len(&self) -> u64 {
        self.len
    }

    fn whole(&self, range: &Range<u64>) -> Option<&[u8]> {
        let i = self.starts.partition_point(|s| *s <= range.start).checked_sub(1)?;
        self.parts[i].get((range.start - self.starts[i]) as usize..(range.end - self.starts[i]) as usize)
    }

    fn fill(&self, start: u64, out: &mut [u8]) -> io::Result<()> {
        let (mut i, mut done) = (self.starts.partition_point(|s| *s <= start).saturating_sub(1), 0);
        while done < out.len() {
            let part = &self.parts[i][(start + done as u64 - self.starts[i]) as usize..];
            let n = part.len().min(out.len() - done);
            out[done..done + n].copy_from_slice(&part[..n]);
            done += n;
            i += 1;
        }
        Ok(())
    }
}

/// Writes `source` at `offset` (a multiple of the page) and returns the checksum of each of its blocks. Up to
/// a page of zeros may lie behind it afterwards; the caller cuts the file.
pub(crate) fn write(file: &File, offset: u64, source: &dyn Source, io: IoOptions) -> io::Result<Vec<u64>> {
    let (chunk, len) = (io.chunk(), source.len());
    let checksums: Vec<AtomicU64> = (0..len.div_ceil(BLOCK_BYTES)).map(|_| AtomicU64::new(0)).collect();
    let (next, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let work = || {
        let mut buffer = None;
        loop {
            let start = next.fetch_add(1, Ordering::Relaxed).saturating_mul(chunk);
            if start >= len || stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            let range = start..len.min(start + chunk);
            let n = (range.end - range.start) as usize;
            let aligned = |b: &&[u8]| b.as_ptr().addr().is_multiple_of(PAGE_BYTES) && n.is_multiple_of(PAGE_BYTES);
            let bytes = match source.whole(&range).filter(aligned) {
                Some(bytes) => bytes,
                None => {
                    let whole = buffer.get_or_insert_with(|| Pages::new(chunk.min(len) as usize)).whole();
                    source.fill(start, &mut whole[..n]).inspect_err(|_| stop.store(true, Ordering::Relaxed))?;
                    let padded = n.next_multiple_of(PAGE_BYTES);
                    whole[n..padded].fill(0);
                    &whole[..padded]
                }
            };
            let first = (start / BLOCK_BYTES) as usize;
            for (slot, block) in checksums[first..].iter().zip(bytes[..n].chunks(BLOCK_BYTES as usize)) {
                slot.store(checksum(block), Ordering::Relaxed);
            }
            if let Err(e) = write_at(file, bytes, offset + start) {
                stop.store(true, Ordering::Relaxed);
                return Err(e);
            }
        }
    };
    in_parallel(io.threads.min(len.div_ceil(chunk) as usize), work)?;
    Ok(checksums.into_iter().map(AtomicU64::into_inner).collect())
}

/// Writes page-aligned bytes; where the file refuses direct I/O, goes on without.
pub(crate) fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    match file.write_all_at(bytes, offset) {
        Err(e) if e.kind() == io::ErrorKind::InvalidInput && no_direct(file) => file.write_all_at(bytes, offset),
        other => other,
    }
}

/// Switches direct I/O off; whether it was on.
fn no_direct(file: &File) -> bool {
    rustix::fs::fcntl_getfl(file).is_ok_and(|flags| {
        flags.contains(OFlags::DIRECT) && rustix::fs::fcntl_setfl(file, flags - OFlags::DIRECT).is_ok()
    })
}

/// What went wrong with a verified read.
pub(crate) enum ReadError {
    Io(io::Error),
    /// Block, checksum recorded, checksum found.
    Corrupt(u64, u64, u64),
}

/// The state of an open shard file, for reading.
pub(crate) struct StateFile<'a> {
    /// Opened with direct I/O or without.
    pub(crate) file: &'a File,
    /// Where the state starts, a multiple of the page.
    pub(crate) offset: u64,
    /// Bytes of state.
    pub(crate) len: u64,
    /// Checksum of each block.
    pub(crate) table: &'a [u64],
}

impl StateFile<'_> {
    /// Reads the blocks that hold `range` of the state into `buffer`, verifies them, and returns the bytes of
    /// the range. It lies within the state and is not empty; a buffer that is too small is replaced.
    pub(crate) fn read<'b>(&self, range: &Range<u64>, buffer: &'b mut Option<Pages>) -> Result<&'b [u8], ReadError> {
        let start = range.start / BLOCK_BYTES * BLOCK_BYTES;
        let end = range.end.next_multiple_of(BLOCK_BYTES).min(self.len);
        let n = (end - start) as usize;
        if buffer.as_ref().is_some_and(|b| b.bytes().len() < n) {
            *buffer = None;
        }
        let buffer = buffer.get_or_insert_with(|| Pages::new(n)).whole();
        read_at(self.file, &mut buffer[..n.next_multiple_of(PAGE_BYTES)], self.offset + start, n)
            .map_err(ReadError::Io)?;
        let first = start / BLOCK_BYTES;
        for (i, block) in buffer[..n].chunks(BLOCK_BYTES as usize).enumerate() {
            let (expected, got) = (self.table[first as usize + i], checksum(block));
            if expected != got {
                return Err(ReadError::Corrupt(first + i as u64, expected, got));
            }
        }
        Ok(&buffer[(range.start - start) as usize..(range.end - start) as usize])
    }
}

/// Cuts a range at multiples of the chunk, so that no block is read twice.
pub(crate) fn chunks(range: Range<u64>, io: IoOptions) -> impl Iterator<Item = Range<u64>> {
    let (chunk, mut at) = (io.chunk(), range.start);
    std::iter::from_fn(move || {
        let end = range.end.min((at / chunk + 1) * chunk);
        (at < range.end).then(|| std::mem::replace(&mut at, end)..end)
    })
}

/// Takes items until there are none or one fails, on up to `threads` threads, each with a buffer of its own.
pub(crate) fn share<I: Send, E: Send>(
    items: impl Iterator<Item = I> + Send,
    threads: usize,
    work: impl Fn(I, &mut Option<Pages>) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let (items, stop) = (Mutex::new(items), AtomicBool::new(false));
    in_parallel(threads, || {
        let mut buffer = None;
        loop {
            // A poisoned queue means that a thread has panicked; it is joined and its panic goes on.
            let item = items.lock().map_or(None, |mut items| items.next());
            let Some(item) = item.filter(|_| !stop.load(Ordering::Relaxed)) else { return Ok(()) };
            work(item, &mut buffer).inspect_err(|_| stop.store(true, Ordering::Relaxed))?;
        }
    })
}

/// Reads at least `need` bytes into a page-aligned buffer that may reach past the end of the file.
fn read_at(file: &File, buffer: &mut [u8], offset: u64, need: usize) -> io::Result<()> {
    let mut done = 0;
    while done < need {
        match file.read_at(&mut buffer[done..], offset + done as u64) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::InvalidInput && no_direct(file) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Runs `work` on up to `threads` threads, this one among them; the first error of any.
fn in_parallel<E: Send>(threads: usize, work: impl Fn() -> Result<(), E> + Sync) -> Result<(), E> {
    std::thread::scope(|scope| {
        let builder = || std::thread::Builder::new().name("zero-ckpt-io".into());
        // A thread that cannot be started is one fewer; the work is shared out by need.
        let others: Vec<_> = (1..threads).filter_map(|_| builder().spawn_scoped(scope, &work).ok()).collect();
        let mut result = work();
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
    fn slices_are_one_run_of_bytes() {
        let bytes: Vec<u8> = (0..20).collect();
        let slices = Slices::new(vec![&[], &bytes[..7], &[], &[], &bytes[7..8], &bytes[8..], &[]]);
        assert_eq!(slices.len(), 20);
        for start in 0..=20 {
            for end in start..=20 {
                let mut out = vec![0xff; end - start];
                slices.fill(start as u64, &mut out).unwrap();
                assert_eq!(out, bytes[start..end]);
                if let Some(whole) = slices.whole(&(start as u64..end as u64)) {
                    assert_eq!(whole, &bytes[start..end]);
                }
            }
        }
        assert!(slices.whole(&(8..20)).is_some() && slices.whole(&(6..9)).is_none());
    }

    #[test]
    fn chunks_end_at_multiples_and_cover_the_range() {
        let io = IoOptions { threads: 1, chunk_bytes: 1, direct: false };
        let found: Vec<_> = chunks(5..2 * BLOCK_BYTES + 1, io).collect();
        assert_eq!(found, [5..BLOCK_BYTES, BLOCK_BYTES..2 * BLOCK_BYTES, 2 * BLOCK_BYTES..2 * BLOCK_BYTES + 1]);
        assert_eq!(chunks(7..7, io).count(), 0);
    }

    #[test]
    fn work_is_shared_out_and_the_first_error_ends_it() {
        let done = AtomicU64::new(0);
        let all = share(0..100u64, 4, |i, _| {
            done.fetch_add(i, Ordering::Relaxed);
            Ok::<_, String>(())
        });
        assert_eq!((all, done.into_inner()), (Ok(()), 4950));
        assert_eq!(share(0.., 3, |i, _| if i == 50 { Err(i) } else { Ok(()) }), Err(50));
    }
}
