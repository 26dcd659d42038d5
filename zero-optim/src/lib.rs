#![doc = include_str!("../README.md")]

mod adamw;
mod decide;
mod error;
mod loss_scale;
mod on_device;
mod schedule;
mod segments;
mod state;

pub use adamw::{Ballot, ShardedAdamW};
pub use decide::{BackwardScale, Decider, Decision, Flags, Overflow, Progress, StepOutcome, StepRules};
pub use error::OptimError;
pub use loss_scale::{AtMinimum, DynamicScaling, LossScaler, LossScalerState, LossScaling, ScaleChange};
pub use on_device::{DeviceSteps, VoteSlices};
pub use schedule::{LrSchedule, OneCycle, RangeTest, Warmup, WarmupCosine, WarmupDecay, WarmupType};
pub use segments::{Segment, UnitSlices};
pub use state::StateKind;
pub use zero_kernels::Vote;
