//! Streams and events of another device are refused, before anything is enqueued.

use std::time::Duration;

use zero_alloc::device::{DType, Device, DeviceError, Event, Stream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_alloc::schedule::Recorder;
use zero_alloc::testing::Simulated;
use zero_alloc::{AllocError, Block, Pool, Purpose};

const LIMIT: Duration = Duration::from_secs(60);

/// Two devices of each kind, and whether a stream of one is a stream of the other.
fn pairs() -> Vec<(HostDevice, HostDevice, bool)> {
    let modelled = || HostDevice::modelled(|_, _| Duration::from_millis(1));
    let recorded = || Recorder::new().host();
    let kinds: [(&dyn Fn() -> HostDevice, bool); 4] = [
        (&HostDevice::new, true),
        (&modelled, false),
        (&|| HostDevice::seeded(7), false),
        (&recorded, false),
    ];

    let mut pairs = Vec::new();
    for (i, (a, _)) in kinds.iter().enumerate() {
        for (j, (b, is_shared)) in kinds.iter().enumerate() {
            pairs.push((a(), b(), i == j && *is_shared));
        }
        let device = a();
        pairs.push((device.clone(), device, true));
    }
    pairs
}

fn assert_refused<T: std::fmt::Debug>(result: Result<T, DeviceError>, named: &str) {
    match result {
        Err(DeviceError::AnotherExecution { .. }) => {
            let text = result.unwrap_err().to_string();
            assert!(text.contains(named), "{text}");
        }
        other => panic!("{named}: {other:?}"),
    }
}

fn block(pool: &Pool<HostDevice>, stream: &HostStream) -> Result<Block<HostDevice>, DeviceError> {
    match pool.allocate(64, DType::U8, Purpose::Workspace, stream) {
        Err(AllocError::Device(error)) => Err(error),
        allocated => Ok(allocated.unwrap()),
    }
}

#[test]
fn wait_for_an_event_of_another_device_is_refused() {
    for (a, b, is_one) in pairs() {
        let waiting = a.create_stream("waiting").unwrap();
        let other = b.create_stream("other").unwrap();
        // One that is reached, and one that may not be.
        let reached = other.record().unwrap();
        reached.synchronize(LIMIT).unwrap();
        other.enqueue("operation", || Ok(())).unwrap();
        let pending = other.record().unwrap();

        for event in [reached, pending] {
            let waited = [
                waiting.wait(&event),
                a.wait_for_host(&waiting, &event, LIMIT),
                a.host_waits(&waiting, &event, LIMIT),
            ];
            for waited in waited {
                match is_one {
                    true => waited.unwrap(),
                    false => assert_refused(waited, "the event's stream other"),
                }
            }
        }
        waiting.synchronize(LIMIT).unwrap();
    }
}

#[test]
fn memory_of_another_device_than_the_stream_is_refused() {
    for (a, b, is_one) in pairs() {
        let own = a.create_stream("own").unwrap();
        let other = b.create_stream("other").unwrap();
        // Miri has no memory without pages, which a recorder's is.
        if cfg!(miri) && own.check_runs("").is_err() {
            continue;
        }
        let pool = Pool::new(a.clone(), 1 << 20);
        let mut held = block(&pool, &own).unwrap();
        // SAFETY: used on streams that are waited for before the block is dropped.
        let slice = unsafe { held.slice() };
        let before = pool.report().total.live_bytes;

        let mut bytes = [0; 64];
        let results = [
            block(&pool, &other).map(drop),
            held.record_use(&other),
            a.fill_zero(&other, slice),
            a.copy(&other, slice.slice(0..8), slice.slice(8..16)),
            a.upload(&other, &[1; 64], slice, LIMIT),
            a.download(&other, slice, &mut bytes, LIMIT),
        ];
        for result in results {
            match is_one {
                true => result.unwrap(),
                false => assert_refused(result, "stream other"),
            }
        }

        if !is_one {
            assert_eq!(pool.report().total.live_bytes, before);
        }
        own.synchronize(LIMIT).unwrap();
        other.synchronize(LIMIT).unwrap();
    }
}

#[test]
fn devices_without_memory_refuse_other_streams() {
    let recorder = Recorder::new();
    let scheduled = recorder.device();
    let own = recorder.host().create_stream("own").unwrap();
    let simulated = Simulated::new(1 << 20, 4096);
    let other = HostDevice::new().create_stream("other").unwrap();
    scheduled.check_stream("test", &own).unwrap();
    simulated.check_stream("test", &other).unwrap();
    assert_refused(scheduled.check_stream("test", &other), "stream other");
    assert_refused(simulated.check_stream("test", &own), "stream own");
}

/// A recorded operation never runs, so that nobody else can wait for it.
#[test]
fn recorded_streams_are_refused_where_operations_must_run() {
    let recorded = Recorder::new().host().create_stream("recorded").unwrap();
    assert_refused(recorded.check_runs("all_gather"), "stream recorded");
    for device in [HostDevice::new(), HostDevice::seeded(1)] {
        device.create_stream("a").unwrap().check_runs("x").unwrap();
    }
}

#[test]
fn panic_of_a_modelled_cost_poisons_the_stream() {
    let device = HostDevice::modelled(|_, label| {
        assert_ne!(label, "unknown");
        Duration::from_millis(1)
    });
    let stream = device.create_stream("modelled").unwrap();
    stream.enqueue("unknown", || Ok(())).unwrap();
    let error = stream.synchronize(LIMIT).unwrap_err();
    assert!(matches!(error, DeviceError::Panicked { .. }), "{error}");
}
