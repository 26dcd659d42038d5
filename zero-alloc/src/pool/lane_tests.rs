//! Lanes: blocks are accounted, mapped and ordered as the planner's, and empty chunks return to the
//! pool.

use std::sync::Arc;
use std::time::Duration;

use crate::device::{DType, Device, Event, Stream};
use crate::host::{HostDevice, HostStream, Monitor};
use crate::testing::{Call, Faulty, Simulated};
use crate::{AllocError, Block, Pool, Purpose};

const LIMIT: Duration = Duration::from_secs(60);
const BUDGET: usize = 8 << 20;
const CHUNK: usize = BUDGET / super::lane::CHUNKS_PER_BUDGET;

fn allocate<D: Device>(
    pool: &Pool<D>,
    bytes: usize,
    purpose: Purpose,
    stream: &D::Stream,
) -> Block<D> {
    pool.allocate(bytes, DType::U8, purpose, stream)
        .expect("allocated")
}

/// A pool whose calling thread allocates small blocks from its lane.
fn pool_with_lane<D: Device>(device: D) -> Pool<D> {
    let pool = Pool::new(device, BUDGET);
    pool.lane().start_turns();
    pool
}

fn chunks(pool: &Pool<impl Device>) -> usize {
    pool.check_invariants().expect("sound");
    pool.central().state.lock().lane_bytes / CHUNK
}

fn block_stream(stream: &HostStream) -> Arc<Monitor<bool>> {
    let monitor = Arc::new(Monitor::new(false));
    let blocked = Arc::clone(&monitor);
    let op = move || blocked.wait_until(LIMIT, || "the test".into(), |open| open.then_some(()));
    stream.enqueue("block", op).expect("enqueued");
    monitor
}

#[test]
fn lane_blocks_are_accounted_and_mapped() {
    let device = HostDevice::new();
    let stream = device.create_stream("a").expect("a stream");
    let pool = pool_with_lane(device);
    let grads = allocate(&pool, 300, Purpose::Grads, &stream);
    let large = allocate(&pool, CHUNK, Purpose::Params, &stream);
    let buckets = allocate(&pool, 200, Purpose::Buckets, &stream);
    assert_eq!(chunks(&pool), 1);
    let report = pool.report();
    let live = [Purpose::Grads, Purpose::Params, Purpose::Buckets].map(|p| report.of(p).live_bytes);
    assert_eq!(live, [300, CHUNK, 200]);
    assert_eq!(
        (report.total.live_bytes, report.total.peak_bytes),
        (500 + CHUNK, 500 + CHUNK)
    );
    assert_eq!(report.free_bytes, report.reserved_bytes - CHUNK - 512 - 256);
    let map = pool.map();

    let held = |p| {
        map.spans
            .iter()
            .filter(|s| s.purpose == p)
            .map(|s| s.bytes)
            .sum::<u64>()
    };

    assert_eq!(
        (held(Some(Purpose::Grads)), held(Some(Purpose::Buckets))),
        (512, 256)
    );
    assert_eq!(held(None), report.free_bytes as u64);
    drop((grads, large, buckets));
    let report = pool.report();
    assert_eq!(
        (report.total.live_bytes, report.free_bytes),
        (0, report.reserved_bytes)
    );
    pool.reset_peaks();
    assert_eq!(pool.report().total.peak_bytes, 0);
}

#[test]
fn another_stream_waits_for_lane_memory() {
    let device = HostDevice::new();
    let (a, b) = (
        device.create_stream("a").expect("a stream"),
        device.create_stream("b").expect("a stream"),
    );

    for through_the_pool in [false, true] {
        let pool = pool_with_lane(device.clone());
        let monitor = block_stream(&a);
        let block = allocate(&pool, CHUNK / 8, Purpose::Buckets, &a);
        drop(block);
        if through_the_pool {
            // The chunk returns with its hazards, and the planner allocates its bytes for `b`.
            let lane = pool.lane();
            assert!(lane.return_empty(&mut lane.lock()));
            assert_eq!(chunks(&pool), 0);
        }
        let bytes = if through_the_pool {
            CHUNK / 4
        } else {
            CHUNK / 8
        };
        let block = allocate(&pool, bytes, Purpose::Params, &b);
        let reused = b.record().expect("recorded");
        assert_eq!(
            reused.is_done(),
            Ok(false),
            "through the pool: {through_the_pool}"
        );
        monitor.update(|open| *open = true);
        reused.synchronize(LIMIT).expect("reached");
        drop(block);
    }
}

#[test]
fn empty_chunks_return_to_the_pool() {
    let device = Simulated::new(BUDGET as u64, 1 << 16);
    let stream = device.create_stream("a").expect("a stream");
    let pool = pool_with_lane(device);
    let mut blocks: Vec<_> = (0..20)
        .map(|_| allocate(&pool, CHUNK / 8, Purpose::Workspace, &stream))
        .collect();
    assert_eq!(chunks(&pool), 3);
    blocks.truncate(1);
    assert_eq!(chunks(&pool), 1);
    let error = pool
        .allocate(BUDGET, DType::U8, Purpose::Params, &stream)
        .expect_err("one block is live");

    let AllocError::OutOfMemory {
        live_bytes,
        holders,
        ..
    } = error
    else {
        panic!("{error}")
    };

    assert_eq!(
        (live_bytes, holders),
        (CHUNK / 8, vec![(Purpose::Workspace, CHUNK / 8)])
    );
    blocks.clear();
    assert_eq!(chunks(&pool), 1);
    let whole = allocate(&pool, BUDGET, Purpose::Params, &stream);
    assert_eq!(chunks(&pool), 0);
    drop(whole);
}

#[test]
fn full_lane_falls_back_to_the_planner() {
    let device = HostDevice::new();
    let stream = device.create_stream("a").expect("a stream");
    let pool = pool_with_lane(device);
    let most = allocate(&pool, BUDGET - CHUNK / 2, Purpose::Params, &stream);
    let rest = allocate(&pool, CHUNK / 8, Purpose::Params, &stream);
    assert_eq!(chunks(&pool), 0);
    drop((most, rest));
}

#[test]
fn failed_lane_growth_leaks_nothing() {
    for nth in 1..4 {
        let device = Faulty::new(Simulated::new(BUDGET as u64, 1 << 16).without_virtual_memory());
        let stream = device.create_stream("a").expect("a stream");
        let pool = pool_with_lane(device.clone());
        device.fail(Call::Allocate, nth);
        let blocks: Vec<_> = (0..60)
            .filter_map(|_| {
                pool.allocate(CHUNK / 8, DType::U8, Purpose::Grads, &stream)
                    .ok()
            })
            .collect();
        assert!(blocks.len() >= 59);
        pool.check_invariants().expect("sound");
        drop(pool);
        assert!(device.inner().usage().live_bytes > 0);
        drop(blocks);
        stream.synchronize(LIMIT).expect("ran");
        for _ in 0..6000 {
            if device.inner().usage().live_bytes == 0 {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let usage = device.inner().usage();
        assert_eq!((usage.live_bytes, usage.mistakes), (0, Vec::new()));
    }
}

#[test]
fn contention_starts_the_lane() {
    let device = HostDevice::new();
    let stream = device.create_stream("a").expect("a stream");
    let pool = Pool::new(device, BUDGET);
    drop(allocate(&pool, 256, Purpose::Params, &stream));
    assert_eq!(chunks(&pool), 0);
    let state = pool.central().state.lock();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| allocate(&pool, 256, Purpose::Params, &stream));
        // Once its lane is locked, it has found the pool's lock held and waits for a chunk.
        while pool.0.iter().all(|lane| lane.is_free()) {
            std::thread::yield_now();
        }
        drop(state);
        drop(waiting.join().expect("allocated"));
    });
    assert_eq!(chunks(&pool), 1);
}
