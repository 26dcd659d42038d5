//! The recorded timeline of a step over a slow link: what runs beside what.
//!
//! That communication runs beside compute is asserted without a clock: each compute operation ends only when
//! the communication that should run meanwhile has ended, so without overlap the step would never end. The share
//! that is hidden is a matter of time, and measured by a test that runs on demand.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Comm, view};
use zero_alloc::Pool;
use zero_alloc::device::{AnySlice, DType, Device, Stream};
use zero_alloc::host::{Gate, HostDevice, HostStream, OpSpan, Timeline};
use zero_comm::overlap::{Overlap, chrome_trace};
use zero_comm::slow::{Link, SlowComm};
use zero_comm::threads::{Options, World};
use zero_comm::{BucketOptions, Buckets, PrefetchOptions, Prefetcher, ReduceOp};

const UNITS: usize = 12;
const SHARD: usize = 1000;
const COMPUTE: Duration = Duration::from_millis(6);
/// 1000 fp32 in 2 ms.
const LINK: Link = Link { latency: Duration::from_millis(1), bytes_per_second: 4e6 };

/// How long a compute operation takes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Compute {
    /// As long as [`COMPUTE`].
    Sleeps,
    /// Until everything that has been put on the communication stream before it has run.
    Meets,
}

/// Counts what has run on the communication stream.
#[derive(Default)]
struct Marks {
    gate: Arc<Gate<usize>>,
    made: usize,
}

impl Marks {
    fn mark(&mut self, how: Compute, comm: &HostStream) {
        if how == Compute::Sleeps {
            return;
        }
        let gate = Arc::clone(&self.gate);
        self.made += 1;
        let count = move || {
            gate.update(|count| *count += 1);
            Ok(())
        };
        comm.enqueue("mark", count).unwrap();
    }

    fn compute(&self, how: Compute, stream: &HostStream, label: &'static str) {
        let (gate, made) = (Arc::clone(&self.gate), self.made);
        let work = move || match how {
            Compute::Sleeps => {
                std::thread::sleep(COMPUTE);
                Ok(())
            }
            Compute::Meets => {
                gate.wait_until(common::LIMIT, || "communication".to_owned(), |count| (*count >= made).then_some(()))
            }
        };
        stream.enqueue(label, work).unwrap();
    }
}

/// Forward and backward of stage 3 on two ranks; the spans of rank 0 after a first step.
fn step(overlap: bool, how: Compute) -> Vec<OpSpan> {
    let spans = std::thread::scope(|scope| {
        let ranks: Vec<_> = World::new(2, Options::default())
            .unwrap()
            .into_iter()
            .map(|comm| scope.spawn(move || rank(Arc::new(SlowComm::new(Arc::new(comm), LINK)), overlap, how)))
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect::<Vec<_>>()
    });
    spans.into_iter().next().unwrap()
}

fn rank(comm: Comm, overlap: bool, how: Compute) -> Vec<OpSpan> {
    let timeline = Timeline::new();
    let device = HostDevice::new().with_timeline(timeline.clone());
    let (compute, comm_stream) = (device.create_stream("compute").unwrap(), device.create_stream("comm").unwrap());
    let pool = Pool::new(device, 1 << 20);
    let mut shards = vec![vec![1f32; SHARD]; UNITS];
    let views: Vec<AnySlice> = shards.iter_mut().map(|s| view(s)).collect();
    let mut grads = vec![vec![0f32; SHARD]; UNITS];
    let grad_views: Vec<AnySlice> = grads.iter_mut().map(|s| view(s)).collect();
    let options = BucketOptions { overlap, ..BucketOptions::new(2 * SHARD, DType::F32) };
    let buckets = Buckets::new(&pool, comm.clone(), compute.clone(), comm_stream.clone(), options).unwrap();
    let options = PrefetchOptions { ahead: usize::from(overlap), ..PrefetchOptions::default() };
    let mut prefetch = Prefetcher::new(pool, comm, compute.clone(), comm_stream.clone(), views, options);
    prefetch.expect_order((0..UNITS).chain((0..UNITS).rev()).collect()).unwrap();
    let mut marks = Marks::default();
    prefetch.begin_step().unwrap();
    for unit in 0..UNITS {
        let unsharded = prefetch.unshard(unit).unwrap();
        // The gathers of this unit and of the next are under way.
        marks.mark(how, &comm_stream);
        marks.compute(how, &compute, "forward");
        prefetch.reshard(unsharded);
    }
    for unit in (0..UNITS).rev() {
        let unsharded = prefetch.unshard(unit).unwrap();
        // The gradient of the unit before is, too.
        marks.mark(how, &comm_stream);
        marks.compute(how, &compute, "backward");
        prefetch.reshard(unsharded);
        let filling = buckets.begin(2 * SHARD).unwrap();
        filling
            .reduce_scatter_into(grad_views[unit], ReduceOp::Sum)
            .unwrap()
            .finish()
            .unwrap()
            .wait_on(&comm_stream)
            .unwrap();
    }
    prefetch.end_step();
    buckets.wait_all_on(&compute).unwrap();
    compute.synchronize(common::LIMIT).unwrap();
    comm_stream.synchronize(common::LIMIT).unwrap();
    timeline.take()
}

fn named<'a>(spans: &'a [OpSpan], label: &str) -> Vec<&'a OpSpan> {
    spans.iter().filter(|s| s.label == label).collect()
}

#[test]
fn gathers_run_ahead_of_their_units_and_reductions_inside_backward() {
    let spans = step(true, Compute::Meets);
    let (forward, backward) = (named(&spans, "forward"), named(&spans, "backward"));
    let (gathers, reductions) = (named(&spans, "all_gather"), named(&spans, "reduce_scatter"));
    // The unit in the middle is used twice and gathered once.
    assert_eq!(
        (gathers.len(), reductions.len(), forward.len(), backward.len()),
        (2 * UNITS - 1, UNITS, UNITS, UNITS)
    );
    // What must not overlap does not.
    assert!(gathers.iter().zip(&forward).all(|(gather, forward)| gather.end <= forward.start));
    assert!(reductions.iter().zip(&backward).all(|(reduction, backward)| backward.end <= reduction.start));
    // Unit u+1 has been gathered before unit u is through ...
    assert!((1..UNITS).all(|u| gathers[u].end <= forward[u - 1].end));
    // ... and unit u's gradient has travelled before the next unit's is through.
    assert!((1..UNITS).all(|u| reductions[u - 1].end <= backward[u].end));
}

#[test]
#[ignore = "measures time: run it alone on a quiet machine"]
fn nine_tenths_of_communication_are_hidden() {
    let mut seen = Vec::new();
    for _try in 0..5 {
        let overlap = Overlap::of(&step(true, Compute::Sleeps), "comm");
        let hidden = 1.0 - overlap.exposed.as_secs_f64() / overlap.comm.as_secs_f64();
        // Before the first unit and after the last, nothing is there to hide behind.
        let one_unit = 2 * LINK.time(4 * SHARD as u64);
        if hidden >= 0.9 && overlap.fraction() >= 0.85 && overlap.exposed <= one_unit + one_unit / 2 {
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
