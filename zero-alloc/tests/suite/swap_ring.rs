//! Parts of a file through rings of buffers: contents, order, faults.

use std::path::Path;
use std::time::Duration;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use tempfile::TempDir;
use zero_alloc::device::{AnySlice, DType, Device, DeviceError, Stream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_alloc::swap::{
    Fault, SwapAccess, SwapEngine, SwapError, SwapOptions, SwapParts, SwapRing,
};
use zero_alloc::{Pool, Purpose};

const LIMIT: Duration = Duration::from_secs(60);
const PARTS: usize = 4;

/// Lengths of the parts in bytes: some are not aligned, one is empty.
const PART_BYTES: [usize; PARTS] = [5000, 8192, 0, 12_296];

/// One use of a part.
#[derive(Clone, Copy, Debug)]
enum Use {
    Read,
    /// Of these fractions of the part, in 1/16.
    Range(usize, usize),
    Update,
    Overwrite,
    /// By the same ring, on the other stream.
    OverwriteFromElsewhere,
    /// It is written in memory, but not written back.
    Abandon(SwapAccess),
    /// By the other ring, on the other stream.
    ReadElsewhere,
}

fn uses() -> impl Strategy<Value = Vec<(usize, Use)>> {
    let range = (0..17_usize, 0..17_usize).prop_map(|(a, b)| Use::Range(a.min(b), a.max(b)));
    let of_part = prop_oneof![
        3 => Just(Use::Read),
        2 => range,
        4 => Just(Use::Update),
        4 => Just(Use::Overwrite),
        2 => Just(Use::OverwriteFromElsewhere),
        1 => Just(Use::Abandon(SwapAccess::Update)),
        1 => Just(Use::Abandon(SwapAccess::Overwrite)),
        4 => Just(Use::ReadElsewhere),
    ];
    proptest::collection::vec((0..PARTS, of_part), 1..40)
}

/// Two rings of the parts, and what the parts must have.
struct Rings {
    ring: SwapRing,
    elsewhere: SwapRing,
    user: HostStream,
    other_user: HostStream,
    /// The value of each part; its word `i` is the value plus `i`, and 0 if it was never written.
    values: [u64; PARTS],
    next_value: u64,
    /// How long each operation of a user takes.
    delay: Duration,
    _dir: TempDir,
}

fn word(value: u64, i: usize) -> u64 {
    if value == 0 { 0 } else { value + i as u64 }
}

impl Rings {
    fn new(device: &HostDevice, buffers: usize, delay: Duration) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let parts = parts(device, dir.path());
        let pool = Pool::new(device.clone(), 1 << 30);
        let ring = |name| SwapRing::new(&parts, device, &pool, name, buffers, LIMIT);
        let stream = |name| device.create_stream(name).expect("a stream");
        Self {
            ring: ring("ring").expect("memory"),
            elsewhere: ring("elsewhere").expect("memory"),
            user: stream("user"),
            other_user: stream("other user"),
            values: [0; PARTS],
            next_value: 1,
            delay,
            _dir: dir,
        }
    }

    fn new_value(&mut self) -> u64 {
        self.next_value += 1 << 20;
        self.next_value
    }

    fn apply(&mut self, part: usize, of_part: Use) -> Result<(), DeviceError> {
        let value = self.values[part];
        let bytes = PART_BYTES[part];
        let delay = self.delay;
        match of_part {
            Use::Read => {
                let held = self.ring.acquire(&self.user, part, SwapAccess::Read)?;
                // SAFETY: read by an operation of the stream, before the drop.
                expect(&self.user, unsafe { held.bytes() }, value, 0, delay)
            }
            Use::ReadElsewhere => {
                let held = self
                    .elsewhere
                    .acquire(&self.other_user, part, SwapAccess::Read)?;
                // SAFETY: read by an operation of the stream, before the drop.
                expect(&self.other_user, unsafe { held.bytes() }, value, 0, delay)
            }
            Use::Range(first, end) => {
                let at = |sixteenth| bytes * sixteenth / 16 / 8 * 8;
                let range = at(first)..at(end);
                let held = self.ring.acquire_range(&self.user, part, range)?;
                // SAFETY: read by an operation of the stream, before the drop.
                let slice = unsafe { held.bytes() };
                expect(&self.user, slice, value, at(first) / 8, delay)
            }
            Use::Update => {
                let new = self.new_value();
                let held = self.ring.acquire(&self.user, part, SwapAccess::Update)?;
                // SAFETY: used by operations of the stream, before the part is written back.
                let slice = unsafe { held.bytes() };
                expect(&self.user, slice, value, 0, delay)?;
                fill(&self.user, slice, new, delay)?;
                self.values[part] = new;
                held.write_back()
            }
            Use::Overwrite | Use::OverwriteFromElsewhere => {
                let new = self.new_value();
                let user = match of_part {
                    Use::Overwrite => &self.user,
                    _ => &self.other_user,
                };
                let held = self.ring.acquire(user, part, SwapAccess::Overwrite)?;
                // SAFETY: written by an operation of the stream, before the part is written back.
                fill(user, unsafe { held.bytes() }, new, delay)?;
                self.values[part] = new;
                held.write_back()
            }
            Use::Abandon(access) => {
                let new = self.new_value();
                let held = self.ring.acquire(&self.user, part, access)?;
                // SAFETY: written by an operation of the stream, before the drop.
                fill(&self.user, unsafe { held.bytes() }, new, delay)
            }
        }
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        self.user.synchronize(LIMIT)?;
        self.other_user.synchronize(LIMIT)?;
        self.ring.synchronize(LIMIT)?;
        self.elsewhere.synchronize(LIMIT)
    }
}

fn parts(device: &HostDevice, dir: &Path) -> SwapParts {
    let options = SwapOptions::default()
        .engine(SwapEngine::Threads)
        .queue_depth(2);
    SwapParts::create(device, "parts", dir, &PART_BYTES, options).expect("room")
}

/// Enqueues a check of the words of a part from word `first` on.
fn expect(
    stream: &HostStream,
    slice: AnySlice,
    value: u64,
    first: usize,
    delay: Duration,
) -> Result<(), DeviceError> {
    let bytes = slice.typed::<u8>()?;
    stream.enqueue("expect", move || {
        std::thread::sleep(delay);
        // SAFETY: host memory; events order the operations on it.
        let bytes = unsafe { bytes.as_host() };
        for (i, found) in bytes.chunks_exact(8).enumerate() {
            let found = u64::from_ne_bytes(found.try_into().expect("8 bytes"));
            assert_eq!(found, word(value, first + i), "word {}", first + i);
        }
        Ok(())
    })
}

/// Enqueues writing the words of a part.
fn fill(
    stream: &HostStream,
    slice: AnySlice,
    value: u64,
    delay: Duration,
) -> Result<(), DeviceError> {
    let bytes = slice.typed::<u8>()?;
    stream.enqueue("fill", move || {
        std::thread::sleep(delay);
        // SAFETY: host memory; events order the operations on it.
        let bytes = unsafe { bytes.as_host_mut() };
        for (i, to) in bytes.chunks_exact_mut(8).enumerate() {
            to.copy_from_slice(&word(value, i).to_ne_bytes());
        }
        Ok(())
    })
}

proptest! {
    #![proptest_config(crate::cases(100))]

    /// Every use sees the last value that was written back, in every order that the events allow,
    /// and no two operations race.
    #[test]
    fn uses_see_the_last_value(uses in uses(), buffers in 1..5_usize, seed: u64) {
        let device = HostDevice::seeded(seed);
        let mut rings = Rings::new(&device, buffers, Duration::ZERO);

        for (part, of_part) in uses {
            rings.apply(part, of_part).expect("enqueued");
        }

        rings.synchronize().expect("the last values");
        prop_assert!(device.violations().is_empty(), "{:?}", device.violations());
    }
}

/// The same on threads whose operations take a while, so that buffers are needed again before
/// they are free.
#[test]
fn uses_see_the_last_value_with_delays() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    for buffers in 1..4 {
        let delay = Duration::from_micros(300);
        let mut rings = Rings::new(&HostDevice::new(), buffers, delay);
        let uses = uses().new_tree(&mut runner).expect("uses").current();

        for (part, of_part) in uses {
            rings.apply(part, of_part).expect("enqueued");
        }

        rings.synchronize().expect("the last values");
    }
}

/// Without the wait for the user, a part would be written before it is updated: the scheduler that
/// checks these tests finds that.
#[test]
fn a_use_on_another_stream_is_found() {
    for seed in 0..30 {
        let device = HostDevice::seeded(seed);
        let mut rings = Rings::new(&device, 2, Duration::ZERO);

        let held = rings
            .ring
            .acquire(&rings.user, 0, SwapAccess::Overwrite)
            .expect("enqueued");
        // SAFETY: not on the stream, which this test is about; the scheduler runs one operation at
        // a time.
        let bytes = unsafe { held.bytes() };
        fill(&rings.other_user, bytes, 7, Duration::ZERO).expect("enqueued");
        held.write_back().expect("enqueued");

        let _failed = rings.synchronize();
        assert!(!device.violations().is_empty(), "seed {seed}");
    }
}

/// Safe code may forget a part that it was given: the buffer is free after its operations all the
/// same.
#[test]
fn forgotten_part_is_waited_for() {
    for seed in 0..30 {
        let device = HostDevice::seeded(seed);
        let mut rings = Rings::new(&device, 1, Duration::ZERO);
        for value in 1..4 {
            let held = rings
                .ring
                .acquire(&rings.user, 0, SwapAccess::Overwrite)
                .expect("enqueued");
            // SAFETY: on the stream of the part.
            let bytes = unsafe { held.bytes() };
            fill(&rings.user, bytes, value, Duration::ZERO).expect("enqueued");
            std::mem::forget(held);
            // Another part in the same buffer, read or overwritten from another stream.
            rings.apply(1, Use::Read).expect("enqueued");
            rings
                .apply(1, Use::OverwriteFromElsewhere)
                .expect("enqueued");
        }
        rings.user.synchronize(LIMIT).expect("no failure");
        rings.other_user.synchronize(LIMIT).expect("no failure");
        let violations = device.violations();
        assert!(violations.is_empty(), "seed {seed}: {violations:?}");
    }
}

#[test]
fn part_in_a_buffer_is_not_read_again() {
    let mut rings = Rings::new(&HostDevice::new(), 2, Duration::ZERO);
    let read_bytes = |rings: &Rings| {
        rings.synchronize().expect("no failure");
        rings.ring.file().read_bytes()
    };

    rings.apply(0, Use::Overwrite).expect("enqueued");
    rings.apply(0, Use::Update).expect("enqueued");
    rings.apply(1, Use::Update).expect("enqueued");
    rings.apply(0, Use::Read).expect("enqueued");
    assert_eq!(read_bytes(&rings), 8192);

    // Another ring has no copy, and its copy is old after a write.
    rings.apply(0, Use::ReadElsewhere).expect("enqueued");
    rings.apply(0, Use::ReadElsewhere).expect("enqueued");
    assert_eq!(read_bytes(&rings), 8192 + 8192);
    rings.apply(0, Use::Overwrite).expect("enqueued");
    rings.apply(0, Use::ReadElsewhere).expect("enqueued");
    assert_eq!(read_bytes(&rings), 8192 + 2 * 8192);
}

#[test]
fn failed_transfer_reaches_the_user() {
    for write in [false, true] {
        let mut rings = Rings::new(&HostDevice::new(), 1, Duration::ZERO);
        rings.ring.file().inject(0, Fault::Errno(libc::EIO));

        let first = if write { Use::Overwrite } else { Use::Read };
        rings.apply(0, first).expect("enqueued");
        // The buffer is never free, or the part never written.
        let second = rings.apply(1, Use::Read);

        let error = second
            .and_then(|()| rings.user.synchronize(LIMIT))
            .expect_err("a failure");
        let op = if write { "write" } else { "read" };
        let text = format!("{op} of 8192 bytes at offset 0");
        assert!(error.to_string().contains(&text), "{error}");
    }
}

#[test]
fn wrong_use_is_refused() {
    let device = HostDevice::new();
    let mut rings = Rings::new(&device, 1, Duration::ZERO);

    let held = rings
        .ring
        .acquire(&rings.user, 1, SwapAccess::Read)
        .expect("enqueued");
    let error = held.write_back().expect_err("read only");
    assert_eq!(
        error.to_string(),
        "write back: part 1 was acquired to be read only"
    );

    let dir = tempfile::tempdir().expect("a folder");
    let pool = Pool::new(device.clone(), 1 << 20);
    let none = SwapRing::new(
        &parts(&device, dir.path()),
        &device,
        &pool,
        "none",
        0,
        LIMIT,
    );

    assert_eq!(
        none.expect_err("no buffer").to_string(),
        "swap option buffers: expected at least 1, got 0"
    );
    let pool = Pool::new(device.clone(), 4096);

    let full = SwapRing::new(
        &parts(&device, dir.path()),
        &device,
        &pool,
        "full",
        1,
        LIMIT,
    );

    assert!(matches!(full, Err(SwapError::Alloc(_))), "{full:?}");
}

/// The memory of a dropped ring has another user only after the operations on its buffers.
#[test]
fn drop_waits_for_uses() {
    for seed in 0..30 {
        for last in [Use::Read, Use::Overwrite] {
            let device = HostDevice::seeded(seed);
            let parts_dir = tempfile::tempdir().expect("a folder");
            let parts = parts(&device, parts_dir.path());
            let pool = Pool::new(device.clone(), 1 << 16);
            let mut rings = Rings::new(&device, 1, Duration::ZERO);
            rings.ring = SwapRing::new(&parts, &device, &pool, "ring", 1, LIMIT).expect("memory");
            let next_user = device.create_stream("next user").expect("a stream");

            rings.apply(1, last).expect("enqueued");
            let Rings { ring, .. } = rings;
            drop(ring);
            let block = pool.allocate(1 << 13, DType::U8, Purpose::Workspace, &next_user);
            let block = block.expect("the memory of the ring");
            // SAFETY: used on the stream of the block only.
            fill(&next_user, unsafe { block.slice() }, 3, Duration::ZERO).expect("enqueued");

            next_user.synchronize(LIMIT).expect("no race");
            let violations = device.violations();
            assert!(
                violations.is_empty(),
                "seed {seed}, {last:?}: {violations:?}"
            );
        }
    }
}

#[test]
fn elements_of_a_part() {
    let device = HostDevice::new();
    let mut rings = Rings::new(&device, 1, Duration::ZERO);
    let held = rings
        .ring
        .acquire(&rings.user, 1, SwapAccess::Read)
        .expect("enqueued");
    // SAFETY: no operation uses it.
    let elems = unsafe { held.elems(DType::F32) };
    assert_eq!((elems.len(), elems.dtype()), (2048, DType::F32));
}
