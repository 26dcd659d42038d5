//! Stitching and failures of a pool: contents survive, blocks keep their addresses, and nothing
//! leaks.
#![cfg(not(miri))]

use std::sync::Arc;
use std::time::{Duration, Instant};

use zero_alloc::device::{DType, Device, Stream};
use zero_alloc::host::{HostDevice, HostPages, HostStream};
use zero_alloc::testing::{Call, Faulty, Simulated, SimulatedUse};
use zero_alloc::{AllocError, Block, Pool, Purpose};

use crate::Random;

const LIMIT: Duration = Duration::from_secs(60);
const PAGE: usize = 1 << 16;

/// The host with `pages` pages of 64 KiB.
fn paged(pages: usize) -> (HostDevice, Arc<HostPages>) {
    let memory = Arc::new(HostPages::new(PAGE, pages * PAGE).expect("memory files"));
    (HostDevice::new().with_pages(Arc::clone(&memory)), memory)
}

fn stream(device: &impl Device<Stream = HostStream>) -> HostStream {
    device.create_stream("compute").expect("a stream")
}

fn fill(device: &HostDevice, stream: &HostStream, block: &Block<HostDevice>, value: u8) {
    // SAFETY: the block lives, and one stream does all.
    let slice = unsafe { block.slice() };
    device
        .upload(stream, &vec![value; slice.len_bytes()], slice, LIMIT)
        .expect("uploaded");
}

fn check(device: &HostDevice, stream: &HostStream, block: &Block<HostDevice>, value: u8) {
    // SAFETY: the block lives, and one stream does all.
    let slice = unsafe { block.slice() };
    let mut seen = vec![0; slice.len_bytes()];
    device
        .download(stream, slice, &mut seen, LIMIT)
        .expect("downloaded");
    assert!(
        seen.iter().all(|b| *b == value),
        "the contents of {block:?} are lost"
    );
}

fn address(block: &Block<impl Device>) -> usize {
    // SAFETY: the address is not dereferenced.
    unsafe { block.slice() }.as_ptr().addr()
}

/// Blocks on two streams, and their expected contents.
struct Program {
    pool: Pool<HostDevice>,
    streams: [HostStream; 2],
    held: Vec<(Block<HostDevice>, u8)>,
    random: Random,
    max_bytes: u64,
}

impl Program {
    fn write(&self, block: &Block<HostDevice>, value: u8) {
        // SAFETY: used only by this operation, on the home stream.
        let slice = unsafe { block.slice() }.typed::<u8>().expect("bytes");
        let write = move || {
            // SAFETY: host memory; no other operation uses the block meanwhile.
            unsafe { slice.as_host_mut() }.fill(value);
            Ok(())
        };
        self.streams[0].enqueue("write", write).expect("enqueued");
    }

    fn check(&self, block: &Block<HostDevice>, stream: &HostStream, value: u8) {
        // SAFETY: used only by this operation; `step` orders the streams.
        let slice = unsafe { block.slice() }.typed::<u8>().expect("bytes");
        let check = move || {
            // SAFETY: host memory; no operation writes meanwhile.
            let seen = unsafe { slice.as_host() };
            assert!(seen.iter().all(|b| *b == value), "contents are lost");
            Ok(())
        };
        stream.enqueue("check", check).expect("enqueued");
    }

    fn step(&mut self, value: u8) {
        let compute = &self.streams[0];
        match self.random.below(7) {
            0..=3 => {
                let bytes = 1 + self.random.below(self.max_bytes) as usize;
                let purpose = Purpose::ALL[self.random.below(6) as usize];
                match self.pool.allocate(bytes, DType::U8, purpose, compute) {
                    Ok(block) => {
                        self.write(&block, value);
                        self.held.push((block, value));
                    }
                    Err(AllocError::OutOfMemory {
                        largest_free_bytes,
                        requested_bytes,
                        ..
                    }) => {
                        assert!(largest_free_bytes < requested_bytes, "it would have fitted");
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            4..=5 if !self.held.is_empty() => {
                let nth = self.random.below(self.held.len() as u64) as usize;
                let (block, value) = self.held.swap_remove(nth);
                self.check(&block, compute, value);
            }
            _ if !self.held.is_empty() => {
                // Another stream reads after the writes; the block may be freed while it does.
                let nth = self.random.below(self.held.len() as u64) as usize;
                let other = &self.streams[1];
                let written = compute.record().expect("recorded");
                other.wait(&written).expect("enqueued");
                let (block, value) = &self.held[nth];
                self.check(block, other, *value);
                let (block, _) = &mut self.held[nth];
                block.record_use(other).expect("recorded");
            }
            _ => {}
        }

        self.pool.check_invariants().expect("sound");
    }
}

/// Returns the pages that were stitched.
fn run_program(device: HostDevice, budget: usize, max_bytes: u64, steps: usize, seed: u64) -> u64 {
    let streams = [
        device.create_stream("compute").expect("a stream"),
        device.create_stream("comm").expect("a stream"),
    ];
    let pool = Pool::new(device.clone(), budget);
    let mut program = Program {
        pool,
        streams,
        held: Vec::new(),
        random: Random(seed),
        max_bytes,
    };

    for step in 0..steps {
        program.step(step as u8);
    }
    for (block, value) in &program.held {
        program.check(block, &program.streams[0], *value);
    }
    for stream in &program.streams {
        stream.synchronize(LIMIT).expect("all checks hold");
    }
    assert!(device.violations().is_empty(), "{:?}", device.violations());

    program.pool.report().stitched_pages
}

#[test]
fn contents_survive_reuse_and_stitching() {
    run_program(HostDevice::new(), 1 << 20, 40_000, 800, 1);
    let stitched = run_program(paged(16).0, 16 * PAGE, 3 * PAGE as u64, 800, 2);
    assert!(stitched > 10, "{stitched} pages were stitched");
    for seed in 0..8 {
        run_program(HostDevice::seeded(seed), 1 << 19, 40_000, 100, seed);
    }
}

#[test]
fn stitching_moves_nothing() {
    let (device, memory) = paged(16);
    let stream = stream(&device);
    let pool = Pool::new(device.clone(), 16 * PAGE);
    let mut blocks: Vec<_> = (0..16)
        .map(|_| {
            pool.allocate(PAGE, DType::U8, Purpose::Params, &stream)
                .expect("allocated")
        })
        .map(Some)
        .collect();

    for (i, block) in blocks.iter().flatten().enumerate() {
        fill(&device, &stream, block, i as u8);
    }
    let addresses: Vec<_> = blocks.iter().flatten().map(address).collect();
    blocks.iter_mut().step_by(2).for_each(|block| *block = None);
    let mut mapped = 0;

    for round in 0..5u8 {
        // Eight pages are free, and no two of them are adjacent.
        let large = pool
            .allocate(8 * PAGE, DType::U8, Purpose::Activations, &stream)
            .expect("stitched");
        fill(&device, &stream, &large, 100 + round);
        check(&device, &stream, &large, 100 + round);
        for (i, block) in blocks.iter().enumerate() {
            let Some(block) = block else { continue };
            assert_eq!(address(block), addresses[i]);
            check(&device, &stream, block, i as u8);
        }
        let report = pool.report();
        assert_eq!(report.reserved_bytes, 16 * PAGE);
        if round == 0 {
            mapped = report.stitched_pages;
            assert_eq!(mapped, 8);
        }
        // The view is kept and reused: no more pages are mapped.
        assert_eq!(report.stitched_pages, mapped);
        pool.check_invariants().expect("sound");
    }

    drop(blocks);
    let whole = pool
        .allocate(16 * PAGE, DType::U8, Purpose::Params, &stream)
        .expect("all is free");
    drop((whole, pool));
    wait_until(|| memory.live_pages() == 0);
}

#[test]
fn a_freed_view_is_reused_behind_its_uses() {
    let (device, _memory) = paged(4);
    let (a, b) = (
        stream(&device),
        device.create_stream("comm").expect("a stream"),
    );
    let pool = Pool::new(device, 4 * PAGE);

    let mut blocks: Vec<_> = (0..4)
        .map(|_| {
            pool.allocate(PAGE, DType::U8, Purpose::Params, &a)
                .expect("allocated")
        })
        .map(Some)
        .collect();

    blocks[0] = None;
    blocks[2] = None;
    let open = Arc::new(zero_alloc::host::Monitor::new(false));
    let view = pool
        .allocate(2 * PAGE, DType::U8, Purpose::Buckets, &a)
        .expect("stitched");
    let opened = Arc::clone(&open);
    a.enqueue("hold", move || {
        opened.wait_until(LIMIT, || "the test".into(), |open| open.then_some(()))
    })
    .expect("enqueued");
    drop(view);
    let again = pool
        .allocate(2 * PAGE, DType::U8, Purpose::Buckets, &b)
        .expect("stitched");
    let reused = b.record().expect("recorded");
    assert_eq!(zero_alloc::device::Event::is_done(&reused), Ok(false));
    open.update(|open| *open = true);
    b.synchronize(LIMIT).expect("ran");
    drop(again);
}

#[test]
fn out_of_memory_lists_holders() {
    let device = HostDevice::new();
    let stream = stream(&device);
    let pool = Pool::new(device, 1 << 20);
    let quarter = 1 << 18;
    let mut blocks: Vec<_> = [
        Purpose::Params,
        Purpose::Grads,
        Purpose::Params,
        Purpose::Optimizer,
    ]
    .map(|purpose| {
        pool.allocate(quarter, DType::U8, purpose, &stream)
            .expect("allocated")
    })
    .map(Some)
    .into();

    blocks[1] = None;
    blocks[3] = None;
    let error = pool
        .allocate(2 * quarter, DType::U8, Purpose::Buckets, &stream)
        .expect_err("fixed blocks");

    let AllocError::OutOfMemory {
        free_bytes,
        largest_free_bytes,
        ref holders,
        live_bytes,
        ..
    } = error
    else {
        panic!("{error}")
    };

    assert_eq!(
        (live_bytes, free_bytes, largest_free_bytes),
        (2 * quarter, 2 * quarter, quarter)
    );
    assert_eq!(*holders, [(Purpose::Params, 2 * quarter)]);
    assert!(
        error
            .to_string()
            .contains("524288 bytes live (Params 524288)"),
        "{error}"
    );
}

fn wait_until(mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LIMIT, "timed out");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Grows, fragments and stitches a pool. Returns the last error; its callers check for
/// leaks.
fn exercise<D: Device>(device: &D, page: usize) -> Result<(), AllocError> {
    let stream = device.create_stream("compute")?;
    let pool = Pool::new(device.clone(), 64 * page);
    let live = |pool: &Pool<D>| pool.report().total.live_bytes;
    let mut fixed = Vec::new();
    let mut result = Ok(());

    for i in 0..24 {
        let before = live(&pool);
        match pool.allocate(page, DType::U8, Purpose::Params, &stream) {
            Ok(block) => fixed.push(block),
            Err(error) => {
                assert_eq!(live(&pool), before, "a failed allocation is not accounted");
                result = Err(error);
            }
        }
        if i % 3 == 2 {
            drop(fixed.remove(fixed.len() / 2));
        }
        pool.check_invariants().expect("sound");
    }

    let mut large = Vec::new();
    for pages in [20, 9, 30, 5] {
        match pool.allocate(pages * page, DType::U8, Purpose::Activations, &stream) {
            Ok(block) => large.push(block),
            Err(error) => result = Err(error),
        }
        large.truncate(2);
        pool.check_invariants().expect("sound");
    }

    result
}

#[test]
fn a_simulated_device_needs_no_memory() {
    let device = Simulated::new(139_000_000_000, 2 << 20);
    let stream = stream(&device);
    let pool = Pool::new(device.clone(), 139_000_000_000);
    let block = pool
        .allocate(130_000_000_000, DType::U8, Purpose::Params, &stream)
        .expect("allocated");
    assert!(device.usage().live_bytes >= 130_000_000_000);
    assert!(
        pool.allocate(20_000_000_000, DType::U8, Purpose::Params, &stream)
            .is_err()
    );
    drop((block, pool));
    wait_until(|| device.usage().live_bytes == 0);
    assert_eq!(device.usage().reserved_address_bytes, 0);
    assert!(
        device.usage().mistakes.is_empty(),
        "{:?}",
        device.usage().mistakes
    );
}

#[test]
fn nothing_leaks_after_failures() {
    for virtual_memory in [true, false] {
        for call in [
            Call::Allocate,
            Call::Reserve,
            Call::Create,
            Call::Map,
            Call::Copy,
            Call::Record,
            Call::CreateStream,
        ] {
            let mut failed = 0;
            for nth in (1..12).chain([20, 30, 45]) {
                let mut simulated = Simulated::new(48 << 16, 1 << 16);
                if !virtual_memory {
                    simulated = simulated.without_virtual_memory();
                }
                let device = Faulty::new(simulated);
                device.fail(call, nth);
                let result = exercise(&device, 1 << 16);
                failed += usize::from(result.is_err());
                let unused = |usage: &SimulatedUse| {
                    (
                        usage.live_bytes,
                        usage.reserved_address_bytes,
                        usage.mapped_pages,
                    ) == (0, 0, 0)
                };
                wait_until(|| unused(&device.inner().usage()));
                let usage = device.inner().usage();
                assert!(
                    usage.mistakes.is_empty(),
                    "{call:?} {nth}: {:?}",
                    usage.mistakes
                );
                if device.calls(call) < nth {
                    break;
                }
            }
            assert!(
                failed > 0 || !device_makes(call, virtual_memory),
                "{call:?} never failed"
            );
        }
    }
}

/// Whether a failure of the call must reach the caller.
fn device_makes(call: Call, virtual_memory: bool) -> bool {
    match call {
        Call::Allocate => !virtual_memory,
        // If no addresses can be reserved, a pool uses backings; if no page can be created, it uses
        // reserved memory.
        Call::Reserve | Call::Create | Call::Map => false,
        Call::Copy | Call::Record | Call::Wait => false,
        Call::CreateStream => true,
        other => panic!("state whether a failure of {other:?} must reach the caller"),
    }
}
