//! The end of what a communicator had under way when it was aborted.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// How long that is waited for. What takes longer is left to itself: it stands behind something of this process that
/// goes when the failure is known, as a graph with collectives in it does.
const LIMIT: Duration = Duration::from_secs(5);

/// An end that is to come, or has.
#[must_use]
pub(super) struct AbortCompletion(Receiver<()>);

impl AbortCompletion {
    /// It comes when the sender is dropped.
    pub(super) fn new() -> (Sender<()>, Self) {
        let (ended, end) = channel();
        (ended, Self(end))
    }

    /// Waits for it, not for ever.
    pub(super) fn wait(self) {
        Self::wait_for_all([self]);
    }

    /// Waits for all, as long as for one.
    pub(super) fn wait_for_all(all: impl IntoIterator<Item = Self>) {
        let deadline = Instant::now() + LIMIT;
        for Self(end) in all {
            // Nothing is ever sent.
            let _ = end.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        }
    }
}
