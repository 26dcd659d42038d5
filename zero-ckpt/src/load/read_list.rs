//! Lists of reads from shard files, and the places in memory of the elements read.
//!
//! The elements of a request are in memory in another order than in the files: a column cut of a
//! matrix takes a few elements of every row. A file is read in chunks of up to 1 MiB whose
//! checksums are verified, and the wanted elements of each verified block are converted into their
//! places. A chunk covers elements that nobody wants if they are between wanted ones: a rank that
//! loads one of `M` column slices of a matrix reads up to the whole matrix, at most one block of
//! 256 KiB of it for a gap.

use std::collections::HashMap;
use std::ops::Range;

use zero_shard::ParamId;

use crate::format::encoding::{Encoding, spans};
use crate::format::file_layout::BLOCK_BYTES;
use crate::format::runs::elems_of;
use crate::format::tensor_folder::check_range;
use crate::io::parallel::{chunks_to_read, in_parallel, threads_for};
use crate::{CkptError, Reader, StateEncoding};

/// Wanted pieces after which the reads listed so far are performed: bounds the memory of a list to
/// about 10 MB, also if every element is a separate piece.
const MAX_WANTED: usize = 1 << 18;

/// Reads of stored elements of one state into a slice, which is filled from its start to its end.
pub(crate) struct ReadList<'r, 'o> {
    reader: &'r Reader,
    /// Index of the state.
    state: usize,
    encoding: StateEncoding,
    /// The elements that are not listed yet.
    out: &'o mut [f32],
    /// The unit and range of the next elements of `out`, which the following may continue.
    pending: Option<(usize, Range<u64>)>,
    reads: Vec<Read<'o>>,
    /// By file: its last read.
    last_of_file: HashMap<usize, usize>,
    wanted: usize,
}

/// A range of one file, and the elements of it that are wanted.
struct Read<'o> {
    file: usize,
    /// Byte range in the state bytes of the file, from the first wanted element to the last.
    range: Range<u64>,
    wanted: Vec<Wanted<'o>>,
}

/// Elements in a file and their place in memory.
struct Wanted<'o> {
    encoding: Encoding,
    /// Start of the block of the first element, in the state bytes of the file.
    start: u64,
    /// Elements of that block before the first one.
    skip: usize,
    out: &'o mut [f32],
}

impl Wanted<'_> {
    /// End of the block of the last element.
    fn end(&self) -> u64 {
        let elems = self.skip + self.out.len();
        self.start + self.encoding.bytes(elems as u64)
    }
}

impl<'r, 'o> ReadList<'r, 'o> {
    /// An empty list of reads of `state` into `out`.
    pub(crate) fn new(
        reader: &'r Reader,
        state: &str,
        out: &'o mut [f32],
    ) -> Result<Self, CkptError> {
        let (state, encoding) = reader.state(state)?;
        Ok(Self {
            reader,
            state,
            encoding,
            out,
            pending: None,
            reads: Vec::new(),
            last_of_file: HashMap::new(),
            wanted: 0,
        })
    }

    /// Lists the next elements: `range` of a stored unit. The range must be within the unit, and
    /// the elements within the slice.
    pub(crate) fn elems(&mut self, unit: usize, range: Range<u64>) -> Result<(), CkptError> {
        if let Some((pending_unit, pending)) = &mut self.pending
            && *pending_unit == unit
            && pending.end == range.start
        {
            pending.end = range.end;
            return Ok(());
        }
        self.list_pending()?;
        self.pending = Some((unit, range));
        Ok(())
    }

    /// Sets the next elements to zero.
    pub(crate) fn zeros(&mut self, elems: u64) -> Result<(), CkptError> {
        self.list_pending()?;
        take(&mut self.out, elems).fill(0.0);
        Ok(())
    }

    /// Performs the reads.
    pub(crate) fn finish(mut self) -> Result<(), CkptError> {
        self.list_pending()?;
        self.perform()
    }

    fn list_pending(&mut self) -> Result<(), CkptError> {
        let Some((unit, range)) = self.pending.take() else {
            return Ok(());
        };
        let reader = self.reader;
        let placed = &reader.layout.units()[unit];
        for (held, part) in reader.coverage.find(unit, range) {
            let layout = &reader.file(held.file)?.layout;
            let mut start = layout.tensor_range(self.state, held.piece).start;
            for span in spans(self.encoding, placed, held.start..held.end) {
                if span.elems.start >= part.end {
                    break;
                }
                let wanted = part.start.max(span.elems.start)..part.end.min(span.elems.end);
                if !wanted.is_empty() {
                    let encoding = span.encoding;
                    let before = wanted.start - span.elems.start;
                    let wanted = Wanted {
                        encoding,
                        start: start + before / encoding.block_elems() * encoding.block_bytes(),
                        skip: (before % encoding.block_elems()) as usize,
                        out: take(&mut self.out, wanted.end - wanted.start),
                    };
                    self.list(held.file, wanted);
                }
                start += span.bytes();
            }
        }
        if self.wanted >= MAX_WANTED {
            self.perform()?;
        }
        Ok(())
    }

    /// Adds elements to the last read of the file if they are behind it, by less than a block of
    /// the file, or start in its last block of a format.
    fn list(&mut self, file: usize, wanted: Wanted<'o>) {
        let start = wanted.start;
        let end = wanted.end();
        self.wanted += 1;

        let last = self.last_of_file.get(&file).copied();
        let last = last.and_then(|last| self.reads.get_mut(last));
        let is_behind = |read: &&mut Read<'_>| {
            let last_block = read.range.end - wanted.encoding.block_bytes().min(read.range.end);
            (last_block..read.range.end + BLOCK_BYTES).contains(&start)
        };
        match last.filter(is_behind) {
            Some(read) => {
                read.range.end = end;
                read.wanted.push(wanted);
            }
            None => {
                self.last_of_file.insert(file, self.reads.len());
                self.reads.push(Read {
                    file,
                    range: start..end,
                    wanted: vec![wanted],
                });
            }
        }
    }

    /// Performs the listed reads; threads share the chunks of all of them.
    fn perform(&mut self) -> Result<(), CkptError> {
        let reads = std::mem::take(&mut self.reads);
        self.last_of_file.clear();
        self.wanted = 0;

        let reader = self.reader;
        let bytes: u64 = reads.iter().map(|r| r.range.end - r.range.start).sum();
        // Short reads are faster through the page cache and on one thread.
        let is_short = bytes <= 2 * BLOCK_BYTES;
        let threads = if is_short { 1 } else { threads_for(bytes) };

        in_parallel(
            reads.into_iter().flat_map(Read::chunks),
            threads,
            |read, buffer| {
                let shard = reader.file(read.file)?;
                let file = shard.open_state(&reader.dir, !is_short, || reader.may_keep())?;
                let start = read.range.start;
                let mut queue = WantedQueue::new(read.wanted);
                shard.read(&file, &read.range, buffer, |bytes| {
                    let end = start + bytes.len() as u64;
                    while let Some(wanted) = queue.next_before(end) {
                        let bytes = &bytes[(wanted.start - start) as usize..];
                        wanted.encoding.decode(bytes, wanted.skip, wanted.out);
                    }
                })
            },
        )
    }
}

impl Reader {
    /// Reads elements `range` of the whole parameter `param` (row-major, flat) of `state` as fp32,
    /// which is exact.
    ///
    /// # Errors
    /// No such state or parameter, a range past its elements, a wrong length of `out`, a failed
    /// read or a wrong checksum.
    pub fn read_param(
        &self,
        state: &str,
        param: &str,
        range: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), CkptError> {
        let (id, placed) = self.param(param)?;
        check_range(param, placed.numel_elems, &range, out.len())?;
        let mut reads = ReadList::new(self, state, out)?;
        self.list(id, range, &mut reads)?;
        reads.finish()
    }

    /// Lists the reads of elements `range` of a whole parameter. The range must be within it.
    pub(crate) fn list(
        &self,
        id: ParamId,
        range: Range<u64>,
        reads: &mut ReadList<'_, '_>,
    ) -> Result<(), CkptError> {
        let Some(joined) = &self.joined else {
            let unit = &self.layout.units()[id.unit];
            let start = elems_of(unit, &unit.params[id.param]).start;
            return reads.elems(id.unit, start + range.start..start + range.end);
        };
        let stored = joined
            .stored(&self.layout, id, range)
            .map_err(|e| CkptError::argument("range of a parameter", "elements of its parts", e))?;
        for stored in stored {
            reads.elems(id.unit, stored)?;
        }
        Ok(())
    }
}

impl<'o> Read<'o> {
    /// Splits the read at chunk boundaries. A block of a format that a boundary splits is read with
    /// the later chunk. Chunks without wanted elements are left out.
    fn chunks(self) -> impl Iterator<Item = Read<'o>> {
        let mut queue = WantedQueue::new(self.wanted);
        let file = self.file;
        chunks_to_read(self.range).filter_map(move |chunk| {
            let mut wanted = Vec::new();
            while let Some(next) = queue.next_before(chunk.end) {
                wanted.push(next);
            }
            let start = wanted.first()?.start;
            let end = wanted.last()?.end();
            Some(Read {
                file,
                range: start..end,
                wanted,
            })
        })
    }
}

/// Wanted elements by ascending start, which are removed up to a position in the file.
struct WantedQueue<'o> {
    rest: std::vec::IntoIter<Wanted<'o>>,
    /// The next elements: those before `rest`, or the second part of split ones.
    next: Option<Wanted<'o>>,
}

impl<'o> WantedQueue<'o> {
    fn new(wanted: Vec<Wanted<'o>>) -> Self {
        Self {
            rest: wanted.into_iter(),
            next: None,
        }
    }

    /// Removes the next elements whose blocks are whole before byte `end`.
    fn next_before(&mut self, end: u64) -> Option<Wanted<'o>> {
        let next = self.next.take().or_else(|| self.rest.next())?;
        if next.end() <= end {
            return Some(next);
        }
        let blocks = end.saturating_sub(next.start) / next.encoding.block_bytes();
        if blocks == 0 {
            self.next = Some(next);
            return None;
        }
        let elems = blocks * next.encoding.block_elems() - next.skip as u64;
        let (out, later) = next.out.split_at_mut(elems as usize);
        self.next = Some(Wanted {
            start: next.start + blocks * next.encoding.block_bytes(),
            skip: 0,
            out: later,
            ..next
        });
        Some(Wanted { out, ..next })
    }
}

/// Removes the first elements of a slice.
fn take<'o>(slice: &mut &'o mut [f32], elems: u64) -> &'o mut [f32] {
    let (first, later) = std::mem::take(slice).split_at_mut(elems as usize);
    *slice = later;
    first
}
