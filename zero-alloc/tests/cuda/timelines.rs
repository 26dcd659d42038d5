//! Times of operations, measured on the device.

use std::time::Duration;

use zero_alloc::Pool;
use zero_alloc::cuda::CudaStream;
use zero_alloc::device::{Device, DeviceError, Stream};
use zero_alloc::host::Monitor;
use zero_alloc::timeline::{OpSpan, Timeline};

use crate::kernels::{launch, scale_add};
use crate::{LIMIT, floats, open, slice};

fn find<'a>(spans: &'a [OpSpan], label: &str) -> &'a OpSpan {
    spans
        .iter()
        .find(|span| span.label == label)
        .unwrap_or_else(|| panic!("{label} is not among {spans:?}"))
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_timeline_shows_operations() {
    let timeline = Timeline::new();
    let device = open().with_timeline(timeline.clone());
    let (a, b) = (
        device.create_stream("a").expect("a stream"),
        device.create_stream("b").expect("a stream"),
    );
    let pool = Pool::new(device.clone(), 8 << 20);
    let function = scale_add(&device);
    let x = floats(&pool, &a, 100_000, 1.0);
    a.synchronize(LIMIT).expect("ran");
    let uploaded = timeline.take();
    assert_eq!(&*find(&uploaded, "upload").stream, "a");

    // Two flags: the operation runs; it may end.
    let gate = std::sync::Arc::new(Monitor::new((false, false)));
    let held = std::sync::Arc::clone(&gate);
    let op = move || {
        held.update(|(runs, _)| *runs = true);
        held.wait_until(LIMIT, || "the test".into(), |(_, open)| open.then_some(()))
    };

    a.enqueue_host("hold", op).expect("enqueued");
    b.wait(&a.record().expect("recorded")).expect("enqueued");
    b.labelled("adam", || launch(&function, &b, slice(&x), 2.0, 0.0))
        .expect("enqueued");
    device.fill_zero(&b, slice(&x)).expect("enqueued");
    // No operation has ended, and reading the timeline does not wait.
    assert!(timeline.spans().is_empty(), "{:?}", timeline.spans());
    gate.wait_until(
        LIMIT,
        || "the device".into(),
        |(runs, _)| runs.then_some(()),
    )
    .expect("it runs");
    let held_for = Duration::from_millis(30);
    std::thread::sleep(held_for);
    gate.update(|(_, open)| *open = true);
    b.synchronize(LIMIT).expect("ran");

    let spans = timeline.take();
    assert_eq!(spans.len(), 4, "{spans:?}");
    assert!(spans.is_sorted_by_key(|span| span.end));
    let hold = find(&spans, "hold");
    let wait = find(&spans, "wait");
    let adam = find(&spans, "adam");
    let zero = find(&spans, "fill_zero");
    assert_eq!(
        [&*hold.stream, &*wait.stream, &*adam.stream, &*zero.stream],
        ["a", "b", "b", "b"]
    );
    // Above the resolution of the device's clock.
    let slack = Duration::from_millis(1);
    assert!(
        hold.end - hold.start + slack > held_for && hold.end < wait.end + slack,
        "{spans:?}"
    );
    assert!(
        wait.end <= adam.start && adam.start < adam.end && adam.end <= zero.start,
        "{spans:?}"
    );
    assert!(timeline.take().is_empty());
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_time_is_that_of_the_second_run() {
    let device = open();
    let stream = device.create_stream("a").expect("a stream");
    let mut naps = [Duration::ZERO, Duration::from_millis(2)].into_iter();
    let enqueue = || {
        let nap = naps.next().expect("two runs");
        let op = move || {
            std::thread::sleep(nap);
            Ok(())
        };
        stream.enqueue_host("nap", op)
    };

    let time = stream.time("timing", LIMIT, enqueue).expect("ran");
    assert!(
        time > Duration::from_millis(1) && naps.next().is_none(),
        "{time:?}"
    );
    let failed = || {
        Err(DeviceError::Driver {
            call: "mine",
            message: "no".into(),
        })
    };

    assert!(stream.time("timing", LIMIT, failed).is_err());
}

#[test]
#[ignore = "needs a CUDA device"]
fn failed_cuda_operation_has_no_span() {
    let timeline = Timeline::new();
    let device = open().with_timeline(timeline.clone());
    let stream = device.create_stream("a").expect("a stream");
    let fails = |stream: &CudaStream| {
        stream.labelled("fails", || {
            Err::<(), _>(DeviceError::Driver {
                call: "mine",
                message: "no".into(),
            })
        })
    };
    let expected = DeviceError::Operation {
        stream: "a".into(),
        op: "fails".into(),
        cause: "mine: no".into(),
    };
    assert_eq!(fails(&stream), Err(expected.clone()));
    assert_eq!(stream.synchronize(LIMIT), Err(expected));
    assert!(timeline.take().is_empty());
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_times_stay_exact_for_seconds() {
    let timeline = Timeline::new();
    let device = open().with_timeline(timeline.clone());
    let stream = device.create_stream("a").expect("a stream");
    let pool = Pool::new(device.clone(), 8 << 20);
    let x = floats(&pool, &stream, 1000, 1.0);
    let mut known = Vec::new();

    // Milliseconds in fp32 would be too coarse if all were counted from the first.
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(1_100));
        let before = timeline.now();
        device.fill_zero(&stream, slice(&x)).expect("enqueued");
        stream.synchronize(LIMIT).expect("ran");
        known.push((before, timeline.now()));
    }

    let spans: Vec<_> = timeline
        .take()
        .into_iter()
        .filter(|span| span.label == "fill_zero")
        .collect();
    assert_eq!(spans.len(), known.len());
    // On a busy host the clocks are related imprecisely; a wrong anchor would be off by a second.
    let slack = Duration::from_millis(500);

    for (span, (before, after)) in spans.iter().zip(known) {
        assert!(
            before < span.start + slack && span.end < after + slack,
            "{before:?} {span:?} {after:?}"
        );
    }
}
