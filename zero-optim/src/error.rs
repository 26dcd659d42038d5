//! What can go wrong in an optimizer step.

use zero_alloc::AllocError;
use zero_alloc::device::{DType, DeviceError};
use zero_kernels::KernelError;

/// Why an optimizer could not be made or a step not be taken.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OptimError {
    /// A setting is outside its range.
    #[error("{setting} = {value}: {rule}")]
    Setting {
        /// The setting's name.
        setting: &'static str,
        /// Its value.
        value: f64,
        /// What it must be.
        rule: &'static str,
    },
    /// Parameters of this dtype cannot be trained.
    #[error("parameters of {dtype} cannot be trained; use fp32, bf16 or fp16")]
    ParamDType {
        /// The dtype.
        dtype: DType,
    },
    /// The segments do not tile the state storage.
    #[error("unit {unit}: its state starts at {got}, expected {expected} (units tile the storage in order)")]
    Segments {
        /// The unit.
        unit: String,
        /// Where it should start.
        expected: usize,
        /// Where it starts.
        got: usize,
    },
    /// A segment votes for elements that it does not have.
    #[error("unit {unit}: votes for elements {start}..{end} of {len}")]
    VoteRange {
        /// The unit.
        unit: String,
        /// Where the range starts.
        start: usize,
        /// Where it ends.
        end: usize,
        /// Elements of the unit here.
        len: usize,
    },
    /// Not one slice per unit.
    #[error("{what}: expected {expected} slices, one per unit, got {got}")]
    SliceCount {
        /// Which slices.
        what: &'static str,
        /// Units.
        expected: usize,
        /// Slices given.
        got: usize,
    },
    /// A unit's slice has another length than its state.
    #[error("unit {unit}, {what}: expected {expected} elements, got {got}")]
    SliceLen {
        /// The unit.
        unit: String,
        /// Which slice.
        what: &'static str,
        /// Elements of the unit's state.
        expected: usize,
        /// Elements given.
        got: usize,
    },
    /// A unit's slice has another dtype than the optimizer was made for.
    #[error("unit {unit}, {what}: expected {expected}, got {got}")]
    SliceDType {
        /// The unit.
        unit: String,
        /// Which slice.
        what: &'static str,
        /// Dtype expected.
        expected: DType,
        /// Dtype given.
        got: DType,
    },
    /// A decision without votes.
    #[error("no votes: a step is decided by the votes of all ranks")]
    NoVotes,
    /// Gradients overflow although the loss scale can go no lower.
    #[error(
        "step {step}: gradients of unit {unit} on rank {rank} are not finite although the loss scale is at its \
         minimum of {scale}; the run diverges: lower the learning rate, or train in bf16"
    )]
    LossScaleAtMinimum {
        /// Steps taken or skipped before this one.
        step: u64,
        /// The loss scale.
        scale: f64,
        /// The first rank that saw it.
        rank: usize,
        /// The first unit there.
        unit: String,
    },
    /// A step that is decided on the device before `decide_on_device`.
    #[error("steps are not decided on the device: call decide_on_device first")]
    NotOnDevice,
    /// Reports of steps under way would be lost.
    #[error("steps are under way whose reports are not read: call all_reports first")]
    ReportsLeft,
    /// A report was overwritten before it was read.
    #[error("the report of step {iteration} is gone: 64 steps or more were enqueued without reading reports")]
    ReportLost {
        /// Steps decided before it.
        iteration: u64,
    },
    /// The device has no rates for the schedule's position.
    #[error("no rates on the device for position {position} of the schedule: call decide_on_device again")]
    NoRate {
        /// The position.
        position: u64,
    },
    /// A saved state does not fit the settings.
    #[error("saved {what} does not fit: {reason}")]
    Restore {
        /// What was saved.
        what: &'static str,
        /// Why not.
        reason: String,
    },
    /// No memory for the state.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// A launch was refused.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A stream failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl OptimError {
    /// Refuses `value` unless `holds`.
    pub(crate) fn check(holds: bool, setting: &'static str, value: f64, rule: &'static str) -> Result<(), Self> {
        if holds { Ok(()) } else { Err(Self::Setting { setting, value, rule }) }
    }
}
