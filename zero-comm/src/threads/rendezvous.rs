//! Where the ranks meet: one slot for each collective under way, found by its sequence number.
//!
//! A slot's life: *gathering* (ranks post their calls) -> *working* (all have posted the same call) -> *done*
//! (all have worked) -> retired. Ranks that enqueue on several streams may have several slots open at once.
//!
//! Invariants, under the one lock: a slot is in the window `first..first + slots.len()`; `working` counts the
//! ranks between [`Ticket::run`]'s two meetings, and is above 0 only where all have posted; after a failure
//! no rank starts to work.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::{Condvar, Mutex, MutexGuard};
use zero_alloc::device::AnySlice;

use super::Options;
use crate::CommError;
use crate::call::{Call, Checked};

/// The buffers that a rank has posted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Posted {
    pub(super) send: AnySlice,
    pub(super) recv: AnySlice,
}

#[derive(Default)]
struct Slot {
    /// What the first rank posted; the others must post the same.
    call: Option<(usize, Call)>,
    posted: Vec<Option<Posted>>,
    arrived: usize,
    working: usize,
    done: usize,
}

/// A color, if the rank has one, and its key.
type Wish = (Option<u64>, u64);

#[derive(Default)]
struct Split {
    wishes: Vec<Option<Wish>>,
    children: HashMap<u64, Arc<Shared>>,
    taken: usize,
}

#[derive(Default)]
struct State {
    first: u64,
    slots: VecDeque<Slot>,
    spare: Vec<Slot>,
    /// Collectives that each rank has reached.
    reached: Vec<u64>,
    /// For each rank that has left: how many collectives it had enqueued.
    left: Vec<Option<u64>>,
    splits: HashMap<u64, Split>,
    children: Vec<Weak<Shared>>,
    failure: Option<CommError>,
}

/// What the ranks of a world share.
pub(super) struct Shared {
    pub(super) world_size: usize,
    options: Options,
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    pub(super) fn new(world_size: usize, options: Options) -> Self {
        let state = State { reached: vec![0; world_size], left: vec![None; world_size], ..State::default() };
        Self { world_size, options, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Ends the world; the first failure stands.
    pub(super) fn fail(&self, error: CommError) {
        self.fail_locked(&mut self.state.lock(), error);
    }

    fn fail_locked(&self, state: &mut State, error: CommError) -> CommError {
        let failure = state.failure.get_or_insert(error).clone();
        self.changed.notify_all();
        for child in state.children.drain(..).filter_map(|child| child.upgrade()) {
            // A child's lock is only ever taken after its parent's.
            child.fail(failure.clone());
        }
        failure
    }

    pub(super) fn failure(&self) -> Option<CommError> {
        self.state.lock().failure.clone()
    }

    pub(super) fn leave(&self, rank: usize, enqueued: u64) {
        self.state.lock().left[rank] = Some(enqueued);
        self.changed.notify_all();
    }

    /// Sleeps until something changed, or fails the world at the deadline with what `late` says.
    fn sleep(
        &self,
        state: &mut MutexGuard<'_, State>,
        deadline: Instant,
        late: impl FnOnce(&State) -> CommError,
    ) -> Result<(), CommError> {
        if self.changed.wait_until(state, deadline).timed_out() && Instant::now() >= deadline {
            let error = late(state);
            return Err(self.fail_locked(state, error));
        }
        Ok(())
    }

    /// After a failure: waits until no rank works in the buffers of collective `sequence` any more. Work is a
    /// finite loop over memory, and none starts after a failure, so this ends.
    fn drain(&self, state: &mut MutexGuard<'_, State>, sequence: u64) {
        self.changed.notify_all();
        while sequence >= state.first && state.slot(sequence, self.world_size).working > 0 {
            self.changed.wait(state);
        }
    }

    /// Waits until all ranks have asked for split number `turn`; what they asked for, by rank.
    pub(super) fn split(&self, rank: usize, turn: u64, wish: Wish) -> Result<Vec<Wish>, CommError> {
        let (n, limit) = (self.world_size, self.options.limit);
        let deadline = Instant::now() + limit;
        let mut state = self.state.lock();
        let split = state.splits.entry(turn).or_default();
        split.wishes.resize(n, None);
        split.wishes[rank] = Some(wish);
        self.changed.notify_all();
        loop {
            if let Some(error) = &state.failure {
                return Err(error.clone());
            }
            let wishes: Vec<Wish> = state.splits[&turn].wishes.iter().flatten().copied().collect();
            if wishes.len() == n {
                if wish.0.is_none() {
                    Self::take(&mut state, turn, n);
                }
                return Ok(wishes);
            }
            let missing = state.splits[&turn].wishes.iter().position(Option::is_none).unwrap_or(rank);
            if state.left[missing].is_some() {
                let error = CommError::Peer { rank: missing, message: format!("left before split {turn}") };
                return Err(self.fail_locked(&mut state, error));
            }
            let message = format!("did not come to split {turn} within {limit:?}");
            self.sleep(&mut state, deadline, |_| CommError::Peer { rank: missing, message })?;
        }
    }

    /// The world of `color` of split `turn`; every rank that has a color calls it once.
    pub(super) fn child(&self, turn: u64, color: u64, world_size: usize) -> Arc<Self> {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let children = &mut state.splits.entry(turn).or_default().children;
        let child = Arc::clone(children.entry(color).or_insert_with(|| {
            let child = Arc::new(Self::new(world_size, self.options));
            state.children.retain(|child| child.strong_count() > 0);
            state.children.push(Arc::downgrade(&child));
            child
        }));
        if let Some(failure) = &state.failure {
            child.fail(failure.clone());
        }
        Self::take(state, turn, self.world_size);
        child
    }

    /// Forgets split `turn` when every rank has its answer.
    fn take(state: &mut State, turn: u64, world_size: usize) {
        if let Some(split) = state.splits.get_mut(&turn) {
            split.taken += 1;
            if split.taken == world_size {
                state.splits.remove(&turn);
            }
        }
    }
}

impl State {
    fn slot(&mut self, sequence: u64, world_size: usize) -> &mut Slot {
        // A slot retires only when every rank has left it, so `sequence` is never behind the window.
        let index = (sequence - self.first) as usize;
        while self.slots.len() <= index {
            let mut slot = self.spare.pop().unwrap_or_default();
            slot.posted.resize(world_size, None);
            self.slots.push_back(slot);
        }
        &mut self.slots[index]
    }

    fn retire_done(&mut self, world_size: usize) {
        while self.slots.front().is_some_and(|slot| slot.done == world_size) {
            if let Some(mut slot) = self.slots.pop_front() {
                slot.posted.fill(None);
                self.spare.push(Slot { posted: slot.posted, ..Slot::default() });
                self.first += 1;
            }
        }
    }
}

/// One rank's promise to take part in one collective. Dropped without having been kept (its stream failed and
/// skipped it, or the work panicked), it ends the world, so that no peer waits for it.
pub(super) struct Ticket {
    shared: Arc<Shared>,
    rank: usize,
    sequence: u64,
    call: Call,
    stream: String,
    phase: Phase,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Enqueued,
    Working,
    Ended,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let (sequence, rank, call) = (self.sequence, self.rank, self.call.clone());
        match self.phase {
            Phase::Ended => {}
            Phase::Enqueued => {
                let stream = std::mem::take(&mut self.stream);
                self.shared.fail(CommError::Skipped { sequence, call, rank, stream });
            }
            Phase::Working => {
                let mut state = self.shared.state.lock();
                state.slot(sequence, self.shared.world_size).working -= 1;
                self.shared.fail_locked(&mut state, CommError::Panicked { sequence, call, rank });
                self.shared.drain(&mut state, sequence);
            }
        }
    }
}

impl Ticket {
    pub(super) fn new(shared: Arc<Shared>, rank: usize, sequence: u64, call: Call, stream: String) -> Self {
        Self { shared, rank, sequence, call, stream, phase: Phase::Enqueued }
    }

    /// Meets the other ranks, works, and meets them again. An error comes with the stream's name.
    pub(super) fn run(mut self, checked: &Checked, work: impl FnOnce(&[Posted])) -> Result<(), (CommError, String)> {
        let result = self.arrive(checked).map(|posted| {
            work(&posted);
        });
        let result = result.and_then(|()| self.leave());
        self.phase = Phase::Ended;
        result.map_err(|error| (error, std::mem::take(&mut self.stream)))
    }

    fn late(&self, state: &State, missing: usize) -> CommError {
        let (sequence, call, limit) = (self.sequence, self.call.clone(), self.shared.options.limit);
        CommError::Stalled { sequence, call, rank: missing, limit, done: state.reached[missing] }
    }

    /// Posts the buffers and waits until all ranks have posted theirs; then this rank is working.
    fn arrive(&mut self, checked: &Checked) -> Result<Vec<Posted>, CommError> {
        let (n, sequence, rank) = (self.shared.world_size, self.sequence, self.rank);
        let deadline = Instant::now() + self.shared.options.limit;
        let mut state = self.shared.state.lock();
        if let Some(error) = &state.failure {
            return Err(error.clone());
        }
        state.reached[rank] = state.reached[rank].max(sequence + 1);
        let slot = state.slot(sequence, n);
        let (other_rank, other_call) = slot.call.get_or_insert_with(|| (rank, self.call.clone())).clone();
        if other_call != self.call {
            let call = self.call.clone();
            let error = CommError::Mismatch { sequence, rank, call, other_rank, other_call };
            return Err(self.shared.fail_locked(&mut state, error));
        }
        slot.posted[rank] = Some(Posted { send: checked.send, recv: checked.recv });
        slot.arrived += 1;
        if slot.arrived == n {
            self.shared.changed.notify_all();
        }
        loop {
            if let Some(error) = state.failure.clone() {
                // The buffers are posted: peers that had already begun may be working in them.
                self.shared.drain(&mut state, sequence);
                return Err(error);
            }
            let slot = state.slot(sequence, n);
            if slot.arrived == n {
                slot.working += 1;
                self.phase = Phase::Working;
                return Ok(slot.posted.iter().flatten().copied().collect());
            }
            let missing: Vec<usize> = (0..n).filter(|&q| slot.posted[q].is_none()).collect();
            for &q in &missing {
                if let Some(done) = state.left[q].filter(|&enqueued| enqueued <= sequence) {
                    let error = CommError::Left { sequence, call: self.call.clone(), rank: q, done };
                    return Err(self.shared.fail_locked(&mut state, error));
                }
            }
            let first = missing.first().copied().unwrap_or(rank);
            self.shared.sleep(&mut state, deadline, |state| self.late(state, first))?;
        }
    }

    /// Ends this rank's work and waits until no rank works in anyone's buffers any more.
    fn leave(&mut self) -> Result<(), CommError> {
        let (n, sequence) = (self.shared.world_size, self.sequence);
        let mut state = self.shared.state.lock();
        let slot = state.slot(sequence, n);
        slot.working -= 1;
        slot.done += 1;
        self.phase = Phase::Ended;
        if slot.done == n || state.failure.is_some() {
            self.shared.changed.notify_all();
        }
        // This wait ends without a limit: all have arrived, so each rank's worker either works, a finite loop
        // over memory, or sees the failure.
        loop {
            if sequence < state.first || state.slot(sequence, n).done == n {
                state.retire_done(n);
                return Ok(());
            }
            if let Some(error) = state.failure.clone() {
                self.shared.drain(&mut state, sequence);
                return Err(error);
            }
            self.shared.changed.wait(&mut state);
        }
    }
}
