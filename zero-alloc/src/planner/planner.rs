//! The planner: it assigns an offset to every block, and finds a remedy when a request does not
//! fit.
//!
//! The space grows at its high end, a page at a time, while reserved bytes stay within a configured
//! fraction (the slack) above the peak of live bytes. When a request does not fit and the space may
//! not grow, a request of a page or more gets free pages from several places, mapped at contiguous
//! addresses. The space grows beyond the slack only where whole free pages do not suffice.

use super::ranges::{Offsets, RangeId};
use super::request::{Lifetime, Remedy, Request, Shortage, TAGS};
use super::search::{Pick, Side};
use super::stitch::{self, Stitch};

/// A request is large if it exceeds the reserved bytes shifted right by this.
const LARGE_LOG2: u32 = 7;

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
}

impl Default for PlannerConfig {
    fn default() -> Self {
        Self {
            granule_bytes: 512,
            page_bytes: 2 << 20,
            limit_bytes: u64::MAX >> 1,
            slack: 0.028,
            stitching: false,
        }
    }
}

setters!(PlannerConfig {
    granule_bytes: u64,
    page_bytes: u64,
    limit_bytes: u64,
    slack: f64,
    stitching: bool,
});

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
    /// Whether the last large request was placed at the high end.
    last_is_high: bool,
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
            last_is_high: false,
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
        let (side, pick) = self.place(&request);
        let tag = request.tag % TAGS as u8;
        let allocated = self
            .space
            .allocate(request.bytes, request.align, side, pick, tag)?;
        self.count(tag, free_before - self.space.free_bytes());
        Some(allocated)
    }

    /// The end of a free range, and the choice among those that fit. Large requests alternate
    /// between the highest and the lowest place; long-lived and small ones are packed at the low
    /// end.
    #[inline]
    fn place(&mut self, request: &Request) -> (Side, Pick) {
        let is_large = request.bytes > self.space.bytes() >> LARGE_LOG2;
        if request.lifetime == Lifetime::Long || !is_large {
            return (Side::Low, Pick::Best);
        }
        self.last_is_high = !self.last_is_high;
        match self.last_is_high {
            true => (Side::High, Pick::Highest),
            false => (Side::Low, Pick::Lowest),
        }
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
    /// Neither growing nor mapping helps within the limit.
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
            // Too little for the request, but more pages to map.
            return Ok(Remedy::Grow {
                bytes: cap - reserved,
            });
        }

        match self.find_stitch(request) {
            Some(stitch) => Ok(Remedy::Stitch(stitch)),
            // Exceeding the slack is better than failing.
            None if reserved + grow <= limit => Ok(Remedy::Grow { bytes: grow }),
            None => Err(shortage()),
        }
    }

    /// Free pages for a request, within the reserved bytes.
    pub(crate) fn find_stitch(&self, request: Request) -> Option<Stitch> {
        let page = self.config.page_bytes;
        let is_stitchable = self.config.stitching && request.bytes >= page && request.align <= page;
        is_stitchable
            .then(|| stitch::plan(&self.space, request.bytes, page))
            .flatten()
    }

    /// Allocates the pieces of a plan that was made for the current state.
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

    /// Allocates exactly the `bytes` at `start`, whole granules; `None` if they are not all free.
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

    /// Calls `visit` with every range in order of offset: first offset, bytes, the tag if it is
    /// used.
    pub(crate) fn for_each_range(&self, visit: impl FnMut(u64, u64, Option<u8>)) {
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
