//! When to gather a unit and when to release it, under a limit of live elements.
//!
//! A model of stage 3 uses its units in a known sequence (forward, then backward in reverse; more with
//! several micro-batches). [`PrefetchPlan::new`] turns that sequence into a list of [`Action`]s:
//!
//! - a unit is gathered before the use that needs it, and earlier where the limits allow, so that the gather
//!   runs beside the computation of the units before it;
//! - it is released after its use, unless its next use is near enough to keep it, or the next to prefetch,
//!   where keeping takes the place of gathering;
//! - elements that are live (gathered, gathering or persistent) never exceed the limit. They are counted
//!   padded, as they lie in memory; the plan reports the greatest number.
//!
//! Where a kept unit is in the way of one that is needed sooner, the one whose next use is farthest goes
//! first (Belady, IBM Systems Journal 5(2), 1966).

use crate::{Layout, ShardError};

/// What bounds a plan, all in elements as they lie in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PrefetchLimits {
    /// Elements that may be live at once, persistent ones included.
    pub max_live_elems: u64,
    /// Elements that may be gathered, gathering or held ahead of their use.
    pub prefetch_elems: u64,
    /// A unit stays if at most this many elements are used between its use and its next.
    pub max_reuse_distance_elems: u64,
}

impl PrefetchLimits {
    /// DeepSpeed's defaults: 10^9 live, 5 x 10^7 ahead, kept for 10^9.
    pub const DEEPSPEED: Self =
        Self { max_live_elems: 1_000_000_000, prefetch_elems: 50_000_000, max_reuse_distance_elems: 1_000_000_000 };
}

/// A step of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Action {
    /// Begin to gather this unit; from here its elements are live.
    Gather(usize),
    /// Wait for the gathers of use number `0`'s units, then compute.
    Use(usize),
    /// Release this unit: its elements are no longer live.
    Release(usize),
}

/// The actions for a sequence of uses, and their totals.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PrefetchPlan {
    /// What to do, in this order.
    pub actions: Vec<Action>,
    /// The most elements live at once.
    pub peak_live_elems: u64,
    /// Elements gathered in all.
    pub gathered_elems: u64,
}

/// Uses of one forward and one backward pass over all units of `layout`, `micro_batches` times: for each,
/// the units it needs, ties included.
pub fn forward_backward_uses(layout: &Layout, micro_batches: usize) -> Vec<Vec<usize>> {
    let forward: Vec<Vec<usize>> = (0..layout.units().len()).map(|u| layout.units_needed_by(u)).collect();
    let both: Vec<Vec<usize>> = forward.iter().chain(forward.iter().rev()).cloned().collect();
    (0..micro_batches).flat_map(|_| both.iter().cloned()).collect()
}

impl PrefetchPlan {
    /// Plans `uses` (for each, the units it needs) of units with `unit_elems` elements each, of which those
    /// in `persistent` are live throughout and never gathered.
    ///
    /// # Errors
    /// A unit that does not exist, or a use whose units are over the limit together with the persistent ones.
    pub fn new(
        unit_elems: &[u64],
        persistent: &[usize],
        uses: &[Vec<usize>],
        limits: &PrefetchLimits,
    ) -> Result<Self, ShardError> {
        let mut planner = Planner::new(unit_elems, persistent, uses, limits)?;
        for at in 0..uses.len() {
            planner.gather_needed(at)?;
            planner.prefetch(at);
            planner.actions.push(Action::Use(at));
            planner.release_after(at);
        }
        Ok(Self {
            actions: planner.actions,
            peak_live_elems: planner.peak_live_elems,
            gathered_elems: planner.gathered_elems,
        })
    }
}

/// What a unit is while a plan is made.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Only its shards are in memory.
    Sharded,
    /// Gathered, gathering or held for a later use than the present one: counts as ahead.
    Ahead,
    /// Gathered, and in use or used since.
    Used,
    /// Whole throughout.
    Persistent,
}

struct Planner<'a> {
    unit_elems: &'a [u64],
    uses: &'a [Vec<usize>],
    limits: &'a PrefetchLimits,
    states: Vec<State>,
    /// For each unit, the uses that need it, latest first; those that are over are popped.
    later_uses: Vec<Vec<usize>>,
    /// For each unit of each use, the last use before that needs it.
    previous_uses: Vec<Vec<Option<usize>>>,
    /// `used_before[i]`: elements used by all uses before use i.
    used_before: Vec<u64>,
    /// The first use that may still need a gather: the units of all before it are live.
    lookahead: usize,
    live_elems: u64,
    ahead_elems: u64,
    actions: Vec<Action>,
    peak_live_elems: u64,
    gathered_elems: u64,
}

impl<'a> Planner<'a> {
    fn new(
        unit_elems: &'a [u64],
        persistent: &[usize],
        uses: &'a [Vec<usize>],
        limits: &'a PrefetchLimits,
    ) -> Result<Self, ShardError> {
        let units = unit_elems.len();
        if let Some(&unit) = uses.iter().flatten().chain(persistent).find(|&&u| u >= units) {
            return Err(ShardError::UnknownUnit { unit, units });
        }
        let mut states = vec![State::Sharded; units];
        persistent.iter().for_each(|&u| states[u] = State::Persistent);
        let overflow = || ShardError::TooLarge { what: "elements of a sequence of uses".into() };
        let live = (0..units).filter(|&u| states[u] == State::Persistent);
        let live = live.map(|u| unit_elems[u]).try_fold(0, u64::checked_add).ok_or_else(overflow)?;
        if live > limits.max_live_elems {
            let (needs_elems, limit_elems) = (live, limits.max_live_elems);
            return Err(ShardError::OverLiveLimit { use_index: None, needs_elems, limit_elems });
        }
        let mut later_uses = vec![Vec::new(); units];
        let (mut used_before, mut used) = (Vec::with_capacity(uses.len()), 0u64);
        for needed in uses {
            used_before.push(used);
            for &unit in needed {
                used = used.checked_add(unit_elems[unit]).ok_or_else(overflow)?;
            }
        }
        for (at, needed) in uses.iter().enumerate().rev() {
            for &unit in needed {
                if later_uses[unit].last() != Some(&at) {
                    later_uses[unit].push(at);
                }
            }
        }
        let mut last_use = vec![None; units];
        let previous_uses = uses.iter().enumerate().map(|(at, needed)| {
            let previous = needed.iter().map(|&unit| last_use[unit]).collect();
            needed.iter().for_each(|&unit| last_use[unit] = Some(at));
            previous
        });
        let previous_uses = previous_uses.collect();
        Ok(Self {
            unit_elems,
            uses,
            limits,
            states,
            later_uses,
            previous_uses,
            used_before,
            lookahead: 0,
            live_elems: live,
            ahead_elems: 0,
            actions: Vec::new(),
            peak_live_elems: live,
            gathered_elems: 0,
        })
    }

    /// Begins the gathers without which use `at` cannot run.
    fn gather_needed(&mut self, at: usize) -> Result<(), ShardError> {
        for &unit in &self.uses[at] {
            if self.states[unit] == State::Sharded {
                if !self.make_room(unit, at) {
                    return Err(self.over_limit(at));
                }
                self.gather(unit);
            }
        }
        for &unit in &self.uses[at] {
            if self.states[unit] == State::Ahead {
                self.states[unit] = State::Used;
                self.ahead_elems -= self.unit_elems[unit];
            }
        }
        Ok(())
    }

    /// Begins gathers for the uses after `at`, in their order, as far as the limits allow.
    fn prefetch(&mut self, at: usize) {
        self.lookahead = self.lookahead.max(at + 1);
        while self.lookahead < self.uses.len() {
            for i in 0..self.uses[self.lookahead].len() {
                if !self.make_live(self.uses[self.lookahead][i], self.previous_uses[self.lookahead][i], at) {
                    return;
                }
            }
            self.lookahead += 1;
        }
    }

    /// Sees to it that `unit`, last needed by use `previous`, is live from now to use `lookahead`; answers
    /// no if the limits do not allow that yet.
    fn make_live(&mut self, unit: usize, previous: Option<usize>, at: usize) -> bool {
        let ahead = self.ahead_elems.checked_add(self.unit_elems[unit]);
        let allowed = ahead.is_some_and(|n| n <= self.limits.prefetch_elems);
        let kept = previous.is_some_and(|previous| self.is_near(previous, self.lookahead));
        let state = self.states[unit];
        match state {
            State::Persistent => true,
            State::Sharded if allowed && self.make_room(unit, self.lookahead) => {
                self.gather(unit);
                true
            }
            State::Sharded => false,
            State::Used | State::Ahead if kept => true,
            // It goes after a use that comes before; whether it can be held will be seen there.
            State::Used | State::Ahead if previous.is_some_and(|previous| previous > at) => false,
            State::Used if allowed => {
                self.states[unit] = State::Ahead;
                self.ahead_elems += self.unit_elems[unit];
                true
            }
            State::Used => false,
            State::Ahead => true,
        }
    }

    /// Whether a unit stays from one use to its next because little else is used between.
    fn is_near(&self, this: usize, next: usize) -> bool {
        self.used_before[next] - self.used_before[this + 1] <= self.limits.max_reuse_distance_elems
    }

    /// Releases kept units, the farthest from its next use first, until `unit`, needed at use `needed_at`,
    /// fits; where the ones needed later than that do not suffice, releases nothing and answers no.
    ///
    /// A unit that is ahead is never in the way: what is needed before it was live when it was gathered, and
    /// stays.
    fn make_room(&mut self, unit: usize, needed_at: usize) -> bool {
        let limit = self.limits.max_live_elems;
        let fits = |live: u64| live.checked_add(self.unit_elems[unit]).is_some_and(|n| n <= limit);
        if fits(self.live_elems) {
            return true;
        }
        let next = |u: usize| self.later_uses[u].last().copied().unwrap_or(usize::MAX);
        let kept = |&u: &usize| self.states[u] == State::Used && next(u) > needed_at;
        let mut kept: Vec<usize> = (0..self.states.len()).filter(kept).collect();
        kept.sort_by_key(|&u| std::cmp::Reverse(next(u)));
        let (mut live, mut count) = (self.live_elems, 0);
        while !fits(live) {
            let Some(&u) = kept.get(count) else { return false };
            live -= self.unit_elems[u];
            count += 1;
        }
        kept[..count].iter().for_each(|&u| self.release(u));
        true
    }

    /// What is left when all that use `at` does not need is released still does not fit.
    fn over_limit(&self, at: usize) -> ShardError {
        let needed = |&u: &usize| self.states[u] == State::Persistent || self.uses[at].contains(&u);
        let needs = (0..self.states.len()).filter(needed).map(|u| self.unit_elems[u]);
        ShardError::OverLiveLimit {
            use_index: Some(at),
            needs_elems: needs.fold(0, u64::saturating_add),
            limit_elems: self.limits.max_live_elems,
        }
    }

    fn release_after(&mut self, at: usize) {
        for &unit in &self.uses[at] {
            self.later_uses[unit].pop_if(|&mut use_index| use_index == at);
            let near = self.later_uses[unit].last().is_some_and(|&next| self.is_near(at, next));
            if self.states[unit] == State::Used && !near {
                self.release(unit);
            }
        }
    }

    fn gather(&mut self, unit: usize) {
        self.states[unit] = State::Ahead;
        self.live_elems += self.unit_elems[unit];
        self.ahead_elems += self.unit_elems[unit];
        self.gathered_elems += self.unit_elems[unit];
        self.peak_live_elems = self.peak_live_elems.max(self.live_elems);
        self.actions.push(Action::Gather(unit));
    }

    fn release(&mut self, unit: usize) {
        self.states[unit] = State::Sharded;
        self.live_elems -= self.unit_elems[unit];
        self.actions.push(Action::Release(unit));
    }
}
