//! How a world of ranks behaves, whatever carries its data.

use std::time::Duration;

/// How a world of ranks behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommOptions {
    /// How long a rank waits for the others before it ends the world with an error. Default: 10 minutes.
    pub limit: Duration,
}

impl Default for CommOptions {
    fn default() -> Self {
        Self { limit: Duration::from_secs(600) }
    }
}
