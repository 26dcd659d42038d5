//! Parameters that every rank holds whole: stages 0 to 2. At stages 1 and 2 each rank updates only
//! its shard.
//!
//! After a step the shards are gathered unit by unit on the communication stream; the next forward
//! waits for each unit just before its first use, so that the gather overlaps the forward of
//! earlier units.
//!
//! If the host updates, a unit is gathered when a forward needs it, so that every rank enqueues its
//! collectives in the order of the passes.

use zero_alloc::device::{AnySlice, Device, Stream};
use zero_alloc::{Block, Purpose};

use crate::error::TrainError;
use crate::offload::host_params::SharedParams;
use crate::rank::Rank;
use crate::stages::storage::Storage;

/// All parameters of one rank.
pub(crate) struct WholeParams<D: Device> {
    storage: Storage<D>,
    /// Whether each rank updates only its shard, which the others gather.
    is_gathered: bool,
    /// This rank's shards, if a codec changes what is gathered.
    shards: Option<Storage<D>>,
    /// The completion of each unit's gather, until a forward has waited for it.
    gathers: Vec<Option<D::Event>>,
    /// The parameters that the host updates, if it does: units are then gathered when a forward
    /// needs them.
    updates: Option<SharedParams<D>>,
    /// Frozen units in blocks, decoded for the pass that was enqueued last.
    decoded: Vec<Block<D>>,
    compute: D::Stream,
}

impl<D: Device> WholeParams<D> {
    pub(crate) fn new(rank: &Rank<D>) -> Result<Self, TrainError> {
        let dtype = rank.settings.dtype;
        let is_gathered = rank.settings.stage.shards_optimizer();
        let has_codec = is_gathered && rank.settings.gather_codec.is_some();
        let shards = has_codec.then(|| Storage::shards(rank, dtype, Purpose::Params));
        Ok(Self {
            storage: Storage::whole(rank, dtype, Purpose::Params)?,
            is_gathered,
            shards: shards.transpose()?,
            gathers: (0..rank.units()).map(|_| None).collect(),
            updates: None,
            decoded: Vec::new(),
            compute: rank.compute.clone(),
        })
    }

    /// Takes the parameters that the host updates.
    pub(crate) fn set_updates(&mut self, updates: Option<SharedParams<D>>) {
        self.updates = updates;
    }

    /// The flat parameters of `units`. The compute stream waits for their updates and gathers.
    pub(crate) fn wait_for(
        &mut self,
        rank: &Rank<D>,
        units: &[usize],
    ) -> Result<Vec<AnySlice>, TrainError> {
        self.gather_updated(rank, units)?;
        for event in units.iter().filter_map(|&unit| self.gathers[unit].take()) {
            rank.compute.wait(&event)?;
        }
        self.gathered(rank, units)
    }

    /// The flat parameters of `units`, whose gathers the compute stream has waited for, until the
    /// next call.
    pub(crate) fn gathered(
        &mut self,
        rank: &Rank<D>,
        units: &[usize],
    ) -> Result<Vec<AnySlice>, TrainError> {
        self.free_decoded()?;
        let of_unit = |&unit: &usize| match &rank.frozen {
            Some(frozen) if frozen.has(unit) => {
                let elems = rank.layout.units()[unit].padded_elems as usize;
                let dtype = rank.settings.dtype;
                let block = rank
                    .pool
                    .allocate(elems, dtype, Purpose::Buckets, &rank.compute)?;
                // SAFETY: only the compute stream uses it; it is recorded before it is dropped.
                let whole = unsafe { block.slice() };
                self.decoded.push(block);
                frozen.decode(&rank.compute, unit, whole)?;
                Ok(whole.slice(0..rank.used_elems(unit)))
            }
            _ => Ok(self.storage.used(rank, unit)),
        };
        units.iter().map(of_unit).collect()
    }

    /// Frees what the last pass read, behind that pass.
    fn free_decoded(&mut self) -> Result<(), TrainError> {
        for mut block in self.decoded.drain(..) {
            block.record_use(&self.compute)?;
        }
        Ok(())
    }

    /// The memory of each unit, which every rank has.
    pub(crate) fn stored(&self, rank: &Rank<D>) -> Vec<AnySlice> {
        let frozen = rank.frozen.as_ref();
        let stored = |unit| frozen.and_then(|frozen| frozen.stored(unit));
        let units = 0..rank.units();
        units
            .map(|unit| stored(unit).unwrap_or_else(|| self.storage.used(rank, unit)))
            .collect()
    }

    /// The elements of each unit that this rank updates.
    pub(crate) fn updated(&self) -> Vec<AnySlice> {
        self.shards.as_ref().unwrap_or(&self.storage).all_updated()
    }

    /// This rank's shard of `unit`, before its gather.
    fn shard(&self, unit: usize) -> AnySlice {
        self.shards.as_ref().unwrap_or(&self.storage).shard(unit)
    }

    /// Makes the compute stream wait for all gathers, so that the parameters may be written.
    pub(crate) fn wait_for_gathers(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        for event in self.gathers.iter_mut().filter_map(Option::take) {
            rank.compute.wait(&event)?;
        }
        Ok(())
    }

    /// Makes later gathers wait for what is enqueued on the compute stream.
    pub(crate) fn hold_gathers(&self, rank: &Rank<D>) -> Result<(), TrainError> {
        if self.is_gathered {
            rank.comm_stream.wait(&rank.compute.record()?)?;
        }
        Ok(())
    }

    /// Makes the compute stream wait for what is enqueued on the communication stream.
    pub(crate) fn hold_compute(&self, rank: &Rank<D>) -> Result<(), TrainError> {
        // Not for the events of the gathers: the next step waits for those, and a recorded gather's
        // cannot be waited for.
        if self.is_gathered {
            rank.compute.wait(&rank.comm_stream.record()?)?;
        }
        Ok(())
    }

    /// Gathers those of `units` that the host has updated since their last gather.
    pub(crate) fn gather_updated(
        &mut self,
        rank: &Rank<D>,
        units: &[usize],
    ) -> Result<(), TrainError> {
        let Some(updates) = self.updates.clone() else {
            return Ok(());
        };
        let reader = match self.is_gathered {
            true => &rank.comm_stream,
            false => &rank.compute,
        };
        for &unit in units {
            if updates.lock().deliver(reader, unit)? && self.is_gathered {
                let shard = self.whole_shard(rank, unit, &rank.comm_stream.record()?)?;
                self.gather(rank, unit, shard)?;
            }
        }
        Ok(())
    }

    /// Gathers the units that `changed` from the ranks' shards, if each updates only its own, in
    /// the order of the next forward.
    pub(crate) fn all_gather(
        &mut self,
        rank: &Rank<D>,
        changed: impl Fn(usize) -> bool,
    ) -> Result<(), TrainError> {
        if !self.is_gathered {
            return Ok(());
        }
        self.hold_gathers(rank)?;
        let changed = |&unit: &usize| changed(unit) && !rank.is_in_blocks(unit);
        let changed: Vec<usize> = (0..rank.units()).filter(changed).collect();
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
        let whole = replicas.map(|replicas| replicas.gather(updated, self.shard(unit)));
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
        let comm_stream = &rank.comm_stream;
        let gather = &rank.mesh.gather;
        gather.enqueue(comm_stream, self.shard(unit), self.storage.unit(unit))?;
        self.gathers[unit] = Some(comm_stream.record()?);
        Ok(())
    }
}

impl<D: Device> Drop for WholeParams<D> {
    fn drop(&mut self) {
        // Recording fails only on a closed stream, which no longer uses the blocks.
        let _closed = self.free_decoded();
    }
}
