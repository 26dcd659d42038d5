//! An NCCL communicator. Only this module passes one to the library.
//!
//! The communicator is non-blocking: a call may return before it is complete, and until then only
//! the communicator's state may be queried. Each method polls that state within a time limit and
//! returns early when the world has failed. The lock is held during each library call but not
//! between polls, so that [`Handle::abort`] can acquire it.

use std::ffi::{c_char, c_int, c_void};

use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::{Duration, Instant};

use cudarc::nccl::sys;
use parking_lot::Mutex;
use zero_alloc::TimeLimit;
use zero_alloc::cuda::CudaDevice;
use zero_alloc::device::AnySlice;

use super::config::Config;
use super::library::{IN_PROGRESS, Nccl, SUCCESS};
use crate::call::{Checked, Group};
use crate::comm_dtype::CommDType;
use crate::error::nccl_failure;
use crate::world::abort::AbortCompletion;
use crate::world::process::Transport;
use crate::{Collective, CommError, ReduceOp};

/// Duration of polling without sleep. NCCL's proxy thread needs some tens of microseconds to
/// enqueue a collective.
const SPIN: Duration = Duration::from_micros(100);
/// First and longest pause between polls after [`SPIN`].
const PAUSES: [Duration; 2] = [Duration::from_micros(5), Duration::from_micros(100)];
/// Limit of an abort's wait for another thread's library call, which is non-blocking.
const LOCK_LIMIT: Duration = Duration::from_secs(5);
/// Limit of finalizing a communicator. After it, the communicator is aborted.
const FINALIZE_LIMIT: Duration = Duration::from_secs(10);
const NO_COLOR: c_int = -1;

/// The reason why a wait ended early.
#[derive(Debug)]
pub(super) enum Interrupt {
    /// The limit passed.
    Late,
    /// The world failed.
    World(CommError),
    /// The library failed.
    Failed(CommError),
}

/// The conditions that end a wait for the library early.
#[derive(Clone, Copy)]
pub(super) struct Wait<'a> {
    pub(super) limit: Duration,
    /// Returns the failure of the world.
    pub(super) failure: &'a dyn Fn() -> Option<CommError>,
}

impl Wait<'_> {
    /// Returns the failure of the world if there is one, otherwise the library's `error`.
    fn interrupt(self, error: impl FnOnce() -> CommError) -> Interrupt {
        (self.failure)().map_or_else(|| Interrupt::Failed(error()), Interrupt::World)
    }
}

/// A wait to finalize, independent of the world.
const LOCAL_WAIT: Wait<'static> = Wait {
    limit: FINALIZE_LIMIT,
    failure: &|| None,
};

struct Raw(sys::ncclComm_t);

// SAFETY: any thread may use an NCCL communicator, one thread at a time; it is used only under
// `Handle::raw`'s lock.
unsafe impl Send for Raw {}

/// A communicator of NCCL.
pub(super) struct Handle {
    nccl: &'static Nccl,
    device: CudaDevice,
    /// `None` after it was aborted or destroyed.
    raw: Mutex<Option<Raw>>,
}

/// Returns a new id, with which all ranks of a world initialize their communicators.
pub(super) fn unique_id(nccl: &Nccl) -> Result<Vec<u8>, CommError> {
    let mut id = sys::ncclUniqueId {
        internal: [0; ID_BYTES],
    };
    // SAFETY: the function writes one id to the pointer, which is valid.
    nccl.check("ncclGetUniqueId", unsafe {
        (nccl.table.get_unique_id)(&raw mut id)
    })?;
    Ok(id.internal.map(|c| c as u8).to_vec())
}

const ID_BYTES: usize = 128;

/// Allocates memory for a new communicator's handle. NCCL may write to it later, from another
/// thread, so it is never freed.
fn slot() -> &'static AtomicPtr<sys::ncclComm> {
    Box::leak(Box::new(AtomicPtr::new(std::ptr::null_mut())))
}

impl Handle {
    /// Initializes this rank's communicator of the world with `id`. All ranks call this.
    pub(super) fn init(
        nccl: &'static Nccl,
        device: &CudaDevice,
        Group { rank, world_size }: Group,
        id: &[u8],
        wait: Wait<'_>,
    ) -> Result<Self, Interrupt> {
        let failed = |message: &str| Interrupt::Failed(nccl_failure(message.to_owned()));
        let id: [u8; ID_BYTES] = id
            .try_into()
            .map_err(|_| failed("rank 0 sent an id of the wrong length"))?;
        let id = sys::ncclUniqueId {
            internal: id.map(|c| c as c_char),
        };
        let number = |n: usize| c_int::try_from(n).map_err(|_| failed("too many ranks"));
        let n = number(world_size)?;
        let rank = number(rank)?;
        device.bind().map_err(|e| Interrupt::Failed(e.into()))?;
        let slot = slot();
        let mut config = Config::without_blocking();
        // SAFETY: `slot` is never freed, so NCCL may write the handle at any time; `config`
        // outlives the call, which reads it; the device is current.
        let code = unsafe { (nccl.table.init)(slot.as_ptr(), n, id, rank, config.as_ptr()) };
        let raw = slot.load(Ordering::Acquire);

        if raw.is_null() {
            return Err(Interrupt::Failed(nccl_failure(
                nccl.message("ncclCommInitRankConfig", code),
            )));
        }

        let handle = Self::of(nccl, device.clone(), raw);
        handle
            .settle("ncclCommInitRankConfig", code, wait)
            .inspect_err(|_| handle.abort().wait())?;
        Ok(handle)
    }

    fn of(nccl: &'static Nccl, device: CudaDevice, raw: sys::ncclComm_t) -> Self {
        Self {
            nccl,
            device,
            raw: Mutex::new(Some(Raw(raw))),
        }
    }

    /// Runs `call` with the communicator, under the lock.
    fn with(
        &self,
        call: impl FnOnce(sys::ncclComm_t) -> c_int,
        wait: Wait<'_>,
    ) -> Result<c_int, Interrupt> {
        self.device
            .bind()
            .map_err(|e| Interrupt::Failed(e.into()))?;
        let raw = self.raw.lock();
        let raw = raw.as_ref().ok_or_else(|| {
            wait.interrupt(|| nccl_failure("the communicator was aborted".to_owned()))
        })?;
        Ok(call(raw.0))
    }

    /// Waits until the call that returned `code` is complete.
    fn settle(&self, call: &str, mut code: c_int, wait: Wait<'_>) -> Result<(), Interrupt> {
        let begun = Instant::now();
        let mut time = TimeLimit::new(wait.limit);
        let mut pause = PAUSES[0];
        while code == IN_PROGRESS {
            if let Some(error) = (wait.failure)() {
                return Err(Interrupt::World(error));
            }
            if time.has_passed() {
                return Err(Interrupt::Late);
            }
            if begun.elapsed() < SPIN {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(pause);
                pause = (pause * 2).min(PAUSES[1]);
            }
            // SAFETY: `with` holds the lock and passes an existing communicator.
            code = self.with(|raw| unsafe { self.state(raw) }, wait)?;
        }

        self.nccl
            .check(call, code)
            .map_err(|error| wait.interrupt(|| error))
    }

    /// Returns the communicator's asynchronous state.
    ///
    /// # Safety
    /// The communicator exists, and its lock is held.
    unsafe fn state(&self, raw: sys::ncclComm_t) -> c_int {
        let mut state = IN_PROGRESS;
        // SAFETY: the caller's promise; the function writes one `c_int`.
        let code = unsafe { (self.nccl.table.async_error)(raw, &raw mut state) };
        if code == SUCCESS { state } else { code }
    }

    /// Enqueues a collective on `stream` and waits until it is enqueued. NCCL connects the ranks in
    /// the first collective of each kind, which therefore waits for all of them.
    ///
    /// # Safety
    /// `checked` was checked for `group`, which is the communicator's; `stream` is a stream of the
    /// device; `barrier` is at least one byte of the device's memory, which stays allocated.
    pub(super) unsafe fn enqueue(
        &self,
        checked: &Checked,
        group: Group,
        barrier: AnySlice,
        stream: *mut c_void,
        wait: Wait<'_>,
    ) -> Result<(), Interrupt> {
        let name = checked.call().collective.name();
        // SAFETY: `with` holds the lock and passes an existing communicator; the rest is the
        // caller's promise.
        let code = self.with(
            |raw| unsafe { self.call(raw, checked, group, barrier, stream.cast()) },
            wait,
        )?;
        self.settle(name, code, wait)
    }

    /// # Safety
    /// The communicator exists and its lock is held; and as for [`Self::enqueue`].
    unsafe fn call(
        &self,
        raw: sys::ncclComm_t,
        checked: &Checked,
        Group {
            rank,
            world_size: n,
        }: Group,
        barrier: AnySlice,
        stream: sys::cudaStream_t,
    ) -> c_int {
        let table = &self.nccl.table;
        let call = checked.call();
        let send = checked.send();
        let recv = checked.recv();
        let from = send.as_ptr().cast_const().cast::<c_void>();
        let to = recv.as_ptr().cast::<c_void>();
        let dtype = data_type(call.comm_dtype());
        let op = call.op.map_or(sys::ncclRedOp_t::ncclSum, reduction);
        let segments = || (0..n).zip(call.segments.ranges(n));

        match call.collective {
            Collective::Barrier => {
                let at = barrier.as_ptr().cast::<c_void>();
                let len = 1;
                let u8 = sys::ncclDataType_t::ncclUint8;
                let sum = sys::ncclRedOp_t::ncclSum;
                // SAFETY: the caller's promise. Concurrent barriers may write the byte in any
                // order: its value is never used.
                unsafe { (table.all_reduce)(at, at, len, u8, sum, raw, stream) }
            }
            // The own pair is there also without elements: each rank takes part in the group. NCCL
            // would synchronize other pairs without elements for nothing.
            Collective::AllToAll => {
                let received = call.segments.received();
                let sends = segments().map(|(q, part)| (q, send.slice(part), true));
                let receives = (0..n).zip(received.ranges(n));
                let receives = receives.map(|(q, part)| (q, recv.slice(part), false));
                let both = sends.chain(receives);
                let both = both.filter(|(q, part, _)| *q == rank || !part.is_empty());
                self.grouped(both, |(q, part, sends)| {
                    let at = part.as_ptr().cast::<c_void>();
                    let len = part.len();
                    if sends {
                        // SAFETY: `checked` proves that the buffers have these counts, and their
                        // maker that they stay valid until the stream has run the call; the
                        // communicator and the stream are valid by the caller's promise.
                        unsafe {
                            (table.send)(at.cast_const(), len, dtype, q as c_int, raw, stream)
                        }
                    } else {
                        // SAFETY: as above.
                        unsafe { (table.receive)(at, len, dtype, q as c_int, raw, stream) }
                    }
                })
            }
            // The check of the call has compared the buffers' lengths with this.
            _ if call.segments.total(n) == 0 => SUCCESS,
            // SAFETY: as above.
            Collective::AllReduce => unsafe {
                (table.all_reduce)(from, to, recv.len(), dtype, op, raw, stream)
            },
            Collective::Broadcast => {
                let root = call.root.unwrap_or(0) as c_int;
                // SAFETY: as above.
                unsafe { (table.broadcast)(from, to, recv.len(), dtype, root, raw, stream) }
            }
            Collective::ReduceScatter if matches!(call.segments, crate::call::Counts::Even(_)) => {
                // SAFETY: as above.
                unsafe { (table.reduce_scatter)(from, to, recv.len(), dtype, op, raw, stream) }
            }
            Collective::AllGather if matches!(call.segments, crate::call::Counts::Even(_)) => {
                // SAFETY: as above.
                unsafe { (table.all_gather)(from, to, send.len(), dtype, raw, stream) }
            }
            // NCCL has no uneven reduce-scatter: a group of one reduction to each rank. A rank
            // sends each other segment once.
            Collective::ReduceScatter => {
                self.grouped(
                    segments().filter(|(_, part)| !part.is_empty()),
                    |(q, part)| {
                        let part = send.slice(part);
                        let from = part.as_ptr().cast_const().cast();
                        let len = part.len();
                        // SAFETY: as above; NCCL writes `to` only if this is rank `q`.
                        unsafe { (table.reduce)(from, to, len, dtype, op, q as c_int, raw, stream) }
                    },
                )
            }
            // NCCL has no uneven all-gather: a group of one broadcast from each rank.
            Collective::AllGather => self.grouped(
                segments().filter(|(_, part)| !part.is_empty()),
                |(q, part)| {
                    let part = recv.slice(part);
                    let at = part.as_ptr().cast::<c_void>();
                    let len = part.len();
                    let from = if q == rank { from } else { at.cast_const() };
                    // SAFETY: as above; NCCL reads `from` only if this is rank `q`.
                    unsafe { (table.broadcast)(from, at, len, dtype, q as c_int, raw, stream) }
                },
            ),
        }
    }

    /// Makes the calls for all `parts` in one NCCL group.
    fn grouped<P>(
        &self,
        parts: impl Iterator<Item = P>,
        mut call: impl FnMut(P) -> c_int,
    ) -> c_int {
        let table = &self.nccl.table;
        // SAFETY: no arguments; the group ends below, also after an error.
        let begun = unsafe { (table.group_start)() };
        if begun != SUCCESS {
            return begun;
        }
        let failed = parts
            .map(&mut call)
            .find(|&code| code != SUCCESS && code != IN_PROGRESS);
        // SAFETY: ends the group that this function started.
        let ended = unsafe { (table.group_end)() };
        failed.unwrap_or(ended)
    }

    /// Splits the communicator. `place` is this rank's color and its rank in the new communicator;
    /// `None` joins none. All ranks call this.
    pub(super) fn split(
        &self,
        place: Option<(usize, usize)>,
        wait: Wait<'_>,
    ) -> Result<Option<Self>, Interrupt> {
        let number = |n: usize| {
            c_int::try_from(n)
                .map_err(|_| Interrupt::Failed(nccl_failure("too many ranks".to_owned())))
        };
        let (color, key) = match place {
            Some((color, rank)) => (number(color)?, number(rank)?),
            None => (NO_COLOR, 0),
        };

        let slot = slot();
        let mut config = Config::without_blocking();
        let code = self.with(
            // SAFETY: `with` passes an existing communicator; `slot` is never freed; `config`
            // outlives the call.
            |raw| unsafe {
                (self.nccl.table.split)(raw, color, key, slot.as_ptr(), config.as_ptr())
            },
            wait,
        )?;

        // A split that NCCL has begun returns success (2.30.7): only the state says when it ends.
        let code = match code {
            // SAFETY: `with` holds the lock and passes an existing communicator.
            SUCCESS => self.with(|raw| unsafe { self.state(raw) }, wait)?,
            code => code,
        };
        let settled = self.settle("ncclCommSplit", code, wait);
        let child = slot.load(Ordering::Acquire);
        let child = (!child.is_null()).then(|| Self::of(self.nccl, self.device.clone(), child));
        // The new communicator of a failed split may only be aborted.
        settled.inspect_err(|_| child.iter().for_each(|child| child.abort().wait()))?;
        if let Some(child) = &child {
            // SAFETY: `with` holds the lock and passes an existing communicator.
            let code = child.with(|raw| unsafe { child.state(raw) }, wait)?;
            child.settle("ncclCommSplit", code, wait)?;
        }

        Ok(child)
    }
}

impl Transport for Handle {
    fn error(&self) -> Option<String> {
        // If the lock is held, another thread is in a call, which reports the error itself.
        let raw = self.raw.try_lock()?;
        // SAFETY: the lock is held, and the handle has the communicator.
        match unsafe { self.state(raw.as_ref()?.0) } {
            SUCCESS | IN_PROGRESS => None,
            code => Some(self.nccl.message("NCCL", code)),
        }
    }

    /// Aborts on a new thread: `ncclCommAbort` blocks until the collectives in flight have left
    /// their streams and all graphs with collectives of the communicator are destroyed.
    fn abort(&self) -> AbortCompletion {
        let (sender, completion) = AbortCompletion::new();
        // If another thread's call blocks, the communicator is leaked.
        let raw = self
            .raw
            .try_lock_for(LOCK_LIMIT)
            .and_then(|mut raw| raw.take());

        if let Some(raw) = raw {
            let nccl = self.nccl;
            let device = self.device.clone();
            let abort = move || {
                // Moves the whole `Raw`, which is `Send`.
                let raw = raw;
                if device.bind().is_ok() {
                    // SAFETY: the communicator exists; it was taken out of the handle, so this is
                    // its only user.
                    unsafe { (nccl.table.abort)(raw.0) };
                }
                drop(sender);
            };
            // If the system has no thread for it, the communicator is leaked.
            let _ = std::thread::Builder::new()
                .name("nccl abort".to_owned())
                .spawn(abort);
        }

        completion
    }
}

impl Drop for Handle {
    /// Finalizes and destroys the communicator; its owner has waited for the collectives in flight.
    fn drop(&mut self) {
        if self.raw.lock().is_none() || self.device.bind().is_err() {
            return;
        }
        // SAFETY: `with` passes an existing communicator.
        let finalize = |raw| unsafe { (self.nccl.table.finalize)(raw) };
        let finalized = self.with(finalize, LOCAL_WAIT);
        if finalized
            .and_then(|code| self.settle("ncclCommFinalize", code, LOCAL_WAIT))
            .is_err()
        {
            return self.abort().wait();
        }
        if let Some(raw) = self.raw.lock().take() {
            // SAFETY: the communicator exists and is finalized; it was taken out of the handle, so
            // this is its only user.
            unsafe { (self.nccl.table.destroy)(raw.0) };
        }
    }
}

fn data_type(dtype: CommDType) -> sys::ncclDataType_t {
    use sys::ncclDataType_t::{ncclBfloat16, ncclFloat16, ncclFloat32, ncclFloat64, ncclUint8};
    match dtype {
        CommDType::U8 => ncclUint8,
        CommDType::F16 => ncclFloat16,
        CommDType::Bf16 => ncclBfloat16,
        CommDType::F32 => ncclFloat32,
        CommDType::F64 => ncclFloat64,
    }
}

fn reduction(op: ReduceOp) -> sys::ncclRedOp_t {
    match op {
        ReduceOp::Sum => sys::ncclRedOp_t::ncclSum,
        ReduceOp::Avg => sys::ncclRedOp_t::ncclAvg,
        ReduceOp::Max => sys::ncclRedOp_t::ncclMax,
    }
}
