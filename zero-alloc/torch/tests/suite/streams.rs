//! Order between streams: default streams, recorded streams, destroyed streams.

use std::time::Duration;

use zero_alloc::device::{Event, Stream};
use zero_alloc_torch::c_api::zero_torch_forget_stream;

use crate::{BLOCK_BYTES, LIMIT, Latch, error_of, free, malloc, open, raw, record_stream};

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_default_streams_are_ordered() {
    let fixture = open();
    let other = fixture.stream("other");
    for handle in [0, 1, 2] {
        let default = fixture.default_stream(handle);
        let block = malloc(BLOCK_BYTES, &default);
        let latch = Latch::close(&default);
        free(block);
        fixture.assert_waits(&other, block, &latch);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_default_handles_0_and_1_are_one_stream() {
    let fixture = open();
    let [zero, one] = [0, 1].map(|handle| fixture.default_stream(handle));
    let block = malloc(BLOCK_BYTES, &zero);
    free(block);
    let latch = Latch::close(&zero);
    let again = malloc(BLOCK_BYTES, &one);
    latch.open();
    assert_eq!(again, block);
    free(again);
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_stream_of_another_thread_is_waited_for() {
    let fixture = open();
    let other = fixture.stream("other");
    // The block's home is the default stream of a thread, and this thread frees it.
    let (block, latch) = std::thread::scope(|scope| {
        let allocate = || {
            let default = fixture.default_stream(2);
            let block = malloc(BLOCK_BYTES, &default);
            (block.expose_provenance(), Latch::close(&default))
        };
        scope.spawn(allocate).join().expect("no panic")
    });
    let block = std::ptr::with_exposed_provenance_mut(block);

    let opens_later = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        latch.open();
        std::time::Instant::now()
    });
    assert_eq!(error_of(|| free(block)), "");
    let freed = std::time::Instant::now();
    assert!(
        freed >= opens_later.join().expect("no panic"),
        "did not wait"
    );
    let again = malloc(BLOCK_BYTES, &other);
    assert_eq!(again, block);
    free(again);
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_recorded_stream_is_waited_for() {
    let fixture = open();
    let home = fixture.stream("home");
    let user = fixture.stream("user");
    let block = malloc(BLOCK_BYTES, &home);
    record_stream(block, &user);
    // Uses count up to the free, not to the call above.
    let latch = Latch::close(&user);
    free(block);
    fixture.assert_waits(&home, block, &latch);
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_uses_after_free_do_not_count() {
    let fixture = open();
    let home = fixture.stream("home");
    let user = fixture.stream("user");
    let block = malloc(BLOCK_BYTES, &home);
    record_stream(block, &user);
    free(block);
    let latch = Latch::close(&user);
    let again = malloc(BLOCK_BYTES, &home);
    assert_eq!(again, block);
    let reached = home.record().expect("recorded");
    reached.synchronize(LIMIT).expect("does not wait");
    latch.open();
    free(again);
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_stream_destroyed_after_free_is_waited_for() {
    let fixture = open();
    let other = fixture.stream("other");
    let [home, user] = ["home", "user"].map(|name| fixture.stream(name));
    let block = malloc(BLOCK_BYTES, &home);
    record_stream(block, &user);
    let [latch, user_latch] = [Latch::close(&home), Latch::close(&user)];
    free(block);
    // The last handles: the driver destroys the streams, whose operations still run.
    drop((home, user));
    user_latch.open();
    // A use of a destroyed handle fails the allocation.
    assert_eq!(error_of(|| fixture.assert_waits(&other, block, &latch)), "");
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_stream_destroyed_before_free_is_announced() {
    let fixture = open();
    let other = fixture.stream("other");
    let home = fixture.stream("home");
    let block = malloc(BLOCK_BYTES, &home);
    let latch = Latch::close(&home);
    // SAFETY: the stream lives.
    assert_eq!(unsafe { zero_torch_forget_stream(0, raw(&home)) }, 0);
    drop(home);
    let waits = || {
        free(block);
        fixture.assert_waits(&other, block, &latch);
    };
    assert_eq!(error_of(waits), "");
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_unannounced_end_is_waited_for() {
    let fixture = open();
    if !fixture.is_stand_in() {
        println!("SKIPPED: CUDA leaves the use of a destroyed stream undefined");
        return;
    }
    let other = fixture.stream("other");
    let home = fixture.stream("home");
    let block = malloc(BLOCK_BYTES, &home);
    let latch = Latch::close(&home);
    let end = home.record().expect("recorded");
    drop(home);

    let opens_later = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        latch.open();
    });
    assert_eq!(error_of(|| free(block)), "");
    assert_eq!(end.is_done(), Ok(true), "the host waited for the device");
    opens_later.join().expect("no panic");
    let again = malloc(BLOCK_BYTES, &other);
    assert_eq!(again, block);
    free(again);
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_one_stream_does_not_wait_for_itself() {
    let fixture = open();
    let home = fixture.stream("home");
    let latch = Latch::close(&home);
    let block = malloc(BLOCK_BYTES, &home);
    free(block);
    let again = malloc(BLOCK_BYTES, &home);
    assert_eq!(again, block);
    latch.open();
    free(again);
}
