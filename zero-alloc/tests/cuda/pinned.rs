//! Pinned host memory.

use std::sync::Arc;

use zero_alloc::cuda::PinnedMemory;
use zero_alloc::device::{AnySlice, DType, Device, Memory, Stream};
use zero_alloc::host::HostDevice;
use zero_alloc::{Pool, Purpose};

use crate::{LIMIT, floats, open, read, slice};

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_copies_from_and_to_pinned_memory() {
    let device = open();
    let stream = device.create_stream("copy").expect("a stream");
    let memory = PinnedMemory::new(&device);
    assert!(format!("{memory:?}").contains("device 0"));
    let pool = Pool::new(device.clone(), 8 << 20);
    let x = floats(&pool, &stream, 1000, 2.5);
    let ptr = memory.allocate(4000).expect("pinned memory");
    // SAFETY: the memory lives until the end of the test; host and device wait for each other below.
    let on_host = unsafe { AnySlice::from_raw_parts(ptr.as_ptr(), 1000, DType::F32, memory.id()) };
    device.copy(&stream, slice(&x), on_host).expect("enqueued");
    stream.synchronize(LIMIT).expect("ran");
    let typed = on_host.typed::<f32>().expect("floats");
    // SAFETY: the copy has run and initialized the memory, and nothing else uses it.
    let seen = unsafe { typed.as_host_mut() };
    assert_eq!(*seen, [2.5; 1000]);
    seen.fill(7.0);
    device.copy(&stream, on_host, slice(&x)).expect("enqueued");
    assert_eq!(read(&device, &stream, &x), [7.0; 1000]);
    // SAFETY: allocated above; both copies have run.
    unsafe { memory.deallocate(ptr, 4000) };
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_copies_from_and_to_blocks_of_a_pinned_pool() {
    let device = open();
    let host = HostDevice::new().with_memory(Arc::new(PinnedMemory::new(&device))).expect("host memory");
    let (stream, on_host) =
        (device.create_stream("copy").expect("a stream"), host.create_stream("adam").expect("one"));
    let (pool, pinned) = (Pool::new(device.clone(), 8 << 20), Pool::new(host, 8 << 20));
    let x = floats(&pool, &stream, 1000, 2.5);
    let block = pinned.allocate(1000, DType::F32, Purpose::Optimizer, &on_host).expect("pinned memory");
    // SAFETY: the block lives until everything has run; host and device wait for each other below.
    let y = unsafe { block.slice() };
    device.copy(&stream, slice(&x), y).expect("enqueued");
    stream.synchronize(LIMIT).expect("ran");
    let typed = y.typed::<f32>().expect("floats");
    let double = move || {
        // SAFETY: the copy has run, and nothing else uses the block until this operation has.
        unsafe { typed.as_host_mut() }.iter_mut().for_each(|y| *y *= 2.0);
        Ok(())
    };
    on_host.enqueue("double", double).expect("enqueued");
    on_host.synchronize(LIMIT).expect("ran");
    device.copy(&stream, y, slice(&x)).expect("enqueued");
    assert_eq!(read(&device, &stream, &x), [5.0; 1000]);
    stream.synchronize(LIMIT).expect("ran");
}
