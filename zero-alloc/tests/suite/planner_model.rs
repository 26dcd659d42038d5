//! The planner compared with a naive reference on random programs: the bytes of each range keep
//! their contents.
//!
//! `ZERO_ALLOC_MODEL_OPS` sets the number of operations of the random program.

use std::collections::BTreeMap;

use proptest::prelude::*;
use zero_alloc::planner::{Lifetime, Planner, PlannerConfig, RangeId, Remedy, Request, Stitch};

use crate::Random;

const GRANULE: u64 = 16;
const PAGE: u64 = 256;

fn config(limit_bytes: u64, slack: f64) -> PlannerConfig {
    PlannerConfig::default()
        .granule_bytes(GRANULE)
        .page_bytes(PAGE)
        .limit_bytes(limit_bytes)
        .slack(slack)
        .stitching(true)
}

/// A planner, and the reference: the ranges, and the bytes written there.
struct Model {
    planner: Planner,
    memory: Vec<u8>,
    /// By offset: size, id, fill.
    held: BTreeMap<u64, (u64, RangeId, u8)>,
    stitches: usize,
    shortages: usize,
    fill: u8,
}

impl Model {
    fn new(config: PlannerConfig) -> Self {
        Self {
            planner: Planner::new(config).with_capacity(64),
            memory: Vec::new(),
            held: BTreeMap::new(),
            stitches: 0,
            shortages: 0,
            fill: 0,
        }
    }

    fn allocate(&mut self, request: Request) {
        let (id, start) = loop {
            if let Some(allocated) = self.planner.allocate(request) {
                break allocated;
            }
            match self.planner.find_remedy(request) {
                Ok(Remedy::Grow { bytes }) => {
                    self.planner.grow(bytes);
                    let reserved = self.planner.reserved_bytes();
                    self.memory.resize(reserved as usize, 0);
                }
                Ok(Remedy::Stitch(plan)) => return self.stitch(&plan, request),
                Ok(other) => panic!("neither growing nor stitching: {other:?}"),
                Err(shortage) => {
                    assert_eq!(
                        shortage.requested_bytes,
                        request.bytes.max(1).next_multiple_of(GRANULE)
                    );
                    assert_eq!(shortage.live_bytes, self.planner.live_bytes());
                    self.shortages += 1;
                    return;
                }
            }
        };

        let bytes = request.bytes.max(1).next_multiple_of(GRANULE);
        assert_eq!(
            start % request.align.max(GRANULE),
            0,
            "{request:?} at {start}"
        );
        self.hold(start, bytes, id);
    }

    /// Holds new bytes, which must be free.
    fn hold(&mut self, start: u64, bytes: u64, id: RangeId) {
        assert!(start + bytes <= self.memory.len() as u64);
        if let Some((below, (size, ..))) = self.held.range(..=start).next_back() {
            assert!(below + size <= start, "overlaps the block below");
        }
        if let Some((above, _)) = self.held.range(start..).next() {
            assert!(start + bytes <= *above, "overlaps the block above");
        }
        self.fill = self.fill.wrapping_add(1);
        self.memory[start as usize..(start + bytes) as usize].fill(self.fill);
        self.held.insert(start, (bytes, id, self.fill));
    }

    /// Holds the pieces of a stitched block, which are whole free pages.
    fn stitch(&mut self, plan: &Stitch, request: Request) {
        self.stitches += 1;
        assert_eq!(plan.bytes(), request.bytes.next_multiple_of(PAGE));
        let ids = self.planner.allocate_pieces(plan, request.tag);
        for (&(start, bytes), id) in plan.pieces.iter().zip(ids) {
            assert_eq!((start % PAGE, bytes % PAGE), (0, 0), "{plan:?}");
            self.hold(start, bytes, id);
        }
    }

    fn free(&mut self, nth: usize) {
        let Some((&start, &(bytes, id, fill))) = self.held.iter().nth(nth % self.held.len().max(1))
        else {
            return;
        };
        let contents = &self.memory[start as usize..(start + bytes) as usize];
        assert!(
            contents.iter().all(|b| *b == fill),
            "the contents of {id:?} at {start} are lost"
        );
        assert_eq!(self.planner.free(id), (start, bytes));
        self.held.remove(&start);
    }

    fn check(&self) {
        self.planner.check_invariants().expect("sound");
        let live: u64 = self.held.values().map(|(bytes, ..)| bytes).sum();
        assert_eq!(self.planner.live_bytes(), live);
    }
}

fn random_request(random: &mut Random) -> Request {
    let bytes = match random.below(10) {
        0 => 1 + random.below(4096),
        1..=3 => 1 + random.below(700),
        _ => 1 + random.below(100),
    };
    let align = if random.below(12) == 0 {
        1 << random.below(9)
    } else {
        1
    };
    let lifetime = [Lifetime::Long, Lifetime::Short, Lifetime::Unknown][random.below(3) as usize];
    Request::new(bytes)
        .align(align)
        .lifetime(lifetime)
        .tag(random.below(8) as u8)
}

fn model_ops() -> usize {
    let default = if cfg!(miri) { 100 } else { 300_000 };
    std::env::var("ZERO_ALLOC_MODEL_OPS")
        .ok()
        .and_then(|v| v.parse().ok())
        .unwrap_or(default)
}

#[test]
fn random_programs_agree_with_the_reference() {
    let mut random = Random(1);
    let mut stitches = 0;
    let mut shortages = 0;
    let rounds = 10;

    for round in 0..rounds {
        let limit = if round % 2 == 0 { 1 << 40 } else { 16 << 10 };
        let mut model = Model::new(config(limit, [0.0, 0.02, 0.3][round % 3]));
        for _ in 0..model_ops() / rounds {
            // Phases that grow and shrink make holes of all sizes.
            let filling = model.planner.live_bytes() < random.below(30_000);
            if filling {
                let request = random_request(&mut random);
                model.allocate(request);
            } else {
                let nth = random.below(1 << 20) as usize;
                model.free(nth);
            }
            model.check();
        }
        stitches += model.stitches;
        shortages += model.shortages;
    }

    if !cfg!(miri) {
        assert!(stitches > 100, "only {stitches} blocks were stitched");
        assert!(shortages > 10, "only {shortages} shortages were met");
    }
}

#[derive(Clone, Debug)]
enum Step {
    Allocate(u64, u8, u8),
    Free(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (1u64..2000, 0u8..8, 0u8..3).prop_map(|(bytes, align, lifetime)| Step::Allocate(bytes, align, lifetime)),
        2 => (0usize..100).prop_map(Step::Free),
    ];
    prop::collection::vec(step, 1..if cfg!(miri) { 25 } else { 120 })
}

fn run(model: &mut Model, steps: &[Step]) {
    for step in steps {
        match *step {
            Step::Allocate(bytes, align, lifetime) => {
                let lifetime =
                    [Lifetime::Long, Lifetime::Short, Lifetime::Unknown][lifetime as usize];
                model.allocate(Request::new(bytes).align(1 << align).lifetime(lifetime));
            }
            Step::Free(nth) => model.free(nth),
        }
        model.check();
    }
}

proptest! {
    #![proptest_config(crate::cases(200))]

    #[test]
    fn freeing_everything_leaves_one_free_range(steps in steps()) {
        let mut model = Model::new(config(1 << 40, 0.05));
        run(&mut model, &steps);
        while !model.held.is_empty() {
            model.free(0);
            model.check();
        }
        let report = model.planner.report();
        prop_assert_eq!(report.largest_free_bytes, report.free_bytes);
        prop_assert_eq!(report.free_bytes, report.reserved_bytes);
        prop_assert_eq!(model.planner.shrink(), report.reserved_bytes);
        model.planner.check_invariants().expect("sound");
    }

    #[test]
    fn whole_pages_stay_within_the_slack_of_the_peak(steps in steps(), slack in 0.0f64..0.2) {
        let mut model = Model::new(config(1 << 40, slack));
        let plain: Vec<_> = steps.iter().map(|step| match *step {
            Step::Allocate(bytes, _, lifetime) => Step::Allocate(bytes.next_multiple_of(PAGE), 0, lifetime),
            Step::Free(nth) => Step::Free(nth),
        }).collect();
        for step in &plain {
            run(&mut model, std::slice::from_ref(step));
            let report = model.planner.report();
            let bound = report.peak_live_bytes + (report.peak_live_bytes as f64 * slack) as u64;
            prop_assert!(report.reserved_bytes <= bound.max(report.peak_live_bytes.next_multiple_of(PAGE)));
        }
    }
}

#[test]
fn a_request_of_zero_bytes_takes_a_granule() {
    let mut model = Model::new(config(1 << 40, 0.03));
    for _ in 0..40 {
        model.allocate(Request::new(0));
        model.check();
    }
    assert_eq!(model.planner.live_bytes(), 40 * GRANULE);
}

/// Four pages, of which the second and fourth are free, and half of the third.
fn planner_with_holes() -> Planner {
    let mut planner = Planner::new(config(1 << 20, 0.0));
    planner.grow(4 * PAGE);
    let request = |bytes| Request::new(bytes).lifetime(Lifetime::Long);
    let ids: Vec<_> = [PAGE, PAGE, PAGE / 2, PAGE / 2, PAGE]
        .map(|bytes| planner.allocate(request(bytes)).expect("allocated").0)
        .into();
    for id in [ids[1], ids[2], ids[4]] {
        planner.free(id);
    }
    planner
}

#[test]
fn whole_free_pages_are_stitched() {
    let mut planner = planner_with_holes();
    let remedy = planner.find_remedy(Request::new(2 * PAGE));
    let Ok(Remedy::Stitch(plan)) = remedy else {
        panic!("{remedy:?}")
    };
    assert_eq!(plan.pieces, [(PAGE, PAGE), (3 * PAGE, PAGE)]);
    planner.allocate_pieces(&plan, 0);
    planner.check_invariants().expect("sound");
    assert_eq!(planner.report().free_bytes, PAGE / 2);
}

#[test]
fn parts_of_pages_are_not_stitched() {
    let mut planner = planner_with_holes();
    let held = planner.allocate(Request::new(PAGE)).expect("allocated");
    // A page and a half are free, in two places.
    let remedy = planner.find_remedy(Request::new(PAGE + PAGE / 2));
    assert!(
        matches!(remedy, Ok(Remedy::Grow { .. })),
        "{remedy:?} beside {held:?}"
    );
}

#[test]
fn large_requests_alternate_between_the_ends() {
    let mut planner = Planner::new(config(1 << 20, 0.0));
    planner.grow(64 * PAGE);
    let mut place = |lifetime| {
        let request = Request::new(PAGE).lifetime(lifetime);
        planner.allocate(request).expect("allocated").1 / PAGE
    };
    assert_eq!(
        [(); 4].map(|()| place(Lifetime::Unknown)),
        [63, 0, 62, 1],
        "the highest and the lowest place"
    );
    assert_eq!([(); 2].map(|()| place(Lifetime::Long)), [2, 3]);
    assert_eq!(place(Lifetime::Short), 61);
}

#[test]
fn a_shortage_has_the_numbers() {
    let mut planner = Planner::new(config(4 * PAGE, 0.0));
    planner.grow(4 * PAGE);
    let _held = planner.allocate(Request::new(PAGE)).expect("allocated");
    let shortage = planner
        .find_remedy(Request::new(4 * PAGE))
        .expect_err("3 of 4 pages are free");
    assert_eq!(
        (shortage.requested_bytes, shortage.live_bytes),
        (4 * PAGE, PAGE)
    );

    assert_eq!(
        (
            shortage.free_bytes,
            shortage.largest_free_bytes,
            shortage.limit_bytes
        ),
        (3 * PAGE, 3 * PAGE, 4 * PAGE)
    );

    let absurd = planner
        .find_remedy(Request::new(u64::MAX))
        .expect_err("beyond any space");
    assert_eq!(absurd.requested_bytes, u64::MAX);
}
