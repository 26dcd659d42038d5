//! The optimizer on the host: settings, schedules, loss scale, and training over shards.

mod common;
mod controller;
#[cfg(not(miri))]
mod deepspeed;
mod groups;
mod sharded;
mod state;
