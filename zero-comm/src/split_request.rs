//! A rank's arguments of a split, and the members of the new communicators.

use serde::{Deserialize, Serialize};

/// A rank's arguments of a split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SplitRequest {
    /// The color of its new communicator; `None` to join none.
    pub(crate) color: Option<u64>,
    /// Orders the ranks of a color.
    pub(crate) key: u64,
}

/// The ranks of `color`, in the order of their keys, then of their ranks.
pub(crate) fn members(requests: &[SplitRequest], color: u64) -> Vec<usize> {
    let of_color = requests
        .iter()
        .enumerate()
        .filter(|(_, request)| request.color == Some(color));
    let mut members: Vec<(u64, usize)> = of_color
        .map(|(rank, request)| (request.key, rank))
        .collect();
    members.sort_unstable();
    members.into_iter().map(|(_, rank)| rank).collect()
}
