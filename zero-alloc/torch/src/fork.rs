//! Processes that were forked from one that uses the arena, such as the workers of a `DataLoader`.
//!
//! CUDA does not work there, and another thread may have held a lock of the arena when the process
//! was forked, which nobody releases in the child. So the C functions touch nothing there: those
//! that free or end something return, since the memory is the parent's, and all others fail.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether this process was forked after the first call.
static IS_CHILD: AtomicBool = AtomicBool::new(false);

/// Runs in the child, on the thread that forked.
extern "C" fn in_child() {
    IS_CHILD.store(true, Ordering::Relaxed);
}

/// Whether this process is a child. The first call, which comes before any lock, registers what
/// tells; it must not itself make others wait.
pub(crate) fn is_child() -> bool {
    static IS_REGISTERED: AtomicBool = AtomicBool::new(false);
    if !IS_REGISTERED.load(Ordering::Relaxed) && !IS_REGISTERED.swap(true, Ordering::Relaxed) {
        // SAFETY: the function only stores to a static. If the system has no memory for the entry,
        // children are as without it.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    }
    IS_CHILD.load(Ordering::Relaxed)
}

/// Prints a line to stderr without std's lock of it, which another thread may have held at the
/// fork.
pub(crate) fn print(text: &str) {
    let stderr = io::stderr().as_fd().try_clone_to_owned();
    if let Ok(stderr) = stderr {
        // stderr may be closed.
        let _ = std::fs::File::from(stderr).write_all(format!("{text}\n").as_bytes());
    }
}
