//! The swap file: round trips, order, faults.

use std::path::Path;
use std::sync::LazyLock;
use std::time::Duration;

use proptest::prelude::*;
use tempfile::TempDir;
use zero_alloc::device::{AnySlice, DType, Device, DeviceError, DeviceId, DeviceKind, Stream};
use zero_alloc::host::{HostDevice, HostStream, ViolationKind};
use zero_alloc::swap::{Fault, SwapBuffer, SwapEngine, SwapError, SwapFile, SwapLane, SwapOptions};
use zero_alloc::{Pool, Purpose};

pub(crate) const LIMIT: Duration = Duration::from_secs(60);
const PAGE: usize = SwapFile::ALIGN_BYTES;

/// Pages of host memory.
pub(crate) struct Buffer(pub(crate) SwapBuffer);

/// The pool of all buffers, and the stream that they are allocated on, which runs nothing.
static MEMORY: LazyLock<(Pool<HostDevice>, HostStream)> =
    LazyLock::new(|| (Pool::new(HostDevice::new(), 1 << 30), stream("buffers")));

impl Buffer {
    /// Each byte is 0.
    pub(crate) fn new(pages: usize) -> Self {
        let (pool, stream) = &*MEMORY;
        let buffer = SwapBuffer::allocate(pool, pages * PAGE, Purpose::Workspace, stream);
        let mut buffer = Self(buffer.expect("memory"));
        buffer.bytes().fill(0);
        buffer
    }

    /// Each 8 bytes hold `seed` plus their index.
    pub(crate) fn filled(pages: usize, seed: u64) -> Self {
        let mut buffer = Self::new(pages);
        for (i, word) in buffer.bytes().chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&(seed + i as u64).to_ne_bytes());
        }
        buffer
    }

    fn bytes(&mut self) -> &mut [u8] {
        let slice = self.slice();
        // SAFETY: initialised memory of the buffer; the tests wait for operations before they look.
        unsafe { std::slice::from_raw_parts_mut(slice.as_ptr(), slice.len_bytes()) }
    }

    pub(crate) fn slice(&self) -> AnySlice {
        // SAFETY: the buffer outlives the operations, because each test waits for its streams.
        unsafe { self.0.slice() }
    }

    fn pages(&self, first: usize, count: usize) -> AnySlice {
        self.slice().slice(first * PAGE..(first + count) * PAGE)
    }

    /// Pages to register.
    fn part(&self, first: usize, count: usize) -> SwapBuffer {
        self.0.part(first * PAGE..(first + count) * PAGE)
    }
}

pub(crate) fn folder() -> TempDir {
    tempfile::tempdir().expect("a folder")
}

/// The engines that work here.
pub(crate) fn engines() -> Vec<SwapEngine> {
    match SwapFile::create(
        folder().path(),
        0,
        SwapOptions::default().engine(SwapEngine::IoUring),
    ) {
        Ok(_) => vec![SwapEngine::Threads, SwapEngine::IoUring],
        Err(error) => {
            eprintln!("NOT TESTED WITH io_uring, only with threads: {error}");
            vec![SwapEngine::Threads]
        }
    }
}

/// Small requests and queues, so that small files use them.
pub(crate) fn options(engine: SwapEngine) -> SwapOptions {
    SwapOptions::default()
        .engine(engine)
        .queue_depth(4)
        .request_bytes(2 * PAGE)
}

pub(crate) fn file(dir: &Path, pages: usize, options: SwapOptions) -> SwapFile {
    SwapFile::create(dir, (pages * PAGE) as u64, options).expect("room")
}

pub(crate) fn stream(name: &str) -> HostStream {
    HostDevice::new().create_stream(name).expect("a stream")
}

/// A file in a temporary folder, with a lane and a stream.
fn lane(pages: usize, options: SwapOptions) -> (TempDir, SwapFile, SwapLane, HostStream) {
    let dir = folder();
    let file = file(dir.path(), pages, options);
    let lane = file.lane().expect("a lane");
    (dir, file, lane, stream("swap"))
}

/// Bytes that are written are read back.
pub(crate) fn assert_round_trip(lane: &SwapLane, stream: &HostStream, from: &Buffer) {
    let mut to = Buffer::new(16);
    lane.write(stream, &[(0, from.slice())]).expect("enqueued");
    lane.read(stream, &[(0, to.slice())]).expect("enqueued");
    stream.synchronize(LIMIT).expect("transferred");
    assert!(to.bytes() == Buffer::filled(16, 7).bytes());
}

fn follow(stream: &HostStream, other: &HostStream) {
    let event = other.record().expect("recorded");
    stream.wait(&event).expect("enqueued");
}

fn at(page: usize) -> u64 {
    (page * PAGE) as u64
}

#[derive(Clone, Debug)]
struct Transfer {
    write: bool,
    lane: usize,
    /// First page and number of pages of each range; they do not overlap.
    ranges: Vec<(usize, usize)>,
}

const PAGES: usize = 64;

fn transfer() -> impl Strategy<Value = Transfer> {
    let ranges = proptest::collection::vec((0..12usize, 0..12usize), 0..6).prop_map(|steps| {
        let mut end = 0;
        let ranges = steps.into_iter().map(|(gap, count)| {
            let first = (end + gap).min(PAGES);
            end = (first + count).min(PAGES);
            (first, end - first)
        });
        // The order in the file and in memory differ.
        ranges.rev().collect()
    });
    (any::<bool>(), 0..3usize, ranges).prop_map(|(write, lane, ranges)| Transfer {
        write,
        lane,
        ranges,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn transfers_equal_a_model(
        transfers in proptest::collection::vec(transfer(), 1..20),
        depth in 1..9usize,
        request_pages in 1..9usize,
        direct in any::<bool>(),
        registered in any::<bool>(),
    ) {
        for engine in engines() {
            let dir = folder();
            let options = options(engine).queue_depth(depth).request_bytes(request_pages * PAGE).direct(direct);
            let file = file(dir.path(), PAGES, options);
            let lanes = [(); 3].map(|()| file.lane().expect("a lane"));
            let mut buffer = Buffer::new(PAGES + 2);
            let stream = stream("swap");
            if registered {
                // Some transfers lie within, some outside, some are both.
                for lane in &lanes {
                    lane.register(&[buffer.part(8, 16), buffer.part(30, 3)]);
                }
            }
            let mut model = vec![0; PAGES * PAGE];
            let mut moved = [0, 0];
            for (number, Transfer { write, lane, ranges }) in transfers.iter().enumerate() {
                for (i, byte) in buffer.bytes().iter_mut().enumerate() {
                    *byte = (number * 31 + i / 7) as u8;
                }
                let mut in_memory = 1;
                let mut slices = Vec::new();
                for &(first, count) in ranges {
                    slices.push((at(first), buffer.pages(in_memory, count)));
                    let disk = first * PAGE..(first + count) * PAGE;
                    let memory = in_memory * PAGE..(in_memory + count) * PAGE;
                    if *write {
                        model[disk].copy_from_slice(&buffer.bytes()[memory]);
                    }
                    in_memory += count;
                    moved[usize::from(*write)] += at(count);
                }
                let mut expected = buffer.bytes().to_vec();
                if *write {
                    lanes[*lane].write(&stream, &slices).expect("enqueued");
                } else {
                    let mut in_memory = PAGE;
                    for &(first, count) in ranges {
                        expected[in_memory..in_memory + count * PAGE]
                            .copy_from_slice(&model[first * PAGE..(first + count) * PAGE]);
                        in_memory += count * PAGE;
                    }
                    lanes[*lane].read(&stream, &slices).expect("enqueued");
                }
                stream.synchronize(LIMIT).expect("transferred");
                prop_assert!(buffer.bytes() == expected, "transfer {number} by {engine:?}");
            }
            prop_assert_eq!([file.read_bytes(), file.written_bytes()], moved);
        }
    }
}

#[test]
fn lanes_on_streams_pass_data_in_order() {
    for engine in engines() {
        let dir = folder();
        let file = file(dir.path(), 32, options(engine));
        let writer = file.lane().expect("a lane");
        let reader = file.lane().expect("a lane");
        let out = stream("out");
        let back = stream("back");
        for round in 0..20 {
            let from = Buffer::filled(32, round);
            let mut to = Buffer::new(32);
            for half in [0, 16] {
                writer
                    .write(&out, &[(at(half), from.pages(half, 16))])
                    .expect("enqueued");
                follow(&back, &out);
                reader
                    .read(&back, &[(at(half), to.pages(half, 16))])
                    .expect("enqueued");
            }
            follow(&out, &back);
            back.synchronize(LIMIT).expect("transferred");
            assert!(
                to.bytes() == Buffer::filled(32, round).bytes(),
                "round {round}, {engine:?}"
            );
        }
    }
}

#[test]
fn one_lane_serves_two_streams() {
    for engine in engines() {
        let dir = folder();
        let file = file(dir.path(), 32, options(engine));
        let lane = file.lane().expect("a lane");
        let mut halves = [0, 16].map(|first| {
            (
                first,
                stream("half"),
                Buffer::filled(16, first),
                Buffer::new(16),
            )
        });
        for (first, stream, from, to) in &halves {
            for _ in 0..10 {
                lane.write(stream, &[(at(*first as usize), from.slice())])
                    .expect("enqueued");
                lane.read(stream, &[(at(*first as usize), to.slice())])
                    .expect("enqueued");
            }
        }
        // Enqueued operations keep the file open.
        drop((file, lane));
        for (_, stream, from, to) in &mut halves {
            stream.synchronize(LIMIT).expect("transferred");
            assert!(from.bytes() == to.bytes());
        }
    }
}

#[test]
fn invalid_ranges_are_refused_by_number() {
    let (_dir, _, lane, stream) = lane(4, SwapOptions::default());
    let buffer = Buffer::new(8);

    for (offset, slice, message) in [
        (
            100,
            buffer.pages(0, 1),
            "swap read: offset 100 is not a multiple of 4096 bytes",
        ),
        (
            0,
            buffer.slice().slice(0..5000),
            "length 5000 is not a multiple of 4096 bytes",
        ),
        (
            0,
            buffer.slice().slice(1..PAGE + 1),
            "is not a multiple of 4096 bytes",
        ),
        (
            at(2),
            buffer.pages(0, 3),
            "12288 bytes at offset 8192 end beyond the file of 16384 bytes",
        ),
        (u64::MAX - 4095, buffer.pages(0, 2), "end beyond the file"),
    ] {
        let error = lane
            .read(&stream, &[(0, buffer.pages(0, 0)), (offset, slice)])
            .expect_err("invalid");
        assert!(error.to_string().contains(message), "{error}");
    }

    let device = DeviceId::new(DeviceKind::Simulated).expect("an id");
    // SAFETY: refused before anything accesses it.
    let other =
        unsafe { AnySlice::from_raw_parts(buffer.slice().as_ptr(), PAGE, DType::U8, device) };
    assert!(matches!(
        lane.write(&stream, &[(0, other)]),
        Err(DeviceError::AnotherDevice { .. })
    ));
    stream.synchronize(LIMIT).expect("nothing was enqueued");
}

#[test]
fn creation_errors_name_the_cause() {
    let dir = folder();
    let create =
        |dir: &Path, bytes, options| SwapFile::create(dir, bytes, options).expect_err("refused");
    let missing = create(&dir.path().join("missing"), 0, SwapOptions::default());
    assert!(
        matches!(missing, SwapError::Folder { .. })
            && missing.to_string().contains("name an existing folder")
    );
    let path = dir.path().join("file");
    std::fs::write(&path, "").expect("room");
    assert!(matches!(
        create(&path, 0, SwapOptions::default()),
        SwapError::Folder { .. }
    ));
    // No disk has 4 EiB.
    let full = create(dir.path(), 1 << 62, SwapOptions::default());

    let SwapError::DiskFull {
        needed_bytes,
        free_bytes,
        ..
    } = full
    else {
        panic!("{full}")
    };

    assert!(needed_bytes == 1 << 62 && free_bytes < 1 << 62);
    assert!(full.to_string().contains("free some space"), "{full}");
    for options in [
        SwapOptions::default().queue_depth(0),
        SwapOptions::default().queue_depth(5000),
        SwapOptions::default().request_bytes(0),
        SwapOptions::default().request_bytes(5000),
        SwapOptions::default().limit(Duration::ZERO),
    ] {
        assert!(matches!(
            create(dir.path(), 0, options),
            SwapError::Option { .. }
        ));
    }
}

/// Reads 16 pages, written before, with faults of the reads.
fn faulty_read(engine: SwapEngine, faults: &[(u64, Fault)]) -> (Buffer, Result<(), DeviceError>) {
    let (_dir, file, lane, stream) = lane(16, options(engine));
    let from = Buffer::filled(16, 5);
    let to = Buffer::new(16);
    lane.write(&stream, &[(0, from.slice())]).expect("enqueued");
    stream.synchronize(LIMIT).expect("written");
    for (after, fault) in faults {
        file.inject(*after, *fault);
    }
    lane.read(&stream, &[(0, to.slice())]).expect("enqueued");
    let result = stream.synchronize(LIMIT);

    if result.is_err() {
        // The stream is poisoned; the lane works on.
        lane.write(&stream, &[(0, to.slice())]).expect("enqueued");
        assert_eq!(stream.synchronize(LIMIT), result);
        let stream = self::stream("other");
        let mut again = Buffer::new(16);
        lane.read(&stream, &[(0, again.slice())]).expect("enqueued");
        stream.synchronize(LIMIT).expect("read");
        assert!(again.bytes() == Buffer::filled(16, 5).bytes());
    }

    (to, result)
}

#[test]
fn failed_request_poisons_the_stream_with_its_place() {
    for engine in engines() {
        for (errno, advice) in [
            (libc::EIO, "look for errors of the disk"),
            (libc::ENOSPC, "free some space"),
            (libc::EFBIG, "ulimit -f"),
            (libc::EINVAL, "SwapOptions::direct"),
        ] {
            let error = faulty_read(engine, &[(5, Fault::Errno(errno))])
                .1
                .expect_err("failed");
            let Some(SwapError::Transfer {
                op: "read",
                offset: 40960,
                bytes: 8192,
                error: system,
                ..
            }) = error.cause()
            else {
                panic!("{error}")
            };
            assert_eq!(system.raw_os_error(), Some(errno));
            assert!(
                error.to_string().contains("swap read on stream swap")
                    && error.to_string().contains(advice)
            );
        }
        let error = faulty_read(engine, &[(0, Fault::Short(0))])
            .1
            .expect_err("failed");
        assert!(
            error.to_string().contains("transferred nothing")
                && error.to_string().contains("shortened the file")
        );
    }
}

#[test]
fn short_and_interrupted_requests_are_completed() {
    for engine in engines() {
        let faults = [
            (0, Fault::Short(PAGE)),
            (1, Fault::Errno(libc::EINTR)),
            (3, Fault::Errno(libc::EAGAIN)),
            (6, Fault::Short(PAGE)),
        ];
        let (mut to, result) = faulty_read(engine, &faults);
        result.expect("completed");
        assert!(to.bytes() == Buffer::filled(16, 5).bytes(), "{engine:?}");
    }
}

#[test]
fn late_request_fails_the_transfer_after_it_has_come_back() {
    for engine in engines() {
        let error = faulty_read(engine, &[(2, Fault::Late)])
            .1
            .expect_err("late");
        assert!(
            matches!(error.cause(), Some(SwapError::Late { op: "read", .. })),
            "{error}"
        );
    }
}

#[test]
fn registration_is_optional() {
    for engine in engines() {
        let (_dir, file, lane, stream) = lane(16, options(engine));
        let from = Buffer::filled(16, 3);
        let mut to = Buffer::new(16);
        // More buffers than the kernel registers.
        lane.register(&vec![from.0.clone(); 20_000]);
        if engine == SwapEngine::IoUring {
            let notices = file.notices();
            assert!(
                notices
                    .iter()
                    .any(|notice| notice.contains("raise ulimit -l")),
                "{notices:?}"
            );
        }
        lane.register(std::slice::from_ref(&from.0));
        // In place of the first.
        lane.register(&[to.0.clone(), from.0.clone()]);
        lane.write(&stream, &[(0, from.slice())]).expect("enqueued");
        lane.read(&stream, &[(0, to.slice())]).expect("enqueued");
        stream.synchronize(LIMIT).expect("transferred");
        assert!(to.bytes() == Buffer::filled(16, 3).bytes());
    }
}

#[test]
fn registered_memory_outlives_its_other_handles() {
    for engine in engines() {
        let (_dir, file, lane, stream) = lane(256, options(engine));
        let pool = Pool::new(HostDevice::new(), 1 << 30);
        let allocate = || {
            SwapBuffer::allocate(&pool, 256 * PAGE, Purpose::Workspace, &stream).expect("memory")
        };
        lane.register(&[allocate()]);
        pool.trim(LIMIT);

        // Were the registered memory unmapped, this would have its address, but not its pages.
        let mut buffer = Buffer(allocate());
        buffer.bytes().fill(7);
        lane.write(&stream, &[(0, buffer.slice())])
            .expect("enqueued");
        stream.synchronize(LIMIT).expect("written");
        buffer.bytes().fill(0);
        lane.read(&stream, &[(0, buffer.slice())])
            .expect("enqueued");
        stream.synchronize(LIMIT).expect("read");
        assert!(buffer.bytes().iter().all(|&byte| byte == 7), "{engine:?}");

        // The lane's handle was the last, if the kernel accepted the memory.
        drop(buffer);
        let refused = file
            .notices()
            .iter()
            .any(|notice| notice.contains("refuses to register"));
        let live = |pool: &Pool<HostDevice>| pool.report().total.live_bytes;
        assert_eq!(live(&pool) > 0, engine == SwapEngine::IoUring && !refused);
        drop(lane);
        assert_eq!(live(&pool), 0);
    }
}

#[test]
fn file_system_in_memory_is_named() {
    let Ok(dir) = tempfile::tempdir_in("/dev/shm") else {
        return eprintln!("NOT TESTED: no /dev/shm here");
    };
    let notices = file(dir.path(), 1, SwapOptions::default()).notices();
    assert!(
        notices
            .iter()
            .any(|notice| notice.contains("is a file system in memory")),
        "{notices:?}"
    );
}

#[test]
fn seeded_scheduler_finds_a_missing_wait() {
    for engine in engines() {
        for seed in 0..30 {
            for waits in [true, false] {
                let buffer = Buffer::new(4);
                let device = HostDevice::seeded(seed);
                let [swap, compute] =
                    ["swap", "compute"].map(|name| device.create_stream(name).expect("a stream"));
                let dir = folder();
                let lane = file(dir.path(), 4, options(engine)).lane().expect("a lane");
                lane.read(&swap, &[(0, buffer.slice())]).expect("enqueued");
                if waits {
                    follow(&compute, &swap);
                }
                let bytes = buffer.slice().typed::<u8>().expect("bytes");
                let sum = move || {
                    // SAFETY: host memory; the scheduler runs one operation at a time.
                    let _ = unsafe { bytes.as_host() }
                        .iter()
                        .map(|byte| u64::from(*byte))
                        .sum::<u64>();
                    Ok(())
                };
                compute.enqueue("sum", sum).expect("enqueued");
                let sound = swap.synchronize(LIMIT).is_ok() & compute.synchronize(LIMIT).is_ok();
                assert_eq!(sound, waits, "seed {seed}");
                assert!(
                    device
                        .violations()
                        .iter()
                        .all(|violation| violation.kind == ViolationKind::Race)
                );
            }
        }
    }
}

#[test]
fn seeded_scheduler_checks_the_file_too() {
    for engine in engines() {
        for seed in 0..30 {
            for (waits, page) in [(true, 3), (false, 3), (false, 4)] {
                let buffer = Buffer::new(4);
                let other = Buffer::new(1);
                let device = HostDevice::seeded(seed);
                let [swap, compute] =
                    ["swap", "other"].map(|name| device.create_stream(name).expect("a stream"));
                let dir = folder();
                let file = file(dir.path(), 5, options(engine));
                let lane = file.lane().expect("a lane");
                lane.read(&swap, &[(0, buffer.slice())]).expect("enqueued");
                if waits {
                    follow(&compute, &swap);
                }
                // Another buffer, and a page of the file that the first operation reads, or the
                // next one.
                lane.write(&compute, &[(at(page), other.slice())])
                    .expect("enqueued");
                let sound = swap.synchronize(LIMIT).is_ok() & compute.synchronize(LIMIT).is_ok();
                assert_eq!(sound, waits || page == 4, "seed {seed}");
            }
        }
    }
}
