//! The C functions, on a device or on the stand-in driver of `integration-tests/stand-ins`.
//!
//! All tests of this process use the arena of device 0, so they run one at a time.

mod c_program;
mod devices;
mod failures;
mod fork;
mod graphs;
mod python;
mod statistics;
mod streams;

use std::ffi::{c_char, c_void};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use zero_alloc::cuda::{CudaDevice, CudaStream, interop};
use zero_alloc::device::{AnySlice, DType, Device, Event, Memory, Stream};
use zero_alloc_torch::c_api::*;

const LIMIT: Duration = Duration::from_secs(60);
/// Small enough to be exhausted by a test.
const BUDGET_BYTES: usize = 64 << 20;
/// Blocks of whole pages: a freed one is reused by the next of its size.
const BLOCK_BYTES: usize = 4 << 20;

/// The device, with the arena to itself.
struct Fixture {
    device: CudaDevice,
    _alone: MutexGuard<'static, ()>,
}

fn open() -> Fixture {
    static ALONE: Mutex<()> = Mutex::new(());
    static DEVICE: LazyLock<CudaDevice> = LazyLock::new(|| {
        let device = CudaDevice::open(0).expect("a CUDA device");
        device.bind().expect("current");
        accept_default_streams();
        assert_eq!(zero_torch_set_budget(0, BUDGET_BYTES as u64), 0);
        // A device has statistics from its first allocation on.
        free(malloc(1, &device.create_stream("first").expect("a stream")));
        device
    });
    Fixture {
        _alone: ALONE.lock().unwrap_or_else(PoisonError::into_inner),
        device: DEVICE.clone(),
    }
}

/// The stand-in accepts the default streams only if a test needs them. A device is open.
fn accept_default_streams() {
    // SAFETY: the driver is loaded already, and stays.
    let driver = unsafe { libloading::Library::new("libcuda.so.1") }.expect("a driver");
    // SAFETY: the stand-in's function has this type.
    let accept =
        unsafe { driver.get::<unsafe extern "C" fn() -> u32>(b"standInAcceptDefaultStreams") };
    if let Ok(accept) = accept {
        // SAFETY: it has no conditions.
        assert_eq!(unsafe { accept() }, 0);
    }
}

impl Fixture {
    fn is_stand_in(&self) -> bool {
        self.device.name().contains("stand-in")
    }

    fn stream(&self, name: &str) -> CudaStream {
        self.device.create_stream(name).expect("a stream")
    }

    /// A default stream as this project's stream, so that tests can enqueue operations on it.
    fn default_stream(&self, handle: usize) -> CudaStream {
        let raw = std::ptr::without_provenance_mut(handle);
        // SAFETY: a default stream, which is never destroyed; used by one thread.
        unsafe { interop::pool_stream_from_raw(&self.device, raw, "default") }.expect("a stream")
    }

    /// The bytes of a block as a slice.
    fn slice(&self, ptr: *mut u8, len: usize) -> AnySlice {
        // SAFETY: tests use blocks of this length, in the order of their streams.
        unsafe { AnySlice::from_raw_parts(ptr, len, DType::U8, self.device.id()) }
    }

    /// Whether a block on `stream` is used only after `opened` is open, by a reuse of its memory:
    /// allocates a block of the same size, checks the address, and enqueues a write.
    fn assert_waits(&self, stream: &CudaStream, freed: *mut u8, latch: &Latch) {
        let again = malloc(BLOCK_BYTES, stream);
        assert_eq!(again, freed, "freed memory is the first choice");
        let bytes = self.slice(again, BLOCK_BYTES);
        self.device.fill_zero(stream, bytes).expect("enqueued");
        let written = stream.record().expect("recorded");
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(written.is_done(), Ok(false), "does not wait");
        latch.open();
        written.synchronize(LIMIT).expect("reached");
        free(again);
    }
}

fn raw(stream: &CudaStream) -> *mut c_void {
    interop::raw_stream(stream)
}

fn malloc(bytes: usize, stream: &CudaStream) -> *mut u8 {
    let bytes = isize::try_from(bytes).expect("a size");
    // SAFETY: the stream lives.
    unsafe { zero_torch_malloc(bytes, 0, raw(stream)) }.cast()
}

fn free(ptr: *mut u8) {
    // SAFETY: tests enqueue no use after it.
    unsafe { zero_torch_free(ptr.cast(), 0, 0, std::ptr::null_mut()) }
}

fn record_stream(ptr: *mut u8, stream: &CudaStream) {
    // SAFETY: the stream lives.
    unsafe { zero_torch_record_stream(ptr.cast(), raw(stream)) }
}

/// The text of this thread's last error.
fn last_error() -> String {
    let mut text = [0 as c_char; 2048];
    // SAFETY: valid for writes of its length.
    let len = unsafe { zero_torch_last_error(text.as_mut_ptr(), text.len()) };
    let bytes = text.iter().take(len.min(text.len() - 1)).map(|c| *c as u8);
    String::from_utf8(bytes.collect()).expect("UTF-8")
}

/// Runs one test in a separate process, with a variable set.
fn run_alone(test: &str, variable: &str, value: &str) -> Output {
    Command::new(std::env::current_exe().expect("a path"))
        .args(["--exact", "--ignored", "--nocapture", test])
        .env(variable, value)
        .output()
        .expect("started")
}

/// Calls `f`, and returns the error that it caused; empty if it caused none.
fn error_of(f: impl FnOnce()) -> String {
    let before = last_error();
    f();
    let after = last_error();
    if after == before {
        String::new()
    } else {
        after
    }
}

/// Keeps a stream from running what is enqueued later.
struct Latch(Arc<AtomicBool>);

impl Latch {
    fn close(stream: &CudaStream) -> Self {
        let opened = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&opened);
        let wait = move || {
            let start = Instant::now();
            while !seen.load(Ordering::Acquire) && start.elapsed() < LIMIT {
                std::thread::sleep(Duration::from_micros(100));
            }
            Ok(())
        };
        stream.enqueue_host("latch", wait).expect("enqueued");
        Self(opened)
    }

    fn open(&self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Drop for Latch {
    fn drop(&mut self) {
        self.open();
    }
}
