//! Conversion of a framework's handles.

use zero_alloc::cuda::{CudaDevice, interop};
use zero_alloc::device::{DType, Device, DeviceError, Event, Memory, Stream};
use zero_alloc::schedule::Recorder;
use zero_alloc::{Pool, Purpose};

use crate::kernels::{launch, scale_add};
use crate::{LIMIT, floats, open, read, slice};

#[test]
#[ignore = "needs a CUDA device"]
fn foreign_cuda_stream_is_the_same_stream() {
    let device = open();
    // This crate's stream in the role of a framework's.
    let theirs = device.create_stream("theirs").expect("a stream");
    let raw = interop::raw_stream(&theirs);
    // SAFETY: `theirs` outlives it.
    let ours = unsafe { interop::stream_from_raw(&device, raw, "ours") }.expect("a stream");
    assert_eq!((interop::raw_stream(&ours), ours.name()), (raw, "ours"));
    assert_ne!(ours.id(), theirs.id());
    let pool = Pool::new(device.clone(), 8 << 20);
    let function = scale_add(&device);
    let x = floats(&pool, &ours, 100, 1.0);
    launch(&function, &ours, slice(&x), 2.0, 0.0).expect("enqueued");
    launch(&function, &theirs, slice(&x), 1.0, 1.0).expect("enqueued");
    assert_eq!(read(&device, &theirs, &x), [3.0; 100]);
    drop(ours);
    // A foreign stream is not destroyed.
    launch(&function, &theirs, slice(&x), 1.0, 1.0).expect("enqueued");
    assert_eq!(read(&device, &theirs, &x), [4.0; 100]);
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_default_streams_are_refused() {
    let device = open();
    for raw in [0usize, 1, 2] {
        // SAFETY: CUDA's handles of the default streams.
        let refused = unsafe {
            interop::stream_from_raw(&device, std::ptr::without_provenance_mut(raw), "default")
        };
        let error = refused.expect_err("a default stream").to_string();
        assert!(error.contains("default is a default stream"), "{error}");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_streams_of_pools_may_end() {
    let device = open();
    let theirs = device.create_stream("theirs").expect("a stream");
    let other = device.create_stream("other").expect("a stream");
    let raw = interop::raw_stream(&theirs);
    // SAFETY: `theirs` lives while `ours` allocates.
    let ours = unsafe { interop::pool_stream_from_raw(&device, raw, "ours") }.expect("a stream");
    assert!(ours.may_end() && !theirs.may_end());
    let pool = Pool::new(device.clone(), 64 << 20);
    let allocate = |bytes, stream| {
        let block = pool.allocate(bytes, DType::U8, Purpose::Workspace, stream);
        block.expect("room")
    };

    // A block of two pages is stitched from those of the first and the third block.
    let page = device.virtual_memory().map_or(2 << 20, |m| m.page_bytes());
    let [first, second, third] = [(); 3].map(|()| allocate(page, &ours));
    drop((first, third));
    let stitched = allocate(2 * page, &ours);
    drop((second, stitched));
    drop(theirs);

    // A use of the destroyed stream would fail these.
    let again = allocate(8 * page, &other);
    drop(again);
    other.synchronize(LIMIT).expect("sound");
    assert!(pool.trim(LIMIT) >= 8 * page);
    drop(pool);
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_streams_have_unique_ids() {
    let device = open();
    let id = |stream| {
        // SAFETY: the stream lives.
        unsafe { interop::unique_stream_id(&device, interop::raw_stream(stream)) }
    };
    let [a, b] = ["a", "b"].map(|name| device.create_stream(name).expect("a stream"));
    let Some(of_a) = id(&a).expect("a live stream") else {
        println!("SKIPPED: the driver is older than CUDA 12");
        return;
    };
    assert_eq!(id(&a), Ok(Some(of_a)));
    assert_ne!(id(&b), Ok(Some(of_a)));
}

#[test]
#[ignore = "needs a CUDA device"]
fn foreign_cuda_event_orders_streams() {
    let device = open();
    let (a, b) = (
        device.create_stream("a").expect("a stream"),
        device.create_stream("b").expect("a stream"),
    );
    let theirs = a.record().expect("recorded");
    // SAFETY: `theirs` outlives it.
    let ours = unsafe { interop::event_from_raw(&device, interop::raw_event(&theirs), "theirs") };
    b.wait(&ours).expect("enqueued");
    b.synchronize(LIMIT).expect("ran");
    ours.synchronize(LIMIT).expect("reached");
    drop(ours);
    assert_eq!(theirs.is_done(), Ok(true));
}

#[test]
#[ignore = "needs a CUDA device"]
fn foreign_cuda_context_makes_a_device() {
    let device = open();
    device.bind().expect("current");
    let raw = interop::raw_context(&device);
    // SAFETY: `device` outlives it.
    let again = unsafe { interop::device_from_context(raw) }.expect("a device");
    assert_eq!(
        (again.name(), again.ordinal()),
        (device.name(), device.ordinal())
    );
    let stream = again.create_stream("compute").expect("a stream");
    let pool = Pool::new(again.clone(), 8 << 20);
    let x = floats(&pool, &stream, 100, 5.0);
    assert_eq!(read(&device, &stream, &x), [5.0; 100]);
    // SAFETY: null is refused before anything else.
    let null = unsafe { interop::device_from_context(std::ptr::null_mut()) }.expect_err("null");

    assert!(
        matches!(
            null,
            DeviceError::Driver {
                call: "device_from_context",
                ..
            }
        ),
        "{null}"
    );
}

#[test]
#[ignore = "needs a CUDA device"]
fn foreign_cuda_capture_is_noticed() {
    let device = open();
    let theirs = device.create_stream("theirs").expect("a stream");
    // SAFETY: `theirs` outlives it.
    let ours = unsafe { interop::stream_from_raw(&device, interop::raw_stream(&theirs), "ours") }
        .expect("a stream");
    let other = device.create_stream("other").expect("a stream");
    let pool = Pool::new(device.clone(), 8 << 20);
    let function = scale_add(&device);
    let x = floats(&pool, &ours, 100, 1.0);
    let mut scratch = None;

    let graph = theirs
        .capture(|| {
            let mut block = pool
                .allocate(100, DType::F32, Purpose::Workspace, &ours)
                .expect("room");
            device.copy(&ours, slice(&x), slice(&block))?;
            launch(&function, &ours, slice(&block), 2.0, 0.0)?;
            device.copy(&ours, slice(&block), slice(&x))?;
            block.record_use(&ours)?;
            assert!(
                ours.synchronize(LIMIT).is_err(),
                "the host cannot wait for what does not run"
            );
            scratch = Some((block, ours.record()?));
            Ok(())
        })
        .expect("recorded");

    for expected in [2.0, 4.0] {
        // SAFETY: the pool's memory and the function live until the stream is drained.
        unsafe { graph.launch(&ours) }.expect("enqueued");
        assert_eq!(read(&device, &ours, &x), [expected; 100]);
    }

    // Events of the recording delay neither the next user of the block nor the end of the pool.
    let (block, inside) = scratch.expect("recorded");
    assert_eq!(inside.is_done(), Ok(true));
    drop(block);
    let again = floats(&pool, &other, 100, 3.0);
    assert_eq!(read(&device, &other, &again), [3.0; 100]);
    other.synchronize(LIMIT).expect("sound");
}

/// Streams and events of one GPU order nothing on another. The stand-in has two GPUs on request.
#[test]
#[ignore = "needs a CUDA device"]
fn streams_of_another_cuda_device_are_refused() {
    const DEVICES: &str = "ZERO_STANDIN_DEVICES";
    let first = open();
    if CudaDevice::count().expect("a driver") == 1 {
        if std::env::var_os(DEVICES).is_some() {
            println!("SKIPPED: there is one device");
            return;
        }
        let test = "handles::streams_of_another_cuda_device_are_refused";
        let output = std::process::Command::new(std::env::current_exe().expect("a path"))
            .args(["--exact", "--ignored", test])
            .env(DEVICES, "2")
            .output()
            .expect("started");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("1 passed"), "{output:?}");
        return;
    }

    let second = CudaDevice::open(1).expect("a second device");
    let own = first.create_stream("own").expect("a stream");
    let other = second.create_stream("other").expect("a stream");
    let refused = |result: Result<(), DeviceError>, what| {
        let expected = DeviceError::AnotherDevice {
            what,
            expected: first.id(),
            got: second.id(),
        };
        assert_eq!(result, Err(expected));
    };
    refused(own.wait(&other.record().expect("recorded")), "wait, event");
    refused(first.check_stream("test", &other), "test");
    let pool = Pool::new(first.clone(), 8 << 20);
    let mut block = pool
        .allocate(8, DType::U8, Purpose::Workspace, &own)
        .expect("allocated");
    refused(block.record_use(&other), "record_use");
    let error = pool.allocate(8, DType::U8, Purpose::Workspace, &other);
    assert!(error.is_err());

    // A stream of the host that only records waits for nothing.
    let recorded = Recorder::new().host();
    let recorded = recorded.create_stream("recorded").expect("a stream");
    let event = recorded.record().expect("recorded");
    for mixed in [
        first.wait_for_host(&own, &event, LIMIT),
        first.host_waits(&recorded, &own.record().expect("recorded"), LIMIT),
    ] {
        assert!(
            matches!(mixed, Err(DeviceError::AnotherExecution { .. })),
            "{mixed:?}"
        );
    }
    own.synchronize(LIMIT).expect("sound");
}
