//! Compaction and stitching: contents survive, fixed blocks keep their addresses, and failures
//! change nothing.

use zero_alloc::device::{DType, Device, Memory, Stream};
use zero_alloc::testing::{Call, Faulty};
use zero_alloc::{AllocError, Pool, Purpose};

use super::backend::{Backend, LIMIT, address, check, check_movable, fill, fill_movable};
use crate::Random;

/// The page size of the device, or a replacement if it has no pages.
fn page_bytes(device: &impl Device) -> usize {
    let without = if cfg!(miri) { 1 << 10 } else { 1 << 16 };
    device
        .virtual_memory()
        .map_or(without.max(device.granularity_bytes()), |memory| {
            memory.page_bytes()
        })
}

/// Random blocks of a small pool are written and read through two streams while it compacts.
pub(crate) fn contents_survive_compaction<B: Backend>(backend: &B) {
    let device = backend.device();
    let compute = B::stream(&device, "compute");
    let other = B::stream(&device, "other");
    let budget = 8 * page_bytes(&device);
    let pool = Pool::new(device, budget);
    let mut random = Random(5);
    let mut held = Vec::new();

    for step in 0..if cfg!(miri) { 60 } else { 400u64 } {
        let value = step as u8;
        match random.below(8) {
            0..=3 => {
                let bytes = 1 + random.below(budget as u64 / 12) as usize;
                match pool.allocate_movable(
                    bytes,
                    DType::U8,
                    Purpose::ALL[random.below(6) as usize],
                    &compute,
                ) {
                    Ok(block) => {
                        fill_movable(&pool, &compute, &block, value);
                        held.push((block, value));
                    }
                    Err(AllocError::OutOfMemory {
                        after_compaction_bytes,
                        requested_bytes,
                        ..
                    }) => {
                        assert!(
                            after_compaction_bytes < requested_bytes,
                            "it would have fitted"
                        );
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            4..=5 if !held.is_empty() => {
                let (block, value) = held.swap_remove(random.below(held.len() as u64) as usize);
                check_movable(&pool, &compute, &block, value);
            }
            6 if !held.is_empty() => {
                let (block, value) = &held[random.below(held.len() as u64) as usize];
                other
                    .wait(&compute.record().expect("recorded"))
                    .expect("enqueued");
                check_movable(&pool, &other, block, *value);
            }
            _ => {
                pool.compact(random.below(budget as u64) as usize, &compute)
                    .expect("the stream is there");
            }
        }
        pool.check_invariants().expect("sound");
    }

    for (block, value) in &held {
        check_movable(&pool, &compute, block, *value);
    }
    let report = pool.report();
    assert!(
        report.compactions > 0 && report.moved_bytes > 0,
        "nothing was tested: {report:?}"
    );
}

pub(crate) fn large_block_is_stitched<B: Backend>(backend: &B) {
    let device = backend.device();
    if device.virtual_memory().is_none() {
        return;
    }
    let page = page_bytes(&device);
    let stream = B::stream(&device, "compute");
    let pool = Pool::new(device, 8 * page);

    let mut blocks: Vec<_> = (0..8u8)
        .map(|i| {
            let block = pool
                .allocate(page, DType::U8, Purpose::Params, &stream)
                .expect("room");
            // SAFETY: the block lives, and one stream does all.
            fill(&pool, &stream, unsafe { block.slice() }, i);
            Some(block)
        })
        .collect();

    for i in [1, 3, 4, 6] {
        blocks[i] = None;
    }
    let before: Vec<_> = blocks.iter().flatten().map(address).collect();

    for round in 0..3u8 {
        let large = pool
            .allocate(4 * page, DType::U8, Purpose::Activations, &stream)
            .expect("stitched");
        // SAFETY: the block lives, and one stream does all.
        let slice = unsafe { large.slice() };
        fill(&pool, &stream, slice, 100 + round);
        for (i, block) in blocks.iter().enumerate() {
            if let Some(block) = block {
                // SAFETY: the block lives, and one stream does all.
                check(&pool, &stream, unsafe { block.slice() }, i as u8);
            }
        }
        check(&pool, &stream, slice, 100 + round);
    }

    assert_eq!(
        before,
        blocks.iter().flatten().map(address).collect::<Vec<_>>()
    );
    let report = pool.report();
    // The second and third block reused the first view.
    assert_eq!((report.stitched_pages, report.moved_bytes), (4, 0));
    pool.check_invariants().expect("sound");
}

/// Each kind of call of the device fails once, at the 1st, 2nd, 3rd and 6th call. Live blocks keep
/// their contents, and a retry succeeds.
pub(crate) fn pool_survives_every_failing_call<B: Backend>(backend: &B) {
    for call in [
        Call::Allocate,
        Call::Reserve,
        Call::Create,
        Call::Map,
        Call::Copy,
    ] {
        for nth in [1, 2, 3, 6] {
            let device = Faulty::new(backend.device());
            let page = page_bytes(&device);
            let stream = device.create_stream("compute").expect("a stream");
            let mut held = Vec::new();
            device.fail(call, nth);
            // If addresses cannot be reserved, the pool uses backings, which have gaps between
            // them.
            let paged = device.virtual_memory().is_some() && (call, nth) != (Call::Reserve, 1);
            let pool = Pool::new(device.clone(), if paged { 8 * page } else { 16 * page });
            for i in 0..8u8 {
                let block = pool
                    .allocate(page, DType::U8, Purpose::Params, &stream)
                    .or_else(|_| pool.allocate(page, DType::U8, Purpose::Params, &stream))
                    .expect("the second time it succeeds");
                // SAFETY: the block lives, and one stream does all.
                fill(&pool, &stream, unsafe { block.slice() }, i);
                held.push(Some(block));
            }
            held[2] = None;
            held[5] = None;
            let large = || pool.allocate(2 * page, DType::U8, Purpose::Buckets, &stream);
            let large = large().or_else(|_| large());
            if paged {
                let large = large.expect("the second time it succeeds");
                // SAFETY: the block lives, and one stream does all.
                fill(&pool, &stream, unsafe { large.slice() }, 77);
            }
            for (i, block) in held.iter().enumerate() {
                if let Some(block) = block {
                    // SAFETY: the block lives, and one stream does all.
                    check(&pool, &stream, unsafe { block.slice() }, i as u8);
                }
            }
            pool.check_invariants().expect("sound");
            stream.synchronize(LIMIT).expect("sound");
        }
    }
}
