//! Why a block could not be had.

use super::Purpose;
use crate::device::DeviceError;

/// Why a block could not be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// The budget has no room, or the device has no more.
    #[error(
        "out of memory: asked for {asked_bytes} bytes for {purpose:?}{}; {live_bytes} {}are live, {free_bytes} are \
         reserved and free, the largest contiguous {largest_free_bytes} \
         ({after_compaction_bytes} after compaction); held by {}",
        device.as_ref().map(|words| format!(", which the device has not ({words})")).unwrap_or_default(),
        if *budget_bytes == usize::MAX { String::new() } else { format!("of a budget of {budget_bytes} ") },
        list(holders)
    )]
    OutOfMemory {
        /// What was asked for.
        asked_bytes: usize,
        /// For what.
        purpose: Purpose,
        /// What the device said, where it was the device that had no more; `None` where it was the budget.
        device: Option<String>,
        /// Live in the pool.
        live_bytes: usize,
        /// The pool's limit.
        budget_bytes: usize,
        /// Taken from the device and in no block.
        free_bytes: usize,
        /// The largest contiguous part of that.
        largest_free_bytes: usize,
        /// The largest that compaction could make of it.
        after_compaction_bytes: usize,
        /// Who holds what is live, the biggest first.
        holders: Vec<(Purpose, usize)>,
    },
    /// The device failed otherwise.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

fn list(holders: &[(Purpose, usize)]) -> String {
    if holders.is_empty() {
        return "nobody".to_owned();
    }
    let words: Vec<_> = holders.iter().map(|(purpose, bytes)| format!("{purpose:?} {bytes}")).collect();
    words.join(", ")
}
