//! Streams as queues on worker threads.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::{HostEvent, OpSpan, Timeline};
use crate::device::{DeviceError, Event, Stream};

type Op = Box<dyn FnOnce() -> Result<(), DeviceError> + Send>;

enum Item {
    Run(&'static str, Op),
    Record(HostEvent),
    Wait(HostEvent),
}

#[derive(Default)]
struct Queue {
    items: VecDeque<Item>,
    /// Set when the queue is closed: the point after its last item.
    end: Option<HostEvent>,
    /// The worker sleeps: all that was enqueued before `items` has run.
    idle: bool,
    /// What poisoned the stream; kept up to date while the worker sleeps.
    failed: Option<DeviceError>,
}

struct Shared {
    name: Arc<str>,
    id: u64,
    timeline: Option<Timeline>,
    queue: Mutex<Queue>,
    arrived: Condvar,
}

/// A stream of the host: a queue that one worker thread runs in order. When the last handle is gone, the
/// worker runs what is left and ends.
#[derive(Clone)]
pub struct HostStream(Arc<Handle>);

struct Handle(Arc<Shared>);

impl Handle {
    fn close(&self) {
        let mut queue = self.0.queue.lock();
        if queue.end.is_none() {
            let end = HostEvent::new(Arc::clone(&self.0.name));
            queue.items.push_back(Item::Record(end.clone()));
            queue.end = Some(end);
            drop(queue);
            self.0.arrived.notify_one();
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.close();
    }
}

impl std::fmt::Debug for HostStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostStream({})", self.name())
    }
}

/// Stream identities of the process.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl HostStream {
    pub(super) fn spawn(name: &str, timeline: Option<Timeline>) -> Result<Self, DeviceError> {
        let shared = Arc::new(Shared {
            name: name.into(),
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            timeline,
            queue: Mutex::default(),
            arrived: Condvar::new(),
        });
        let worker = Arc::clone(&shared);
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || work(&worker))
            .map_err(|e| DeviceError::Driver { call: "thread spawn", message: e.to_string() })?;
        Ok(Self(Arc::new(Handle(shared))))
    }

    /// Enqueues `op`; `label` names it in errors and timelines. An `Err` or a panic poisons the stream:
    /// what [`Stream::synchronize`] returns then names the stream and the label.
    ///
    /// An operation that must wait for another one does it through a [`Gate`](super::Gate).
    ///
    /// # Errors
    /// [`DeviceError::Closed`].
    pub fn enqueue(
        &self,
        label: &'static str,
        op: impl FnOnce() -> Result<(), DeviceError> + Send + 'static,
    ) -> Result<(), DeviceError> {
        self.push(Item::Run(label, Box::new(op)))
    }

    /// Closes the queue for all handles: what is enqueued still runs, later operations and waits are refused,
    /// and [`Stream::record`] gives the end of the queue.
    pub fn close(&self) {
        self.0.close();
    }

    fn push(&self, item: Item) -> Result<(), DeviceError> {
        let shared = &self.0.0;
        let mut queue = shared.queue.lock();
        if queue.end.is_some() {
            return Err(DeviceError::Closed { stream: shared.name.to_string() });
        }
        queue.items.push_back(item);
        // The worker takes the whole queue at once, so it sleeps only on an empty one.
        let was_empty = queue.items.len() == 1;
        drop(queue);
        if was_empty {
            shared.arrived.notify_one();
        }
        Ok(())
    }
}

impl Stream for HostStream {
    type Event = HostEvent;

    fn name(&self) -> &str {
        &self.0.0.name
    }

    fn id(&self) -> u64 {
        self.0.0.id
    }

    fn record(&self) -> Result<HostEvent, DeviceError> {
        let event = HostEvent::new(Arc::clone(&self.0.0.name));
        let mut queue = self.0.0.queue.lock();
        if let Some(end) = &queue.end {
            return Ok(end.clone());
        }
        if queue.idle && queue.items.is_empty() {
            event.reach(queue.failed.clone());
        } else {
            queue.items.push_back(Item::Record(event.clone()));
        }
        Ok(event)
    }

    fn wait(&self, event: &HostEvent) -> Result<(), DeviceError> {
        if matches!(event.result(), Some(Ok(()))) {
            return if self.0.0.queue.lock().end.is_some() {
                Err(DeviceError::Closed { stream: self.name().to_owned() })
            } else {
                Ok(())
            };
        }
        self.push(Item::Wait(event.clone()))
    }

    fn synchronize(&self, limit: Duration) -> Result<(), DeviceError> {
        self.record()?.synchronize(limit)
    }
}

/// The worker: takes what is enqueued, runs it in order, ends when the queue is closed and empty.
fn work(shared: &Shared) {
    let mut failed: Option<DeviceError> = None;
    let mut taken = VecDeque::new();
    loop {
        {
            let mut queue = shared.queue.lock();
            if queue.items.is_empty() {
                queue.idle = true;
                queue.failed.clone_from(&failed);
            }
            while queue.items.is_empty() {
                if queue.end.is_some() {
                    return;
                }
                shared.arrived.wait(&mut queue);
            }
            queue.idle = false;
            std::mem::swap(&mut queue.items, &mut taken);
        }
        for item in taken.drain(..) {
            run(shared, item, &mut failed);
        }
    }
}

fn run(shared: &Shared, item: Item, failed: &mut Option<DeviceError>) {
    match item {
        Item::Run(label, op) => {
            if failed.is_none() {
                *failed = timed(shared, label, || call(shared, label, op)).err();
            }
        }
        Item::Record(event) => event.reach(failed.clone()),
        Item::Wait(event) => {
            let result = event.result().unwrap_or_else(|| {
                // The streams waited for have limits of their own in their operations, so this wait ends.
                timed(shared, "wait", || event.synchronize(Duration::MAX))
            });
            if let Err(e) = result {
                failed.get_or_insert(e);
            }
        }
    }
}

fn timed<R>(shared: &Shared, label: &'static str, work: impl FnOnce() -> R) -> R {
    let Some(timeline) = &shared.timeline else { return work() };
    let start = timeline.now();
    let result = work();
    timeline.push(OpSpan { label, stream: Arc::clone(&shared.name), start, end: timeline.now() });
    result
}

/// Runs an operation; its error or panic gets the names of the stream and the operation.
fn call(shared: &Shared, label: &'static str, op: Op) -> Result<(), DeviceError> {
    let (stream, op_name) = (shared.name.to_string(), label.to_owned());
    match catch_unwind(AssertUnwindSafe(op)) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(e @ (DeviceError::Operation { .. } | DeviceError::Panicked { .. }))) => Err(e),
        Ok(Err(e)) => Err(DeviceError::Operation { stream, op: op_name, message: e.to_string() }),
        Err(panic) => Err(DeviceError::Panicked { stream, op: op_name, message: message_of(&*panic) }),
    }
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}
