//! Waits of streams for events of the host.
//!
//! The stream waits for a word of pinned memory, which the thread of the host that reaches the
//! event writes. Without a word (the device has no such waits, too many are pending, or the event
//! is of the seeded scheduler) the calling thread waits before it enqueues more.
//!
//! Why no host operation of the stream waits: one thread of the driver may run those of all
//! streams. The event may be behind work of the device that is itself behind a host operation,
//! which would then never run.
//!
//! A wait ends at its limit even if the event is never reached: whoever waits for the device calls
//! [`expire`], and so does a thread while there are waits, since all others may be blocked in the
//! driver.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Weak};
use std::thread::{self, Thread};
use std::time::Duration;

use parking_lot::Mutex;

use super::CudaStream;
use super::driver::Context;
use super::sticky::Sticky;
use crate::TimeLimit;
use crate::device::{DeviceError, Event, run_named};
use crate::host::HostEvent;

const LABEL: &str = "wait for the host";

/// Waits with a limit that are not known to have ended.
static PENDING: Mutex<Vec<(TimeLimit, Weak<HostWait>)>> = Mutex::new(Vec::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// The time between two calls of [`expire`] by the thread.
const PERIOD: Duration = Duration::from_millis(100);
/// The thread, started by the first wait; `None` if the system has refused it.
static THREAD: LazyLock<Option<Thread>> = LazyLock::new(|| {
    let work = || loop {
        match COUNT.load(Ordering::Relaxed) {
            0 => thread::park(),
            _ => {
                expire();
                thread::park_timeout(PERIOD);
            }
        }
    };
    let spawned = thread::Builder::new()
        .name("zero-alloc limits".to_owned())
        .spawn(work);
    spawned.ok().map(|handle| handle.thread().clone())
});

/// A wait of a stream, which ends at the latest when this is dropped: then the event will not be
/// reached.
struct HostWait {
    context: Arc<Context>,
    word: usize,
    stream: Arc<str>,
    event: String,
    sticky: Arc<Sticky>,
    position: u64,
    over: AtomicBool,
}

impl HostWait {
    /// Lets the stream go on. A failure poisons it first.
    fn end(&self, result: Result<(), DeviceError>) {
        if self.over.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Err(error) = run_named(&self.stream, LABEL, || result) {
            self.sticky.fail(&self.stream, LABEL, self.position, error);
        }
        self.context.release_word(self.word);
    }
}

impl Drop for HostWait {
    fn drop(&mut self) {
        self.end(Err(DeviceError::Closed {
            stream: self.event.clone(),
        }));
    }
}

/// Makes later operations of `stream` wait for `event`, at most `limit`.
pub(super) fn wait(
    stream: &CudaStream,
    event: &HostEvent,
    limit: Duration,
) -> Result<(), DeviceError> {
    event.check_runs("wait_for_host")?;
    stream.refuse_in_capture("wait_for_host")?;
    stream.check()?;
    if event.is_done() == Ok(true) {
        return Ok(());
    }
    let context = stream.queue().context();
    let word = if event.is_seeded() {
        None
    } else {
        context.take_word()
    };

    let Some(word) = word else {
        wait_here(stream, event, limit);
        return Ok(());
    };

    let stream_name = stream.shared_name();
    let sticky = stream.sticky();
    let wait = Arc::new(HostWait {
        context: Arc::clone(context),
        word,
        stream: Arc::clone(stream_name),
        event: event.stream().to_owned(),
        sticky: Arc::clone(sticky),
        position: sticky.position(),
        over: AtomicBool::new(false),
    });

    // If only a part is enqueued, the drop releases the word.
    stream.labelled(LABEL, || stream.queue().wait_for_word(word))?;
    let mut pending = PENDING.lock();
    pending.push((TimeLimit::new(limit), Arc::downgrade(&wait)));
    COUNT.store(pending.len(), Ordering::Relaxed);
    let is_first = pending.len() == 1;
    drop(pending);
    if let (true, Some(thread)) = (is_first, &*THREAD) {
        thread.unpark();
    }
    event.then(move |result| wait.end(result));

    Ok(())
}

/// Waits on the calling thread. A failure poisons the stream, as that of a wait in the stream does.
fn wait_here(stream: &CudaStream, event: &HostEvent, limit: Duration) {
    let stream_name = stream.shared_name();
    let sticky = stream.sticky();
    let position = sticky.position();
    if let Err(error) = run_named(stream_name, LABEL, || event.synchronize(limit)) {
        sticky.fail(stream_name, LABEL, position, error);
    }
}

/// Ends the waits whose limit has passed. One load if there is no wait.
pub(super) fn expire() {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return;
    }
    let mut expired = Vec::new();
    let mut pending = PENDING.lock();
    pending.retain_mut(|(limit, wait)| {
        let passed = limit.has_passed();
        if passed {
            expired.extend(wait.upgrade().map(|wait| (limit.limit(), wait)));
        }
        !passed && wait.strong_count() > 0
    });
    COUNT.store(pending.len(), Ordering::Relaxed);
    drop(pending);
    for (limit, wait) in expired {
        wait.end(Err(DeviceError::TimedOut {
            what: format!("stream {}", wait.event),
            limit,
        }));
    }
}
