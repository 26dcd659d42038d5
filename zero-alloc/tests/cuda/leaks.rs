//! Pools and devices leak no device memory.

use std::time::Duration;

use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::{DType, Device, Stream};
use zero_alloc::{Pool, Purpose};

use crate::{LIMIT, assert_free, open};

/// Allocates, frees and stitches `rounds` times, with a new pool every 100 rounds.
fn churn(device: &CudaDevice, stream: &CudaStream, rounds: usize) {
    let page = device_page(device);
    for _ in 0..rounds / 100 {
        let pool = Pool::new(device.clone(), 8 * page);
        let mut held = Vec::new();
        for round in 0..100usize {
            let bytes = page / 8 + round % 7 * page / 16;
            match pool.allocate(bytes, DType::U8, Purpose::Activations, stream) {
                Ok(block) => held.push(Some(block)),
                Err(_) => held.clear(),
            }
            let short = pool.allocate(bytes / 2, DType::U8, Purpose::Params, stream);
            if round % 3 == 1 {
                let nth = round % held.len().max(1);
                held.get_mut(nth).map(Option::take);
            }
            if round % 10 == 9 {
                drop(pool.allocate(3 * page, DType::U8, Purpose::Buckets, stream));
            }
            drop(short);
        }
        drop(held);
        stream.synchronize(LIMIT).expect("sound");
    }
}

/// The free bytes, after a second for pools that another thread frees when their last operations
/// have run.
fn free_at_rest(device: &CudaDevice) -> usize {
    std::thread::sleep(Duration::from_secs(1));
    device.memory_bytes().expect("a number").0
}

fn device_page(device: &CudaDevice) -> usize {
    use zero_alloc::device::Memory;
    device
        .virtual_memory()
        .map_or(2 << 20, |memory| memory.page_bytes())
}

#[test]
#[ignore = "needs a CUDA device"]
fn pools_leak_no_cuda_memory() {
    for device in [open(), open().with_backings()] {
        let stream = device.create_stream("compute").expect("a stream");
        // The driver allocates its own memory in the first rounds.
        churn(&device, &stream, 200);
        let before = free_at_rest(&device);
        churn(&device, &stream, 10_000);
        assert_free(&device, before);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn devices_leak_no_cuda_memory() {
    let rounds = |n: usize| {
        for _ in 0..n {
            let device = CudaDevice::open(0).expect("a CUDA device");
            let stream = device.create_stream("compute").expect("a stream");
            let pool = Pool::new(device.clone(), 8 << 20);
            let block = pool
                .allocate(1 << 20, DType::U8, Purpose::Params, &stream)
                .expect("room");
            // SAFETY: the block lives, and one stream does all.
            device
                .upload(&stream, &vec![1; 1 << 20], unsafe { block.slice() }, LIMIT)
                .expect("uploaded");
        }
    };
    // This device keeps the driver's context.
    let device = open();
    rounds(2);
    let before = free_at_rest(&device);
    rounds(20);
    assert_free(&device, before);
}
