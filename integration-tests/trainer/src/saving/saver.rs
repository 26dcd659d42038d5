//! Saving in the background: training waits only for the copy of the state into host memory.
//!
//! A save starts by copying this rank's state into the staging buffer, on the compute stream and so
//! after the step. A worker writes and syncs the file. In every step the ranks exchange whether
//! they are ready to advance the save. When all are, the save advances without waiting for a disk;
//! a failure is reported then, on all ranks.
//!
//! State on NVMe is not copied, which would take as much memory as all of it: training waits while
//! it is streamed into the file, a few MB of one kind at a time.
//!
//! While a rank writes or rank 0 publishes, waiting ranks exchange that there is progress, so that
//! no collective waits for a disk. Old checkpoints are deleted after the result is sent, on a
//! thread of rank 0.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use zero_alloc::device::Device;
use zero_ckpt::{
    BackgroundStore, CkptError, ModelSpec, PublishedCheckpoint, SaveMeta, StagingSlice, StateDtype,
    StateSpec, Store, StoreOptions,
};
use zero_optim::{StateArrays, StateKind};

use crate::error::TrainError;
use crate::rank::Rank;
use crate::rank_exchange::RankExchange;
use crate::stages::grad_errors::SavedErrors;

/// Saves of one rank into one directory.
pub(crate) struct Saver {
    store: Saves,
    dir: PathBuf,
    newest: Option<PathBuf>,
    best: Option<PathBuf>,
}

enum Saves {
    Background(BackgroundStore),
    Streamed(Store),
}

fn states<D: Device>(rank: &Rank<D>) -> Vec<StateSpec> {
    let kinds = rank.settings.state_kinds(rank.groups.has_matrices());
    let spec = |(kind, arrays): (StateKind, StateArrays)| {
        StateSpec::new(kind.name(), arrays.encoding(kind))
    };
    let errors = SavedErrors::of(rank);
    let of_errors = errors.iter().flat_map(|errors| errors.names());
    let of_errors = of_errors.map(|name| StateSpec::new(name, StateDtype::F32));
    kinds.into_iter().map(spec).chain(of_errors).collect()
}

/// The error of the rank that failed as [`CkptError::Rank`], which the launcher reports as that
/// rank's, also where this rank adds where its file is kept; others as they are. zero-ckpt names a
/// rank by its shard.
fn of_shard<D: Device>(rank: &Rank<D>, error: CkptError) -> CkptError {
    let rank_of = |shard| rank.rank_of_shard(shard);
    let text = error.to_string();
    let cause = match &error {
        CkptError::Kept { error: cause, .. } => cause,
        _ => &error,
    };
    match *cause {
        CkptError::Rank { rank: shard, .. } => {
            let message = text.strip_prefix(&format!("rank {shard}: "));
            CkptError::Rank {
                rank: rank_of(shard),
                message: message.unwrap_or(&text).to_owned(),
            }
        }
        CkptError::NotShared {
            rank: shard,
            ref message,
        } => CkptError::NotShared {
            rank: rank_of(shard),
            message: message.clone(),
        },
        _ => error,
    }
}

impl Saver {
    /// Opens `dir`, which all ranks must share and which must not hold checkpoints of other runs,
    /// and allocates a staging buffer. Collective: a wrong directory fails on all ranks at the
    /// start of training and not at the first save.
    pub(crate) fn new<D: Device>(
        rank: &Rank<D>,
        dir: &Path,
        options: StoreOptions,
    ) -> Result<Self, TrainError> {
        let options = options.stall_limit(rank.settings.limit);
        let layout = &rank.saved;
        let model = match &rank.tensor {
            Some(tensor) => ModelSpec {
                units: tensor.whole.clone(),
            },
            None => ModelSpec::from(&**layout),
        };
        let check =
            move |store: &Store| store.check_runs().and_then(|()| store.check_model(&model));
        let exchange = &mut RankExchange::of_shards(rank);
        let store = Store::create_on_ranks(dir, rank.saved_shard(), options, exchange, check)
            .map_err(|error| of_shard(rank, error))?;
        for notice in store.take_notices() {
            tracing::warn!("checkpoints in {}: {notice}", dir.display());
        }

        let store = match rank.settings.offload.uses_nvme() {
            true => Saves::Streamed(store),
            false => Saves::Background(BackgroundStore::new(
                store,
                Arc::clone(layout),
                states(rank),
                1,
            )?),
        };

        Ok(Self {
            store,
            dir: dir.to_owned(),
            newest: None,
            best: None,
        })
    }

    /// Bytes of the staging buffer, in host memory.
    pub(crate) fn staging_bytes(&self) -> u64 {
        self.background()
            .map_or(0, |background| background.staging_bytes())
    }

    /// Begins a save; `copy` fills every slot. A save in progress is completed first.
    pub(crate) fn begin<D: Device>(
        &mut self,
        rank: &Rank<D>,
        meta: SaveMeta,
        mut copy: impl FnMut(StagingSlice<'_>) -> Result<(), TrainError> + Send,
    ) -> Result<(), TrainError> {
        self.complete(rank)?;
        match &mut self.store {
            Saves::Background(background) => Ok(background.begin(meta, |slots| {
                slots
                    .into_iter()
                    .try_for_each(copy)
                    .map_err(|e| e.to_string())?;
                Ok(Box::new(|| Ok(())))
            })?),
            Saves::Streamed(store) => {
                let fill = |slot: StagingSlice<'_>| copy(slot).map_err(|e| e.to_string());
                let layout = &rank.saved;
                let stage = || store.stage_streamed(meta.step, layout, states(rank), fill);
                let exchange = &mut RankExchange::of_shards(rank);
                let published = store.save_with(&meta, layout, stage, exchange);
                let published = published.map_err(|error| of_shard(rank, error))?;
                self.published(&published);
                Ok(())
            }
        }
    }

    fn background(&self) -> Option<&BackgroundStore> {
        match &self.store {
            Saves::Background(background) => Some(background),
            Saves::Streamed(_) => None,
        }
    }

    /// Whether this rank can advance the save in progress without waiting.
    pub(crate) fn ready(&mut self) -> bool {
        self.background().is_some_and(BackgroundStore::ready)
    }

    /// Advances the save in progress (records of the staged files, then the result of the
    /// publication by rank 0's worker). Collective; all ranks must be ready.
    pub(crate) fn advance<D: Device>(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        if let Saves::Background(background) = &mut self.store
            && background.in_flight() > 0
            && let Some(published) = background
                .advance(&mut RankExchange::of_shards(rank))
                .map_err(|error| of_shard(rank, error))?
        {
            self.published(&published);
        }
        Ok(())
    }

    /// Waits until a save in progress is published. Collective.
    pub(crate) fn complete<D: Device>(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        if let Saves::Background(background) = &mut self.store
            && background.in_flight() > 0
        {
            let published = background
                .complete(&mut RankExchange::of_shards(rank))
                .map_err(|error| of_shard(rank, error))?;
            self.published(&published);
        }
        Ok(())
    }

    fn published(&mut self, published: &PublishedCheckpoint) {
        for notice in &published.notices {
            tracing::warn!("checkpoint {}: {notice}", published.name);
        }
        self.newest = Some(self.dir.join(&published.name));
        self.best = published.best.as_ref().map(|name| self.dir.join(name));
    }

    /// Waits until old checkpoints are deleted.
    fn finish_removals(&self) -> Vec<String> {
        match &self.store {
            Saves::Background(background) => background.finish_removals(),
            Saves::Streamed(store) => store.finish_removals(),
        }
    }

    /// The newest checkpoint of this run.
    pub(crate) fn newest(&self) -> Option<&Path> {
        self.newest.as_deref()
    }

    /// The checkpoint of the lowest validation loss, if it is in this directory.
    pub(crate) fn best(&self) -> Option<&Path> {
        self.best.as_deref()
    }
}

impl Drop for Saver {
    /// Reports what could not be deleted after the last save, and whether the folder was moved.
    fn drop(&mut self) {
        for notice in self.finish_removals() {
            tracing::warn!("checkpoints in {}: {notice}", self.dir.display());
        }
    }
}
