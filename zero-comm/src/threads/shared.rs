//! What the ranks of a world share: the collectives under way, who has left, and the first failure.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::Options;
use super::slot::Slot;
use super::split::Splits;
use crate::CommError;

#[derive(Default)]
struct State {
    /// By sequence number. Ranks that enqueue on several streams may have several open at once.
    slots: HashMap<u64, Arc<Slot>>,
    /// Collectives that each rank has reached.
    reached: Vec<u64>,
    /// For each rank that has left: how many collectives it had enqueued.
    left: Vec<Option<u64>>,
    failure: Option<CommError>,
    /// Worlds that were split off.
    children: Vec<Weak<Shared>>,
}

/// What the ranks of a world share.
pub(super) struct Shared {
    pub(super) world_size: usize,
    pub(super) options: Options,
    pub(super) splits: Splits,
    state: Mutex<State>,
}

impl Shared {
    pub(super) fn new(world_size: usize, options: Options) -> Self {
        let state = State { reached: vec![0; world_size], left: vec![None; world_size], ..State::default() };
        Self { world_size, options, splits: Splits::default(), state: Mutex::new(state) }
    }

    /// Ends the world, and those that were split off it; the first failure stands, and is returned.
    pub(super) fn fail(&self, error: CommError) -> CommError {
        let (failure, slots, children) = {
            let mut state = self.state.lock();
            let failure = state.failure.get_or_insert(error).clone();
            (failure, state.slots.values().cloned().collect::<Vec<_>>(), std::mem::take(&mut state.children))
        };
        slots.iter().for_each(|slot| slot.fail(&failure));
        self.splits.fail(&failure);
        for child in children.iter().filter_map(Weak::upgrade) {
            child.fail(failure.clone());
        }
        failure
    }

    pub(super) fn failure(&self) -> Option<CommError> {
        self.state.lock().failure.clone()
    }

    /// How many collectives `rank` has reached.
    pub(super) fn reached(&self, rank: usize) -> u64 {
        self.state.lock().reached[rank]
    }

    /// The slot of collective `sequence`, which `rank` has reached.
    ///
    /// # Errors
    /// The world has failed.
    pub(super) fn open(&self, sequence: u64, rank: usize) -> Result<Arc<Slot>, CommError> {
        let mut state = self.state.lock();
        if let Some(error) = &state.failure {
            return Err(error.clone());
        }
        state.reached[rank] = state.reached[rank].max(sequence + 1);
        let slot = state.slots.entry(sequence).or_insert_with(|| Arc::new(Slot::new(sequence, self.world_size)));
        Ok(Arc::clone(slot))
    }

    /// A rank that left before collective `sequence`, and how many it had enqueued. Whoever waits for a rank asks
    /// this after posting: [`Shared::leave`] sees the slots that were posted before.
    pub(super) fn who_left(&self, sequence: u64) -> Option<(usize, u64)> {
        let state = self.state.lock();
        state.left.iter().enumerate().find_map(|(q, left)| left.filter(|&c| c <= sequence).map(|c| (q, c)))
    }

    /// Forgets a collective that all ranks have done.
    pub(super) fn retire(&self, sequence: u64) {
        self.state.lock().slots.remove(&sequence);
    }

    /// `rank` leaves after it has enqueued `done` collectives; who waits for it in a later one gets an error.
    pub(super) fn leave(&self, rank: usize, done: u64) {
        let waiting = {
            let mut state = self.state.lock();
            state.left[rank] = Some(done);
            state.slots.iter().find(|(sequence, _)| **sequence >= done).map(|(&s, slot)| (s, Arc::clone(slot)))
        };
        self.splits.leave(rank);
        if let Some((sequence, slot)) = waiting
            && let Some(call) = slot.call()
        {
            self.fail(CommError::Left { sequence, call: Box::new(call), rank, done });
        }
    }

    /// Whether `rank` has left.
    pub(super) fn has_left(&self, rank: usize) -> bool {
        self.state.lock().left[rank].is_some()
    }

    /// Makes a failure here reach `child` too.
    pub(super) fn adopt(&self, child: &Arc<Self>) {
        let mut state = self.state.lock();
        state.children.retain(|child| child.strong_count() > 0);
        state.children.push(Arc::downgrade(child));
        let failure = state.failure.clone();
        drop(state);
        if let Some(failure) = failure {
            child.fail(failure);
        }
    }
}
