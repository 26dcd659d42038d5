//! The library's functions, with C's names and types.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::comm::{self, Comm, INVALID_ARGUMENT, INVALID_USAGE, SUCCESS};
use crate::work::{At, Kind, Part, width};
use stand_in_shared::driver::Stream;

/// `ncclInternalError`.
const INTERNAL_ERROR: c_int = 3;
/// 2.30.7.
const VERSION: c_int = 23_007;
/// The magic number of `NCCL_CONFIG_INITIALIZER`.
const MAGIC: u32 = 0xcafe_beef;

/// `ncclUniqueId`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct UniqueId {
    internal: [c_char; 128],
}

/// The first fields of `ncclConfig_t`.
#[derive(Debug)]
#[repr(C)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

/// The calls of a group: communicator, stream and operation.
type Calls = Vec<(usize, Stream, Part)>;

thread_local! {
    /// The depth of open groups, and their calls.
    static GROUP: RefCell<(usize, Calls)> = const { RefCell::new((0, Vec::new())) };
    static LAST: RefCell<CString> = RefCell::default();
}

fn fail(code: c_int, message: &str) -> c_int {
    LAST.with(|last| *last.borrow_mut() = CString::new(message).unwrap_or_default());
    code
}

fn guarded(call: impl FnOnce() -> c_int) -> c_int {
    catch_unwind(AssertUnwindSafe(call))
        .unwrap_or_else(|_| fail(INTERNAL_ERROR, "the stand-in panicked"))
}

/// Writes the version that the stand-in implements, 2.30.7.
///
/// # Safety
/// `version` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the caller guarantees it.
    unsafe { version.write(VERSION) };
    SUCCESS
}

/// The text of a code.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    let text: &CStr = match code {
        SUCCESS => c"no error",
        1 => c"unhandled cuda error",
        2 => c"unhandled system error",
        3 => c"internal error",
        4 => c"invalid argument",
        5 => c"invalid usage",
        6 => c"remote process exited or there was a network error",
        7 => c"NCCL operation in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

/// The message of this thread's last error.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_comm: usize) -> *const c_char {
    LAST.with(|last| last.borrow().as_ptr())
}

/// A new id.
///
/// # Safety
/// `id` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> c_int {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let time = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| d.as_nanos());
    let name = format!(
        "{}-{time:x}-{}",
        std::process::id(),
        COUNT.fetch_add(1, Ordering::Relaxed)
    );
    let mut internal = [0; 128];
    internal
        .iter_mut()
        .zip(name.bytes())
        .for_each(|(to, byte)| *to = byte as c_char);
    // SAFETY: the caller guarantees it.
    unsafe { id.write(UniqueId { internal }) };
    SUCCESS
}

/// # Safety
/// `config` is null or a configuration.
unsafe fn check(config: *const Config) -> c_int {
    if config.is_null() {
        return fail(
            INVALID_USAGE,
            "the stand-in supports only non-blocking communicators",
        );
    }
    // SAFETY: the caller guarantees it.
    let config = unsafe { &*config };
    if config.magic != MAGIC || config.size < size_of::<Config>() || config.version < 21_400 {
        return fail(INVALID_ARGUMENT, "the configuration was not initialized");
    }
    if config.blocking != 0 {
        return fail(
            INVALID_USAGE,
            "the stand-in supports only non-blocking communicators",
        );
    }
    SUCCESS
}

/// Initializes a communicator of `n` ranks.
///
/// # Safety
/// `out` is valid for a write, `config` is a configuration.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    out: *mut usize,
    n: c_int,
    id: UniqueId,
    rank: c_int,
    config: *const Config,
) -> c_int {
    // SAFETY: the caller guarantees it.
    let code = unsafe { check(config) };
    if code != SUCCESS {
        return code;
    }
    let (Ok(n), Ok(rank)) = (usize::try_from(n), usize::try_from(rank)) else {
        return INVALID_ARGUMENT;
    };

    if rank >= n {
        return fail(
            INVALID_ARGUMENT,
            "the rank is not less than the number of ranks",
        );
    }

    let name: String = id
        .internal
        .iter()
        .map(|&c| c as u8 as char)
        .take_while(|&c| c != '\0')
        .collect();
    if name.is_empty() || !name.chars().all(|c| c.is_ascii_hexdigit() || c == '-') {
        return fail(INVALID_ARGUMENT, "the id is not from the stand-in");
    }
    // SAFETY: the caller guarantees it.
    unsafe { out.write(Comm::init(&name, rank, n)) };

    comm::IN_PROGRESS
}

/// Calls `f` with the communicator of a handle.
fn with(handle: usize, f: impl FnOnce(&Arc<Comm>) -> c_int) -> c_int {
    guarded(|| {
        comm::find(handle).map_or_else(
            || fail(INVALID_ARGUMENT, "the communicator does not exist"),
            |comm| f(&comm),
        )
    })
}

/// Splits a communicator. Another thread writes the new one's handle.
///
/// # Safety
/// `out` stays valid for a write until the communicator is no longer in progress; `config` is a
/// configuration.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommSplit(
    handle: usize,
    color: c_int,
    key: c_int,
    out: *mut usize,
    config: *const Config,
) -> c_int {
    // SAFETY: the caller guarantees it.
    let code = unsafe { check(config) };
    if code != SUCCESS {
        return code;
    }
    // SAFETY: the caller guarantees a valid pointer; all later accesses are atomic.
    let out = unsafe { &*out.cast::<std::sync::atomic::AtomicUsize>() };
    out.store(0, Ordering::Release);
    with(handle, |comm| {
        comm.split(color, key, move |child| out.store(child, Ordering::Release))
    })
}

/// The state of a communicator.
///
/// # Safety
/// `state` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(handle: usize, state: *mut c_int) -> c_int {
    with(handle, |comm| {
        // SAFETY: the caller guarantees it.
        unsafe { state.write(comm.state()) };
        SUCCESS
    })
}

/// Finalizes a communicator.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommFinalize(handle: usize) -> c_int {
    with(handle, |comm| {
        if comm.is_idle() {
            comm.finalize()
        } else {
            fail(INVALID_USAGE, "collectives are under way")
        }
    })
}

/// Destroys a communicator.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDestroy(handle: usize) -> c_int {
    with(handle, |comm| {
        comm::remove(handle);
        comm.leave();
        SUCCESS
    })
}

/// Aborts a communicator and its collectives under way.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommAbort(handle: usize) -> c_int {
    with(handle, |comm| {
        comm::remove(handle);
        comm.abort();
        SUCCESS
    })
}

/// Registers memory of a communicator; writes the handle.
///
/// # Safety
/// `out` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommRegister(
    handle: usize,
    at: *mut c_void,
    bytes: usize,
    out: *mut *mut c_void,
) -> c_int {
    with(handle, |comm| {
        let start = at as u64;
        if at.is_null() || bytes == 0 {
            return fail(INVALID_ARGUMENT, "no memory to register");
        }
        let Some(number) = comm.register(start..start + bytes as u64) else {
            return fail(
                INVALID_ARGUMENT,
                "the memory is not one allocation that other processes can open",
            );
        };
        // SAFETY: the caller guarantees it.
        unsafe { out.write(std::ptr::without_provenance_mut(number)) };
        SUCCESS
    })
}

/// Ends the registration with this handle.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDeregister(handle: usize, registered: *mut c_void) -> c_int {
    with(handle, |comm| match comm.deregister(registered.addr()) {
        SUCCESS => SUCCESS,
        code => fail(
            code,
            "the memory is not registered, was freed, or is in use",
        ),
    })
}

/// Opens a group.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> c_int {
    GROUP.with(|group| group.borrow_mut().0 += 1);
    SUCCESS
}

/// Closes a group, whose calls become one operation.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> c_int {
    let calls = GROUP.with(|group| {
        let (depth, calls) = &mut *group.borrow_mut();
        *depth = depth.checked_sub(1)?;
        Some(if *depth == 0 {
            std::mem::take(calls)
        } else {
            Vec::new()
        })
    });

    let Some(calls) = calls else {
        return fail(INVALID_USAGE, "no group is open");
    };
    let Some(&(handle, stream, _)) = calls.first() else {
        return SUCCESS;
    };
    if calls
        .iter()
        .any(|call| (call.0, call.1) != (handle, stream))
    {
        return fail(
            INVALID_USAGE,
            "the stand-in supports only groups of one communicator and one stream",
        );
    }

    with(handle, |comm| {
        comm.enqueue(stream, calls.into_iter().map(|call| call.2).collect())
    })
}

fn call(handle: usize, stream: *mut c_void, part: Part) -> c_int {
    with(handle, |comm| {
        let (rank, n) = comm.rank_and_size();
        let all_bytes = width(part.dtype).and_then(|w| w.checked_mul(part.count)?.checked_mul(n));
        if all_bytes.is_none_or(|bytes| bytes > isize::MAX as usize) || part.other >= n {
            return fail(
                INVALID_ARGUMENT,
                "the type is unknown, the root is not a rank, or the count is too large",
            );
        }
        let no_read =
            part.kind == Kind::Receive || part.kind == Kind::Broadcast && rank != part.other;
        let no_write = part.kind == Kind::Send || part.kind == Kind::Reduce && rank != part.other;
        if part.count > 0 && (!no_read && part.from.0.is_null() || !no_write && part.to.0.is_null())
        {
            return fail(INVALID_ARGUMENT, "a buffer is null");
        }
        let bytes = width(part.dtype).unwrap_or(0) * part.count;
        let mut part = part;
        part.note_registered(
            |at, times| comm.is_registered(at.0 as u64, bytes * times),
            n,
        );
        let grouped = GROUP.with(|group| {
            let (depth, calls) = &mut *group.borrow_mut();
            if *depth > 0 {
                calls.push((handle, Stream(stream), part));
            }
            *depth > 0
        });
        if grouped {
            return SUCCESS;
        }
        if matches!(part.kind, Kind::Send | Kind::Receive) {
            return fail(
                INVALID_USAGE,
                "the stand-in supports sends and receives only in groups",
            );
        }
        comm.enqueue(Stream(stream), vec![part])
    })
}

macro_rules! collective {
    ($(#[$doc:meta])* $name:ident, $kind:ident($($arg:ident: $t:ty),*) => [$from:expr, $to:expr, $count:expr, $dtype:expr, $op:expr, $other:expr]) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// As for NCCL: the buffers have the lengths of the counts until the stream has run the
        /// call.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $t,)* comm: usize, stream: *mut c_void) -> c_int {
            let from = At(($from).cast_mut().cast());
            let to = At(($to).cast());
            let Ok(other) = usize::try_from($other) else { return INVALID_ARGUMENT };
            call(comm, stream, Part { kind: Kind::$kind, from, to, count: $count, dtype: $dtype, op: $op, other, registered: 0 })
        }
    };
}

type From = *const c_void;
type To = *mut c_void;
const NOTHING: From = std::ptr::null();
const NOWHERE: To = std::ptr::null_mut();

collective! {
    /// The reduction on all ranks.
    ncclAllReduce, AllReduce(from: From, to: To, count: usize, dtype: c_int, op: c_int) => [from, to, count, dtype, op, 0]
}
collective! {
    /// The reduction on one rank.
    ncclReduce, Reduce(from: From, to: To, count: usize, dtype: c_int, op: c_int, root: c_int)
        => [from, to, count, dtype, op, root]
}
collective! {
    /// A segment of the reduction on each rank.
    ncclReduceScatter, ReduceScatter(from: From, to: To, count: usize, dtype: c_int, op: c_int)
        => [from, to, count, dtype, op, 0]
}
collective! {
    /// The segments of all ranks, on all ranks.
    ncclAllGather, AllGather(from: From, to: To, count: usize, dtype: c_int) => [from, to, count, dtype, 0, 0]
}
collective! {
    /// One rank's buffer on all ranks.
    ncclBroadcast, Broadcast(from: From, to: To, count: usize, dtype: c_int, root: c_int)
        => [from, to, count, dtype, 0, root]
}
collective! {
    /// Sends to one rank.
    ncclSend, Send(from: From, count: usize, dtype: c_int, peer: c_int) => [from, NOWHERE, count, dtype, 0, peer]
}
collective! {
    /// Receives from one rank.
    ncclRecv, Receive(to: To, count: usize, dtype: c_int, peer: c_int) => [NOTHING, to, count, dtype, 0, peer]
}
