//! Host memory for transfers, owned together by its user and the lanes that register it.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use super::options::ALIGN_BYTES;
use crate::device::{AnySlice, DType, DeviceError};
use crate::host::{HostDevice, HostStream};
use crate::{AllocError, Block, Pool, Purpose};

/// Host memory at an address that transfers need, a multiple of
/// [`SwapFile::ALIGN_BYTES`](super::SwapFile::ALIGN_BYTES).
///
/// A clone is another handle of the same memory. It is freed in stream order when the last handle
/// is dropped; a lane has one of each buffer that is registered with it, so that the kernel's
/// addresses stay valid.
#[derive(Clone)]
pub struct SwapBuffer {
    block: Arc<Mutex<Block<HostDevice>>>,
    bytes: AnySlice,
}

impl fmt::Debug for SwapBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SwapBuffer({} bytes)", self.bytes.len_bytes())
    }
}

impl SwapBuffer {
    /// Allocates `bytes` bytes, first used on `stream`, as [`Pool::allocate`]; the block is larger
    /// by [`SwapFile::ALIGN_BYTES`](super::SwapFile::ALIGN_BYTES).
    ///
    /// # Errors
    /// As [`Pool::allocate`].
    pub fn allocate(
        pool: &Pool<HostDevice>,
        bytes: usize,
        purpose: Purpose,
        stream: &HostStream,
    ) -> Result<Self, AllocError> {
        let block = pool.allocate(bytes + ALIGN_BYTES, DType::U8, purpose, stream)?;
        // SAFETY: kept beside the block; `SwapBuffer::slice` passes the promise on to its caller.
        let all = unsafe { block.slice() };
        let address = all.as_ptr().addr();
        let start = address.next_multiple_of(ALIGN_BYTES) - address;
        Ok(Self {
            block: Arc::new(Mutex::new(block)),
            bytes: all.slice(start..start + bytes),
        })
    }

    /// A handle of the bytes `range` alone, which keeps the whole memory.
    ///
    /// # Panics
    /// The range is outside the buffer.
    #[must_use]
    pub fn part(&self, range: Range<usize>) -> Self {
        Self {
            block: Arc::clone(&self.block),
            bytes: self.bytes.slice(range),
        }
    }

    /// Its bytes.
    ///
    /// # Safety
    /// As for [`Block::slice`], with the last handle of the memory in place of the block.
    pub unsafe fn slice(&self) -> AnySlice {
        self.bytes
    }

    /// As [`Block::record_use`].
    ///
    /// # Errors
    /// The stream failed.
    pub fn record_use(&self, stream: &HostStream) -> Result<(), DeviceError> {
        self.block.lock().record_use(stream)
    }

    /// Its address and its size in bytes.
    pub(super) fn place(&self) -> (usize, usize) {
        (self.bytes.as_ptr().addr(), self.bytes.len_bytes())
    }
}
