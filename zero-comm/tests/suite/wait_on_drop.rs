//! `WaitOnDrop`: memory outlives the streams that use it.

use std::process::Command;
use std::sync::Arc;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use zero_alloc::device::Device;
#[cfg(feature = "cuda")]
use zero_alloc::device::{DeviceError, Stream};
use zero_alloc::host::HostDevice;
use zero_comm::{CommOptions, Communicator, Solo, WaitOnDrop};

use crate::common::{LIMIT, on_ranks, view};

#[test]
fn earlier_work_ends_before_the_drop() {
    let device = HostDevice::new();
    let first = device.create_stream("first").unwrap();
    let second = device.create_stream("second").unwrap();
    let comm: Arc<dyn Communicator<HostDevice>> = Arc::new(Solo::new(device));
    let ended = Arc::new(AtomicBool::new(false));
    {
        let _wait = WaitOnDrop::new(comm.clone(), [first, second.clone()], LIMIT);
        let end = Arc::clone(&ended);
        let work = move || {
            thread::sleep(Duration::from_millis(20));
            end.store(true, Ordering::SeqCst);
            Ok(())
        };
        second.enqueue("work", work).unwrap();
    }
    assert!(ended.load(Ordering::SeqCst));
    assert_eq!(comm.failure(), None);
}

/// A rank leaves while its collective waits for another rank that does not call it.
#[test]
fn missing_rank_ends_in_an_abort() {
    let left = Barrier::new(2);
    let failures = on_ranks(2, CommOptions::default().limit(LIMIT), |comm, streams| {
        let mut values = [0f32; 3];
        if comm.rank() == 0 {
            let _wait = WaitOnDrop::new(
                comm.clone(),
                [streams.comm.clone()],
                Duration::from_millis(20),
            );
            let values = view(&mut values);
            comm.all_gather(&streams.comm, values.slice(0..1), values.slice(0..2))
                .unwrap();
        }
        left.wait();
        comm.failure().unwrap().to_string()
    });

    for failure in failures {
        assert!(
            failure.contains("rank 0") && failure.contains("did not end within 20ms"),
            "{failure}"
        );
    }
}

/// The work of a stream that never ends: memory cannot be freed.
#[test]
#[cfg_attr(miri, ignore = "starts a process")]
fn endless_work_ends_the_process() {
    const CHILD: &str = "ZERO_TEST_ENDLESS_WORK";
    if std::env::var_os(CHILD).is_some() {
        let device = HostDevice::new();
        let stream = device.create_stream("endless").unwrap();
        let comm = Arc::new(Solo::new(device));
        stream
            .enqueue("work", || {
                loop {
                    thread::park()
                }
            })
            .unwrap();
        drop(WaitOnDrop::new(comm, [stream], Duration::from_millis(10)));
        return;
    }

    let test = "wait_on_drop::endless_work_ends_the_process";
    let mut child = Command::new(std::env::current_exe().unwrap());
    let output = child
        .args([test, "--exact", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && text.contains("stream endless did not end within 10s"),
        "{text}"
    );
}

/// The error of a stream comes before the end of its earlier work, which ends only when its
/// communicator is aborted.
#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs a CUDA device"]
fn cuda_poisoned_stream_is_waited_for() {
    let device = zero_alloc::cuda::CudaDevice::open(0).unwrap();
    let stream = device.create_stream("compute").unwrap();
    let comm: Arc<dyn Communicator<_>> = Arc::new(Solo::new(device));
    let ended = Arc::new(AtomicBool::new(false));
    let end = Arc::clone(&ended);
    let aborted = Arc::downgrade(&comm);
    let (begin, begun) = std::sync::mpsc::channel();

    let work = move || {
        let _receiver = begin.send(());
        while aborted
            .upgrade()
            .is_some_and(|comm| comm.failure().is_none())
        {
            thread::sleep(Duration::from_millis(1));
        }
        end.store(true, Ordering::SeqCst);
        Ok(())
    };

    stream.enqueue_host("work", work).unwrap();
    begun.recv_timeout(LIMIT).unwrap();
    stream.poison(DeviceError::Closed {
        stream: "on purpose".to_owned(),
    });
    drop(WaitOnDrop::new(
        comm.clone(),
        [stream],
        Duration::from_secs(3),
    ));
    assert!(ended.load(Ordering::SeqCst));
}
