//! Recorded operations.

use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use zero_alloc::Purpose;
use zero_alloc::cuda::{CudaEvent, CudaStream};
use zero_alloc::device::{DType, Device, DeviceError, Event, Stream};

use crate::kernels::{launch, launch_blocks, scale_add};
use crate::{LIMIT, floats, read, rig, slice};

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_graph_runs_at_each_launch() {
    let (device, pool, [stream]) = rig(["compute"]);
    let function = scale_add(&device);
    let x = floats(&pool, &stream, 300, 1.0);
    let y = floats(&pool, &stream, 300, 0.0);

    let graph = stream
        .capture(|| {
            launch(&function, &stream, slice(&x), 2.0, 1.0)?;
            launch(&function, &stream, slice(&x), 1.0, 1.0)?;
            device.copy(&stream, slice(&x), slice(&y))?;
            device.fill_zero(&stream, slice(&y).slice(0..1))
        })
        .expect("recorded");

    assert_eq!(read(&device, &stream, &x), [1.0; 300]);
    for expected in [4.0, 10.0, 22.0] {
        // SAFETY: blocks and function live until `read` has drained the stream.
        unsafe { graph.launch(&stream) }.expect("enqueued");
        assert_eq!(read(&device, &stream, &x), [expected; 300]);
        let seen = read(&device, &stream, &y);
        assert_eq!((seen[0], &seen[1..]), (0.0, &[expected; 299][..]));
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_graph_spans_streams() {
    let (device, pool, [a, b]) = rig(["a", "b"]);
    let function = scale_add(&device);
    let x = floats(&pool, &a, 300, 1.0);
    let mut inside = None;

    let graph = a
        .capture(|| {
            launch(&function, &a, slice(&x), 2.0, 0.0)?;
            let fork = a.record()?;
            assert_eq!(fork.is_done(), Ok(false));
            b.wait(&fork)?;
            launch(&function, &b, slice(&x), 1.0, 3.0)?;
            // The host cannot wait for a stream that became part of the recording.
            assert!(b.synchronize(LIMIT).is_err());
            let join = b.record()?;
            a.wait(&join)?;
            inside = Some(join);
            launch(&function, &a, slice(&x), 10.0, 0.0)
        })
        .expect("recorded");

    // SAFETY: blocks and function live until `read` has drained the stream.
    unsafe { graph.launch(&a) }.expect("enqueued");
    assert_eq!(read(&device, &a, &x), [50.0; 300]);
    // After the recording both streams work as before.
    let inside = inside.expect("recorded");
    // An event that b enqueued before the recording may still be ahead.
    inside.synchronize(LIMIT).expect("the recording is over");
    b.wait(&inside).expect("nothing to wait for");
    b.synchronize(LIMIT).expect("sound");
    a.synchronize(LIMIT).expect("sound");
}

#[test]
#[ignore = "needs a CUDA device"]
fn failed_cuda_capture_ends() {
    let (device, pool, [stream]) = rig(["compute"]);
    let x = floats(&pool, &stream, 10, 1.0);
    let refusals = |what: Result<(), DeviceError>| {
        let error = what
            .expect_err("the host cannot wait for what does not run")
            .to_string();
        assert!(
            error.contains("stream compute is recorded into a graph"),
            "{error}"
        );
    };

    let failed = stream.capture(|| {
        refusals(stream.synchronize(LIMIT));
        refusals(device.upload(&stream, &[0; 40], slice(&x), LIMIT));
        refusals(device.download(&stream, slice(&x), &mut [0; 40], LIMIT));
        refusals(stream.enqueue_host("host", || Ok(())));
        refusals(stream.capture(|| Ok(())).map(drop));
        Err(DeviceError::Closed {
            stream: "mine".into(),
        })
    });

    assert_eq!(
        failed.expect_err("the closure failed"),
        DeviceError::Closed {
            stream: "mine".into()
        }
    );
    // A panic ends the recording, too.
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        stream.capture(|| panic!("mine"))
    }));
    assert!(panicked.is_err());
    // These errors do not poison the stream.
    assert_eq!(read(&device, &stream, &x), [1.0; 10]);
}

#[test]
#[ignore = "needs a CUDA device"]
fn failed_cuda_capture_does_not_poison() {
    let (device, pool, [stream, other]) = rig(["a", "b"]);
    let function = scale_add(&device);
    let x = floats(&pool, &stream, 10, 1.0);
    let refused =
        stream.capture(|| launch_blocks(&function, &stream, (slice(&x), 2.0, 0.0), 4096, 0));
    // By the launch, or when the graph is made.
    let error = refused.expect_err("there are no such blocks").to_string();
    let expected = [
        "scale_add on stream a: cuLaunchKernel",
        "cuStreamEndCapture",
        "cuGraphInstantiate",
    ];
    assert!(
        expected.iter().any(|start| error.starts_with(start)),
        "{error}"
    );
    // It is an error if a stream became part of the recording and was not joined; both streams
    // leave the recording.
    let lost = stream.capture(|| {
        other.wait(&stream.record()?)?;
        launch(&function, &other, slice(&x), 2.0, 0.0)
    });

    assert!(lost.is_err());
    for stream in [&stream, &other] {
        launch(&function, stream, slice(&x), 2.0, 0.0).expect("enqueued");
        stream.synchronize(LIMIT).expect("ran");
    }

    assert_eq!(read(&device, &stream, &x), [4.0; 10]);
}

#[test]
#[ignore = "needs a CUDA device"]
fn reached_event_is_skipped_in_cuda_capture() {
    let (device, pool, [a, b]) = rig(["a", "b"]);
    let function = scale_add(&device);
    let x = floats(&pool, &a, 10, 1.0);
    launch(&function, &b, slice(&x), 2.0, 0.0).expect("enqueued");
    let before = b.record().expect("recorded");
    b.synchronize(LIMIT).expect("ran");
    let graph = a.capture(|| {
        a.wait(&before)?;
        launch(&function, &a, slice(&x), 1.0, 1.0)
    });

    // SAFETY: blocks and function live until `read` has drained the stream.
    unsafe { graph.expect("recorded").launch(&a) }.expect("enqueued");
    assert_eq!(read(&device, &a, &x), [3.0; 10]);
    // A wait for an event that is not reached cannot be recorded.
    let held = hold(&b);
    let ahead = b.record().expect("recorded");
    assert!(a.capture(|| a.wait(&ahead)).is_err());
    held.send(()).expect("held");
    b.synchronize(LIMIT).expect("ran");
}

/// Enqueues an operation that lasts until something is sent or the sender is dropped.
fn hold(stream: &CudaStream) -> Sender<()> {
    let (held, release) = channel::<()>();
    let wait = move || {
        let _ = release.recv_timeout(LIMIT);
        Ok(())
    };
    stream.enqueue_host("hold", wait).expect("enqueued");
    held
}

/// Whether `event` is not done, also after the time in which its stream would reach it.
fn is_held(event: &CudaEvent) -> bool {
    matches!(
        event.synchronize(Duration::from_millis(100)),
        Err(DeviceError::TimedOut { .. })
    )
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_capture_event_covers_earlier_operations() {
    // The operation is on the stream that is recorded, or on one that joins the recording.
    for joins in [false, true] {
        let (device, pool, [a, b, c]) = rig(["a", "b", "c"]);
        let x = floats(&pool, &a, 10, 1.0);
        let held = hold(if joins { &b } else { &a });
        let mut inside = None;
        let graph = a.capture(|| {
            b.wait(&a.record()?)?;
            device.fill_zero(&b, slice(&x))?;
            let join = b.record()?;
            a.wait(&join)?;
            inside = Some(if joins { join } else { a.record()? });
            Ok(())
        });
        drop(graph.expect("recorded"));
        let inside = inside.expect("recorded");
        assert_eq!(inside.is_done(), Ok(false));
        c.wait(&inside).expect("enqueued");
        let behind = c.record().expect("recorded");
        assert!(is_held(&behind));
        held.send(()).expect("held");
        c.synchronize(LIMIT).expect("ran");
        assert_eq!((inside.is_done(), behind.is_done()), (Ok(true), Ok(true)));
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_block_freed_in_capture_waits_for_earlier_work() {
    // The operation is on the stream of a recorded use, or on the block's stream, which is
    // recorded.
    for is_use in [true, false] {
        let (_, pool, [compute, comm]) = rig(["compute", "comm"]);
        let mut block = floats(&pool, if is_use { &comm } else { &compute }, 300, 1.0);
        let ptr = slice(&block).as_ptr();
        let held = hold(&compute);
        let graph = compute.capture(|| {
            block.record_use(&compute)?;
            drop(block);
            Ok(())
        });
        drop(graph.expect("recorded"));
        // The other stream gets the same memory, and so waits.
        let block = pool
            .allocate(300, DType::F32, Purpose::Params, &comm)
            .expect("room");
        assert_eq!(slice(&block).as_ptr(), ptr);
        let after = comm.record().expect("recorded");
        assert!(is_held(&after));
        held.send(()).expect("held");
        comm.synchronize(LIMIT).expect("ran");
    }
}
