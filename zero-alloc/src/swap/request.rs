//! Requests to the kernel.

#[derive(Clone, Copy)]
pub(super) struct Address(pub(super) *mut u8);

// SAFETY: an address in memory that the slices' maker lets operations of streams access from any
// thread.
unsafe impl Send for Address {}

/// One request to the kernel.
#[derive(Clone, Copy)]
pub(super) struct TransferRequest {
    pub(super) offset: u64,
    pub(super) address: Address,
    pub(super) bytes: usize,
    pub(super) write: bool,
}

impl TransferRequest {
    pub(super) fn op(&self) -> &'static str {
        if self.write { "write" } else { "read" }
    }

    /// The part behind the first `bytes` bytes.
    pub(super) fn rest(self, bytes: usize) -> Self {
        Self {
            offset: self.offset + bytes as u64,
            address: Address(self.address.0.wrapping_add(bytes)),
            bytes: self.bytes - bytes,
            ..self
        }
    }
}
