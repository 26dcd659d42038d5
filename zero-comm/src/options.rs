//! Options of a world of ranks, for every back end.

use std::time::Duration;

/// Options of a world of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CommOptions {
    /// The time limit of every wait for another rank. If it passes, the world fails. Default: 10
    /// minutes.
    pub limit: Duration,
}

zero_alloc::setters!(CommOptions { limit: Duration });

impl Default for CommOptions {
    fn default() -> Self {
        Self {
            limit: Duration::from_secs(600),
        }
    }
}
