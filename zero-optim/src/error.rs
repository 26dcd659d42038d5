//! Errors of the optimizer.

use zero_alloc::AllocError;
use zero_alloc::device::{Cause, DType, DeviceError};
use zero_kernels::{Codec, KernelError, SettingError};
use zero_shard::BlockFormat;

/// An error of creating an optimizer or of a step.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
#[non_exhaustive]
pub enum OptimError {
    /// A setting is outside its range.
    #[error("{setting} is {value}; it must be {range}")]
    Setting {
        /// The setting's name.
        setting: &'static str,
        value: f64,
        range: &'static str,
    },
    /// No kernel updates parameters of this dtype.
    #[error("parameters of {dtype} cannot be trained; use fp32, bf16 or fp16")]
    ParamDType { dtype: DType },
    /// The segments do not tile the state storage.
    #[error(
        "unit {unit}: its state starts at element {got}, expected {expected}: segments follow one another without gaps"
    )]
    Segments {
        unit: String,
        expected: usize,
        got: usize,
    },
    /// This rank's shard of a segment is outside the segment.
    #[error("unit {unit}: its own shard {start}..{end} is outside its {len} elements")]
    OwnShard {
        unit: String,
        /// Start of the shard.
        start: usize,
        /// End of the shard.
        end: usize,
        /// Elements of the segment.
        len: usize,
    },
    /// The elements that this rank counts are outside its shard.
    #[error("unit {unit}: the counted elements {start}..{end} are outside the own shard {shard:?}")]
    Counted {
        unit: String,
        /// Start of the counted elements.
        start: usize,
        /// End of the counted elements.
        end: usize,
        /// The shard.
        shard: std::ops::Range<usize>,
    },
    /// The runs of parameter groups do not tile the elements, or name a group that does not exist.
    #[error(
        "run {start}..{end} of group {group}: expected a run that starts at element {expected} of {elems}, of a group \
         that exists: runs follow one another without gaps, over all segments"
    )]
    Runs {
        /// Start of the run, or the end of the last one.
        start: usize,
        end: usize,
        group: usize,
        expected: usize,
        /// Elements of all segments.
        elems: usize,
    },
    /// No unit has this number.
    #[error("there is no unit {unit}: the optimizer has {units} units, numbered from 0")]
    NoUnit { unit: usize, units: usize },
    /// A range of the state is reversed, or ends past the unit's segment.
    #[error("unit {unit}, {kind}: there are no elements {start}..{end} in a segment of {len}")]
    StateRange {
        unit: String,
        /// The kind of state.
        kind: &'static str,
        /// Start of the range.
        start: usize,
        end: usize,
        /// Elements of the segment.
        len: usize,
    },
    /// The number of slices is not the number of units.
    #[error("{what}: expected {expected} slices, one per unit, got {got}")]
    SliceCount {
        what: &'static str,
        expected: usize,
        got: usize,
    },
    /// A unit's gradient and its state differ in length, or the slices of its parameter leave out
    /// too much.
    #[error("unit {unit}, {what}: expected {expected} elements, got {got}")]
    SliceLen {
        unit: String,
        what: &'static str,
        /// Elements of the unit's state.
        expected: usize,
        /// Elements of the slice.
        got: usize,
    },
    /// A slice is outside its unit's segment, or overlaps the slice before it.
    #[error(
        "unit {unit}, {what}: a slice covers elements {start}..{end}; it must be within {free}..{len}"
    )]
    Piece {
        unit: String,
        what: &'static str,
        /// Start of the slice in the segment.
        start: usize,
        /// End of the slice in the segment.
        end: usize,
        /// End of the slice before it.
        free: usize,
        /// Elements of the segment.
        len: usize,
    },
    /// A unit's slice does not have the dtype of the optimizer's parameters.
    #[error("unit {unit}, {what}: expected {expected}, got {got}")]
    SliceDType {
        unit: String,
        what: &'static str,
        expected: DType,
        /// Dtype of the slice.
        got: DType,
    },
    /// A rank's message in the exchange of statistics has another length.
    #[error(
        "rank {rank} sent {got} bytes as its statistics, expected {expected}: all ranks must call step_with"
    )]
    StatsLen {
        rank: usize,
        expected: usize,
        got: usize,
    },
    /// A step was requested without rank statistics.
    #[error("no rank statistics: a step needs those of all ranks")]
    NoStats,
    /// Gradients overflowed with the loss scale at its minimum.
    #[error(
        "step {step}: gradients of unit {unit} on rank {rank} are not finite although the loss scale is at its \
         minimum of {scale}; the run diverges: lower the learning rate, or train in bf16"
    )]
    LossScaleAtMinimum {
        /// Steps before this one, skipped ones included.
        step: u64,
        scale: f64,
        /// The first rank with a non-finite gradient.
        rank: usize,
        /// The first unit with a non-finite gradient on that rank.
        unit: String,
    },
    /// A device step was requested before `prepare_device_steps`.
    #[error("device steps are not prepared: call prepare_device_steps first")]
    NotPrepared,
    /// The call would lose outcomes of enqueued steps.
    #[error("enqueued steps have unread outcomes: call all_outcomes first")]
    UnreadOutcomes,
    /// A step's record was overwritten before it was read.
    #[error(
        "the outcome of step {iteration} is lost: 64 or more steps were enqueued without reading outcomes"
    )]
    OutcomeLost {
        /// Steps before this one, skipped ones included.
        iteration: u64,
    },
    /// The device has no rates for the schedule's position.
    #[error(
        "no rates on the device for position {position} of the schedule: call prepare_device_steps again"
    )]
    NoRate { position: u64 },
    /// A saved state is invalid or contradicts the settings.
    #[error("saved {what} does not fit: {reason}")]
    Restore {
        /// The saved value.
        what: &'static str,
        reason: String,
    },
    /// Values to write begin or end within a block of state.
    #[error(
        "unit {unit}: {kind} is in blocks of {block_elems} elements; write whole blocks, not elements {start}..{end}"
    )]
    PartOfBlock {
        unit: String,
        kind: &'static str,
        /// Relative to the segment's start.
        start: usize,
        end: usize,
        block_elems: usize,
    },
    /// The update rules have no slot of this name.
    #[error("no state {kind}: the optimizer has {}", kinds.join(", "))]
    NoState {
        kind: &'static str,
        /// The kinds that it has.
        kinds: Vec<&'static str>,
    },
    /// A slot in a format that the device's launches cannot update.
    #[error(
        "{slot} cannot be in {codec:?} in memory of this device; use another format, or an optimizer that is offloaded"
    )]
    SlotOnDevice { slot: &'static str, codec: Codec },
    /// A run of elements begins or ends within a block of state.
    #[error(
        "unit {unit}: elements {start}..{end} have state in blocks of {block_elems}, but do not begin and end with blocks; \
         make the layout with param_align_elems and shard_align_elems of {}, and the groups with ParamGroups::of_layout",
        BlockFormat::ALIGN_ELEMS
    )]
    CutBlock {
        unit: String,
        /// Relative to the segment's start.
        start: usize,
        end: usize,
        block_elems: usize,
    },
    /// A slot of an update rule that an optimizer cannot keep.
    #[error("slot {slot} of the update rule {rule} {reason}")]
    Slot {
        rule: &'static str,
        slot: &'static str,
        /// What is wrong with it, and what to do.
        reason: &'static str,
    },
    /// An update rule of matrices without matrices, or of elements that are in none.
    #[error(
        "unit {unit}: the update rule {rule} updates whole matrices, and {elems} of its elements are in none; pass them to \
         `OptimizerBuilder::matrices`, or give these parameters another rule"
    )]
    NoMatrix {
        unit: String,
        rule: &'static str,
        /// Elements that are in no matrix.
        elems: usize,
    },
    /// A matrix whose parameter has a rule that works element by element, or is frozen.
    #[error("unit {unit} has matrices in group {group}, whose update rule does not see matrices")]
    NoMatrixRule { unit: String, group: usize },
    /// Matrices that are not all of their parameter.
    #[error(
        "{param} of shape {shape:?}: each of its elements must be in one matrix, and these are {matrices:?}"
    )]
    Matrices {
        param: String,
        shape: Vec<u64>,
        matrices: Vec<crate::Matrix>,
    },
    /// A part of a parameter that is not cut from it as the layout's.
    #[error(
        "{param}: its cut leaves a part of shape {expected:?}, and the layout has {got:?}; make the layout of the units of TensorPart::unit"
    )]
    MatrixPart {
        param: String,
        expected: Vec<u64>,
        got: Vec<u64>,
    },
    /// The cut of a parameter of matrices.
    #[error(transparent)]
    Cut(#[from] zero_shard::ShardError),
    /// A unit's update without other units of its wave.
    #[error(
        "matrices of unit {unit} are exchanged with those of other units: update all units at once, or make the matrices unit by unit"
    )]
    PartOfWave { unit: String },
    /// An exchange with other ranks failed.
    #[error("an exchange with the other ranks failed: {message}")]
    Exchange { message: String },
    /// Masters as remainders of parameters that are not bf16.
    #[error("masters as 16-bit remainders need parameters of bf16, got {dtype}")]
    Remainders {
        /// The dtype of the parameters.
        dtype: DType,
    },
    /// An update panicked in the middle of the state, which is lost.
    #[error(
        "the optimizer's state was lost when an earlier update panicked: create the optimizer again and resume from a checkpoint"
    )]
    StateLost,
    /// The scratch file of state on NVMe could not be made or used.
    #[error("{0}")]
    Swap(Cause),
    /// The pool could not allocate the state.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// A kernel could not be enqueued.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A stream or the device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

#[cfg(target_os = "linux")]
impl From<zero_alloc::swap::SwapError> for OptimError {
    fn from(error: zero_alloc::swap::SwapError) -> Self {
        Self::Swap(Cause::new(error))
    }
}

impl From<SettingError> for OptimError {
    fn from(error: SettingError) -> Self {
        Self::Setting {
            setting: error.setting,
            value: error.value,
            range: error.range,
        }
    }
}

impl OptimError {
    /// Returns [`Self::Setting`] unless `holds`.
    pub(crate) fn check(
        holds: bool,
        setting: &'static str,
        value: f64,
        range: &'static str,
    ) -> Result<(), Self> {
        Ok(SettingError::unless(holds, setting, value, range)?)
    }

    /// Returns [`Self::Setting`] unless `value` is a finite number that is not negative.
    pub(crate) fn from_zero(setting: &'static str, value: f64) -> Result<(), Self> {
        let holds = value.is_finite() && value >= 0.0;
        Self::check(holds, setting, value, "a finite number, 0 or above")
    }

    /// Returns [`Self::Setting`] unless `value` can be a decay rate.
    pub(crate) fn beta(setting: &'static str, value: f64) -> Result<(), Self> {
        let holds = (0.0..1.0).contains(&value);
        Self::check(holds, setting, value, "at least 0, below 1")
    }
}
