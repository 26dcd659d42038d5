//! The planner: where a block lies, and what to do when none fits.
//!
//! The space grows at its high end, a page at a time, and only while what is reserved stays within a given
//! part (the slack) of the greatest live size so far. Where a block does not fit and the space may not grow,
//! bytes are made contiguous instead. So reserved memory is bounded by peak live memory whatever the order of
//! sizes and lifetimes; placement decides only how often bytes must be moved for that.

use super::compaction::{self, Cause, Compaction};
use super::cost::CostModel;
use super::offsets::{Offsets, RangeId};
use super::placement_policy::PlacementPolicy;
use super::range_snapshot::RangeSnapshot;
use super::regrowth::{Answer, Regrowth};
use super::request::{Request, Room, Shortage, TAGS};
use super::stitch::{self, Stitch};

/// The parameters of a [`Planner`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlannerConfig {
    /// Sizes are rounded up to this, a power of two; blocks are aligned to it.
    pub granule_bytes: u64,
    /// The space grows and shrinks by multiples of this.
    pub page_bytes: u64,
    /// The space never grows beyond this.
    pub limit_bytes: u64,
    /// How much may be reserved above the greatest live size so far, as a part of it (0.02 is 2%).
    pub slack: f64,
    /// Whether free pages can be mapped elsewhere (see [`Stitch`]).
    pub stitching: bool,
    /// What moving and mapping cost.
    pub cost: CostModel,
}

impl Default for PlannerConfig {
    fn default() -> Self {
        Self {
            granule_bytes: 512,
            page_bytes: 2 << 20,
            limit_bytes: u64::MAX >> 1,
            slack: 0.028,
            stitching: false,
            cost: CostModel::H200,
        }
    }
}

/// What a planner holds.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannerReport {
    /// Reserved.
    pub reserved_bytes: u64,
    /// In used ranges, in whole granules.
    pub live_bytes: u64,
    /// The greatest that was live.
    pub peak_live_bytes: u64,
    /// Reserved and in no used range.
    pub free_bytes: u64,
    /// The largest free range.
    pub largest_free_bytes: u64,
    /// Live by tag.
    pub by_tag: [u64; TAGS],
}

impl PlannerReport {
    /// 0 where all free bytes are contiguous, near 1 where they are crumbs.
    pub fn fragmentation(&self) -> f64 {
        if self.free_bytes == 0 { 0.0 } else { 1.0 - self.largest_free_bytes as f64 / self.free_bytes as f64 }
    }
}

/// Decides where blocks lie. Pure: it touches no memory.
#[derive(Clone, Debug)]
pub struct Planner {
    space: Offsets,
    config: PlannerConfig,
    peak_live_bytes: u64,
    by_tag: [u64; TAGS],
    habit: PlacementPolicy,
    /// The peak when bytes were last moved: the same again means that the program repeats itself.
    peak_at_compaction: u64,
    regrowth: Regrowth,
}

impl Planner {
    /// An empty space.
    ///
    /// # Panics
    /// The granule or the page is not a power of two, or the page is smaller than the granule.
    pub fn new(config: PlannerConfig) -> Self {
        assert!(config.page_bytes.is_power_of_two() && config.page_bytes >= config.granule_bytes);
        Self {
            space: Offsets::new(config.granule_bytes),
            config,
            peak_live_bytes: 0,
            by_tag: [0; TAGS],
            habit: PlacementPolicy::default(),
            peak_at_compaction: 0,
            regrowth: Regrowth::NONE,
        }
    }

    /// The same with slots for `ranges` ranges, used and free: up to so many, it asks nothing of the system.
    #[must_use]
    pub fn with_capacity(mut self, ranges: usize) -> Self {
        self.space.reserve_ranges(ranges);
        self
    }

    /// The parameters.
    pub fn config(&self) -> &PlannerConfig {
        &self.config
    }

    /// Takes a range; `None` where none fits: then [`Planner::make_room`] says what to do.
    #[inline]
    pub fn allocate(&mut self, request: Request) -> Option<(RangeId, u64)> {
        if self.regrowth.watches(request.bytes) {
            return self.allocate_watched(request);
        }
        let free_before = self.space.free_bytes();
        let (side, pick) = self.habit.choose(&request, self.space.bytes());
        let taken = self.space.take(request.bytes, request.align, side, pick, request.tag % TAGS as u8)?;
        self.by_tag[request.tag as usize % TAGS] += free_before - self.space.free_bytes();
        self.peak_live_bytes = self.peak_live_bytes.max(self.live_bytes());
        Some(taken)
    }

    /// The same for what may be replaced by a larger one soon.
    #[cold]
    #[inline(never)]
    fn allocate_watched(&mut self, request: Request) -> Option<(RangeId, u64)> {
        let Request { bytes, align, tag, .. } = request;
        let free_before = self.space.free_bytes();
        let taken = match self.regrowth.pad(bytes) {
            Some(pad) if align <= self.config.granule_bytes => self.space.take_apart(bytes, pad, tag % TAGS as u8)?,
            _ => {
                let (side, pick) = self.habit.choose(&request, self.space.bytes());
                self.space.take(bytes, align, side, pick, tag % TAGS as u8)?
            }
        };
        self.by_tag[tag as usize % TAGS] += free_before - self.space.free_bytes();
        self.peak_live_bytes = self.peak_live_bytes.max(self.live_bytes());
        self.regrowth.placed(bytes);
        Some(taken)
    }

    /// Gives a range back; says where it was and how long.
    ///
    /// # Panics
    /// It is not in use.
    #[inline]
    pub fn free(&mut self, id: RangeId) -> (u64, u64) {
        let tag = self.space.tag_of(id);
        let (start, bytes) = self.space.give(id);
        self.by_tag[tag as usize] -= bytes;
        (start, bytes)
    }

    /// What to do so that `request` fits: call it, do what it says and try again, until it fits.
    ///
    /// # Errors
    /// Neither growing nor moving makes room within the limit.
    pub fn make_room(&self, request: Request) -> Result<Room, Shortage> {
        let request = request.of_some_bytes();
        let shortage = || self.shortage(request.bytes);
        let (page, reserved) = (self.config.page_bytes, self.space.bytes());
        let asked = request.bytes.checked_next_multiple_of(self.config.granule_bytes).ok_or_else(shortage)?;
        let live = self.live_bytes().checked_add(asked).ok_or_else(shortage)?;
        let peak = self.peak_live_bytes.max(live);
        let with_slack = peak.saturating_add((peak as f64 * self.config.slack) as u64) & !(page - 1);
        // What is live needs its last page whole, whatever the slack.
        let cap = with_slack.max(live.checked_next_multiple_of(page).ok_or_else(shortage)?);
        let cap = cap.min(self.config.limit_bytes & !(page - 1));
        let missing = asked.saturating_sub(self.space.free_tail_bytes());
        let missing = missing.saturating_add(request.align.saturating_sub(self.config.granule_bytes));
        let grow = missing.checked_next_multiple_of(page).ok_or_else(shortage)?;
        if reserved.checked_add(grow).ok_or_else(shortage)? <= cap {
            return Ok(Room::Grow { bytes: grow });
        }
        if cap > reserved {
            // Not enough for a hole of its own; but what is there to have makes moving cheaper.
            return Ok(Room::Grow { bytes: cap - reserved });
        }
        match self.make_room_without_growing(request) {
            Some(room) => Ok(room),
            // Pinned ranges are in the way: what the slack forbids is better than failing.
            None if reserved + grow <= self.config.limit_bytes & !(page - 1) => Ok(Room::Grow { bytes: grow }),
            None => Err(shortage()),
        }
    }

    /// As [`Planner::make_room`], from what is reserved.
    pub fn make_room_without_growing(&self, request: Request) -> Option<Room> {
        let request = request.of_some_bytes();
        let page = self.config.page_bytes;
        let Request { bytes, align, .. } = request;
        let (peak, cost) = (self.peak_live_bytes, &self.config.cost);
        let survey = RangeSnapshot::of(&self.space);
        let cause = match self.regrowth.answer(&self.space, &survey, request, peak, cost) {
            Answer::Spread(spread) => return Some(Room::Compact(spread)),
            Answer::Alone(cause) => cause,
        };
        let compact = compaction::plan(&survey, bytes, align, cause, cost);
        let stitch = (self.config.stitching && bytes >= page && align <= page)
            .then(|| stitch::plan(&self.space, bytes, page, cost))
            .flatten();
        match (compact, stitch) {
            (Some(compact), Some(stitch)) if compact.cost_ns <= stitch.cost_ns => Some(Room::Compact(compact)),
            (_, Some(stitch)) => Some(Room::Stitch(stitch)),
            (Some(compact), None) => Some(Room::Compact(compact)),
            (None, None) => None,
        }
    }

    /// The free parts of `spans`.
    pub fn free_within(&self, spans: impl IntoIterator<Item = std::ops::Range<u64>>) -> Vec<std::ops::Range<u64>> {
        let mut free = Vec::new();
        for span in spans {
            self.space.for_each(&mut |start, bytes, tag, _| {
                let (from, to) = (start.max(span.start), (start + bytes).min(span.end));
                if tag.is_none() && from < to {
                    free.push(from..to);
                }
            });
        }
        free
    }

    /// Takes the pieces of a plan that was made for this very state, as ranges that never move.
    ///
    /// # Panics
    /// The plan was made for another state.
    pub fn take_pieces(&mut self, plan: &Stitch, tag: u8) -> Vec<RangeId> {
        let take =
            |&(start, bytes): &(u64, u64)| self.take_at(start, bytes, tag).expect("the plan is of another state");
        plan.pieces.iter().map(take).collect()
    }

    /// Takes exactly the `bytes` at `start`, whole granules, where they are free, as a range that never moves.
    pub fn take_at(&mut self, start: u64, bytes: u64, tag: u8) -> Option<RangeId> {
        let id = self.space.take_at(start, bytes, tag % TAGS as u8)?;
        self.by_tag[tag as usize % TAGS] += bytes;
        self.peak_live_bytes = self.peak_live_bytes.max(self.live_bytes());
        Some(id)
    }

    /// Adds a segment of its own; ranges never reach from one into another. For devices without virtual memory.
    pub fn add_segment(&mut self, bytes: u64) -> u64 {
        self.space.add_segment(bytes)
    }

    /// The largest contiguous free range that compaction could make.
    pub fn largest_after_compaction(&self) -> u64 {
        let granule = self.config.granule_bytes;
        let survey = RangeSnapshot::of(&self.space);
        let (mut reached, mut beyond) = (self.space.largest_free_bytes(), self.space.free_bytes() + granule);
        while beyond - reached > granule {
            let middle = reached + (beyond - reached) / 2 / granule * granule;
            match compaction::plan(&survey, middle.max(granule), 1, Cause::Asked, &self.config.cost) {
                Some(plan) => reached = plan.bytes.max(middle),
                None => beyond = middle,
            }
        }
        reached
    }

    /// Calls `visit` with every range by offset: first offset, bytes, tag of a used one, whether it is pinned.
    pub fn for_each_range(&self, mut visit: impl FnMut(u64, u64, Option<u8>, bool)) {
        self.space.for_each(&mut visit);
    }

    /// Notes that `bytes` more are reserved, behind what was.
    pub fn grow(&mut self, bytes: u64) {
        self.space.extend(bytes);
    }

    /// Gives free pages at the high end back; says how many bytes.
    pub fn shrink(&mut self) -> u64 {
        self.space.trim(self.config.page_bytes)
    }

    /// A plan that opens `bytes` of contiguous free space, as data; nothing moves yet.
    pub fn plan_compaction(&self, bytes: u64, align: u64) -> Option<Compaction> {
        compaction::plan(&RangeSnapshot::of(&self.space), bytes, align, Cause::Asked, &self.config.cost)
    }

    /// Notes that the moves of `plan` are made; ranges keep their names.
    ///
    /// # Panics
    /// The plan was made for another state of this planner.
    pub fn apply(&mut self, plan: &Compaction) {
        self.regrowth.note(plan, &mut self.space);
        self.space.relocate(plan);
        if self.peak_at_compaction == self.peak_live_bytes {
            self.habit = self.habit.next();
        }
        self.peak_at_compaction = self.peak_live_bytes;
    }

    /// Says that a range must stay where it is, or may move again.
    pub fn pin(&mut self, id: RangeId, pinned: bool) {
        self.space.pin(id, pinned);
    }

    /// Where a range lies now.
    pub fn offset_of(&self, id: RangeId) -> u64 {
        self.space.start_of(id)
    }

    /// Its size in whole granules.
    pub fn bytes_of(&self, id: RangeId) -> u64 {
        self.space.bytes_of(id)
    }

    /// Reserved bytes.
    pub fn reserved_bytes(&self) -> u64 {
        self.space.bytes()
    }

    /// Bytes of used ranges, in whole granules.
    pub fn live_bytes(&self) -> u64 {
        self.space.bytes() - self.space.free_bytes()
    }

    /// What is held.
    pub fn report(&self) -> PlannerReport {
        PlannerReport {
            reserved_bytes: self.space.bytes(),
            live_bytes: self.live_bytes(),
            peak_live_bytes: self.peak_live_bytes,
            free_bytes: self.space.free_bytes(),
            largest_free_bytes: self.space.largest_free_bytes(),
            by_tag: self.by_tag,
        }
    }

    fn shortage(&self, bytes: u64) -> Shortage {
        Shortage {
            asked_bytes: bytes.checked_next_multiple_of(self.config.granule_bytes).unwrap_or(u64::MAX),
            live_bytes: self.live_bytes(),
            free_bytes: self.space.free_bytes(),
            largest_free_bytes: self.space.largest_free_bytes(),
            limit_bytes: self.config.limit_bytes,
        }
    }

    /// Checks the space and the accounts; see [`Offsets::check_invariants`].
    ///
    /// # Errors
    /// The first broken one, in words.
    pub fn check_invariants(&self) -> Result<(), String> {
        self.space.check_invariants()?;
        let tagged: u64 = self.by_tag.iter().sum();
        if tagged != self.live_bytes() {
            return Err(format!("{tagged} bytes by tag, {} live", self.live_bytes()));
        }
        if self.live_bytes() > self.peak_live_bytes {
            return Err(format!("{} live, above the peak {}", self.live_bytes(), self.peak_live_bytes));
        }
        Ok(())
    }
}
