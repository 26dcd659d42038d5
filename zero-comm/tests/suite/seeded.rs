//! Buckets and prefetch under the seeded scheduler: every order that streams and events allow has
//! the same result, and the checker finds no unordered access. One host thread enqueues for all
//! ranks, so a seed determines the order.

use std::sync::Arc;
use std::time::Duration;

use zero_alloc::device::{AnySlice, DType, Device, Reduced, Stream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_alloc::{Block, Pool, Purpose};
use zero_comm::threads::World;
use zero_comm::{
    BucketOptions, Buckets, CommOptions, Communicator, PrefetchOptions, PrefetchStep, Prefetcher,
    Reduce, SumInto, Unsharded,
};
use zero_kernels::host::HostKernels;

const LIMIT: Duration = Duration::from_secs(60);
const RANKS: usize = 2;
/// Elements of a rank's shard of each unit.
const SHARDS: [usize; 3] = [3, 5, 2];
/// Forward, then backward.
const ORDER: [usize; 6] = [0, 1, 2, 2, 1, 0];

/// The number of seeds per test: the variable `ZERO_SEEDS`, or 1000.
fn seeds() -> u64 {
    let asked = std::env::var("ZERO_SEEDS")
        .ok()
        .and_then(|n| n.parse().ok());
    asked.unwrap_or(if cfg!(miri) { 3 } else { 1000 })
}

/// Enqueues an operation that reads `src` and writes `dst`.
fn enqueue(
    stream: &HostStream,
    src: AnySlice,
    dst: AnySlice,
    f: impl Fn(&[f32], &mut [f32]) + Send + 'static,
) {
    let src = src.typed::<f32>().unwrap();
    let dst = dst.typed::<f32>().unwrap();
    let op = move || {
        // SAFETY: host memory; streams and events order the accesses, otherwise the checker fails
        // the operation.
        let src = unsafe { src.as_host() };
        // SAFETY: as above.
        let dst = unsafe { dst.as_host_mut() };
        f(src, dst);
        Ok(())
    };
    stream.enqueue("compute", op).unwrap();
}

/// One rank of a step like that of the trainer's stage 3.
struct Rank {
    compute: HostStream,
    comm: HostStream,
    weights: Vec<Block<HostDevice>>,
    grads: Vec<Block<HostDevice>>,
    activation: Block<HostDevice>,
    pool: Pool<HostDevice>,
    buckets: Buckets<HostDevice>,
    held: Option<Unsharded<HostDevice>>,
    rank: usize,
}

/// A mistake that the checker must find.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mistake {
    None,
    /// The optimizer does not wait for the gradients.
    NoWaitForGrads,
    /// A second producer is not added to the bucket.
    UnknownProducer,
    /// A unit is used after it was resharded.
    UseAfterReshard,
}

impl Rank {
    fn new(
        device: &HostDevice,
        comm: Arc<dyn Communicator<HostDevice>>,
        ahead: usize,
        overlap: bool,
    ) -> (Self, Prefetcher<HostDevice>) {
        let rank = comm.rank();
        let stream = |what: &str| {
            device
                .create_stream(&format!("rank {rank} {what}"))
                .unwrap()
        };

        let compute = stream("compute");
        let comm_stream = match overlap {
            true => stream("comm"),
            false => compute.clone(),
        };
        let pool = Pool::new(device.clone(), 1 << 20);
        let block = |len, purpose| pool.allocate(len, DType::F32, purpose, &compute).unwrap();
        let weights: Vec<_> = SHARDS
            .iter()
            .map(|&len| block(len, Purpose::Params))
            .collect();
        let grads: Vec<_> = SHARDS
            .iter()
            .map(|&len| block(len, Purpose::Grads))
            .collect();
        let activation = block(SHARDS.iter().max().unwrap() * RANKS, Purpose::Activations);
        let options = BucketOptions::new(2 * RANKS, DType::F32);

        let buckets = Buckets::new(
            &pool,
            Reduce::scatter(comm.clone()),
            compute.clone(),
            comm_stream.clone(),
            options,
        )
        .unwrap();

        let options = PrefetchOptions::default().ahead(ahead);
        // SAFETY: the blocks outlive the streams' work, which every test waits for.
        let shards = weights.iter().map(|w| unsafe { w.slice() }).collect();
        let mut prefetch = Prefetcher::new(
            pool.clone(),
            comm,
            compute.clone(),
            comm_stream.clone(),
            shards,
            options,
        );

        prefetch.expect_order(ORDER.to_vec()).unwrap();
        (
            Self {
                compute,
                comm: comm_stream,
                weights,
                grads,
                activation,
                pool,
                buckets,
                held: None,
                rank,
            },
            prefetch,
        )
    }

    fn slice(block: &Block<HostDevice>) -> AnySlice {
        // SAFETY: every block is dropped after its streams are synchronized, or records its uses.
        unsafe { block.slice() }
    }

    /// Sets weights and clears gradients.
    fn start(&mut self) {
        for (unit, (weight, grad)) in self.weights.iter().zip(&self.grads).enumerate() {
            let value = (10 * unit + self.rank) as f32;
            enqueue(
                &self.compute,
                Self::slice(&self.activation).slice(0..0),
                Self::slice(weight),
                move |_, w| {
                    w.fill(value);
                },
            );
            self.pool
                .device()
                .fill_zero(&self.compute, Self::slice(grad))
                .unwrap();
        }
        self.comm.wait(&self.compute.record().unwrap()).unwrap();
    }

    fn begin(&mut self, prefetch: &mut PrefetchStep<'_, HostDevice>, use_: usize) {
        self.held = Some(prefetch.unshard(ORDER[use_]).unwrap());
    }

    /// Uses the unit. In backward, reduces its gradient, which is the gathered weights plus the
    /// rank.
    fn finish(
        &mut self,
        prefetch: &mut PrefetchStep<'_, HostDevice>,
        use_: usize,
        mistake: Mistake,
    ) {
        let unit = ORDER[use_];
        let backward = use_ >= ORDER.len() / 2;
        let unsharded = self.held.take().unwrap();
        // SAFETY: used on the compute stream before it is resharded, unless that is the mistake.
        let gathered = unsafe { unsharded.slice() };
        let activation = Self::slice(&self.activation).slice(0..gathered.len());
        let mut unsharded = Some(unsharded);
        if mistake == Mistake::UseAfterReshard {
            prefetch.reshard(unsharded.take().unwrap());
        }
        enqueue(&self.compute, gathered, activation, |w, a| {
            a.copy_from_slice(w)
        });
        if let Some(unsharded) = unsharded {
            prefetch.reshard(unsharded);
        }
        if !backward {
            return;
        }
        let rank = self.rank as f32;

        for start in (0..SHARDS[unit]).step_by(2) {
            let piece = start..(start + 2).min(SHARDS[unit]);
            let mut filling = self.buckets.begin(piece.len() * RANKS).unwrap();
            let helper = (mistake == Mistake::UnknownProducer || start == 2).then(|| {
                self.pool
                    .device()
                    .create_stream(&format!("rank {} helper", self.rank))
                    .unwrap()
            });
            if let Some(helper) = &helper {
                // The helper stream reads the activation too.
                helper.wait(&self.compute.record().unwrap()).unwrap();
                if mistake != Mistake::UnknownProducer {
                    filling.add_producer(helper).unwrap();
                }
            }
            // SAFETY: used by producers before the launch.
            let bucket = unsafe { filling.slice() };
            for q in 0..RANKS {
                let from =
                    activation.slice(q * SHARDS[unit] + piece.start..q * SHARDS[unit] + piece.end);
                let to = bucket.slice(q * piece.len()..(q + 1) * piece.len());
                let stream = if q == 1 {
                    helper.as_ref().unwrap_or(&self.compute)
                } else {
                    &self.compute
                };
                enqueue(stream, from, to, move |from, to| {
                    to.iter_mut()
                        .zip(from)
                        .for_each(|(to, from)| *to = from + rank);
                });
            }
            let in_flight = filling.reduce().unwrap();
            if let Some(helper) = &helper {
                // The next use of the activation waits for the helper's read.
                self.compute.wait(&helper.record().unwrap()).unwrap();
            }
            // SAFETY: used on the communication stream before it is finished.
            let segment = unsafe { in_flight.result() };
            enqueue(
                &self.comm,
                segment,
                Self::slice(&self.grads[unit]).slice(piece),
                |s, g| {
                    g.iter_mut().zip(s).for_each(|(g, s)| *g += s);
                },
            );
            let _done = in_flight.finish().unwrap();
        }
    }

    /// The optimizer: copies the gradients into the weights.
    fn end(&mut self, mistake: Mistake) {
        if mistake != Mistake::NoWaitForGrads {
            self.buckets.wait_all_on(&self.compute).unwrap();
        }
        for (weight, grad) in self.weights.iter().zip(&self.grads) {
            enqueue(
                &self.compute,
                Self::slice(grad),
                Self::slice(weight),
                |g, w| w.copy_from_slice(g),
            );
        }
    }
}

/// Runs a step on all ranks under `seed`; returns the weights of all ranks after it if no stream
/// failed.
fn step(
    seed: u64,
    ahead: usize,
    overlap: bool,
    mistake: Mistake,
) -> (HostDevice, Option<Vec<Vec<f32>>>) {
    let device = HostDevice::seeded(seed);
    let (mut ranks, mut prefetchers): (Vec<Rank>, Vec<_>) =
        World::new(RANKS, CommOptions::default().limit(LIMIT))
            .unwrap()
            .into_iter()
            .map(|comm| Rank::new(&device, Arc::new(comm), ahead, overlap))
            .unzip();
    ranks.iter_mut().for_each(Rank::start);
    let mut steps: Vec<_> = prefetchers
        .iter_mut()
        .map(|prefetch| prefetch.step().unwrap())
        .collect();

    for use_ in 0..ORDER.len() {
        ranks
            .iter_mut()
            .zip(&mut steps)
            .for_each(|(rank, step)| rank.begin(step, use_));
        ranks
            .iter_mut()
            .zip(&mut steps)
            .for_each(|(rank, step)| rank.finish(step, use_, mistake));
    }

    drop(steps);
    ranks.iter_mut().for_each(|rank| rank.end(mistake));
    let ran = ranks
        .iter()
        .all(|rank| rank.compute.synchronize(LIMIT).is_ok() & rank.comm.synchronize(LIMIT).is_ok());
    let read = |block: &Block<HostDevice>| {
        let values = Rank::slice(block).typed::<f32>().unwrap();
        // SAFETY: all streams are synchronized.
        unsafe { values.as_host() }.to_vec()
    };

    let weights = ran.then(|| {
        ranks
            .iter()
            .flat_map(|rank| rank.weights.iter().map(read))
            .collect()
    });

    (device, weights)
}

fn expected() -> Vec<Vec<f32>> {
    let value = |unit: usize, rank: usize| (10 * unit + rank) as f32;
    // A rank's shard of the sum over ranks of (gathered weights + rank).
    let sum = |unit, rank| 2.0 * value(unit, rank) + 1.0;
    (0..RANKS)
        .flat_map(|rank| {
            SHARDS
                .iter()
                .enumerate()
                .map(move |(u, &len)| vec![sum(u, rank); len])
        })
        .collect()
}

/// Checks that the step has the expected weights under every seed.
fn every_order(ahead: usize, overlap: bool) {
    for seed in 0..seeds() {
        let (device, weights) = step(seed, ahead, overlap, Mistake::None);
        assert!(
            device.violations().is_empty(),
            "seed {seed}: {:?}",
            device.violations()
        );
        assert_eq!(weights.as_ref(), Some(&expected()), "seed {seed}");
    }
}

#[test]
fn every_order_without_overlap_gives_these_weights() {
    every_order(0, false);
}

#[test]
fn every_order_with_overlap_gives_the_same() {
    every_order(1, true);
}

#[test]
fn every_order_with_far_prefetch_gives_the_same() {
    every_order(2, true);
}

#[test]
fn every_order_with_all_prefetched_gives_the_same() {
    every_order(ORDER.len(), false);
}

#[test]
fn a_forgotten_wait_for_the_gradients_is_found() {
    assert!((0..20).all(|seed| {
        !step(seed, 1, true, Mistake::NoWaitForGrads)
            .0
            .violations()
            .is_empty()
    }));
}

#[test]
fn a_producer_that_the_bucket_does_not_know_is_found() {
    assert!((0..20).all(|seed| {
        !step(seed, 1, true, Mistake::UnknownProducer)
            .0
            .violations()
            .is_empty()
    }));
}

#[test]
fn a_use_after_reshard_is_found() {
    assert!((0..20).all(|seed| {
        !step(seed, 1, true, Mistake::UseAfterReshard)
            .0
            .violations()
            .is_empty()
    }));
}

/// Two micro-batches of two units in parts, through one bucket: the sums in `Reduced` are complete
/// for each stream that waits on it, and the second is added after a third stream has read the
/// first.
#[test]
fn every_order_of_unit_reductions_gives_the_same() {
    for seed in 0..seeds().min(200) {
        let device = HostDevice::seeded(seed);
        let kernels = HostKernels::new(1).unwrap();
        let ranks: Vec<_> = World::new(RANKS, CommOptions::default().limit(LIMIT))
            .unwrap()
            .into_iter()
            .map(|comm| {
                let stream = |what| {
                    device
                        .create_stream(&format!("rank {} {what}", comm.rank()))
                        .unwrap()
                };
                let [compute, comm_stream, reader] = ["compute", "comm", "reader"].map(stream);
                let pool = Pool::new(device.clone(), 1 << 20);
                let block = || {
                    pool.allocate(6, DType::F32, Purpose::Workspace, &compute)
                        .unwrap()
                };
                let blocks: Vec<_> = (0..5).map(|_| block()).collect();
                let options = BucketOptions::new(4, DType::F32).count(1);
                let reduce = Reduce::scatter(Arc::new(comm));
                let buckets =
                    Buckets::new(&pool, reduce, compute.clone(), comm_stream, options).unwrap();
                (compute, blocks, buckets, reader)
            })
            .collect();
        let mut sums: Vec<Option<Reduced<HostDevice>>> = (0..RANKS * 2).map(|_| None).collect();
        for (micro, unit) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            for (rank, (compute, blocks, buckets, reader)) in ranks.iter().enumerate() {
                let grad = Rank::slice(&blocks[0]);
                let shard = Rank::slice(&blocks[1 + unit]);
                let value = (1 + rank + 10 * unit + 100 * micro) as f32;
                enqueue(compute, grad.slice(0..0), grad, move |_, g| g.fill(value));
                let into = match sums[rank * 2 + unit].take() {
                    Some(earlier) => {
                        // SAFETY: read on this stream, while the sum lives.
                        let sum = unsafe { earlier.slice_on(reader) }.unwrap();
                        let copy = Rank::slice(&blocks[4]);
                        device
                            .copy(reader, sum, copy.slice(3 * unit..3 * unit + 3))
                            .unwrap();
                        SumInto::Add(earlier)
                    }
                    None => SumInto::Write(shard.slice(0..3)),
                };
                let parts = [(grad.slice(0..2), 0), (grad.slice(2..5), 3)];
                sums[rank * 2 + unit] = Some(buckets.reduce_unit(&kernels, &parts, into).unwrap());
            }
        }
        for (rank, (compute, blocks, ..)) in ranks.iter().enumerate() {
            for unit in 0..2 {
                let sum = sums[rank * 2 + unit].take().unwrap();
                // SAFETY: read on this stream; nothing writes it any more.
                let sum = unsafe { sum.slice_on(compute) }.unwrap();
                device
                    .copy(
                        compute,
                        sum,
                        Rank::slice(&blocks[3]).slice(3 * unit..3 * unit + 3),
                    )
                    .unwrap();
            }
        }
        assert!(ranks.iter().all(|(compute, _, buckets, reader)| {
            [compute, buckets.comm_stream(), reader]
                .into_iter()
                .all(|stream| stream.synchronize(LIMIT).is_ok())
        }));
        assert!(
            device.violations().is_empty(),
            "seed {seed}: {:?}",
            device.violations()
        );
        for (rank, (_, blocks, ..)) in ranks.iter().enumerate() {
            let values = Rank::slice(&blocks[3]).typed::<f32>().unwrap();
            // SAFETY: all streams are synchronized.
            let values = unsafe { values.as_host() };
            let of_unit = |unit: usize| {
                let sum = (3 + 20 * unit + 3 + 20 * unit + 200) as f32;
                // Elements 0, 1, 3, 4, 5 of six are in a part.
                if rank == 0 { [sum, sum, 0.0] } else { [sum; 3] }
            };
            assert_eq!(values, [of_unit(0), of_unit(1)].concat(), "seed {seed}");
        }
    }
}
