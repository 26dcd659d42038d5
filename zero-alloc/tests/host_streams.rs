//! What the host's streams and events promise.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use zero_alloc::device::{Device, DeviceError, Event, Stream};
use zero_alloc::host::{Gate, HostDevice, HostStream, Timeline};

const LIMIT: Duration = Duration::from_secs(60);

fn stream(name: &str) -> HostStream {
    HostDevice::new().create_stream(name).expect("a stream")
}

/// Enqueues an operation that runs only when the gate opens.
fn hold(stream: &HostStream) -> Arc<Gate<bool>> {
    let gate = Arc::new(Gate::new(false));
    let held = Arc::clone(&gate);
    let op = move || held.wait_until(LIMIT, || "the test".into(), |open| open.then_some(()));
    stream.enqueue("hold", op).expect("enqueued");
    gate
}

#[test]
fn operations_run_in_order_and_synchronize_sees_them() {
    let stream = stream("compute");
    let seen = Arc::new(AtomicUsize::new(0));
    for i in 0..100 {
        let seen = Arc::clone(&seen);
        let op = move || {
            assert_eq!(seen.fetch_add(1, Ordering::Relaxed), i);
            Ok(())
        };
        stream.enqueue("count", op).expect("enqueued");
    }
    stream.synchronize(LIMIT).expect("all ran");
    assert_eq!(seen.load(Ordering::Relaxed), 100);
}

#[test]
fn a_stream_waits_for_another_ones_event() {
    let (a, b) = (stream("a"), stream("b"));
    let gate = hold(&a);
    let event = a.record().expect("recorded");
    b.wait(&event).expect("enqueued");
    let done = b.record().expect("recorded");
    assert_eq!(event.is_done(), Ok(false));
    assert_eq!(done.is_done(), Ok(false));
    gate.update(|open| *open = true);
    done.synchronize(LIMIT).expect("reached");
    assert_eq!(event.is_done(), Ok(true));
}

#[test]
fn a_failure_names_stream_and_operation_skips_the_rest_and_spreads_by_waits() {
    let (a, b) = (stream("a"), stream("b"));
    a.enqueue("fail", || Err(DeviceError::Driver { call: "cuda", message: "no".into() })).expect("enqueued");
    let skipped = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&skipped);
    a.enqueue("later", move || {
        count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    })
    .expect("enqueued");
    let event = a.record().expect("recorded");
    b.wait(&event).expect("enqueued");
    let expected = DeviceError::Operation { stream: "a".into(), op: "fail".into(), message: "cuda: no".into() };
    assert_eq!(a.synchronize(LIMIT), Err(expected.clone()));
    assert_eq!(event.is_done(), Err(expected.clone()));
    assert_eq!(b.synchronize(LIMIT), Err(expected.clone()));
    assert_eq!(skipped.load(Ordering::Relaxed), 0);
    // And again, when the worker sleeps.
    assert_eq!(a.record().expect("recorded").synchronize(LIMIT), Err(expected));
}

#[test]
fn a_panic_becomes_an_error_that_names_it() {
    let stream = stream("compute");
    stream.enqueue("explode", || panic!("rank {}", 3)).expect("enqueued");
    let expected = DeviceError::Panicked { stream: "compute".into(), op: "explode".into(), message: "rank 3".into() };
    assert_eq!(stream.synchronize(LIMIT), Err(expected));
}

#[test]
fn a_wait_has_a_limit() {
    let stream = stream("slow");
    let gate = hold(&stream);
    let limit = Duration::from_millis(5);
    assert_eq!(stream.synchronize(limit), Err(DeviceError::TimedOut { what: "stream slow".into(), limit }));
    gate.update(|open| *open = true);
    stream.synchronize(LIMIT).expect("ran");
}

#[test]
fn a_closed_stream_finishes_and_refuses_more() {
    let (stream, other) = (stream("old"), stream("other"));
    let gate = hold(&stream);
    let before = other.record().expect("recorded");
    stream.close();
    let closed = Err(DeviceError::Closed { stream: "old".into() });
    assert_eq!(stream.enqueue("late", || Ok(())), closed);
    assert_eq!(stream.wait(&before), closed);
    let end = stream.record().expect("the end can be waited for");
    assert_eq!(end.is_done(), Ok(false));
    gate.update(|open| *open = true);
    stream.synchronize(LIMIT).expect("what was enqueued ran");
}

#[test]
fn what_is_enqueued_runs_though_the_handles_are_gone() {
    let stream = stream("short");
    let gate = hold(&stream);
    let done = stream.record().expect("recorded");
    drop(stream);
    gate.update(|open| *open = true);
    done.synchronize(LIMIT).expect("reached");
}

#[test]
fn a_timeline_shows_what_ran_where() {
    let timeline = Timeline::new();
    let device = HostDevice::new().with_timeline(timeline.clone());
    let (a, b) = (device.create_stream("a").expect("a stream"), device.create_stream("b").expect("a stream"));
    let gate = hold(&a);
    b.wait(&a.record().expect("recorded")).expect("enqueued");
    b.enqueue("after", || Ok(())).expect("enqueued");
    gate.update(|open| *open = true);
    b.synchronize(LIMIT).expect("ran");
    let spans = timeline.take();
    let find = |label| spans.iter().find(|span| span.label == label).expect("recorded");
    assert_eq!((&*find("hold").stream, &*find("after").stream), ("a", "b"));
    assert!(find("hold").start <= find("hold").end);
    assert!(find("hold").end <= find("after").start);
    assert!(timeline.spans().is_empty());
}
