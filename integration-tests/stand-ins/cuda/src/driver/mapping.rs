//! Memory from the operating system: anonymous mappings, reserved addresses, and one memory file
//! (memfd) that holds all physical pages.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use crate::error::say;
use crate::settings::settings;
use stand_in_shared::lock;

/// New memory up to this size is filled with one bits, so that uninitialised reads do not return
/// zeros.
const FILLED_BYTES: usize = 64 << 20;

/// A range of addresses, unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: usize,
    bytes: usize,
}

fn page_rounded(bytes: usize) -> Option<usize> {
    bytes.checked_next_multiple_of(4096)
}

impl Mapping {
    fn anonymous(bytes: usize, access: i32) -> io::Result<Self> {
        let bytes = page_rounded(bytes).ok_or(io::ErrorKind::OutOfMemory)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        loop {
            // SAFETY: a new mapping at an address that the kernel chooses replaces no other.
            let start = unsafe { libc::mmap(ptr::null_mut(), bytes, access, flags, -1, 0) };
            if start != libc::MAP_FAILED {
                return Ok(Self {
                    start: start as usize,
                    bytes,
                });
            }
            // If addresses run out, those of freed memory are used again.
            if !Quarantine::clear() {
                let error = io::Error::last_os_error();
                say!("the host refused {bytes} bytes of addresses: {error}");
                return Err(error);
            }
        }
    }

    /// Readable and writable memory, filled with one bits up to [`FILLED_BYTES`], except in the dry
    /// mode.
    pub(crate) fn memory(bytes: usize) -> io::Result<Self> {
        let mapping = Self::anonymous(bytes, libc::PROT_READ | libc::PROT_WRITE)?;
        if bytes <= FILLED_BYTES && !settings().dry {
            // SAFETY: mapped above, writable, at least `bytes` long.
            unsafe { ptr::write_bytes(mapping.start as *mut u8, 0xff, bytes) };
        }
        Ok(mapping)
    }

    /// Reserved addresses without memory, aligned to `alignment` (a power of two).
    pub(crate) fn reservation(bytes: usize, alignment: usize) -> io::Result<Self> {
        let whole = Self::anonymous(
            bytes
                .checked_add(alignment)
                .ok_or(io::ErrorKind::OutOfMemory)?,
            libc::PROT_NONE,
        )?;
        let start = whole.start.next_multiple_of(alignment);
        let before = start - whole.start;
        let after = whole.start + whole.bytes - (start + bytes);
        let cut = Self { start, bytes };
        for (at, len) in [(whole.start, before), (start + bytes, after)] {
            if len > 0 {
                // SAFETY: within the mapping made above, and outside the part that is kept.
                unsafe { libc::munmap(at as *mut libc::c_void, len) };
            }
        }
        std::mem::forget(whole);
        Ok(cut)
    }

    pub(crate) fn start(&self) -> u64 {
        self.start as u64
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this type mapped the range, and every user of it holds an `Arc` of `self`.
        if unsafe { unmap(self.start as u64, self.bytes) }.is_ok() {
            Quarantine::add(self.start, self.bytes);
        }
    }
}

/// Addresses of freed memory. They stay reserved without memory for a while, so that a use after
/// free does not hit another allocation.
struct Quarantine {
    ranges: VecDeque<(usize, usize)>,
    bytes: usize,
}

static QUARANTINE: Mutex<Quarantine> = Mutex::new(Quarantine {
    ranges: VecDeque::new(),
    bytes: 0,
});

impl Quarantine {
    const MOST_RANGES: usize = 1024;
    const MOST_BYTES: usize = if cfg!(test) { 256 << 20 } else { 16 << 40 };

    fn add(start: usize, bytes: usize) {
        let mut held = lock(&QUARANTINE);
        held.ranges.push_back((start, bytes));
        held.bytes += bytes;
        while held.ranges.len() > Self::MOST_RANGES || held.bytes > Self::MOST_BYTES {
            held.release_oldest();
        }
    }

    /// Releases all ranges. Returns whether there were any.
    fn clear() -> bool {
        let mut held = lock(&QUARANTINE);
        let any = !held.ranges.is_empty();
        while held.release_oldest() {}
        any
    }

    fn release_oldest(&mut self) -> bool {
        let Some((start, bytes)) = self.ranges.pop_front() else {
            return false;
        };
        self.bytes -= bytes;
        // SAFETY: reserved by this module without memory, and no longer in use.
        unsafe { libc::munmap(start as *mut libc::c_void, bytes) };
        true
    }
}

/// Physical memory that can be mapped at several addresses: a range of the memory file.
#[derive(Debug)]
pub(crate) struct Physical {
    offset: u64,
    bytes: usize,
}

fn file() -> io::Result<&'static OwnedFd> {
    static FILE: OnceLock<Option<OwnedFd>> = OnceLock::new();
    let made = FILE.get_or_init(|| {
        // SAFETY: a zero-terminated name; the call creates a descriptor.
        let number = unsafe { libc::memfd_create(c"cuda-stand-in".as_ptr(), libc::MFD_CLOEXEC) };
        if number < 0 {
            return None;
        }
        // SAFETY: a descriptor created above, with no other owner.
        let file = unsafe { OwnedFd::from_raw_fd(number) };
        // SAFETY: a live descriptor; the file is sparse, so its length costs nothing.
        (unsafe { libc::ftruncate(file.as_raw_fd(), i64::MAX >> 8) } == 0).then_some(file)
    });
    made.as_ref()
        .ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

impl Physical {
    /// `bytes` of physical memory, a multiple of the page size.
    pub(crate) fn new(bytes: usize) -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        file()?;
        Ok(Self {
            offset: NEXT.fetch_add(bytes as u64, Ordering::Relaxed),
            bytes,
        })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Maps this memory at `address`.
    ///
    /// # Safety
    /// `address` starts a reserved range of this length with nothing mapped. It stays reserved
    /// while the memory is mapped.
    pub(crate) unsafe fn map_at(&self, address: u64) -> io::Result<()> {
        let (access, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_FIXED,
        );
        let at = address as *mut libc::c_void;
        let number = file()?.as_raw_fd();
        let offset = self.offset as i64;
        // SAFETY: replaces a reserved range without memory, as the caller guarantees.
        let start = unsafe { libc::mmap(at, self.bytes, access, flags, number, offset) };
        if start == libc::MAP_FAILED {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }

    /// Fills the memory with one bits through its mapping at `address`, except in the dry mode.
    ///
    /// # Safety
    /// The memory is mapped at `address`, and nothing else accesses it.
    pub(crate) unsafe fn fill(&self, address: u64) {
        if settings().dry {
            return;
        }
        // SAFETY: mapped writable there, as the caller guarantees.
        unsafe { ptr::write_bytes(address as *mut u8, 0xff, self.bytes) };
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        let Ok(file) = file() else { return };
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: a live descriptor; only this object owns the range, which is no longer mapped.
        unsafe {
            libc::fallocate(
                file.as_raw_fd(),
                mode,
                self.offset as i64,
                self.bytes as i64,
            )
        };
    }
}

/// Unmaps the memory at `address`. The range stays reserved.
///
/// # Safety
/// This module reserved the range and mapped it, and nothing accesses it.
pub(crate) unsafe fn unmap(address: u64, bytes: usize) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: replaces a mapping of this module by one without memory.
    let start = unsafe {
        libc::mmap(
            address as *mut libc::c_void,
            bytes,
            libc::PROT_NONE,
            flags,
            -1,
            0,
        )
    };
    if start == libc::MAP_FAILED {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
