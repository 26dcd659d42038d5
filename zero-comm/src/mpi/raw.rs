//! The MPI calls of the back end, each behind a safe or narrowly unsafe method.
//!
//! MPI is initialized with `MPI_THREAD_SERIALIZED`: any thread may call it, under one lock. Sends
//! and receives are non-blocking; [`Raw::test`] drives them.
//!
//! MPI cannot withdraw a transfer. `MPI_Cancel` ends a receive only if no message has matched it
//! yet; for sends it is deprecated since MPI 4.0. A receive that has matched a message of a lost
//! rank may never end, and an RDMA network may write to its buffer at any time without a call of
//! this process. So a buffer is freed only when its transfer has ended; otherwise it is leaked
//! ([`staging`](super::staging)).

use std::ffi::{c_int, c_void};

use ::mpi::environment::Universe;
use ::mpi::ffi;
use parking_lot::Mutex;

use super::tags::Tags;

/// A failed MPI call: its name and MPI's error text.
#[derive(Clone, Debug)]
pub(super) struct MpiError {
    pub(super) call: &'static str,
    pub(super) message: String,
}

/// A transfer in flight. Its buffer must stay valid until [`Raw::test`] returns true.
#[derive(Debug)]
pub(super) struct Request {
    handle: ffi::MPI_Request,
    /// The world rank at the other end.
    pub(super) peer: usize,
    pub(super) receives: bool,
    pub(super) done: bool,
}

// SAFETY: MPI request handles may be used from any thread; this one is used only under `Raw`'s
// lock.
unsafe impl Send for Request {}

/// The MPI communicators of this process, and the lock that serializes all calls.
pub(super) struct Raw {
    /// Carries the transfers of collectives.
    data: ffi::MPI_Comm,
    notices: ffi::MPI_Comm,
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) tags: Tags,
    /// The greatest tag that MPI accepts.
    tag_bound: c_int,
    /// Whether calls may still be made.
    usable: Mutex<bool>,
}

// SAFETY: MPI communicator handles may be used from any thread; these are used only under the lock.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

fn check(call: &'static str, code: c_int) -> Result<(), MpiError> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0u8; ffi::MPI_MAX_ERROR_STRING as usize];
    let mut len: c_int = 0;
    // SAFETY: the buffer has the length `MPI_MAX_ERROR_STRING`, which MPI requires.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut len) };
    let text = &text[..usize::try_from(len).unwrap_or(0).min(text.len())];
    Err(MpiError {
        call,
        message: String::from_utf8_lossy(text).into_owned(),
    })
}

fn byte_type() -> ffi::MPI_Datatype {
    // SAFETY: reads a constant that the library initializes when it is loaded.
    unsafe { ffi::RSMPI_UINT8_T }
}

fn null_request() -> ffi::MPI_Request {
    // SAFETY: reads a constant that the library initializes when it is loaded.
    unsafe { ffi::RSMPI_REQUEST_NULL }
}

fn ignored_status() -> *mut ffi::MPI_Status {
    // SAFETY: reads a constant that the library initializes when it is loaded.
    unsafe { ffi::RSMPI_STATUS_IGNORE }
}

fn duplicate(comm: ffi::MPI_Comm) -> Result<ffi::MPI_Comm, MpiError> {
    let mut copy = comm;
    // SAFETY: MPI is initialized, `comm` is a valid communicator, and the pointer is valid for a
    // write.
    check("MPI_Comm_dup", unsafe {
        ffi::MPI_Comm_dup(comm, &mut copy)
    })?;
    // SAFETY: reads a constant that the library initializes when it is loaded.
    let errors_return = unsafe { ffi::RSMPI_ERRORS_RETURN };
    // SAFETY: `copy` is the communicator that the call above created.
    check("MPI_Comm_set_errhandler", unsafe {
        ffi::MPI_Comm_set_errhandler(copy, errors_return)
    })?;
    Ok(copy)
}

/// The greatest tag that every MPI library accepts.
const GUARANTEED_TAG_BOUND: c_int = 32_767;

/// The greatest tag that this MPI library accepts, the same on all ranks. `world` is the
/// communicator of all processes, the one that has the attribute.
fn tag_bound(world: ffi::MPI_Comm) -> Result<c_int, MpiError> {
    let mut value: *const c_int = std::ptr::null();
    let mut found: c_int = 0;
    let key = ffi::MPI_TAG_UB as c_int;
    // SAFETY: MPI is initialized, `world` is a valid communicator, and the pointers are valid for
    // writes; the value of this attribute is a pointer.
    let code = unsafe { ffi::MPI_Comm_get_attr(world, key, (&raw mut value).cast(), &mut found) };
    check("MPI_Comm_get_attr", code)?;
    if found == 0 || value.is_null() {
        return Ok(GUARANTEED_TAG_BOUND);
    }
    // SAFETY: by the standard, the attribute is the address of an integer that MPI owns.
    Ok(unsafe { value.read() })
}

/// Maximum bytes of one transfer; MPI's counts are of type `int`.
pub(super) const MAX_BYTES: usize = 1 << 30;

impl Raw {
    /// Duplicates the communicator of all processes. All processes call it, with the same
    /// `max_tag`, which tags do not exceed even if MPI accepts greater ones.
    pub(super) fn new(_initialized: &Universe, max_tag: c_int) -> Result<Self, MpiError> {
        // SAFETY: reads a constant that the library initializes when it is loaded.
        let world = unsafe { ffi::RSMPI_COMM_WORLD };
        let data = duplicate(world)?;
        let notices = duplicate(world)?;
        let (mut rank, mut size): (c_int, c_int) = (0, 0);
        // SAFETY: `data` is a valid communicator, and the pointer is valid for a write.
        check("MPI_Comm_rank", unsafe {
            ffi::MPI_Comm_rank(data, &mut rank)
        })?;
        // SAFETY: as above.
        check("MPI_Comm_size", unsafe {
            ffi::MPI_Comm_size(data, &mut size)
        })?;
        let rank = usize::try_from(rank).unwrap_or(0);
        let size = usize::try_from(size).unwrap_or(1);
        let tag_bound = tag_bound(world)?.min(max_tag);
        let tags = Tags::within(tag_bound).ok_or_else(|| {
            let least = Tags::MIN_BOUND;
            let message =
                format!("tags end at {tag_bound}, and at least {least} is needed; use an MPI library that follows the standard");
            MpiError { call: "MPI_TAG_UB", message }
        })?;

        Ok(Self {
            data,
            notices,
            rank,
            size,
            tags,
            tag_bound,
            usable: Mutex::new(true),
        })
    }

    /// Finalizes MPI, which waits for the other processes. No call is made afterwards.
    pub(super) fn finalize(&self, universe: Option<Universe>) {
        let mut usable = self.usable.lock();
        *usable = false;
        drop(universe);
    }

    fn call<R>(&self, f: impl FnOnce() -> Result<R, MpiError>) -> Result<R, MpiError> {
        let usable = self.usable.lock();
        if *usable {
            f()
        } else {
            Err(MpiError {
                call: "MPI",
                message: "MPI is finalized".to_owned(),
            })
        }
    }

    /// Starts to receive `len` bytes from `peer` if `receives`, otherwise to send them.
    ///
    /// # Safety
    /// Until the request is done, `buffer` must be valid for `len` bytes: for a receive, valid for
    /// writes, and nothing else accesses them; for a send, valid for reads, and nothing writes to
    /// them.
    pub(super) unsafe fn start(
        &self,
        receives: bool,
        buffer: *mut u8,
        len: usize,
        peer: usize,
        tag: c_int,
    ) -> Result<Request, MpiError> {
        let buffer = buffer.cast::<c_void>();
        let count = len as c_int;
        let rank = peer as c_int;
        if tag > self.tag_bound {
            // As MPI answers, also where a test lowers the bound.
            let message = format!("tag {tag} exceeds the greatest, {}", self.tag_bound);
            return Err(MpiError {
                call: "MPI_TAG_UB",
                message,
            });
        }

        self.call(|| {
            let mut handle = null_request();
            if receives {
                // SAFETY: the buffer is valid by the caller's promise; `handle` is valid for a
                // write.
                let code = unsafe {
                    ffi::MPI_Irecv(
                        buffer,
                        count,
                        byte_type(),
                        rank,
                        tag,
                        self.data,
                        &mut handle,
                    )
                };
                check("MPI_Irecv", code)?;
            } else {
                // SAFETY: as above.
                let code = unsafe {
                    ffi::MPI_Isend(
                        buffer,
                        count,
                        byte_type(),
                        rank,
                        tag,
                        self.data,
                        &mut handle,
                    )
                };
                check("MPI_Isend", code)?;
            }
            Ok(Request {
                handle,
                peer,
                receives,
                done: false,
            })
        })
    }

    /// Drives `request`; returns whether it is done.
    pub(super) fn test(&self, request: &mut Request) -> Result<bool, MpiError> {
        if !request.done {
            let mut flag: c_int = 0;
            self.call(|| {
                // SAFETY: the request is not done, so its handle is valid; the pointers are valid
                // for writes.
                let code =
                    unsafe { ffi::MPI_Test(&mut request.handle, &mut flag, ignored_status()) };
                check("MPI_Test", code)
            })?;
            request.done = flag != 0;
        }
        Ok(request.done)
    }

    /// Requests the cancellation of `request`; [`Self::test`] returns true when it has ended.
    pub(super) fn cancel(&self, request: &mut Request) -> Result<(), MpiError> {
        if request.done {
            return Ok(());
        }
        self.call(|| {
            // SAFETY: the request is not done, so its handle is valid.
            let code = unsafe { ffi::MPI_Cancel(&mut request.handle) };
            check("MPI_Cancel", code)
        })
    }

    /// Sends a notice, best effort. Notices are small, so MPI sends them eagerly, within the call.
    pub(super) fn notify(&self, peer: usize, notice: &[u8]) {
        let leaked: &'static [u8] = Box::leak(notice.into());
        let from = leaked.as_ptr().cast::<c_void>();
        let count = leaked.len() as c_int;
        let _ = self.call(|| {
            let mut handle = null_request();
            // SAFETY: the buffer is never freed; `handle` is valid for a write.
            let code = unsafe {
                ffi::MPI_Isend(
                    from,
                    count,
                    byte_type(),
                    peer as c_int,
                    0,
                    self.notices,
                    &mut handle,
                )
            };
            check("MPI_Isend", code)
        });
    }

    /// Receives a pending notice: its sender's world rank and its bytes.
    pub(super) fn notice(&self) -> Result<Option<(usize, Vec<u8>)>, MpiError> {
        self.call(|| {
            let any = ffi::MPI_ANY_SOURCE as c_int;
            let tag = 0;
            let mut flag: c_int = 0;
            // SAFETY: a struct of integers, for which zeros are valid.
            let mut status: ffi::MPI_Status = unsafe { std::mem::zeroed() };
            // SAFETY: the pointers are valid for writes.
            check("MPI_Iprobe", unsafe {
                ffi::MPI_Iprobe(any, tag, self.notices, &mut flag, &mut status)
            })?;
            if flag == 0 {
                return Ok(None);
            }
            let mut count: c_int = 0;
            // SAFETY: the probe above wrote the status.
            check("MPI_Get_count", unsafe {
                ffi::MPI_Get_count(&status, byte_type(), &mut count)
            })?;
            let mut bytes = vec![0u8; usize::try_from(count).unwrap_or(0)];
            let to = bytes.as_mut_ptr().cast::<c_void>();
            let from = status.MPI_SOURCE;
            // SAFETY: the buffer has the probed length. The message is pending, so the call does
            // not block.
            let code = unsafe {
                ffi::MPI_Recv(
                    to,
                    count,
                    byte_type(),
                    from,
                    tag,
                    self.notices,
                    ignored_status(),
                )
            };
            check("MPI_Recv", code)?;
            Ok(Some((usize::try_from(from).unwrap_or(0), bytes)))
        })
    }
}
