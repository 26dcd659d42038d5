//! When operations ran, measured on the device.

use zero_alloc::Pool;
use zero_alloc::cuda::CudaStream;
use zero_alloc::device::{Device, DeviceError, Stream};
use zero_alloc::host::Gate;
use zero_alloc::timeline::{OpSpan, Timeline};

use crate::kernels::{launch, scale_add};
use crate::{LIMIT, floats, open, slice};

fn find<'a>(spans: &'a [OpSpan], label: &str) -> &'a OpSpan {
    spans.iter().find(|span| span.label == label).unwrap_or_else(|| panic!("{label} is not among {spans:?}"))
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_timeline_of_cuda_shows_what_ran_where_and_reading_it_waits_for_nothing() {
    let timeline = Timeline::new();
    let device = open().with_timeline(timeline.clone());
    let (a, b) = (device.create_stream("a").expect("a stream"), device.create_stream("b").expect("a stream"));
    let pool = Pool::new(device.clone(), 8 << 20);
    let function = scale_add(&device);
    let x = floats(&pool, &a, 100_000, 1.0);
    a.synchronize(LIMIT).expect("ran");
    let uploaded = timeline.take();
    assert_eq!(&*find(&uploaded, "upload").stream, "a");

    let gate = std::sync::Arc::new(Gate::new(false));
    let held = std::sync::Arc::clone(&gate);
    let op = move || held.wait_until(LIMIT, || "the test".into(), |open| open.then_some(()));
    a.enqueue_host("hold", op).expect("enqueued");
    b.wait(&a.record().expect("recorded")).expect("enqueued");
    let before = timeline.now();
    b.labelled("adam", || launch(&function, &b, slice(&x), 2.0, 0.0)).expect("enqueued");
    device.fill_zero(&b, slice(&x)).expect("enqueued");
    // Nothing of it has run, and the timeline says so without waiting.
    assert!(timeline.spans().is_empty(), "{:?}", timeline.spans());
    let held_for = std::time::Duration::from_millis(30);
    std::thread::sleep(held_for);
    gate.update(|open| *open = true);
    b.synchronize(LIMIT).expect("ran");
    let after = timeline.now();

    let spans = timeline.take();
    assert_eq!(spans.len(), 4, "{spans:?}");
    assert!(spans.is_sorted_by_key(|span| span.end));
    let (hold, wait, adam, zero) =
        (find(&spans, "hold"), find(&spans, "wait"), find(&spans, "adam"), find(&spans, "fill_zero"));
    assert_eq!([&*hold.stream, &*wait.stream, &*adam.stream, &*zero.stream], ["a", "b", "b", "b"]);
    // The clocks of device and host are set against each other to well within this.
    let slack = std::time::Duration::from_millis(5);
    assert!(hold.end - hold.start + slack > held_for && wait.end - wait.start + slack > held_for, "{spans:?}");
    assert!(wait.end <= adam.start && adam.start < adam.end && adam.end <= zero.start, "{spans:?}");
    assert!(before < adam.start + slack && zero.end < after + slack, "{before:?} {spans:?} {after:?}");
    assert!(timeline.take().is_empty());
}

#[test]
#[ignore = "needs a CUDA device"]
fn an_operation_of_cuda_that_fails_has_no_span() {
    let timeline = Timeline::new();
    let device = open().with_timeline(timeline.clone());
    let stream = device.create_stream("a").expect("a stream");
    let fails = |stream: &CudaStream| {
        stream.labelled("fails", || Err::<(), _>(DeviceError::Driver { call: "mine", message: "no".into() }))
    };
    let expected = DeviceError::Operation { stream: "a".into(), op: "fails".into(), message: "mine: no".into() };
    assert_eq!(fails(&stream), Err(expected.clone()));
    assert_eq!(stream.synchronize(LIMIT), Err(expected));
    assert!(timeline.take().is_empty());
}
