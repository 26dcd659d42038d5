//! Checkpoints of an optimizer, through zero-ckpt: the state of all kinds and the progress.
//!
//! Why the optimizer reads and writes its own state: where a kind of state is depends on the dtype
//! and the groups. The masters of fp32 training and of frozen elements are the parameters, and
//! frozen slots have no memory; a checkpoint has zeros for them, so that it loads with other
//! groups. `read_state` and `write_state` know this; `save`, `load` and a trainer's background save
//! are loops over them.

use std::ops::Range;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;
use zero_alloc::device::{AnySlice, DType, Device};
use zero_ckpt::{
    CkptError, Exchange, PublishedCheckpoint, Reader, SaveMeta, ShardData, StateDtype,
    StateEncoding, Store, View,
};
use zero_kernels::Codec;
use zero_shard::{Layout, UnitLayout};

use crate::{OptimError, Progress, ShardedOptimizer, StateArrays, StateKind, StateRange};

/// The key of the progress in the checkpoint's trainer document.
const PROGRESS: &str = "progress";

/// Elements of state in host memory at a time while it is loaded: a unit may be larger than all
/// other host memory.
const CHUNK_ELEMS: usize = 4 << 20;

/// The parameters of one rank and their layout.
#[derive(Debug)]
pub struct RankParams<'a, P> {
    /// The layout that the optimizer's segments were made of.
    pub layout: &'a Layout,
    /// The rank.
    pub rank: u64,
    /// The slices of each unit, as in [`UnitSlices::param`](crate::UnitSlices::param).
    pub params: &'a [P],
}

/// An error of saving or loading an optimizer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum CheckpointError {
    /// The optimizer has no segment for each unit of the layout.
    #[error(
        "the layout has {units} units, the optimizer {segments}; pass the layout that its segments were made of"
    )]
    Units {
        /// Units of the layout.
        units: usize,
        /// Units of the optimizer.
        segments: usize,
    },
    /// A segment is not that of its unit in the layout.
    #[error(
        "unit {unit}: rank {rank} of the layout owns {expected:?} of {padded_elems} elements, which a segment of \
         {segment_elems} elements with the own shard {own_shard:?} does not hold; pass the layout and the rank that the \
         segments were made of"
    )]
    Segment {
        unit: String,
        rank: u64,
        /// The range of the unit's flat parameter that the rank owns.
        expected: Range<u64>,
        /// Elements of the flat parameter with its padding.
        padded_elems: u64,
        /// Elements of the segment.
        segment_elems: usize,
        /// This rank's shard, relative to the segment's start.
        own_shard: Range<usize>,
    },
    /// The trainer's value is neither null nor an object without the key `progress`.
    #[error(
        "the trainer's value must be null or a JSON object without the key {PROGRESS:?}, which is the optimizer's"
    )]
    TrainerValue,
    /// The checkpoint has no progress of an optimizer, or a damaged one.
    #[error("{path}: {why}")]
    Progress { path: String, why: String },
    /// The optimizer failed, or the slices do not match its segments.
    #[error(transparent)]
    Optim(#[from] OptimError),
    /// The checkpoint could not be written or read.
    #[error(transparent)]
    Ckpt(#[from] CkptError),
}

impl<D: Device> ShardedOptimizer<D> {
    /// Saves weights, slots and progress through `store`, together with the other ranks, at any
    /// stage. `meta` is the same on all ranks; its dtype is replaced by that of the parameters.
    /// [`SaveMeta::trainer`] is null or a JSON object of the caller's, to which the key `progress`
    /// is added. Needs host memory for this rank's shard of the state, 4 bytes an element of each kind. To save
    /// in the background, pass [`Self::read_state`] to [`zero_ckpt::BackgroundStore`].
    ///
    /// # Errors
    /// The layout or the slices do not match the segments, the trainer's value is not an object, a
    /// stream failed, or the error of any rank as [`Store::save`] returns it: a rank that fails
    /// sends its error to the others.
    pub fn save(
        &mut self,
        stream: &D::Stream,
        store: &Store,
        meta: SaveMeta,
        own: &RankParams<'_, impl AsRef<[(AnySlice, usize)]>>,
        exchange: &mut impl Exchange,
        limit: Duration,
    ) -> Result<PublishedCheckpoint, CheckpointError> {
        let mut meta = meta.dtype(self.stored_dtype());
        let states = self
            .add_progress(&mut meta.trainer)
            .and_then(|()| self.shard_states(stream, own, limit));
        // Staged on a thread, while this one tells the other ranks of its progress.
        let step = meta.step;
        let layout = own.layout;
        let rank = own.rank;
        let stage = || match &states {
            Ok(states) => stage(store, step, layout, rank, states),
            Err(error) => Err(CkptError::Snapshot {
                message: error.to_string(),
            }),
        };
        let published = store.save_with(&meta, layout, stage, exchange);
        states.and_then(|_| Ok(published?))
    }

    /// Loads weights, slots and progress from a checkpoint of any world size, stage and dtype,
    /// and enqueues [`Self::write_params`]. The loss scale of a checkpoint of another dtype is not
    /// taken over. No communication. The caller's own part of the trainer's value is in
    /// [`Reader::manifest`].
    ///
    /// For a tensor-parallel rank, `own` has the layout of its part, and [`Reader::of_part`] makes
    /// the reader that reads the part.
    ///
    /// # Errors
    /// If the layout or the slices do not match the segments, the checkpoint is of another model,
    /// or its progress is missing, damaged or contradicts the settings, nothing has changed. If a
    /// state is missing or damaged, or the stream failed, a part of the state may have been
    /// overwritten.
    pub fn load(
        &mut self,
        stream: &D::Stream,
        reader: &Reader,
        own: &RankParams<'_, impl AsRef<[(AnySlice, usize)]>>,
        limit: Duration,
    ) -> Result<(), CheckpointError> {
        let starts = self.starts(own)?;
        self.check_count("params", own.params.len())?;
        for (segment, param) in self.segments().iter().zip(own.params) {
            self.check_params(segment, param.as_ref())?;
        }
        reader.view(own.layout)?;
        let progress = self.progress_in(reader)?;
        self.controller.clone().restore(&progress)?;
        for (unit, (first, param)) in starts.iter().zip(own.params).enumerate() {
            self.load_from(
                stream,
                (reader, own.layout),
                (unit, *first),
                param.as_ref(),
                limit,
            )?;
        }
        Ok(self.restore(&progress)?)
    }

    /// [`Self::load`] of one unit alone, without the progress: for parameters that are not all in
    /// memory at once. `own` is the layout and the rank; its `params` are those of the unit only.
    ///
    /// # Errors
    /// As [`Self::load`], or there is no such unit.
    pub fn load_unit(
        &mut self,
        stream: &D::Stream,
        reader: &Reader,
        unit: usize,
        own: &RankParams<'_, (AnySlice, usize)>,
        limit: Duration,
    ) -> Result<(), CheckpointError> {
        let starts = self.starts(own)?;
        self.check_params(self.segment(unit)?, own.params)?;
        self.load_from(
            stream,
            (reader, own.layout),
            (unit, starts[unit]),
            own.params,
            limit,
        )
    }

    /// The part of [`Self::load`] that comes with [`Self::load_unit`] of every unit: the step
    /// counts and the loss scale.
    ///
    /// # Errors
    /// The progress is missing, damaged or contradicts the settings; then nothing has changed.
    pub fn load_progress(&mut self, reader: &Reader) -> Result<(), CheckpointError> {
        let progress = self.progress_in(reader)?;
        Ok(self.restore(&progress)?)
    }

    /// Loads the state of a unit, which starts at element `first` of its flat parameter.
    fn load_from(
        &mut self,
        stream: &D::Stream,
        (reader, layout): (&Reader, &Layout),
        (unit, first): (usize, u64),
        param: &[(AnySlice, usize)],
        limit: Duration,
    ) -> Result<(), CheckpointError> {
        let view = reader.view(layout)?;
        let placed = &layout.units()[unit];
        let mut values = Vec::new();
        let len = self.segments()[unit].len();

        for kind in self.kinds() {
            if kind != StateKind::Master && self.is_frozen(unit) {
                continue;
            }
            for start in (0..len).step_by(CHUNK_ELEMS) {
                let elems = start..len.min(start + CHUNK_ELEMS);
                values.clear();
                values.resize(elems.len(), 0.0);
                let flat = first + elems.start as u64..first + elems.end as u64;
                read_flat(&view, kind, (unit, placed), flat, &mut values)?;
                self.write_state(
                    stream,
                    &StateRange { kind, unit, elems },
                    param,
                    &values,
                    limit,
                )?;
            }
        }

        Ok(self.write_unit_params(stream, unit, param)?)
    }

    /// The start of each segment in the unit's flat parameter.
    fn starts<P>(&self, own: &RankParams<'_, P>) -> Result<Vec<u64>, CheckpointError> {
        let units = own.layout.units();
        let segments = self.segments();
        if units.len() != segments.len() {
            return Err(CheckpointError::Units {
                units: units.len(),
                segments: segments.len(),
            });
        }

        let start = |(unit, segment): (&UnitLayout, &crate::Segment)| {
            let expected = unit.shard(own.rank);
            let shard = &segment.own_shard;
            let start = expected.start.checked_sub(shard.start as u64);
            let fits = |start: &u64| start + segment.len() as u64 <= unit.padded_elems;
            let same = shard.len() as u64 == unit.shard_elems && own.rank < own.layout.world_size();
            start
                .filter(fits)
                .filter(|_| same)
                .ok_or_else(|| CheckpointError::Segment {
                    unit: unit.name.clone(),
                    rank: own.rank,
                    expected,
                    padded_elems: unit.padded_elems,
                    segment_elems: segment.len(),
                    own_shard: shard.clone(),
                })
        };

        units.iter().zip(segments).map(start).collect()
    }

    /// This rank's shard storage of each kind, in host memory.
    fn shard_states(
        &mut self,
        stream: &D::Stream,
        own: &RankParams<'_, impl AsRef<[(AnySlice, usize)]>>,
        limit: Duration,
    ) -> Result<Vec<(StateKind, StateEncoding, Vec<f32>)>, CheckpointError> {
        self.starts(own)?;
        self.check_count("params", own.params.len())?;
        let elems = own.layout.shard_elems() as usize;
        let mut states = Vec::new();

        for kind in self.kinds() {
            let mut storage = Vec::new();
            let bytes = 4 * elems as u64;
            storage
                .try_reserve_exact(elems)
                .map_err(|_| CkptError::OutOfMemory { bytes })?;
            storage.resize(elems, 0.0);
            let mut rest = storage.as_mut_slice();
            for (unit, param) in own.params.iter().enumerate() {
                let shard = self.segments()[unit].own_shard.clone();
                let (now, later) = rest.split_at_mut(shard.len());
                rest = later;
                self.read_state(
                    stream,
                    &StateRange {
                        kind,
                        unit,
                        elems: shard,
                    },
                    param.as_ref(),
                    now,
                    limit,
                )?;
            }
            let arrays = self.state.arrays().iter();
            let with_slot = arrays
                .clone()
                .find(|arrays| arrays.kinds().any(|of| of == kind));
            let encoding = with_slot.map_or(StateDtype::F32.into(), |arrays| arrays.encoding(kind));
            states.push((kind, encoding, storage));
        }

        Ok(states)
    }

    fn stored_dtype(&self) -> StateDtype {
        match self.param_dtype {
            DType::Bf16 => StateDtype::BF16,
            DType::F16 => StateDtype::F16,
            _ => StateDtype::F32,
        }
    }

    /// Adds the progress to the trainer's value.
    fn add_progress(&self, trainer: &mut Value) -> Result<(), CheckpointError> {
        if trainer.is_null() {
            *trainer = Value::Object(serde_json::Map::new());
        }
        let progress =
            serde_json::to_value(self.progress()).map_err(|_| CheckpointError::TrainerValue)?;
        match trainer
            .as_object_mut()
            .map(|object| object.insert(PROGRESS.to_owned(), progress))
        {
            Some(None) => Ok(()),
            _ => Err(CheckpointError::TrainerValue),
        }
    }

    /// The progress in a checkpoint. A loss scale is valid for its dtype only, so that of another
    /// dtype is replaced.
    fn progress_in(&self, reader: &Reader) -> Result<Progress, CheckpointError> {
        let fail = |why| CheckpointError::Progress {
            path: reader.path().display().to_string(),
            why,
        };
        let saved = reader.manifest().trainer.get(PROGRESS);
        let saved = saved
            .ok_or_else(|| fail("the checkpoint has no progress of an optimizer".to_owned()))?;
        let mut progress = Progress::deserialize(saved)
            .map_err(|e| fail(format!("damaged progress of the optimizer: {e}")))?;
        if reader.manifest().dtype != self.stored_dtype().param_name() {
            progress.loss_scaler = self.progress().loss_scaler;
        }
        Ok(progress)
    }
}

impl StateArrays {
    /// How a checkpoint holds a kind of state: running averages in blocks as they are, all else in
    /// fp32.
    pub fn encoding(&self, kind: StateKind) -> StateEncoding {
        let slots = self.slots().iter();
        let codec = match kind {
            StateKind::Master => None,
            StateKind::Slot(name) => slots.clone().find(|slot| slot.name == name),
        };
        match codec.map(|slot| slot.codec) {
            Some(Codec::Blocks(format)) => StateEncoding::averages(format),
            _ => StateDtype::F32.into(),
        }
    }
}

/// Stages this rank's file.
fn stage(
    store: &Store,
    step: u64,
    layout: &Layout,
    rank: u64,
    states: &[(StateKind, StateEncoding, Vec<f32>)],
) -> Result<zero_ckpt::StagedFile, CkptError> {
    let mut shard = ShardData::new(layout, rank)?;
    for (kind, encoding, storage) in states {
        shard.storage_as(kind.name(), *encoding, storage)?;
    }
    store.stage(step, &shard)
}

/// Reads a range of a unit's flat parameter, with its padding; `out` is zero.
fn read_flat(
    view: &View<'_>,
    kind: StateKind,
    (unit, placed): (usize, &UnitLayout),
    flat: Range<u64>,
    out: &mut [f32],
) -> Result<(), CheckpointError> {
    let pieces = placed
        .params_in(flat.clone())
        .map_err(|e| CkptError::BadArgument {
            what: format!("range of unit {}", placed.name),
            expected: "one within it".to_owned(),
            got: e.to_string(),
        })?;

    let pieces: Vec<_> = pieces.collect();
    let Some(first) = pieces.first() else {
        return Ok(());
    };
    // A checkpoint numbers elements without padding, so the pieces are one range there.
    let param = &placed.params[first.param];
    let start = param.global_offset_elems - placed.global_offset_elems + first.in_param.start;
    let numel: usize = pieces
        .iter()
        .map(|piece| (piece.in_param.end - piece.in_param.start) as usize)
        .sum();
    view.read_range(
        kind.name(),
        unit,
        start..start + numel as u64,
        &mut out[..numel],
    )?;
    let mut end = numel;

    for piece in pieces.iter().rev() {
        let from = (piece.in_flat.start - flat.start) as usize;
        let to = (piece.in_flat.end - flat.start) as usize;
        let at = end - (to - from);
        out.copy_within(at..end, from);
        // Padding, until pieces before this one are copied there.
        out[at..from].fill(0.0);
        end = at;
    }

    Ok(())
}
