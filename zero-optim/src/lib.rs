#![doc = include_str!("../README.md")]

mod adamw;
mod controller;
mod device_steps;
mod error;
mod loss_scale;
mod schedule;
mod segments;
mod state;

pub use adamw::{GatheredStats, ShardedAdamW};
pub use controller::{OptimizerConfig, Overflow, Progress, ReducedFlags, StepController, StepOutcome};
pub use device_steps::{DeviceStepConfig, RankStatsSlices};
pub use error::OptimError;
pub use loss_scale::{DynamicScaling, LossScalerState, LossScaling};
pub use schedule::{
    Decay, DecayCurve, LrSchedule, OneCycle, RangeTest, Warmup, WarmupCosine, WarmupDecay, WarmupType,
};
pub use segments::{Segment, UnitSlices};
pub use state::StateKind;
pub use zero_kernels::RankStats;
