//! The optimizer on the host: settings, schedules, loss scale, and training over shards.

#[cfg(not(miri))]
mod any_sharding;
mod common;
mod controller;
#[cfg(not(miri))]
mod deepspeed;
mod groups;
#[cfg(all(target_os = "linux", not(miri)))]
mod offloaded;
mod sharded;
mod state;
