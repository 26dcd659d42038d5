//! Parameters that every rank holds whole while each updates only its shard: stages 1 and 2.
//!
//! After a step the shards are gathered unit by unit on the communication stream; the next forward
//! waits for each unit just before its first use, so that the gather overlaps the forward of
//! earlier units.
//!
//! If the host updates, a unit is gathered when a forward needs it, so that every rank enqueues its
//! collectives in the order of the passes.

use zero_alloc::Purpose;
use zero_alloc::device::{AnySlice, Device, Stream};

use crate::error::TrainError;
use crate::offload::host_params::SharedParams;
use crate::rank::Rank;
use crate::stages::storage::Storage;

/// All parameters of one rank.
pub(crate) struct WholeParams<D: Device> {
    storage: Storage<D>,
    /// The completion of each unit's gather, until a forward has waited for it.
    gathers: Vec<Option<D::Event>>,
    /// The parameters that the host updates, if it does: units are then gathered when a forward
    /// needs them.
    updates: Option<SharedParams<D>>,
}

impl<D: Device> WholeParams<D> {
    pub(crate) fn new(rank: &Rank<D>) -> Result<Self, TrainError> {
        let storage = Storage::whole(rank, rank.settings.dtype, Purpose::Params)?;
        Ok(Self {
            storage,
            gathers: (0..rank.units()).map(|_| None).collect(),
            updates: None,
        })
    }

    /// Takes the parameters that the host updates.
    pub(crate) fn set_updates(&mut self, updates: Option<SharedParams<D>>) {
        self.updates = updates;
    }

    /// The flat parameters of `units`. The compute stream waits for their gathers.
    pub(crate) fn of(
        &mut self,
        rank: &Rank<D>,
        units: &[usize],
    ) -> Result<Vec<AnySlice>, TrainError> {
        self.gather_updated(rank, units.iter().copied())?;
        for event in units.iter().filter_map(|&unit| self.gathers[unit].take()) {
            rank.compute.wait(&event)?;
        }
        Ok(self.gathered(rank, units))
    }

    /// The flat parameters of `units`, whose gathers the compute stream has waited for.
    pub(crate) fn gathered(&self, rank: &Rank<D>, units: &[usize]) -> Vec<AnySlice> {
        self.storage.of(rank, units)
    }

    /// The elements of each unit that this rank updates.
    pub(crate) fn updated(&self) -> Vec<AnySlice> {
        self.storage.all_updated()
    }

    /// Makes the compute stream wait for all gathers, so that the parameters may be written.
    pub(crate) fn wait(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        for event in self.gathers.iter_mut().filter_map(Option::take) {
            rank.compute.wait(&event)?;
        }
        Ok(())
    }

    /// Gathers those of `units` that the host has updated since their last gather.
    pub(crate) fn gather_updated(
        &mut self,
        rank: &Rank<D>,
        units: impl Iterator<Item = usize>,
    ) -> Result<(), TrainError> {
        let Some(updates) = self.updates.clone() else {
            return Ok(());
        };
        for unit in units {
            if updates.lock().deliver(&rank.comm_stream, unit)? {
                let shard = self.whole_shard(rank, unit, &rank.comm_stream.record()?)?;
                self.gather(rank, unit, shard)?;
            }
        }
        Ok(())
    }

    /// Gathers the units that `changed` from the ranks' shards, in the order of the next forward.
    pub(crate) fn all_gather(
        &mut self,
        rank: &Rank<D>,
        changed: impl Fn(usize) -> bool,
    ) -> Result<(), TrainError> {
        rank.comm_stream.wait(&rank.compute.record()?)?;
        let changed: Vec<usize> = (0..rank.units()).filter(|&unit| changed(unit)).collect();
        if let Some(updates) = &self.updates {
            let mut updates = updates.lock();
            changed
                .iter()
                .try_for_each(|&unit| updates.deliver(&rank.comm_stream, unit).map(drop))?;
        }

        // All replicas' gathers are enqueued first: those within the groups overlap them.
        let updated = rank.comm_stream.record()?;
        let whole_shard = |&unit| self.whole_shard(rank, unit, &updated);
        let shards: Vec<_> = changed.iter().map(whole_shard).collect::<Result<_, _>>()?;
        changed
            .into_iter()
            .zip(shards)
            .try_for_each(|(unit, shard)| self.gather(rank, unit, shard))
    }

    /// Gathers the shard of `unit` from the replicas, if each updates a part of it. Returns the
    /// event after which it is whole; `updated` is the last write.
    fn whole_shard(
        &self,
        rank: &Rank<D>,
        unit: usize,
        updated: &D::Event,
    ) -> Result<Option<D::Event>, TrainError> {
        let replicas = rank.mesh.sharing_update();
        let whole = replicas.map(|replicas| replicas.gather(updated, self.storage.shard(unit)));
        Ok(whole.transpose()?)
    }

    /// Gathers a unit from shards that are whole after `shard`.
    fn gather(
        &mut self,
        rank: &Rank<D>,
        unit: usize,
        shard: Option<D::Event>,
    ) -> Result<(), TrainError> {
        if let Some(shard) = shard {
            rank.comm_stream.wait(&shard)?;
        }
        let shard = self.storage.shard(unit);
        let whole = self.storage.unit(unit);
        let group = &rank.mesh.params;
        group.all_gather(&rank.comm_stream, shard, whole)?;
        let event = rank.comm_stream.record()?;
        if !rank.settings.overlap {
            rank.compute.wait(&event)?;
        }
        self.gathers[unit] = Some(event);
        Ok(())
    }
}
