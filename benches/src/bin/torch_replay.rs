//! `torch_replay [--repeats N] TRACE...`: replays allocation traces through the C functions of
//! zero-alloc-torch, on the default stream and on another one, and through the pool's Rust
//! interface, in alternating rounds. Prints one JSON object for each trace.
//!
//! It needs a CUDA device, or the stand-in driver in its dry mode, whose memory is only addresses:
//!
//! `ZERO_STANDIN_DRY=1 integration-tests/stand-ins/with-stand-ins target/release/torch_replay
//! benches/traces/*.csv.gz`
//!
//! Times are processor time of the calling thread. A cold round starts with nothing reserved, so
//! its time has the driver's for mapping pages. A warm round repeats the trace on the reserved
//! memory. On the stand-in both have its time for events and pages instead of a driver's: they
//! compare the interfaces, and say nothing of a GPU.

use std::ffi::c_void;
use std::hint::black_box;
use std::path::Path;
use std::process::ExitCode;

use benches::replay::{Op, Trace};
use serde_json::json;
use zero_alloc::cuda::{CudaDevice, CudaStream, interop};
use zero_alloc::device::{DType, Device};
use zero_alloc::library::Library;
use zero_alloc::{Block, Pool, Purpose};
use zero_alloc_torch::Statistics;
use zero_alloc_torch::c_api::*;

const USAGE: &str = "usage: torch_replay [--repeats N] TRACE.csv.gz...";

/// A way to allocate.
trait Interface {
    type Held;

    fn allocate(&self, bytes: usize) -> Result<Self::Held, String>;

    fn free(&self, held: Self::Held);

    fn reserved_bytes(&self) -> u64;
}

/// The C functions, called through pointers as PyTorch does.
struct CFunctions {
    malloc: unsafe extern "C" fn(isize, i32, *mut c_void) -> *mut c_void,
    free: unsafe extern "C" fn(*mut c_void, isize, i32, *mut c_void),
    stream: *mut c_void,
}

impl CFunctions {
    fn new(stream: *mut c_void) -> Self {
        Self {
            malloc: black_box(zero_torch_malloc),
            free: black_box(zero_torch_free),
            stream,
        }
    }
}

impl Interface for CFunctions {
    type Held = (*mut c_void, isize);

    fn allocate(&self, bytes: usize) -> Result<Self::Held, String> {
        let bytes = isize::try_from(bytes).map_err(|e| e.to_string())?;
        // SAFETY: the stream lives as long as the process.
        let ptr = unsafe { (self.malloc)(bytes, 0, self.stream) };
        if ptr.is_null() {
            return Err(format!("failed to allocate {bytes} bytes"));
        }
        Ok((ptr, bytes))
    }

    fn free(&self, (ptr, bytes): Self::Held) {
        // SAFETY: nothing uses the memory.
        unsafe { (self.free)(ptr, bytes, 0, self.stream) };
    }

    fn reserved_bytes(&self) -> u64 {
        let mut found = Statistics {
            size: size_of::<Statistics>() as u64,
            ..Statistics::default()
        };
        // SAFETY: the first field is the size.
        unsafe { zero_torch_get_statistics(0, &raw mut found) };
        found.reserved_bytes
    }
}

/// The Rust interface.
struct RustPool {
    pool: Pool<CudaDevice>,
    stream: CudaStream,
}

impl Interface for RustPool {
    type Held = Block<CudaDevice>;

    fn allocate(&self, bytes: usize) -> Result<Self::Held, String> {
        let block = self
            .pool
            .allocate(bytes, DType::U8, Purpose::Workspace, &self.stream);
        block.map_err(|error| error.to_string())
    }

    fn free(&self, held: Self::Held) {
        drop(held);
    }

    fn reserved_bytes(&self) -> u64 {
        self.pool.report().reserved_bytes as u64
    }
}

/// The best times of an interface, and the most that it reserved.
#[derive(Clone, Copy)]
struct Outcome {
    cold_ns: f64,
    warm_ns: f64,
    reserved_bytes: u64,
}

impl Outcome {
    const WORST: Self = Self {
        cold_ns: f64::MAX,
        warm_ns: f64::MAX,
        reserved_bytes: 0,
    };

    /// Adds a cold and a warm round.
    fn add<I: Interface>(&mut self, trace: &Trace, interface: &I) -> Result<(), String> {
        self.cold_ns = self.cold_ns.min(round(trace, interface)?);
        // Nothing was trimmed, so these are the peak.
        self.reserved_bytes = self.reserved_bytes.max(interface.reserved_bytes());
        self.warm_ns = self.warm_ns.min(round(trace, interface)?);
        Ok(())
    }

    fn json(&self, trace: &Trace) -> serde_json::Value {
        json!({
            "ratio": self.reserved_bytes as f64 / trace.live_peak_bytes.max(1) as f64,
            "cold_ns_per_pair": self.cold_ns.round(),
            "warm_ns_per_pair": self.warm_ns.round(),
        })
    }
}

/// Processor time of the calling thread, in nanoseconds (Linux): other programs do not change it.
fn cpu_ns() -> Result<u64, String> {
    let path = "/proc/thread-self/schedstat";
    let text = std::fs::read_to_string(path).map_err(|e| format!("{path}: {e}"))?;
    let first = text.split_whitespace().next();
    let number = first.and_then(|number| number.parse().ok());
    number.ok_or(format!("{path}: {text}"))
}

/// Replays a trace, frees what it left, and returns the nanoseconds a pair.
fn round<I: Interface>(trace: &Trace, interface: &I) -> Result<f64, String> {
    let mut held: Vec<Option<I::Held>> = Vec::new();
    held.resize_with(trace.slots, || None);
    let start = cpu_ns()?;
    for op in &trace.ops {
        match *op {
            Op::Allocate { slot, bytes } => {
                held[slot as usize] = Some(interface.allocate(bytes.max(1) as usize)?);
            }
            Op::Free { slot } => {
                if let Some(block) = held[slot as usize].take() {
                    interface.free(block);
                }
            }
        }
    }
    let ns = (cpu_ns()? - start) as f64 / trace.allocations.max(1) as f64;

    for block in held.into_iter().flatten() {
        interface.free(block);
    }
    Ok(ns)
}

fn replay(trace: &Trace, device: &CudaDevice, repeats: usize) -> Result<(), String> {
    let stream = device.create_stream("replay").map_err(|e| e.to_string())?;
    let budget_bytes = device.memory_bytes().map_err(|e| e.to_string())?.1;
    let default = CFunctions::new(std::ptr::null_mut());
    let other = CFunctions::new(interop::raw_stream(&stream));
    let [mut on_default, mut on_other, mut in_rust] = [Outcome::WORST; 3];

    // Returns everything, because nothing uses it any more.
    let empty = || -> Result<(), String> {
        let synchronized = interop::synchronize_context(device);
        synchronized.map_err(|error| error.to_string())?;
        zero_torch_empty_cache();
        Ok(())
    };

    for _ in 0..repeats {
        on_default.add(trace, &default)?;
        empty()?;
        on_other.add(trace, &other)?;
        empty()?;
        let rust = RustPool {
            pool: Pool::new(device.clone(), budget_bytes),
            stream: stream.clone(),
        };
        in_rust.add(trace, &rust)?;
    }

    let line = json!({
        "trace": trace.name,
        "device": device.name(),
        "pairs": trace.allocations,
        "live_peak_bytes": trace.live_peak_bytes,
        "c_on_default_stream": on_default.json(trace),
        "c_on_other_stream": on_other.json(trace),
        "rust": in_rust.json(trace),
    });
    println!("{line}");
    Ok(())
}

/// The stand-in driver accepts the default streams only on request.
fn accept_default_streams(device: &CudaDevice) -> Result<(), String> {
    device.bind().map_err(|e| e.to_string())?;
    // SAFETY: the driver is loaded already.
    let driver = unsafe { Library::open(&["libcuda.so.1"]) }.map_err(|tried| tried.join(", "))?;
    // SAFETY: the stand-in's function has this type.
    let accept =
        unsafe { driver.function::<unsafe extern "C" fn() -> u32>("standInAcceptDefaultStreams") };
    if let Ok(accept) = accept {
        // SAFETY: it has no conditions.
        unsafe { accept() };
    }
    Ok(())
}

fn run() -> Result<(), String> {
    let mut repeats = 5;
    let mut paths = Vec::new();
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        if arg == "--repeats" {
            let number = args.next().and_then(|text| text.parse().ok());
            repeats = number.ok_or(USAGE)?;
        } else {
            paths.push(arg);
        }
    }
    if paths.is_empty() {
        return Err(USAGE.to_owned());
    }

    let device = CudaDevice::open(0).map_err(|e| e.to_string())?;
    accept_default_streams(&device)?;
    for path in paths {
        replay(&Trace::read(Path::new(&path))?, &device, repeats)?;
    }
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}
