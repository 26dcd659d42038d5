#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod error;
mod hooks;
mod muon;
mod step;
mod values;
mod zero;

pub use hooks::ShardedVars;
pub use muon::ZeroMuon;
pub use step::{BackwardReport, TrainStep, UnitLaunch};
pub use zero::{ZeroAdamW, ZeroConfig, unit_of_block};
