//! Setting, saving and restoring the state of a stage: weights and moments in fp32.
//!
//! Three kinds of state exist at every stage ([`StateKind`]); in fp32 training the parameters themselves are
//! the master weights. Each unit's state is this rank's shard of it, or all of it at stage 0.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use zero_alloc::device::{AnySlice, DType, Device};
use zero_ckpt::{CkptError, Reader, SaveMeta};
use zero_optim::{Progress, StateKind};

use super::rank::Rank;
use super::saver::Saver;
use super::stage::{Stage, whole_slices};
use super::validation::Best;
use super::workload::InitialWeights;
use crate::error::TrainError;

/// Sets the weights from `source`, which fills a range of a parameter, and publishes them for the first forward.
pub(super) fn set_weights<D: Device>(
    rank: &Rank<D>,
    stage: &mut dyn Stage<D>,
    source: &mut InitialWeights<'_>,
) -> Result<(), TrainError> {
    fill(rank, stage, StateKind::Master, |unit, held, out| {
        for param in &rank.layout.units()[unit].params {
            let at = param.range();
            let (start, end) = (at.start.max(held.start), at.end.min(held.end));
            if start < end {
                let out = &mut out[(start - held.start) as usize..(end - held.start) as usize];
                source(&param.name, start - at.start..end - at.start, out)?;
            }
        }
        Ok(())
    })?;
    publish(rank, stage)
}

/// Restores weights, moments and progress from a checkpoint of any world size, stage and dtype.
pub(super) fn restore<D: Device>(
    rank: &Rank<D>,
    stage: &mut dyn Stage<D>,
    reader: &Reader,
) -> Result<TrainerState, TrainError> {
    let state = TrainerState::of(reader)?;
    let view = reader.view(&rank.layout)?;
    for kind in StateKind::ALL {
        fill(rank, stage, kind, |unit, held, out| {
            let numel = rank.layout.units()[unit].numel_elems;
            let real = held.start.min(numel)..held.end.min(numel);
            let out = &mut out[..(real.end - real.start) as usize];
            view.read_range(kind.name(), unit, real, out).map_err(unreadable)
        })?;
    }
    let mut progress = state.progress;
    if reader.manifest().dtype != rank.settings.dtype.name() {
        // A loss scale is valid for its dtype only.
        progress.loss_scaler = stage.optimizer().progress().loss_scaler;
    }
    stage.optimizer().restore(&progress)?;
    publish(rank, stage)?;
    Ok(state)
}

/// Adds a remedy to the error of a checkpoint that was damaged after the run verified it.
fn unreadable(error: CkptError) -> TrainError {
    match error {
        CkptError::Corrupt { .. } => TrainError::State(format!(
            "{error}; `zero ckpt verify DIR` names the newest whole checkpoint, and --resume DIR starts from it"
        )),
        other => other.into(),
    }
}

/// Begins a save of all state. `superseded` was the best step until this one. Collective.
pub(super) fn save<D: Device>(
    rank: &Rank<D>,
    stage: &mut dyn Stage<D>,
    saver: &mut Saver,
    state: &TrainerState,
    model_config: &Value,
    documents: &BTreeMap<String, Value>,
    superseded: Option<Best>,
) -> Result<(), TrainError> {
    let ranges: Vec<_> = stage.optimizer().segments().iter().map(|s| s.own_shard.clone()).collect();
    let mut own = Vec::new();
    for kind in StateKind::ALL {
        let shards = held(stage, kind)?.into_iter().zip(&ranges).map(|(held, range)| held.slice(range.clone()));
        own.push((kind.name(), shards.collect::<Vec<_>>()));
    }
    let meta = SaveMeta {
        step: state.step,
        stage: rank.settings.stage.number(),
        dtype: rank.settings.dtype.name().to_owned(),
        trainer: serde_json::to_value(state).map_err(|e| TrainError::State(e.to_string()))?,
        model_config: model_config.clone(),
        documents: documents.clone(),
        best: state.best.map(|best| best.step),
        superseded: superseded.filter(|old| old.only_best).map(|old| old.step),
    };
    saver.begin(rank, meta, |slot| {
        let shards = own.iter().find(|(name, _)| *name == slot.state.name);
        let (_, shards) = shards.ok_or_else(|| TrainError::State(format!("unknown state {}", slot.state.name)))?;
        let range = slot.in_shard.start as usize..slot.in_shard.end as usize;
        let (shard, limit) = (shards[slot.unit].slice(range), rank.settings.host_limit());
        Ok(rank.pool.device().download(&rank.compute, shard, slot.bytes, limit)?)
    })
}

/// The state of a run in a checkpoint, besides its tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Completed steps; also the position in the data.
    pub step: u64,
    /// The optimizer's scalars.
    pub progress: Progress,
    /// Seed of the data order and of the initial weights.
    pub seed: u64,
    /// Checksum of the data.
    pub data_fingerprint: u64,
    /// Tokens of all ranks in all steps; missing in older checkpoints.
    #[serde(default)]
    pub tokens_seen: Option<u64>,
    /// The lowest validation loss so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<Best>,
}

impl TrainerState {
    /// The state in a checkpoint.
    ///
    /// # Errors
    /// The checkpoint was not written by this trainer.
    pub fn of(reader: &Reader) -> Result<Self, TrainError> {
        if reader.manifest().trainer.is_null() {
            return Err(TrainError::State(format!(
                "{path}: contains weights but no training state to resume; start from the weights with --model {path}",
                path = reader.path().display()
            )));
        }
        let read = Self::deserialize(&reader.manifest().trainer);
        read.map_err(|e| TrainError::State(format!("{}: invalid trainer state: {e}", reader.path().display())))
    }
}

/// This rank's part of the state of `kind`, for each unit.
fn held<D: Device>(stage: &mut dyn Stage<D>, kind: StateKind) -> Result<Vec<AnySlice>, TrainError> {
    let segments = stage.optimizer().segments().to_vec();
    // SAFETY: read and written on the compute stream, which orders the optimizer's launches.
    match unsafe { stage.optimizer().state(kind) } {
        Some(all) => Ok(segments.into_iter().map(|s| all.slice(s.state).erase()).collect()),
        // fp32 training: the parameters are the masters.
        None => Ok(stage.updated()),
    }
}

/// Elements of state in host memory at a time while it is set: a unit may be larger than all other host memory.
const FILL_ELEMS: usize = 4 << 20;

/// Writes this rank's part of the state of `kind`. `source` fills a range of a unit's padded flat parameter; elements
/// that it does not fill are zero.
fn fill<D: Device>(
    rank: &Rank<D>,
    stage: &mut dyn Stage<D>,
    kind: StateKind,
    mut source: impl FnMut(usize, Range<u64>, &mut [f32]) -> Result<(), TrainError>,
) -> Result<(), TrainError> {
    let mut values = Vec::<f32>::new();
    for ((index, unit), slice) in rank.layout.units().iter().enumerate().zip(held(stage, kind)?) {
        let whole = !rank.settings.stage.shards_optimizer();
        let held = if whole { 0..unit.padded_elems } else { unit.shard(rank.comm.rank() as u64) };
        debug_assert_eq!(slice.dtype(), DType::F32);
        for start in (0..slice.len()).step_by(FILL_ELEMS) {
            let end = slice.len().min(start + FILL_ELEMS);
            values.clear();
            values.resize(end - start, 0.0);
            source(index, held.start + start as u64..held.start + end as u64, &mut values)?;
            let (bytes, part) = (bytemuck::cast_slice(&values), slice.slice(start..end));
            rank.pool.device().upload(&rank.compute, bytes, part, rank.settings.host_limit())?;
        }
    }
    Ok(())
}

/// Writes the parameters from the master weights and publishes them for the next forward.
fn publish<D: Device>(rank: &Rank<D>, stage: &mut dyn Stage<D>) -> Result<(), TrainError> {
    let params = stage.updated();
    stage.optimizer().write_params(&rank.compute, &whole_slices(&params))?;
    stage.publish(rank)
}
