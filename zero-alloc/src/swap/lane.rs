//! A lane: splits transfers into requests, keeps up to `queue_depth` of them in flight, and waits for all.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

#[cfg(any(test, feature = "testing"))]
use super::Fault;
use super::file::Inner;
use super::threads::Threads;
use super::{SwapError, SwapFile};
use crate::TimeLimit;
use crate::device::{AnySlice, Cause, DeviceError, DeviceId, Stream};
use crate::host::HostStream;

#[derive(Clone, Copy)]
pub(super) struct Address(pub(super) *mut u8);

// SAFETY: an address in memory that the slices' maker lets operations of streams access from any thread.
unsafe impl Send for Address {}

/// One request to the kernel.
#[derive(Clone, Copy)]
pub(super) struct Request {
    pub(super) offset: u64,
    pub(super) address: Address,
    pub(super) bytes: usize,
    pub(super) write: bool,
}

impl Request {
    fn op(&self) -> &'static str {
        if self.write { "write" } else { "read" }
    }

    /// The part behind the first `bytes` bytes.
    fn rest(self, bytes: usize) -> Self {
        Self {
            offset: self.offset + bytes as u64,
            address: Address(self.address.0.wrapping_add(bytes)),
            bytes: self.bytes - bytes,
            ..self
        }
    }

    fn failed(&self, file: &Inner, source: io::Error) -> SwapError {
        let Self { offset, bytes, .. } = *self;
        SwapError::Transfer { dir: file.dir.clone(), op: self.op(), offset, bytes, source }
    }

    fn late(&self, file: &Inner) -> SwapError {
        let Self { offset, bytes, .. } = *self;
        SwapError::Late { dir: file.dir.clone(), op: self.op(), offset, bytes, limit: file.options.limit }
    }
}

/// The number of requests whose buffers the kernel may access. The process is aborted if it is dropped above 0 (a panic
/// in between), because the caller may reuse the buffers then.
struct InFlight(usize);

impl Drop for InFlight {
    fn drop(&mut self) {
        if self.0 > 0 {
            std::process::abort();
        }
    }
}

/// A queue of requests of a [`SwapFile`]. Cheap to clone.
#[derive(Clone)]
pub struct SwapLane(Arc<Lane>);

struct Lane {
    file: Arc<Inner>,
    /// Locked while an operation runs. Its holder waits for nothing but the disk, which has a limit.
    engine: Mutex<Threads>,
}

impl std::fmt::Debug for SwapLane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SwapLane({})", self.0.file.dir.display())
    }
}

impl SwapLane {
    pub(super) fn new(file: Arc<Inner>) -> Result<Self, SwapError> {
        let engine = Threads::new(&file).map_err(|source| SwapError::System {
            dir: file.dir.clone(),
            call: "start threads",
            source,
            advice: "check ulimit -u, or use a smaller queue depth",
        })?;
        Ok(Self(Arc::new(Lane { file, engine: Mutex::new(engine) })))
    }

    /// Registers buffers with the kernel, in place of those registered before: transfers within one of them cost
    /// less. Their memory must stay mapped at its address while the lane lives. Where the kernel refuses (a limit of
    /// locked memory), a notice says so and transfers work without.
    ///
    /// # Errors
    /// A buffer is not host memory.
    pub fn register(&self, buffers: &[AnySlice]) -> Result<(), SwapError> {
        let _ = buffers;
        Ok(())
    }

    /// Enqueues reading ranges of the file, each an offset in bytes and its destination, as one operation of
    /// `stream`, named `swap read`. It has run when all are read; ranges must not overlap. The operation fails with a
    /// [`SwapError`] as its [cause](DeviceError::cause).
    ///
    /// # Errors
    /// A slice is not in host memory, an offset, address or length is not a multiple of
    /// [`SwapFile::ALIGN_BYTES`], a range ends beyond the file, or the stream is closed.
    pub fn read(&self, stream: &HostStream, ranges: &[(u64, AnySlice)]) -> Result<(), DeviceError> {
        self.enqueue("swap read", false, stream, ranges)
    }

    /// Enqueues writing ranges of the file, each an offset in bytes and its source, as one operation of `stream`,
    /// named `swap write`; otherwise as [`SwapLane::read`].
    ///
    /// # Errors
    /// As [`SwapLane::read`].
    pub fn write(&self, stream: &HostStream, ranges: &[(u64, AnySlice)]) -> Result<(), DeviceError> {
        self.enqueue("swap write", true, stream, ranges)
    }

    fn enqueue(
        &self,
        label: &'static str,
        write: bool,
        stream: &HostStream,
        ranges: &[(u64, AnySlice)],
    ) -> Result<(), DeviceError> {
        for (offset, slice) in ranges {
            check(label, self.0.file.bytes, *offset, *slice)?;
        }
        let (lane, ranges, name) = (Arc::clone(&self.0), ranges.to_vec(), stream.name().to_owned());
        stream.enqueue(label, move || {
            for (_, slice) in &ranges {
                slice.note_access(!write);
            }
            lane.transfer(write, &ranges).map_err(|error| DeviceError::Operation {
                stream: name,
                op: label.into(),
                cause: Cause::new(error),
            })
        })
    }
}

fn check(what: &'static str, file_bytes: u64, offset: u64, slice: AnySlice) -> Result<(), DeviceError> {
    slice.check_device(what, DeviceId::HOST)?;
    let refused = |message| Err(DeviceError::Argument { what, message });
    let align = SwapFile::ALIGN_BYTES as u64;
    let bytes = slice.len_bytes() as u64;
    let values = [("offset", offset), ("address", slice.as_ptr().addr() as u64), ("length", bytes)];
    if let Some((name, value)) = values.iter().find(|(_, value)| value % align != 0 && bytes > 0) {
        return refused(format!("{name} {value} is not a multiple of {align} bytes"));
    }
    if offset.checked_add(bytes).is_none_or(|end| end > file_bytes) {
        return refused(format!("{bytes} bytes at offset {offset} end beyond the file of {file_bytes} bytes"));
    }
    Ok(())
}

impl Lane {
    /// Transfers all ranges. Returns once no request is in flight.
    fn transfer(&self, write: bool, ranges: &[(u64, AnySlice)]) -> Result<(), SwapError> {
        let file = &*self.file;
        let engine = self.engine.lock();
        let (depth, request_bytes) = (file.options.queue_depth, file.options.request_bytes);
        let mut todo = ranges.iter().flat_map(|(offset, slice)| {
            let whole =
                Request { offset: *offset, address: Address(slice.as_ptr()), bytes: slice.len_bytes(), write };
            (0..whole.bytes).step_by(request_bytes).map(move |at| {
                let rest = whole.rest(at);
                Request { bytes: rest.bytes.min(request_bytes), ..rest }
            })
        });
        let mut again = Vec::new();
        let mut slots: Vec<Option<Request>> = vec![None; depth];
        let mut free: Vec<usize> = (0..depth).rev().collect();
        let mut done: Vec<(usize, i32)> = Vec::with_capacity(depth);
        let mut failed = None;
        let mut late = false;
        let mut time = TimeLimit::new(file.options.limit);
        #[cfg(any(test, feature = "testing"))]
        let (mut never, mut delayed) = (Vec::new(), false);
        let mut in_flight = InFlight(0);
        loop {
            while failed.is_none()
                && let Some(&slot) = free.last()
                && let Some(request) = again.pop().or_else(|| todo.next())
            {
                free.pop();
                slots[slot] = Some(request);
                in_flight.0 += 1;
                #[cfg(any(test, feature = "testing"))]
                let request = match file.faults.next() {
                    Some(Fault::Errno(errno)) => {
                        done.push((slot, -errno));
                        continue;
                    }
                    Some(Fault::Short(0)) => {
                        done.push((slot, 0));
                        continue;
                    }
                    Some(Fault::Short(bytes)) => Request { bytes: bytes.min(request.bytes), ..request },
                    Some(Fault::Late) => {
                        delayed = true;
                        request
                    }
                    Some(Fault::Never) => {
                        never.push(slot);
                        request
                    }
                    None => request,
                };
                engine.push(slot, request);
            }
            if in_flight.0 == 0 {
                return failed.map_or(Ok(()), Err);
            }
            if done.is_empty() {
                engine.wait(time.slice(), &mut done);
            }
            #[cfg(any(test, feature = "testing"))]
            done.retain(|(slot, _)| !never.contains(slot));
            let mut passed = time.has_passed();
            #[cfg(any(test, feature = "testing"))]
            {
                passed |= std::mem::take(&mut delayed);
            }
            if passed {
                let oldest = slots.iter().flatten().next();
                let error = oldest.map(|request| request.late(file));
                if late {
                    let text = error.map(|error| error.to_string()).unwrap_or_default();
                    eprintln!("zero-alloc: {text}. It is still in flight and its buffer cannot be freed: aborting.");
                    std::process::abort();
                }
                failed = failed.or(error);
                late = true;
                time = TimeLimit::new(file.options.limit);
            }
            for (slot, result) in done.drain(..) {
                let Some(request) = slots[slot].take() else { continue };
                in_flight.0 -= 1;
                free.push(slot);
                let error = match usize::try_from(result) {
                    Err(_) if matches!(-result, libc::EINTR | libc::EAGAIN) => {
                        again.push(request);
                        continue;
                    }
                    Err(_) => io::Error::from_raw_os_error(-result),
                    Ok(bytes) => {
                        // The rest of a short transfer starts at an aligned offset.
                        let whole = if bytes < request.bytes { bytes & !(SwapFile::ALIGN_BYTES - 1) } else { bytes };
                        let counter = if write { &file.written_bytes } else { &file.read_bytes };
                        counter.fetch_add(whole as u64, Ordering::Relaxed);
                        if whole > 0 {
                            if whole < request.bytes {
                                again.push(request.rest(whole));
                            }
                            if !late {
                                time = TimeLimit::new(file.options.limit);
                            }
                            continue;
                        }
                        io::Error::new(io::ErrorKind::UnexpectedEof, format!("{bytes} bytes were transferred"))
                    }
                };
                failed.get_or_insert_with(|| request.failed(file, error));
            }
        }
    }
}
