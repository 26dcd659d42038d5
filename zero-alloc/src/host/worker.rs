//! Queues that worker threads run as fast as they can.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::HostEvent;
use super::op::{Item, Named};
use crate::device::{DeviceError, Event};
use crate::primitive::{Condvar, Mutex};

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
    named: Named,
    queue: Mutex<Queue>,
    arrived: Condvar,
}

/// A queue and its worker.
pub(super) struct Worker(Arc<Shared>);

impl Worker {
    pub(super) fn spawn(named: Named) -> Result<Self, DeviceError> {
        let name = named.thread_name();
        let shared = Arc::new(Shared { named, queue: Mutex::default(), arrived: Condvar::new() });
        let worker = Arc::clone(&shared);
        std::thread::Builder::new()
            .name(name)
            .spawn(move || work(&worker))
            .map_err(|e| DeviceError::Driver { call: "thread spawn", message: e.to_string() })?;
        Ok(Self(shared))
    }

    pub(super) fn named(&self) -> &Named {
        &self.0.named
    }

    pub(super) fn is_closed(&self) -> bool {
        self.0.queue.lock().end.is_some()
    }

    pub(super) fn close(&self) {
        let mut queue = self.0.queue.lock();
        if queue.end.is_none() {
            let end = HostEvent::new(Arc::clone(&self.0.named.name));
            queue.items.push_back(Item::Record(end.clone()));
            queue.end = Some(end);
            drop(queue);
            self.0.arrived.notify_one();
        }
    }

    pub(super) fn push(&self, item: Item) -> Result<(), DeviceError> {
        let mut queue = self.0.queue.lock();
        if queue.end.is_some() {
            return Err(self.0.named.closed());
        }
        queue.items.push_back(item);
        // The worker takes the whole queue at once, so it sleeps only on an empty one.
        let was_empty = queue.items.len() == 1;
        drop(queue);
        if was_empty {
            self.0.arrived.notify_one();
        }
        Ok(())
    }

    pub(super) fn record(&self) -> HostEvent {
        let event = HostEvent::new(Arc::clone(&self.0.named.name));
        let mut queue = self.0.queue.lock();
        if let Some(end) = &queue.end {
            return end.clone();
        }
        if queue.idle && queue.items.is_empty() {
            event.reach(queue.failed.clone());
        } else {
            queue.items.push_back(Item::Record(event.clone()));
        }
        event
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.close();
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
                *failed = shared.named.call(label, op).err();
            }
        }
        Item::Record(event) => event.reach(failed.clone()),
        Item::Wait(event) => {
            let result = event.result().unwrap_or_else(|| {
                // The streams waited for have limits of their own in their operations, so this wait ends.
                shared.named.timed("wait", || event.synchronize(Duration::MAX))
            });
            if let Err(e) = result {
                failed.get_or_insert(e);
            }
        }
    }
}

/// Every order of a producer and the worker, tried by loom:
/// `RUSTFLAGS="--cfg loom" cargo test -p zero-alloc --lib --release loom_tests`.
#[cfg(all(test, loom))]
mod loom_tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn shared() -> Arc<Shared> {
        let named = Named { name: "model".into(), id: 0, timeline: None };
        Arc::new(Shared { named, queue: Mutex::default(), arrived: Condvar::new() })
    }

    fn count(seen: &Arc<AtomicUsize>) -> Item {
        let seen = Arc::clone(seen);
        let op = move || {
            seen.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        Item::Run("count", Box::new(op))
    }

    #[test]
    fn no_wake_up_is_lost_and_what_is_enqueued_runs_before_the_end() {
        loom::model(|| {
            let (shared, seen) = (shared(), Arc::new(AtomicUsize::new(0)));
            let working = Arc::clone(&shared);
            let worker = loom::thread::spawn(move || work(&working));
            let queue = Worker(Arc::clone(&shared));
            queue.push(count(&seen)).expect("open");
            let event = queue.record();
            queue.push(count(&seen)).expect("open");
            event.synchronize(Duration::MAX).expect("sound");
            assert!(seen.load(Ordering::Relaxed) >= 1);
            drop(queue);
            worker.join().expect("the worker ends");
            assert_eq!(seen.load(Ordering::Relaxed), 2);
        });
    }

    #[test]
    fn two_producers_share_a_queue() {
        loom::model(|| {
            let (shared, seen) = (shared(), Arc::new(AtomicUsize::new(0)));
            let queue = Arc::new(Worker(Arc::clone(&shared)));
            let working = Arc::clone(&shared);
            let worker = loom::thread::spawn(move || work(&working));
            let (other, others) = (Arc::clone(&queue), Arc::clone(&seen));
            let producer = loom::thread::spawn(move || other.push(count(&others)).expect("open"));
            queue.push(count(&seen)).expect("open");
            producer.join().expect("it ends");
            drop(queue);
            worker.join().expect("the worker ends");
            assert_eq!(seen.load(Ordering::Relaxed), 2);
        });
    }

    #[test]
    fn a_gate_wakes_whoever_waits() {
        loom::model(|| {
            let gate = Arc::new(super::super::Monitor::new(0));
            let other = Arc::clone(&gate);
            let waiter = loom::thread::spawn(move || {
                let ready = |v: &mut i32| (*v == 2).then_some(*v);
                other.wait_until(Duration::MAX, || "two".into(), ready)
            });
            gate.update(|v| *v += 1);
            gate.update(|v| *v += 1);
            assert_eq!(waiter.join().expect("it ends"), Ok(2));
        });
    }
}
