//! The seeded scheduler: the seed determines the order, and violations are found and named.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use zero_alloc::device::{AnySlice, DType, Device, DeviceError, DeviceSlice, Event, Stream};
use zero_alloc::host::{HostDevice, HostStream, Monitor, ViolationKind};
use zero_alloc::{Block, Pool, Purpose};

/// Miri is slow.
const LIMIT: Duration = Duration::from_secs(if cfg!(miri) { 3600 } else { 60 });
const SEEDS: u64 = if cfg!(miri) { 5 } else { 1000 };

fn slice(block: &Block<HostDevice>) -> AnySlice {
    // SAFETY: the tests order accesses by streams and events. In tests that do not, the scheduler
    // runs one operation at a time, so that accesses do not overlap.
    unsafe { block.slice() }
}

fn f32s(block: &Block<HostDevice>) -> DeviceSlice<f32> {
    slice(block).typed().expect("f32")
}

fn write(stream: &HostStream, to: DeviceSlice<f32>, value: f32) {
    let op = move || {
        // SAFETY: host memory; ordered as above.
        unsafe { to.as_host_mut() }.fill(value);
        Ok(())
    };
    stream.enqueue("write", op).expect("enqueued");
}

fn read(stream: &HostStream, from: DeviceSlice<f32>, expected: f32) {
    let op = move || {
        // SAFETY: host memory; ordered as above.
        let seen = unsafe { from.as_host() };
        assert!(
            seen.iter().all(|v| *v == expected),
            "saw {} instead of {expected}",
            seen[0]
        );
        Ok(())
    };
    stream.enqueue("read", op).expect("enqueued");
}

/// A device with its pool, and the streams `compute` and `comm`.
fn setup(seed: u64) -> (HostDevice, Pool<HostDevice>, HostStream, HostStream) {
    let device = HostDevice::seeded(seed);
    let pool = Pool::new(device.clone(), 1 << 20);
    let [compute, comm] =
        ["compute", "comm"].map(|name| device.create_stream(name).expect("a stream"));
    (device, pool, compute, comm)
}

/// 64 floats.
fn block(pool: &Pool<HostDevice>, purpose: Purpose, stream: &HostStream) -> Block<HostDevice> {
    let block = pool.allocate(64, DType::F32, purpose, stream);
    block.expect("room")
}

fn follow(stream: &HostStream, other: &HostStream) {
    let event = other.record().expect("recorded");
    stream.wait(&event).expect("enqueued");
}

/// The first failure of the streams.
fn failure(streams: [&HostStream; 2]) -> DeviceError {
    // All must end before the blocks do.
    let results = streams.map(|stream| stream.synchronize(LIMIT));
    let error = results.into_iter().find_map(Result::err);
    error.expect("caught")
}

fn assert_sound(device: &HostDevice, seed: u64) {
    let violations = device.violations();
    assert!(violations.is_empty(), "seed {seed}: {violations:?}");
}

fn order(seed: u64) -> Vec<(usize, usize)> {
    let device = HostDevice::seeded(seed);
    let streams: Vec<_> = (0..3)
        .map(|i| device.create_stream(&format!("s{i}")).expect("a stream"))
        .collect();
    let seen = Arc::new(Mutex::new(Vec::new()));
    for op in 0..4 {
        for (i, stream) in streams.iter().enumerate() {
            let seen = Arc::clone(&seen);
            let note = move || {
                seen.lock().expect("no panic").push((i, op));
                Ok(())
            };
            stream.enqueue("note", note).expect("enqueued");
        }
    }
    for stream in &streams {
        stream.synchronize(LIMIT).expect("all ran");
    }
    let seen = seen.lock().expect("no panic");
    seen.clone()
}

#[test]
fn seed_determines_the_order() {
    let orders: BTreeSet<_> = (0..SEEDS).map(order).collect();
    for order in &orders {
        for stream in 0..3 {
            let own: Vec<_> = order
                .iter()
                .filter(|(s, _)| *s == stream)
                .map(|(_, op)| *op)
                .collect();
            assert_eq!(own, [0, 1, 2, 3], "a stream runs in order");
        }
    }
    assert!(
        orders.len() as u64 > SEEDS * 3 / 4,
        "{} orders of {SEEDS} seeds",
        orders.len()
    );
    for seed in 0..SEEDS.min(20) {
        assert_eq!(order(seed), order(seed));
    }
}

#[test]
fn missing_wait_is_found_in_any_order() {
    for seed in 0..SEEDS {
        let (device, pool, compute, comm) = setup(seed);
        let shared = block(&pool, Purpose::Buckets, &compute);
        write(&compute, f32s(&shared), 1.0);
        // Missing: a wait of comm for compute.
        write(&comm, f32s(&shared), 2.0);
        let DeviceError::Operation { op, cause, .. } = failure([&compute, &comm]) else {
            panic!("seed {seed}: another error");
        };
        let message = cause.to_string();
        assert_eq!(op, "write");
        for word in [
            "missing wait",
            "Buckets",
            "256 bytes",
            "stream compute",
            "stream comm",
        ] {
            assert!(message.contains(word), "{message}");
        }
        assert_eq!(device.violations()[0].kind, ViolationKind::Race);
    }
}

#[test]
fn event_order_is_no_violation() {
    for seed in 0..SEEDS {
        let (device, pool, compute, comm) = setup(seed);
        let mut shared = block(&pool, Purpose::Buckets, &compute);
        for round in 0..3 {
            write(&compute, f32s(&shared), round as f32);
            follow(&comm, &compute);
            read(&comm, f32s(&shared), round as f32);
            read(&compute, f32s(&shared), round as f32);
            follow(&compute, &comm);
        }
        shared.record_use(&comm).expect("recorded");
        drop(shared);
        // The same memory, on the other stream.
        let shared = block(&pool, Purpose::Buckets, &comm);
        write(&comm, f32s(&shared), 9.0);
        comm.synchronize(LIMIT).expect("sound");
        compute.synchronize(LIMIT).expect("sound");
        assert_sound(&device, seed);
    }
}

#[test]
fn host_waits_order_operations() {
    for seed in 0..SEEDS {
        let (device, pool, compute, comm) = setup(seed);
        let shared = block(&pool, Purpose::Buckets, &compute);
        write(&compute, f32s(&shared), 1.0);
        let done = compute.record().expect("recorded");
        if seed % 2 == 0 {
            done.synchronize(LIMIT).expect("reached");
        } else {
            while !done.is_done().expect("sound") {}
        }
        write(&comm, f32s(&shared), 2.0);
        comm.synchronize(LIMIT).expect("sound");
        drop(shared);
        assert_sound(&device, seed);
    }
}

#[test]
fn unrecorded_use_of_a_freed_block_is_found() {
    let mut kinds = BTreeSet::new();
    for seed in 0..SEEDS {
        let (device, pool, compute, comm) = setup(seed);
        let shared = block(&pool, Purpose::Activations, &compute);
        write(&compute, f32s(&shared), 1.0);
        follow(&comm, &compute);
        read(&comm, f32s(&shared), 1.0);
        // Missing: record_use(&comm).
        drop(shared);
        let error = failure([&compute, &comm]).to_string();
        assert!(
            error.contains("Activations") && error.contains("stream comm"),
            "{error}"
        );
        kinds.insert(format!("{:?}", device.violations()[0].kind));
    }

    // The read runs before the free or after it.
    if !cfg!(miri) {
        assert_eq!(
            kinds.into_iter().collect::<Vec<_>>(),
            ["UnnotedUse", "UseAfterFree"]
        );
    }
}

/// An exchange as in a collective: each side reads the other's buffer. If `careful`, each waits
/// until the other has read before it continues.
fn exchange(seed: u64, careful: bool) -> Vec<zero_alloc::host::Violation> {
    let (device, pool, compute, comm) = setup(seed);
    let monitor = Arc::new(Monitor::new((0, 0)));
    let blocks: Vec<_> = [&compute, &comm]
        .map(|stream| {
            pool.allocate(16, DType::F32, Purpose::Buckets, stream)
                .expect("room")
        })
        .into_iter()
        .collect();

    for (rank, stream) in [&compute, &comm].into_iter().enumerate() {
        let mine = f32s(&blocks[rank]);
        let other = f32s(&blocks[1 - rank]);
        write(stream, mine, rank as f32);
        let monitor = Arc::clone(&monitor);
        let op = move || {
            monitor.update(|(arrived, _)| *arrived += 1);
            monitor.wait_until(
                LIMIT,
                || "arrival".into(),
                |(arrived, _)| (*arrived == 2).then_some(()),
            )?;
            // SAFETY: host memory; the other side has written and will not write again before the
            // second monitor.
            assert_eq!(unsafe { other.as_host() }[0], 1.0 - rank as f32);
            monitor.update(|(_, read)| *read += 1);
            if careful {
                monitor.wait_until(
                    LIMIT,
                    || "departure".into(),
                    |(_, read)| (*read == 2).then_some(()),
                )?;
            }
            Ok(())
        };
        stream.enqueue("exchange", op).expect("enqueued");
        write(stream, mine, 5.0);
    }

    for stream in [&compute, &comm] {
        let result = stream.synchronize(LIMIT);
        assert!(result.is_ok() || !careful, "seed {seed}: {result:?}");
    }

    device.violations()
}

#[test]
fn monitors_order_operations() {
    for seed in 0..SEEDS {
        let violations = exchange(seed, true);
        assert!(violations.is_empty(), "seed {seed}: {violations:?}");
    }
}

#[test]
fn leaving_a_monitor_early_is_found() {
    // A rank that does not wait for the reader overwrites the buffer before the read in some
    // orders.
    let caught = (0..SEEDS)
        .filter(|seed| !exchange(*seed, false).is_empty())
        .count() as u64;
    assert!(caught > SEEDS / 8, "caught with {caught} of {SEEDS} seeds");
}

#[test]
fn copies_and_fills_are_checked() {
    let (device, pool, compute, comm) = setup(7);
    let a = block(&pool, Purpose::Params, &compute);
    let b = block(&pool, Purpose::Params, &compute);
    device.fill_zero(&compute, slice(&a)).expect("enqueued");
    device.copy(&comm, slice(&a), slice(&b)).expect("enqueued");
    let error = failure([&compute, &comm]).to_string();
    assert!(
        error.contains("fill_zero") && error.contains("copy"),
        "{error}"
    );
}

#[test]
fn blocked_operation_ends_at_its_limit() {
    let (_, _, compute, _) = setup(1);
    let monitor = Monitor::new(false);
    let limit = Duration::from_millis(3);
    let op = move || monitor.wait_until(limit, || "a peer".into(), |open| open.then_some(()));
    compute.enqueue("wait", op).expect("enqueued");
    let error = compute.synchronize(LIMIT).expect_err("nobody opens it");
    let DeviceError::Operation { stream, op, cause } = error else {
        panic!("{error}")
    };
    assert_eq!(
        (&*stream, &*op, &*cause.to_string()),
        ("compute", "wait", "a peer took longer than 3ms")
    );
}
