//! The planner: it assigns an offset to every block, and finds a remedy when a request does not
//! fit.
//!
//! The space grows at its high end, a page at a time, and only while reserved bytes stay within a
//! configured fraction (the slack) above the peak of live bytes. When a request does not fit and
//! the space may not grow, free bytes are made contiguous instead. So reserved memory is bounded by
//! peak live memory whatever the order of sizes and lifetimes; placement only affects how often
//! bytes must be moved.

use super::compaction::{self, Compaction, CostModel, Stitch};
use super::offsets::{Offsets, RangeId};
use super::placement_policy::PlacementPolicy;
use super::request::{Remedy, Request, Shortage, TAGS};

/// The parameters of a [`Planner`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct PlannerConfig {
    /// The unit of sizes and offsets, a power of two.
    pub granule_bytes: u64,
    /// The space grows and shrinks by multiples of this.
    pub page_bytes: u64,
    /// The space never grows beyond this.
    pub limit_bytes: u64,
    /// The fraction by which reserved bytes may exceed the peak of live bytes (0.02 is 2%).
    pub slack: f64,
    /// Whether free pages can be mapped at other addresses (see [`Stitch`]).
    pub stitching: bool,
    /// The cost of moving and mapping.
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

impl PlannerConfig {
    /// Sets [`PlannerConfig::granule_bytes`].
    #[must_use]
    pub fn granule_bytes(mut self, granule_bytes: u64) -> Self {
        self.granule_bytes = granule_bytes;
        self
    }

    /// Sets [`PlannerConfig::page_bytes`].
    #[must_use]
    pub fn page_bytes(mut self, page_bytes: u64) -> Self {
        self.page_bytes = page_bytes;
        self
    }

    /// Sets [`PlannerConfig::limit_bytes`].
    #[must_use]
    pub fn limit_bytes(mut self, limit_bytes: u64) -> Self {
        self.limit_bytes = limit_bytes;
        self
    }

    /// Sets [`PlannerConfig::slack`].
    #[must_use]
    pub fn slack(mut self, slack: f64) -> Self {
        self.slack = slack;
        self
    }

    /// Sets [`PlannerConfig::stitching`].
    #[must_use]
    pub fn stitching(mut self, stitching: bool) -> Self {
        self.stitching = stitching;
        self
    }

    /// Sets [`PlannerConfig::cost`].
    #[must_use]
    pub fn cost(mut self, cost: CostModel) -> Self {
        self.cost = cost;
        self
    }
}

/// The bytes of a planner's space.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PlannerReport {
    /// Bytes that the planner may use.
    pub reserved_bytes: u64,
    /// In used ranges, in whole granules.
    pub live_bytes: u64,
    /// The peak of `live_bytes`.
    pub peak_live_bytes: u64,
    /// Reserved and in no used range.
    pub free_bytes: u64,
    /// The largest free range.
    pub largest_free_bytes: u64,
    /// Live bytes by tag.
    pub by_tag: [u64; TAGS],
}

/// Assigns offsets to blocks. It touches no memory.
#[derive(Clone, Debug)]
pub struct Planner {
    space: Offsets,
    config: PlannerConfig,
    peak_live_bytes: u64,
    by_tag: [u64; TAGS],
    policy: PlacementPolicy,
    /// The peak at the last compaction; an unchanged peak means that the program repeats itself.
    peak_at_compaction: u64,
}

impl Planner {
    /// A planner of an empty space.
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
            policy: PlacementPolicy::default(),
            peak_at_compaction: 0,
        }
    }

    /// Preallocates bookkeeping for `ranges` ranges, used and free; below it, allocating and
    /// freeing ranges need no heap allocation.
    #[must_use]
    pub fn with_capacity(mut self, ranges: usize) -> Self {
        self.space.reserve_ranges(ranges);
        self
    }

    /// The config that the planner was made with.
    pub fn config(&self) -> &PlannerConfig {
        &self.config
    }

    /// Allocates a range and returns its id and first offset; `None` if it does not fit. Then call
    /// [`Planner::find_remedy`].
    #[inline]
    pub fn allocate(&mut self, request: Request) -> Option<(RangeId, u64)> {
        let free_before = self.space.free_bytes();
        let (side, pick) = self.policy.choose(&request, self.space.bytes());
        let tag = request.tag % TAGS as u8;
        let allocated = self
            .space
            .allocate(request.bytes, request.align, side, pick, tag)?;
        self.count(tag, free_before - self.space.free_bytes());
        Some(allocated)
    }

    #[inline]
    fn count(&mut self, tag: u8, bytes: u64) {
        self.by_tag[tag as usize % TAGS] += bytes;
        self.peak_live_bytes = self.peak_live_bytes.max(self.live_bytes());
    }

    /// Frees a range; returns its first offset and its size.
    ///
    /// # Panics
    /// It is not in use.
    #[inline]
    pub fn free(&mut self, id: RangeId) -> (u64, u64) {
        let tag = self.space.tag_of(id);
        let (start, bytes) = self.space.free(id);
        self.by_tag[tag as usize] -= bytes;
        (start, bytes)
    }

    /// Returns the remedy for a request that does not fit. Carry it out and retry until the request
    /// fits.
    ///
    /// # Errors
    /// Neither growing nor moving helps within the limit.
    pub fn find_remedy(&self, request: Request) -> Result<Remedy, Shortage> {
        let shortage = || self.shortage(request.bytes);
        let page = self.config.page_bytes;
        let reserved = self.space.bytes();
        let wanted = request
            .bytes
            .max(1)
            .checked_next_multiple_of(self.config.granule_bytes)
            .ok_or_else(shortage)?;
        let live = self.live_bytes().checked_add(wanted).ok_or_else(shortage)?;
        let peak = self.peak_live_bytes.max(live);
        let with_slack =
            peak.saturating_add((peak as f64 * self.config.slack) as u64) & !(page - 1);
        // Even without slack, live bytes need the whole of their last page.
        let cap = with_slack.max(live.checked_next_multiple_of(page).ok_or_else(shortage)?);
        let limit = self.config.limit_bytes & !(page - 1);
        let cap = cap.min(limit);
        let missing = wanted.saturating_sub(self.space.free_tail_bytes());
        let missing =
            missing.saturating_add(request.align.saturating_sub(self.config.granule_bytes));
        let grow = missing
            .checked_next_multiple_of(page)
            .ok_or_else(shortage)?;
        if reserved.checked_add(grow).ok_or_else(shortage)? <= cap {
            return Ok(Remedy::Grow { bytes: grow });
        }

        if cap > reserved {
            // Too little for the request, but it makes moving cheaper.
            return Ok(Remedy::Grow {
                bytes: cap - reserved,
            });
        }

        match self.find_remedy_without_growing(request) {
            Some(remedy) => Ok(remedy),
            // Pinned ranges are in the way: exceeding the slack is better than failing.
            None if reserved + grow <= limit => Ok(Remedy::Grow { bytes: grow }),
            None => Err(shortage()),
        }
    }

    /// As [`Planner::find_remedy`], but within the reserved bytes.
    pub(crate) fn find_remedy_without_growing(&self, request: Request) -> Option<Remedy> {
        let page = self.config.page_bytes;
        let Request { bytes, align, .. } = Request {
            bytes: request.bytes.max(1),
            ..request
        };
        let compact = self.plan_compaction(bytes, align);
        let stitch = (self.config.stitching && bytes >= page && align <= page)
            .then(|| compaction::plan_stitch(&self.space, bytes, page, &self.config.cost))
            .flatten();
        match (compact, stitch) {
            (Some(compact), Some(stitch)) if compact.cost_ns <= stitch.cost_ns => {
                Some(Remedy::Compact(compact))
            }
            (_, Some(stitch)) => Some(Remedy::Stitch(stitch)),
            (Some(compact), None) => Some(Remedy::Compact(compact)),
            (None, None) => None,
        }
    }

    /// The free parts of `spans`.
    pub(crate) fn free_within(
        &self,
        spans: impl IntoIterator<Item = std::ops::Range<u64>>,
    ) -> Vec<std::ops::Range<u64>> {
        let mut free = Vec::new();
        for span in spans {
            self.space.for_each(|start, bytes, tag, _| {
                let from = start.max(span.start);
                let to = (start + bytes).min(span.end);
                if tag.is_none() && from < to {
                    free.push(from..to);
                }
            });
        }
        free
    }

    /// Allocates the pieces of a plan that was made for the current state, as pinned ranges.
    ///
    /// # Panics
    /// The plan was made for a different state.
    pub fn allocate_pieces(&mut self, plan: &Stitch, tag: u8) -> Vec<RangeId> {
        let pieces = plan
            .pieces
            .iter()
            .map(|&(start, bytes)| self.allocate_at(start, bytes, tag));
        pieces
            .map(|piece| piece.expect("the plan was made for a different state"))
            .collect()
    }

    /// Allocates exactly the `bytes` at `start`, whole granules, as a pinned range; `None` if they
    /// are not all free.
    pub(crate) fn allocate_at(&mut self, start: u64, bytes: u64, tag: u8) -> Option<RangeId> {
        let id = self.space.allocate_at(start, bytes, tag % TAGS as u8)?;
        self.count(tag, bytes);
        Some(id)
    }

    /// Adds a segment, for devices without virtual memory, and returns its first offset. Ranges
    /// never extend from one segment into another.
    pub(crate) fn add_segment(&mut self, bytes: u64) -> u64 {
        self.space.add_segment(bytes)
    }

    /// The size of the largest contiguous free range that compaction could make.
    pub(crate) fn largest_after_compaction(&self) -> u64 {
        compaction::largest_reachable(&self.space, &self.config.cost)
    }

    /// Calls `visit` with every range in order of offset: first offset, bytes, the tag if it is
    /// used, whether it is pinned.
    pub(crate) fn for_each_range(&self, visit: impl FnMut(u64, u64, Option<u8>, bool)) {
        self.space.for_each(visit);
    }

    /// Extends the space by `bytes` that were reserved after its end.
    pub fn grow(&mut self, bytes: u64) {
        self.space.extend(bytes);
    }

    /// Cuts the free pages at the high end off the space; returns their bytes.
    pub fn shrink(&mut self) -> u64 {
        self.space.trim(self.config.page_bytes)
    }

    /// A plan that opens `bytes` of contiguous free space; nothing moves until it is
    /// [applied](Planner::apply).
    pub fn plan_compaction(&self, bytes: u64, align: u64) -> Option<Compaction> {
        compaction::plan(&self.space, bytes, align, &self.config.cost)
    }

    /// Records that the moves of `plan` were made; ranges keep their ids.
    ///
    /// # Panics
    /// The plan was made for a different state of this planner.
    pub fn apply(&mut self, plan: &Compaction) {
        self.space.relocate(plan);
        if self.peak_at_compaction == self.peak_live_bytes {
            self.policy = self.policy.next();
        }
        self.peak_at_compaction = self.peak_live_bytes;
    }

    /// Pins a range, so that it never moves, or unpins it.
    pub fn pin(&mut self, id: RangeId, pinned: bool) {
        self.space.pin(id, pinned);
    }

    /// The first offset of a range.
    pub fn offset_of(&self, id: RangeId) -> u64 {
        self.space.start_of(id)
    }

    /// The size of a range, in whole granules.
    pub fn bytes_of(&self, id: RangeId) -> u64 {
        self.space.bytes_of(id)
    }

    /// Bytes that the planner may use: the segments, and what it has grown by.
    pub fn reserved_bytes(&self) -> u64 {
        self.space.bytes()
    }

    /// Bytes of used ranges, in whole granules.
    pub fn live_bytes(&self) -> u64 {
        self.space.bytes() - self.space.free_bytes()
    }

    /// The current numbers.
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
            requested_bytes: bytes
                .max(1)
                .checked_next_multiple_of(self.config.granule_bytes)
                .unwrap_or(u64::MAX),
            live_bytes: self.live_bytes(),
            free_bytes: self.space.free_bytes(),
            largest_free_bytes: self.space.largest_free_bytes(),
            limit_bytes: self.config.limit_bytes,
        }
    }

    /// Checks the lists of ranges and the counters.
    ///
    /// # Errors
    /// The first violated invariant.
    pub fn check_invariants(&self) -> Result<(), String> {
        self.space.check_invariants()?;
        let tagged: u64 = self.by_tag.iter().sum();
        if tagged != self.live_bytes() {
            return Err(format!("{tagged} bytes by tag, {} live", self.live_bytes()));
        }
        if self.live_bytes() > self.peak_live_bytes {
            return Err(format!(
                "{} bytes live, above the peak {}",
                self.live_bytes(),
                self.peak_live_bytes
            ));
        }
        Ok(())
    }
}
