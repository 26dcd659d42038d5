//! The count of live elements: the elements of all units in flight, held or kept.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;

/// The live elements, shared by the prefetcher and its `Unsharded` units.
#[derive(Debug, Default)]
pub(super) struct Live {
    /// The number of the step.
    pub(super) step: u64,
    pub(super) elems: usize,
    pub(super) peak_elems: usize,
    /// The units that the caller holds.
    pub(super) held: HashSet<usize>,
}

/// One block's share of the live elements, subtracted on drop.
#[derive(Debug)]
pub(super) struct Lease {
    live: Arc<Mutex<Live>>,
    /// The step in which it was gathered.
    step: u64,
    pub(super) unit: usize,
    pub(super) elems: usize,
}

impl Lease {
    pub(super) fn new(live: &Arc<Mutex<Live>>, unit: usize, elems: usize) -> Self {
        let mut now = live.lock();
        now.elems += elems;
        now.peak_elems = now.peak_elems.max(now.elems);
        let step = now.step;
        drop(now);
        Self {
            live: Arc::clone(live),
            step,
            unit,
            elems,
        }
    }

    /// Whether the elements are counted in `live`, and were gathered in its present step.
    pub(super) fn is_of(&self, live: &Arc<Mutex<Live>>) -> bool {
        Arc::ptr_eq(&self.live, live) && self.step == live.lock().step
    }

    pub(super) fn set_held(&self, held: bool) {
        let mut live = self.live.lock();
        if held {
            live.held.insert(self.unit)
        } else {
            live.held.remove(&self.unit)
        };
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.set_held(false);
        self.live.lock().elems -= self.elems;
    }
}
