#![doc = include_str!("../README.md")]

mod call;
mod communicator;
mod error;
mod reduce;
pub mod threads;

pub use call::{Call, Checked, Group, Segments, balanced_range};
pub use communicator::{Collective, Communicator, ReduceOp, Traffic};
pub use error::CommError;
