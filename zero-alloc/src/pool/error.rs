//! Why a block could not be had.

use super::Purpose;
use crate::device::DeviceError;

/// Why a block could not be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// The budget or the device has no room.
    #[error("out of memory: asked for {asked_bytes} bytes for {purpose:?}, {live_bytes} of {budget_bytes} are live")]
    OutOfMemory {
        /// What was asked for.
        asked_bytes: usize,
        /// For what.
        purpose: Purpose,
        /// Live in the pool.
        live_bytes: usize,
        /// The pool's limit.
        budget_bytes: usize,
    },
    /// The device failed otherwise.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
