//! Zeroed memory from the system, in multiples of [`ALIGN_BYTES`](super::ALIGN_BYTES) and aligned
//! to it.
//!
//! Not the system allocator, which writes to all of an aligned zeroed allocation: a mapping's pages
//! take memory when they are first written, so what the pool reserves ahead costs none. Systems
//! without `mmap` use that allocator.

#[cfg(not(unix))]
pub(crate) use allocation::{map, map as map_unbacked, unmap};
#[cfg(unix)]
pub(crate) use mmap::{map, map_unbacked, unmap};

/// The size of the system's pages, at least [`ALIGN_BYTES`](super::ALIGN_BYTES).
#[cfg(feature = "cuda")]
pub(crate) fn page_bytes() -> usize {
    #[cfg(unix)]
    let page = rustix::param::page_size();
    #[cfg(not(unix))]
    let page = 0;
    page.max(super::ALIGN_BYTES)
}

#[cfg(unix)]
mod mmap {
    use std::io;
    use std::ptr::{NonNull, null_mut};

    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    pub(crate) fn map(bytes: usize) -> io::Result<NonNull<u8>> {
        map_with(bytes, MapFlags::PRIVATE)
    }

    /// [`map`] of more memory than the machine has, of which little is touched.
    pub(crate) fn map_unbacked(bytes: usize) -> io::Result<NonNull<u8>> {
        map_with(bytes, MapFlags::PRIVATE | MapFlags::NORESERVE)
    }

    fn map_with(bytes: usize, flags: MapFlags) -> io::Result<NonNull<u8>> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: maps a new range; no existing mapping changes.
        let base = unsafe { mmap_anonymous(null_mut(), bytes, access, flags) }?;
        NonNull::new(base.cast()).ok_or_else(|| io::Error::other("no address"))
    }

    /// # Safety
    /// `base` came from `map(bytes)` and is freed once.
    pub(crate) unsafe fn unmap(base: NonNull<u8>, bytes: usize) {
        // SAFETY: by the caller's promise the range is a mapping of ours that nothing uses.
        let _ = unsafe { munmap(base.as_ptr().cast(), bytes) };
    }
}

#[cfg(any(not(unix), test))]
#[cfg_attr(unix, allow(dead_code, reason = "only its test uses it here"))]
mod allocation {
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::io;
    use std::ptr::NonNull;

    use super::super::ALIGN_BYTES;

    fn layout(bytes: usize) -> io::Result<Layout> {
        Layout::from_size_align(bytes.max(1), ALIGN_BYTES).map_err(io::Error::other)
    }

    pub(crate) fn map(bytes: usize) -> io::Result<NonNull<u8>> {
        // SAFETY: the size is not 0.
        NonNull::new(unsafe { alloc_zeroed(layout(bytes)?) })
            .ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    /// # Safety
    /// `base` came from `map(bytes)` and is freed once.
    pub(crate) unsafe fn unmap(base: NonNull<u8>, bytes: usize) {
        if let Ok(layout) = layout(bytes) {
            // SAFETY: by the caller's promise the allocation has this layout, and nothing uses it.
            unsafe { dealloc(base.as_ptr(), layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_and_aligned() {
        type Functions = (
            fn(usize) -> std::io::Result<std::ptr::NonNull<u8>>,
            unsafe fn(std::ptr::NonNull<u8>, usize),
        );
        let own: Functions = (map, unmap);
        for (map, unmap) in [own, (allocation::map, allocation::unmap)] {
            let base = map(8192).unwrap();
            assert_eq!(base.addr().get() % super::super::ALIGN_BYTES, 0);
            // SAFETY: 8,192 bytes that nothing else uses.
            let bytes = unsafe { std::slice::from_raw_parts_mut(base.as_ptr(), 8192) };
            assert!(bytes.iter().all(|&byte| byte == 0));
            bytes.fill(1);
            // SAFETY: mapped above, and no longer used.
            unsafe { unmap(base, 8192) };
            // Miri ends the program.
            assert!(cfg!(miri) || map(usize::MAX / 2 + 1 - 4096).is_err());
        }
    }
}
