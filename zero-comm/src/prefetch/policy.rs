//! Which units are gathered ahead, kept and freed at each use.
//!
//! A [`Policy`] decides. A [`Prefetcher`](super::Prefetcher) carries it out on streams, and
//! [`plan_step`] counts.

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
    let mut policy = Policy::new(unit_elems.to_vec(), *options);
    policy.set_order(uses.concat());
    policy.begin_step();
    let mut step = Counted {
        policy,
        unit_elems,
        held: vec![false; unit_elems.len()],
        live: 0,
        planned: PlannedStep::default(),
    };
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

/// A step whose gathers are counted.
struct Counted<'a> {
    policy: Policy,
    unit_elems: &'a [u64],
    held: Vec<bool>,
    live: u64,
    planned: PlannedStep,
}

impl Counted<'_> {
    fn unshard(&mut self, unit: usize) {
        if !self.policy.begin_use(unit) && !self.held[unit] {
            self.policy.make_room(unit, |freed| {
                self.live -= freed.iter().map(|&unit| self.unit_elems[unit]).sum::<u64>();
                self.live
            });
            self.gather(unit);
        }
        self.held[unit] = true;
        self.gather_ahead();
    }

    fn reshard(&mut self, unit: usize) {
        self.held[unit] = false;
        if !self.policy.reshard(unit) {
            self.live -= self.unit_elems[unit];
        }
    }

    fn gather_ahead(&mut self) {
        while let Some(unit) = self.policy.next_ahead(self.live, |unit| self.held[unit]) {
            self.gather(unit);
            self.policy.gathered(unit);
        }
    }

    fn gather(&mut self, unit: usize) {
        let elems = self.unit_elems[unit];
        self.live = self.live.saturating_add(elems);
        let planned = &mut self.planned;
        planned.peak_live_elems = planned.peak_live_elems.max(self.live);
        planned.gathers += 1;
        planned.gathered_elems = planned.gathered_elems.saturating_add(elems);
    }
}

/// The place of the elements of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// In shards, or the caller holds it.
    Sharded,
    InFlight,
    Kept,
}

/// The uses of a step.
struct Order {
    units: Vec<usize>,
    /// For each position the next one with the same unit, or the number of uses.
    next_use: Vec<usize>,
}

/// Decides what is gathered ahead, kept and freed, within the limits of its options.
pub(super) struct Policy {
    options: PrefetchOptions,
    unit_elems: Vec<u64>,
    states: Vec<State>,
    /// The expected order of use of a step.
    order: Option<Order>,
    /// Whether the uses of this step follow the order so far.
    follows: bool,
    /// Uses so far.
    used: usize,
    /// The units of all positions from `used` to here are in flight, kept or held, except those in
    /// `gaps`.
    reached: usize,
    gaps: BTreeSet<usize>,
    /// Elements in flight.
    in_flight: u64,
}

impl Policy {
    pub(super) fn new(unit_elems: Vec<u64>, options: PrefetchOptions) -> Self {
        Self {
            options,
            states: vec![State::Sharded; unit_elems.len()],
            unit_elems,
            order: None,
            follows: false,
            used: 0,
            reached: 0,
            gaps: BTreeSet::new(),
            in_flight: 0,
        }
    }

    /// Sets the order of the next steps.
    pub(super) fn set_order(&mut self, units: Vec<usize>) {
        let mut next_use = vec![units.len(); units.len()];
        let mut later = vec![units.len(); self.unit_elems.len()];
        for (position, &unit) in units.iter().enumerate().rev() {
            next_use[position] = std::mem::replace(&mut later[unit], position);
        }
        self.order = Some(Order { units, next_use });
    }

    /// Begins a step, in which nothing is in flight or kept. Returns whether it has an order to
    /// follow.
    pub(super) fn begin_step(&mut self) -> bool {
        self.states.fill(State::Sharded);
        self.follows = self.order.is_some();
        self.used = 0;
        self.reached = 0;
        self.gaps.clear();
        self.in_flight = 0;
        self.follows
    }

    /// The unit that is used next in the expected order.
    pub(super) fn expected(&self) -> Option<usize> {
        let order = self.order.as_ref()?;
        order.units.get(self.used).copied()
    }

    /// Ends prefetching for this step, in which the order changed. Returns the units in flight,
    /// which are to be freed.
    pub(super) fn stop_following(&mut self) -> Vec<usize> {
        self.follows = false;
        self.free_all(State::InFlight)
    }

    /// Begins a use of `unit`, which the caller then holds. Returns whether it is in flight or kept;
    /// if not, it is gathered after [`make_room`](Self::make_room).
    pub(super) fn begin_use(&mut self, unit: usize) -> bool {
        let position = self.used;
        self.used += 1;
        self.gaps.remove(&position);
        self.reached = self.reached.max(self.used);
        if let (true, Some(order)) = (self.follows, &self.order) {
            let next = order.next_use[position];
            if next < self.reached {
                self.gaps.insert(next);
            }
        }

        let state = std::mem::replace(&mut self.states[unit], State::Sharded);
        if state == State::InFlight {
            self.in_flight -= self.unit_elems[unit];
        }
        state != State::Sharded
    }

    /// Undoes a use that failed, so that it can be tried again. `is_there`: the unit is gathered.
    pub(super) fn undo_use(&mut self, unit: usize, is_there: bool) {
        self.used -= 1;
        if is_there {
            self.states[unit] = State::Kept;
        } else {
            self.gaps.insert(self.used);
        }
    }

    /// Ends a use; returns whether the unit is kept for its next one.
    pub(super) fn reshard(&mut self, unit: usize) -> bool {
        let is_next = self.follows && self.expected() == Some(unit);
        let is_small = self.unit_elems[unit] <= self.options.persistence_threshold_elems as u64;
        let is_kept = is_next || is_small;
        if is_kept {
            self.states[unit] = State::Kept;
        }
        is_kept
    }

    /// The next unit to gather ahead of its use, beside `live` elements; `None` if a limit forbids
    /// it or all are there.
    pub(super) fn next_ahead(
        &mut self,
        live: u64,
        is_held: impl Fn(usize) -> bool,
    ) -> Option<usize> {
        let order = self.order.as_ref().filter(|_| self.follows)?;
        let window = self.used.saturating_add(self.options.ahead);
        let end = window.min(order.units.len());
        loop {
            let gap = self.gaps.range(self.used..end).next().copied();
            let position = gap.unwrap_or(self.reached);
            if position >= end {
                return None;
            }
            let unit = order.units[position];
            if self.states[unit] == State::Sharded {
                // A held unit may become kept.
                let may_gather = self.fits_ahead(unit, live) && !is_held(unit);
                return may_gather.then_some(unit);
            }
            if gap.is_some() {
                self.gaps.remove(&position);
            } else {
                self.reached += 1;
            }
        }
    }

    fn fits_ahead(&self, unit: usize, live: u64) -> bool {
        let elems = self.unit_elems[unit];
        let ahead = self.in_flight.saturating_add(elems);
        (self.in_flight == 0 || ahead <= self.options.ahead_elems as u64)
            && live.saturating_add(elems) <= self.options.max_live_elems as u64
    }

    /// Takes note that the unit of [`next_ahead`](Self::next_ahead) is gathered.
    pub(super) fn gathered(&mut self, unit: usize) {
        self.states[unit] = State::InFlight;
        self.in_flight = self.in_flight.saturating_add(self.unit_elems[unit]);
    }

    /// Frees units in flight, then units kept, until `unit` fits the limit; returns whether it
    /// does. If nothing is live, any unit does. `free` frees units and returns the live elements.
    pub(super) fn make_room(&mut self, unit: usize, mut free: impl FnMut(&[usize]) -> u64) -> bool {
        let elems = self.unit_elems[unit];
        let limit = self.options.max_live_elems as u64;
        let fits = |live: u64| live == 0 || live.saturating_add(elems) <= limit;
        let mut live = free(&[]);
        for state in [State::InFlight, State::Kept] {
            if fits(live) {
                return true;
            }
            live = free(&self.free_all(state));
            self.reached = self.used;
            self.gaps.clear();
        }
        fits(live)
    }

    fn free_all(&mut self, freed: State) -> Vec<usize> {
        let of_state = |unit: &usize| self.states[*unit] == freed;
        let units: Vec<usize> = (0..self.states.len()).filter(of_state).collect();
        units
            .iter()
            .for_each(|&unit| self.states[unit] = State::Sharded);
        if freed == State::InFlight {
            self.in_flight = 0;
        }
        units
    }
}
