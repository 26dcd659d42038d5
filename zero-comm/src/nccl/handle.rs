//! An NCCL communicator: the only place that calls the library.
//!
//! The communicator does not block: a call may return before it is done, and then nothing but asking for its state is
//! allowed until it is. Each call here asks until then, with a limit, and gives up early when the world has failed. The
//! lock is held for single calls of the library only, never while waiting, so that [`Handle::abort`] gets it.

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::{Duration, Instant};

use cudarc::nccl::sys;
use parking_lot::Mutex;
use zero_alloc::cuda::CudaDevice;
use zero_alloc::device::{AnySlice, DType};

use super::abort::AbortCompletion;
use super::config::Config;
use super::library::{IN_PROGRESS, Nccl, SUCCESS, back_end};
use super::world::Transport;
use crate::call::{Checked, Group};
use crate::{Collective, CommError, ReduceOp};

/// How long it is asked without a pause whether a call is done: NCCL hands each collective to a thread, which takes
/// some tens of microseconds to put it on its stream.
const SPIN: Duration = Duration::from_micros(100);
/// Between two questions after that, at first and at most.
const PAUSES: [Duration; 2] = [Duration::from_micros(5), Duration::from_millis(1)];
/// How long aborting waits for a call of another thread, which does not block and so soon returns.
const LOCK_LIMIT: Duration = Duration::from_secs(5);
/// How long giving up a communicator in peace may take, before it is aborted.
const FINALIZE_LIMIT: Duration = Duration::from_secs(10);
/// `NCCL_SPLIT_NOCOLOR`.
const NO_COLOR: c_int = -1;

/// How waiting for a call ends early.
#[derive(Debug)]
pub(super) enum Interrupt {
    /// The limit passed.
    Late,
    /// The world has failed.
    World(CommError),
    /// The library has.
    Failed(CommError),
}

/// Asked while waiting: the failure of the world, if there is one.
pub(super) type FailureProbe<'a> = &'a dyn Fn() -> Option<CommError>;

struct Raw(sys::ncclComm_t);

// SAFETY: NCCL's communicators may be used from any thread, one at a time; the lock around this sees to that.
unsafe impl Send for Raw {}

/// A communicator of NCCL.
pub(super) struct Handle {
    nccl: &'static Nccl,
    device: CudaDevice,
    /// None once it is aborted or destroyed.
    raw: Mutex<Option<Raw>>,
}

/// What initialises the communicators of a world.
pub(super) fn unique_id(nccl: &Nccl) -> Result<Vec<u8>, CommError> {
    let mut id = sys::ncclUniqueId { internal: [0; ID_BYTES] };
    // SAFETY: writes the id.
    nccl.check("ncclGetUniqueId", unsafe { (nccl.table.get_unique_id)(&raw mut id) })?;
    Ok(id.internal.map(|c| c as u8).to_vec())
}

const ID_BYTES: usize = 128;

/// Where NCCL writes a new communicator's handle: perhaps later, from a thread of its own, and so never freed.
fn slot() -> &'static AtomicPtr<sys::ncclComm> {
    Box::leak(Box::new(AtomicPtr::new(std::ptr::null_mut())))
}

impl Handle {
    /// Joins the world of `id`.
    pub(super) fn init(
        nccl: &'static Nccl,
        device: &CudaDevice,
        Group { rank, world_size }: Group,
        id: &[u8],
        (limit, failure): (Duration, FailureProbe<'_>),
    ) -> Result<Self, Interrupt> {
        let failed = |message: &str| Interrupt::Failed(back_end(message.to_owned()));
        let id: [u8; ID_BYTES] = id.try_into().map_err(|_| failed("rank 0's id has the wrong length"))?;
        let id = sys::ncclUniqueId { internal: id.map(|c| c as c_char) };
        let number = |n: usize| c_int::try_from(n).map_err(|_| failed("too many ranks"));
        let (n, rank) = (number(world_size)?, number(rank)?);
        device.bind().map_err(|e| Interrupt::Failed(e.into()))?;
        let (slot, mut config) = (slot(), Config::without_blocking());
        // SAFETY: writes one handle; the configuration is read during the call; the device is current.
        let code = unsafe { (nccl.table.init)(slot.as_ptr(), n, id, rank, config.as_ptr()) };
        let raw = slot.load(Ordering::Acquire);
        if raw.is_null() {
            return Err(Interrupt::Failed(back_end(nccl.message("ncclCommInitRankConfig", code))));
        }
        let handle = Self { nccl, device: device.clone(), raw: Mutex::new(Some(Raw(raw))) };
        handle.settle("ncclCommInitRankConfig", code, limit, failure).inspect_err(|_| handle.abort().wait())?;
        Ok(handle)
    }

    /// Calls the library with the communicator, unless it is gone.
    fn with(
        &self,
        call: impl FnOnce(sys::ncclComm_t) -> c_int,
        failure: FailureProbe<'_>,
    ) -> Result<c_int, Interrupt> {
        self.device.bind().map_err(|e| Interrupt::Failed(e.into()))?;
        match &*self.raw.lock() {
            Some(raw) => Ok(call(raw.0)),
            None => {
                Err(failure()
                    .map_or_else(|| Interrupt::Failed(back_end("it was aborted".to_owned())), Interrupt::World))
            }
        }
    }

    /// Waits until the call that returned `code` is done.
    fn settle(
        &self,
        call: &str,
        mut code: c_int,
        limit: Duration,
        failure: FailureProbe<'_>,
    ) -> Result<(), Interrupt> {
        let (begun, mut pause) = (Instant::now(), PAUSES[0]);
        loop {
            match code {
                SUCCESS => return Ok(()),
                IN_PROGRESS => {}
                code => {
                    return Err(failure().map_or_else(
                        || Interrupt::Failed(back_end(self.nccl.message(call, code))),
                        Interrupt::World,
                    ));
                }
            }
            if let Some(error) = failure() {
                return Err(Interrupt::World(error));
            }
            if begun.elapsed() >= limit {
                return Err(Interrupt::Late);
            }
            if begun.elapsed() < SPIN {
                std::thread::yield_now();
            } else {
                std::thread::sleep(pause);
                pause = (pause * 2).min(PAUSES[1]);
            }
            code = self.with(|raw| self.state(raw), failure)?;
        }
    }

    /// The state of the communicator, as a code.
    fn state(&self, raw: sys::ncclComm_t) -> c_int {
        let mut state = IN_PROGRESS;
        // SAFETY: the communicator lives, since its lock is held; writes one number.
        let code = unsafe { (self.nccl.table.async_error)(raw, &raw mut state) };
        if code == SUCCESS { state } else { code }
    }

    /// Enqueues a collective on `stream`, and waits until it is enqueued; for the first ones that is when all ranks
    /// have called them, since NCCL connects them then.
    ///
    /// # Safety
    /// `stream` is a stream of the device; `barrier` is one byte of the device's memory, or more.
    pub(super) unsafe fn run(
        &self,
        checked: &Checked,
        group: Group,
        barrier: AnySlice,
        stream: *mut c_void,
        (limit, failure): (Duration, FailureProbe<'_>),
    ) -> Result<(), Interrupt> {
        let label = checked.call().collective.name();
        // SAFETY: the caller's promise; the buffers are valid by the promise of who made the slices.
        let code = self.with(|raw| unsafe { self.enqueue(raw, checked, group, barrier, stream.cast()) }, failure)?;
        self.settle(label, code, limit, failure)
    }

    /// # Safety
    /// The communicator lives and its lock is held, and as for [`Self::run`].
    unsafe fn enqueue(
        &self,
        raw: sys::ncclComm_t,
        checked: &Checked,
        Group { rank, world_size: n }: Group,
        barrier: AnySlice,
        stream: sys::cudaStream_t,
    ) -> c_int {
        let (table, call) = (&self.nccl.table, checked.call());
        let (send, recv) = (checked.send(), checked.recv());
        let (from, to) = (send.as_ptr().cast_const().cast::<c_void>(), recv.as_ptr().cast::<c_void>());
        let (dtype, op) = (data_type(call.dtype), call.op.map_or(sys::ncclRedOp_t::ncclSum, reduction));
        let segment = |q: usize| call.segments.range(q, n);
        match call.collective {
            Collective::Barrier => {
                let (at, len) = (barrier.as_ptr().cast::<c_void>(), 1);
                let (u8, sum) = (sys::ncclDataType_t::ncclUint8, sys::ncclRedOp_t::ncclSum);
                // SAFETY: the caller's promise. All ranks add zeros, whichever streams do it at once.
                unsafe { (table.all_reduce)(at, at, len, u8, sum, raw, stream) }
            }
            _ if send.is_empty() && recv.is_empty() && segment(rank).is_empty() && call.segments.total(n) == 0 => {
                SUCCESS
            }
            // SAFETY: the buffers have the counts that were checked; the caller's promise.
            Collective::AllReduce => unsafe { (table.all_reduce)(from, to, recv.len(), dtype, op, raw, stream) },
            Collective::Broadcast => {
                let root = call.root.unwrap_or(0) as c_int;
                // SAFETY: as above.
                unsafe { (table.broadcast)(from, to, recv.len(), dtype, root, raw, stream) }
            }
            Collective::ReduceScatter if matches!(call.segments, crate::Segments::Even(_)) => {
                // SAFETY: as above.
                unsafe { (table.reduce_scatter)(from, to, recv.len(), dtype, op, raw, stream) }
            }
            Collective::AllGather if matches!(call.segments, crate::Segments::Even(_)) => {
                // SAFETY: as above.
                unsafe { (table.all_gather)(from, to, send.len(), dtype, raw, stream) }
            }
            // Segments of different lengths: one reduction to each rank, all at once. Every rank sends each segment
            // but its own once.
            Collective::ReduceScatter => self.grouped((0..n).filter(|&q| !segment(q).is_empty()), |q| {
                let part = send.slice(segment(q));
                let (from, len) = (part.as_ptr().cast_const().cast(), part.len());
                // SAFETY: as above; only rank q's `to` is written.
                unsafe { (table.reduce)(from, to, len, dtype, op, q as c_int, raw, stream) }
            }),
            // One broadcast from each rank, all at once.
            Collective::AllGather => self.grouped((0..n).filter(|&q| !segment(q).is_empty()), |q| {
                let part = recv.slice(segment(q));
                let (at, len) = (part.as_ptr().cast::<c_void>(), part.len());
                let from = if q == rank { from } else { at.cast_const() };
                // SAFETY: as above; only rank q's `from` is read.
                unsafe { (table.broadcast)(from, at, len, dtype, q as c_int, raw, stream) }
            }),
            Collective::AllToAll => self.grouped(0..2 * n, |i| {
                let (q, sends) = (i / 2, i % 2 == 0);
                let part = if sends { send.slice(segment(q)) } else { recv.slice(segment(q)) };
                let (at, len) = (part.as_ptr().cast::<c_void>(), part.len());
                if sends {
                    // SAFETY: as above.
                    unsafe { (table.send)(at.cast_const(), len, dtype, q as c_int, raw, stream) }
                } else {
                    // SAFETY: as above.
                    unsafe { (table.receive)(at, len, dtype, q as c_int, raw, stream) }
                }
            }),
        }
    }

    /// Calls that make one operation.
    fn grouped(&self, parts: impl Iterator<Item = usize>, mut call: impl FnMut(usize) -> c_int) -> c_int {
        let table = &self.nccl.table;
        // SAFETY: begins a group of this thread, which ends below in any case.
        let begun = unsafe { (table.group_start)() };
        if begun != SUCCESS {
            return begun;
        }
        let failed = parts.map(&mut call).find(|&code| code != SUCCESS && code != IN_PROGRESS);
        // SAFETY: ends the group that was begun.
        let ended = unsafe { (table.group_end)() };
        failed.unwrap_or(ended)
    }

    /// The communicator of the ranks that pass the same color, as rank `rank` of it; all ranks call this.
    pub(super) fn split(
        &self,
        place: Option<(usize, usize)>,
        (limit, failure): (Duration, FailureProbe<'_>),
    ) -> Result<Option<Self>, Interrupt> {
        let number =
            |n: usize| c_int::try_from(n).map_err(|_| Interrupt::Failed(back_end("too many ranks".to_owned())));
        let (color, key) = match place {
            Some((color, rank)) => (number(color)?, number(rank)?),
            None => (NO_COLOR, 0),
        };
        let (slot, mut config) = (slot(), Config::without_blocking());
        let code = self.with(
            // SAFETY: the communicator lives; writes one handle, null without a color.
            |raw| unsafe { (self.nccl.table.split)(raw, color, key, slot.as_ptr(), config.as_ptr()) },
            failure,
        )?;
        let settled = self.settle("ncclCommSplit", code, limit, failure);
        let child = slot.load(Ordering::Acquire);
        let child = (!child.is_null()).then(|| Self {
            nccl: self.nccl,
            device: self.device.clone(),
            raw: Mutex::new(Some(Raw(child))),
        });
        // What came of a split that failed can be aborted only.
        settled.inspect_err(|_| child.iter().for_each(|child| child.abort().wait()))?;
        if let Some(child) = &child {
            let code = child.with(|raw| child.state(raw), failure)?;
            child.settle("ncclCommSplit", code, limit, failure)?;
        }
        Ok(child)
    }

    /// Tells NCCL of the allocation that `memory` lies in, if peers can open it.
    ///
    /// # Safety
    /// The allocation is the device's, and stays mapped until the result is deregistered or the communicator is gone.
    pub(super) unsafe fn register(&self, memory: AnySlice) -> Result<Registered, CommError> {
        let Some(register) = self.nccl.table.register else {
            return Err(back_end("this NCCL registers no memory; 2.19 and later do".to_owned()));
        };
        let (at, bytes) = self.device.shareable_allocation(memory)?;
        let (mut handle, no_failure) = (std::ptr::null_mut(), || None);
        // SAFETY: the caller's promise; the communicator lives; writes one handle.
        let call = |raw| unsafe { register(raw, at.cast(), bytes, &raw mut handle) };
        let code = self.with(call, &no_failure);
        let settled = code.and_then(|code| self.settle("ncclCommRegister", code, FINALIZE_LIMIT, &no_failure));
        settled.map_err(|interrupt| match interrupt {
            Interrupt::World(error) | Interrupt::Failed(error) => error,
            Interrupt::Late => back_end(format!("ncclCommRegister did not end within {FINALIZE_LIMIT:?}")),
        })?;
        if handle.is_null() {
            return Err(back_end(
                "NCCL took no memory: is NCCL_LOCAL_REGISTER=0 or NCCL_P2P_USE_CUDA_MEMCPY=1?".to_owned(),
            ));
        }
        Ok(Registered { handle, bytes })
    }

    /// Ends a registration, unless the communicator is gone, and it with it.
    pub(super) fn deregister(&self, registered: &Registered) {
        if let (Some(deregister), Some(raw), Ok(())) =
            (self.nccl.table.deregister, self.raw.lock().as_ref(), self.device.bind())
        {
            // SAFETY: the communicator lives; registered with it, once.
            unsafe { deregister(raw.0, registered.handle) };
        }
    }
}

/// Registered memory.
pub(super) struct Registered {
    /// What NCCL calls it.
    handle: *mut c_void,
    /// Of the whole allocation.
    pub(super) bytes: usize,
}

// SAFETY: a handle; any thread may use it.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl Transport for Handle {
    fn error(&self) -> Option<String> {
        // While a call is made there is nothing to learn that the call does not say.
        let raw = self.raw.try_lock()?;
        match self.state(raw.as_ref()?.0) {
            SUCCESS | IN_PROGRESS => None,
            code => Some(self.nccl.message("NCCL", code)),
        }
    }

    /// On a thread of its own: NCCL's call blocks until what was under way has left its streams, and until graphs with
    /// collectives of it are gone.
    fn abort(&self) -> AbortCompletion {
        let (ended, end) = AbortCompletion::new();
        // A library that blocks after all keeps the lock: then the process's end has to do.
        let raw = self.raw.try_lock_for(LOCK_LIMIT).and_then(|mut raw| raw.take());
        if let Some(raw) = raw {
            let (nccl, device) = (self.nccl, self.device.clone());
            let abort = move || {
                let whole = raw;
                if device.bind().is_ok() {
                    // SAFETY: it lives, and nobody else has it any more.
                    unsafe { (nccl.table.abort)(whole.0) };
                }
                drop(ended);
            };
            // Without a thread it stays as it is until the process ends.
            let _spawned = std::thread::Builder::new().name("nccl abort".to_owned()).spawn(abort);
        }
        end
    }
}

impl Drop for Handle {
    /// In peace if nothing is under way; who drops it has seen to that.
    fn drop(&mut self) {
        if self.raw.lock().is_none() || self.device.bind().is_err() {
            return;
        }
        // SAFETY: the communicator lives.
        let finalize = |raw| unsafe { (self.nccl.table.finalize)(raw) };
        let no_failure = || None;
        let finalized = self.with(finalize, &no_failure);
        let finalized = finalized.and_then(|code| self.settle("ncclCommFinalize", code, FINALIZE_LIMIT, &no_failure));
        if finalized.is_err() {
            return self.abort().wait();
        }
        if let Some(raw) = self.raw.lock().take() {
            // SAFETY: it lives, is finalized, and nobody else has it any more.
            unsafe { (self.nccl.table.destroy)(raw.0) };
        }
    }
}

fn data_type(dtype: DType) -> sys::ncclDataType_t {
    use sys::ncclDataType_t::{ncclBfloat16, ncclFloat16, ncclFloat32, ncclFloat64, ncclUint8};
    match dtype {
        DType::U8 => ncclUint8,
        DType::F16 => ncclFloat16,
        DType::Bf16 => ncclBfloat16,
        DType::F32 => ncclFloat32,
        DType::F64 => ncclFloat64,
    }
}

fn reduction(op: ReduceOp) -> sys::ncclRedOp_t {
    match op {
        ReduceOp::Sum => sys::ncclRedOp_t::ncclSum,
        ReduceOp::Avg => sys::ncclRedOp_t::ncclAvg,
        ReduceOp::Max => sys::ncclRedOp_t::ncclMax,
    }
}
