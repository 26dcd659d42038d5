//! Copies between host and device, and on the device.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use zero_alloc::device::{AnySlice, DType, Device, DeviceError, Event, Memory, Stream};
use zero_alloc::testing::Simulated;

use super::backend::{Backend, LIMIT, open};
use crate::Random;

/// Memory of a device for one test.
struct Lent<'a, D: Device> {
    device: &'a D,
    ptr: std::ptr::NonNull<u8>,
    bytes: usize,
}

impl<'a, D: Device> Lent<'a, D> {
    fn new(device: &'a D, bytes: usize) -> Self {
        Self {
            device,
            ptr: device.allocate(bytes).expect("room"),
            bytes,
        }
    }

    fn slice(&self) -> AnySlice {
        // SAFETY: the tests wait for all uses of the slice before this is dropped, and order them
        // by streams and events.
        unsafe {
            AnySlice::from_raw_parts(self.ptr.as_ptr(), self.bytes, DType::U8, self.device.id())
        }
    }
}

impl<D: Device> Drop for Lent<'_, D> {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`; the tests have waited for all uses.
        unsafe { self.device.deallocate(self.ptr, self.bytes) };
    }
}

fn random_bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    (0..len).map(|_| random.below(256) as u8).collect()
}

pub(crate) fn copy_round_trips_any_length<B: Backend>(backend: &B) {
    let device = backend.device();
    let stream = B::stream(&device, "compute");
    // More than a back end may stage at once.
    let most = if cfg!(miri) { 5_000 } else { (9 << 20) + 5 };
    let memory = Lent::new(&device, most + 300);
    for (seed, len) in [0, 1, 7, 256, 4095, 4097, most / 2, most]
        .into_iter()
        .enumerate()
    {
        for offset in [0, 3, 255] {
            let sent = random_bytes(len, seed as u64);
            let slice = memory.slice().slice(offset..offset + len);
            device
                .upload(&stream, &sent, slice, LIMIT)
                .expect("uploaded");
            let mut seen = vec![0; len];
            device
                .download(&stream, slice, &mut seen, LIMIT)
                .expect("downloaded");
            assert!(seen == sent, "{len} bytes at {offset}");
        }
    }
}

pub(crate) fn copies_follow_stream_order<B: Backend>(backend: &B) {
    let device = backend.device();
    let stream = B::stream(&device, "compute");
    let memory = Lent::new(&device, 3000);
    let [a, b, c] = [0, 1000, 2000].map(|at| memory.slice().slice(at..at + 1000));
    let sent = random_bytes(1000, 9);
    device.upload(&stream, &sent, a, LIMIT).expect("uploaded");
    device.copy(&stream, a, b).expect("enqueued");
    device
        .fill_zero(&stream, a.slice(10..20))
        .expect("enqueued");
    device.copy(&stream, a, c).expect("enqueued");
    // Empty operations succeed and have no effect.
    device
        .copy(&stream, a.slice(0..0), b.slice(5..5))
        .expect("enqueued");
    device.fill_zero(&stream, b.slice(7..7)).expect("enqueued");
    let mut seen = vec![0; 3000];
    device
        .download(&stream, memory.slice(), &mut seen, LIMIT)
        .expect("downloaded");
    let mut holed = sent.clone();
    holed[10..20].fill(0);
    assert_eq!(seen[..1000], holed);
    assert_eq!(seen[1000..2000], sent);
    assert_eq!(seen[2000..], holed);
}

pub(crate) fn copy_checks_lengths_and_types<B: Backend>(backend: &B) {
    let device = backend.device();
    let stream = B::stream(&device, "compute");
    let memory = Lent::new(&device, 64);
    let slice = memory.slice();
    // SAFETY: the same memory as fewer, larger elements.
    let floats =
        unsafe { AnySlice::from_raw_parts(slice.as_ptr(), 16, DType::F32, slice.device()) };

    let length = |what, expected, got| {
        Err(DeviceError::LengthMismatch {
            what,
            expected,
            got,
        })
    };

    assert_eq!(
        device.upload(&stream, &[0; 63], slice, LIMIT),
        length("upload", 64, 63)
    );
    assert_eq!(
        device.download(&stream, floats, &mut [0; 65], LIMIT),
        length("download", 64, 65)
    );
    assert_eq!(
        device.copy(&stream, slice.slice(0..8), slice.slice(8..17)),
        length("copy", 8, 9)
    );

    for at in [1, 7, 8] {
        let overlapping = device.copy(&stream, slice.slice(1..9), slice.slice(at..at + 8));
        assert_eq!(overlapping, Err(DeviceError::Overlap { bytes: 8 }), "{at}");
    }

    let types = device.copy(&stream, slice.slice(0..16), floats);
    assert_eq!(
        types,
        Err(DeviceError::DTypeMismatch {
            expected: DType::U8,
            got: DType::F32
        })
    );

    // These errors do not poison the stream.
    stream.synchronize(LIMIT).expect("sound");
}

pub(crate) fn slices_of_another_device_are_refused<B: Backend>(backend: &B) {
    let device = backend.device();
    let other = Simulated::new(1 << 20, 4096);
    let stream = B::stream(&device, "compute");
    let own = Lent::new(&device, 64);
    let foreign = Lent::new(&other, 64);
    let own = own.slice();
    let foreign = foreign.slice().slice(0..64);

    let refused = |what| {
        Err(DeviceError::AnotherDevice {
            what,
            expected: device.id(),
            got: other.id(),
        })
    };

    assert_eq!(device.fill_zero(&stream, foreign), refused("fill_zero"));
    assert_eq!(
        device.copy(&stream, own, foreign),
        refused("copy, destination")
    );
    assert_eq!(device.copy(&stream, foreign, own), refused("copy, source"));
    assert_eq!(
        device.upload(&stream, &[0; 64], foreign, LIMIT),
        refused("upload")
    );
    assert_eq!(
        device.download(&stream, foreign, &mut [0; 64], LIMIT),
        refused("download")
    );
    let error = device
        .fill_zero(&stream, foreign.slice(3..7))
        .expect_err("refused")
        .to_string();
    assert!(
        error.contains(&format!("is of {}", other.id())) && error.contains("download"),
        "{error}"
    );
    // The other device refuses in turn, and these errors do not poison the stream.
    let on_other = other.create_stream("other").expect("a stream");
    let refused = Err(DeviceError::AnotherDevice {
        what: "fill_zero",
        expected: other.id(),
        got: device.id(),
    });

    assert_eq!(other.fill_zero(&on_other, own), refused);
    device.fill_zero(&stream, own).expect("enqueued");
    stream.synchronize(LIMIT).expect("sound");
}

pub(crate) fn blocked_copy_ends_at_its_limit<B: Backend>(backend: &B) {
    let device = backend.device();
    let held = B::stream(&device, "held");
    let free = B::stream(&device, "free");
    let first = Lent::new(&device, 1000);
    let second = Lent::new(&device, 1000);
    device
        .upload(&held, &[1; 1000], first.slice(), LIMIT)
        .expect("uploaded");
    let monitor = B::hold(&held);
    let limit = Duration::from_millis(5);
    let mut untouched = [7; 1000];

    for _ in 0..3 {
        let late = device.download(&held, first.slice(), &mut untouched, limit);
        assert!(
            matches!(late, Err(DeviceError::TimedOut { .. })),
            "{late:?}"
        );
        let late = device.upload(&held, &[2; 1000], first.slice(), limit);
        assert!(
            matches!(late, Err(DeviceError::TimedOut { .. })),
            "{late:?}"
        );
    }

    // Meanwhile another stream copies correctly, although staging buffers of the calls above are
    // still in use.
    for value in 3..10 {
        device
            .upload(&free, &[value; 1000], second.slice(), LIMIT)
            .expect("uploaded");
        let mut seen = [0; 1000];
        device
            .download(&free, second.slice(), &mut seen, LIMIT)
            .expect("downloaded");
        assert_eq!(seen, [value; 1000]);
    }

    open(&monitor);
    held.synchronize(LIMIT).expect("ran");
    assert!(held.record().expect("recorded").synchronize(LIMIT).is_ok());
    // The late upload has run; the late download did not write to the caller's buffer.
    let mut seen = [0; 1000];
    device
        .download(&held, first.slice(), &mut seen, LIMIT)
        .expect("downloaded");
    assert_eq!(seen, [2; 1000]);
    assert_eq!(untouched, [7; 1000]);
}

/// Another thread enqueues writes behind a download, which must not see a part of them.
pub(crate) fn download_keeps_its_place_in_the_stream<B: Backend>(backend: &B) {
    let device = backend.device();
    let stream = B::stream(&device, "compute");
    let len = if cfg!(miri) { 1000 } else { 1 << 20 };
    let memory = Lent::new(&device, len);
    let source = Lent::new(&device, len);
    let (slice, ones) = (memory.slice(), source.slice());
    device
        .upload(&stream, &vec![1; len], ones, LIMIT)
        .expect("uploaded");
    device.fill_zero(&stream, slice).expect("enqueued");
    let ended = AtomicBool::new(false);

    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                device.copy(&stream, ones, slice).expect("enqueued");
                device.fill_zero(&stream, slice).expect("enqueued");
                // Bounds the queue.
                stream.synchronize(LIMIT).expect("ran");
            }
        });
        let mut seen = vec![0; len];
        let mut torn = 0;
        for _ in 0..if cfg!(miri) { 3 } else { 50 } {
            let downloaded = device.download(&stream, slice, &mut seen, LIMIT);
            torn += usize::from(downloaded.is_err() || seen.iter().any(|&byte| byte != seen[0]));
        }
        // The other thread must end before a failure is raised.
        ended.store(true, Ordering::Relaxed);
        assert_eq!(torn, 0);
    });

    stream.synchronize(LIMIT).expect("ran");
}

pub(crate) fn concurrent_copies_do_not_mix<B: Backend>(backend: &B) {
    let device = backend.device();
    let rounds = if cfg!(miri) { 2 } else { 30 };
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (device, stream) = (device.clone(), B::stream(&device, "compute"));
            scope.spawn(move || {
                let memory = Lent::new(&device, 5000);
                for round in 0..rounds {
                    let sent = random_bytes(5000 - round, thread * 100 + round as u64);
                    let slice = memory.slice().slice(round..5000);
                    device
                        .upload(&stream, &sent, slice, LIMIT)
                        .expect("uploaded");
                    let mut seen = vec![0; sent.len()];
                    device
                        .download(&stream, slice, &mut seen, LIMIT)
                        .expect("downloaded");
                    assert!(seen == sent, "thread {thread}, round {round}");
                }
            });
        }
    });
}
