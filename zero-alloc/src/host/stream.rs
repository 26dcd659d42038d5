//! Streams as queues on worker threads, and events between them.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

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
    closed: bool,
}

struct Shared {
    name: String,
    queue: Mutex<Queue>,
    arrived: Condvar,
}

/// A stream of the host: a queue that one worker thread runs in order.
#[derive(Clone)]
pub struct HostStream(Arc<Handle>);

/// The last handle closes the queue; the worker runs what is left and ends.
struct Handle(Arc<Shared>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.queue.lock().closed = true;
        self.0.arrived.notify_all();
    }
}

impl std::fmt::Debug for HostStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostStream({})", self.name())
    }
}

impl HostStream {
    pub(super) fn spawn(name: &str) -> Result<Self, DeviceError> {
        let shared = Arc::new(Shared { name: name.to_owned(), queue: Mutex::default(), arrived: Condvar::new() });
        let worker = Arc::clone(&shared);
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || run(&worker))
            .map_err(|e| DeviceError::Driver { call: "thread spawn", message: e.to_string() })?;
        Ok(Self(Arc::new(Handle(shared))))
    }

    /// Enqueues `op`; `label` names it in errors and timelines. An `Err` or a panic poisons the stream.
    ///
    /// # Errors
    /// The stream is closed.
    pub fn enqueue(
        &self,
        label: &'static str,
        op: impl FnOnce() -> Result<(), DeviceError> + Send + 'static,
    ) -> Result<(), DeviceError> {
        self.push(Item::Run(label, Box::new(op)))
    }

    fn push(&self, item: Item) -> Result<(), DeviceError> {
        let shared = &self.0.0;
        shared.queue.lock().items.push_back(item);
        shared.arrived.notify_one();
        Ok(())
    }
}

impl Stream for HostStream {
    type Event = HostEvent;

    fn name(&self) -> &str {
        &self.0.0.name
    }

    fn record(&self) -> Result<HostEvent, DeviceError> {
        let event = HostEvent::new(self.name());
        self.push(Item::Record(event.clone()))?;
        Ok(event)
    }

    fn wait(&self, event: &HostEvent) -> Result<(), DeviceError> {
        self.push(Item::Wait(event.clone()))
    }

    fn synchronize(&self, limit: Duration) -> Result<(), DeviceError> {
        self.record()?.synchronize(limit)
    }
}

fn run(shared: &Shared) {
    let mut failed: Option<DeviceError> = None;
    loop {
        let item = {
            let mut queue = shared.queue.lock();
            loop {
                if let Some(item) = queue.items.pop_front() {
                    break item;
                }
                if queue.closed {
                    return;
                }
                shared.arrived.wait(&mut queue);
            }
        };
        match item {
            Item::Run(label, op) if failed.is_none() => {
                failed = match catch_unwind(AssertUnwindSafe(op)) {
                    Ok(Ok(())) => None,
                    Ok(Err(e)) => Some(e),
                    Err(panic) => {
                        let message = panic
                            .downcast_ref::<&str>()
                            .map(|s| (*s).to_owned())
                            .or_else(|| panic.downcast_ref::<String>().cloned())
                            .unwrap_or_else(|| "no message".to_owned());
                        Some(DeviceError::Panicked { stream: shared.name.clone(), op: label.to_owned(), message })
                    }
                };
            }
            Item::Run(..) => {}
            Item::Record(event) => event.reach(failed.clone()),
            Item::Wait(event) => {
                if let Err(e) = event.wait_unlimited() {
                    failed.get_or_insert(e);
                }
            }
        }
    }
}

struct Point {
    stream: String,
    state: Mutex<Option<Result<(), DeviceError>>>,
    reached: Condvar,
}

/// A point in a [`HostStream`].
#[derive(Clone)]
pub struct HostEvent(Arc<Point>);

impl std::fmt::Debug for HostEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostEvent({}, {:?})", self.0.stream, *self.0.state.lock())
    }
}

impl HostEvent {
    fn new(stream: &str) -> Self {
        Self(Arc::new(Point { stream: stream.to_owned(), state: Mutex::new(None), reached: Condvar::new() }))
    }

    fn reach(&self, failed: Option<DeviceError>) {
        *self.0.state.lock() = Some(failed.map_or(Ok(()), Err));
        self.0.reached.notify_all();
    }

    /// For streams waiting on streams: each operation has its own limit, so the chain has one.
    fn wait_unlimited(&self) -> Result<(), DeviceError> {
        let mut state = self.0.state.lock();
        loop {
            if let Some(result) = &*state {
                return result.clone();
            }
            self.0.reached.wait(&mut state);
        }
    }
}

impl Event for HostEvent {
    fn is_done(&self) -> Result<bool, DeviceError> {
        self.0.state.lock().clone().transpose().map(|r| r.is_some())
    }

    fn synchronize(&self, limit: Duration) -> Result<(), DeviceError> {
        let deadline = Instant::now() + limit;
        let mut state = self.0.state.lock();
        loop {
            if let Some(result) = &*state {
                return result.clone();
            }
            if self.0.reached.wait_until(&mut state, deadline).timed_out() && state.is_none() {
                return Err(DeviceError::TimedOut { what: format!("stream {}", self.0.stream), limit });
            }
        }
    }
}
