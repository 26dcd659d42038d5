//! Waits for streams before the caller's memory is freed.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use zero_alloc::device::{Device, Event, Stream};

use crate::Communicator;

/// Waits, when it is dropped, until its streams have run all that was enqueued. Declare it after
/// the caller's own memory, which then outlives the work on it also where `?` leaves a function.
///
/// A stream that takes longer than the limit (collectives wait for other ranks) gets its
/// communicator aborted, which ends the collectives. One that then takes longer than the limit
/// again, and than 10 s, ends the process: it still writes to memory that would be freed.
#[must_use = "dropping it waits at once"]
pub struct WaitOnDrop<D: Device> {
    comm: Arc<dyn Communicator<D>>,
    streams: Vec<D::Stream>,
    limit: Duration,
}

impl<D: Device> WaitOnDrop<D> {
    /// Will wait for `streams`, at most `limit` for each before `comm` is aborted.
    pub fn new(
        comm: Arc<dyn Communicator<D>>,
        streams: impl Into<Vec<D::Stream>>,
        limit: Duration,
    ) -> Self {
        Self {
            comm,
            streams: streams.into(),
            limit,
        }
    }
}

impl<D: Device> fmt::Debug for WaitOnDrop<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitOnDrop")
            .field("limit", &self.limit)
            .finish_non_exhaustive()
    }
}

/// The least time that a stream has to end after an abort: a short limit on a busy machine does not
/// end the process.
const AFTER_ABORT: Duration = Duration::from_secs(10);

impl<D: Device> Drop for WaitOnDrop<D> {
    fn drop(&mut self) {
        // A stream's error may come before the end of its earlier operations, so the point itself
        // is asked. A point that is done with an error is the end of all that was enqueued before
        // it.
        let ends = |stream: &D::Stream, limit| {
            let end = stream.record();
            end.is_ok_and(|end| end.synchronize(limit).is_ok() || end.is_done().unwrap_or(true))
        };

        for stream in &self.streams {
            if !ends(stream, self.limit) {
                let name = stream.name();
                let limit = self.limit.max(AFTER_ABORT);
                self.comm.abort(&format!(
                    "stream {name} did not end within {:?}",
                    self.limit
                ));
                if !ends(stream, limit) {
                    eprintln!(
                        "zero-comm: stream {name} did not end within {limit:?} of the abort of its communicator; the process ends, because the stream still uses memory that would be freed"
                    );
                    std::process::abort();
                }
            }
        }
    }
}
