//! What lanes promise: blocks as good as the planner's, and nothing kept from others when it matters.

use std::sync::Arc;
use std::time::Duration;

use crate::device::{DType, Device, Event, Stream};
use crate::host::{HostDevice, HostStream, Monitor};
use crate::testing::{Call, Faulty, Simulated};
use crate::{AllocError, Block, Pool, Purpose};

const LIMIT: Duration = Duration::from_secs(60);
const BUDGET: usize = 8 << 20;
const CHUNK: usize = BUDGET / super::lane::CHUNK_PART;

fn take<D: Device>(pool: &Pool<D>, bytes: usize, purpose: Purpose, stream: &D::Stream) -> Block<D> {
    pool.allocate(bytes, DType::U8, purpose, stream).expect("room")
}

/// A pool whose calling thread takes small blocks from its lane.
fn pool_with_lane<D: Device>(device: D) -> Pool<D> {
    let pool = Pool::new(device, BUDGET);
    pool.lane().stay();
    pool
}

fn chunks(pool: &Pool<impl Device>) -> usize {
    pool.check_invariants().expect("sound");
    pool.central().state.lock().lent_bytes / CHUNK
}

fn hold(stream: &HostStream) -> Arc<Monitor<bool>> {
    let gate = Arc::new(Monitor::new(false));
    let held = Arc::clone(&gate);
    let op = move || held.wait_until(LIMIT, || "the test".into(), |open| open.then_some(()));
    stream.enqueue("hold", op).expect("enqueued");
    gate
}

#[test]
fn blocks_of_a_lane_are_accounted_and_mapped_like_others() {
    let device = HostDevice::new();
    let stream = device.create_stream("a").expect("a stream");
    let pool = pool_with_lane(device);
    let grads = take(&pool, 300, Purpose::Grads, &stream);
    let large = take(&pool, CHUNK, Purpose::Params, &stream);
    let buckets = take(&pool, 200, Purpose::Buckets, &stream);
    assert_eq!(chunks(&pool), 1);
    let report = pool.report();
    let live = [Purpose::Grads, Purpose::Params, Purpose::Buckets].map(|p| report.of(p).live_bytes);
    assert_eq!(live, [300, CHUNK, 200]);
    assert_eq!((report.total.live_bytes, report.total.peak_bytes), (500 + CHUNK, 500 + CHUNK));
    assert_eq!(report.free_bytes, report.reserved_bytes - CHUNK - 512 - 256);
    let map = pool.map();
    let held = |p| map.spans.iter().filter(|s| s.purpose == p).map(|s| s.bytes).sum::<u64>();
    assert_eq!((held(Some(Purpose::Grads)), held(Some(Purpose::Buckets))), (512, 256));
    assert_eq!(held(None), report.free_bytes as u64);
    drop((grads, large, buckets));
    let report = pool.report();
    assert_eq!((report.total.live_bytes, report.free_bytes), (0, report.reserved_bytes));
    pool.reset_peaks();
    assert_eq!(pool.report().total.peak_bytes, 0);
}

#[test]
fn another_stream_waits_for_what_a_lane_gives_it() {
    let device = HostDevice::new();
    let (a, b) = (device.create_stream("a").expect("a stream"), device.create_stream("b").expect("a stream"));
    for through_the_pool in [false, true] {
        let pool = pool_with_lane(device.clone());
        let gate = hold(&a);
        let block = take(&pool, CHUNK / 8, Purpose::Buckets, &a);
        drop(block);
        if through_the_pool {
            // The chunk goes back with its hazards, and `b` gets its bytes from the planner.
            let lane = pool.lane();
            assert!(lane.return_empty(&mut lane.lock()));
            assert_eq!(chunks(&pool), 0);
        }
        let bytes = if through_the_pool { CHUNK / 4 } else { CHUNK / 8 };
        let block = take(&pool, bytes, Purpose::Params, &b);
        let reused = b.record().expect("recorded");
        assert_eq!(reused.is_done(), Ok(false), "through the pool: {through_the_pool}");
        gate.update(|open| *open = true);
        reused.synchronize(LIMIT).expect("reached");
        drop(block);
    }
}

#[test]
fn empty_chunks_go_back_when_there_are_others_or_room_is_short() {
    let device = Simulated::new(BUDGET as u64, 1 << 16);
    let stream = device.create_stream("a").expect("a stream");
    let pool = pool_with_lane(device);
    let mut blocks: Vec<_> = (0..20).map(|_| take(&pool, CHUNK / 8, Purpose::Workspace, &stream)).collect();
    assert_eq!(chunks(&pool), 3);
    blocks.truncate(1);
    assert_eq!(chunks(&pool), 1);
    let error = pool.allocate(BUDGET, DType::U8, Purpose::Params, &stream).expect_err("one block lives");
    let AllocError::OutOfMemory { live_bytes, holders, .. } = error else { panic!("{error}") };
    assert_eq!((live_bytes, holders), (CHUNK / 8, vec![(Purpose::Workspace, CHUNK / 8)]));
    blocks.clear();
    assert_eq!(chunks(&pool), 1);
    let whole = take(&pool, BUDGET, Purpose::Params, &stream);
    assert_eq!(chunks(&pool), 0);
    drop(whole);
}

#[test]
fn a_lane_without_room_leaves_it_to_the_planner() {
    let device = HostDevice::new();
    let stream = device.create_stream("a").expect("a stream");
    let pool = pool_with_lane(device);
    let most = take(&pool, BUDGET - CHUNK / 2, Purpose::Params, &stream);
    let rest = take(&pool, CHUNK / 8, Purpose::Params, &stream);
    assert_eq!(chunks(&pool), 0);
    drop((most, rest));
}

#[test]
fn nothing_leaks_when_a_lane_cannot_grow_or_its_pool_goes_first() {
    for nth in 1..4 {
        let device = Faulty::new(Simulated::new(BUDGET as u64, 1 << 16).without_virtual_memory());
        let stream = device.create_stream("a").expect("a stream");
        let pool = pool_with_lane(device.clone());
        device.fail(Call::Allocate, nth);
        let blocks: Vec<_> =
            (0..60).filter_map(|_| pool.allocate(CHUNK / 8, DType::U8, Purpose::Grads, &stream).ok()).collect();
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
fn a_thread_turns_to_its_lane_only_while_the_lock_is_taken() {
    let device = HostDevice::new();
    let stream = device.create_stream("a").expect("a stream");
    let pool = Pool::new(device, BUDGET);
    drop(take(&pool, 256, Purpose::Params, &stream));
    assert_eq!(chunks(&pool), 0);
    let state = pool.central().state.lock();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| take(&pool, 256, Purpose::Params, &stream));
        // It has found the lock taken when its lane is locked: it waits for a chunk.
        while pool.0.iter().all(|lane| lane.is_free()) {
            std::thread::yield_now();
        }
        drop(state);
        drop(waiting.join().expect("it gets its block"));
    });
    assert_eq!(chunks(&pool), 1);
}
