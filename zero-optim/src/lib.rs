#![doc = include_str!("../README.md")]

mod adamw;
mod agreement;
mod builder;
#[cfg(feature = "ckpt")]
mod checkpoint;
mod controller;
mod device_steps;
mod error;
mod format;
#[cfg(feature = "framework")]
pub mod framework;
mod groups;
#[cfg(feature = "framework")]
#[doc = include_str!("../GUIDE.md")]
pub mod guide {}
mod loss_scale;
mod pieces;
mod rounding;
mod schedule;
mod segments;
mod state;
mod update;

pub use adamw::{GatheredStats, ShardedAdamW, StepInputs};
pub use agreement::{AgreementError, RankSettings, agree};
pub use builder::AdamWBuilder;
#[cfg(feature = "ckpt")]
pub use checkpoint::{CheckpointError, RankParams};
pub use controller::{
    Divisor, OptimizerConfig, Overflow, Progress, ReducedFlags, StepController, StepOutcome,
};
pub use device_steps::{DeviceStepConfig, RankStatsSlices};
pub use error::OptimError;
pub use format::{OffloadOptions, StateHome};
pub use groups::{GroupRules, GroupRun, ParamGroups, Piece};
pub use loss_scale::{DynamicScaling, LossScalerState, LossScaling};
pub use schedule::{
    Decay, DecayCurve, LrSchedule, OneCycle, RangeTest, Warmup, WarmupCosine, WarmupDecay,
    WarmupType,
};
pub use segments::{Segment, UnitSlices};
pub use state::{StateKind, StateRange};
pub use zero_kernels::RankStats;
