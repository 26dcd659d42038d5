//! The seeded operation that this thread runs, if any.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Instant;

use super::{Clock, Scheduler};
use crate::device::{DeviceError, watch};

pub(super) struct Current {
    scheduler: Scheduler,
    stream: usize,
    label: &'static str,
    /// The operation has changed or passed a monitor.
    synchronized: Cell<bool>,
    /// All accesses of the operation so far were ordered.
    sound: Cell<bool>,
}

impl Current {
    pub(super) fn new(scheduler: Scheduler, stream: usize, label: &'static str) -> Self {
        Self {
            scheduler,
            stream,
            label,
            synchronized: Cell::new(false),
            sound: Cell::new(true),
        }
    }
}

thread_local! {
    static CURRENT: RefCell<Option<Rc<Current>>> = const { RefCell::new(None) };
}

fn get() -> Option<Rc<Current>> {
    CURRENT.with_borrow(Clone::clone)
}

/// Runs an operation; returns whether all its accesses were ordered.
pub(super) fn with(
    current: Current,
    op: impl FnOnce() -> Result<(), DeviceError>,
) -> Result<bool, DeviceError> {
    let current = Rc::new(current);
    let watching = Rc::clone(&current);
    CURRENT.set(Some(Rc::clone(&current)));
    let watcher = Rc::new(move |range, write| {
        let Current {
            scheduler,
            stream,
            label,
            synchronized,
            sound,
        } = &*watching;
        if !scheduler.note_access(*stream, range, write, label, synchronized.get()) {
            sound.set(false);
        }
    });
    let result = watch::watched(watcher, op);
    CURRENT.set(None);
    result.map(|()| current.sound.get())
}

/// Whether this thread runs a seeded operation.
pub(in crate::host) fn in_operation() -> bool {
    CURRENT.with_borrow(Option::is_some)
}

/// Called before the current operation changes a monitor. Joins the clocks of the operation's
/// stream and the monitor.
pub(in crate::host) fn release(clock: &mut Option<Clock>) {
    let Some(current) = get() else { return };
    current.synchronized.set(true);
    let mut state = current.scheduler.0.state.lock();
    let stream = &mut state.streams[current.stream];
    if let Some(clock) = clock {
        stream.clock.join(clock);
    }
    clock.get_or_insert_default().join(&stream.clock);
    // Later accesses of the operation are not ordered before operations that pass the monitor.
    stream.tick(current.stream);
}

/// Called when the current operation passes a monitor. Joins the monitor's clock into that of the
/// operation's stream.
pub(in crate::host) fn acquire(clock: Option<&Clock>) {
    let Some(current) = get() else { return };
    current.synchronized.set(true);
    if let Some(clock) = clock {
        current.scheduler.0.state.lock().streams[current.stream]
            .clock
            .join(clock);
    }
}

/// Lets other streams run until progress differs from `progress` or the deadline passes.
pub(in crate::host) fn block(progress: u64, deadline: Option<Instant>) {
    let Some(current) = get() else { return };
    let shared = &current.scheduler.0;
    let mut state = shared.state.lock();
    state.streams[current.stream].blocked = Some((progress, deadline));
    state.running = None;
    shared.turn.notify_all();
    while state.running != Some(current.stream) {
        shared.turn.wait(&mut state);
    }
    state.streams[current.stream].blocked = None;
}
