//! Schedules beside streams that run: random programs have the same times, to the nanosecond.

use std::time::Duration;

use proptest::prelude::*;
use zero_alloc::device::{Device, Event, Stream};
use zero_alloc::host::HostDevice;
use zero_alloc::schedule::{Cost, Recorder, Work};

const LIMIT: Duration = Duration::from_secs(60);
const STREAMS: usize = 3;
const LABELS: [&str; 4] = ["first", "second", "third", "fourth"];

/// A step of a random program; streams, labels and events are indices modulo their number.
#[derive(Clone, Copy, Debug)]
enum Step {
    Run { stream: usize, label: usize },
    Record { stream: usize },
    Wait { stream: usize, event: usize },
    HostWait { event: usize },
    Synchronize { stream: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let stream = || 0..STREAMS;
    prop_oneof![
        4 => (stream(), 0..LABELS.len()).prop_map(|(stream, label)| Step::Run { stream, label }),
        2 => stream().prop_map(|stream| Step::Record { stream }),
        2 => (stream(), 0..64usize).prop_map(|(stream, event)| Step::Wait { stream, event }),
        1 => (0..64usize).prop_map(|event| Step::HostWait { event }),
        1 => stream().prop_map(|stream| Step::Synchronize { stream }),
    ]
}

/// Runs the program on the streams of `device`.
fn run(device: &HostDevice, program: &[Step]) {
    let streams: Vec<_> = (0..STREAMS)
        .map(|stream| device.create_stream(&format!("stream {stream}")).unwrap())
        .collect();
    let mut events = Vec::new();
    for &step in program {
        match step {
            Step::Run { stream, label } => {
                streams[stream].enqueue(LABELS[label], || Ok(())).unwrap()
            }
            Step::Record { stream } => events.push(streams[stream].record().unwrap()),
            Step::Wait { event, .. } | Step::HostWait { event } if events.is_empty() => {
                let _no_event = event;
            }
            Step::Wait { stream, event } => {
                let event = &events[event % events.len()];
                streams[stream].wait(event).unwrap();
            }
            Step::HostWait { event } => events[event % events.len()].synchronize(LIMIT).unwrap(),
            Step::Synchronize { stream } => streams[stream].synchronize(LIMIT).unwrap(),
        }
    }
    for stream in &streams {
        stream.synchronize(LIMIT).unwrap();
    }
}

/// Streams, labels and times of all operations, sorted.
type Seen = Vec<(String, &'static str, Duration, Duration)>;

fn seen(spans: impl IntoIterator<Item = zero_alloc::host::OpSpan>) -> Seen {
    let mut seen: Seen = spans
        .into_iter()
        .map(|span| (span.stream.to_string(), span.label, span.start, span.end))
        .collect();
    seen.sort_by(|a, b| (a.2, a.3, &a.0).cmp(&(b.2, b.3, &b.0)));
    seen
}

proptest! {
    #![proptest_config(crate::cases(400))]

    #[test]
    fn times_are_those_of_streams_that_run(
        program in prop::collection::vec(step(), 0..40),
        costs in prop::array::uniform4(0u64..1_000_000_007),
    ) {
        let cost_of = move |label: &str| {
            let label = LABELS.iter().position(|known| *known == label);
            Duration::from_nanos(label.map_or(0, |label| costs[label]))
        };

        // A new thread: its modelled time begins at zero.
        let modelled = std::thread::scope(|scope| {
            let run = || {
                let device = HostDevice::modelled(move |_, label| cost_of(label));
                run(&device, &program);
                seen(device.modelled_spans())
            };
            scope.spawn(run).join().unwrap()
        });

        let recorder = Recorder::new();
        run(&recorder.host(), &program);
        let schedule = recorder.schedule();
        let times = schedule.times(|operation| Cost::time(cost_of(operation.label)));
        prop_assert_eq!(seen(schedule.spans(&times)), modelled);
    }
}

/// The two queues of a step of three units: forward, backward in reverse, gathers one unit ahead,
/// reductions behind the next gather.
fn two_queues(slowdown: f64) -> f64 {
    let recorder = Recorder::new();
    let device = recorder.device();
    let compute = device.create_stream("compute").unwrap();
    let comm = device.create_stream("comm").unwrap();
    // Tenths of a unit of time, which are whole.
    let gathers = [5, 5, 5, 0, 5, 0];
    let passes = [10, 10, 10, 20, 20, 20];
    let enqueue = |stream: &zero_alloc::host::HostStream, class, tenths: u64| {
        let work = Work::bytes(tenths).class(class);
        stream.enqueue_sized("work", work, || Ok(())).unwrap();
        stream.record().unwrap()
    };

    let mut gathered = vec![enqueue(&comm, 1, gathers[0])];
    let mut done = None;
    for (pass, &tenths) in passes.iter().enumerate() {
        if let Some(&next) = gathers.get(pass + 1) {
            if let Some(done) = &done {
                comm.wait(done).unwrap();
            }
            gathered.push(enqueue(&comm, 1, next));
        }
        if pass > 3 {
            // The gradient of the backward before.
            enqueue(&comm, 1, 5);
        }
        compute.wait(&gathered[pass]).unwrap();
        done = Some(enqueue(&compute, 0, tenths));
    }
    comm.wait(&done.unwrap()).unwrap();
    enqueue(&comm, 1, 5);

    let times = recorder.schedule().times(|operation| {
        let cost = Cost::ns(operation.work.bytes as f64);
        match operation.work.class {
            0 => cost.slowdown(slowdown),
            _ => cost.slows(true),
        }
    });
    let last = times.operations.iter().map(|[_, end]| *end);
    last.fold(0.0, f64::max) / 10.0
}

/// Values computed by hand; the second is that of the published prototype.
#[test]
fn two_queues_have_their_golden_times() {
    assert_eq!(two_queues(0.0), 10.0);
    assert_eq!(two_queues(0.5), 11.25);
}

/// Two operations that share a resource each run at half their speed, as long as both run.
#[test]
fn operations_share_a_resource() {
    let recorder = Recorder::new();
    let host = recorder.host();
    for (name, bytes) in [("reads", 10), ("writes", 30)] {
        let stream = host.create_stream(name).unwrap();
        stream
            .enqueue_sized("transfer", Work::bytes(bytes), || Ok(()))
            .unwrap();
    }
    let schedule = recorder.schedule();
    let times = |shares: Option<u8>| {
        let cost = |bytes: u64| match shares {
            Some(resource) => Cost::ns(bytes as f64).shares(resource),
            None => Cost::ns(bytes as f64),
        };
        let times = schedule.times(|operation| cost(operation.work.bytes));
        times.operations
    };
    assert_eq!(times(None), [[0.0, 10.0], [0.0, 30.0]]);
    assert_eq!(times(Some(0)), [[0.0, 20.0], [0.0, 40.0]]);
}

/// Operations start when the program has enqueued them, and it goes on while they run.
#[test]
fn the_program_takes_time_to_enqueue() {
    let recorder = Recorder::new();
    let stream = recorder.host().create_stream("compute").unwrap();
    recorder.mark();
    for _ in 0..2 {
        stream.enqueue("work", || Ok(())).unwrap();
    }
    recorder.mark();
    stream.synchronize(LIMIT).unwrap();
    recorder.mark();
    let times = |ns| recorder.schedule().times(|_| Cost::ns(ns).host_ns(7.0));
    let fast = times(2.0);
    assert_eq!(fast.operations, [[0.0, 2.0], [7.0, 9.0]]);
    assert_eq!(fast.marks, [0.0, 14.0, 14.0]);
    let slow = times(20.0);
    assert_eq!(slow.operations, [[0.0, 20.0], [20.0, 40.0]]);
    assert_eq!(slow.marks, [0.0, 14.0, 40.0]);
}

/// A recorded device refuses what a device refuses, and its operations never run.
#[test]
fn recorded_operations_do_not_run() {
    let recorder = Recorder::new();
    let stream = recorder.host().create_stream("compute").unwrap();
    stream.enqueue("panics", || panic!("it runs")).unwrap();
    // An event is reached once the program has waited for it, or for one behind it.
    let event = stream.record().unwrap();
    assert!(!event.is_done().unwrap());
    stream.synchronize(LIMIT).unwrap();
    assert!(event.is_done().unwrap());
    let operations: Vec<_> = recorder.schedule().operations().map(|o| o.label).collect();
    assert_eq!(operations, ["panics"]);
}
