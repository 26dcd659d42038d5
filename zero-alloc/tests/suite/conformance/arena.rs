//! Stitching: contents survive, blocks keep their addresses, and failures change nothing.

use zero_alloc::device::{DType, Device, Memory, Stream};
use zero_alloc::testing::{Call, Faulty};
use zero_alloc::{AllocError, Pool, Purpose};

use super::backend::{Backend, LIMIT, address, check, fill};
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

/// Random blocks of a small pool are written and read through two streams.
pub(crate) fn contents_survive_reuse<B: Backend>(backend: &B) {
    let device = backend.device();
    let compute = B::stream(&device, "compute");
    let other = B::stream(&device, "other");
    let budget = 8 * page_bytes(&device);
    let pool = Pool::new(device, budget);
    let mut random = Random(5);
    let mut held = Vec::new();
    let mut allocated_bytes = 0;

    for step in 0..if cfg!(miri) { 60 } else { 400u64 } {
        let value = step as u8;
        match random.below(7) {
            0..=3 => {
                let bytes = 1 + random.below(budget as u64 / 3) as usize;
                let purpose = Purpose::ALL[random.below(6) as usize];
                match pool.allocate(bytes, DType::U8, purpose, &compute) {
                    Ok(block) => {
                        // SAFETY: the block lives, and events order the streams.
                        fill(&pool, &compute, unsafe { block.slice() }, value);
                        held.push((block, value));
                        allocated_bytes += bytes;
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
            4..=5 if !held.is_empty() => {
                let (block, value) = held.swap_remove(random.below(held.len() as u64) as usize);
                // SAFETY: as above.
                check(&pool, &compute, unsafe { block.slice() }, value);
            }
            _ if !held.is_empty() => {
                let nth = random.below(held.len() as u64) as usize;
                let (block, value) = &mut held[nth];
                let written = compute.record().expect("recorded");
                other.wait(&written).expect("enqueued");
                // SAFETY: as above.
                check(&pool, &other, unsafe { block.slice() }, *value);
                block.record_use(&other).expect("recorded");
            }
            _ => {}
        }
        pool.check_invariants().expect("sound");
    }

    for (block, value) in &held {
        // SAFETY: as above.
        check(&pool, &compute, unsafe { block.slice() }, *value);
    }
    assert!(
        allocated_bytes > budget,
        "only {allocated_bytes} bytes of a pool of {budget} were allocated"
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
    assert_eq!(report.stitched_pages, 4);
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
