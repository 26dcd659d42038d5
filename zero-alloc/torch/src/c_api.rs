//! The C functions. `include/zero_alloc_torch.h` is their contract.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_double, c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use zero_alloc::cuda::{CudaDevice, interop};

use crate::arena::Arena;
use crate::error::{ArenaError, guard, guard_end, with_last_error};
use crate::fork;
use crate::graphs::GraphPoolId;
use crate::statistics::Statistics;
use crate::svg::svg;

/// The most devices of a process.
const MAX_DEVICES: usize = 64;

/// One arena for each device, made by the device's first allocation and never dropped: PyTorch
/// frees tensors while the process ends.
static ARENAS: [OnceLock<Arena>; MAX_DEVICES] = [const { OnceLock::new() }; MAX_DEVICES];

/// Budgets of devices without an arena yet. Also held while an arena is made.
static BUDGETS: Mutex<Option<HashMap<usize, usize>>> = Mutex::new(None);

/// Whether an allocation that fails ends the process.
static ABORT_ON_FAILURE: AtomicBool = AtomicBool::new(false);

/// Runs `body` without changing PyTorch's current device, which matters if there are several.
fn on_any_device<R>(body: impl FnOnce() -> Result<R, ArenaError>) -> Result<R, ArenaError> {
    static DEVICES: OnceLock<usize> = OnceLock::new();
    if *DEVICES.get_or_init(|| CudaDevice::count().unwrap_or(0)) > 1 {
        interop::with_context_kept(body)?
    } else {
        body()
    }
}

const OK: c_int = 0;
const FAILED: c_int = -1;

/// As [`guard`], for calls that use a device.
fn guard_device<R>(
    call: &'static str,
    failed: R,
    body: impl FnOnce() -> Result<R, ArenaError>,
) -> R {
    guard(call, failed, || on_any_device(body))
}

/// As [`guard_end`], for calls that use a device.
fn guard_end_device(call: &'static str, body: impl FnOnce() -> Result<(), ArenaError>) {
    guard_end(call, || on_any_device(body));
}

fn place(device: c_int) -> Result<(usize, &'static OnceLock<Arena>), ArenaError> {
    let ordinal = usize::try_from(device).ok();
    let place = ordinal.and_then(|ordinal| Some((ordinal, ARENAS.get(ordinal)?)));
    place.ok_or(ArenaError::NoDevice(device))
}

/// The arena of a device, if it has allocated.
fn arena(device: c_int) -> Result<&'static Arena, ArenaError> {
    place(device)?.1.get().ok_or(ArenaError::NoArena(device))
}

/// The arena of a device, made now if it is the first use.
fn arena_or_new(device: c_int) -> Result<&'static Arena, ArenaError> {
    let (ordinal, place) = place(device)?;
    if let Some(arena) = place.get() {
        return Ok(arena);
    }
    let budgets = BUDGETS.lock();
    if let Some(arena) = place.get() {
        return Ok(arena);
    }
    let budget_bytes = budgets.as_ref().and_then(|of| of.get(&ordinal).copied());
    let arena = Arena::new(ordinal, budget_bytes)?;
    Ok(place.get_or_init(|| arena))
}

fn arenas() -> impl Iterator<Item = &'static Arena> {
    ARENAS.iter().filter_map(OnceLock::get)
}

/// Allocates, for `CUDAPluggableAllocator`'s `alloc_fn`.
///
/// # Safety
/// `stream` is a stream of the device, which lives during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn zero_torch_malloc(
    size: isize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    if size == 0 {
        return null_mut();
    }
    let ptr: *mut c_void = guard_device("malloc", null_mut(), || {
        let bytes = usize::try_from(size).map_err(|_| ArenaError::NegativeSize(size))?;
        let ptr = arena_or_new(device)?.allocate(bytes, stream)?;
        Ok(ptr.as_ptr().cast())
    });
    if ptr.is_null() && ABORT_ON_FAILURE.load(Ordering::Relaxed) {
        fork::print(
            "zero-alloc-torch: ending the process: as the allocator of the whole process it must not return null, \
             which PyTorch does not check",
        );
        std::process::abort();
    }
    ptr
}

/// Frees, for `CUDAPluggableAllocator`'s `free_fn`.
///
/// # Safety
/// Nothing uses the block any more but what its streams have enqueued. They live, or were announced to
/// [`zero_torch_forget_stream`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn zero_torch_free(
    ptr: *mut c_void,
    _size: isize,
    device: c_int,
    _stream: *mut c_void,
) {
    if ptr.is_null() {
        return;
    }
    guard_end_device("free", || {
        if arena(device)?.free(ptr.cast())? {
            Ok(())
        } else {
            Err(ArenaError::NotABlock(ptr.addr()))
        }
    });
}

/// Records that a stream uses the block until it is freed, for `set_record_stream_fn`.
///
/// # Safety
/// `stream` is a stream of the block's device, which lives during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn zero_torch_record_stream(ptr: *mut c_void, stream: *mut c_void) {
    if ptr.is_null() {
        return;
    }
    guard_end_device("record_stream", || {
        for arena in arenas() {
            if arena.record_stream(ptr.cast(), stream)? {
                return Ok(());
            }
        }
        Err(ArenaError::NotABlock(ptr.addr()))
    });
}

/// Announces that the program destroys a stream.
///
/// # Safety
/// `stream` is a stream of the device, which lives during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn zero_torch_forget_stream(device: c_int, stream: *mut c_void) -> c_int {
    guard_device("forget_stream", FAILED, || {
        // Without an arena no block has used the stream.
        if let Some(arena) = place(device)?.1.get() {
            arena.forget_stream(stream)?;
        }
        Ok(OK)
    })
}

/// Returns free memory to the devices, for `set_reset_fn`, which is `torch.cuda.empty_cache`.
#[unsafe(no_mangle)]
pub extern "C" fn zero_torch_empty_cache() {
    guard_end_device("empty_cache", || {
        for arena in arenas() {
            // Keeps the peak of the reserved bytes.
            arena.statistics();
            arena.trim();
        }
        Ok(())
    });
}

/// Sets the limit of a device's arena.
#[unsafe(no_mangle)]
pub extern "C" fn zero_torch_set_budget(device: c_int, bytes: u64) -> c_int {
    guard("set_budget", FAILED, || {
        set_budget(device, usize::try_from(bytes).unwrap_or(usize::MAX))
    })
}

/// Sets the limit as a fraction of the device's memory, for `set_memory_fraction_fn`.
#[unsafe(no_mangle)]
pub extern "C" fn zero_torch_set_memory_fraction(fraction: c_double, device: c_int) {
    guard_device("set_memory_fraction", (), || {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(ArenaError::NoFraction(fraction));
        }
        let (ordinal, _) = place(device)?;
        let total_bytes = CudaDevice::open(ordinal)?.memory_bytes()?.1;
        set_budget(device, (total_bytes as f64 * fraction) as usize)?;
        Ok(())
    });
}

fn set_budget(device: c_int, bytes: usize) -> Result<c_int, ArenaError> {
    let (ordinal, place) = place(device)?;
    let mut budgets = BUDGETS.lock();
    if let Some(arena) = place.get() {
        let budget_bytes = arena.budget_bytes();
        return Err(ArenaError::ArenaExists {
            device,
            budget_bytes,
        });
    }
    budgets.get_or_insert_default().insert(ordinal, bytes);
    Ok(OK)
}

/// Makes a failed allocation end the process, or return null.
#[unsafe(no_mangle)]
pub extern "C" fn zero_torch_abort_on_failure(abort: c_int) {
    ABORT_ON_FAILURE.store(abort != 0, Ordering::Relaxed);
}

/// Opens a graph pool, for `set_begin_allocate_to_pool`. The filter is not used: whether a stream
/// is recorded is known from the driver.
#[unsafe(no_mangle)]
pub extern "C" fn zero_torch_begin_graph_pool(
    device: c_int,
    id: GraphPoolId,
    _filter: *mut c_void,
) {
    guard_device("begin_graph_pool", (), || {
        arena_or_new(device)?.begin_graph_pool(id);
        Ok(())
    });
}

/// Closes a graph pool, for `set_end_allocate_to_pool_fn`.
#[unsafe(no_mangle)]
pub extern "C" fn zero_torch_end_graph_pool(device: c_int, id: GraphPoolId) {
    guard_end_device("end_graph_pool", || {
        arena_or_new(device)?.end_graph_pool(id);
        Ok(())
    });
}

/// Ends a use of a graph pool, which a call of [`zero_torch_begin_graph_pool`] began, for
/// `set_release_pool`: the last one frees what the pool kept.
///
/// # Safety
/// The graphs of the pool are not launched any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn zero_torch_release_graph_pool(device: c_int, id: GraphPoolId) {
    guard_end_device("release_graph_pool", || {
        arena_or_new(device)?.release_graph_pool(id)
    });
}

/// Writes the numbers of a device's arena.
///
/// # Safety
/// `statistics` is null, or points to a structure whose first field is its size in bytes, and which
/// is valid for writes of that size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn zero_torch_get_statistics(
    device: c_int,
    statistics: *mut Statistics,
) -> c_int {
    guard("get_statistics", FAILED, || {
        if statistics.is_null() {
            return Err(ArenaError::BadArgument);
        }
        let mut found = arena(device)?.statistics();
        // SAFETY: not null, so the first field is valid by the caller's promise.
        let theirs = unsafe { statistics.cast::<u64>().read() };
        let bytes = theirs.min(found.size) as usize;
        if bytes < size_of::<u64>() {
            return Err(ArenaError::BadArgument);
        }
        found.size = bytes as u64;
        let from = (&raw const found).cast::<u8>();
        // SAFETY: both are valid for `bytes`, at most the size of either, and do not overlap.
        unsafe { from.copy_to_nonoverlapping(statistics.cast(), bytes) };
        Ok(OK)
    })
}

/// Writes a map of a device's arena as an SVG file.
///
/// # Safety
/// `path` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn zero_torch_write_svg(device: c_int, path: *const c_char) -> c_int {
    guard("write_svg", FAILED, || {
        if path.is_null() {
            return Err(ArenaError::BadArgument);
        }
        // SAFETY: not null, so a C string by the caller's promise.
        let path = unsafe { CStr::from_ptr(path) };
        let path = path.to_str().map_err(|_| ArenaError::BadArgument)?;
        let pool = arena(device)?.pool();
        std::fs::write(path, svg(&pool.map(), &pool.report())).map_err(|cause| {
            ArenaError::File {
                path: path.to_owned(),
                cause,
            }
        })?;
        Ok(OK)
    })
}

/// Copies the text of the calling thread's last error, and returns its length without the zero.
///
/// # Safety
/// `text` is null, or valid for writes of `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn zero_torch_last_error(text: *mut c_char, bytes: usize) -> usize {
    let copied = with_last_error(|last| {
        if text.is_null() || bytes == 0 {
            return last.len();
        }
        let len = last.len().min(bytes - 1);
        // SAFETY: both are valid for `len` bytes, fewer than `bytes`; the string is not the
        // caller's.
        unsafe { last.as_ptr().copy_to_nonoverlapping(text.cast(), len) };
        let end = text.wrapping_add(len);
        // SAFETY: within the caller's bytes, since `len` is less than `bytes`.
        unsafe { end.write(0) };
        last.len()
    });
    copied.unwrap_or(0)
}
