//! Setting, saving and restoring the state of a stage: weights and slots in fp32, by
//! [`zero_optim::ShardedOptimizer`].

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use zero_alloc::device::{DType, Device};
use zero_ckpt::{Reader, SaveMeta, StateDtype};
use zero_optim::{Progress, StateKind, StateRange};
use zero_shard::UnitLayout;

use crate::error::TrainError;
use crate::model::ModelError;
use crate::rank::Rank;
use crate::saving::saver::Saver;
use crate::stages::grad_errors::SavedErrors;
use crate::stages::stage::Stage;
use crate::telemetry::metrics::Best;
use crate::workload::InitialWeights;

/// Sets the weights from `source`, which fills a range of a parameter, and publishes them for the
/// first forward. Padding is 0.
pub(crate) fn set_weights<D: Device>(
    rank: &Rank<D>,
    stage: &mut dyn Stage<D>,
    source: &mut InitialWeights<'_>,
) -> Result<(), TrainError> {
    if let Some(tensor) = &rank.tensor {
        let part = tensor.part(rank.tensor_rank())?;
        return set_local_weights(rank, stage, &mut tensor.weights(part, source));
    }
    set_local_weights(rank, stage, source)
}

/// [`set_weights`] from the rank's part of each parameter.
fn set_local_weights<D: Device>(
    rank: &Rank<D>,
    stage: &mut dyn Stage<D>,
    source: &mut InitialWeights<'_>,
) -> Result<(), TrainError> {
    for (unit, placed) in rank.layout.units().iter().enumerate() {
        if let Some(frozen) = rank.frozen.as_ref().filter(|frozen| frozen.has(unit)) {
            let limit = rank.settings.host_limit();
            frozen.set(
                &rank.compute,
                unit,
                &mut |range, values| fill(placed, range, values, source),
                limit,
            )?;
            continue;
        }
        let held = rank.held(unit);
        let elems = (held.end - held.start) as usize;
        stage
            .optimizer()
            .set_weights(rank, unit, elems, &mut |part, values| {
                let first = held.start as usize;
                let range = first + part.start..first + part.end;
                fill(placed, range, values, source)
            })?;
    }
    stage.publish(rank)
}

/// Sets `values` to those of a range of the unit's flat parameter, with 0 for its padding.
fn fill(
    placed: &UnitLayout,
    range: Range<usize>,
    values: &mut Vec<f32>,
    source: &mut InitialWeights<'_>,
) -> Result<(), TrainError> {
    let start = range.start as u64;
    let end = range.end as u64;
    values.clear();
    values.resize(range.len(), 0.0);
    for piece in placed.params_in(start..end)? {
        let out = &mut values
            [(piece.in_flat.start - start) as usize..(piece.in_flat.end - start) as usize];
        source(&placed.params[piece.param].name, piece.in_param, out)?;
    }
    Ok(())
}

/// Sets the frozen units in blocks from a checkpoint.
fn load_frozen<D: Device>(rank: &Rank<D>, reader: &Reader) -> Result<(), TrainError> {
    let frozen = rank.frozen.as_ref();
    let Some(frozen) = frozen.filter(|_| rank.settings.adapters.is_none()) else {
        return Ok(());
    };
    let view = reader.view(&rank.layout)?;
    let limit = rank.settings.host_limit();
    for (unit, placed) in rank.layout.units().iter().enumerate() {
        let mut read = |name: &str, in_param: Range<u64>, out: &mut [f32]| {
            let param = placed.params.iter().find(|param| param.name == name);
            let first = param.map_or(0, |param| param.global_offset_elems);
            let first = first - placed.global_offset_elems;
            let range = first + in_param.start..first + in_param.end;
            Ok(view.read_range(StateKind::Master.name(), unit, range, out)?)
        };
        let from = &mut |range, values: &mut Vec<f32>| fill(placed, range, values, &mut read);
        frozen.set(&rank.compute, unit, from, limit)?;
    }
    Ok(())
}

/// Restores weights, slots and progress from a checkpoint of any world size, stage and dtype.
/// `weights` are the initial ones, of which units that are not saved keep theirs.
pub(crate) fn restore<'a, D: Device>(
    rank: &Rank<D>,
    stage: &mut dyn Stage<D>,
    reader: Reader,
    weights: impl FnOnce() -> Result<Box<InitialWeights<'a>>, ModelError>,
) -> Result<TrainerState, TrainError> {
    let state = TrainerState::of(&reader)?;
    let reader = match rank.settings.adapters {
        Some(adapters) => {
            set_weights(rank, stage, &mut *weights()?)?;
            reader.of_first_units(adapters)
        }
        None => reader,
    };
    let reader = match &rank.tensor {
        Some(tensor) => {
            let part = tensor.part(rank.tensor_rank())?;
            reader.of_part(part, |param| tensor.cut_of(param))?
        }
        None => reader,
    };
    stage.optimizer().load(rank, &reader)?;
    load_frozen(rank, &reader)?;
    if let Some(errors) = stage.grad_errors() {
        errors.load(rank, &reader, state.grad_errors.as_ref())?;
    }
    stage.publish(rank)?;
    Ok(state)
}

/// Begins a save of all state. `superseded` was the best step until this one. Collective.
pub(crate) fn save<D: Device>(
    rank: &Rank<D>,
    stage: &mut dyn Stage<D>,
    saver: &mut Saver,
    state: &TrainerState,
    model_config: &Value,
    documents: &BTreeMap<String, Value>,
    superseded: Option<Best>,
) -> Result<(), TrainError> {
    let mut documents = documents.clone();
    documents.extend(rank.tensor.as_ref().map(|tensor| tensor.document()));
    let meta = SaveMeta::default()
        .step(state.step)
        .stage(rank.settings.stage)
        .dtype(match rank.settings.dtype {
            DType::Bf16 => StateDtype::BF16,
            DType::F16 => StateDtype::F16,
            DType::F32 => StateDtype::F32,
            other => {
                return Err(TrainError::State(format!(
                    "a checkpoint cannot store parameters of {other}"
                )));
            }
        })
        .trainer(serde_json::to_value(state).map_err(|e| TrainError::State(e.to_string()))?)
        .model_config(model_config.clone())
        .documents(documents)
        .best(state.best.map(|best| best.step))
        .superseded(superseded.filter(|old| old.only_best).map(|old| old.step));

    let errors = stage.grad_errors().map(|errors| errors.shards(rank));
    let errors = errors.transpose()?.unwrap_or_default();
    saver.begin(rank, meta, |slot| {
        let in_shard = slot.in_shard.start as usize..slot.in_shard.end as usize;
        let name = &slot.state.name;
        if errors.fill(name, slot.unit, in_shard, slot.bytes).is_some() {
            return Ok(());
        }
        let mut kinds = stage.optimizer().kinds().into_iter();
        let kind = kinds.find(|kind| kind.name() == slot.state.name);
        let kind = kind.ok_or_else(|| {
            TrainError::State(format!("internal error: no state {}", slot.state.name))
        })?;
        let unit = slot.unit;
        let start = stage.optimizer().segments()[unit].own_shard.start;
        slot.fill_f32(|in_shard, values| {
            if let (Some(frozen), StateKind::Master) = (&rank.frozen, kind) {
                let first = rank.saves(unit).start;
                let range = first + in_shard.start..first + in_shard.end;
                let limit = rank.settings.host_limit();
                if let Some(read) = frozen.read(&rank.compute, unit, range, values, limit) {
                    return read;
                }
            }
            let elems = start + in_shard.start as usize..start + in_shard.end as usize;
            let range = StateRange { kind, unit, elems };
            stage.optimizer().read_state(rank, &range, values)
        })
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
    /// Checksum of the data; missing if a framework trained.
    #[serde(default)]
    pub data_fingerprint: Option<u64>,
    /// Tokens of all ranks in all steps; missing in older checkpoints.
    #[serde(default)]
    pub tokens_seen: Option<u64>,
    /// The lowest validation loss so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<Best>,
    /// The errors of quantised gradients, with error feedback.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grad_errors: Option<SavedErrors>,
}

impl TrainerState {
    /// The state in a checkpoint.
    ///
    /// # Errors
    /// The checkpoint was written neither by this trainer nor by a framework's run.
    pub fn of(reader: &Reader) -> Result<Self, TrainError> {
        if reader.manifest().trainer.is_null() {
            return Err(TrainError::State(format!(
                "{path}: contains weights but no training state to resume; start from the weights with --model {path}",
                path = reader.path().display()
            )));
        }
        let mut trainer = reader.manifest().trainer.clone();
        // A framework knows its data, and has no seed of ours.
        if trainer.get("framework").is_some() {
            trainer["step"] = reader.manifest().step.into();
            trainer["seed"] = 0.into();
        }
        let read = Self::deserialize(trainer);
        read.map_err(|e| {
            TrainError::State(format!(
                "{}: invalid trainer state: {e}",
                reader.path().display()
            ))
        })
    }
}
