//! Where the host's memory comes from.

use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::Arc;

use super::HostPages;
use crate::device::{DeviceError, Memory};

/// The alignment of backings.
pub(super) const ALIGN_BYTES: usize = 4096;

/// The kind of memory that a [`HostDevice`](super::HostDevice) lends.
#[derive(Clone, Debug, Default)]
pub(super) enum Kind {
    /// The system allocator's.
    #[default]
    Plain,
    /// Locked in place, in huge pages where the system offers them: what devices copy from and to fastest.
    Pinned,
    /// Pages of a memory file.
    Pages(Arc<HostPages>),
    /// Another's.
    Other(Arc<dyn Memory>),
}

fn out_of_memory(bytes: usize, detail: &str) -> DeviceError {
    DeviceError::OutOfMemory { asked_bytes: bytes, detail: detail.into() }
}

/// Zeroed bytes of the system allocator.
pub(super) fn allocate_plain(bytes: usize) -> Result<NonNull<u8>, DeviceError> {
    let layout = Layout::from_size_align(bytes.max(1), ALIGN_BYTES)
        .map_err(|_| out_of_memory(bytes, "beyond the address space"))?;
    // SAFETY: the layout has a size above 0.
    let ptr = unsafe { std::alloc::alloc_zeroed(layout) };
    NonNull::new(ptr).ok_or_else(|| out_of_memory(bytes, "the system allocator refused"))
}

/// Gives them back.
///
/// # Safety
/// `ptr` came from `allocate_plain(bytes)` and is given back once.
pub(super) unsafe fn deallocate_plain(ptr: NonNull<u8>, bytes: usize) {
    // SAFETY: the same size and alignment went through `from_size_align` in `allocate_plain`.
    let layout = unsafe { Layout::from_size_align_unchecked(bytes.max(1), ALIGN_BYTES) };
    // SAFETY: by the caller's promise `ptr` came from `allocate_plain` with this layout.
    unsafe { std::alloc::dealloc(ptr.as_ptr(), layout) };
}

/// Zeroed bytes that the system never moves or swaps out.
pub(super) fn allocate_pinned(bytes: usize) -> Result<NonNull<u8>, DeviceError> {
    let bytes = bytes.max(1);
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new range wherever there is room; nothing of ours is touched.
    let ptr = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
    if ptr == libc::MAP_FAILED {
        return Err(out_of_memory(bytes, &std::io::Error::last_os_error().to_string()));
    }
    // Only advice: where there are no huge pages, small ones do.
    // SAFETY: the new range.
    unsafe { libc::madvise(ptr, bytes, libc::MADV_HUGEPAGE) };
    // SAFETY: the new range.
    if unsafe { libc::mlock(ptr, bytes) } != 0 {
        let error = std::io::Error::last_os_error();
        // SAFETY: the new range, which nobody knows.
        unsafe { libc::munmap(ptr, bytes) };
        let message = format!("{error}; {bytes} bytes cannot be locked (see `ulimit -l`)");
        return Err(DeviceError::Driver { call: "mlock", message });
    }
    NonNull::new(ptr.cast()).ok_or_else(|| out_of_memory(bytes, "null"))
}

/// Gives them back.
///
/// # Safety
/// `ptr` came from `allocate_pinned(bytes)` and is given back once.
pub(super) unsafe fn deallocate_pinned(ptr: NonNull<u8>, bytes: usize) {
    // SAFETY: by the caller's promise the range is ours and unused; its lock goes with it.
    unsafe { libc::munmap(ptr.as_ptr().cast(), bytes.max(1)) };
}
