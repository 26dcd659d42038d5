//! The program `zero` as a user starts it, in one test program, because linking several is slow.

mod alone;
mod breakdown;
mod ckpt;
mod cli;
mod config;
mod edges;
mod examples;
mod folders;
mod generate;
#[cfg(target_os = "linux")]
mod kept;
mod launcher;
mod lora;
#[cfg(target_os = "linux")]
mod memory;
mod monitors;
mod offload_faults;
mod outputs;
#[path = "../common/place.rs"]
mod place;
mod plan_and_train;
#[cfg(target_os = "linux")]
mod processes;
mod record;
mod samples;
mod simulated;
mod store;
mod support;
mod token_cache;
mod tune;
mod validation;
