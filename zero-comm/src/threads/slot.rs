//! The synchronization of the ranks in one collective.
//!
//! A slot's states: *gathering* (ranks post their calls and buffers) -> *working* (all have posted
//! calls that match) -> *done* (all have done their shares). A failure ends it in any state.
//! Invariants, under its monitor:
//!
//! - `arrived` counts the ranks that have posted, `working` those that access the posted buffers
//!   now, `done` those that have done their shares; `working + done <= arrived`;
//! - `working` is above 0 only if all ranks have arrived; no rank starts to work after a failure;
//! - a rank that has posted returns only if `working` is 0 and no rank will start to work: its
//!   buffers are then unused.

use std::time::Duration;

use zero_alloc::host::{Monitor, Polling};

use crate::CommError;
use crate::call::{Call, Checked, Counts};

#[derive(Debug, Default)]
struct State {
    posted: Vec<Option<Checked>>,
    arrived: usize,
    working: usize,
    done: usize,
    failure: Option<CommError>,
}

impl State {
    /// Starts this rank's work when all ranks have posted; returns their buffers. After a failure,
    /// returns it when no rank works. `None`: neither yet.
    fn begin_work(&mut self) -> Option<Result<Vec<Checked>, CommError>> {
        if self.failure.is_none() && self.arrived == self.posted.len() {
            self.working += 1;
            return Some(Ok(self.posted.iter().flatten().cloned().collect()));
        }
        self.failure.clone().filter(|_| self.working == 0).map(Err)
    }
}

/// A running collective.
#[derive(Debug)]
pub(super) struct Slot {
    sequence: u64,
    /// The first rank and its call; those of the others must match it.
    pub(super) call: (usize, Call),
    monitor: Monitor<State>,
}

impl Slot {
    pub(super) fn new(
        sequence: u64,
        call: (usize, Call),
        world_size: usize,
        polling: Polling,
    ) -> Self {
        let state = State {
            posted: vec![None; world_size],
            ..State::default()
        };
        Self {
            sequence,
            call,
            monitor: Monitor::new(state).with_polling(polling),
        }
    }

    /// Fails the collective for all ranks that wait in it.
    pub(super) fn fail(&self, error: &CommError) {
        self.monitor.update(|state| {
            state.failure.get_or_insert_with(|| error.clone());
        });
    }

    /// Posts the call and the buffers of `rank`.
    ///
    /// # Errors
    /// [`CommError::Mismatch`] or [`CommError::Unmatched`] if the call of another rank does not
    /// match; nothing is posted then.
    pub(super) fn post(&self, rank: usize, checked: &Checked) -> Result<(), CommError> {
        let call = &checked.call;
        let (first, first_call) = &self.call;
        Call::compare(self.sequence, [call, first_call], [rank, *first])?;
        let has_pairs = matches!(call.segments, Counts::Pairs(_));

        let post = |state: &mut State| {
            let mut others = state.posted.iter().enumerate().filter(|_| has_pairs);
            let unmatched = others.find_map(|(other, posted)| {
                let calls = [call, &posted.as_ref()?.call];
                Call::unmatched(self.sequence, calls, [rank, other], [rank, other])
            });
            unmatched.map_or(Ok(()), Err)?;
            state.posted[rank] = Some(checked.clone());
            state.arrived += 1;
            Ok(())
        };
        let is_last = |state: &State| state.arrived == state.posted.len();
        self.monitor.update_and_wake(post, is_last)
    }

    /// Waits until all ranks have posted, for at most `limit`; `None` if it passed. This rank must
    /// have posted. It then does its share, and must call [`Slot::finish`] or [`Slot::break_off`].
    ///
    /// # Errors
    /// The failure that ended the collective; the rank's buffers are unused.
    pub(super) fn arrive(&self, limit: Duration) -> Result<Option<Vec<Checked>>, CommError> {
        self.monitor
            .wait_until(limit, String::new, State::begin_work)
            .map_or(Ok(None), |begun| begun.map(Some))
    }

    /// Like [`Slot::arrive`] without a limit, when all ranks have arrived or the world has failed.
    /// It ends: no rank starts to work after a failure, and those that work run a finite loop over
    /// memory. Until they end they access this rank's buffers, so a limit would be unsound.
    pub(super) fn arrive_or_fail(&self) -> Result<Vec<Checked>, CommError> {
        // `Duration::MAX` never times out.
        self.monitor
            .wait_until(Duration::MAX, String::new, State::begin_work)?
    }

    /// The ranks that have not posted.
    pub(super) fn missing(&self) -> Vec<usize> {
        let missing = |state: &mut State| {
            (0..state.posted.len())
                .filter(|&rank| state.posted[rank].is_none())
                .collect()
        };
        self.monitor.update_and_wake(missing, |_| false)
    }

    /// Records that this rank has done its share, and waits until all have. Returns whether it was
    /// the last.
    ///
    /// # Errors
    /// The failure that ended the collective.
    pub(super) fn finish(&self) -> Result<bool, CommError> {
        let finish = |state: &mut State| {
            state.working -= 1;
            state.done += 1;
            state.done == state.posted.len()
        };
        let ends = |state: &State| state.done == state.posted.len() || state.failure.is_some();
        let last = self.monitor.update_and_wake(finish, ends);
        self.drain(|state| state.done == state.posted.len())
            .map(|()| last)
    }

    /// Fails the collective after a panic of this rank's work, and waits until no rank works.
    pub(super) fn break_off(&self, error: &CommError) {
        self.monitor.update(|state| {
            state.working -= 1;
            state.failure.get_or_insert_with(|| error.clone());
        });
        let _the_failure = self.drain(|_| false);
    }

    /// Waits until `done`, or until no rank works after a failure. It needs no time limit: all
    /// ranks have arrived, and each either runs a finite loop over memory or sees the failure.
    fn drain(&self, done: impl Fn(&State) -> bool) -> Result<(), CommError> {
        let ready = |state: &mut State| {
            if done(state) {
                return Some(Ok(()));
            }
            state
                .failure
                .clone()
                .filter(|_| state.working == 0)
                .map(Err)
        };
        // `Duration::MAX` never times out.
        self.monitor.wait_until(Duration::MAX, String::new, ready)?
    }
}
