//! Streams and events.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use zero_alloc::device::{DeviceError, Event, Stream};

use super::backend::{Backend, LIMIT, open};

pub(crate) fn operations_run_in_order<B: Backend>(backend: &B) {
    let stream = B::stream(&backend.device(), "compute");
    let seen = Arc::new(AtomicUsize::new(0));
    for i in 0..100 {
        let seen = Arc::clone(&seen);
        let op = move || {
            assert_eq!(seen.fetch_add(1, Ordering::Relaxed), i);
            Ok(())
        };
        B::enqueue(&stream, "count", op).expect("enqueued");
    }
    stream.synchronize(LIMIT).expect("all ran");
    assert_eq!(seen.load(Ordering::Relaxed), 100);
}

pub(crate) fn stream_waits_for_an_event<B: Backend>(backend: &B) {
    let device = backend.device();
    let a = B::stream(&device, "a");
    let b = B::stream(&device, "b");
    assert_ne!(a.id(), b.id());
    assert_eq!((a.name(), a.id()), ("a", a.clone().id()));
    let monitor = B::hold(&a);
    let event = a.record().expect("recorded");
    b.wait(&event).expect("enqueued");
    let done = b.record().expect("recorded");
    assert_eq!(event.is_done(), Ok(false));
    assert_eq!(done.is_done(), Ok(false));
    open(&monitor);
    done.synchronize(LIMIT).expect("reached");
    assert_eq!(event.is_done(), Ok(true));
    assert_eq!(event.clone().is_done(), Ok(true));
}

fn failure() -> DeviceError {
    DeviceError::Driver {
        call: "cuda",
        message: "no".into(),
    }
}

pub(crate) fn failure_is_named_and_spreads<B: Backend>(backend: &B) {
    let device = backend.device();
    let [a, b, c] = ["a", "b", "c"].map(|name| B::stream(&device, name));
    // Blocked, so that the waits are enqueued before the failure.
    let monitor = B::hold(&a);
    B::enqueue(&a, "fail", || Err(failure())).expect("enqueued");
    let skipped = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&skipped);
    let later = move || {
        count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    };

    B::enqueue(&a, "later", later).expect("enqueued");
    let event = a.record().expect("recorded");
    b.wait(&event).expect("enqueued");
    c.wait(&b.record().expect("recorded")).expect("enqueued");
    open(&monitor);
    let expected = DeviceError::Operation {
        stream: "a".into(),
        op: "fail".into(),
        cause: "cuda: no".into(),
    };

    assert_eq!(a.synchronize(LIMIT), Err(expected.clone()));
    assert_eq!(event.is_done(), Err(expected.clone()));
    assert_eq!(event.synchronize(LIMIT), Err(expected.clone()));
    assert_eq!(b.synchronize(LIMIT), Err(expected.clone()));
    assert_eq!(c.synchronize(LIMIT), Err(expected.clone()));
    assert_eq!(skipped.load(Ordering::Relaxed), 0);
    // Events and waits after the failure return it, too.
    let again = a.record().expect("recorded");
    assert_eq!(again.synchronize(LIMIT), Err(expected.clone()));
    let d = B::stream(&device, "d");
    d.wait(&again).expect("enqueued");
    assert_eq!(d.synchronize(LIMIT), Err(expected));
}

pub(crate) fn events_before_a_failure_succeed<B: Backend>(backend: &B) {
    let device = backend.device();
    let a = B::stream(&device, "a");
    let b = B::stream(&device, "b");
    let monitor = B::hold(&a);
    let before = a.record().expect("recorded");
    b.wait(&before).expect("enqueued");
    B::enqueue(&a, "fail", || Err(failure())).expect("enqueued");
    open(&monitor);
    assert!(a.synchronize(LIMIT).is_err());
    assert_eq!(before.synchronize(LIMIT), Ok(()));
    assert_eq!(b.synchronize(LIMIT), Ok(()));
}

pub(crate) fn panic_becomes_an_error<B: Backend>(backend: &B) {
    let stream = B::stream(&backend.device(), "compute");
    // Without the panic hook, whose words would read as a failure of this test.
    B::enqueue(&stream, "explode", || {
        std::panic::resume_unwind(Box::new("rank 3".to_owned()))
    })
    .expect("enqueued");
    let expected = DeviceError::Panicked {
        stream: "compute".into(),
        op: "explode".into(),
        message: "rank 3".into(),
    };
    assert_eq!(stream.synchronize(LIMIT), Err(expected));
}

pub(crate) fn wait_has_a_limit<B: Backend>(backend: &B) {
    let stream = B::stream(&backend.device(), "slow");
    let monitor = B::hold(&stream);
    let limit = Duration::from_millis(5);
    let late = Err(DeviceError::TimedOut {
        what: "stream slow".into(),
        limit,
    });
    assert_eq!(stream.synchronize(limit), late);
    assert_eq!(stream.record().expect("recorded").synchronize(limit), late);
    open(&monitor);
    // An expired limit does not poison the stream.
    stream.synchronize(LIMIT).expect("ran");
}

pub(crate) fn operations_outlive_their_handles<B: Backend>(backend: &B) {
    let device = backend.device();
    let stream = B::stream(&device, "short");
    let monitor = B::hold(&stream);
    let done = stream.record().expect("recorded");
    drop(stream);
    // First, because the drop of a device may wait for it.
    open(&monitor);
    drop(device);
    done.synchronize(LIMIT).expect("reached");
}
