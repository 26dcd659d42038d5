//! Collectives in two levels: the order of the ranks, the bytes of each level, and what runs in one.

use zero_comm::{CommError, CommOptions, Communicator, LevelTraffic, ReduceOp, TwoLevel};

use crate::common::{LIMIT, Streams, on_ranks, view};
use zero_alloc::device::Stream;

/// Elements of a rank's segment.
const SEGMENT: usize = 5;

/// Calls `body` on the ranks of groups; returns the results by rank of the world.
fn in_groups<R: Send>(
    ranks: usize,
    group: usize,
    body: impl Fn(&TwoLevel<zero_alloc::host::HostDevice>, &Streams) -> R + Sync,
) -> Vec<R> {
    on_ranks(ranks, CommOptions::default(), |comm, streams| {
        body(&TwoLevel::new(&*comm, group).unwrap(), streams)
    })
}

#[test]
fn ranks_are_ordered_by_position() {
    let ranks = in_groups(6, 2, |comm, _| comm.rank());
    assert_eq!(ranks, [0, 3, 1, 4, 2, 5]);
}

/// Bytes of (K-1)/K of the buffer within a group, and of (M-1)/M of a shard between M groups.
#[test]
fn bytes_of_each_level() {
    let (ranks, group) = (8, 4);
    let groups = ranks / group;
    let segment_bytes = (SEGMENT * size_of::<f32>()) as u64;
    let shard_bytes = segment_bytes * groups as u64;
    let within = shard_bytes * (group as u64 - 1);
    let between = segment_bytes * (groups as u64 - 1);

    for sent in in_groups(ranks, group, |comm, streams| {
        let mut whole = vec![1f32; SEGMENT * ranks];
        let mut own = vec![0f32; SEGMENT];
        let (whole_view, own_view) = (view(&mut whole), view(&mut own));
        let stream = &streams.comm;
        comm.reduce_scatter_overwriting(stream, whole_view, own_view, ReduceOp::Sum)
            .unwrap();
        comm.all_gather(stream, own_view, whole_view).unwrap();
        comm.all_reduce(stream, whole_view, whole_view, ReduceOp::Sum)
            .unwrap();
        stream.synchronize(LIMIT).unwrap();
        assert_eq!(own, [ranks as f32; SEGMENT]);
        assert_eq!(whole, [(ranks * ranks) as f32; SEGMENT * 8]);
        (comm.traffic(), comm.traffic_by_level())
    }) {
        let (traffic, LevelTraffic { ring, .. }) = sent;
        assert_eq!(ring.total_bytes(), 0, "nothing in one ring");
        let of_all = segment_bytes * (ranks as u64 - 1);
        assert_eq!(traffic.reduce_scatter_bytes, of_all);
        assert_eq!(traffic.all_gather_bytes, of_all);
        assert_eq!(traffic.all_reduce_bytes, 2 * of_all);

        let levels = sent.1;
        // An all-reduce is a reduce-scatter and an all-gather within, and an all-reduce between.
        assert_eq!(levels.within.total_bytes(), 4 * within);
        assert_eq!(levels.between.total_bytes(), 4 * between);
        assert_eq!(4 * (within + between), traffic.total_bytes());
    }
}

/// A sum that must keep `send` runs in one ring.
#[test]
fn kept_input_is_reduced_in_one_ring() {
    for (kept, levels) in in_groups(4, 2, |comm, streams| {
        let mut whole: Vec<f32> = (0..4 * SEGMENT).map(|i| i as f32).collect();
        let before = whole.clone();
        let mut own = vec![0f32; SEGMENT];
        comm.reduce_scatter(
            &streams.comm,
            view(&mut whole),
            view(&mut own),
            ReduceOp::Sum,
        )
        .unwrap();
        streams.comm.synchronize(LIMIT).unwrap();
        (whole == before, comm.traffic_by_level())
    }) {
        assert!(kept);
        assert_eq!(
            levels.within.total_bytes() + levels.between.total_bytes(),
            0
        );
        assert!(levels.ring.total_bytes() > 0);
    }
}

#[test]
fn groups_divide_the_ranks() {
    for result in on_ranks(4, CommOptions::default(), |comm, _| {
        [0, 3, 5].map(|group| TwoLevel::new(&*comm, group).map(drop))
    }) {
        for (result, group_size) in result.into_iter().zip([0, 3, 5]) {
            let world_size = 4;
            assert_eq!(
                result,
                Err(CommError::Groups {
                    world_size,
                    group_size
                })
            );
        }
    }
}

/// The failure of a rank ends the calls of all, in both levels.
#[test]
fn abort_ends_all_levels() {
    let failures = in_groups(4, 2, |comm, streams| {
        let mut whole = vec![0f32; 4 * SEGMENT];
        let mut own = vec![0f32; SEGMENT];
        let (whole, own) = (view(&mut whole), view(&mut own));
        if comm.rank() == 3 {
            comm.abort("on purpose");
        } else {
            // Fails when it is called, or when it runs.
            let _ = comm.all_gather(&streams.comm, own, whole);
            assert!(streams.comm.synchronize(LIMIT).is_err() || comm.failure().is_some());
        }
        comm.failure().unwrap().to_string()
    });
    for failure in failures {
        assert_eq!(failure, "rank 3 aborted: on purpose");
    }
}
