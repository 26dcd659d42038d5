//! Waiting for streams whose memory is about to be freed.

use std::time::Duration;

use zero_alloc::device::{Event, Stream};

/// Waits for all work of `stream`. One that does not end, even though its communicator was aborted,
/// ends the process: it still uses memory that would be freed.
pub(crate) fn drain<S: Stream>(stream: &S, limit: Duration) {
    let Ok(end) = stream.record() else { return };
    if end.synchronize(limit).is_err() && matches!(end.is_done(), Ok(false)) {
        let name = stream.name();
        tracing::error!(
            "stream {name} did not end within {limit:?}; the process ends, because it uses memory that would be freed"
        );
        std::process::abort();
    }
}
