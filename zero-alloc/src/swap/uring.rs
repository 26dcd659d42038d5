//! Requests by io_uring.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use io_uring::{IoUring, opcode, types};

use super::SwapBuffer;
use super::open_file::OpenFile;
use super::request::TransferRequest;

/// The largest buffer that the kernel registers.
const MAX_BUFFER_BYTES: usize = 1 << 30;

pub(super) struct Uring {
    ring: IoUring,
    fd: RawFd,
    /// Registered pieces of buffers, by their index: address and length in bytes.
    pieces: Vec<(usize, usize)>,
    /// The buffers of the pieces. Dropped after `ring`, whose end unregisters them.
    buffers: Vec<SwapBuffer>,
}

impl Uring {
    /// A ring of requests to `file`, which outlives it.
    pub(super) fn new(file: &OpenFile) -> io::Result<Self> {
        let depth = file.options.queue_depth as u32;
        // A completion need not interrupt the thread, which waits for it anyway. Since Linux 5.19.
        let ring = IoUring::builder()
            .setup_coop_taskrun()
            .build(depth)
            .or_else(|_| IoUring::new(depth))?;
        if !ring.params().is_feature_ext_arg() {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "io_uring before Linux 5.11 has no time limits",
            ));
        }
        Ok(Self {
            ring,
            fd: file.file.as_raw_fd(),
            pieces: Vec::new(),
            buffers: Vec::new(),
        })
    }

    /// Registers buffers in place of those registered before. No request is in flight.
    pub(super) fn register(&mut self, buffers: &[SwapBuffer]) -> io::Result<()> {
        if !std::mem::take(&mut self.pieces).is_empty() {
            self.ring.submitter().unregister_buffers()?;
        }
        self.buffers.clear();
        let pieces = buffers
            .iter()
            .map(SwapBuffer::place)
            .flat_map(|(start, bytes)| {
                (0..bytes)
                    .step_by(MAX_BUFFER_BYTES)
                    .map(move |at| (start + at, (bytes - at).min(MAX_BUFFER_BYTES)))
            });

        let mut pieces: Vec<_> = pieces.collect();
        pieces.sort_unstable();
        if pieces.is_empty() {
            return Ok(());
        }

        let system: Vec<_> = pieces
            .iter()
            .map(|&(start, iov_len)| libc::iovec {
                iov_base: std::ptr::without_provenance_mut(start),
                iov_len,
            })
            .collect();

        // SAFETY: the handles in `self.buffers` keep the memory mapped at its address while it is
        // registered.
        unsafe { self.ring.submitter().register_buffers(&system) }?;
        self.pieces = pieces;
        self.buffers = buffers.to_vec();
        Ok(())
    }

    /// The index of the registered buffer that contains the request's memory.
    fn buffer(&self, request: &TransferRequest) -> Option<u16> {
        let at = request.address.0.addr();
        let index = self
            .pieces
            .partition_point(|&(start, _)| start <= at)
            .checked_sub(1)?;
        let (start, bytes) = self.pieces[index];
        (at + request.bytes <= start + bytes).then_some(index as u16)
    }

    /// Queues a request; [`Uring::wait`] submits it. The caller keeps at most `queue_depth` requests
    /// in flight.
    pub(super) fn push(&mut self, slot: usize, request: TransferRequest) -> io::Result<()> {
        let TransferRequest {
            offset,
            address,
            bytes,
            write,
        } = request;

        let fd = types::Fd(self.fd);
        let address = address.0;
        let bytes = bytes as u32;
        let entry = match (write, self.buffer(&request)) {
            (false, None) => opcode::Read::new(fd, address, bytes).offset(offset).build(),
            (true, None) => opcode::Write::new(fd, address, bytes)
                .offset(offset)
                .build(),
            (false, Some(buffer)) => opcode::ReadFixed::new(fd, address, bytes, buffer)
                .offset(offset)
                .build(),
            (true, Some(buffer)) => opcode::WriteFixed::new(fd, address, bytes, buffer)
                .offset(offset)
                .build(),
        };

        // SAFETY: the lane keeps the memory valid until the request has come back; the descriptor
        // is open.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(slot as u64)) };
        pushed.map_err(|_| io::Error::other("the queue of requests is full"))
    }

    /// Submits queued requests and appends finished ones to `done`: slot, and bytes or a negative
    /// errno. Waits at most `limit` for the first.
    pub(super) fn wait(&mut self, limit: Duration, done: &mut Vec<(usize, i32)>) -> io::Result<()> {
        let limit = types::Timespec::from(limit);
        let submitted = self
            .ring
            .submitter()
            .submit_with_args(1, &types::SubmitArgs::new().timespec(&limit));
        done.extend(
            self.ring
                .completion()
                .map(|entry| (entry.user_data() as usize, entry.result())),
        );

        match submitted {
            Err(error)
                if !matches!(
                    error.raw_os_error(),
                    Some(libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY)
                ) =>
            {
                Err(error)
            }
            _ => Ok(()),
        }
    }

    /// The number of queued requests that wait for the next submission.
    pub(super) fn unsubmitted(&mut self) -> usize {
        self.ring.submission().len()
    }
}
