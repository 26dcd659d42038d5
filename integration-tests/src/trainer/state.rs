//! Setting, saving and restoring the state of a stage: weights and moments in fp32.
//!
//! Three kinds of state exist at every stage ([`StateKind`]); in fp32 training the parameters themselves are
//! the master weights. Each unit's state is this rank's shard of it, or all of it at stage 0.

use std::collections::BTreeMap;
use std::ops::Range;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use zero_alloc::device::{AnySlice, DType, Device};
use zero_ckpt::{CkptError, Reader, SaveMeta, StateDtype};
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
    let starts: Vec<_> = stage.optimizer().segments().iter().map(|s| s.own_shard.start).collect();
    let held: Vec<_> = StateKind::ALL.iter().map(|kind| (kind.name(), held(stage, *kind))).collect();
    let meta = SaveMeta::default()
        .step(state.step)
        .stage(rank.settings.stage)
        .dtype(match rank.settings.dtype {
            DType::Bf16 => StateDtype::BF16,
            DType::F16 => StateDtype::F16,
            DType::F32 => StateDtype::F32,
            other => return Err(TrainError::State(format!("a checkpoint cannot store parameters of {other}"))),
        })
        .trainer(serde_json::to_value(state).map_err(|e| TrainError::State(e.to_string()))?)
        .model_config(model_config.clone())
        .documents(documents.clone())
        .best(state.best.map(|best| best.step))
        .superseded(superseded.filter(|old| old.only_best).map(|old| old.step));
    saver.begin(rank, meta, |slot| {
        let units = held.iter().find(|(name, _)| *name == slot.state.name);
        let (_, units) = units.ok_or_else(|| TrainError::State(format!("unknown state {}", slot.state.name)))?;
        let start = starts[slot.unit];
        let range = start + slot.in_shard.start as usize..start + slot.in_shard.end as usize;
        for (at, part) in overlaps(&units[slot.unit], &range) {
            let bytes = &mut slot.bytes[(at.start - range.start) * 4..(at.end - range.start) * 4];
            read(rank, part, bytes)?;
        }
        Ok(())
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

/// A range of a unit's segment, and the memory of its state; `None`: frozen, the state is 0.
type Part = (Range<usize>, Option<AnySlice>);

/// This rank's parts of the state of `kind`, for each unit. The weights of frozen parameters are the parameters, in their
/// dtype; all other state is fp32.
fn held<D: Device>(stage: &mut dyn Stage<D>, kind: StateKind) -> Vec<Vec<Part>> {
    let params = stage.updated();
    let optimizer = stage.optimizer();
    // SAFETY: read and written on the compute stream, which orders the optimizer's launches.
    let all = unsafe { optimizer.state(kind) };
    let of_unit = |(unit, param): (usize, AnySlice)| {
        // Neighbouring trained pieces have neighbouring state.
        let mut runs: Vec<(Range<usize>, Option<Range<usize>>)> = Vec::new();
        for piece in optimizer.pieces(unit) {
            match (runs.last_mut(), &piece.state) {
                (Some((elems, Some(state))), Some(new)) => (elems.end, state.end) = (piece.elems.end, new.end),
                (Some((elems, None)), None) => elems.end = piece.elems.end,
                _ => runs.push((piece.elems.clone(), piece.state.clone())),
            }
        }
        let parts = runs.into_iter().map(|(elems, state)| {
            let weights = param.slice(elems.clone());
            let memory = match (state, all) {
                (Some(state), Some(all)) => Some(all.slice(state).erase()),
                // fp32 training: the parameters are the masters.
                (Some(_), None) => Some(weights),
                (None, _) => (kind == StateKind::Master).then_some(weights),
            };
            (elems, memory)
        });
        parts.collect()
    };
    params.into_iter().enumerate().map(of_unit).collect()
}

/// The parts of `parts` within `range`.
fn overlaps<'a>(parts: &'a [Part], range: &'a Range<usize>) -> impl Iterator<Item = Part> + 'a {
    parts.iter().filter_map(move |(elems, memory)| {
        let at = elems.start.max(range.start)..elems.end.min(range.end);
        (!at.is_empty()).then(|| {
            let within = at.start - elems.start..at.end - elems.start;
            (at, memory.map(|memory| memory.slice(within)))
        })
    })
}

/// Downloads a part as fp32.
fn read<D: Device>(rank: &Rank<D>, part: Option<AnySlice>, out: &mut [u8]) -> Result<(), TrainError> {
    let (device, limit) = (rank.pool.device(), rank.settings.host_limit());
    match part {
        None => out.fill(0),
        Some(part) if part.dtype() == DType::F32 => device.download(&rank.compute, part, out, limit)?,
        Some(part) => {
            let mut narrow = vec![0; part.len_bytes()];
            device.download(&rank.compute, part, &mut narrow, limit)?;
            for (wide, narrow) in out.chunks_exact_mut(4).zip(narrow.chunks_exact(2)) {
                let bits = [narrow[0], narrow[1]];
                let value = if part.dtype() == DType::Bf16 {
                    bf16::from_ne_bytes(bits).to_f32()
                } else {
                    f16::from_ne_bytes(bits).to_f32()
                };
                wide.copy_from_slice(&value.to_ne_bytes());
            }
        }
    }
    Ok(())
}

/// Uploads `values` to a part, rounded to its dtype.
fn write<D: Device>(rank: &Rank<D>, part: AnySlice, values: &[f32]) -> Result<(), TrainError> {
    let limit = rank.settings.host_limit();
    let narrow: Vec<u8> = match part.dtype() {
        DType::Bf16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_ne_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|x| f16::from_f32(*x).to_ne_bytes()).collect(),
        _ => Vec::new(),
    };
    let bytes = if part.dtype() == DType::F32 { bytemuck::cast_slice(values) } else { &narrow };
    Ok(rank.pool.device().upload(&rank.compute, bytes, part, limit)?)
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
    for ((index, unit), parts) in rank.layout.units().iter().enumerate().zip(held(stage, kind)) {
        let first = rank.held(unit).start;
        for (elems, memory) in parts.into_iter().filter_map(|(elems, memory)| Some((elems, memory?))) {
            for start in elems.clone().step_by(FILL_ELEMS) {
                let end = elems.end.min(start + FILL_ELEMS);
                values.clear();
                values.resize(end - start, 0.0);
                source(index, first + start as u64..first + end as u64, &mut values)?;
                write(rank, memory.slice(start - elems.start..end - elems.start), &values)?;
            }
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
