#![doc = include_str!("../README.md")]

mod hooks;
mod reducer;
mod zero;

pub use hooks::ShardedVars;
pub use reducer::{BackwardReport, UnitLaunch};
pub use zero::{ZeroAdamW, ZeroConfig, unit_of_block};
