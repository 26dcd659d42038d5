//! Overlap of communication and compute in a step of stage 3 over a slow link.
//!
//! Tests on real streams read no clock: each compute operation ends only when the communication
//! that should overlap with it has ended, so a step without overlap would not end. Times are
//! asserted exactly, in simulated time (`common/model.rs`). One ignored test measures real time.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use zero_alloc::device::{AnySlice, DType, Device, Stream};
use zero_alloc::host::{HostDevice, HostStream, Monitor, OpSpan, Timeline};
use zero_alloc::{Block, Pool, Purpose};
use zero_comm::overlap::{Overlap, chrome_trace};
use zero_comm::slow::{Link, behind};
use zero_comm::threads::World;
use zero_comm::{
    BucketOptions, Buckets, CommOptions, Communicator, PrefetchOptions, Prefetcher, ReduceOp,
};

use crate::common::model::{Model, ModelComm};
use crate::common::{Comm, LIMIT, view};

const UNITS: usize = 12;
const SHARD: usize = 1000;
const COMPUTE: Duration = Duration::from_millis(6);
/// 1000 fp32 in 2 ms.
const LINK: Link = Link {
    latency: Duration::from_millis(1),
    bytes_per_second: 4e6,
};

/// The duration of a compute operation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Compute {
    /// [`COMPUTE`].
    Sleeps,
    /// Until everything enqueued on the communication stream before it has run.
    WaitsForComm,
}

/// Counts the operations that have run on the communication stream.
#[derive(Default)]
struct Marks {
    run: Arc<Monitor<usize>>,
    enqueued: usize,
}

impl Marks {
    fn mark(&mut self, how: Compute, comm: &HostStream) {
        if how == Compute::Sleeps {
            return;
        }
        let run = Arc::clone(&self.run);
        self.enqueued += 1;
        let count = move || {
            run.update(|count| *count += 1);
            Ok(())
        };
        comm.enqueue("mark", count).unwrap();
    }

    fn compute(&self, how: Compute, stream: &HostStream, label: &'static str) {
        let run = Arc::clone(&self.run);
        let enqueued = self.enqueued;
        let work = move || match how {
            Compute::Sleeps => {
                std::thread::sleep(COMPUTE);
                Ok(())
            }
            Compute::WaitsForComm => run.wait_until(
                LIMIT,
                || "communication".to_owned(),
                |count| (*count >= enqueued).then_some(()),
            ),
        };
        stream.enqueue(label, work).unwrap();
    }
}

/// Forward and backward of stage 3 on two ranks; the spans of rank 0 after a first step.
fn step(overlap: bool, how: Compute) -> Vec<OpSpan> {
    let spans = std::thread::scope(|scope| {
        let ranks: Vec<_> = World::new(2, CommOptions::default())
            .unwrap()
            .into_iter()
            .map(|comm| {
                scope.spawn(move || rank(Arc::new(behind(Arc::new(comm), LINK)), overlap, how))
            })
            .collect();
        ranks
            .into_iter()
            .map(|r| r.join().unwrap())
            .collect::<Vec<_>>()
    });
    spans.into_iter().next().unwrap()
}

fn rank(comm: Comm, overlap: bool, how: Compute) -> Vec<OpSpan> {
    let timeline = Timeline::new();
    let device = HostDevice::new().with_timeline(timeline.clone());
    let streams = [
        device.create_stream("compute").unwrap(),
        device.create_stream("comm").unwrap(),
    ];
    let mut buffers = [1f32, 0.0].map(|value| vec![vec![value; SHARD]; UNITS]);
    let [shards, grads] = buffers
        .each_mut()
        .map(|units| units.iter_mut().map(|s| view(s)).collect());
    let ([compute, comm_stream], mut marks) = (streams.clone(), Marks::default());
    let options = PrefetchOptions::default().ahead(usize::from(overlap));

    run_step(
        &Pool::new(device, 1 << 20),
        comm,
        streams,
        (shards, grads),
        options,
        |label| {
            // Enqueued are the gathers of this unit and of the next and, in backward, the reduction
            // of the previous one.
            marks.mark(how, &comm_stream);
            marks.compute(how, &compute, label);
        },
    );

    compute.synchronize(LIMIT).unwrap();
    comm_stream.synchronize(LIMIT).unwrap();
    timeline.take()
}

/// Runs forward and backward of stage 3 over units with these shards of parameters and of
/// gradients; `work` enqueues a unit's compute. With `prefetch.ahead == 0` nothing overlaps.
fn run_step<D: Device>(
    pool: &Pool<D>,
    comm: Arc<dyn Communicator<D>>,
    [compute, comm_stream]: [D::Stream; 2],
    (shards, grads): (Vec<AnySlice>, Vec<AnySlice>),
    prefetch: PrefetchOptions,
    mut work: impl FnMut(&'static str),
) {
    let units = shards.len();
    let ranks = comm.world_size();
    let capacity = ranks * shards.iter().map(|s| s.len()).max().unwrap();
    let options = BucketOptions::new(capacity, DType::F32).overlap(prefetch.ahead > 0);
    let buckets = Buckets::new(
        pool,
        comm.clone(),
        compute.clone(),
        comm_stream.clone(),
        options,
    )
    .unwrap();

    let mut prefetch = Prefetcher::new(
        pool.clone(),
        comm,
        compute.clone(),
        comm_stream.clone(),
        shards.clone(),
        prefetch,
    );

    prefetch
        .expect_order((0..units).chain((0..units).rev()).collect())
        .unwrap();
    let mut prefetch = prefetch.step().unwrap();

    for unit in 0..units {
        let unsharded = prefetch.unshard(unit).unwrap();
        work("forward");
        prefetch.reshard(unsharded);
    }

    for unit in (0..units).rev() {
        let unsharded = prefetch.unshard(unit).unwrap();
        work("backward");
        prefetch.reshard(unsharded);
        let filling = buckets.begin(ranks * shards[unit].len()).unwrap();
        let in_flight = filling
            .reduce_scatter_into(grads[unit], ReduceOp::Sum)
            .unwrap();
        in_flight.finish().unwrap().wait_on(&comm_stream).unwrap();
    }

    prefetch.end();
    buckets.wait_all_on(&compute).unwrap();
}

/// A step in simulated time.
#[derive(Clone, Debug)]
struct Step {
    /// Elements of each unit's shard.
    shards: Vec<usize>,
    ranks: usize,
    link: Link,
    /// Time of a unit's forward; its backward takes twice that.
    forward: Duration,
}

impl Step {
    /// The spans of one rank.
    fn spans(&self, prefetch: PrefetchOptions) -> Vec<OpSpan> {
        let device = Model::new();
        let streams = [
            device.create_stream("compute").unwrap(),
            device.create_stream("comm").unwrap(),
        ];
        let pool = Pool::new(device.clone(), 1 << 40);
        let allocate = |&len: &usize| {
            pool.allocate(len, DType::F32, Purpose::Params, &streams[1])
                .unwrap()
        };

        let [shards, grads] =
            [(); 2].map(|()| self.shards.iter().map(allocate).collect::<Vec<_>>());
        // SAFETY: nothing reads or writes on this device.
        let slices =
            |blocks: &[Block<Model>]| blocks.iter().map(|b| unsafe { b.slice() }).collect();
        let buffers = (slices(&shards), slices(&grads));
        let compute = streams[0].clone();
        let comm = Arc::new(ModelComm {
            world_size: self.ranks,
            link: self.link,
        });

        run_step(&pool, comm, streams, buffers, prefetch, |label| {
            compute.run(
                label,
                if label == "forward" {
                    self.forward
                } else {
                    2 * self.forward
                },
            );
        });

        device.spans()
    }

    /// The time of a unit's gather; that of its reduction is the same.
    fn one_way(&self, unit: usize) -> Duration {
        self.link
            .time(((self.ranks - 1) * self.shards[unit] * 4) as u64)
    }

    /// The phases of a step that gathers one use ahead within `max_live_elems`: each is the
    /// (compute, communication) that the schedule can overlap. Also returns the first phase from
    /// which the law below is exact.
    fn phases(&self, max_live_elems: usize) -> (Vec<(Duration, Duration)>, usize) {
        let units = self.shards.len();
        let uses: Vec<usize> = (0..units).chain((0..units).rev()).collect();
        let reduction = |at: usize| {
            if at >= units {
                self.one_way(uses[at])
            } else {
                Duration::ZERO
            }
        };

        let is_kept = |at: usize| uses[at] == uses[at - 1];
        let is_ahead = |at: usize| {
            self.ranks * (self.shards[uses[at]] + self.shards[uses[at - 1]]) <= max_live_elems
        };
        let mut phases = vec![(Duration::ZERO, self.one_way(0))];
        let mut exact_from = 0;

        for at in 0..uses.len() {
            let mut beside = Duration::ZERO;
            if at > 0 && !is_kept(at) && !is_ahead(at) {
                phases.push((Duration::ZERO, reduction(at - 1) + self.one_way(uses[at])));
            } else if at > 0 {
                beside += reduction(at - 1);
            }
            if at + 1 < uses.len() && !is_kept(at + 1) && is_ahead(at + 1) {
                beside += self.one_way(uses[at + 1]);
            }
            if at == units + 1 {
                exact_from = phases.len();
            }
            phases.push((
                if at < units {
                    self.forward
                } else {
                    2 * self.forward
                },
                beside,
            ));
        }

        if units == 1 {
            exact_from = phases.len();
        }
        phases.push((Duration::ZERO, reduction(uses.len() - 1)));
        (phases, exact_from)
    }
}

fn exposed(phases: &[(Duration, Duration)]) -> Duration {
    phases
        .iter()
        .map(|(compute, comm)| comm.saturating_sub(*compute))
        .sum()
}

#[test]
fn one_unit_is_exposed_in_modelled_time() {
    let step = Step {
        shards: vec![SHARD; UNITS],
        ranks: 2,
        link: LINK,
        forward: LINK.time(4 * SHARD as u64),
    };

    let one_way = step.one_way(0);
    let overlap = Overlap::of(&step.spans(PrefetchOptions::default()), "comm");
    // Each unit is gathered for forward and for backward, except for the last, which is kept, and
    // reduced.
    assert_eq!(overlap.comm, one_way * (3 * UNITS - 1) as u32);
    // Only the first gather and the last reduction are exposed.
    assert_eq!(overlap.exposed, 2 * one_way);
    assert!(
        overlap.exposed * 10 <= overlap.comm && overlap.fraction() >= 0.9,
        "{overlap:?}"
    );
    // Without overlap, all of it is exposed.
    let serial = PrefetchOptions::default().ahead(0);
    let serial = Overlap::of(&step.spans(serial), "comm");
    assert_eq!((serial.exposed, serial.comm), (overlap.comm, overlap.comm));
    assert_eq!(serial.step - overlap.step, overlap.comm - 2 * one_way);
}

proptest! {
    /// The law of exposed communication.
    ///
    /// During the compute of use k, the communication stream runs the reduction of use k - 1 (in
    /// backward) and the gather of use k + 1 (unless its unit is kept). If the gather exceeds the
    /// limit together with the unit in use, it waits until that unit is resharded; the gather and
    /// the reduction before it are then a phase without compute. The first gather and the last
    /// reduction are also phases without compute. The exposed time is at most the sum over the
    /// phases of max(0, comm - compute); from the second use of backward on, it equals that sum.
    ///
    /// Proof. Let m(k) be the time at which the compute and the communication of phases 0 to k have
    /// ended. Compute k waits for compute k - 1 and for the last communication of phase k - 1, the
    /// gather of its unit: it starts at m(k - 1) or earlier. The communication of phase k waits for
    /// that of phase k - 1, for compute k - 1 if it reduces, and for memory whose last use is
    /// compute k - 1 or earlier: it starts at m(k - 1) or earlier. So m(k) <= m(k - 1) +
    /// max(compute, comm). The sum over the phases is step - compute <= sum of max(0, comm -
    /// compute). While compute is idle, communication runs, so the left side is the exposed time.
    /// If phase k reduces, both start exactly at m(k - 1), and equality holds. In forward, gathers
    /// may run further ahead, if the pool has memory that no compute uses.
    #[test]
    fn exposed_time_is_what_outlasts_compute(
        shards in prop::collection::vec(1usize..5000, 1..12), ranks in 2usize..9,
        latency_us in 0u64..1000, bytes_per_second in 1e6..1e9f64, percent in 0u32..300, room in 0usize..12_000,
    ) {
        let link = Link { latency: Duration::from_micros(latency_us), bytes_per_second };
        let mut step = Step { shards, ranks, link, forward: Duration::ZERO };
        let largest = (0..step.shards.len()).map(|unit| step.one_way(unit)).max().unwrap();
        step.forward = largest * percent / 100;
        let ends = 2 * step.one_way(0);
        let bounded = step.shards.iter().max().unwrap().max(&room) * ranks;

        for max_live_elems in [usize::MAX, bounded] {
            let spans = step.spans(PrefetchOptions::default().max_live_elems(max_live_elems));
            let overlap = Overlap::of(&spans, "comm");
            prop_assert_eq!(overlap.exposed, overlap.step - overlap.compute);
            let (phases, exact_from) = step.phases(max_live_elems);
            prop_assert!(ends <= overlap.exposed && overlap.exposed <= exposed(&phases), "{:?}", overlap);
            if percent >= 100 && max_live_elems == usize::MAX {
                // A unit's forward takes as long as a gather, its backward as long as a gather and
                // a reduction.
                prop_assert_eq!(exposed(&phases), ends);
            }
            let backward: Vec<&OpSpan> = spans.iter().filter(|s| s.label == "backward").collect();
            let tail = backward.get(1).map_or(backward[0].end, |second| second.start);
            let tail: Vec<OpSpan> = spans.iter().filter(|s| s.start >= tail).cloned().collect();
            prop_assert_eq!(Overlap::of(&tail, "comm").exposed, exposed(&phases[exact_from..]));
        }
    }
}

fn named<'a>(spans: &'a [OpSpan], label: &str) -> Vec<&'a OpSpan> {
    spans.iter().filter(|s| s.label == label).collect()
}

#[test]
fn gathers_run_ahead_and_reductions_inside_backward() {
    let spans = step(true, Compute::WaitsForComm);
    let forward = named(&spans, "forward");
    let backward = named(&spans, "backward");
    let gathers = named(&spans, "all_gather");
    let reductions = named(&spans, "reduce_scatter");

    // The unit in the middle is used twice and gathered once.
    assert_eq!(
        (
            gathers.len(),
            reductions.len(),
            forward.len(),
            backward.len()
        ),
        (2 * UNITS - 1, UNITS, UNITS, UNITS)
    );

    // A unit is gathered before its forward, and reduced after its backward.
    assert!(
        gathers
            .iter()
            .zip(&forward)
            .all(|(gather, forward)| gather.end <= forward.start)
    );
    assert!(
        reductions
            .iter()
            .zip(&backward)
            .all(|(reduction, backward)| backward.end <= reduction.start)
    );
    // Unit u+1 has been gathered before unit u's forward ends ...
    assert!((1..UNITS).all(|u| gathers[u].end <= forward[u - 1].end));
    // ... and unit u's gradient has been reduced before the next unit's backward ends.
    assert!((1..UNITS).all(|u| reductions[u - 1].end <= backward[u].end));
}

#[test]
#[ignore = "measures time: run it alone on a quiet machine"]
fn nine_tenths_are_hidden_by_the_clock() {
    let mut seen = Vec::new();
    for _try in 0..5 {
        let overlap = Overlap::of(&step(true, Compute::Sleeps), "comm");
        let hidden = 1.0 - overlap.exposed.as_secs_f64() / overlap.comm.as_secs_f64();
        // Before the first unit and after the last, nothing hides communication.
        let one_unit = 2 * LINK.time(4 * SHARD as u64);
        if hidden >= 0.9 && overlap.fraction() >= 0.85 && overlap.exposed <= one_unit + one_unit / 2
        {
            return;
        }
        seen.push((hidden, overlap));
    }
    panic!("no try in which communication was hidden: {seen:?}");
}

#[test]
fn without_overlap_nothing_runs_beside_compute() {
    let spans = step(false, Compute::Sleeps);
    let overlap = Overlap::of(&spans, "comm");
    assert_eq!(overlap.exposed, overlap.comm, "{overlap:?}");
    let trace = chrome_trace(&spans);
    assert!(trace.contains("reduce_scatter") && trace.contains("\"forward\""));
}
