//! Properties of host streams beyond the conformance suite.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use zero_alloc::device::{
    AnySlice, DType, Device, DeviceError, DeviceId, DeviceKind, Event, Memory, Stream,
};
use zero_alloc::host::{HostDevice, HostStream, Monitor, Timeline};
use zero_alloc::testing::Simulated;
use zero_alloc::{Pool, Purpose};

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
    let device = HostDevice::new();
    let stream = stream("copy");
    let mut bytes = vec![1u8; 100];
    // SAFETY: refused before anything accesses it; initialized, and valid until the end of the
    // test.
    let slice = unsafe {
        AnySlice::from_raw_parts(
            bytes.as_mut_ptr().wrapping_add(30),
            50,
            DType::U8,
            device.id(),
        )
    };
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
    let closed = Err(DeviceError::Closed {
        stream: "old".into(),
    });
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
    let (a, b) = (
        device.create_stream("a").expect("a stream"),
        device.create_stream("b").expect("a stream"),
    );
    let monitor = hold(&a);
    b.wait(&a.record().expect("recorded")).expect("enqueued");
    b.enqueue("after", || Ok(())).expect("enqueued");
    monitor.update(|open| *open = true);
    b.synchronize(LIMIT).expect("ran");
    let spans = timeline.take();
    let find = |label| {
        spans
            .iter()
            .find(|span| span.label == label)
            .expect("recorded")
    };

    assert_eq!((&*find("hold").stream, &*find("after").stream), ("a", "b"));
    assert!(find("hold").start <= find("hold").end);
    assert!(find("hold").end <= find("after").start);
    assert!(timeline.spans().is_empty());
}

/// The phase is the one of the time of enqueuing, not of running.
#[test]
fn operations_keep_their_phase() {
    let timeline = Timeline::new();
    let stream = HostDevice::new()
        .with_timeline(timeline.clone())
        .create_stream("a")
        .expect("a stream");
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

/// Host memory with the id of pinned memory.
#[derive(Debug)]
struct Pinned(HostDevice);

// SAFETY: the host device's memory, which keeps the contract.
unsafe impl Memory for Pinned {
    fn id(&self) -> DeviceId {
        DeviceId::PINNED
    }

    fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        self.0.allocate(bytes)
    }

    unsafe fn deallocate(&self, ptr: NonNull<u8>, bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.0.deallocate(ptr, bytes) };
    }

    fn granularity_bytes(&self) -> usize {
        self.0.granularity_bytes()
    }
}

#[test]
fn blocks_carry_the_id_of_their_memory() {
    for device in [HostDevice::new(), HostDevice::seeded(1)] {
        let plain = Pool::new(device.clone(), 1 << 20);
        let device = device
            .with_memory(Arc::new(Pinned(HostDevice::new())))
            .expect("host memory");
        assert_eq!(
            (device.id(), device.kind()),
            (DeviceId::PINNED, DeviceKind::Host)
        );
        let stream = device.create_stream("compute").expect("a stream");
        let pool = Pool::new(device.clone(), 1 << 20);
        let block = pool
            .allocate(100, DType::F32, Purpose::Params, &stream)
            .expect("room");
        let other = plain
            .allocate(100, DType::F32, Purpose::Params, &stream)
            .expect("room");
        // SAFETY: the blocks live to the end of the test, and one stream does everything.
        let pinned = unsafe { block.slice() };
        // SAFETY: as above.
        let other = unsafe { other.slice() };
        assert_eq!(
            (pinned.device(), other.device()),
            (DeviceId::PINNED, DeviceId::HOST)
        );
        let values = [7u8; 400];
        device.upload(&stream, &values, pinned, LIMIT).expect("ran");
        device.copy(&stream, pinned, other).expect("enqueued");
        device.fill_zero(&stream, pinned).expect("enqueued");
        let mut seen = [1u8; 400];
        device
            .download(&stream, pinned, &mut seen, LIMIT)
            .expect("ran");
        assert_eq!(seen, [0; 400]);
        device.copy(&stream, other, pinned).expect("enqueued");
        device
            .download(&stream, pinned, &mut seen, LIMIT)
            .expect("ran");
        assert_eq!(seen, values);
        assert!(device.violations().is_empty());
    }
}

#[test]
fn memory_of_another_device_is_refused() {
    let simulated = Simulated::new(1 << 20, 4096);
    let what = "HostDevice::with_memory";
    let expected = DeviceId::HOST;
    let got = simulated.id();
    let refused = HostDevice::new().with_memory(Arc::new(simulated)).map(drop);
    assert_eq!(
        refused,
        Err(DeviceError::AnotherDevice {
            what,
            expected,
            got
        })
    );
}

/// Modelled times follow from costs, order, events and the host's waits, on a thread whose time
/// begins at zero.
#[test]
fn modelled_times_follow_the_order() {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let ms = Duration::from_millis;
            let device = HostDevice::modelled(move |stream, label| match (stream, label) {
                (_, "copy") => ms(3),
                ("slow", _) => ms(10),
                _ => ms(1),
            });
            let slow = device.create_stream("slow").unwrap();
            let fast = device.create_stream("fast").unwrap();
            for label in ["copy", "work"] {
                slow.enqueue(label, || Ok(())).unwrap();
            }
            fast.enqueue("before", || Ok(())).unwrap();
            fast.wait(&slow.record().unwrap()).unwrap();
            fast.enqueue("after", || Ok(())).unwrap();
            fast.synchronize(LIMIT).unwrap();
            // The host has waited for the time 14.
            slow.enqueue("later", || Ok(())).unwrap();
            slow.synchronize(LIMIT).unwrap();
            let mut spans = device.modelled_spans();
            spans.sort_by_key(|span| (span.start, span.end));
            let spans: Vec<_> = spans
                .iter()
                .map(|s| (s.label, s.start.as_millis(), s.end.as_millis()))
                .collect();
            assert_eq!(
                spans,
                [
                    ("before", 0, 1),
                    ("copy", 0, 3),
                    ("work", 3, 13),
                    ("after", 13, 14),
                    ("later", 14, 24)
                ]
            );
        });
    });
}
