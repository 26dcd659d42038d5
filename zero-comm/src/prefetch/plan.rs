//! The gathers of a step, computed without running it.
//!
//! The same policy as [`Prefetcher`](super::Prefetcher)'s, on numbers: what is gathered ahead, kept
//! and freed at each use. A property test compares the two.

use std::collections::BTreeSet;

use super::PrefetchOptions;

/// The gathers of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlannedStep {
    /// The most elements live at once.
    pub peak_live_elems: u64,
    /// The number of gathers.
    pub gathers: u64,
    /// The elements of all gathers.
    pub gathered_elems: u64,
}

/// The gathers of a step of a [`Prefetcher`](super::Prefetcher) that knows the order.
///
/// `unit_elems` are the elements of each gathered unit. `uses` is a step in order: each entry lists
/// units that are unsharded one after the other and then resharded. If the units of an entry
/// together exceed [`PrefetchOptions::max_live_elems`], for which a step fails, they count in full.
///
/// # Panics
/// A use of a unit that is not in `unit_elems`.
///
/// ```
/// use zero_comm::{PrefetchOptions, plan_step};
///
/// let forward_and_backward = [vec![0], vec![1], vec![2], vec![1], vec![0]];
/// let one_ahead = PrefetchOptions::default();
/// let planned = plan_step(&[10, 20, 30], &forward_and_backward, &one_ahead);
/// assert_eq!((planned.peak_live_elems, planned.gathers), (50, 5));
/// ```
pub fn plan_step(
    unit_elems: &[u64],
    uses: &[Vec<usize>],
    options: &PrefetchOptions,
) -> PlannedStep {
    let mut step = Step::new(unit_elems, uses.concat(), options);
    step.gather_ahead();
    for units in uses {
        for &unit in units {
            step.unshard(unit);
        }
        for &unit in units {
            step.reshard(unit);
        }
    }
    step.planned
}

/// The place of the elements of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Sharded,
    InFlight,
    Held,
    Kept,
}

struct Step<'a> {
    options: &'a PrefetchOptions,
    unit_elems: &'a [u64],
    states: Vec<State>,
    /// The units in order of use.
    order: Vec<usize>,
    /// For each position the next one with the same unit, or the length of the order.
    next_use: Vec<usize>,
    /// Uses so far.
    used: usize,
    /// The units of all positions from `used` to here are gathered or kept, except those in `gaps`.
    reached: usize,
    gaps: BTreeSet<usize>,
    in_flight: u64,
    live: u64,
    planned: PlannedStep,
}

impl<'a> Step<'a> {
    fn new(unit_elems: &'a [u64], order: Vec<usize>, options: &'a PrefetchOptions) -> Self {
        let mut next = vec![order.len(); unit_elems.len()];
        let mut next_use = vec![order.len(); order.len()];
        for (position, &unit) in order.iter().enumerate().rev() {
            next_use[position] = std::mem::replace(&mut next[unit], position);
        }
        Self {
            options,
            unit_elems,
            states: vec![State::Sharded; unit_elems.len()],
            order,
            next_use,
            used: 0,
            reached: 0,
            gaps: BTreeSet::new(),
            in_flight: 0,
            live: 0,
            planned: PlannedStep::default(),
        }
    }

    fn unshard(&mut self, unit: usize) {
        let position = self.used;
        self.used += 1;
        self.gaps.remove(&position);
        self.reached = self.reached.max(self.used);
        match self.states[unit] {
            State::InFlight => self.in_flight -= self.unit_elems[unit],
            State::Kept | State::Held => {}
            State::Sharded => {
                self.make_room(unit);
                self.add(unit);
            }
        }
        self.states[unit] = State::Held;

        let next = self.next_use[position];
        if next < self.reached {
            self.gaps.insert(next);
        }
        self.gather_ahead();
    }

    fn reshard(&mut self, unit: usize) {
        let elems = self.unit_elems[unit];
        let is_next = self.order.get(self.used) == Some(&unit);
        let is_small = elems <= self.options.persistence_threshold_elems as u64;
        if is_next || is_small {
            self.states[unit] = State::Kept;
        } else {
            self.free(unit);
        }
    }

    /// Gathers the next uses, in order, as far as the limits allow.
    fn gather_ahead(&mut self) {
        let window = self.used.saturating_add(self.options.ahead);
        let end = window.min(self.order.len());
        loop {
            let gap = self.gaps.range(self.used..end).next().copied();
            let position = gap.unwrap_or(self.reached);
            if position >= end || !self.gather(self.order[position]) {
                return;
            }
            if gap.is_some() {
                self.gaps.remove(&position);
            } else {
                self.reached += 1;
            }
        }
    }

    /// Gathers a unit ahead of its use, if it is not there; false if a limit forbids it.
    fn gather(&mut self, unit: usize) -> bool {
        let elems = self.unit_elems[unit];
        let ahead = self.in_flight.saturating_add(elems);
        let live = self.live.saturating_add(elems);
        match self.states[unit] {
            State::InFlight | State::Kept => return true,
            // It may become kept.
            State::Held => return false,
            State::Sharded => {}
        }
        if self.in_flight > 0 && ahead > self.options.ahead_elems as u64 {
            return false;
        }
        if live > self.options.max_live_elems as u64 {
            return false;
        }
        self.add(unit);
        self.in_flight = ahead;
        self.states[unit] = State::InFlight;
        true
    }

    /// Frees units in flight, then units kept, until `unit` fits the limit.
    fn make_room(&mut self, unit: usize) {
        let limit = self.options.max_live_elems as u64;
        for freed in [State::InFlight, State::Kept] {
            let fits = self.live.saturating_add(self.unit_elems[unit]) <= limit;
            if self.live == 0 || fits {
                return;
            }
            for other in 0..self.states.len() {
                if self.states[other] == freed {
                    self.free(other);
                }
            }
            if freed == State::InFlight {
                self.in_flight = 0;
            }
            self.reached = self.used;
            self.gaps.clear();
        }
    }

    fn add(&mut self, unit: usize) {
        let elems = self.unit_elems[unit];
        self.live = self.live.saturating_add(elems);
        let planned = &mut self.planned;
        planned.peak_live_elems = planned.peak_live_elems.max(self.live);
        planned.gathers += 1;
        planned.gathered_elems = planned.gathered_elems.saturating_add(elems);
    }

    fn free(&mut self, unit: usize) {
        self.live -= self.unit_elems[unit];
        self.states[unit] = State::Sharded;
    }
}
