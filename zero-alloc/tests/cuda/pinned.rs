//! Pinned host memory.

use std::sync::Arc;

use zero_alloc::cuda::{PinnedMemory, bind_to_node};
use zero_alloc::device::{AnySlice, DType, Device, DeviceError, Memory, Stream};
use zero_alloc::host::HostDevice;
use zero_alloc::{Pool, Purpose};

use crate::faults::{is_child, run_in_child};
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
    // SAFETY: the memory lives until the end of the test; host and device wait for each other
    // below.
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
    let host = HostDevice::new()
        .with_memory(Arc::new(PinnedMemory::new(&device)))
        .expect("host memory");
    let stream = device.create_stream("copy").expect("a stream");
    let on_host = host.create_stream("adam").expect("one");
    let pool = Pool::new(device.clone(), 8 << 20);
    let pinned = Pool::new(host, 8 << 20);
    let x = floats(&pool, &stream, 1000, 2.5);
    let block = pinned
        .allocate(1000, DType::F32, Purpose::Optimizer, &on_host)
        .expect("pinned memory");
    // SAFETY: the block lives until everything has run; host and device wait for each other below.
    let y = unsafe { block.slice() };
    device.copy(&stream, slice(&x), y).expect("enqueued");
    stream.synchronize(LIMIT).expect("ran");
    let typed = y.typed::<f32>().expect("floats");

    let double = move || {
        // SAFETY: the copy has run, and nothing else uses the block until this operation has.
        unsafe { typed.as_host_mut() }
            .iter_mut()
            .for_each(|y| *y *= 2.0);
        Ok(())
    };

    on_host.enqueue("double", double).expect("enqueued");
    on_host.synchronize(LIMIT).expect("ran");
    device.copy(&stream, y, slice(&x)).expect("enqueued");
    assert_eq!(read(&device, &stream, &x), [5.0; 1000]);
    stream.synchronize(LIMIT).expect("ran");
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_pinned_memory_is_whole_pages_and_no_more() {
    let memory = PinnedMemory::new(&open());
    let page = memory.granularity_bytes();
    assert!(page >= 4096 && page.is_power_of_two());
    let sizes = [
        (1, page),
        (page, page),
        (page + 1, 2 * page),
        (5 << 20, 5 << 20),
    ];
    let mut live = 0;

    let pointers = sizes.map(|(bytes, whole)| {
        let ptr = memory.allocate(bytes).expect("pinned memory");
        live += whole;
        assert_eq!(memory.live_bytes(), live);
        assert_eq!(ptr.addr().get() % page, 0);
        // SAFETY: allocated with this size, and nothing else uses it.
        let contents = unsafe { std::slice::from_raw_parts(ptr.as_ptr(), bytes) };
        assert!(contents.iter().all(|&byte| byte == 0));
        ptr
    });

    for (ptr, (bytes, _)) in pointers.into_iter().zip(sizes) {
        // SAFETY: allocated above, unused, and freed once.
        unsafe { memory.deallocate(ptr, bytes) };
    }

    assert_eq!((memory.live_bytes(), memory.notices()), (0, Vec::new()));
    let error = memory
        .allocate(1 << 60)
        .expect_err("beyond the address space");
    assert!(
        matches!(&error, DeviceError::OutOfMemory { requested_bytes, .. } if *requested_bytes == 1 << 60),
        "{error}"
    );
}

/// Memory that the system refuses to pin. Only the stand-in can be made to refuse.
#[test]
#[ignore = "needs a CUDA device"]
fn cuda_copies_work_without_pinning() {
    if !is_child() {
        run_in_child(
            "pinned::cuda_copies_work_without_pinning",
            &[("ZERO_STANDIN_PINNED_BYTES", "100000")],
        );
        return;
    }

    let device = open();
    if !device.name().contains("stand-in") {
        return;
    }
    // More than two buffers of the device, and no multiple of them.
    const LEN: usize = (9 << 18) + 3;
    let memory = PinnedMemory::new(&device);
    let small = memory.allocate(100).expect("within the limit");
    assert!(memory.notices().is_empty());
    let host = HostDevice::new()
        .with_memory(Arc::new(memory.clone()))
        .expect("host memory");
    let on_host = host.create_stream("host").expect("a stream");
    let pinned = Pool::new(host, 64 << 20);
    let blocks = [0, 1, 2].map(|_| {
        pinned
            .allocate(LEN, DType::F32, Purpose::Params, &on_host)
            .expect("memory")
    });

    // SAFETY: the blocks live until everything has run, and events order all uses.
    let [a, b, c] = [0, 1, 2].map(|i| unsafe { blocks[i].slice() });
    let text = memory.notices().join(" ");
    assert!(
        text.contains("bytes of host memory for GPU 0 are not pinned (")
            && text.contains("ulimit -l"),
        "{text}"
    );
    assert!(text.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{text}");
    let streams = ["x", "y"].map(|name| device.create_stream(name).expect("a stream"));
    let pool = Pool::new(device.clone(), 64 << 20);
    let x = floats(&pool, &streams[0], LEN, 2.5);
    let y = floats(&pool, &streams[0], LEN, 7.0);
    // Copies on two streams at once, which share the buffer; then on the host, and back.
    let before = streams[0].record().expect("recorded");
    streams[1].wait(&before).expect("enqueued");
    device.copy(&streams[0], slice(&x), a).expect("enqueued");
    device.copy(&streams[1], slice(&y), b).expect("enqueued");
    streams[0]
        .wait(&streams[1].record().expect("recorded"))
        .expect("enqueued");
    device.copy(&streams[0], b, c).expect("enqueued");
    device
        .copy(&streams[0], c.slice(1..LEN), slice(&x).slice(0..LEN - 1))
        .expect("enqueued");
    device.copy(&streams[0], a, slice(&y)).expect("enqueued");
    assert_eq!(read(&device, &streams[0], &y), vec![2.5; LEN]);
    let seen = read(&device, &streams[0], &x);
    assert!(seen[..LEN - 1].iter().all(|&value| value == 7.0) && seen[LEN - 1] == 2.5);
    // A host operation cannot be in a graph; the stream goes on.
    let graph = streams[0].capture(|| device.copy(&streams[0], a, slice(&x)));
    assert!(
        graph
            .expect_err("refused")
            .to_string()
            .contains("not pinned")
    );
    device.copy(&streams[0], a, slice(&x)).expect("enqueued");
    assert_eq!(read(&device, &streams[0], &x), vec![2.5; LEN]);
    drop((blocks, pinned));
    // SAFETY: allocated above and unused.
    unsafe { memory.deallocate(small, 100) };
    assert_eq!(memory.live_bytes(), 0);
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_binding_to_a_node_needs_a_device() {
    // In a new thread, so that no other thread of the tests is bound.
    let bound = std::thread::spawn(|| {
        (
            bind_to_node(&[0], 0, true),
            bind_to_node(&[1 << 20], 0, true),
        )
    });
    let (bound, missing) = bound.join().expect("ran");
    assert!(
        bound
            .expect("the system answers")
            .is_none_or(|cores| !cores.is_empty())
    );
    assert!(
        missing
            .expect_err("no such device")
            .to_string()
            .contains("CUDA_ERROR_INVALID_DEVICE")
    );
}
