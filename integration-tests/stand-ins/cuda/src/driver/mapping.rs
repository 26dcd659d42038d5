//! Memory from the operating system: anonymous mappings, reserved addresses, and one file in memory that all physical
//! pages come from.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use super::handles::lock;
use crate::error::say;

/// Up to this size new memory is filled with ones, so that a read of uninitialised memory is not a read of zeros.
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
            // SAFETY: a new mapping at an address of the kernel's choice touches no other.
            let start = unsafe { libc::mmap(ptr::null_mut(), bytes, access, flags, -1, 0) };
            if start != libc::MAP_FAILED {
                return Ok(Self { start: start as usize, bytes });
            }
            // Freed addresses are kept out of use only as long as there are enough others.
            if !Quarantine::clear() {
                let error = io::Error::last_os_error();
                say!("the host refused {bytes} bytes of addresses: {error}");
                return Err(error);
            }
        }
    }

    /// Readable and writable memory, filled with ones if it is not very large.
    pub(crate) fn memory(bytes: usize) -> io::Result<Self> {
        let mapping = Self::anonymous(bytes, libc::PROT_READ | libc::PROT_WRITE)?;
        if bytes <= FILLED_BYTES {
            // SAFETY: the mapping was made just now, writable, of at least `bytes`.
            unsafe { ptr::write_bytes(mapping.start as *mut u8, 0xff, bytes) };
        }
        Ok(mapping)
    }

    /// Addresses with nothing behind them, at a multiple of `alignment` (a power of two).
    pub(crate) fn reservation(bytes: usize, alignment: usize) -> io::Result<Self> {
        let whole =
            Self::anonymous(bytes.checked_add(alignment).ok_or(io::ErrorKind::OutOfMemory)?, libc::PROT_NONE)?;
        let start = whole.start.next_multiple_of(alignment);
        let (before, after) = (start - whole.start, whole.start + whole.bytes - (start + bytes));
        let cut = Self { start, bytes };
        for (at, len) in [(whole.start, before), (start + bytes, after)] {
            if len > 0 {
                // SAFETY: within the mapping that was made just now, and outside the part that is kept.
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
        // SAFETY: this range was mapped by us, and whoever accesses it holds an `Arc` of this.
        if unsafe { unmap(self.start as u64, self.bytes) }.is_ok() {
            Quarantine::add(self.start, self.bytes);
        }
    }
}

/// Freed addresses, which stay reserved and empty for a while, so that a use after free does not hit another allocation.
struct Quarantine {
    ranges: VecDeque<(usize, usize)>,
    bytes: usize,
}

static QUARANTINE: Mutex<Quarantine> = Mutex::new(Quarantine { ranges: VecDeque::new(), bytes: 0 });

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
        let Some((start, bytes)) = self.ranges.pop_front() else { return false };
        self.bytes -= bytes;
        // SAFETY: mapped by us with nothing behind it, and nobody may use it any more.
        unsafe { libc::munmap(start as *mut libc::c_void, bytes) };
        true
    }
}

/// Physical memory that can be mapped at several addresses: a piece of one file in memory.
#[derive(Debug)]
pub(crate) struct Physical {
    offset: u64,
    bytes: usize,
}

fn file() -> io::Result<&'static OwnedFd> {
    static FILE: OnceLock<Option<OwnedFd>> = OnceLock::new();
    let made = FILE.get_or_init(|| {
        // SAFETY: a name that ends in zero; the call makes a new descriptor.
        let number = unsafe { libc::memfd_create(c"cuda-stand-in".as_ptr(), libc::MFD_CLOEXEC) };
        if number < 0 {
            return None;
        }
        // SAFETY: a descriptor that was made just now and that nobody else owns.
        let file = unsafe { OwnedFd::from_raw_fd(number) };
        // SAFETY: a live descriptor; the file is sparse, so its length costs nothing.
        (unsafe { libc::ftruncate(file.as_raw_fd(), i64::MAX >> 8) } == 0).then_some(file)
    });
    made.as_ref().ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

impl Physical {
    /// A piece of `bytes`, a multiple of the page size.
    pub(crate) fn new(bytes: usize) -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        file()?;
        Ok(Self { offset: NEXT.fetch_add(bytes as u64, Ordering::Relaxed), bytes })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Maps this memory at `address`.
    ///
    /// # Safety
    /// `address` begins a reserved range of this length with nothing mapped, and stays reserved as long as it is
    /// mapped.
    pub(crate) unsafe fn map_at(&self, address: u64) -> io::Result<()> {
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        let at = address as *mut libc::c_void;
        let (number, offset) = (file()?.as_raw_fd(), self.offset as i64);
        // SAFETY: replaces addresses that are reserved and empty, as the caller promises.
        let start = unsafe { libc::mmap(at, self.bytes, access, flags, number, offset) };
        if start == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Fills the memory with ones through a mapping of it.
    ///
    /// # Safety
    /// It is mapped at `address`, and nobody else accesses it.
    pub(crate) unsafe fn fill(&self, address: u64) {
        // SAFETY: mapped writable there, as the caller promises.
        unsafe { ptr::write_bytes(address as *mut u8, 0xff, self.bytes) };
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        let Ok(file) = file() else { return };
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: a live descriptor; the piece is this object's alone and not mapped any more.
        unsafe { libc::fallocate(file.as_raw_fd(), mode, self.offset as i64, self.bytes as i64) };
    }
}

/// Unmaps the memory at `address`, whose range stays reserved.
///
/// # Safety
/// The range is reserved by us and mapped, and nobody accesses it.
pub(crate) unsafe fn unmap(address: u64, bytes: usize) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: replaces our own mapping by an empty one.
    let start = unsafe { libc::mmap(address as *mut libc::c_void, bytes, libc::PROT_NONE, flags, -1, 0) };
    if start == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}
