//! Gradient buckets: results do not depend on capacity, count or delays; each hazard has a test.

use crate::common::{Comm, LIMIT, Random, Streams, accumulate, copy, delay, on_ranks, view};
use half::bf16;
use proptest::prelude::*;
use zero_alloc::device::{DType, Device, Stream};
use zero_alloc::host::HostDevice;
use zero_alloc::{Pool, Purpose};
use zero_comm::{BucketError, BucketOptions, Buckets, CommError, CommOptions, Reduce, SumInto};
use zero_kernels::KernelError;
use zero_kernels::host::HostKernels;

#[derive(Clone, Copy, Debug)]
enum Stage {
    /// All-reduce, as stage 0.
    Replicated,
    /// Reduce-scatter straight into the shard.
    Sharded,
    /// Reduce-scatter and an fp32 sum over micro-batches.
    Accumulated,
}

/// Buckets of which each rank keeps its shard of the sum.
fn buckets(
    comm: &Comm,
    streams: &Streams,
    options: BucketOptions,
) -> (Pool<HostDevice>, Buckets<HostDevice>) {
    buckets_of(Reduce::scatter(comm.clone()), streams, options)
}

fn reduce_to(comm: &Comm, shards: bool) -> Reduce<HostDevice> {
    match shards {
        true => Reduce::scatter(comm.clone()),
        false => Reduce::all(comm.clone()),
    }
}

fn buckets_of(
    reduce: Reduce<HostDevice>,
    streams: &Streams,
    options: BucketOptions,
) -> (Pool<HostDevice>, Buckets<HostDevice>) {
    let pool = Pool::new(HostDevice::new(), 1 << 24);
    let buckets = Buckets::new(
        &pool,
        reduce,
        streams.compute.clone(),
        streams.comm.clone(),
        options,
    )
    .unwrap();
    (pool, buckets)
}

/// The gradient of `rank` in micro-batch `micro`: small integers, so that sums are exact.
fn gradient(rank: usize, micro: usize, elems: usize) -> Vec<f32> {
    (0..elems)
        .map(|i| ((i * 7 + rank * 3 + micro * 5) % 11) as f32)
        .collect()
}

/// Reduces `micro_batches` gradients of `shard_elems * n` elements through buckets; returns each
/// rank's result.
fn reduce(
    n: usize,
    shard_elems: usize,
    micro_batches: usize,
    stage: Stage,
    options: BucketOptions,
) -> Vec<Vec<f32>> {
    on_ranks(n, CommOptions::default(), |comm, streams| {
        let rank = comm.rank();
        let mut random = Random::new(rank as u64);
        let shards = !matches!(stage, Stage::Replicated);
        let (pool, buckets) = buckets_of(reduce_to(&comm, shards), streams, options);
        let held = pool.report().of(Purpose::Buckets);
        assert_eq!(held.live_bytes, options.count * options.capacity_elems * 4);
        let mut kept = vec![
            0f32;
            if matches!(stage, Stage::Replicated) {
                shard_elems * n
            } else {
                shard_elems
            }
        ];
        let result = view(&mut kept);
        let mut grads: Vec<Vec<f32>> = (0..micro_batches)
            .map(|m| gradient(rank, m, shard_elems * n))
            .collect();
        let step = options.capacity_elems / n;
        for flat in grads.iter_mut().map(|g| view(g)) {
            for start in (0..shard_elems).step_by(step) {
                let piece = start..(start + step).min(shard_elems);
                let filling = buckets.begin(piece.len() * n).unwrap();
                // SAFETY: used on the compute stream, before the launch.
                let bucket = unsafe { filling.slice() };
                delay(&streams.compute, &mut random);
                let of_rank = |q: usize| q * shard_elems + piece.start..q * shard_elems + piece.end;
                for q in 0..n {
                    copy(
                        &streams.compute,
                        flat.slice(of_rank(q)),
                        bucket.slice(q * piece.len()..(q + 1) * piece.len()),
                    );
                }
                delay(&streams.comm, &mut random);
                let done = match stage {
                    Stage::Sharded => filling.reduce_to(result.slice(piece)).unwrap().finish(),
                    Stage::Accumulated => {
                        let in_flight = filling.reduce().unwrap();
                        // SAFETY: used on the communication stream, before it is finished.
                        accumulate(
                            &streams.comm,
                            unsafe { in_flight.result() },
                            result.slice(piece),
                        );
                        in_flight.finish()
                    }
                    Stage::Replicated => {
                        let in_flight = filling.reduce().unwrap();
                        for q in 0..n {
                            // SAFETY: used on the communication stream, before it is finished.
                            let reduced = unsafe { in_flight.result() };
                            let segment = reduced.slice(q * piece.len()..(q + 1) * piece.len());
                            accumulate(&streams.comm, segment, result.slice(of_rank(q)));
                        }
                        in_flight.finish()
                    }
                };
                streams.compute.wait(&done.unwrap()).unwrap();
            }
        }
        buckets.wait_all_on(&streams.compute).unwrap();
        streams.synchronize();
        assert_eq!(
            pool.report().of(Purpose::Buckets).peak_bytes,
            held.live_bytes,
            "no more than the buckets"
        );
        kept
    })
}

/// Configuration of a property with `n` cases, times `ZERO_PROPTEST_FACTOR` if that is set.
pub(crate) fn cases(n: u32) -> ProptestConfig {
    let factor = std::env::var("ZERO_PROPTEST_FACTOR")
        .ok()
        .and_then(|f| f.parse().ok())
        .unwrap_or(1);
    ProptestConfig {
        cases: n.saturating_mul(factor),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(cases(40))]

    #[test]
    fn any_cut_gives_the_plain_sum(
        n in 1usize..5, shard_elems in 0usize..40, micro_batches in 1usize..3,
        segment in 1usize..20, count in 1usize..4,
        stage in prop_oneof![Just(Stage::Replicated), Just(Stage::Sharded), Just(Stage::Accumulated)],
    ) {
        let micro_batches = if matches!(stage, Stage::Sharded) { 1 } else { micro_batches };
        let options = BucketOptions::new(segment * n, DType::F32).count(count);
        let mut sum = vec![0f32; shard_elems * n];
        for micro in 0..micro_batches {
            for rank in 0..n {
                for (s, g) in sum.iter_mut().zip(gradient(rank, micro, shard_elems * n)) {
                    *s += g;
                }
            }
        }
        for (rank, kept) in reduce(n, shard_elems, micro_batches, stage, options).into_iter().enumerate() {
            let expected = match stage {
                Stage::Replicated => &sum[..],
                _ => &sum[rank * shard_elems..(rank + 1) * shard_elems],
            };
            prop_assert_eq!(&kept[..], expected);
        }
    }
}

#[test]
fn launch_waits_for_every_producer() {
    on_ranks(2, CommOptions::default(), |comm, streams| {
        let mut random = Random::new(9);
        let second = HostDevice::new().create_stream("second producer").unwrap();
        let (_pool, buckets) = buckets(&comm, streams, BucketOptions::new(8, DType::F32).count(1));
        let mut results = vec![vec![0f32; 4]; 100];
        let mut sources: Vec<Vec<f32>> = (0..100).map(|i| vec![i as f32; 8]).collect();
        for (result, source) in results.iter_mut().zip(&mut sources) {
            let mut filling = buckets.begin(8).unwrap();
            filling.add_producer(&second).unwrap();
            // SAFETY: used on the two producers, before the launch.
            let (bucket, source) = (unsafe { filling.slice() }, view(source));
            delay(&second, &mut random);
            copy(&second, source.slice(4..8), bucket.slice(4..8));
            delay(&streams.compute, &mut random);
            copy(&streams.compute, source.slice(0..4), bucket.slice(0..4));
            drop(filling.reduce_to(view(result)).unwrap());
        }
        buckets.wait_all_on(&streams.compute).unwrap();
        streams.synchronize();
        for (i, result) in results.iter().enumerate() {
            assert_eq!(result, &[2.0 * i as f32; 4]);
        }
    });
}

#[test]
fn dropped_bucket_is_free_again() {
    on_ranks(1, CommOptions::default(), |comm, streams| {
        let (_pool, buckets) = buckets(&comm, streams, BucketOptions::new(4, DType::F32));
        for _ in 0..5 {
            drop(buckets.begin(4).unwrap());
        }
        let one = buckets.begin(4).unwrap();
        let two = buckets.begin(0).unwrap();
        assert!(two.is_empty() && one.len() == 4);
        assert_eq!(
            buckets.begin(1).unwrap_err(),
            BucketError::NoneFree { count: 2 }
        );
        assert_eq!(
            buckets.begin(5).unwrap_err(),
            BucketError::TooLong {
                elems: 5,
                capacity_elems: 4
            }
        );
        drop((one, two));
        let mut shard = vec![0f32; 3];
        let refused = buckets
            .begin(4)
            .unwrap()
            .reduce_to(view(&mut shard))
            .unwrap_err();
        assert!(
            matches!(
                refused,
                BucketError::Comm(CommError::Count {
                    expected: 3,
                    got: 4,
                    ..
                })
            ),
            "{refused}"
        );
        let both = (buckets.begin(4).unwrap(), buckets.begin(4).unwrap());
        drop(both);
    });
}

/// Otherwise the next producer would overwrite the bucket during those uses.
#[test]
fn bucket_without_producer_keeps_its_last_uses() {
    on_ranks(1, CommOptions::default(), |comm, streams| {
        let (_pool, buckets) = buckets(&comm, streams, BucketOptions::new(4, DType::F32).count(1));
        let _done = buckets
            .begin(4)
            .unwrap()
            .reduce()
            .unwrap()
            .finish()
            .unwrap();
        streams.compute.close();
        // A closed stream returns an error on a wait, which shows that `begin` waits.
        for attempt in 0..3 {
            let refused = buckets.begin(4).map(drop);
            assert!(
                matches!(refused, Err(BucketError::Device(_))),
                "{attempt}: {refused:?}"
            );
        }
    });
}

#[test]
fn bad_options_are_errors() {
    on_ranks(3, CommOptions::default(), |comm, streams| {
        let pool = Pool::new(HostDevice::new(), 64);
        let make = |options| {
            Buckets::new(
                &pool,
                Reduce::scatter(comm.clone()),
                streams.compute.clone(),
                streams.comm.clone(),
                options,
            )
            .map(drop)
        };
        let small = BucketOptions::new(2, DType::F32);
        assert_eq!(
            make(small),
            Err(BucketError::TooSmall {
                count: 2,
                capacity_elems: 2,
                world_size: 3,
                least_elems: 3
            })
        );
        let none = BucketOptions::new(3, DType::F32).count(0);
        assert_eq!(
            make(none),
            Err(BucketError::TooSmall {
                count: 0,
                capacity_elems: 3,
                world_size: 3,
                least_elems: 3
            })
        );
        assert!(matches!(
            make(BucketOptions::new(1000, DType::F32)),
            Err(BucketError::Alloc(_))
        ));
        let (_pool, buckets) = buckets(&comm, streams, BucketOptions::new(4, DType::F32));
        let odd = buckets.begin(4).unwrap().reduce().unwrap_err();
        assert!(
            matches!(
                odd,
                BucketError::Comm(CommError::NotDivisible {
                    len: 4,
                    world_size: 3,
                    ..
                })
            ),
            "{odd}"
        );
    });
}

/// Parts in any number, with gaps, in fp32 or bf16, through buckets of any size, to a shard or to
/// the whole unit, over micro-batches: the plain sum.
#[test]
fn scattered_parts_give_the_plain_sum() {
    let n = 3;
    let shard_elems = 7;
    let elems = n * shard_elems;
    // Elements 4, 5 and 20 are in no part.
    let places = [0..4, 6..11, 11..11, 11..20];

    let expected: Vec<f32> = (0..elems)
        .map(|i| {
            let sum = |micro| {
                (0..n)
                    .map(|rank| gradient(rank, micro, elems)[i])
                    .sum::<f32>()
            };
            if places.iter().any(|p| p.contains(&i)) {
                sum(0) + sum(1)
            } else {
                0.0
            }
        })
        .collect();

    for (capacity, scatter, dtype) in [
        (4, true, DType::F32),
        (12, true, DType::Bf16),
        (100, true, DType::F32),
        (4, false, DType::F32),
        (100, false, DType::Bf16),
    ] {
        let kept = on_ranks(n, CommOptions::default(), |comm, streams| {
            let kernels = HostKernels::new(1).unwrap();
            let mut random = Random::new(comm.rank() as u64);
            let options = BucketOptions::new(capacity, dtype);
            let (_pool, buckets) = buckets_of(reduce_to(&comm, scatter), streams, options);
            let mut kept = vec![-1f32; if scatter { shard_elems } else { elems }];
            let mut into = SumInto::Write(view(&mut kept));
            for micro in 0..2 {
                let grad = gradient(comm.rank(), micro, elems);
                let mut parts: Vec<Vec<f32>> =
                    places.iter().map(|p| grad[p.clone()].to_vec()).collect();
                let slices: Vec<_> = parts
                    .iter_mut()
                    .zip(&places)
                    .map(|(part, p)| (view(part), p.start))
                    .collect();
                delay(&streams.comm, &mut random);
                let reduced = buckets.reduce_unit(&kernels, &slices, into).unwrap();
                assert_eq!(
                    (reduced.len(), reduced.dtype()),
                    (if scatter { shard_elems } else { elems }, DType::F32)
                );
                // The parts are free when the compute stream has packed them.
                streams.compute.synchronize(LIMIT).unwrap();
                into = SumInto::Add(reduced);
            }
            let SumInto::Add(reduced) = into else {
                unreachable!()
            };
            let mut read = vec![0f32; kept.len()];
            // SAFETY: read on this stream, while the sum lives.
            let sum = unsafe { reduced.slice_on(&streams.compute) }.unwrap();
            copy(&streams.compute, sum, view(&mut read));
            streams.synchronize();
            assert_eq!(read, kept, "the stream that reads waits for the sum");
            kept
        });
        for (rank, kept) in kept.iter().enumerate() {
            let own = if scatter {
                rank * shard_elems..(rank + 1) * shard_elems
            } else {
                0..elems
            };
            assert_eq!(
                kept, &expected[own],
                "capacity {capacity}, scatter {scatter}, {dtype}"
            );
        }
    }
}

/// One rank needs no bucket where the destination or all parts have the reduction's dtype; the bits
/// are those of a bucket.
#[test]
fn one_rank_stores_its_gradient_without_bucket() {
    on_ranks(1, CommOptions::default(), |comm, streams| {
        let kernels = HostKernels::new(1).unwrap();
        let mut grads: Vec<Vec<f32>> = (0..2)
            .map(|micro| {
                gradient(0, micro, 20)
                    .into_iter()
                    .map(|x| x / 3.0 + x * 1e-4)
                    .collect()
            })
            .collect();
        let mut halves: Vec<Vec<bf16>> = grads
            .iter()
            .map(|grad| grad.iter().map(|&x| bf16::from_f32(x)).collect())
            .collect();
        let mut sums = Vec::new();
        for count in [0, 1] {
            let (pool, buckets) = buckets(
                &comm,
                streams,
                BucketOptions::new(6, DType::Bf16).count(count),
            );
            assert_eq!(pool.report().of(Purpose::Buckets).live_bytes, count * 6 * 2);
            // fp32 to bf16: elements 7..11 are in no part.
            let mut rounded = vec![bf16::NAN; 20];
            let grad = view(&mut grads[0]);
            let parts = [(grad.slice(0..7), 0), (grad.slice(11..20), 11)];
            let _reduced = buckets
                .reduce_unit(&kernels, &parts, SumInto::Write(view(&mut rounded)))
                .unwrap();
            // bf16 to fp32, over two micro-batches.
            let mut sum = vec![f32::NAN; 20];
            let mut into = SumInto::Write(view(&mut sum));
            for half in &mut halves {
                into = SumInto::Add(
                    buckets
                        .reduce_unit(&kernels, &[(view(half), 0)], into)
                        .unwrap(),
                );
            }
            // fp32 to fp32, rounded to bf16 between: needs a bucket.
            let mut wide = vec![f32::NAN; 20];
            let through =
                buckets.reduce_unit(&kernels, &[(grad, 0)], SumInto::Write(view(&mut wide)));
            assert_eq!(through.is_ok(), count > 0, "{through:?}");
            streams.synchronize();
            let expected: Vec<f32> = halves[0]
                .iter()
                .zip(&halves[1])
                .map(|(a, b)| a.to_f32() + b.to_f32())
                .collect();
            assert_eq!(sum, expected);
            sums.push(rounded);
        }
        let expected = |i: usize| {
            if (7..11).contains(&i) {
                bf16::ZERO
            } else {
                halves[0][i]
            }
        };
        assert_eq!(sums, vec![(0..20).map(expected).collect::<Vec<_>>(); 2]);
    });
}

/// A unit that producers wrote to a bucket: its sum over ranks and micro-batches, as a shard or
/// whole.
#[test]
fn filled_unit_is_reduced() {
    let n = 3;
    let shard_elems = 7;
    for (scatter, micro_batches) in [(true, 1), (true, 2), (false, 1), (false, 2)] {
        let kept = on_ranks(n, CommOptions::default(), |comm, streams| {
            let kernels = HostKernels::new(1).unwrap();
            let options = BucketOptions::new(n * shard_elems, DType::F32);
            let (_pool, buckets) = buckets_of(reduce_to(&comm, scatter), streams, options);
            let mut kept = vec![
                -1f32;
                if scatter {
                    shard_elems
                } else {
                    n * shard_elems
                }
            ];
            let mut grads: Vec<_> = (0..micro_batches)
                .map(|micro| gradient(comm.rank(), micro, n * shard_elems))
                .collect();
            let mut into = SumInto::Write(view(&mut kept));
            for grad in &mut grads {
                let filling = buckets.begin(grad.len()).unwrap();
                // SAFETY: used on the compute stream, before the launch.
                copy(&streams.compute, view(grad), unsafe { filling.slice() });
                into = SumInto::Add(filling.reduce_unit(&kernels, into).unwrap());
            }
            streams.synchronize();
            let short = buckets
                .begin(6)
                .unwrap()
                .reduce_unit(&kernels, SumInto::Write(view(&mut [0f32; 3])));
            assert_eq!(
                short.unwrap_err(),
                KernelError::LengthMismatch {
                    what: "reduce_unit: into".into(),
                    expected: if scatter { 2 } else { 6 },
                    got: 3
                }
                .into()
            );
            kept
        });
        for (rank, kept) in kept.iter().enumerate() {
            let own = if scatter {
                rank * shard_elems..(rank + 1) * shard_elems
            } else {
                0..n * shard_elems
            };
            let sum = |i: usize| {
                (0..micro_batches)
                    .flat_map(|micro| (0..n).map(move |rank| gradient(rank, micro, i + 1)[i]))
                    .sum()
            };
            let expected: Vec<f32> = own.map(sum).collect();
            assert_eq!(
                kept, &expected,
                "scatter {scatter}, {micro_batches} micro-batches"
            );
        }
    }
}

#[test]
fn bad_parts_are_errors() {
    on_ranks(2, CommOptions::default(), |comm, streams| {
        let kernels = HostKernels::new(1).unwrap();
        let (_pool, buckets) = buckets(&comm, streams, BucketOptions::new(4, DType::F32));
        let mut part = vec![0f32; 4];
        let mut shard = vec![0f32; 3];
        let part = view(&mut part);
        let mut reduce = |parts: &[_]| {
            buckets
                .reduce_unit(&kernels, parts, SumInto::Write(view(&mut shard)))
                .unwrap_err()
        };
        let beyond = BucketError::Part {
            index: 0,
            start: 3,
            end: 7,
            free: 0,
            len: 6,
        };
        assert_eq!(reduce(&[(part, 3)]), beyond);
        let overlap = BucketError::Part {
            index: 1,
            start: 1,
            end: 5,
            free: 4,
            len: 6,
        };
        assert_eq!(reduce(&[(part, 0), (part, 1)]), overlap);
        assert_eq!(
            reduce(&[(part, usize::MAX)]),
            BucketError::Part {
                index: 0,
                start: usize::MAX,
                end: usize::MAX,
                free: 0,
                len: 6
            }
        );
    });
}

#[test]
fn host_writes_are_reduced() {
    on_ranks(2, CommOptions::default(), |comm, streams| {
        let (_pool, buckets) = buckets(&comm, streams, BucketOptions::new(4, DType::F32).count(1));
        let mut shards = vec![[0f32; 2]; 3];
        for (i, shard) in shards.iter_mut().enumerate() {
            let mut filling = buckets.begin(4).unwrap();
            assert!(
                filling.write::<u8, _>(LIMIT, |_| ()).is_err(),
                "another dtype"
            );
            filling
                .write(LIMIT, |bucket: &mut [f32]| bucket.fill(i as f32))
                .unwrap();
            drop(filling.reduce_to(view(shard)).unwrap());
        }
        streams.synchronize();
        assert_eq!(shards, [[0.0; 2], [2.0; 2], [4.0; 2]]);
    });
}
