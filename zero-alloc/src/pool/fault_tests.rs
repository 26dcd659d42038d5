//! A pool whose device fails: the order between streams, and the numbers in errors.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::stitched::KEPT;
use crate::device::{DType, Device, Event, Stream};
use crate::host::{HostDevice, HostPages, HostStream, Monitor};
use crate::testing::{Call, Faulty, FaultyStream, Simulated};
use crate::{AllocError, Block, MemoryKind, Pool, Purpose};

const LIMIT: Duration = Duration::from_secs(60);
const PAGE: usize = 1 << 16;

type Streams = FaultyStream<HostStream>;

fn allocate<D: Device>(pool: &Pool<D>, bytes: usize, stream: &D::Stream) -> Block<D> {
    pool.allocate(bytes, DType::U8, Purpose::Params, stream)
        .expect("allocated")
}

fn address(block: &Block<impl Device>) -> usize {
    // SAFETY: the address is not dereferenced.
    unsafe { block.slice() }.as_ptr().addr()
}

fn stream<D: Device>(device: &D, name: &str) -> D::Stream {
    device.create_stream(name).expect("a stream")
}

/// Enqueues an operation that runs once the monitor's value is true.
fn block_stream(stream: &Streams) -> Arc<Monitor<bool>> {
    let blocked = Arc::new(Monitor::new(false));
    let opened = Arc::clone(&blocked);
    let op = move || opened.wait_until(LIMIT, || "the test".into(), |open| open.then_some(()));
    stream.inner().enqueue("block", op).expect("enqueued");
    blocked
}

/// Whether everything enqueued on `stream` so far has run.
fn has_run(stream: &Streams) -> bool {
    let event = stream.record().expect("recorded");
    event.synchronize(Duration::from_millis(20)).is_ok()
}

fn open(blocked: &Monitor<bool>) {
    blocked.update(|open| *open = true);
}

#[test]
fn out_of_memory_of_the_device_has_the_numbers() {
    for virtual_memory in [true, false] {
        let mut device = Simulated::new(16 * PAGE as u64, PAGE);
        if !virtual_memory {
            device = device.without_virtual_memory();
        }
        let stream = stream(&device, "a");
        let pool = Pool::new(device.clone(), usize::MAX);
        let held = pool
            .allocate(4 * PAGE, DType::U8, Purpose::Optimizer, &stream)
            .expect("allocated");
        let freed = allocate(&pool, 2 * PAGE, &stream);
        drop(freed);
        let error = pool
            .allocate(15 * PAGE, DType::U8, Purpose::Buckets, &stream)
            .expect_err("16 pages in all");
        let text = error.to_string();
        let AllocError::OutOfMemory {
            requested_bytes,
            live_bytes,
            largest_free_bytes,
            device: message,
            holders,
            ..
        } = error
        else {
            panic!("{error}")
        };
        assert_eq!((requested_bytes, live_bytes), (15 * PAGE, 4 * PAGE));
        assert!(largest_free_bytes >= 2 * PAGE);
        assert_eq!(holders, [(Purpose::Optimizer, 4 * PAGE)]);
        let message = message.expect("the device is out of memory");
        assert!(message.contains("simulated bytes"), "{text}");
        assert_eq!(
            message.contains("bytes could be created"),
            virtual_memory,
            "{text}"
        );
        assert!(
            text.contains("the device is out of memory") && !text.contains(&usize::MAX.to_string()),
            "{text}"
        );
        let budgeted = Pool::new(Simulated::new(16 * PAGE as u64, PAGE), 8 * PAGE);
        let error = budgeted
            .allocate(9 * PAGE, DType::U8, Purpose::Buckets, &stream)
            .expect_err("8 pages");
        assert!(
            matches!(error, AllocError::OutOfMemory { device: None, .. }),
            "{error}"
        );
        drop(held);
        assert!(
            device.usage().mistakes.is_empty(),
            "{:?}",
            device.usage().mistakes
        );
    }
}

#[test]
fn hazards_survive_a_refused_wait() {
    for late in [0, 2] {
        let pages = Arc::new(HostPages::new(PAGE, 4 * PAGE).expect("memory files"));
        let device = Faulty::new(HostDevice::new().with_pages(pages));
        let [x, y, b, c] = ["x", "y", "b", "c"].map(|name| stream(&device, name));
        let pool = Pool::new(device.clone(), 4 * PAGE);
        let homes = if late == 0 {
            [&y, &b, &x, &b]
        } else {
            [&x, &b, &y, &b]
        };
        let mut blocks: Vec<_> = homes
            .iter()
            .map(|home| Some(allocate(&pool, PAGE, home)))
            .collect();
        let at = blocks[late].as_ref().map(address);
        let blocked_x = block_stream(&x);
        let blocked_y = block_stream(&y);
        (blocks[0], blocks[2]) = (None, None);
        // The pieces of a stitched block: one wait is enqueued, the other refused.
        device.fail(Call::Wait, 2);
        pool.allocate(2 * PAGE, DType::U8, Purpose::Buckets, &b)
            .expect_err("refused");
        pool.check_invariants().expect("sound");
        open(&blocked_x);
        x.synchronize(LIMIT).expect("ran");
        let other = allocate(&pool, PAGE, &b);
        let again = if Some(address(&other)) == at {
            other
        } else {
            allocate(&pool, PAGE, &c)
        };
        assert_eq!(Some(address(&again)), at);
        let user = if pool.report().free_bytes > 0 { &b } else { &c };
        assert!(!has_run(user), "y still uses the bytes");
        open(&blocked_y);
        user.synchronize(LIMIT).expect("ran");
    }
}

#[test]
fn only_surplus_views_are_unmapped() {
    let views = KEPT + 1;
    let pages = 4 * views + 1;
    let device = Simulated::new((pages * PAGE) as u64, PAGE);
    let stream = stream(&device, "a");
    let pool = Pool::new(device.clone(), pages * PAGE);
    // Every second page is free.
    let mut fixed: Vec<_> = (0..pages)
        .map(|_| Some(allocate(&pool, PAGE, &stream)))
        .collect();
    fixed
        .iter_mut()
        .skip(1)
        .step_by(2)
        .for_each(|block| *block = None);
    let held: Vec<_> = (0..views)
        .map(|_| allocate(&pool, 2 * PAGE, &stream))
        .collect();
    let arena = pages as u64;
    assert_eq!(device.usage().mapped_pages, arena + 2 * views as u64);
    drop(held);
    stream.synchronize(LIMIT).expect("ran");
    let large = allocate(&pool, 3 * PAGE, &stream);
    assert_eq!(device.usage().mapped_pages, arena + 2 * KEPT as u64 + 3);
    drop(large);
    assert!(
        device.usage().mistakes.is_empty(),
        "{:?}",
        device.usage().mistakes
    );
}

#[test]
fn a_pool_reports_why_it_has_no_pages() {
    let device = Faulty::new(Simulated::new(16 * PAGE as u64, PAGE));
    assert_eq!(
        *Pool::new(device.clone(), PAGE).memory_kind(),
        MemoryKind::Pages
    );
    device.fail(Call::Reserve, 1);
    let pool = Pool::new(device, 8 * PAGE);
    assert!(
        matches!(pool.memory_kind(), MemoryKind::BackingsForPages(_)),
        "{:?}",
        pool.memory_kind()
    );
    let text = pool.report().to_string();
    assert!(
        text.ends_with("failed: injected: Reserve 2 fails"),
        "{text}"
    );
    assert_eq!(
        *Pool::new(HostDevice::new(), PAGE).memory_kind(),
        MemoryKind::Backings
    );
}

#[test]
fn trim_returns_pages_whose_users_have_run() {
    let device = Faulty::new(Simulated::new(16 * PAGE as u64, PAGE));
    let [a, b] = ["a", "b"].map(|name| stream(&device, name));
    let pool = Pool::new(device.clone(), 16 * PAGE);
    let lowest = allocate(&pool, PAGE / 2, &a);
    let low = allocate(&pool, 4 * PAGE, &a);
    let high = allocate(&pool, 3 * PAGE, &b);
    let reserved = pool.report().reserved_bytes;
    let blocked = block_stream(&a);
    drop((low, high));
    // `a` is blocked, so each call waits for its whole limit; the idle `b` may need more than one
    // on a busy machine.
    let start = Instant::now();
    let mut trimmed = 0;
    while trimmed < 3 * PAGE && start.elapsed() < LIMIT {
        trimmed += pool.trim(Duration::from_millis(20));
    }
    assert_eq!(trimmed, 3 * PAGE);
    pool.check_invariants().expect("sound");
    assert_eq!(pool.report().reserved_bytes, reserved - 3 * PAGE);
    assert_eq!(
        device.inner().usage().live_bytes as usize,
        reserved - 3 * PAGE
    );
    open(&blocked);
    pool.trim(LIMIT);
    assert_eq!(pool.report().reserved_bytes, PAGE);
    drop(lowest);
    assert_eq!(pool.trim(LIMIT), PAGE);
    let usage = device.inner().usage();
    assert_eq!(
        (usage.live_bytes, usage.mapped_pages, usage.mistakes),
        (0, 0, Vec::new())
    );
    drop(allocate(&pool, 16 * PAGE, &b));
}

#[test]
fn trim_unmaps_views_of_returned_pages() {
    let device = Faulty::new(Simulated::new(16 * PAGE as u64, PAGE));
    let [a, b] = ["a", "b"].map(|name| stream(&device, name));
    let pool = Pool::new(device.clone(), 16 * PAGE);
    let mut fixed: Vec<_> = (0..16).map(|_| Some(allocate(&pool, PAGE, &a))).collect();
    fixed
        .iter_mut()
        .skip(1)
        .step_by(2)
        .for_each(|block| *block = None);
    let mut view = allocate(&pool, 4 * PAGE, &b);
    let blocked = block_stream(&a);
    view.record_use(&a).expect("recorded");
    drop((view, fixed));
    assert_eq!(pool.trim(Duration::from_millis(20)), 0);
    open(&blocked);
    assert_eq!(pool.trim(LIMIT), 16 * PAGE);
    let usage = device.inner().usage();
    assert_eq!(
        (usage.live_bytes, usage.mapped_pages, usage.mistakes),
        (0, 0, Vec::new())
    );
    pool.check_invariants().expect("sound");
}
