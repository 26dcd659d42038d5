//! Replay of a trace through a planner: reserved bytes, mapped pages, and the planner's time.

use std::hint::black_box;
use std::time::Instant;

use zero_alloc::planner::{Planner, PlannerConfig, RangeId, Remedy, Request};

use super::{Op, Trace};

/// Reserved bytes and mapped pages of one replay.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    /// The peak of reserved bytes.
    pub reserved_peak_bytes: u64,
    /// Pages mapped by growth and for stitched blocks.
    pub pages_mapped: u64,
    /// The number of stitched blocks.
    pub stitches: u64,
    /// The number of times the space grew.
    pub grows: u64,
}

/// The time of one replay.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timing {
    /// The mean of a pair: an allocation and its free.
    pub ns_per_pair: f64,
    /// The 99.9th percentile of pairs.
    pub p999_ns: f64,
}

impl Timing {
    /// The start value for taking minima.
    pub const MAX: Self = Self {
        ns_per_pair: f64::MAX,
        p999_ns: f64::MAX,
    };
}

/// An allocator that can replay a trace.
pub trait Replay {
    /// A live allocation.
    type Held: Copy;
    /// Allocates `bytes`.
    fn allocate(&mut self, bytes: u64) -> Self::Held;
    /// Frees an allocation.
    fn free(&mut self, held: Self::Held);
}

/// A block of the planner.
#[derive(Clone, Copy, Debug)]
pub enum PlannerBlock {
    /// One range.
    Range(RangeId),
    /// Several ranges: a place in the replay's list.
    Stitched(usize),
}

/// zero-alloc's planner; applies the remedies that it returns.
#[derive(Debug)]
pub struct PlannerReplay {
    planner: Planner,
    /// The ranges of stitched blocks.
    stitched: Vec<Vec<RangeId>>,
    /// Places in `stitched` of freed blocks.
    unused: Vec<usize>,
    /// The outcome so far.
    pub outcome: Outcome,
}

impl PlannerReplay {
    /// An empty planner with bookkeeping for `slots` live allocations.
    pub fn new(config: PlannerConfig, slots: usize) -> Self {
        let ranges = (2 * slots + 1024).min(1 << 24);
        Self {
            planner: Planner::new(config.stitching(true)).with_capacity(ranges),
            stitched: Vec::new(),
            unused: Vec::new(),
            outcome: Outcome::default(),
        }
    }

    /// The planner.
    pub fn planner(&self) -> &Planner {
        &self.planner
    }

    #[cold]
    #[inline(never)]
    fn allocate_with_remedy(&mut self, request: Request) -> PlannerBlock {
        loop {
            let remedy = self.planner.find_remedy(request);
            let page_bytes = self.planner.config().page_bytes;
            match remedy.unwrap_or_else(|shortage| {
                panic!("the simulated device has no limit: {shortage:?}")
            }) {
                Remedy::Grow { bytes } => {
                    self.planner.grow(bytes);
                    self.outcome.pages_mapped += bytes / page_bytes;
                    self.outcome.grows += 1;
                    let reserved = self.planner.reserved_bytes();
                    self.outcome.reserved_peak_bytes =
                        self.outcome.reserved_peak_bytes.max(reserved);
                }
                Remedy::Stitch(plan) => {
                    self.outcome.pages_mapped += plan.bytes() / page_bytes;
                    self.outcome.stitches += 1;
                    let ranges = self.planner.allocate_pieces(&plan, request.tag);
                    return self.hold(ranges);
                }
                other => panic!("an unknown remedy: {other:?}"),
            }
            if let Some((range, _)) = self.planner.allocate(request) {
                return PlannerBlock::Range(range);
            }
        }
    }

    fn hold(&mut self, ranges: Vec<RangeId>) -> PlannerBlock {
        let place = self.unused.pop().unwrap_or(self.stitched.len());
        if place == self.stitched.len() {
            self.stitched.push(ranges);
        } else {
            self.stitched[place] = ranges;
        }
        PlannerBlock::Stitched(place)
    }
}

impl Replay for PlannerReplay {
    type Held = PlannerBlock;

    #[inline]
    fn allocate(&mut self, bytes: u64) -> PlannerBlock {
        let request = Request::new(bytes.max(1));
        match self.planner.allocate(request) {
            Some((range, _)) => PlannerBlock::Range(range),
            None => self.allocate_with_remedy(request),
        }
    }

    #[inline]
    fn free(&mut self, held: PlannerBlock) {
        match held {
            PlannerBlock::Range(range) => {
                self.planner.free(range);
            }
            PlannerBlock::Stitched(place) => {
                for range in std::mem::take(&mut self.stitched[place]) {
                    self.planner.free(range);
                }
                self.unused.push(place);
            }
        }
    }
}

/// The crate offset-allocator with a space of 1 TiB, in units of 512 bytes, so that it never grows.
pub struct OffsetAllocatorReplay {
    allocator: offset_allocator::Allocator<u32>,
    /// Whether a request did not fit. Then the times are invalid.
    pub refused: bool,
}

impl OffsetAllocatorReplay {
    /// An empty space.
    pub fn new(slots: usize) -> Self {
        let nodes = (2 * slots + 1024).min(1 << 24) as u32;
        Self {
            allocator: offset_allocator::Allocator::with_max_allocs(u32::MAX / 2, nodes),
            refused: false,
        }
    }
}

impl Replay for OffsetAllocatorReplay {
    type Held = Option<offset_allocator::Allocation<u32>>;

    #[inline]
    fn allocate(&mut self, bytes: u64) -> Self::Held {
        let units = u32::try_from(bytes.max(1).div_ceil(512)).ok();
        let held = units
            .filter(|&units| units <= u32::MAX / 2)
            .and_then(|units| self.allocator.allocate(units));
        self.refused |= held.is_none();
        held
    }

    #[inline]
    fn free(&mut self, held: Self::Held) {
        if let Some(held) = held {
            self.allocator.free(held);
        }
    }
}

/// Replays the whole trace; returns the mean nanoseconds per pair.
pub fn mean_ns<R: Replay>(trace: &Trace, replay: &mut R) -> f64 {
    let mut held: Vec<Option<R::Held>> = vec![None; trace.slots];
    let start = Instant::now();
    for op in &trace.ops {
        match *op {
            Op::Allocate { slot, bytes } => {
                held[slot as usize] = Some(black_box(replay.allocate(bytes)))
            }
            Op::Free { slot } => {
                if let Some(was) = held[slot as usize].take() {
                    replay.free(was);
                }
            }
        }
    }
    start.elapsed().as_nanos() as f64 / trace.allocations.max(1) as f64
}

/// Replays the whole trace with a clock around every call; returns the sorted times of all pairs,
/// which include reading the clock.
pub fn pairs_ns<R: Replay>(trace: &Trace, replay: &mut R) -> Vec<u64> {
    let mut held: Vec<Option<(R::Held, u64)>> = vec![None; trace.slots];
    let mut pairs = Vec::with_capacity(trace.allocations);
    for op in &trace.ops {
        match *op {
            Op::Allocate { slot, bytes } => {
                let start = Instant::now();
                let allocated = black_box(replay.allocate(bytes));
                held[slot as usize] = Some((allocated, start.elapsed().as_nanos() as u64));
            }
            Op::Free { slot } => {
                if let Some((was, before)) = held[slot as usize].take() {
                    let start = Instant::now();
                    replay.free(was);
                    pairs.push(before + start.elapsed().as_nanos() as u64);
                }
            }
        }
    }

    // Blocks that are never freed count as their allocation alone.
    pairs.extend(held.into_iter().flatten().map(|(_, before)| before));
    pairs.sort_unstable();
    pairs
}

/// The `part`-quantile of sorted values.
pub fn quantile(sorted: &[u64], part: f64) -> f64 {
    if sorted.is_empty() {
        return 0.0;
    }
    let at = ((sorted.len() as f64 * part).ceil() as usize).clamp(1, sorted.len()) - 1;
    sorted[at] as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_beyond_the_peers_space_are_refused() {
        for (bytes, refused) in [
            (1, false),
            (1 << 39, false),
            (1 << 41, true),
            (u64::MAX, true),
        ] {
            let mut peer = OffsetAllocatorReplay::new(1);
            let held = peer.allocate(bytes);
            assert_eq!(peer.refused, refused, "{bytes}");
            peer.free(held);
        }
    }
}
