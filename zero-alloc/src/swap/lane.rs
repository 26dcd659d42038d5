//! A lane: splits transfers into requests, keeps up to `queue_depth` of them in flight, and waits
//! for all.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;

use super::open_file::OpenFile;
use super::options::ALIGN_BYTES;
use super::queue::Queue;
use super::request::{Address, TransferRequest};
use super::{SwapBuffer, SwapError};
use crate::TimeLimit;
use crate::device::{AnySlice, Cause, DeviceError, DeviceId, Stream};
use crate::host::HostStream;
use crate::timeline::Work;

/// The number of requests whose buffers the kernel may access. The process is aborted if it is
/// dropped above 0 (a panic in between), because the caller may reuse the buffers then.
struct InFlight(usize);

impl Drop for InFlight {
    fn drop(&mut self) {
        if self.0 > 0 {
            std::process::abort();
        }
    }
}

/// A queue of requests of a [`SwapFile`](super::SwapFile). Cheap to clone.
#[derive(Clone)]
pub struct SwapLane(Arc<Lane>);

struct Lane {
    file: Arc<OpenFile>,
    /// Locked while an operation runs; its holder waits only for the disk, with a limit. `None`
    /// after a failure of the queue itself, and where transfers are only recorded.
    queue: Mutex<Option<Queue>>,
}

impl std::fmt::Debug for SwapLane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SwapLane({})", self.0.file.dir.display())
    }
}

impl SwapLane {
    pub(super) fn new(file: Arc<OpenFile>) -> Result<Self, SwapError> {
        let queue = match file.recorded {
            true => None,
            false => Some(Queue::new(&file).map_err(|error| file.system("make a lane", error))?),
        };
        Ok(Self(Arc::new(Lane {
            file,
            queue: Mutex::new(queue),
        })))
    }

    /// Registers buffers with the kernel, in place of those registered before: transfers within one
    /// of them cost less. The lane keeps them until others replace them or it is dropped. Where the
    /// kernel refuses (a limit of locked memory), a notice says so and transfers work without.
    pub fn register(&self, buffers: &[SwapBuffer]) {
        let Lane { file, queue } = &*self.0;
        let Some(queue) = &mut *queue.lock() else {
            return;
        };
        if let Err(error) = queue.register(buffers) {
            let bytes: usize = buffers.iter().map(|buffer| buffer.place().1).sum();
            file.notice(format!(
                "the kernel refuses to register {bytes} bytes of swap buffers ({error}): transfers cost more time of the processor; raise ulimit -l"
            ));
        }
    }

    /// Enqueues reading ranges of the file, each an offset in bytes and its destination, as one
    /// operation of `stream`, named `swap read`. It has run when all are read. Bytes of a
    /// destination in two ranges get the content of either. The operation fails with a
    /// [`SwapError`] as its [cause](DeviceError::cause).
    ///
    /// # Errors
    /// A slice is not in host memory, an offset, address or length is not a multiple of
    /// [`SwapFile::ALIGN_BYTES`](super::SwapFile::ALIGN_BYTES), a range ends beyond the file, or
    /// the stream is closed.
    pub fn read(&self, stream: &HostStream, ranges: &[(u64, AnySlice)]) -> Result<(), DeviceError> {
        self.enqueue("swap read", false, stream, ranges)
    }

    /// Enqueues writing ranges of the file, each an offset in bytes and its source, as one
    /// operation of `stream`, named `swap write`; otherwise as [`SwapLane::read`].
    ///
    /// # Errors
    /// As [`SwapLane::read`].
    pub fn write(
        &self,
        stream: &HostStream,
        ranges: &[(u64, AnySlice)],
    ) -> Result<(), DeviceError> {
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
        let bytes: usize = ranges.iter().map(|(_, slice)| slice.len_bytes()).sum();
        let lane = Arc::clone(&self.0);
        let ranges = ranges.to_vec();
        let name = stream.name().to_owned();
        stream.enqueue_sized(label, Work::bytes(bytes as u64), move || {
            for (offset, slice) in &ranges {
                slice.note_access(!write);
                lane.file.note_access(*offset, slice.len_bytes(), write);
            }
            lane.transfer(write, &ranges)
                .map_err(|error| DeviceError::Operation {
                    stream: name,
                    op: label.into(),
                    cause: Cause::new(error),
                })
        })
    }
}

fn check(
    what: &'static str,
    file_bytes: u64,
    offset: u64,
    slice: AnySlice,
) -> Result<(), DeviceError> {
    slice.check_device(what, DeviceId::HOST)?;
    let refused = |message| Err(DeviceError::Argument { what, message });
    let align = ALIGN_BYTES as u64;
    let bytes = slice.len_bytes() as u64;
    let values = [
        ("offset", offset),
        ("address", slice.as_ptr().addr() as u64),
        ("length", bytes),
    ];
    if let Some((name, value)) = values
        .iter()
        .find(|(_, value)| value % align != 0 && bytes > 0)
    {
        return refused(format!("{name} {value} is not a multiple of {align} bytes"));
    }

    if offset.checked_add(bytes).is_none_or(|end| end > file_bytes) {
        return refused(format!(
            "{bytes} bytes at offset {offset} end beyond the file of {file_bytes} bytes"
        ));
    }

    Ok(())
}

impl Lane {
    /// Transfers all ranges. Returns once no request is in flight.
    fn transfer(&self, write: bool, ranges: &[(u64, AnySlice)]) -> Result<(), SwapError> {
        let mut lane_queue = self.queue.lock();
        let Some(queue) = &mut *lane_queue else {
            return Err(self
                .file
                .system("use a lane", io::Error::other("its queue failed before")));
        };
        let mut transfer = Transfer::new(&self.file);
        let requests = requests(ranges, write, self.file.options.request_bytes);
        let result = transfer.run(queue, requests);
        if transfer.broken {
            // Requests that were never submitted are dropped with the queue.
            *lane_queue = None;
        }
        result
    }
}

/// The requests of a transfer, in order.
fn requests(
    ranges: &[(u64, AnySlice)],
    write: bool,
    request_bytes: usize,
) -> impl Iterator<Item = TransferRequest> {
    ranges.iter().flat_map(move |&(offset, slice)| {
        let whole = TransferRequest {
            offset,
            address: Address(slice.as_ptr()),
            bytes: slice.len_bytes(),
            write,
        };
        (0..whole.bytes).step_by(request_bytes).map(move |at| {
            let rest = whole.rest(at);
            TransferRequest {
                bytes: rest.bytes.min(request_bytes),
                ..rest
            }
        })
    })
}

/// A transfer that runs.
struct Transfer<'a> {
    file: &'a OpenFile,
    /// The requests in flight, by slot.
    slots: Vec<Option<TransferRequest>>,
    free: Vec<usize>,
    in_flight: InFlight,
    /// Requests to submit again.
    again: Vec<TransferRequest>,
    /// The first error; no request is submitted after it.
    failed: Option<SwapError>,
    /// The time since a request last came back.
    time: TimeLimit,
    late: bool,
    /// The queue itself failed.
    broken: bool,
}

impl<'a> Transfer<'a> {
    fn new(file: &'a OpenFile) -> Self {
        let depth = file.options.queue_depth;
        Self {
            file,
            slots: vec![None; depth],
            free: (0..depth).rev().collect(),
            in_flight: InFlight(0),
            again: Vec::new(),
            failed: None,
            time: TimeLimit::new(file.options.limit),
            late: false,
            broken: false,
        }
    }

    fn run(
        &mut self,
        queue: &mut Queue,
        mut requests: impl Iterator<Item = TransferRequest>,
    ) -> Result<(), SwapError> {
        let mut done = Vec::with_capacity(self.slots.len());
        loop {
            while self.failed.is_none()
                && let Some(&slot) = self.free.last()
                && let Some(request) = self.again.pop().or_else(|| requests.next())
            {
                match queue.push(slot, request, self.file) {
                    Ok(()) => {
                        self.free.pop();
                        self.slots[slot] = Some(request);
                        self.in_flight.0 += 1;
                    }
                    Err(error) => self.failed = Some(self.file.failed(&request, error)),
                }
            }
            if self.broken && self.in_flight.0 == queue.unsubmitted() {
                self.in_flight.0 = 0;
            }
            if self.in_flight.0 == 0 {
                return self.failed.take().map_or(Ok(()), Err);
            }
            if let Err(error) = queue.wait(self.time.slice(), &mut done) {
                self.broken = true;
                self.failed
                    .get_or_insert_with(|| self.file.system("io_uring_enter", error));
                std::thread::sleep(Duration::from_millis(1));
            }
            for (slot, result) in done.drain(..) {
                self.finish(slot, result);
            }
            self.check_time(queue);
        }
    }

    /// Handles a request that has come back with a number of bytes or a negative errno.
    fn finish(&mut self, slot: usize, result: i32) {
        let Some(request) = self.slots.get_mut(slot).and_then(Option::take) else {
            return;
        };
        self.in_flight.0 -= 1;
        self.free.push(slot);

        let error = match usize::try_from(result) {
            Err(_) if matches!(-result, libc::EINTR | libc::EAGAIN) => {
                return self.again.push(request);
            }
            Err(_) => io::Error::from_raw_os_error(-result),
            Ok(bytes) => {
                // The rest of a short transfer starts at an aligned offset.
                let bytes = if bytes < request.bytes {
                    bytes & !(ALIGN_BYTES - 1)
                } else {
                    bytes
                };
                let counter = if request.write {
                    &self.file.written_bytes
                } else {
                    &self.file.read_bytes
                };
                counter.fetch_add(bytes as u64, Ordering::Relaxed);
                if bytes > 0 {
                    if bytes < request.bytes {
                        self.again.push(request.rest(bytes));
                    }
                    self.time = TimeLimit::new(self.file.options.limit);
                    return;
                }
                io::Error::new(io::ErrorKind::UnexpectedEof, "it transferred nothing")
            }
        };

        self.failed
            .get_or_insert_with(|| self.file.failed(&request, error));
    }

    /// After the limit, the transfer fails; after the same time again, the process is aborted.
    fn check_time(&mut self, queue: &mut Queue) {
        if !self.time.has_passed() && !queue.is_late() {
            return;
        }
        let Some(pending) = self.slots.iter().flatten().chain(&self.again).next() else {
            return;
        };
        let error = self.file.late(pending);
        if self.late {
            eprintln!(
                "zero-alloc: {error}. The kernel may still access its buffer: the process is aborted."
            );
            std::process::abort();
        }
        self.failed.get_or_insert(error);
        self.late = true;
        self.time = TimeLimit::new(self.file.options.limit);
    }
}
