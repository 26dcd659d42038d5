//! The optimizer on the host: settings, schedules, loss scale, and training over shards.

mod common;
mod controller;
#[cfg(not(miri))]
mod deepspeed;
#[cfg(not(miri))]
mod few_bits;
mod groups;
#[cfg(all(target_os = "linux", not(miri)))]
mod offloaded;
mod sharded;
mod state;
