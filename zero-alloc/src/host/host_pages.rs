//! Virtual memory of the host: pages of one memory file, mapped into reserved addresses (Linux).

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::{NonNull, null_mut};

use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::device::{DeviceError, Page, VirtualMemory};

/// A mapping of addresses only.
const WITHOUT_MEMORY: MapFlags = MapFlags::PRIVATE.union(MapFlags::NORESERVE);

#[derive(Debug, Default)]
struct Pages {
    /// The number of pages that the file has had so far.
    made: u64,
    /// Freed pages, to be used again.
    free: Vec<u64>,
}

/// The pages of one memory file (`memfd_create`). A page is named by its index in the file.
#[derive(Debug)]
pub struct HostPages {
    file: OwnedFd,
    page_bytes: usize,
    limit_pages: u64,
    pages: Mutex<Pages>,
}

/// Maps an error of the system call `call`.
fn failed(call: &'static str) -> impl Fn(Errno) -> DeviceError {
    move |error| DeviceError::Driver {
        call,
        message: io::Error::from(error).to_string(),
    }
}

impl HostPages {
    /// Pages of `page_bytes` bytes, rounded up to a power of two and at least the system's page
    /// size; at most `limit_bytes` in total.
    ///
    /// # Errors
    /// The system does not support memory files.
    pub fn new(page_bytes: usize, limit_bytes: usize) -> Result<Self, DeviceError> {
        let system = rustix::param::page_size();
        let page_bytes = page_bytes
            .max(system)
            .checked_next_power_of_two()
            .unwrap_or(system);
        let file =
            memfd_create("zero-alloc", MemfdFlags::CLOEXEC).map_err(failed("memfd_create"))?;
        let limit_pages = (limit_bytes / page_bytes) as u64;
        Ok(Self {
            file,
            page_bytes,
            limit_pages,
            pages: Mutex::default(),
        })
    }

    /// The number of live pages.
    pub fn live_pages(&self) -> u64 {
        let pages = self.pages.lock();
        pages.made - pages.free.len() as u64
    }

    fn offset(&self, page: u64) -> u64 {
        page * self.page_bytes as u64
    }
}

// SAFETY: the kernel reserves ranges that overlap no others; each page of the file has one owner at
// a time.
unsafe impl VirtualMemory for HostPages {
    fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    fn reserve(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        let with_edge =
            bytes
                .checked_add(self.page_bytes)
                .ok_or_else(|| DeviceError::OutOfMemory {
                    requested_bytes: bytes,
                    detail: "beyond the address space".into(),
                })?;

        // SAFETY: maps a new range; no existing mapping changes.
        let base =
            unsafe { mmap_anonymous(null_mut(), with_edge, ProtFlags::empty(), WITHOUT_MEMORY) };
        let base = base.map_err(failed("mmap"))?.cast::<u8>();

        // Unmap the edges, so that the rest is aligned to pages.
        let head = base.addr().next_multiple_of(self.page_bytes) - base.addr();
        let start = base.wrapping_add(head);
        let tail = self.page_bytes - head;
        if head > 0 {
            // SAFETY: the first `head` bytes of the new range, which are unused.
            let _ = unsafe { munmap(base.cast(), head) };
        }

        if tail > 0 {
            // SAFETY: the last `tail` bytes of the new range, which are unused.
            let _ = unsafe { munmap(start.wrapping_add(bytes).cast(), tail) };
        }

        NonNull::new(start).ok_or_else(|| failed("mmap")(Errno::NOMEM))
    }

    unsafe fn release(&self, base: NonNull<u8>, bytes: usize) {
        // SAFETY: by the caller's promise the range came from `reserve` and is unused.
        let _ = unsafe { munmap(base.as_ptr().cast(), bytes) };
    }

    fn create(&self) -> Result<Page, DeviceError> {
        let out_of_memory = |detail: String| DeviceError::OutOfMemory {
            requested_bytes: self.page_bytes,
            detail,
        };

        let mut pages = self.pages.lock();
        let page = match pages.free.pop() {
            Some(page) => page,
            None if pages.made >= self.limit_pages => {
                return Err(out_of_memory(format!(
                    "all {} pages are in use",
                    self.limit_pages
                )));
            }
            None => {
                pages.made += 1;
                pages.made - 1
            }
        };

        // Allocates the memory now, so that a lack of it is an error here and not a signal later.
        let bytes = self.page_bytes as u64;
        let allocated = fallocate(
            &self.file,
            FallocateFlags::empty(),
            self.offset(page),
            bytes,
        );
        if let Err(error) = allocated {
            pages.free.push(page);
            return Err(out_of_memory(failed("fallocate")(error).to_string()));
        }

        Ok(Page(page))
    }

    unsafe fn destroy(&self, page: Page) {
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // Where the system cannot free it, its next user has the same memory.
        let _ = fallocate(
            &self.file,
            mode,
            self.offset(page.0),
            self.page_bytes as u64,
        );
        self.pages.lock().free.push(page.0);
    }

    unsafe fn map(&self, at: NonNull<u8>, pages: &[Page]) -> Result<(), DeviceError> {
        let mut mapped = 0;
        // Consecutive pages of the file need one call only.
        for run in pages.chunk_by(|a, b| a.0 + 1 == b.0) {
            let to = at.as_ptr().wrapping_add(mapped * self.page_bytes);
            let bytes = run.len() * self.page_bytes;
            let access = ProtFlags::READ | ProtFlags::WRITE;
            let flags = MapFlags::SHARED | MapFlags::FIXED;
            let offset = self.offset(run[0].0);
            // SAFETY: by the caller's promise the addresses are reserved and nothing is mapped
            // there.
            let done = unsafe { mmap(to.cast(), bytes, access, flags, &self.file, offset) };
            if let Err(error) = done {
                // SAFETY: these were mapped above and are unused.
                unsafe { self.unmap(at, mapped) };
                return Err(failed("mmap")(error));
            }
            mapped += run.len();
        }
        Ok(())
    }

    unsafe fn unmap(&self, at: NonNull<u8>, pages: usize) {
        if pages == 0 {
            return;
        }
        let bytes = pages * self.page_bytes;
        let flags = WITHOUT_MEMORY | MapFlags::FIXED;
        // The addresses stay reserved, without memory.
        // SAFETY: by the caller's promise they are mapped by `map` and unused.
        let _ = unsafe { mmap_anonymous(at.as_ptr().cast(), bytes, ProtFlags::empty(), flags) };
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn page_contents_appear_at_every_mapping() {
        let memory = HostPages::new(1 << 16, 1 << 20).expect("memory files");
        let bytes = memory.page_bytes();
        let range = memory.reserve(4 * bytes).expect("addresses");
        assert_eq!(range.addr().get() % bytes, 0);
        let pages = [
            memory.create().expect("room"),
            memory.create().expect("room"),
        ];
        // SAFETY: reserved, and nothing is mapped there.
        unsafe { memory.map(range, &pages) }.expect("mapped");
        let again = NonNull::new(range.as_ptr().wrapping_add(2 * bytes)).expect("in the range");
        // SAFETY: as above; the other half of the range.
        unsafe { memory.map(again, &[pages[1], pages[0]]) }.expect("mapped");
        // SAFETY: mapped, readable and writable.
        unsafe { range.as_ptr().write(7) };
        // SAFETY: the same page, mapped.
        assert_eq!(unsafe { range.as_ptr().wrapping_add(3 * bytes).read() }, 7);
        // SAFETY: mapped above, and no longer used.
        unsafe { memory.unmap(range, 4) };

        for page in pages {
            // SAFETY: created above, mapped nowhere.
            unsafe { memory.destroy(page) };
        }

        // SAFETY: reserved above.
        unsafe { memory.release(range, 4 * bytes) };
        assert_eq!(memory.live_pages(), 0);
    }

    #[test]
    fn page_limit_is_an_error() {
        let memory = HostPages::new(1 << 16, 1 << 16).expect("memory files");
        let page = memory.create().expect("room for one");
        assert!(matches!(
            memory.create(),
            Err(DeviceError::OutOfMemory { .. })
        ));
        // SAFETY: created above, mapped nowhere.
        unsafe { memory.destroy(page) };
        assert!(memory.create().is_ok());
    }
}
