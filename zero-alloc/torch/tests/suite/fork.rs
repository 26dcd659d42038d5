//! Forks while another thread holds the arena's locks.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use zero_alloc_torch::c_api::*;

use crate::statistics::statistics;
use crate::{LIMIT, free, last_error, malloc, open, raw, record_stream};

const FORKS: usize = 300;

/// Calls the functions in a child. Returns the number of the check that failed, or 0.
fn in_child(ours: *mut u8, stream: &zero_alloc::cuda::CudaStream) -> c_int {
    let before = last_error();
    record_stream(ours, stream);
    free(ours);
    zero_torch_empty_cache();
    if last_error() != before {
        return 1;
    }
    // Silent, since 300 children would print it.
    // SAFETY: the child has no other threads.
    unsafe { libc::close(2) };
    if !malloc(1000, stream).is_null() {
        return 2;
    }
    if !last_error().contains("malloc: this process was forked") {
        return 3;
    }
    let mut statistics = zero_alloc_torch::Statistics {
        size: size_of::<zero_alloc_torch::Statistics>() as u64,
        ..Default::default()
    };
    // SAFETY: a structure of its size.
    if unsafe { zero_torch_get_statistics(0, &raw mut statistics) } != -1 {
        return 4;
    }
    if zero_torch_set_budget(63, 1) != -1 {
        return 5;
    }
    // SAFETY: the stream lives.
    if unsafe { zero_torch_forget_stream(0, raw(stream)) } != -1 {
        return 6;
    }
    0
}

/// The exit status of a child, or `None` after the limit, when it is killed.
fn wait_for(child: c_int) -> Option<c_int> {
    let start = Instant::now();
    loop {
        let mut status = 0;
        // SAFETY: writes one number.
        let ended = unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) };
        if ended == child {
            return Some(status);
        }
        if start.elapsed() > LIMIT {
            // SAFETY: a child of this process that was not waited for.
            unsafe { libc::kill(child, libc::SIGKILL) };
            // SAFETY: as above.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            return None;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_child_of_a_fork_waits_for_no_lock() {
    let fixture = open();
    let stream = fixture.stream("parent");
    let ours = malloc(1000, &stream);
    let before = statistics().live_bytes;
    let ended = AtomicBool::new(false);

    std::thread::scope(|scope| {
        for name in ["a", "b"] {
            let stream = fixture.stream(name);
            let ended = &ended;
            scope.spawn(move || {
                while !ended.load(Ordering::Relaxed) {
                    free(malloc(1000, &stream));
                    zero_torch_empty_cache();
                }
            });
        }

        let mut failures = Vec::new();
        for _ in 0..FORKS {
            // SAFETY: the child calls the library's functions, which are made for it, and ends.
            let child = unsafe { libc::fork() };
            assert!(child >= 0, "no process");
            if child == 0 {
                let failed = in_child(ours, &stream);
                // SAFETY: ends the child without the test's end.
                unsafe { libc::_exit(failed) };
            }
            match wait_for(child) {
                Some(0) => {}
                failed => failures.push(failed),
            }
            if !failures.is_empty() {
                break;
            }
        }
        ended.store(true, Ordering::Relaxed);
        assert!(failures.is_empty(), "{failures:?}");
    });

    assert_eq!(statistics().live_bytes, before);
    free(ours);
}
