//! A device of any size that has no memory at all: 139 GB on a laptop.
//!
//! Addresses are made up and must not be read. What is allocated, mapped and given back is kept in books, and a wrong
//! call (a page mapped over another, something given back twice) is an error in [`SimulatedUse`].

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::device::{AnySlice, Device, DeviceError, DeviceKind, Memory, Page, VirtualMemory};
use crate::host::{HostDevice, HostEvent, HostStream};
use crate::planner::CostModel;

/// What is in use, and what went wrong.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimulatedUse {
    /// Bytes of backings and pages that live.
    pub live_bytes: u64,
    /// The greatest of that.
    pub peak_bytes: u64,
    /// Bytes of addresses set aside.
    pub reserved_address_bytes: u64,
    /// Pages mapped now, counted once per mapping.
    pub mapped_pages: u64,
    /// Bytes that copies have moved.
    pub copied_bytes: u64,
    /// Calls that broke the rules, in words.
    pub mistakes: Vec<String>,
}

#[derive(Debug, Default)]
struct Books {
    used: SimulatedUse,
    next_address: usize,
    next_page: u64,
    backings: BTreeMap<usize, usize>,
    reserved: BTreeMap<usize, usize>,
    pages: BTreeSet<u64>,
    mapped: BTreeMap<usize, u64>,
}

/// The device. Cloning gives another handle of the same one.
#[derive(Clone, Debug)]
pub struct Simulated {
    host: HostDevice,
    capacity_bytes: u64,
    page_bytes: usize,
    virtual_memory: bool,
    books: Arc<Mutex<Books>>,
}

impl Simulated {
    /// A device with `capacity_bytes`, which lends them in pages of `page_bytes` (a power of two).
    pub fn new(capacity_bytes: u64, page_bytes: usize) -> Self {
        let books = Books { next_address: 1 << 40, ..Books::default() };
        Self {
            host: HostDevice::new(),
            capacity_bytes,
            page_bytes: page_bytes.next_power_of_two().max(64),
            virtual_memory: true,
            books: Arc::new(Mutex::new(books)),
        }
    }

    /// The same without virtual memory: it lends backings.
    #[must_use]
    pub fn without_virtual_memory(self) -> Self {
        Self { virtual_memory: false, ..self }
    }

    /// The same with streams of the seeded scheduler.
    #[must_use]
    pub fn seeded(self, seed: u64) -> Self {
        Self { host: HostDevice::seeded(seed), ..self }
    }

    /// What is in use.
    pub fn usage(&self) -> SimulatedUse {
        self.books.lock().used.clone()
    }
}

impl Books {
    /// Made-up addresses, at a multiple of `align`.
    fn addresses(&mut self, bytes: usize, align: usize) -> Result<NonNull<u8>, DeviceError> {
        let exhausted =
            || DeviceError::OutOfMemory { asked_bytes: bytes, detail: "no made-up addresses left".into() };
        let start = self.next_address.next_multiple_of(align);
        // A gap, so that one range's end is not another's start.
        self.next_address = start.checked_add(bytes).and_then(|end| end.checked_add(align)).ok_or_else(exhausted)?;
        NonZeroUsize::new(start).map(NonNull::without_provenance).ok_or_else(exhausted)
    }

    fn lend(&mut self, bytes: u64, capacity_bytes: u64) -> Result<(), DeviceError> {
        if bytes > capacity_bytes - self.used.live_bytes {
            return Err(DeviceError::OutOfMemory {
                asked_bytes: bytes as usize,
                detail: format!("{} of {capacity_bytes} simulated bytes are lent", self.used.live_bytes),
            });
        }
        self.used.live_bytes += bytes;
        self.used.peak_bytes = self.used.peak_bytes.max(self.used.live_bytes);
        Ok(())
    }

    fn mistake(&mut self, what: String) {
        self.used.mistakes.push(what);
    }
}

// SAFETY: addresses that nothing touches.
unsafe impl Memory for Simulated {
    fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        let mut books = self.books.lock();
        books.lend(bytes as u64, self.capacity_bytes)?;
        let ptr = books.addresses(bytes, self.page_bytes)?;
        books.backings.insert(ptr.addr().get(), bytes);
        Ok(ptr)
    }

    unsafe fn deallocate(&self, ptr: NonNull<u8>, bytes: usize) {
        let mut books = self.books.lock();
        if books.backings.remove(&ptr.addr().get()) == Some(bytes) {
            books.used.live_bytes -= bytes as u64;
        } else {
            books.mistake(format!("{bytes} bytes at {ptr:p} were not allocated"));
        }
    }

    fn granularity_bytes(&self) -> usize {
        self.page_bytes.min(4096)
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        self.virtual_memory.then_some(self as &dyn VirtualMemory)
    }

    fn cost(&self) -> CostModel {
        CostModel::H200
    }
}

// SAFETY: addresses that nothing touches, each given out once.
unsafe impl VirtualMemory for Simulated {
    fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    fn reserve(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        let mut books = self.books.lock();
        let base = books.addresses(bytes, self.page_bytes)?;
        books.reserved.insert(base.addr().get(), bytes);
        books.used.reserved_address_bytes += bytes as u64;
        Ok(base)
    }

    unsafe fn release(&self, base: NonNull<u8>, bytes: usize) {
        let mut books = self.books.lock();
        let start = base.addr().get();
        if books.reserved.remove(&start) != Some(bytes) {
            books.mistake(format!("{bytes} bytes at {base:p} were not reserved"));
            return;
        }
        books.used.reserved_address_bytes -= bytes as u64;
        if books.mapped.range(start..start + bytes).next().is_some() {
            books.mistake(format!("{bytes} bytes at {base:p} are released with pages mapped"));
        }
    }

    fn create(&self) -> Result<Page, DeviceError> {
        let mut books = self.books.lock();
        books.lend(self.page_bytes as u64, self.capacity_bytes)?;
        books.next_page += 1;
        let page = books.next_page;
        books.pages.insert(page);
        Ok(Page(page))
    }

    unsafe fn destroy(&self, page: Page) {
        let mut books = self.books.lock();
        if !books.pages.remove(&page.0) {
            books.mistake(format!("{page:?} does not live"));
            return;
        }
        books.used.live_bytes -= self.page_bytes as u64;
        if books.mapped.values().any(|mapped| *mapped == page.0) {
            books.mistake(format!("{page:?} is destroyed while it is mapped"));
        }
    }

    unsafe fn map(&self, at: NonNull<u8>, pages: &[Page]) -> Result<(), DeviceError> {
        let mut books = self.books.lock();
        let (start, bytes) = (at.addr().get(), pages.len() * self.page_bytes);
        let range = books.reserved.range(..=start).next_back().map(|(base, bytes)| base + bytes);
        if range.is_none_or(|end| start + bytes > end) {
            books.mistake(format!("{} pages at {at:p} are not within reserved addresses", pages.len()));
        }
        for (i, page) in pages.iter().enumerate() {
            if !books.pages.contains(&page.0) {
                books.mistake(format!("{page:?} is mapped and does not live"));
            }
            if books.mapped.insert(start + i * self.page_bytes, page.0).is_some() {
                books.mistake(format!("{page:?} is mapped over another at {at:p}"));
            }
        }
        books.used.mapped_pages += pages.len() as u64;
        Ok(())
    }

    unsafe fn unmap(&self, at: NonNull<u8>, pages: usize) {
        let mut books = self.books.lock();
        for i in 0..pages {
            if books.mapped.remove(&(at.addr().get() + i * self.page_bytes)).is_none() {
                books.mistake(format!("page {i} at {at:p} is unmapped and was not mapped"));
            } else {
                books.used.mapped_pages -= 1;
            }
        }
    }
}

// SAFETY: no operation touches memory, and the kind is not the host.
unsafe impl Device for Simulated {
    type Stream = HostStream;
    type Event = HostEvent;

    fn kind(&self) -> DeviceKind {
        DeviceKind::Simulated
    }

    fn create_stream(&self, name: &str) -> Result<HostStream, DeviceError> {
        self.host.create_stream(name)
    }

    fn copy(&self, stream: &HostStream, src: AnySlice, dst: AnySlice) -> Result<(), DeviceError> {
        if src.len() != dst.len() {
            return Err(DeviceError::LengthMismatch { what: "copy", expected: src.len(), got: dst.len() });
        }
        let (books, bytes) = (Arc::clone(&self.books), src.len_bytes() as u64);
        stream.enqueue("copy", move || {
            books.lock().used.copied_bytes += bytes;
            Ok(())
        })
    }

    fn fill_zero(&self, stream: &HostStream, _dst: AnySlice) -> Result<(), DeviceError> {
        stream.enqueue("fill_zero", || Ok(()))
    }

    fn upload(&self, stream: &HostStream, src: &[u8], dst: AnySlice, limit: Duration) -> Result<(), DeviceError> {
        use crate::device::Stream;
        if src.len() != dst.len_bytes() {
            return Err(DeviceError::LengthMismatch { what: "upload", expected: dst.len_bytes(), got: src.len() });
        }
        stream.synchronize(limit)
    }

    /// There is nothing to read: `dst` becomes zero.
    fn download(
        &self,
        stream: &HostStream,
        src: AnySlice,
        dst: &mut [u8],
        limit: Duration,
    ) -> Result<(), DeviceError> {
        use crate::device::Stream;
        if dst.len() != src.len_bytes() {
            return Err(DeviceError::LengthMismatch { what: "download", expected: src.len_bytes(), got: dst.len() });
        }
        stream.synchronize(limit)?;
        dst.fill(0);
        Ok(())
    }
}
