//! Requests by a pool of threads, where the kernel refuses io_uring.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::open_file::OpenFile;
use super::request::TransferRequest;

const STACK_BYTES: usize = 128 << 10;

#[derive(Default)]
struct Shared {
    jobs: Mutex<Jobs>,
    arrived: Condvar,
    /// Finished requests: slot, and bytes or a negative errno.
    done: Mutex<Vec<(usize, i32)>>,
    finished: Condvar,
}

#[derive(Default)]
struct Jobs {
    queue: VecDeque<(usize, TransferRequest)>,
    closed: bool,
}

/// The threads; they end when this is dropped.
pub(super) struct Threads {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Threads {
    pub(super) fn new(file: Arc<OpenFile>) -> io::Result<Self> {
        let mut pool = Self {
            shared: Arc::default(),
            threads: Vec::new(),
        };
        for _ in 0..file.options.queue_depth {
            let shared = Arc::clone(&pool.shared);
            let file = Arc::clone(&file);
            let thread = std::thread::Builder::new()
                .name("swap".into())
                .stack_size(STACK_BYTES);
            pool.threads
                .push(thread.spawn(move || work(&shared, file.file.as_raw_fd()))?);
        }
        Ok(pool)
    }

    pub(super) fn push(&self, slot: usize, request: TransferRequest) {
        self.shared.jobs.lock().queue.push_back((slot, request));
        self.shared.arrived.notify_one();
    }

    /// Appends finished requests to `done`; waits at most `limit` for the first.
    pub(super) fn wait(&self, limit: Duration, done: &mut Vec<(usize, i32)>) {
        let mut finished = self.shared.done.lock();
        if finished.is_empty() {
            self.shared.finished.wait_for(&mut finished, limit);
        }
        done.append(&mut finished);
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.jobs.lock().closed = true;
        self.shared.arrived.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn work(shared: &Shared, fd: RawFd) {
    loop {
        let (slot, request) = {
            let mut jobs = shared.jobs.lock();
            loop {
                if let Some(job) = jobs.queue.pop_front() {
                    break job;
                }
                if jobs.closed {
                    return;
                }
                shared.arrived.wait(&mut jobs);
            }
        };
        let TransferRequest {
            offset,
            address,
            bytes,
            write,
        } = request;
        let offset = offset as libc::off64_t;
        let result = if write {
            // SAFETY: the lane keeps the memory valid until the request has come back; the
            // descriptor is open.
            unsafe { libc::pwrite(fd, address.0.cast(), bytes, offset) }
        } else {
            // SAFETY: as above.
            unsafe { libc::pread(fd, address.0.cast(), bytes, offset) }
        };
        let result = match i32::try_from(result) {
            Ok(bytes) if bytes >= 0 => bytes,
            _ => -io::Error::last_os_error()
                .raw_os_error()
                .unwrap_or(libc::EIO),
        };
        shared.done.lock().push((slot, result));
        shared.finished.notify_one();
    }
}
