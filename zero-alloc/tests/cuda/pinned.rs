//! Host memory that the device copies from and to by itself.

use std::sync::Arc;

use zero_alloc::cuda::PinnedMemory;
use zero_alloc::device::{DType, Device, Memory, Stream};
use zero_alloc::host::HostDevice;
use zero_alloc::{Pool, Purpose};

use crate::{LIMIT, floats, open, read, slice};

#[test]
#[ignore = "needs a CUDA device"]
fn a_pool_of_pinned_memory_gives_what_cuda_copies_without_the_host() {
    let device = open();
    let stream = device.create_stream("copy").expect("a stream");
    let memory = PinnedMemory::new(&device);
    assert!(format!("{memory:?}").contains("device 0"));
    // SAFETY: pinned memory is the host's.
    let host = unsafe { HostDevice::new().with_memory(Arc::new(memory)) };
    assert!(host.virtual_memory().is_none());
    let host_stream = host.create_stream("host").expect("a stream");
    let (pool, host_pool) = (Pool::new(device.clone(), 8 << 20), Pool::new(host.clone(), 8 << 20));
    let x = floats(&pool, &stream, 1000, 2.5);
    let offloaded = host_pool.allocate(1000, DType::F32, Purpose::Optimizer, &host_stream).expect("room");
    // SAFETY: the block lives; the two sides wait for each other below.
    let on_host = unsafe { offloaded.slice() };
    device.copy(&stream, slice(&x), on_host).expect("enqueued");
    stream.synchronize(LIMIT).expect("ran");
    let typed = on_host.typed::<f32>().expect("floats");
    // SAFETY: the copy has run, and nothing else uses the block.
    let seen = unsafe { typed.as_host_mut() };
    assert_eq!(*seen, [2.5; 1000]);
    seen.fill(7.0);
    device.copy(&stream, on_host, slice(&x)).expect("enqueued");
    assert_eq!(read(&device, &stream, &x), [7.0; 1000]);
}
