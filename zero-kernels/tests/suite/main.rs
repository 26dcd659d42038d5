//! The operations over Rust slices and the run-time compilation of kernels.

#[cfg(not(miri))]
mod blocks_on_host;
#[path = "../common/mod.rs"]
mod common;
#[cfg(not(miri))]
mod laws;
#[cfg(all(feature = "cuda", not(miri)))]
mod loader;
mod oracle;
#[cfg(not(miri))]
mod orthogonalise;
#[cfg(not(miri))]
mod peers;
mod remainder;
mod step;
