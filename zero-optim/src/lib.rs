#![doc = include_str!("../README.md")]

mod agreement;
mod builder;
#[cfg(feature = "ckpt")]
mod checkpoint;
#[cfg(feature = "comm")]
mod comm_exchange;
mod conditions;
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
mod matrices;
mod matrix_exchange;
mod matrix_update;
mod optimizer;
mod pieces;
mod run_rows;
mod schedule;
mod segments;
mod state;
mod update;

pub use agreement::{AgreementError, RankSettings, agree};
pub use builder::OptimizerBuilder;
#[cfg(feature = "ckpt")]
pub use checkpoint::{CheckpointError, RankParams};
#[cfg(feature = "comm")]
pub use comm_exchange::CommExchange;
pub use conditions::{GroupRule, KindOf, ParamGroup, ParamKind};
pub use controller::{
    Divisor, OptimizerConfig, Overflow, Progress, ReducedFlags, StepController, StepOutcome,
};
pub use device_steps::{DeviceStepConfig, RankStatsSlices};
pub use error::OptimError;
pub use format::{Masters, Moments, StateArrays, StateFormat, StateHome, StateKind};
pub use groups::{GroupRules, GroupRun, ParamGroups, Piece};
pub use loss_scale::{DynamicScaling, LossScalerState, LossScaling};
pub use matrices::{Matrices, Matrix, MatrixParam};
pub use matrix_exchange::{AllToAll, MatrixDevice, OffloadedMatrices};
pub use optimizer::{GatheredStats, ShardedOptimizer, StepInputs};
pub use schedule::{
    Decay, DecayCurve, LrSchedule, OneCycle, RangeTest, Warmup, WarmupCosine, WarmupDecay,
    WarmupType,
};
pub use segments::{Segment, UnitSlices};
pub use state::StateRange;
pub use zero_kernels::RankStats;
