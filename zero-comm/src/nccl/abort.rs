//! The completion of an asynchronous abort.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// The longest wait. An abort can depend on resources that the process releases only when it sees the failure, such as
/// a graph with collectives in it, so it is then left to complete in the background.
const LIMIT: Duration = Duration::from_secs(5);

/// The completion of an asynchronous abort.
#[must_use]
pub(super) struct AbortCompletion(Receiver<()>);

impl AbortCompletion {
    /// Returns a sender and the completion that occurs when the sender is dropped.
    pub(super) fn new() -> (Sender<()>, Self) {
        let (sender, receiver) = channel();
        (sender, Self(receiver))
    }

    /// Waits for at most [`LIMIT`].
    pub(super) fn wait(self) {
        Self::wait_for_all([self]);
    }

    /// Waits for all, for at most [`LIMIT`] in sum.
    pub(super) fn wait_for_all(all: impl IntoIterator<Item = Self>) {
        let deadline = Instant::now() + LIMIT;
        for Self(receiver) in all {
            // Nothing is ever sent: this returns when the sender is dropped.
            let _ = receiver.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        }
    }
}
