//! What every back end's launches must do, written once; `tests/launch.rs` runs it on each.
#![allow(unreachable_pub)]

pub mod adam;
pub mod decide;
pub mod flat;
pub mod order;
pub mod refused;
mod rig;
#[cfg(not(miri))]
pub mod torch;

pub use rig::Rig;
