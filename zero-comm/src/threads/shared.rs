//! The shared state of a world's ranks: the running collectives, the ranks that left, and the first
//! failure.

use std::collections::HashMap;
use std::num::NonZero;
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};

use zero_alloc::host::{Monitor, Polling};

use super::slot::Slot;
use crate::CommError;
use crate::CommOptions;
use crate::call::Call;
use crate::split_request::SplitRequest;

/// Iterations of a spin loop before a rank sleeps, about 20 microseconds.
const SPINS: u32 = 1000;

/// Yields before a rank sleeps.
const YIELDS: u32 = 3;

#[derive(Default)]
struct State {
    /// The running collectives, by sequence number. There are several if ranks enqueue on several
    /// streams.
    slots: HashMap<u64, Arc<Slot>>,
    /// The number of collectives that each rank has reached.
    reached: Vec<u64>,
    /// For each rank that has left, the number of collectives that it had enqueued.
    left: Vec<Option<u64>>,
    failure: Option<CommError>,
    /// Worlds split from this one.
    children: Vec<Weak<Shared>>,
}

/// A running split.
#[derive(Default)]
pub(super) struct Turn {
    pub(super) requests: Vec<Option<SplitRequest>>,
    pub(super) children: HashMap<u64, Arc<Shared>>,
    pub(super) answered: usize,
    pub(super) failure: Option<CommError>,
}

/// The running splits, by number, with the worlds that they make.
#[derive(Default)]
pub(super) struct Splits(pub(super) Mutex<HashMap<u64, Arc<Monitor<Turn>>>>);

impl Splits {
    fn open(&self) -> Vec<Arc<Monitor<Turn>>> {
        self.0.lock().values().cloned().collect()
    }

    /// Fails all running splits.
    pub(super) fn fail(&self, error: &CommError) {
        for turn in self.open() {
            turn.update(|turn| {
                turn.failure.get_or_insert_with(|| error.clone());
            });
        }
    }

    /// Fails the splits that wait for `rank`, which has left.
    pub(super) fn leave(&self, rank: usize) {
        for turn in self.open() {
            turn.update(|turn| {
                if turn.requests[rank].is_none() {
                    turn.failure.get_or_insert_with(|| left(rank));
                }
            });
        }
    }
}

/// The failure of a split whose rank has left.
pub(super) fn left(rank: usize) -> CommError {
    CommError::Peer {
        rank,
        message: "left before a split".to_owned(),
    }
}

/// The shared state of a world's ranks.
pub(super) struct Shared {
    pub(super) world_size: usize,
    pub(super) options: CommOptions,
    pub(super) splits: Splits,
    /// How a rank polls before it sleeps.
    polling: Polling,
    state: Mutex<State>,
    /// Lets loom explore all orders of the critical sections of `state`, which is an ordinary
    /// mutex.
    #[cfg(all(loom, test))]
    order: loom::sync::atomic::AtomicUsize,
}

impl Shared {
    pub(super) fn new(world_size: usize, options: CommOptions) -> Self {
        let state = State {
            reached: vec![0; world_size],
            left: vec![None; world_size],
            ..State::default()
        };

        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        let polling = if cfg!(loom) {
            Polling::Never
        } else if world_size <= cores {
            Polling::Spin(SPINS)
        } else {
            Polling::Yield(YIELDS)
        };

        Self {
            world_size,
            options,
            splits: Splits::default(),
            polling,
            state: Mutex::new(state),
            #[cfg(all(loom, test))]
            order: loom::sync::atomic::AtomicUsize::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        #[cfg(all(loom, test))]
        self.order
            .fetch_add(1, loom::sync::atomic::Ordering::SeqCst);
        self.state.lock()
    }

    /// Fails the world and those split from it; returns the first failure.
    pub(super) fn fail(&self, error: CommError) -> CommError {
        let (failure, slots, children) = {
            let mut state = self.state();
            let failure = state.failure.get_or_insert(error).clone();
            (
                failure,
                state.slots.values().cloned().collect::<Vec<_>>(),
                std::mem::take(&mut state.children),
            )
        };
        slots.iter().for_each(|slot| slot.fail(&failure));
        self.splits.fail(&failure);
        for child in children.iter().filter_map(Weak::upgrade) {
            child.fail(failure.clone());
        }
        failure
    }

    pub(super) fn failure(&self) -> Option<CommError> {
        self.state().failure.clone()
    }

    /// The number of collectives that `rank` has reached.
    pub(super) fn reached(&self, rank: usize) -> u64 {
        self.state().reached[rank]
    }

    /// Returns the slot of collective `sequence`, which `rank` has reached with `call`.
    ///
    /// # Errors
    /// The world has failed, or a rank has left before this collective ([`Shared::leave`] fails
    /// only the slots that are open then).
    pub(super) fn open(
        &self,
        sequence: u64,
        rank: usize,
        call: &Call,
    ) -> Result<Arc<Slot>, CommError> {
        let mut state = self.state();
        if let Some(error) = &state.failure {
            return Err(error.clone());
        }
        let gone = |left: &Option<u64>| left.filter(|&done| done <= sequence);
        if let Some((rank, done)) = state
            .left
            .iter()
            .enumerate()
            .find_map(|(q, left)| Some((q, gone(left)?)))
        {
            drop(state);
            return Err(self.fail(CommError::Left {
                sequence,
                call: Box::new(call.clone()),
                rank,
                done,
            }));
        }

        state.reached[rank] = state.reached[rank].max(sequence + 1);
        let new = || {
            Arc::new(Slot::new(
                sequence,
                (rank, call.clone()),
                self.world_size,
                self.polling,
            ))
        };

        Ok(Arc::clone(state.slots.entry(sequence).or_insert_with(new)))
    }

    /// Removes a collective that all ranks have completed.
    pub(super) fn retire(&self, sequence: u64) {
        self.state().slots.remove(&sequence);
    }

    /// Records that `rank` leaves after `done` collectives; fails a later one in which others wait.
    pub(super) fn leave(&self, rank: usize, done: u64) {
        let waiting = {
            let mut state = self.state();
            state.left[rank] = Some(done);
            state
                .slots
                .iter()
                .find(|(sequence, _)| **sequence >= done)
                .map(|(&s, slot)| (s, Arc::clone(slot)))
        };
        self.splits.leave(rank);
        if let Some((sequence, slot)) = waiting {
            let (_, call) = &slot.call;
            self.fail(CommError::Left {
                sequence,
                call: Box::new(call.clone()),
                rank,
                done,
            });
        }
    }

    /// Whether `rank` has left.
    pub(super) fn has_left(&self, rank: usize) -> bool {
        self.state().left[rank].is_some()
    }

    /// Adds `child`, to which this world's failures propagate.
    pub(super) fn adopt(&self, child: &Arc<Self>) {
        let mut state = self.state();
        state.children.retain(|child| child.strong_count() > 0);
        state.children.push(Arc::downgrade(child));
        let failure = state.failure.clone();
        drop(state);
        if let Some(failure) = failure {
            child.fail(failure);
        }
    }
}
