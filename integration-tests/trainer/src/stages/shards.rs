//! The parameters of a rank of stage 3: its shard of each unit, as a gather gets it.
//!
//! | parameters | updated by | a gather of the group waits for |
//! |---|---|---|
//! | on the device | the device | the update |
//! | on the device | the host | the update, and the copy to the device |
//! | offloaded | the host | the update, and the copy into the gathered unit |
//!
//! If each replica updates a part of the shard, the parts are then gathered from the replicas: at
//! once after an update of the device, else when a gather of the group needs them. Offloaded
//! parameters are gathered from the replicas before each gather of the group.

use std::sync::Arc;

use parking_lot::Mutex;
use zero_alloc::Purpose;
use zero_alloc::device::{AnySlice, DType, Device, Stream};
use zero_comm::{OwnShard, PrefetchError, ShardSource};

use crate::error::TrainError;
use crate::mesh::Replicas;
use crate::offload::host_params::SharedParams;
use crate::offload::settings::Home;
use crate::rank::Rank;
use crate::stages::frozen::FrozenUnits;
use crate::stages::storage::Storage;

/// The shards of one rank.
pub(crate) struct Shards<D: Device> {
    /// The shards, unless they are offloaded.
    storage: Option<Storage<D>>,
    /// The parameters that the host updates, if it does.
    updates: Option<SharedParams<D>>,
    /// The replicas, if each updates a part of the shard.
    replicas: Option<Replicas<D>>,
    frozen: Option<Arc<FrozenUnits<D>>>,
    /// The event after which each shard is whole, until a gather has waited for it.
    whole: Vec<Option<D::Event>>,
    shard_elems: Vec<usize>,
    dtype: DType,
}

/// The shards, as updates and gathers share them.
pub(crate) struct SharedShards<D: Device>(Arc<Mutex<Shards<D>>>);

impl<D: Device> Clone for SharedShards<D> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<D: Device> SharedShards<D> {
    pub(crate) fn new(rank: &Rank<D>) -> Result<Self, TrainError> {
        let on_device = match rank.settings.offload.params {
            Home::Device => true,
            Home::Host => rank.is_host(),
            Home::Nvme(_) => false,
        };
        let storage = || Storage::shards(rank, rank.settings.dtype, Purpose::Params);
        let units = rank.layout.units().iter();
        let shards = Shards {
            storage: on_device.then(storage).transpose()?,
            updates: None,
            replicas: rank.mesh.sharing_update().cloned(),
            frozen: rank.frozen.clone(),
            whole: (0..rank.units()).map(|_| None).collect(),
            shard_elems: units.map(|unit| unit.shard_elems as usize).collect(),
            dtype: rank.settings.dtype,
        };
        Ok(Self(Arc::new(Mutex::new(shards))))
    }

    /// The elements of each unit that this rank updates, if the device has them.
    pub(crate) fn updated(&self) -> Option<Vec<AnySlice>> {
        self.0.lock().storage.as_ref().map(Storage::all_updated)
    }

    /// Takes the parameters that the host updates.
    pub(crate) fn set_updates(&self, updates: Option<SharedParams<D>>) {
        self.0.lock().updates = updates;
    }

    /// The shard of each unit, if the device has them and other ranks have the same, or a part of it.
    /// The compute stream waits for them. Replicas that gather encoded parts have the exact values
    /// of their part and decoded ones of the others, so they are left out.
    pub(crate) fn of_replicas(&self, rank: &Rank<D>) -> Result<Vec<AnySlice>, TrainError> {
        let has_codec = rank.settings.gather_codec.is_some();
        let differ = has_codec && rank.mesh.sharing_update().is_some();
        if differ || rank.mesh.replicas.is_none() && rank.tensor.is_none() {
            return Ok(Vec::new());
        }
        let mut shards = self.0.lock();
        let units = shards.storage.as_ref().map_or(0, |_| rank.units());
        let shards: Vec<_> = (0..units)
            .map(|unit| shards.deliver(&rank.comm_stream, unit))
            .collect::<Result<_, _>>()?;
        rank.compute.wait(&rank.comm_stream.record()?)?;
        Ok(shards.into_iter().flatten().collect())
    }

    /// Makes the compute stream wait for the replicas' gathers, so that shards may be written.
    pub(crate) fn wait_for_gathers(&self, rank: &Rank<D>) -> Result<(), TrainError> {
        let shards = &mut *self.0.lock();
        for whole in shards.whole.iter_mut().filter_map(Option::take) {
            rank.compute.wait(&whole)?;
        }
        Ok(())
    }

    /// Gathers the shards that `changed` on the device from the replicas, in the order of the next
    /// forward.
    pub(crate) fn gather(
        &self,
        rank: &Rank<D>,
        changed: impl Fn(usize) -> bool,
    ) -> Result<(), TrainError> {
        let shards = &mut *self.0.lock();
        let (Some(replicas), Some(storage), None) =
            (&shards.replicas, &shards.storage, &shards.updates)
        else {
            return Ok(());
        };

        let updated = rank.compute.record()?;
        let changed = |&unit: &usize| changed(unit) && !rank.is_in_blocks(unit);
        for unit in (0..rank.units()).filter(changed) {
            let whole = replicas.gather(&updated, storage.shard(unit))?;
            shards.whole[unit] = Some(whole);
        }
        Ok(())
    }
}

impl<D: Device> Shards<D> {
    /// The shard of `unit` for operations on `stream`; `None` if it is offloaded.
    fn deliver(
        &mut self,
        stream: &D::Stream,
        unit: usize,
    ) -> Result<Option<AnySlice>, PrefetchError> {
        let Some(storage) = &self.storage else {
            return Ok(None);
        };
        let shard = storage.shard(unit);
        if let Some(updates) = &self.updates
            && updates.lock().deliver(stream, unit)?
            && let Some(replicas) = &self.replicas
        {
            stream.wait(&replicas.gather(&stream.record()?, shard)?)?;
        }
        if let Some(whole) = self.whole[unit].take() {
            stream.wait(&whole)?;
        }
        Ok(Some(shard))
    }
}

impl<D: Device> ShardSource<D> for SharedShards<D> {
    unsafe fn gather(
        &mut self,
        comm_stream: &D::Stream,
        unit: usize,
        whole: AnySlice,
    ) -> Result<bool, PrefetchError> {
        match &self.0.lock().frozen {
            Some(frozen) => Ok(frozen.decode(comm_stream, unit, whole)?),
            None => Ok(false),
        }
    }

    fn dtype(&self, _unit: usize) -> DType {
        self.0.lock().dtype
    }

    fn shard_elems(&self) -> Vec<usize> {
        self.0.lock().shard_elems.clone()
    }

    fn fetch(
        &mut self,
        comm_stream: &D::Stream,
        unit: usize,
        own: OwnShard<'_>,
    ) -> Result<Option<AnySlice>, PrefetchError> {
        let mut shards = self.0.lock();
        if let Some(shard) = shards.deliver(comm_stream, unit)? {
            return Ok(Some(shard));
        }
        let Some(updates) = &shards.updates else {
            return Ok(None);
        };
        // SAFETY: used by copies on `comm_stream`, and by a gather on another stream, which waits
        // for it before and which it waits for afterwards.
        let own = unsafe { own.slice() };
        let Some(replicas) = &shards.replicas else {
            return Ok(updates.lock().fetch(comm_stream, unit, own)?);
        };

        // Always a copy into `part`: the device has no other memory for it.
        let part = replicas.part_of(own);
        updates.lock().fetch(comm_stream, unit, part)?;
        comm_stream.wait(&replicas.gather(&comm_stream.record()?, own)?)?;
        Ok(None)
    }
}
