//! The heap of the binary: few reserved addresses, and an error where the system refuses memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;

/// The system's allocator. Where it refuses memory the process ends with an error; Rust would abort
/// it.
pub(super) struct Heap;

// SAFETY: the system's allocator.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        granted(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        granted(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_bytes: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        granted(unsafe { System.realloc(ptr, layout, new_bytes) }, new_bytes)
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// Returns `ptr`; ends the process if the system refused `bytes`.
fn granted(ptr: *mut u8, bytes: usize) -> *mut u8 {
    if ptr.is_null() {
        refused(bytes);
    }
    ptr
}

/// Ends the process without the heap and without the handlers of an exit, which could use it.
#[cold]
fn refused(bytes: usize) -> ! {
    let mut text = [0; 256];
    let mut rest = &mut text[..];
    let _too_long = writeln!(
        rest,
        "error: failed to allocate {bytes} bytes: the system refused; raise its limit (`ulimit -v`, `ulimit -d`) or \
         free memory, or try fewer --ranks or a smaller --model"
    );
    let left = rest.len();
    let _closed = std::io::stderr().write_all(&text[..text.len() - left]);
    // SAFETY: ends the process.
    unsafe { libc::_exit(1) }
}

/// Lets all threads share one heap. By default glibc reserves 64 MiB of addresses for each of up to
/// 8 threads a core, and keeps what each has freed.
pub(super) fn share() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: sets a number, before any other thread exists.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}
