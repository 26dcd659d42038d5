//! The MPI calls that the back end makes, each behind a safe or narrowly unsafe method.
//!
//! MPI is initialised for serialised use: every call is made under one lock, from whatever thread. Sends and
//! receives do not block; [`Raw::test`] drives them. After [`Raw::freeze`] this process makes no call any more:
//! the transports of CPU clusters (shared memory, TCP) move bytes in or out of a process's buffers only within
//! that process's own calls, so buffers of transfers that cannot end are safe to give back from then on.

use std::ffi::{c_int, c_void};

use ::mpi::environment::Universe;
use ::mpi::ffi;
use parking_lot::Mutex;

/// An MPI call that failed: its name and what MPI said.
#[derive(Clone, Debug)]
pub(super) struct MpiError {
    pub(super) call: &'static str,
    pub(super) message: String,
}

/// A transfer under way. Its buffer must stay valid until [`Raw::test`] says that it is done.
#[derive(Debug)]
pub(super) struct Request {
    handle: ffi::MPI_Request,
    /// Rank in the world at the other end.
    pub(super) peer: usize,
    pub(super) receives: bool,
    pub(super) done: bool,
}

// SAFETY: a handle is a name for the library, used under the lock only.
unsafe impl Send for Request {}

/// The communicators of this process and the lock for all calls.
pub(super) struct Raw {
    /// For the parts of collectives.
    data: ffi::MPI_Comm,
    /// For notices of failure.
    notices: ffi::MPI_Comm,
    pub(super) rank: usize,
    pub(super) size: usize,
    /// Whether calls may still be made.
    usable: Mutex<bool>,
}

// SAFETY: communicator handles are names for the library, used under the lock only.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

fn check(call: &'static str, code: c_int) -> Result<(), MpiError> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0u8; ffi::MPI_MAX_ERROR_STRING as usize];
    let mut len: c_int = 0;
    // SAFETY: the buffer has the length that MPI asks for.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut len) };
    let text = &text[..usize::try_from(len).unwrap_or(0).min(text.len())];
    Err(MpiError { call, message: String::from_utf8_lossy(text).into_owned() })
}

fn byte_type() -> ffi::MPI_Datatype {
    // SAFETY: a constant of the library.
    unsafe { ffi::RSMPI_UINT8_T }
}

fn null_request() -> ffi::MPI_Request {
    // SAFETY: a constant of the library.
    unsafe { ffi::RSMPI_REQUEST_NULL }
}

fn ignored_status() -> *mut ffi::MPI_Status {
    // SAFETY: a constant of the library.
    unsafe { ffi::RSMPI_STATUS_IGNORE }
}

fn duplicate(comm: ffi::MPI_Comm) -> Result<ffi::MPI_Comm, MpiError> {
    let mut copy = comm;
    // SAFETY: MPI is initialised and `comm` is a live communicator.
    check("MPI_Comm_dup", unsafe { ffi::MPI_Comm_dup(comm, &mut copy) })?;
    // SAFETY: a constant of the library.
    let errors_return = unsafe { ffi::RSMPI_ERRORS_RETURN };
    // SAFETY: `copy` was just made.
    check("MPI_Comm_set_errhandler", unsafe { ffi::MPI_Comm_set_errhandler(copy, errors_return) })?;
    Ok(copy)
}

/// No transfer is larger: MPI counts in `int`.
pub(super) const MAX_BYTES: usize = 1 << 30;

impl Raw {
    /// Communicators of one's own over all processes. All of them call it.
    pub(super) fn new(_initialised: &Universe) -> Result<Self, MpiError> {
        // SAFETY: a constant of the library.
        let world = unsafe { ffi::RSMPI_COMM_WORLD };
        let (data, notices) = (duplicate(world)?, duplicate(world)?);
        let (mut rank, mut size): (c_int, c_int) = (0, 0);
        // SAFETY: the communicator was just made.
        check("MPI_Comm_rank", unsafe { ffi::MPI_Comm_rank(data, &mut rank) })?;
        // SAFETY: as above.
        check("MPI_Comm_size", unsafe { ffi::MPI_Comm_size(data, &mut size) })?;
        let (rank, size) = (usize::try_from(rank).unwrap_or(0), usize::try_from(size).unwrap_or(1));
        Ok(Self { data, notices, rank, size, usable: Mutex::new(true) })
    }

    /// Ends MPI, which waits for the other processes; no call is made from then on.
    pub(super) fn finalize(&self, universe: Option<Universe>) {
        let mut usable = self.usable.lock();
        *usable = false;
        drop(universe);
    }

    /// No call is made from now on.
    pub(super) fn freeze(&self) {
        *self.usable.lock() = false;
    }

    fn call<R>(&self, f: impl FnOnce() -> Result<R, MpiError>) -> Result<R, MpiError> {
        let usable = self.usable.lock();
        if *usable { f() } else { Err(MpiError { call: "MPI", message: "given up after a failure".to_owned() }) }
    }

    /// Starts to send `len` bytes.
    ///
    /// # Safety
    /// `from` is valid for reads of `len` bytes, which nothing writes to, until the request is done or calls are
    /// frozen.
    pub(super) unsafe fn send(
        &self,
        from: *const u8,
        len: usize,
        peer: usize,
        tag: c_int,
    ) -> Result<Request, MpiError> {
        let (from, count) = (from.cast::<c_void>(), len as c_int);
        self.call(|| {
            let mut handle = null_request();
            // SAFETY: the caller vouches for the buffer; a request of its own.
            let code =
                unsafe { ffi::MPI_Isend(from, count, byte_type(), peer as c_int, tag, self.data, &mut handle) };
            check("MPI_Isend", code)?;
            Ok(Request { handle, peer, receives: false, done: false })
        })
    }

    /// Starts to receive `len` bytes.
    ///
    /// # Safety
    /// `to` is valid for writes of `len` bytes, and nothing else accesses it, until the request is done or calls
    /// are frozen.
    pub(super) unsafe fn receive(
        &self,
        to: *mut u8,
        len: usize,
        peer: usize,
        tag: c_int,
    ) -> Result<Request, MpiError> {
        let (to, count) = (to.cast::<c_void>(), len as c_int);
        self.call(|| {
            let mut handle = null_request();
            // SAFETY: the caller vouches for the buffer; a request of its own.
            let code = unsafe { ffi::MPI_Irecv(to, count, byte_type(), peer as c_int, tag, self.data, &mut handle) };
            check("MPI_Irecv", code)?;
            Ok(Request { handle, peer, receives: true, done: false })
        })
    }

    /// Drives `request`; whether it is done.
    pub(super) fn test(&self, request: &mut Request) -> Result<bool, MpiError> {
        if !request.done {
            let mut flag: c_int = 0;
            self.call(|| {
                // SAFETY: a live request of this process; done requests are not tested again.
                let code = unsafe { ffi::MPI_Test(&mut request.handle, &mut flag, ignored_status()) };
                check("MPI_Test", code)
            })?;
            request.done = flag != 0;
        }
        Ok(request.done)
    }

    /// Asks to give `request` up; [`Self::test`] says when it is.
    pub(super) fn cancel(&self, request: &mut Request) -> Result<(), MpiError> {
        if request.done {
            return Ok(());
        }
        // SAFETY: a live request of this process.
        self.call(|| check("MPI_Cancel", unsafe { ffi::MPI_Cancel(&mut request.handle) }))
    }

    /// Sends a notice, as well as can be: it is small, and leaves with the call.
    pub(super) fn notify(&self, peer: usize, notice: &[u8]) {
        let kept: &'static [u8] = Box::leak(notice.to_vec().into_boxed_slice());
        let (from, count) = (kept.as_ptr().cast::<c_void>(), kept.len() as c_int);
        let _unreachable_peer = self.call(|| {
            let mut handle = null_request();
            // SAFETY: the buffer lives for good.
            let code =
                unsafe { ffi::MPI_Isend(from, count, byte_type(), peer as c_int, 0, self.notices, &mut handle) };
            check("MPI_Isend", code)
        });
    }

    /// A notice that has come: from which rank of the world, and its bytes.
    pub(super) fn notice(&self) -> Result<Option<(usize, Vec<u8>)>, MpiError> {
        self.call(|| {
            let (any, tag) = (ffi::MPI_ANY_SOURCE as c_int, 0);
            let mut flag: c_int = 0;
            // SAFETY: plain integers, for which zeros are fine.
            let mut status: ffi::MPI_Status = unsafe { std::mem::zeroed() };
            // SAFETY: places of its own to write to.
            check("MPI_Iprobe", unsafe { ffi::MPI_Iprobe(any, tag, self.notices, &mut flag, &mut status) })?;
            if flag == 0 {
                return Ok(None);
            }
            let mut count: c_int = 0;
            // SAFETY: the status of the probe above.
            check("MPI_Get_count", unsafe { ffi::MPI_Get_count(&status, byte_type(), &mut count) })?;
            let mut bytes = vec![0u8; usize::try_from(count).unwrap_or(0)];
            let (to, from) = (bytes.as_mut_ptr().cast::<c_void>(), status.MPI_SOURCE);
            // SAFETY: the buffer has the probed length; the message is here, so this does not wait.
            let code = unsafe { ffi::MPI_Recv(to, count, byte_type(), from, tag, self.notices, ignored_status()) };
            check("MPI_Recv", code)?;
            Ok(Some((usize::try_from(from).unwrap_or(0), bytes)))
        })
    }
}
