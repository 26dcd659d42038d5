//! Limits of a process that renders a chat template of a stranger.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Processor time of one rendering.
pub(super) const RENDERING_SECONDS: u64 = 1;

/// Memory that a worker may use, beyond that of the program itself.
pub(super) const WORKER_BYTES: u64 = 512 << 20;

/// Whether this process is a worker.
static IS_WORKER: AtomicBool = AtomicBool::new(false);

/// Makes this process a worker, whose memory is limited to what it has and [`WORKER_BYTES`] more.
pub(super) fn begin_worker() -> io::Result<()> {
    let own_bytes = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|text| text.split(' ').next()?.parse::<u64>().ok())
        .map_or(0, |pages| pages * rustix::param::page_size() as u64);
    let Rlimit { current, maximum } = getrlimit(Resource::As);
    let wanted = own_bytes + WORKER_BYTES;
    let current = Some(current.map_or(wanted, |current| current.min(wanted)));
    setrlimit(Resource::As, Rlimit { current, maximum })?;
    IS_WORKER.store(true, Ordering::Relaxed);
    Ok(())
}

/// Gives a worker [`RENDERING_SECONDS`] of processor time from now; its process then ends by
/// `SIGPROF`. Does nothing in other processes.
pub(super) fn start_of_rendering() {
    if !IS_WORKER.load(Ordering::Relaxed) {
        return;
    }
    let limit = libc::itimerval {
        it_interval: libc::timeval {
            tv_sec: 0,
            tv_usec: 0,
        },
        it_value: libc::timeval {
            tv_sec: RENDERING_SECONDS as libc::time_t,
            tv_usec: 0,
        },
    };
    // SAFETY: reads `limit`, and the old value is not asked for.
    unsafe {
        libc::setitimer(libc::ITIMER_PROF, &raw const limit, std::ptr::null_mut());
    }
}
