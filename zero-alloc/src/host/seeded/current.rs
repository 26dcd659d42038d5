//! The operation that runs on this thread, if it is one of the scheduler's.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Instant;

use super::{Clock, Scheduler};
use crate::device::{DeviceError, watch};

pub(super) struct Current {
    scheduler: Scheduler,
    index: usize,
    label: &'static str,
    /// It has passed a gate.
    crossed: Cell<bool>,
    /// Nothing was out of order so far.
    sound: Cell<bool>,
}

impl Current {
    pub(super) fn new(scheduler: Scheduler, index: usize, label: &'static str) -> Self {
        Self { scheduler, index, label, crossed: Cell::new(false), sound: Cell::new(true) }
    }
}

thread_local! {
    static CURRENT: RefCell<Option<Rc<Current>>> = const { RefCell::new(None) };
}

fn get() -> Option<Rc<Current>> {
    CURRENT.with_borrow(Clone::clone)
}

/// Runs an operation; gives whether all that it touched was in order.
pub(super) fn with(current: Current, op: impl FnOnce() -> Result<(), DeviceError>) -> Result<bool, DeviceError> {
    let current = Rc::new(current);
    let watching = Rc::clone(&current);
    CURRENT.set(Some(Rc::clone(&current)));
    let watcher = Rc::new(move |range, write| {
        let Current { scheduler, index, label, crossed, sound } = &*watching;
        if !scheduler.touch(*index, range, write, label, crossed.get()) {
            sound.set(false);
        }
    });
    let result = watch::watched(watcher, op);
    CURRENT.set(None);
    result.map(|()| current.sound.get())
}

/// Whether this thread runs an operation of a seeded scheduler.
pub(in crate::host) fn in_operation() -> bool {
    CURRENT.with_borrow(Option::is_some)
}

/// The operation changes a gate: it learns what is known there and leaves what it knows.
pub(in crate::host) fn cross(known: &mut Option<Clock>) {
    let Some(current) = get() else { return };
    current.crossed.set(true);
    let mut state = current.scheduler.0.state.lock();
    let stream = &mut state.streams[current.index];
    if let Some(known) = known {
        stream.knows.join(known);
    }
    known.get_or_insert_default().join(&stream.knows);
    // What it does from now on is not known to those who pass here.
    stream.tick(current.index);
}

/// The operation passes a gate: it learns what is known there.
pub(in crate::host) fn pass(known: Option<&Clock>) {
    let Some(current) = get() else { return };
    current.crossed.set(true);
    if let Some(known) = known {
        current.scheduler.0.state.lock().streams[current.index].knows.join(known);
    }
}

/// Gives way until a gate has changed since `seen` or the limit is over.
pub(in crate::host) fn block(seen: u64, limit: Option<Instant>) {
    let Some(current) = get() else { return };
    let shared = &current.scheduler.0;
    let mut state = shared.state.lock();
    state.streams[current.index].blocked = Some((seen, limit));
    state.running = None;
    shared.turn.notify_all();
    while state.running != Some(current.index) {
        shared.turn.wait(&mut state);
    }
    state.streams[current.index].blocked = None;
}
