//! Flat storages of all units: whole (padded flat parameters end to end), or this rank's shards end
//! to end.

use std::ops::Range;

use zero_alloc::device::{AnySlice, DType, Device};
use zero_alloc::{Block, Purpose};

use crate::error::TrainError;
use crate::rank::Rank;

/// One allocation that holds a part of every unit, for the whole run.
pub(crate) struct Storage<D: Device> {
    block: Block<D>,
    /// The range of each unit's part.
    units: Vec<Range<usize>>,
    /// The range of this rank's shard of each unit.
    shards: Vec<Range<usize>>,
    /// The range of each unit that this rank updates.
    updated: Vec<Range<usize>>,
    streams: Vec<D::Stream>,
}

fn index(range: Range<u64>) -> Range<usize> {
    range.start as usize..range.end as usize
}

impl<D: Device> Storage<D> {
    /// All units whole, set to zero.
    pub(crate) fn whole(
        rank: &Rank<D>,
        dtype: DType,
        purpose: Purpose,
    ) -> Result<Self, TrainError> {
        let stored = |unit: usize| 0..rank.layout.units()[unit].padded_elems;
        Self::of_params(rank, dtype, purpose, stored)
    }

    /// This rank's shard of every unit, set to zero.
    pub(crate) fn shards(
        rank: &Rank<D>,
        dtype: DType,
        purpose: Purpose,
    ) -> Result<Self, TrainError> {
        Self::of_params(rank, dtype, purpose, |unit| rank.shard(unit))
    }

    /// The range `stored` of every unit, of which those in blocks have no elements.
    fn of_params(
        rank: &Rank<D>,
        dtype: DType,
        purpose: Purpose,
        stored: impl Fn(usize) -> Range<u64>,
    ) -> Result<Self, TrainError> {
        let mut units = Vec::new();
        let mut end = 0;
        for unit in 0..rank.units() {
            let stored = match rank.is_in_blocks(unit) {
                true => 0..0,
                false => index(stored(unit)),
            };
            units.push((end..end + stored.len(), stored.start));
            end += stored.len();
        }
        Self::new(rank, dtype, purpose, units, Rank::shard)
    }

    /// The gradients, set to zero: all units whole, or this rank's shard of each. Frozen units have
    /// no elements.
    pub(crate) fn gradients(rank: &Rank<D>, whole: bool) -> Result<Self, TrainError> {
        let mut units = Vec::new();
        let mut end = 0;
        for (i, unit) in rank.layout.units().iter().enumerate() {
            let stored = match (rank.trains(i), whole) {
                (false, _) => 0..0,
                (true, true) => 0..unit.padded_elems,
                (true, false) => rank.reduced(i),
            };
            let stored = index(stored);
            units.push((end..end + stored.len(), stored.start));
            end += stored.len();
        }
        let dtype = rank.settings.grad_dtype();
        Self::new(rank, dtype, Purpose::Grads, units, Rank::reduced)
    }

    /// `units`: the range of each unit's part in the storage, and the position of its first element
    /// in the unit. `shard`: what of a unit is this rank's shard.
    fn new(
        rank: &Rank<D>,
        dtype: DType,
        purpose: Purpose,
        units: Vec<(Range<usize>, usize)>,
        shard: fn(&Rank<D>, usize) -> Range<u64>,
    ) -> Result<Self, TrainError> {
        let elems = units.last().map_or(0, |(range, _)| range.end);
        let block = rank.pool.allocate(elems, dtype, purpose, &rank.compute)?;
        let within = |of: fn(&Rank<D>, usize) -> Range<u64>| {
            let place = |(unit, (range, first)): (usize, &(Range<usize>, usize))| {
                if range.is_empty() {
                    return range.clone();
                }
                let part = index(of(rank, unit));
                range.start + part.start - first..range.start + part.end - first
            };
            units.iter().enumerate().map(place).collect::<Vec<_>>()
        };
        let storage = Self {
            block,
            shards: within(shard),
            updated: within(Rank::held),
            units: units.into_iter().map(|(range, _)| range).collect(),
            streams: rank.streams(),
        };
        rank.pool.device().fill_zero(&rank.compute, storage.all())?;
        Ok(storage)
    }

    fn all(&self) -> AnySlice {
        // SAFETY: the rank's streams use the storage, ordered by the stage's events; the drop
        // records them. If the host updates, so does the optimizer's, which stages declare before
        // their storages: its drop waits for that stream.
        unsafe { self.block.slice() }
    }

    /// The stored part of `unit`: all of it with its padding, or this rank's shard.
    pub(crate) fn unit(&self, unit: usize) -> AnySlice {
        self.all().slice(self.units[unit].clone())
    }

    /// The flat parameter of `unit`, without its padding; the storage holds whole units.
    pub(crate) fn used(&self, rank: &Rank<D>, unit: usize) -> AnySlice {
        self.unit(unit).slice(0..rank.used_elems(unit))
    }

    /// This rank's shard of `unit`, or all of it at stage 0.
    pub(crate) fn shard(&self, unit: usize) -> AnySlice {
        self.all().slice(self.shards[unit].clone())
    }

    /// The elements of each unit that this rank updates: its shard, or a part of it.
    pub(crate) fn all_updated(&self) -> Vec<AnySlice> {
        let updated = self.updated.iter().cloned();
        updated.map(|range| self.all().slice(range)).collect()
    }
}

impl<D: Device> Drop for Storage<D> {
    fn drop(&mut self) {
        for stream in &self.streams {
            // Recording fails only on a closed stream, which no longer uses the block.
            let _closed = self.block.record_use(stream);
        }
    }
}
