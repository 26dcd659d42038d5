//! Streams that wait for events of the host.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use zero_alloc::cuda::CudaStream;
use zero_alloc::device::{Device, DeviceError, Event, Stream};
use zero_alloc::host::{HostDevice, HostStream};

use crate::kernels::{launch, scale_add};
use crate::{LIMIT, floats, open, read, rig, slice};

/// A host stream whose operation lasts until something is sent or the sender is dropped, and then
/// returns `result`.
fn held(result: Result<(), DeviceError>) -> (HostStream, Sender<()>) {
    let host = HostDevice::new().create_stream("adam").expect("a stream");
    let (release, held) = channel::<()>();
    let op = move || {
        let _ = held.recv_timeout(LIMIT);
        result
    };
    host.enqueue("update", op).expect("enqueued");
    (host, release)
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_stream_waits_for_the_host() {
    let (device, pool, [compute, busy]) = rig(["compute", "busy"]);
    let function = scale_add(&device);
    let x = floats(&pool, &compute, 10, 1.0);

    // More waits than there are words: they are used again.
    for _ in 0..600 {
        let (host, release) = held(Ok(()));
        device
            .wait_for_host(&compute, &host.record().expect("recorded"), LIMIT)
            .expect("enqueued");
        launch(&function, &compute, slice(&x), 1.0, 1.0).expect("enqueued");
        let after = compute.record().expect("recorded");
        assert_eq!(after.is_done(), Ok(false));
        release.send(()).expect("held");
        after.synchronize(LIMIT).expect("ran");
    }

    assert_eq!(read(&device, &compute, &x), [601.0; 10]);

    // No host operation: the driver's thread is busy with one that ends only after the wait.
    let (host, release) = held(Ok(()));
    let (open_gate, gate) = channel::<()>();
    let hold = move || {
        let _ = gate.recv_timeout(LIMIT);
        Ok(())
    };

    busy.enqueue_host("hold", hold).expect("enqueued");
    device
        .wait_for_host(&compute, &host.record().expect("recorded"), LIMIT)
        .expect("enqueued");
    release.send(()).expect("held");
    compute.synchronize(LIMIT).expect("ran");
    assert!(busy.synchronize(Duration::ZERO).is_err());
    open_gate.send(()).expect("held");
    busy.synchronize(LIMIT).expect("ran");
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_waits_beyond_the_words_work() {
    let device = open();
    let names = ["compute", "copies", "busy"];
    let [compute, copies, busy] = names.map(|name| device.create_stream(name).expect("a stream"));
    // The event is behind two host operations of another stream. Should a wait occupy the driver's
    // thread while the first runs, the second never does.
    let nap = || {
        std::thread::sleep(Duration::from_millis(100));
        Ok(())
    };

    busy.enqueue_host("nap", nap).expect("enqueued");
    busy.enqueue_host("after the nap", || Ok(()))
        .expect("enqueued");
    let host = HostDevice::new().create_stream("adam").expect("a stream");
    device
        .host_waits(&host, &busy.record().expect("recorded"), LIMIT)
        .expect("enqueued");
    let event = host.record().expect("recorded");

    for _ in 0..600 {
        device
            .wait_for_host(&compute, &event, LIMIT)
            .expect("enqueued");
    }

    device
        .wait_for_host(&copies, &event, LIMIT)
        .expect("enqueued");
    compute.synchronize(LIMIT).expect("ran");
    copies.synchronize(LIMIT).expect("ran");
    assert_eq!(event.is_done(), Ok(true));
    // A reached event is not waited for.
    device
        .wait_for_host(&compute, &event, Duration::ZERO)
        .expect("nothing to wait for");
    compute.synchronize(LIMIT).expect("sound");
}

#[test]
#[ignore = "needs a CUDA device"]
fn failed_host_stream_poisons_its_cuda_waiter() {
    let device = open();
    // The host fails while the stream waits, or before.
    for waits in [true, false] {
        let compute: CudaStream = device.create_stream("compute").expect("a stream");
        let (host, release) = held(Err(DeviceError::Driver {
            call: "io",
            message: "no".into(),
        }));
        let event = host.record().expect("recorded");
        let before = compute.record().expect("recorded");
        if !waits {
            drop(release);
            assert!(host.synchronize(LIMIT).is_err());
            device
                .wait_for_host(&compute, &event, LIMIT)
                .expect("enqueued");
        } else {
            device
                .wait_for_host(&compute, &event, LIMIT)
                .expect("enqueued");
            drop(release);
        }
        let failure = compute.synchronize(LIMIT).expect_err("the host failed");
        let expected = DeviceError::Operation {
            stream: "adam".into(),
            op: "update".into(),
            cause: "io: no".into(),
        };
        assert_eq!(failure, expected);
        assert_eq!(before.synchronize(LIMIT), Ok(()));
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_wait_for_the_host_has_a_limit() {
    let device = open();
    let compute = device.create_stream("compute").expect("a stream");
    let (host, release) = held(Ok(()));
    let limit = Duration::from_millis(20);
    device
        .wait_for_host(&compute, &host.record().expect("recorded"), limit)
        .expect("enqueued");
    let error = compute
        .synchronize(LIMIT)
        .expect_err("the host is late")
        .to_string();
    assert!(
        error.contains("wait for the host") && error.contains("stream adam took longer than 20ms"),
        "{error}"
    );
    release.send(()).expect("held");
    host.synchronize(LIMIT).expect("ran");
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_wait_ends_at_its_limit_while_no_thread_polls() {
    let device = open();
    let compute = device.create_stream("compute").expect("a stream");
    let (host, release) = held(Ok(()));
    device
        .wait_for_host(
            &compute,
            &host.record().expect("recorded"),
            Duration::from_millis(20),
        )
        .expect("enqueued");

    let (reached, over) = channel::<()>();
    let after = move || {
        let _ = reached.send(());
        Ok(())
    };

    compute.enqueue_host("after", after).expect("enqueued");
    // Sent by the operation, or dropped with it.
    assert_ne!(over.recv_timeout(LIMIT), Err(RecvTimeoutError::Timeout));
    assert!(
        compute
            .synchronize(LIMIT)
            .expect_err("the host is late")
            .to_string()
            .contains("longer than 20ms")
    );

    drop(release);
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_wait_outlives_its_handles() {
    let device = open();
    let (host, release) = held(Ok(()));
    let stream = device.create_stream("short").expect("a stream");
    device
        .wait_for_host(&stream, &host.record().expect("recorded"), LIMIT)
        .expect("enqueued");
    let done = stream.record().expect("recorded");
    drop((stream, host));
    assert_eq!(done.is_done(), Ok(false));
    drop(release);
    done.synchronize(LIMIT).expect("reached");
}

#[test]
#[ignore = "needs a CUDA device"]
fn refused_wait_in_cuda_capture() {
    let device = open();
    let compute = device.create_stream("compute").expect("a stream");
    let (host, release) = held(Ok(()));
    let event = host.record().expect("recorded");
    let refused = compute.capture(|| device.wait_for_host(&compute, &event, LIMIT));
    assert!(
        refused
            .expect_err("refused")
            .to_string()
            .contains("is recorded into a graph")
    );
    drop(release);
    compute.synchronize(LIMIT).expect("sound");
}
