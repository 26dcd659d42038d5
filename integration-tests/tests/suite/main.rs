//! All integration tests that need neither a GPU nor MPI nor NVRTC, in one binary, because linking
//! several is slow.

mod breakdown;
mod cli;
mod config;
mod edges;
mod errors;
#[cfg(target_os = "linux")]
mod launcher;
#[cfg(target_os = "linux")]
mod memory;
mod offload_faults;
#[path = "../common/oracle.rs"]
mod oracle;
mod outputs;
mod own_framework;
#[path = "../common/place.rs"]
mod place;
mod plan_and_train;
mod public_types;
mod record;
mod store;
mod trainer;
mod validation;
