//! One replay: what is reserved and moved, and how long the planner takes.

use std::hint::black_box;
use std::time::Instant;

use zero_alloc::planner::{Planner, PlannerConfig, RangeId, Request, Room};

use super::{Op, Trace};

/// What a replay held and moved.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    /// The greatest reserved.
    pub reserved_peak_bytes: u64,
    /// Bytes copied to make free ones contiguous.
    pub bytes_moved: u64,
    /// Pages mapped, to grow.
    pub pages_mapped: u64,
    /// How often it moved.
    pub compactions: u64,
    /// How often it grew.
    pub grows: u64,
    /// Modelled time of the device for moving and mapping.
    pub modelled_ns: f64,
}

/// How long one replay took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timing {
    /// Mean of an allocation and its free.
    pub ns_per_pair: f64,
    /// Of 1,000 pairs, 999 took at most this.
    pub p999_ns: f64,
}

impl Timing {
    /// Worse than any.
    pub const MAX: Self = Self { ns_per_pair: f64::MAX, p999_ns: f64::MAX };
}

/// Something that can replay a trace.
pub trait Replay {
    /// What an allocation gives.
    type Held: Copy;
    /// Takes `bytes`.
    fn allocate(&mut self, bytes: u64) -> Self::Held;
    /// Gives them back.
    fn free(&mut self, held: Self::Held);
}

/// zero-alloc's planner, doing what its `make_room` says.
#[derive(Debug)]
pub struct PlannerReplay {
    planner: Planner,
    /// What it cost.
    pub outcome: Outcome,
}

impl PlannerReplay {
    /// An empty planner with slots for what a trace may need at once.
    pub fn new(config: PlannerConfig, slots: usize) -> Self {
        let ranges = (2 * slots + 1024).min(1 << 24);
        Self { planner: Planner::new(config).with_capacity(ranges), outcome: Outcome::default() }
    }

    /// The planner.
    pub fn planner(&self) -> &Planner {
        &self.planner
    }

    #[cold]
    #[inline(never)]
    fn allocate_with_room(&mut self, request: Request) -> RangeId {
        loop {
            let cost = self.planner.config().cost;
            let room = self.planner.make_room(request);
            match room.unwrap_or_else(|shortage| panic!("the simulated device has no limit: {shortage:?}")) {
                Room::Grow { bytes } => {
                    self.planner.grow(bytes);
                    let pages = bytes / self.planner.config().page_bytes;
                    self.outcome.pages_mapped += pages;
                    self.outcome.grows += 1;
                    self.outcome.modelled_ns += pages as f64 * (cost.create_page_ns + cost.map_page_ns);
                    let reserved = self.planner.reserved_bytes();
                    self.outcome.reserved_peak_bytes = self.outcome.reserved_peak_bytes.max(reserved);
                }
                Room::Compact(plan) => {
                    self.outcome.bytes_moved += plan.moved_bytes();
                    self.outcome.compactions += 1;
                    self.outcome.modelled_ns += plan.cost_ns;
                    self.planner.apply(&plan);
                }
                Room::Stitch(plan) => panic!("the replay does not ask for stitching: {plan:?}"),
            }
            if let Some((range, _)) = self.planner.allocate(request) {
                return range;
            }
        }
    }
}

impl Replay for PlannerReplay {
    type Held = RangeId;

    #[inline]
    fn allocate(&mut self, bytes: u64) -> RangeId {
        let request = Request::new(bytes.max(1));
        match self.planner.allocate(request) {
            Some((range, _)) => range,
            None => self.allocate_with_room(request),
        }
    }

    #[inline]
    fn free(&mut self, held: RangeId) {
        self.planner.free(held);
    }
}

/// The crate offset-allocator in a space large enough to need nothing else: 1 TiB, in units of 512 bytes.
pub struct OffsetAllocatorReplay {
    allocator: offset_allocator::Allocator<u32>,
    /// Something did not fit: its times say nothing.
    pub refused: bool,
}

impl OffsetAllocatorReplay {
    /// An empty space.
    pub fn new(slots: usize) -> Self {
        let nodes = (2 * slots + 1024).min(1 << 24) as u32;
        Self { allocator: offset_allocator::Allocator::with_max_allocs(u32::MAX / 2, nodes), refused: false }
    }
}

impl Replay for OffsetAllocatorReplay {
    type Held = Option<offset_allocator::Allocation<u32>>;

    #[inline]
    fn allocate(&mut self, bytes: u64) -> Self::Held {
        let units = u32::try_from(bytes.max(1).div_ceil(512)).ok();
        let held = units.filter(|&units| units <= u32::MAX / 2).and_then(|units| self.allocator.allocate(units));
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

/// Replays the whole trace; gives the mean nanoseconds per pair.
pub fn mean_ns<R: Replay>(trace: &Trace, replay: &mut R) -> f64 {
    let mut held: Vec<Option<R::Held>> = vec![None; trace.slots];
    let start = Instant::now();
    for op in &trace.ops {
        match *op {
            Op::Allocate { slot, bytes } => held[slot as usize] = Some(black_box(replay.allocate(bytes))),
            Op::Free { slot } => {
                if let Some(was) = held[slot as usize].take() {
                    replay.free(was);
                }
            }
        }
    }
    start.elapsed().as_nanos() as f64 / trace.allocations.max(1) as f64
}

/// Replays the whole trace with a clock around every call; gives the time of each pair, sorted. The time that
/// reading the clock takes is in it.
pub fn pairs_ns<R: Replay>(trace: &Trace, replay: &mut R) -> Vec<u64> {
    let mut held: Vec<Option<(R::Held, u64)>> = vec![None; trace.slots];
    let mut pairs = Vec::with_capacity(trace.allocations);
    for op in &trace.ops {
        match *op {
            Op::Allocate { slot, bytes } => {
                let start = Instant::now();
                let got = black_box(replay.allocate(bytes));
                held[slot as usize] = Some((got, start.elapsed().as_nanos() as u64));
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
    // What is never freed took its allocation only.
    pairs.extend(held.into_iter().flatten().map(|(_, before)| before));
    pairs.sort_unstable();
    pairs
}

/// The value that a `part` of sorted values does not exceed.
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
    fn what_the_peer_has_no_space_for_is_refused_and_not_a_panic() {
        for (bytes, refused) in [(1, false), (1 << 39, false), (1 << 41, true), (u64::MAX, true)] {
            let mut peer = OffsetAllocatorReplay::new(1);
            let held = peer.allocate(bytes);
            assert_eq!(peer.refused, refused, "{bytes}");
            peer.free(held);
        }
    }
}
