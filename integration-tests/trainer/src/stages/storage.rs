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
    own: Vec<Range<usize>>,
    streams: [D::Stream; 2],
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
        let layout = &rank.layout;
        let index_of_rank = rank.comm.rank() as u64;
        let units = layout
            .units()
            .iter()
            .map(|u| index(u.whole_range()))
            .collect();
        let own = |unit| layout.own_in_whole(unit, index_of_rank).map(index);
        let own = (0..rank.units()).map(own).collect::<Result<_, _>>()?;
        Self::new(
            rank,
            layout.padded_elems() as usize,
            dtype,
            purpose,
            units,
            own,
        )
    }

    /// This rank's shard of every unit, set to zero.
    pub(crate) fn shards(
        rank: &Rank<D>,
        dtype: DType,
        purpose: Purpose,
    ) -> Result<Self, TrainError> {
        let layout = &rank.layout;
        let units: Vec<_> = layout
            .units()
            .iter()
            .map(|u| index(u.shard_range()))
            .collect();
        Self::new(
            rank,
            layout.shard_elems() as usize,
            dtype,
            purpose,
            units.clone(),
            units,
        )
    }

    /// The gradients, set to zero: all units whole, or this rank's shard of each. Frozen units have
    /// no elements.
    pub(crate) fn gradients(rank: &Rank<D>, whole: bool) -> Result<Self, TrainError> {
        let mut units = Vec::new();
        let mut own = Vec::new();
        let mut end = 0;
        for (i, unit) in rank.layout.units().iter().enumerate() {
            let (len, shard) = match (rank.trains(i), whole) {
                (false, _) => (0, 0..0),
                (true, true) => (
                    unit.padded_elems as usize,
                    index(unit.shard(rank.comm.rank() as u64)),
                ),
                (true, false) => (unit.shard_elems as usize, 0..unit.shard_elems as usize),
            };
            units.push(end..end + len);
            own.push(end + shard.start..end + shard.end);
            end += len;
        }

        Self::new(
            rank,
            end,
            rank.settings.grad_dtype(),
            Purpose::Grads,
            units,
            own,
        )
    }

    fn new(
        rank: &Rank<D>,
        elems: usize,
        dtype: DType,
        purpose: Purpose,
        units: Vec<Range<usize>>,
        own: Vec<Range<usize>>,
    ) -> Result<Self, TrainError> {
        let block = rank.pool.allocate(elems, dtype, purpose, &rank.compute)?;
        let storage = Self {
            block,
            units,
            own,
            streams: [rank.compute.clone(), rank.comm_stream.clone()],
        };
        rank.pool.device().fill_zero(&rank.compute, storage.all())?;
        Ok(storage)
    }

    fn all(&self) -> AnySlice {
        // SAFETY: the rank's two streams use the storage, ordered by the stage's events; the drop
        // records both. If the host updates, so does the optimizer's, which stages declare before
        // their storages: its drop waits for that stream.
        unsafe { self.block.slice() }
    }

    /// The stored part of `unit`: all of it with its padding, or this rank's shard.
    pub(crate) fn unit(&self, unit: usize) -> AnySlice {
        self.all().slice(self.units[unit].clone())
    }

    /// The flat parameters of `units`, without their padding; the storage holds whole units.
    pub(crate) fn of(&self, rank: &Rank<D>, units: &[usize]) -> Vec<AnySlice> {
        units
            .iter()
            .map(|&unit| self.unit(unit).slice(0..rank.numel(unit)))
            .collect()
    }

    /// This rank's shard of `unit`.
    pub(crate) fn own(&self, unit: usize) -> AnySlice {
        self.all().slice(self.own[unit].clone())
    }

    /// [`Self::unit`] of all units.
    pub(crate) fn all_units(&self) -> Vec<AnySlice> {
        (0..self.units.len()).map(|u| self.unit(u)).collect()
    }

    /// [`Self::own`] of all units.
    pub(crate) fn all_own(&self) -> Vec<AnySlice> {
        (0..self.units.len()).map(|u| self.own(u)).collect()
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
