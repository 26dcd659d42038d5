//! The sums of gradients over ranks in memory of the device, for the whole run.

use zero_alloc::device::{AnySlice, Device, Reduced, Stream};
use zero_comm::SumInto;

use crate::error::TrainError;
use crate::rank::Rank;
use crate::stages::storage::Storage;

/// All units whole at stages 0 and 1, this rank's shards at stages 2 and 3.
pub(crate) struct DeviceSums<D: Device> {
    storage: Storage<D>,
    /// The sum of each unit, without elements if the unit is frozen. A recorded step has those of
    /// its recording.
    reduced: Vec<Option<Reduced<D>>>,
    /// Whether a rank keeps its shard of a sum only.
    sharded: bool,
}

impl<D: Device> DeviceSums<D> {
    pub(crate) fn new(rank: &Rank<D>) -> Result<Self, TrainError> {
        let stage = rank.settings.stage;
        let storage = Storage::gradients(rank, !stage.shards_grads())?;
        let mut reduced = Vec::with_capacity(rank.units());
        for unit in 0..rank.units() {
            reduced.push(if rank.trains(unit) {
                None
            } else {
                // SAFETY: the slice has no elements.
                Some(unsafe { Reduced::new(storage.unit(unit), rank.compute.record()?) })
            });
        }
        Ok(Self {
            storage,
            reduced,
            sharded: stage.shards_optimizer(),
        })
    }

    /// The stored part of `unit`: all of it with its padding, or this rank's shard.
    pub(crate) fn unit(&self, unit: usize) -> AnySlice {
        self.storage.unit(unit)
    }

    /// This rank's shard of `unit`.
    pub(crate) fn shard(&self, unit: usize) -> AnySlice {
        self.storage.shard(unit)
    }

    /// The place of the sum of `unit`; if `adds`, the sum of earlier micro-batches.
    pub(crate) fn target(&mut self, unit: usize, adds: bool) -> SumInto<D> {
        match self.reduced[unit].take() {
            Some(earlier) if adds => SumInto::Add(earlier),
            _ if self.sharded => SumInto::Write(self.storage.shard(unit)),
            _ => SumInto::Write(self.storage.unit(unit)),
        }
    }

    pub(crate) fn store(&mut self, unit: usize, sum: Reduced<D>) -> &Reduced<D> {
        self.reduced[unit].insert(sum)
    }

    /// The sums of all units.
    pub(crate) fn reduced(&self) -> Vec<&Reduced<D>> {
        self.reduced.iter().flatten().collect()
    }
}
