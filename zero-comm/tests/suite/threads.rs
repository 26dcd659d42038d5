//! The threads back end on small cases with literal results; `conformance.rs` tests random ones.

use std::time::Duration;

use zero_alloc::device::{AnySlice, DType, Device, DeviceId, DeviceSlice, Element, Stream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_comm::threads::{ThreadsComm, World};
use zero_comm::{CommError, CommOptions, Communicator, ReduceOp};

const LIMIT: Duration = Duration::from_secs(20);

fn view<T: Element>(values: &mut [T]) -> AnySlice {
    // SAFETY: every test synchronizes its stream before it touches or drops the values.
    unsafe { DeviceSlice::from_raw_parts(values.as_mut_ptr(), values.len(), DeviceId::HOST) }
        .erase()
}

/// Runs `body` on a thread for each rank; returns the results by rank.
fn on_ranks<R: Send>(
    n: usize,
    options: CommOptions,
    body: impl Fn(&ThreadsComm, &HostStream) -> R + Sync,
) -> Vec<R> {
    let comms = World::new(n, options).unwrap();
    std::thread::scope(|scope| {
        let handles: Vec<_> = comms
            .into_iter()
            .map(|comm| {
                let body = &body;
                scope.spawn(move || {
                    let stream = HostDevice::new()
                        .create_stream(&format!("rank {} comm", comm.rank()))
                        .unwrap();
                    let result = body(&comm, &stream);
                    let _ = stream.synchronize(LIMIT);
                    result
                })
            })
            .collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    })
}

#[test]
fn every_collective_does_what_it_says() {
    for n in [1, 2, 3, 5] {
        on_ranks(n, CommOptions::default(), |comm, stream| {
            let rank = comm.rank();
            let sum_of_ranks = (n * (n - 1) / 2) as f32;

            let mut send: Vec<f32> = (0..2 * n).map(|i| (i * 10 + rank) as f32).collect();
            let mut recv = vec![0f32; 2];
            comm.reduce_scatter(stream, view(&mut send), view(&mut recv), ReduceOp::Sum)
                .unwrap();
            stream.synchronize(LIMIT).unwrap();
            let expected: Vec<f32> = (2 * rank..2 * rank + 2)
                .map(|i| (i * 10 * n) as f32 + sum_of_ranks)
                .collect();
            assert_eq!(recv, expected);

            let mut all = vec![0f32; 2 * n];
            comm.all_gather(stream, view(&mut recv), view(&mut all))
                .unwrap();
            stream.synchronize(LIMIT).unwrap();
            let expected: Vec<f32> = (0..2 * n)
                .map(|i| (i * 10 * n) as f32 + sum_of_ranks)
                .collect();
            assert_eq!(all, expected);

            let mut values = vec![rank as f32, 1.0, -(rank as f32)];
            let buffer = view(&mut values);
            comm.all_reduce(stream, buffer, buffer, ReduceOp::Max)
                .unwrap();
            stream.synchronize(LIMIT).unwrap();
            assert_eq!(values, [(n - 1) as f32, 1.0, 0.0]);

            let mut bytes = vec![rank as u8; 7];
            comm.broadcast(stream, view(&mut bytes), n - 1).unwrap();
            stream.synchronize(LIMIT).unwrap();
            assert_eq!(bytes, vec![(n - 1) as u8; 7]);

            let mut send: Vec<u8> = (0..n).map(|q| (rank * n + q) as u8).collect();
            let mut recv = vec![0u8; n];
            comm.all_to_all(stream, view(&mut send), view(&mut recv))
                .unwrap();
            comm.barrier(stream).unwrap();
            stream.synchronize(LIMIT).unwrap();
            assert_eq!(
                recv,
                (0..n).map(|q| (q * n + rank) as u8).collect::<Vec<_>>()
            );
        });
    }
}

/// Results larger than caches use non-temporal stores.
#[test]
#[cfg_attr(miri, ignore = "megabytes")]
fn large_buffers_are_as_right_as_small_ones() {
    // Odd, so that segments are not aligned to cache lines.
    const SEGMENT: usize = (8 << 20) / 8 + 13;
    on_ranks(2, CommOptions::default(), |comm, stream| {
        let value = |rank: usize, i: usize| ((i * 31 + rank * 7) % 4099) as f32;
        let mut send: Vec<f32> = (0..2 * SEGMENT).map(|i| value(comm.rank(), i)).collect();
        let mut part = vec![0f32; SEGMENT];
        let mut reduced = vec![0f32; 2 * SEGMENT];
        let mut gathered = vec![0f32; 2 * SEGMENT];
        let whole = view(&mut send);
        comm.reduce_scatter(stream, whole, view(&mut part), ReduceOp::Sum)
            .unwrap();
        comm.all_reduce(stream, whole, view(&mut reduced), ReduceOp::Sum)
            .unwrap();
        comm.all_gather(stream, view(&mut part), view(&mut gathered))
            .unwrap();
        stream.synchronize(LIMIT).unwrap();
        assert!((0..2 * SEGMENT).all(|i| reduced[i] == value(0, i) + value(1, i)));
        assert_eq!(reduced, gathered);
        assert_eq!(
            part,
            reduced[comm.rank() * SEGMENT..(comm.rank() + 1) * SEGMENT]
        );
    });
}

#[test]
fn traffic_is_the_formula() {
    let traffic = on_ranks(4, CommOptions::default(), |comm, stream| {
        let mut whole = vec![1f32; 12];
        let mut part = vec![1f32; 3];
        let mut bytes = vec![0u8; 32];
        let mut odd = vec![half::bf16::ONE; 5];
        let mut vote = vec![0u8; 8];
        let whole = view(&mut whole);
        let part = view(&mut part);
        let odd = view(&mut odd);
        comm.reduce_scatter(stream, whole, part, ReduceOp::Avg)
            .unwrap();
        comm.all_gather(stream, part, whole).unwrap();
        comm.all_reduce(stream, odd, odd, ReduceOp::Sum).unwrap();
        comm.control_all_gather(stream, view(&mut vote), view(&mut bytes))
            .unwrap();
        stream.synchronize(LIMIT).unwrap();
        comm.traffic()
    });

    // 5 elements in segments of 2, 1, 1, 1.
    assert_eq!(
        (
            traffic[0].reduce_scatter_bytes,
            traffic[0].all_gather_bytes,
            traffic[0].all_reduce_bytes
        ),
        (36, 36, 6 + 12)
    );

    assert_eq!(
        (traffic[0].control_bytes, traffic[0].total_bytes()),
        (24, 36 + 36 + 18 + 24)
    );
    assert_eq!(traffic[1].all_reduce_bytes, 8 + 6);
    let all_reduce: u64 = traffic.iter().map(|t| t.all_reduce_bytes).sum();
    assert_eq!(all_reduce, 4 * 2 * 10 * 3 / 4);
}

#[test]
fn a_mismatch_names_both_sides_on_every_rank() {
    let seen = on_ranks(3, CommOptions::default(), |comm, stream| {
        let mut a = vec![0f32; 3];
        let mut b = vec![0f32; 9];
        if comm.rank() == 1 {
            comm.all_gather(stream, view(&mut a), view(&mut b)).unwrap();
        } else {
            comm.reduce_scatter(stream, view(&mut b), view(&mut a), ReduceOp::Sum)
                .unwrap();
        }
        let error = stream.synchronize(LIMIT).unwrap_err().to_string();
        assert!(
            error.contains("all_gather of 3 x fp32")
                && error.contains("reduce_scatter(sum) of 3 x fp32"),
            "{error}"
        );
        comm.failure()
    });

    assert!(
        matches!(seen[0], Some(CommError::Mismatch { sequence: 0, .. })),
        "{:?}",
        seen[0]
    );
    assert!(seen.iter().all(|s| *s == seen[0]));
}

#[test]
fn a_stalled_rank_is_named_within_the_limit() {
    let options = CommOptions::default().limit(Duration::from_millis(400));
    let seen = on_ranks(3, options, |comm, stream| {
        if comm.rank() == 2 {
            while comm.failure().is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
        } else {
            comm.barrier(stream).unwrap();
            stream.synchronize(LIMIT).unwrap_err();
        }
        comm.failure()
    });

    for s in seen {
        assert!(
            matches!(
                s,
                Some(CommError::Stalled {
                    rank: 2,
                    done: 0,
                    ..
                })
            ),
            "{s:?}"
        );
    }
}

#[test]
fn a_poisoned_stream_a_lost_rank_and_an_abort_end_all() {
    for how in ["poison", "leave", "abort", "panic"] {
        let seen = on_ranks(3, CommOptions::default(), |comm, stream| {
            match (comm.rank(), how) {
                (1, "poison") => stream
                    .enqueue("bad", || {
                        Err(zero_alloc::device::DeviceError::Closed { stream: "x".into() })
                    })
                    .unwrap(),
                (1, "panic") => stream.enqueue("bad", || panic!("on purpose")).unwrap(),
                (1, "leave") => return None,
                (1, "abort") => comm.abort("no more data"),
                _ => {}
            }
            comm.barrier(stream).unwrap();
            stream.synchronize(LIMIT).unwrap_err();
            comm.failure()
        });
        for (rank, s) in seen.into_iter().enumerate() {
            match (how, s) {
                ("poison" | "panic", Some(CommError::Skipped { rank: 1, .. }))
                | (
                    "leave",
                    Some(CommError::Left {
                        rank: 1, done: 0, ..
                    }),
                )
                | ("abort", Some(CommError::Aborted { rank: 1, .. })) => {}
                ("leave", None) if rank == 1 => {}
                (_, s) => panic!("{how}, rank {rank}: {s:?}"),
            }
        }
    }
}

#[test]
fn two_streams_of_a_rank_may_both_carry_collectives() {
    on_ranks(2, CommOptions::default(), |comm, stream| {
        let other = HostDevice::new().create_stream("other").unwrap();
        let mut values: Vec<Vec<f32>> = (0..50).map(|_| vec![1.0; 100]).collect();
        for (i, values) in values.iter_mut().enumerate() {
            let buffer = view(values);
            let stream = if i % 3 == comm.rank() { stream } else { &other };
            comm.all_reduce(stream, buffer, buffer, ReduceOp::Sum)
                .unwrap();
        }
        stream.synchronize(LIMIT).unwrap();
        other.synchronize(LIMIT).unwrap();
        assert!(values.iter().flatten().all(|&v| v == 2.0));
    });
}

#[test]
fn split_makes_smaller_worlds() {
    on_ranks(5, CommOptions::default(), |comm, stream| {
        let rank = comm.rank();
        let color = (rank != 4).then_some((rank % 2) as u64);
        let child = comm.split(color, 10 - rank as u64).unwrap();
        let Some(child) = child else {
            return assert_eq!(rank, 4);
        };
        // Keys reverse the order.
        assert_eq!((child.world_size(), child.rank()), (2, 1 - rank / 2));
        let mut value = vec![rank as f32];
        let buffer = view(&mut value);
        child
            .all_reduce(stream, buffer, buffer, ReduceOp::Sum)
            .unwrap();
        stream.synchronize(LIMIT).unwrap();
        assert_eq!(value, [if rank % 2 == 0 { 2.0 } else { 4.0 }]);
        assert_eq!(
            (
                child.traffic().all_reduce_bytes,
                comm.traffic().all_reduce_bytes
            ),
            (4, 0)
        );
    });
}

#[test]
fn bad_calls_are_refused_before_they_start() {
    on_ranks(2, CommOptions::default(), |comm, stream| {
        let mut four = vec![0f32; 4];
        let mut three = vec![0f32; 3];
        let mut half = vec![half::bf16::ZERO; 4];
        let mut bytes = vec![0u8; 4];
        let four = view(&mut four);
        let three = view(&mut three);
        let half = view(&mut half);
        let bytes = view(&mut bytes);
        let count =
            |r: Result<(), CommError>| assert!(matches!(r, Err(CommError::Count { .. })), "{r:?}");
        count(comm.reduce_scatter(stream, four, three, ReduceOp::Sum));
        count(comm.all_gather(stream, three, four));
        count(comm.all_reduce(stream, three, four, ReduceOp::Sum));
        count(comm.all_gather_uneven(stream, three, four, &[3, 3]));
        assert!(matches!(
            comm.all_gather_uneven(stream, three, four, &[1]),
            Err(CommError::RankCounts {
                expected: 2,
                got: 1,
                ..
            })
        ));
        assert!(matches!(
            comm.all_gather_uneven(stream, three, four, &[usize::MAX, 2]),
            Err(CommError::CountsTooLarge { .. })
        ));
        assert!(matches!(
            comm.all_to_all(stream, three, three),
            Err(CommError::NotDivisible { len: 3, .. })
        ));
        assert!(matches!(
            comm.all_to_all(stream, four, four),
            Err(CommError::Overlap { .. })
        ));
        assert!(matches!(
            comm.reduce_scatter(stream, four, four.slice(1..3), ReduceOp::Sum),
            Err(CommError::Overlap { .. })
        ));
        assert!(matches!(
            comm.broadcast(stream, four, 2),
            Err(CommError::NoSuchRoot {
                root: 2,
                world_size: 2
            })
        ));
        assert!(matches!(
            comm.all_reduce(stream, four, half, ReduceOp::Sum),
            Err(CommError::DTypes {
                send: DType::F32,
                recv: DType::Bf16,
                ..
            })
        ));
        assert!(matches!(
            comm.all_reduce(stream, bytes, bytes, ReduceOp::Avg),
            Err(CommError::Unsupported {
                op: ReduceOp::Avg,
                dtype: DType::U8,
                ..
            })
        ));
    });

    assert_eq!(
        World::new(0, CommOptions::default()).unwrap_err(),
        CommError::NoRanks
    );
    let error = World::new(usize::MAX, CommOptions::default()).unwrap_err();

    assert_eq!(
        error.to_string(),
        format!(
            "a world of {} ranks exceeds the maximum of 65536",
            usize::MAX
        )
    );
}
