//! Properties of host streams beyond the conformance suite.

use std::sync::Arc;
use std::time::Duration;

use zero_alloc::device::{AnySlice, DType, Device, DeviceError, Event, Memory, Stream};
use zero_alloc::host::{HostDevice, HostStream, Monitor, Timeline};

const LIMIT: Duration = Duration::from_secs(60);

fn stream(name: &str) -> HostStream {
    HostDevice::new().create_stream(name).expect("a stream")
}

/// Enqueues an operation that blocks the stream until the monitor becomes true.
fn hold(stream: &HostStream) -> Arc<Monitor<bool>> {
    let monitor = Arc::new(Monitor::new(false));
    let held = Arc::clone(&monitor);
    let op = move || held.wait_until(LIMIT, || "the test".into(), |open| open.then_some(()));
    stream.enqueue("hold", op).expect("enqueued");
    monitor
}

#[test]
fn stream_accepts_any_name() {
    for device in [HostDevice::new(), HostDevice::seeded(1)] {
        for name in ["", "two\0parts", "größe"] {
            let stream = device.create_stream(name).expect("a stream");
            assert_eq!(stream.name(), name);
            stream.enqueue("nothing", || Ok(())).expect("enqueued");
            stream.synchronize(LIMIT).expect("what was enqueued ran");
        }
    }
}

/// The stream reads the slice while the caller's buffer is borrowed.
#[test]
fn download_onto_its_source_is_refused() {
    let (device, stream) = (HostDevice::new(), stream("copy"));
    let mut bytes = vec![1u8; 100];
    // SAFETY: refused before anything accesses it; initialized, and valid until the end of the test.
    let slice = unsafe { AnySlice::from_raw_parts(bytes.as_mut_ptr().wrapping_add(30), 50, DType::U8, device.id()) };
    for at in [0, 30, 50] {
        let refused = device.download(&stream, slice, &mut bytes[at..at + 50], LIMIT);
        assert_eq!(refused, Err(DeviceError::Overlap { bytes: 50 }), "{at}");
    }
}

#[test]
fn closed_stream_finishes_its_queue() {
    let (stream, other) = (stream("old"), stream("other"));
    let monitor = hold(&stream);
    let before = other.record().expect("recorded");
    stream.close();
    let closed = Err(DeviceError::Closed { stream: "old".into() });
    assert_eq!(stream.enqueue("late", || Ok(())), closed);
    assert_eq!(stream.wait(&before), closed);
    let end = stream.record().expect("the end can be waited for");
    assert_eq!(end.is_done(), Ok(false));
    monitor.update(|open| *open = true);
    stream.synchronize(LIMIT).expect("what was enqueued ran");
}

#[test]
fn timeline_shows_operations() {
    let timeline = Timeline::new();
    let device = HostDevice::new().with_timeline(timeline.clone());
    let (a, b) = (device.create_stream("a").expect("a stream"), device.create_stream("b").expect("a stream"));
    let monitor = hold(&a);
    b.wait(&a.record().expect("recorded")).expect("enqueued");
    b.enqueue("after", || Ok(())).expect("enqueued");
    monitor.update(|open| *open = true);
    b.synchronize(LIMIT).expect("ran");
    let spans = timeline.take();
    let find = |label| spans.iter().find(|span| span.label == label).expect("recorded");
    assert_eq!((&*find("hold").stream, &*find("after").stream), ("a", "b"));
    assert!(find("hold").start <= find("hold").end);
    assert!(find("hold").end <= find("after").start);
    assert!(timeline.spans().is_empty());
}

/// The phase is the one of the time of enqueuing, not of running.
#[test]
fn operations_keep_their_phase() {
    let timeline = Timeline::new();
    let stream = HostDevice::new().with_timeline(timeline.clone()).create_stream("a").expect("a stream");
    let monitor = hold(&stream);
    assert_eq!(timeline.set_phase("later"), "");
    stream.enqueue("in a phase", || Ok(())).expect("enqueued");
    assert_eq!(timeline.set_phase("last"), "later");
    monitor.update(|open| *open = true);
    stream.synchronize(LIMIT).expect("ran");
    let spans = timeline.take();
    let phases: Vec<_> = spans.iter().map(|span| (span.label, span.phase)).collect();
    assert_eq!(phases, [("hold", ""), ("in a phase", "later")]);
    assert!(spans.iter().all(|span| span.enqueued <= span.start));
}
