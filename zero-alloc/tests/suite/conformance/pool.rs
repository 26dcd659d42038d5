//! Pools: reuse in stream order, steady steps, trimming, budgets.

use std::time::Duration;

use zero_alloc::device::{DType, Event, Stream};
use zero_alloc::{AllocError, Pool, Purpose};

use super::backend::{Backend, LIMIT, address, check, fill, open};

/// At least one page of every back end, in bytes.
const WHOLE: usize = 2 << 20;

pub(crate) fn same_stream_reuses_at_once<B: Backend>(backend: &B) {
    let device = backend.device();
    let a = B::stream(&device, "a");
    let pool = Pool::new(device, WHOLE);
    let monitor = B::hold(&a);
    let block = pool
        .allocate(WHOLE, DType::U8, Purpose::Buckets, &a)
        .expect("room");
    let first = address(&block);
    drop(block);
    let block = pool
        .allocate(WHOLE, DType::U8, Purpose::Buckets, &a)
        .expect("room");
    assert_eq!(address(&block), first);
    open(&monitor);
    a.synchronize(LIMIT).expect("ran");
}

pub(crate) fn other_stream_reuses_behind_uses<B: Backend>(backend: &B) {
    for recorded in [false, true] {
        let device = backend.device();
        let a = B::stream(&device, "a");
        let b = B::stream(&device, "b");
        let pool = Pool::new(device, WHOLE);
        let mut block = pool
            .allocate(WHOLE, DType::U8, Purpose::Buckets, &a)
            .expect("room");
        let first = address(&block);
        let monitor = B::hold(&a);
        if recorded {
            block.record_use(&a).expect("recorded");
        }
        drop(block);
        let block = pool
            .allocate(WHOLE, DType::U8, Purpose::Buckets, &b)
            .expect("room");
        assert_eq!(address(&block), first);
        let reused = b.record().expect("recorded");
        assert_eq!(reused.is_done(), Ok(false));
        open(&monitor);
        reused.synchronize(LIMIT).expect("reached");
    }
}

pub(crate) fn partial_reuse_keeps_hazards<B: Backend>(backend: &B) {
    let device = backend.device();
    let a = B::stream(&device, "a");
    let b = B::stream(&device, "b");
    let pool = Pool::new(device, WHOLE);
    let block = pool
        .allocate(WHOLE, DType::U8, Purpose::Params, &a)
        .expect("room");
    let monitor = B::hold(&a);
    drop(block);
    let first = pool
        .allocate(1 << 10, DType::U8, Purpose::Params, &a)
        .expect("room");
    let second = pool
        .allocate(1 << 10, DType::U8, Purpose::Params, &b)
        .expect("room");
    let reused = b.record().expect("recorded");
    assert_eq!(reused.is_done(), Ok(false));
    open(&monitor);
    reused.synchronize(LIMIT).expect("reached");
    drop((first, second));
}

pub(crate) fn steady_steps_allocate_nothing<B: Backend>(backend: &B) {
    let device = backend.device();
    let compute = B::stream(&device, "compute");
    let comm = B::stream(&device, "comm");
    let pool = Pool::new(device, 1 << 26);
    let state = pool
        .allocate(100_000, DType::F32, Purpose::Optimizer, &compute)
        .expect("room");
    let mut after_second = 0;

    for step in 0..10 {
        let mut held = Vec::new();
        for i in 0..20usize {
            let (stream, purpose) = if i % 3 == 0 {
                (&comm, Purpose::Buckets)
            } else {
                (&compute, Purpose::Activations)
            };
            let mut block = pool
                .allocate(1000 * (1 + i * 7 % 5), DType::F32, purpose, stream)
                .expect("room");
            block.record_use(&compute).expect("recorded");
            if i % 2 == 0 {
                held.push(block);
            }
        }
        if step == 1 {
            after_second = pool.report().backing_allocations;
        }
    }

    assert_eq!(pool.report().backing_allocations, after_second);
    drop(state);
}

pub(crate) fn trim_frees_the_finished_end<B: Backend>(backend: &B) {
    let device = backend.device();
    let a = B::stream(&device, "a");
    let b = B::stream(&device, "b");
    let pool = Pool::new(device, 16 * WHOLE);
    let low = pool
        .allocate(1 << 10, DType::U8, Purpose::Params, &a)
        .expect("room");
    // SAFETY: the block lives, and one stream does all.
    fill(&pool, &a, unsafe { low.slice() }, 7);
    let high = pool
        .allocate(4 * WHOLE, DType::U8, Purpose::Activations, &a)
        .expect("room");
    let reserved = pool.report().reserved_bytes;
    let monitor = B::hold(&a);
    drop(high);
    assert_eq!(pool.trim(Duration::from_millis(20)), 0);
    open(&monitor);
    let back = pool.trim(LIMIT);
    assert!(back >= 4 * WHOLE && back < reserved, "{back} of {reserved}");
    assert_eq!(pool.report().reserved_bytes, reserved - back);
    pool.check_invariants().expect("sound");
    // SAFETY: the block lives, and one stream does all.
    check(&pool, &a, unsafe { low.slice() }, 7);
    // The pool reserves memory again when needed.
    let again = pool
        .allocate(4 * WHOLE, DType::U8, Purpose::Activations, &b)
        .expect("room");
    // SAFETY: the block lives, and one stream does all.
    fill(&pool, &b, unsafe { again.slice() }, 8);
    drop((low, again));
    pool.trim(LIMIT);
    assert_eq!(pool.report().reserved_bytes, 0);
    pool.check_invariants().expect("sound");
}

pub(crate) fn budget_error_has_the_numbers<B: Backend>(backend: &B) {
    let device = backend.device();
    let stream = B::stream(&device, "compute");
    let budget = 4 * WHOLE;
    let most = 3 * WHOLE;
    let pool = Pool::new(device, budget);
    let held = pool
        .allocate(most, DType::U8, Purpose::Params, &stream)
        .expect("room");
    let error = pool
        .allocate(WHOLE + 1, DType::U8, Purpose::Buckets, &stream)
        .expect_err("over the budget");

    let AllocError::OutOfMemory {
        requested_bytes,
        purpose,
        live_bytes,
        budget_bytes,
        ..
    } = error
    else {
        panic!("{error}");
    };

    assert_eq!(
        (requested_bytes, purpose, live_bytes, budget_bytes),
        (WHOLE + 1, Purpose::Buckets, most, budget)
    );
    let rest = pool
        .allocate(WHOLE, DType::U8, Purpose::Buckets, &stream)
        .expect("just fits");
    assert_eq!(pool.report().total.live_bytes, budget);
    let huge = pool
        .allocate(usize::MAX / 2, DType::F64, Purpose::Params, &stream)
        .expect_err("overflows");
    assert!(matches!(huge, AllocError::OutOfMemory { .. }), "{huge}");
    drop(held);
    assert_eq!(pool.report().total.live_bytes, WHOLE);
    drop(rest);
}
