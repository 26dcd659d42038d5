//! Saving while training goes on: a step stalls only for the copy of the state into host memory.
//!
//! A save is begun by copying this rank's state into the staging buffer (on the compute stream, so it is that of
//! after the step); a worker writes and syncs the file meanwhile. Every step the ranks tell one another
//! whether their files are there; when all are, the save is published. A failure surfaces there, on all ranks.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use zero_alloc::device::Device;
use zero_ckpt::{
    BackgroundStore, Published, SaveMeta, Slot, StateDtype, StateSpec, Store, StoreOptions, frame_bytes,
};
use zero_optim::StateKind;

use super::rank::Rank;
use super::stage::exchange_bytes;
use crate::error::TrainError;

/// Saves of one rank into one directory.
pub(super) struct Saver {
    background: BackgroundStore,
    dir: PathBuf,
    newest: Option<PathBuf>,
}

impl Saver {
    /// Opens `dir`, which must be the run's alone, and takes a staging buffer.
    pub(super) fn new<D: Device>(rank: &Rank<D>, dir: &Path, keep_last: Option<usize>) -> Result<Self, TrainError> {
        let options = StoreOptions { keep_last, ..StoreOptions::default() };
        let store = Store::create(dir, rank.comm.rank() as u64, options)?;
        let spec = |kind: StateKind| StateSpec { name: kind.name().to_owned(), dtype: StateDtype::F32 };
        let states = StateKind::ALL.map(spec).to_vec();
        let background = BackgroundStore::new(store, Arc::clone(&rank.layout), states, 1)?;
        Ok(Self { background, dir: dir.to_owned(), newest: None })
    }

    /// Begins a save, for which `copy` fills every slot; one that is still under way is completed first.
    pub(super) fn begin<D: Device>(
        &mut self,
        rank: &Rank<D>,
        meta: SaveMeta,
        copy: impl Fn(Slot<'_>) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        self.complete(rank)?;
        let begun = self.background.begin(meta, |slots| {
            slots.into_iter().try_for_each(copy).map_err(|e| e.to_string())?;
            Ok(Box::new(|| Ok(())))
        });
        Ok(begun?)
    }

    /// Whether a save is under way whose file is written on this rank, or has failed.
    pub(super) fn ready(&mut self) -> bool {
        self.background.ready()
    }

    /// Publishes the save that is under way, if one is; all ranks call it.
    pub(super) fn complete<D: Device>(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        if self.background.in_flight() == 0 {
            return Ok(());
        }
        let frame = frame_bytes(&rank.layout);
        let published: Published = self.background.complete(|bytes| {
            exchange_bytes(rank, bytes).map(|all| all.chunks_exact(frame).map(<[u8]>::to_vec).collect::<Vec<_>>())
        })?;
        for notice in &published.notices {
            tracing::warn!("checkpoint {}: {notice}", published.name);
        }
        self.newest = Some(self.dir.join(published.name));
        Ok(())
    }

    /// The newest checkpoint of this run.
    pub(super) fn newest(&self) -> Option<&Path> {
        self.newest.as_deref()
    }
}
