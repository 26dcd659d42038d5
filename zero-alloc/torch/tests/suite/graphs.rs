//! Memory of recorded graphs.

use zero_alloc::device::{Device, Stream};
use zero_alloc_torch::c_api::*;

use crate::statistics::statistics;
use crate::{BLOCK_BYTES, LIMIT, error_of, free, malloc, open};

fn pool(first: u64) -> impl Fn() -> zero_alloc_torch::GraphPoolId {
    move || zero_alloc_torch::GraphPoolId { first, second: 3 }
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_graph_keeps_its_memory() {
    let fixture = open();
    let device = &fixture.device;
    let stream = fixture.stream("recorded");
    let other = fixture.stream("other");
    let result = malloc(BLOCK_BYTES, &stream);
    let before = statistics().live_bytes;
    let id = pool(7);

    let mut scratch = std::ptr::null_mut();
    zero_torch_begin_graph_pool(0, id(), std::ptr::null_mut());
    let record = || {
        scratch = malloc(BLOCK_BYTES, &stream);
        assert!(!scratch.is_null());
        device.fill_zero(&stream, fixture.slice(scratch, BLOCK_BYTES))?;
        let from = fixture.slice(scratch, BLOCK_BYTES);
        device.copy(&stream, from, fixture.slice(result, BLOCK_BYTES))?;
        free(scratch);
        Ok(())
    };
    let graph = stream.capture(record).expect("recorded");
    zero_torch_end_graph_pool(0, id());

    // Freed, but others do not get it while the graph may be launched.
    assert_eq!(statistics().live_bytes, before + BLOCK_BYTES as u64);
    let theirs = malloc(BLOCK_BYTES, &other);
    assert_ne!(theirs, scratch);
    for _ in 0..2 {
        // SAFETY: the arena keeps the graph's memory; one launch at a time.
        unsafe { graph.launch(&stream) }.expect("enqueued");
    }
    let mut bytes = vec![1; BLOCK_BYTES];
    let from = fixture.slice(result, BLOCK_BYTES);
    device
        .download(&stream, from, &mut bytes, LIMIT)
        .expect("downloaded");
    assert!(bytes.iter().all(|byte| *byte == 0));

    drop(graph);
    // SAFETY: the graph is gone.
    let released = || unsafe { zero_torch_release_graph_pool(0, id()) };
    assert_eq!(error_of(released), "");
    free(theirs);
    free(result);
    assert_eq!(statistics().live_bytes, before - BLOCK_BYTES as u64);
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_free_while_recorded_is_deferred() {
    let fixture = open();
    let stream = fixture.stream("recorded");
    let before = statistics().live_bytes;
    let block = malloc(BLOCK_BYTES, &stream);

    let record = || {
        free(block);
        fixture.device.fill_zero(&stream, fixture.slice(block, 0))
    };
    let graph = stream.capture(record).expect("recorded");
    assert_eq!(statistics().live_bytes, before + BLOCK_BYTES as u64);
    // The next allocation frees it.
    let next = malloc(BLOCK_BYTES, &stream);
    assert_eq!(statistics().live_bytes, before + BLOCK_BYTES as u64);
    free(next);
    assert_eq!(statistics().live_bytes, before);
    drop(graph);
    stream.synchronize(LIMIT).expect("sound");
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_graph_without_a_pool_is_waited_for() {
    let fixture = open();
    let stream = fixture.stream("recorded");
    let before = statistics().live_bytes;
    let mut block = std::ptr::null_mut();
    let record = || {
        block = malloc(BLOCK_BYTES, &stream);
        fixture
            .device
            .fill_zero(&stream, fixture.slice(block, BLOCK_BYTES))
    };
    let graph = stream.capture(record).expect("recorded");
    // SAFETY: the block is live until the launch has run.
    unsafe { graph.launch(&stream) }.expect("enqueued");
    drop(graph);
    assert_eq!(error_of(|| free(block)), "");
    assert_eq!(statistics().live_bytes, before);
}

/// `del graph`, then `del out`.
#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_result_that_outlives_its_graph_is_returned() {
    let fixture = open();
    let stream = fixture.stream("recorded");
    let before = statistics().live_bytes;
    for round in 0..4 {
        let id = pool(100 + round);
        let mut out = std::ptr::null_mut();
        zero_torch_begin_graph_pool(0, id(), std::ptr::null_mut());
        let record = || {
            out = malloc(BLOCK_BYTES, &stream);
            fixture
                .device
                .fill_zero(&stream, fixture.slice(out, BLOCK_BYTES))
        };
        let graph = stream.capture(record).expect("recorded");
        zero_torch_end_graph_pool(0, id());
        // SAFETY: the block is live until the launch has run, for which the free waits.
        unsafe { graph.launch(&stream) }.expect("enqueued");
        drop(graph);
        // SAFETY: the graph is gone.
        let released = || unsafe { zero_torch_release_graph_pool(0, id()) };
        assert_eq!(error_of(released), "");
        assert_eq!(statistics().live_bytes, before + BLOCK_BYTES as u64);
        assert_eq!(error_of(|| free(out)), "");
        assert_eq!(statistics().live_bytes, before, "round {round}");
    }
}

/// Two graphs share a pool: the memory of both is kept until both are gone.
#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_shared_pool_is_kept_for_its_last_graph() {
    let fixture = open();
    let stream = fixture.stream("recorded");
    let before = statistics().live_bytes;
    let id = pool(200);
    let mut graphs = Vec::new();
    let mut blocks = Vec::new();
    for _ in 0..2 {
        zero_torch_begin_graph_pool(0, id(), std::ptr::null_mut());
        let record = || {
            let block = malloc(BLOCK_BYTES, &stream);
            blocks.push(block);
            fixture
                .device
                .fill_zero(&stream, fixture.slice(block, BLOCK_BYTES))?;
            free(block);
            Ok(())
        };
        graphs.push(stream.capture(record).expect("recorded"));
        zero_torch_end_graph_pool(0, id());
    }

    let both = before + 2 * BLOCK_BYTES as u64;
    assert_eq!(statistics().live_bytes, both);
    // SAFETY: the graph that is released is gone, and the other keeps the pool.
    let release = || unsafe { zero_torch_release_graph_pool(0, id()) };
    drop(graphs.pop());
    assert_eq!(error_of(release), "");
    assert_eq!(statistics().live_bytes, both, "the first graph lives");
    // SAFETY: the arena keeps the graph's memory.
    unsafe { graphs[0].launch(&stream) }.expect("enqueued");
    drop(graphs);
    assert_eq!(error_of(release), "");
    assert_eq!(statistics().live_bytes, before);
    // One more has no effect.
    assert_eq!(error_of(release), "");
}
