#![doc = include_str!("../README.md")]

mod adamw;
mod decide;
mod error;
mod loss_scale;
mod on_device;
mod schedule;
mod segments;
mod state;

pub use adamw::{GatheredStats, ShardedAdamW};
pub use decide::{BackwardScale, Decision, Flags, OptimizerConfig, Overflow, Progress, StepController, StepOutcome};
pub use error::OptimError;
pub use loss_scale::{AtMinimum, DynamicScaling, LossScaler, LossScalerState, LossScaling, ScaleChange};
pub use on_device::{DeviceSteps, RankStatsSlices};
pub use schedule::{LrSchedule, OneCycle, RangeTest, Warmup, WarmupCosine, WarmupDecay, WarmupType};
pub use segments::{Segment, UnitSlices};
pub use state::StateKind;
pub use zero_kernels::RankStats;
