//! Accounting by purpose, and the end of a pool. Reuse in stream order and budgets are in
//! `conformance`.

use std::sync::Arc;
use std::time::Duration;

use zero_alloc::device::{DType, Device, Stream};
use zero_alloc::host::{HostDevice, HostStream, Monitor};
use zero_alloc::testing::Simulated;
use zero_alloc::{Pool, Purpose};

const LIMIT: Duration = Duration::from_secs(60);

fn setup(budget_bytes: usize) -> (Pool<HostDevice>, HostStream, HostStream) {
    let device = HostDevice::new();
    let a = device.create_stream("a").expect("a stream");
    let b = device.create_stream("b").expect("a stream");
    (Pool::new(device, budget_bytes), a, b)
}

#[test]
fn blocks_are_accounted_by_purpose() {
    let (pool, stream, _) = setup(1 << 20);
    let params = pool
        .allocate(3, DType::Bf16, Purpose::Params, &stream)
        .expect("allocated");
    let grads = pool
        .allocate(5, DType::F32, Purpose::Grads, &stream)
        .expect("allocated");
    let report = pool.report();
    assert_eq!(report.of(Purpose::Params).live_bytes, 6);
    assert_eq!(report.of(Purpose::Grads).live_bytes, 20);
    assert_eq!((report.total.live_bytes, report.total.peak_bytes), (26, 26));
    assert!(report.reserved_bytes >= 26);
    drop(grads);
    let report = pool.report();
    assert_eq!(report.of(Purpose::Grads).live_bytes, 0);
    assert_eq!(report.of(Purpose::Grads).peak_bytes, 20);
    assert_eq!((report.total.live_bytes, report.total.peak_bytes), (6, 26));
    pool.reset_peaks();
    assert_eq!(pool.report().total.peak_bytes, 6);
    drop(params);
}

#[test]
fn recorded_changes_add_up_to_the_report() {
    let (pool, stream, _) = setup(1 << 20);
    let before = pool
        .allocate(100, DType::F32, Purpose::Params, &stream)
        .unwrap();
    pool.record_changes();
    let grads = pool
        .allocate(10, DType::F32, Purpose::Grads, &stream)
        .unwrap();
    drop(before);
    let changes = pool.take_changes();
    let seen: Vec<_> = changes
        .iter()
        .map(|change| (change.purpose, change.bytes))
        .collect();
    assert_eq!(seen, [(Purpose::Grads, 40), (Purpose::Params, -400)]);
    assert!(changes.is_sorted_by_key(|change| change.at));
    drop(grads);
    assert!(pool.take_changes().is_empty(), "recording has ended");
}

#[test]
fn an_empty_block_needs_no_memory() {
    let (pool, stream, _) = setup(0);
    let mut block = pool
        .allocate(0, DType::F32, Purpose::Params, &stream)
        .expect("an empty block");
    assert!(block.is_empty());
    // SAFETY: of length 0.
    let slice = unsafe { block.typed::<f32>() }.expect("f32");
    // SAFETY: of length 0.
    assert!(unsafe { slice.as_host() }.is_empty());
    block.record_use(&stream).expect("recorded");
    drop(block);
    assert_eq!(pool.report().reserved_bytes, 0);
}

/// Enqueues an operation that runs once the monitor's value is true.
fn block_stream(stream: &HostStream) -> Arc<Monitor<bool>> {
    let open = Arc::new(Monitor::new(false));
    let opened = Arc::clone(&open);
    let op = move || opened.wait_until(LIMIT, || "the test".into(), |open| open.then_some(()));
    stream.enqueue("block", op).expect("enqueued");
    open
}

#[test]
fn memory_is_freed_with_the_last_block() {
    let device = Simulated::new(1 << 30, 4096).without_virtual_memory();
    let stream = device.create_stream("a").expect("a stream");
    let pool = Pool::new(device.clone(), 1 << 30);
    let block = pool
        .allocate(5 << 20, DType::U8, Purpose::Params, &stream)
        .expect("allocated");
    drop(
        pool.allocate(5 << 20, DType::U8, Purpose::Params, &stream)
            .expect("allocated"),
    );
    drop(pool);
    assert!(device.usage().live_bytes >= 5 << 20);
    stream.synchronize(LIMIT).expect("ran");
    drop(block);
    wait_until_all_is_freed(&device);
}

#[test]
fn memory_in_use_is_not_freed() {
    let device = Simulated::new(1 << 30, 4096).without_virtual_memory();
    let stream = device.create_stream("a").expect("a stream");
    let pool = Pool::new(device.clone(), 1 << 30);
    let block = pool
        .allocate(100, DType::U8, Purpose::Params, &stream)
        .expect("allocated");
    let open = block_stream(&stream);
    drop((pool, block));
    std::thread::sleep(Duration::from_millis(20));
    assert!(device.usage().live_bytes > 0);
    open.update(|open| *open = true);
    wait_until_all_is_freed(&device);
}

fn wait_until_all_is_freed(device: &Simulated) {
    for _ in 0..6000 {
        if device.usage().live_bytes == 0 {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{} bytes are still allocated", device.usage().live_bytes);
}

#[test]
fn map_agrees_with_the_report() {
    let (pool, stream, _) = setup(1 << 20);
    let grads = pool
        .allocate(300, DType::U8, Purpose::Grads, &stream)
        .expect("allocated");
    let buckets = pool
        .allocate(200, DType::U8, Purpose::Buckets, &stream)
        .expect("allocated");
    let map = pool.map();
    let report = pool.report();

    let held = |purpose| {
        map.spans
            .iter()
            .filter(|s| s.purpose == purpose)
            .map(|s| s.bytes)
            .sum::<u64>()
    };

    assert_eq!(
        (held(Some(Purpose::Grads)), held(Some(Purpose::Buckets))),
        (512, 256)
    );
    assert_eq!(
        (held(None), map.end()),
        (report.free_bytes as u64, report.reserved_bytes as u64)
    );
    drop((grads, buckets));
}
