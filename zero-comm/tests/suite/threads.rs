//! The threads back end on cases with literal results; `conformance.rs` tests random ones, and
//! `faults.rs` faults.

use crate::common::{LIMIT, on_ranks, view};
use zero_alloc::device::{DType, Device, Stream};
use zero_alloc::host::HostDevice;
use zero_comm::threads::World;
use zero_comm::{CommError, CommOptions, ReduceOp};

/// Results larger than caches use non-temporal stores.
#[test]
#[cfg_attr(miri, ignore = "megabytes")]
fn large_buffers_are_as_right_as_small_ones() {
    // Odd, so that segments are not aligned to cache lines.
    const SEGMENT: usize = (8 << 20) / 8 + 13;
    on_ranks(2, CommOptions::default(), |comm, s| {
        let stream = &s.comm;
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
    let traffic = on_ranks(4, CommOptions::default(), |comm, s| {
        let stream = &s.comm;
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
fn two_streams_of_a_rank_may_both_carry_collectives() {
    on_ranks(2, CommOptions::default(), |comm, s| {
        let stream = &s.comm;
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
    on_ranks(5, CommOptions::default(), |comm, s| {
        let stream = &s.comm;
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
    on_ranks(2, CommOptions::default(), |comm, s| {
        let stream = &s.comm;
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
        let uneven = |send, recv, sent: &[usize], received: &[usize]| {
            comm.all_to_all_uneven(stream, send, recv, sent, received)
        };
        count(uneven(three, four, &[1, 1], &[2, 2]));
        count(uneven(four, three, &[2, 2], &[1, 1]));
        // A rank sends itself another count than it receives from itself.
        let (sent, received) = if comm.rank() == 0 {
            ([1, 2], [2, 2])
        } else {
            ([2, 1], [2, 2])
        };
        count(uneven(three, four, &sent, &received));
        assert!(matches!(
            uneven(three, four, &[1, 2], &[4]),
            Err(CommError::RankCounts {
                expected: 2,
                got: 1,
                ..
            })
        ));
        assert!(matches!(
            uneven(three, four, &[usize::MAX, 2], &[1, 3]),
            Err(CommError::CountsTooLarge { .. })
        ));
        assert!(matches!(
            uneven(four, four, &[2, 2], &[2, 2]),
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
