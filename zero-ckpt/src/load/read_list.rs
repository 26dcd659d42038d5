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

use crate::format::blocks::BLOCK_BYTES;
use crate::format::tensor_folder::check_range;
use crate::io::parallel::{chunks_to_read, in_parallel, threads_for};
use crate::{CkptError, Reader, StateDtype};

/// Wanted pieces after which the reads listed so far are performed: bounds the memory of a list to
/// about 10 MB, also if every element is a separate piece.
const MAX_WANTED: usize = 1 << 18;

/// Reads of stored elements of one state into a slice, which is filled from its start to its end.
pub(crate) struct ReadList<'r, 'o> {
    reader: &'r Reader,
    /// Index of the state.
    state: usize,
    dtype: StateDtype,
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
    /// Start in the state bytes of the file.
    start: u64,
    out: &'o mut [f32],
}

impl<'r, 'o> ReadList<'r, 'o> {
    /// An empty list of reads of `state` into `out`.
    pub(crate) fn new(
        reader: &'r Reader,
        state: &str,
        out: &'o mut [f32],
    ) -> Result<Self, CkptError> {
        let (state, dtype) = reader.state(state)?;
        Ok(Self {
            reader,
            state,
            dtype,
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
        for (held, part) in reader.coverage.find(unit, range) {
            let layout = &reader.file(held.file)?.layout;
            let tensor = layout.tensor_range(self.state, held.piece).start;
            let start = tensor + (part.start - held.start) * self.dtype.bytes();
            let out = take(&mut self.out, part.end - part.start);
            self.list(held.file, Wanted { start, out });
        }
        if self.wanted >= MAX_WANTED {
            self.perform()?;
        }
        Ok(())
    }

    /// Adds elements to the last read of the file if they are behind it, by less than a block.
    fn list(&mut self, file: usize, wanted: Wanted<'o>) {
        let start = wanted.start;
        let end = start + wanted.out.len() as u64 * self.dtype.bytes();
        self.wanted += 1;

        let last = self.last_of_file.get(&file).copied();
        let last = last.and_then(|last| self.reads.get_mut(last));
        match last.filter(|read| (read.range.end..read.range.end + BLOCK_BYTES).contains(&start)) {
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
        let width = self.dtype.bytes();
        let bytes: u64 = reads.iter().map(|r| r.range.end - r.range.start).sum();
        // Short reads are faster through the page cache and on one thread.
        let is_short = bytes <= 2 * BLOCK_BYTES;
        let threads = if is_short { 1 } else { threads_for(bytes) };

        in_parallel(
            reads.into_iter().flat_map(|read| read.chunks(width)),
            threads,
            |read, buffer| {
                let shard = reader.file(read.file)?;
                let file = shard.open_state(&reader.dir, !is_short, || reader.may_keep())?;
                let mut at = read.range.start;
                let mut wanted = WantedQueue::new(read.wanted, width);
                shard.read(&file, &read.range, buffer, |bytes| {
                    let end = at + bytes.len() as u64;
                    while let Some(Wanted { start, out }) = wanted.next_before(end) {
                        let first = (start - at) as usize;
                        let last = first + out.len() * width as usize;
                        self.dtype.widen(&bytes[first..last], out);
                    }
                    at = end;
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
            let start = self.layout.units()[id.unit].params[id.param].offset_elems;
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
    /// Splits the read at chunk boundaries; elements are aligned, so none is split. Chunks without
    /// wanted elements are left out.
    fn chunks(self, width: u64) -> impl Iterator<Item = Read<'o>> {
        let mut queue = WantedQueue::new(self.wanted, width);
        let file = self.file;
        chunks_to_read(self.range).filter_map(move |chunk| {
            let mut wanted = Vec::new();
            while let Some(next) = queue.next_before(chunk.end) {
                wanted.push(next);
            }
            let start = wanted.first()?.start;
            let end = wanted.last()?;
            let end = end.start + end.out.len() as u64 * width;
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
    /// Bytes of an element in the file.
    width: u64,
}

impl<'o> WantedQueue<'o> {
    fn new(wanted: Vec<Wanted<'o>>, width: u64) -> Self {
        Self {
            rest: wanted.into_iter(),
            next: None,
            width,
        }
    }

    /// Removes the next elements before byte `end`, which is between two elements.
    fn next_before(&mut self, end: u64) -> Option<Wanted<'o>> {
        let next = self.next.take().or_else(|| self.rest.next())?;
        if next.start >= end {
            self.next = Some(next);
            return None;
        }
        let elems = (end - next.start) / self.width;
        let elems = next.out.len().min(elems as usize);
        let (out, later) = next.out.split_at_mut(elems);
        if !later.is_empty() {
            self.next = Some(Wanted {
                start: end,
                out: later,
            });
        }
        Some(Wanted {
            start: next.start,
            out,
        })
    }
}

/// Removes the first elements of a slice.
fn take<'o>(slice: &mut &'o mut [f32], elems: u64) -> &'o mut [f32] {
    let (first, later) = std::mem::take(slice).split_at_mut(elems as usize);
    *slice = later;
    first
}
