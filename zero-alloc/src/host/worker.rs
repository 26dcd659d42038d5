//! Queues that worker threads run.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::HostEvent;
use super::queue::{Item, Queue, StreamInfo, spawn};
use crate::device::DeviceError;
use crate::primitive::{Condvar, Mutex};

#[derive(Default)]
struct State {
    items: VecDeque<Item>,
    /// Set when the queue is closed: the point after its last item.
    end: Option<HostEvent>,
    /// Set while the worker sleeps: everything enqueued before `items` has run.
    idle: bool,
    /// The error that poisoned the stream; up to date while the worker sleeps.
    failed: Option<DeviceError>,
    /// The modelled time of the stream; up to date while the worker sleeps.
    now: Duration,
}

struct Shared {
    info: StreamInfo,
    state: Mutex<State>,
    arrived: Condvar,
}

/// A queue and its worker.
pub(super) struct Worker(Arc<Shared>);

impl Worker {
    pub(super) fn spawn(info: StreamInfo) -> Result<Self, DeviceError> {
        let shared = Arc::new(Shared {
            info,
            state: Mutex::default(),
            arrived: Condvar::new(),
        });
        let worker = Arc::clone(&shared);
        spawn(&shared.info, move || work(&worker))?;
        Ok(Self(shared))
    }

    fn event(&self) -> HostEvent {
        HostEvent::of_worker(&self.0.info)
    }
}

impl Queue for Worker {
    fn info(&self) -> &StreamInfo {
        &self.0.info
    }

    fn close(&self) {
        let mut state = self.0.state.lock();
        if state.end.is_none() {
            let end = self.event();
            state.items.push_back(Item::Record(end.clone()));
            state.end = Some(end);
            drop(state);
            self.0.arrived.notify_one();
        }
    }

    fn push(&self, item: Item) -> Result<(), DeviceError> {
        // Waiting for a reached event has no effect.
        let skipped = matches!(&item, Item::Wait(_, event) if event.result() == Some(Ok(())));
        let skipped = skipped && !self.0.info.is_modelled();
        let mut state = self.0.state.lock();
        if state.end.is_some() {
            return Err(self.0.info.closed());
        }
        if skipped {
            return Ok(());
        }
        if let Item::Wait(_, event) = &item {
            self.0.info.waits_for(event);
        }
        state.items.push_back(item);
        // The worker removes all items at once, so it sleeps only on an empty queue.
        let was_empty = state.items.len() == 1;
        drop(state);
        if was_empty {
            self.0.arrived.notify_one();
        }
        Ok(())
    }

    fn record(&self) -> HostEvent {
        let event = self.event();
        let mut state = self.0.state.lock();
        if let Some(end) = &state.end {
            return end.clone();
        }
        if state.idle && state.items.is_empty() {
            event.set_time(state.now);
            event.reach(state.failed.clone());
        } else {
            state.items.push_back(Item::Record(event.clone()));
        }
        event
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.close();
    }
}

/// The worker thread: runs items in order until the queue is closed and empty.
fn work(shared: &Shared) {
    let mut failed: Option<DeviceError> = None;
    let mut now = Duration::ZERO;
    let mut items = VecDeque::new();
    loop {
        {
            let mut state = shared.state.lock();
            if state.items.is_empty() {
                state.idle = true;
                state.failed.clone_from(&failed);
                state.now = now;
            }
            while state.items.is_empty() {
                if state.end.is_some() {
                    return;
                }
                shared.arrived.wait(&mut state);
            }
            state.idle = false;
            std::mem::swap(&mut state.items, &mut items);
        }
        for item in items.drain(..) {
            run(shared, item, &mut failed, &mut now);
        }
    }
}

fn run(shared: &Shared, item: Item, failed: &mut Option<DeviceError>, now: &mut Duration) {
    match item {
        Item::Run(enqueued, op) => {
            if failed.is_none() {
                *failed = shared.info.call(enqueued, op, now).err();
            }
        }
        Item::Record(event) => {
            event.set_time(*now);
            event.reach(failed.clone());
        }
        Item::Wait(enqueued, event) => {
            let result = event.result().unwrap_or_else(|| {
                // This wait ends, because the waits of the operations before the event have limits.
                shared.info.timed(enqueued, || {
                    event.wait(Duration::MAX).and_then(|result| result)
                })
            });
            *now = (*now).max(event.time());
            if let Err(e) = result {
                failed.get_or_insert(e);
            }
        }
    }
}

/// Loom runs every order of a producer and the worker:
/// `RUSTFLAGS="--cfg loom" cargo test -p zero-alloc --lib --release loom_tests`.
#[cfg(all(test, loom))]
mod loom_tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::device::Event;
    use crate::timeline::Enqueued;

    fn shared() -> Arc<Shared> {
        let info = StreamInfo {
            name: "model".into(),
            id: 0,
            execution: Default::default(),
            timeline: None,
            causal: None,
            model: None,
        };
        Arc::new(Shared {
            info,
            state: Mutex::default(),
            arrived: Condvar::new(),
        })
    }

    fn count(seen: &Arc<AtomicUsize>) -> Item {
        let seen = Arc::clone(seen);
        let op = move || {
            seen.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        Item::Run(
            Enqueued {
                label: "count",
                ..Enqueued::default()
            },
            Box::new(op),
        )
    }

    #[test]
    fn enqueued_items_run_before_the_end() {
        loom::model(|| {
            let shared = shared();
            let seen = Arc::new(AtomicUsize::new(0));
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
            let shared = shared();
            let seen = Arc::new(AtomicUsize::new(0));
            let queue = Arc::new(Worker(Arc::clone(&shared)));
            let working = Arc::clone(&shared);
            let worker = loom::thread::spawn(move || work(&working));
            let other = Arc::clone(&queue);
            let others = Arc::clone(&seen);
            let producer = loom::thread::spawn(move || other.push(count(&others)).expect("open"));
            queue.push(count(&seen)).expect("open");
            producer.join().expect("it ends");
            drop(queue);
            worker.join().expect("the worker ends");
            assert_eq!(seen.load(Ordering::Relaxed), 2);
        });
    }

    #[test]
    fn monitor_update_wakes_waiters() {
        loom::model(|| {
            let monitor = Arc::new(super::super::Monitor::new(0));
            let other = Arc::clone(&monitor);
            let waiter = loom::thread::spawn(move || {
                let ready = |v: &mut i32| (*v == 2).then_some(*v);
                other.wait_until(Duration::MAX, || "two".into(), ready)
            });
            monitor.update(|v| *v += 1);
            monitor.update(|v| *v += 1);
            assert_eq!(waiter.join().expect("it ends"), Ok(2));
        });
    }
}
