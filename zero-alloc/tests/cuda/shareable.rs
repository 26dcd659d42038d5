//! Memory that other processes can open.

use zero_alloc::device::{AnySlice, DType, Device, DeviceError, Memory};
use zero_alloc::{AllocError, Pool, Purpose};

use crate::{assert_free, floats, open, read, slice};

/// The error of `shareable_allocation` for this memory.
fn refusal(memory: AnySlice) -> String {
    open()
        .shareable_allocation(memory)
        .expect_err("not to be shared")
        .to_string()
}

#[test]
#[ignore = "needs a CUDA device"]
fn shareable_cuda_budget_is_one_allocation() {
    let device = open()
        .with_shareable_backings()
        .expect("the driver answers");
    let stream = device.create_stream("compute").expect("a stream");
    let granularity = device.granularity_bytes();
    let (free, _) = device.memory_bytes().expect("a number");
    let pool = Pool::new(device.clone(), 3 * granularity - 1);
    let (start, bytes) = pool.reserve_budget().expect("one backing");
    assert_eq!(bytes, 3 * granularity);
    assert_eq!(pool.reserve_budget().expect("the same"), (start, bytes));
    // Every block of the pool is in this allocation.
    let x = floats(&pool, &stream, 100_000, 1.0);
    let y = floats(&pool, &stream, 1_000_000, 2.0);
    for block in [&x, &y] {
        assert_eq!(
            device
                .shareable_allocation(slice(block))
                .expect("of the pool"),
            (start, bytes)
        );
    }
    assert_eq!(read(&device, &stream, &y), vec![2.0; 1_000_000]);
    let report = pool.report();
    assert_eq!(
        (report.reserved_bytes, report.backing_allocations),
        (bytes, 1)
    );
    drop((x, y, pool));
    assert_free(&device, free);
}

#[test]
#[ignore = "needs a CUDA device"]
fn private_cuda_memory_is_not_shareable() {
    let device = open();
    let stream = device.create_stream("compute").expect("a stream");
    let pages = Pool::new(device.clone(), 1 << 30);
    let page = device.virtual_memory().expect("pages").page_bytes();
    let small = floats(&pages, &stream, 100, 1.0);
    let large = floats(&pages, &stream, page, 1.0);
    assert!(
        refusal(slice(&small)).contains("for this process alone"),
        "{}",
        refusal(slice(&small))
    );
    assert!(
        refusal(slice(&large)).contains("more than one allocation"),
        "{}",
        refusal(slice(&large))
    );
    let plain = Pool::new(device.clone().with_backings(), 1 << 20);
    let block = floats(&plain, &stream, 100, 1.0);
    // Which of the two errors depends on the driver.
    let why = refusal(slice(&block));
    assert!(
        ["no shareable handle", "for this process alone"]
            .iter()
            .any(|w| why.contains(w)),
        "{why}"
    );
}

#[test]
#[ignore = "needs a CUDA device"]
fn reserve_budget_errors_on_cuda() {
    let why = |pool: &Pool<_>| match pool.reserve_budget() {
        Err(AllocError::Device(DeviceError::Driver {
            call: "Pool::reserve_budget",
            message,
        })) => message,
        other => panic!("{other:?}"),
    };
    assert!(why(&Pool::new(open(), 1 << 20)).contains("uses pages"));
    let device = open()
        .with_shareable_backings()
        .expect("the driver answers");
    let stream = device.create_stream("compute").expect("a stream");
    let grown = Pool::new(device.clone(), 64 << 20);
    let block = grown
        .allocate(100, DType::F32, Purpose::Buckets, &stream)
        .expect("room");
    assert!(why(&grown).contains("has reserved a part of its budget"));
    drop(block);
    let (_, total) = device.memory_bytes().expect("a number");
    let error = Pool::new(device, 2 * total)
        .reserve_budget()
        .expect_err("more than there is");
    assert!(
        matches!(error, AllocError::Device(DeviceError::OutOfMemory { .. })),
        "{error}"
    );
}
