//! The completion of an asynchronous abort.
//!
//! Why asynchronous: the work of one communicator may wait on a stream behind that of another, so
//! all are aborted at the same time; and a graph that still holds collectives blocks an abort until
//! it is destroyed.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// Time limit of a wait. After it, the abort completes in the background: it may need resources
/// that the process releases only once it sees the failure, such as a graph with collectives.
pub(crate) const LIMIT: Duration = Duration::from_secs(5);

/// The completion of an asynchronous abort.
#[must_use]
pub(crate) struct AbortCompletion(Receiver<()>);

impl AbortCompletion {
    /// Returns a sender and a completion; dropping the sender completes it.
    pub(crate) fn new() -> (Sender<()>, Self) {
        let (sender, receiver) = channel();
        (sender, Self(receiver))
    }

    /// Waits for at most [`LIMIT`].
    pub(crate) fn wait(self) {
        Self::wait_for_all([self]);
    }

    /// Waits for all of them, for at most [`LIMIT`] in total.
    pub(crate) fn wait_for_all(all: impl IntoIterator<Item = Self>) {
        let deadline = Instant::now() + LIMIT;
        for Self(receiver) in all {
            // Nothing is ever sent: this returns when the sender is dropped.
            let _ = receiver.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        }
    }
}
