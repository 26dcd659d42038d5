//! All integration tests that need no GPU and no MPI, in one program: linking one is faster than linking several.

mod cli;
#[cfg(target_os = "linux")]
mod launcher;
#[path = "../common/oracle.rs"]
mod oracle;
#[path = "../common/place.rs"]
mod place;
mod plan_and_train;
mod trainer;
