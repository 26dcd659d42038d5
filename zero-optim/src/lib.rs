#![doc = include_str!("../README.md")]

mod adamw;
mod decide;
mod error;
mod loss_scale;
mod schedule;
mod state;

pub use adamw::{Ballot, Segment, ShardedAdamW, UnitSlices};
pub use decide::{BackwardScale, Decider, Decision, Overflow, Progress, StepOutcome, StepRules};
pub use error::OptimError;
pub use loss_scale::{AtMinimum, DynamicScaling, LossScaler, LossScalerState, LossScaling, ScaleChange};
pub use schedule::{LrSchedule, OneCycle, RangeTest, Warmup, WarmupCosine, WarmupDecay, WarmupType};
pub use state::StateKind;
pub use zero_kernels::Vote;
