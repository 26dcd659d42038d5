//! Wrong arguments, and an exhausted arena.

use std::os::unix::process::ExitStatusExt;
use zero_alloc_torch::c_api::*;

use crate::statistics::statistics;
use crate::{
    BLOCK_BYTES, BUDGET_BYTES, error_of, free, last_error, malloc, open, record_stream, run_alone,
};

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_zero_bytes_are_null() {
    let fixture = open();
    let stream = fixture.stream("a");
    let calls = || {
        assert!(malloc(0, &stream).is_null());
        free(std::ptr::null_mut());
        record_stream(std::ptr::null_mut(), &stream);
    };
    assert_eq!(error_of(calls), "");
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_wrong_arguments_are_refused() {
    let fixture = open();
    let stream = crate::raw(&fixture.stream("a"));
    let refused = |bytes, device| {
        // SAFETY: refused before the stream is used.
        error_of(|| assert!(unsafe { zero_torch_malloc(bytes, device, stream) }.is_null()))
    };
    assert!(refused(-1, 0).ends_with("malloc: the size -1 is negative"));
    assert!(refused(1, -1).ends_with("there is no device -1"));
    assert!(refused(1, 64).ends_with("there is no device 64"));
    let missing = refused(1, 63);
    assert!(missing.contains("CUDA_ERROR_INVALID_DEVICE"), "{missing}");
    let fraction = error_of(|| zero_torch_set_memory_fraction(1.5, 1));
    assert!(
        fraction.ends_with("1.5 is not between 0 and 1"),
        "{fraction}"
    );
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_double_free_is_refused() {
    let fixture = open();
    let stream = fixture.stream("a");
    let block = malloc(1000, &stream);
    free(block);
    let before = statistics();
    let error = error_of(|| free(block));
    let expected = format!("free: {:#x} is not a live block of the arena", block.addr());
    assert!(error.contains(&expected), "{error}");
    assert_eq!(statistics(), before);
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_unknown_pointer_is_refused() {
    let fixture = open();
    let stream = fixture.stream("a");
    let block = malloc(1000, &stream);
    let before = statistics();
    for unknown in [block.wrapping_add(1), std::ptr::dangling_mut()] {
        let freed = error_of(|| free(unknown));
        let recorded = error_of(|| record_stream(unknown, &stream));
        assert!(
            freed.contains("free: ") && freed.contains("not a live block"),
            "{freed}"
        );
        assert!(recorded.contains("record_stream: "), "{recorded}");
    }
    assert_eq!(statistics(), before);
    free(block);
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_out_of_memory_names_the_holders() {
    let fixture = open();
    let stream = fixture.stream("a");
    let before = statistics();
    let held = malloc(BUDGET_BYTES / 2, &stream);
    assert!(!held.is_null());
    let error = error_of(|| assert!(malloc(BUDGET_BYTES, &stream).is_null()));
    let of_stream = format!(
        "{:#x}: {} bytes in 1 blocks",
        crate::raw(&stream).addr(),
        BUDGET_BYTES / 2
    );
    for part in [
        &format!("malloc: failed to allocate {BUDGET_BYTES} bytes"),
        &format!("the pool's budget is {BUDGET_BYTES} bytes"),
        &of_stream,
        &format!(
            "largest blocks [{} bytes at {:#x}",
            BUDGET_BYTES / 2,
            held.addr()
        ),
        "bytes free",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert_eq!(statistics().out_of_memory, before.out_of_memory + 1);
    // The arena still works, and all of it is free again.
    free(held);
    let all = malloc(BUDGET_BYTES, &stream);
    assert!(!all.is_null(), "{}", last_error());
    free(all);
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_budget_is_set_before_the_first_allocation() {
    let fixture = open();
    let stream = fixture.stream("a");
    free(malloc(BLOCK_BYTES, &stream));
    let error = error_of(|| assert_eq!(zero_torch_set_budget(0, 1 << 30), -1));
    assert!(error.contains("device 0 has an arena already"), "{error}");
}

/// The variable that makes the next test end its process.
const ABORTS: &str = "ZERO_ALLOC_TORCH_TEST_ABORTS";

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_failure_ends_the_process_on_request() {
    let fixture = open();
    if std::env::var_os(ABORTS).is_some() {
        zero_torch_abort_on_failure(1);
        malloc(2 * BUDGET_BYTES, &fixture.stream("a"));
        unreachable!("aborted");
    }

    let output = run_alone(
        "failures::cuda_torch_failure_ends_the_process_on_request",
        ABORTS,
        "1",
    );
    let text = String::from_utf8_lossy(&output.stderr);
    const SIGABRT: i32 = 6;
    assert_eq!(output.status.signal(), Some(SIGABRT), "{text}");
    assert!(text.contains("malloc: failed to allocate"), "{text}");
    assert!(text.contains("must not return null"), "{text}");
}
