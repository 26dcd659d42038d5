//! A device without memory, of any capacity.
//!
//! Its addresses are fictitious and must not be accessed. It tracks allocations and mappings, and
//! records incorrect calls (a page mapped over another, a double free) in [`SimulatedUse`].

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::device::{
    AnySlice, Device, DeviceError, DeviceId, DeviceKind, Memory, Page, Stream, VirtualMemory,
    check_copy, same_len,
};
use crate::host::{HostDevice, HostEvent, HostStream};

/// Counters of a [`Simulated`] device, and its incorrect calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SimulatedUse {
    /// Bytes of live backings and pages.
    pub live_bytes: u64,
    /// The greatest `live_bytes` so far.
    pub peak_bytes: u64,
    /// Bytes of reserved addresses.
    pub reserved_address_bytes: u64,
    /// Live mappings of pages.
    pub mapped_pages: u64,
    /// Bytes copied so far.
    pub copied_bytes: u64,
    /// Descriptions of calls that broke a safety contract.
    pub mistakes: Vec<String>,
}

#[derive(Debug, Default)]
struct State {
    used: SimulatedUse,
    next_address: usize,
    next_page: u64,
    /// Bytes by address.
    backings: BTreeMap<usize, usize>,
    /// Bytes by address.
    reserved: BTreeMap<usize, usize>,
    pages: BTreeSet<u64>,
    /// Pages by address.
    mapped: BTreeMap<usize, u64>,
}

/// A device without memory. Clones refer to the same device.
#[derive(Clone, Debug)]
pub struct Simulated {
    id: DeviceId,
    host: HostDevice,
    capacity_bytes: u64,
    page_bytes: usize,
    virtual_memory: bool,
    state: Arc<Mutex<State>>,
}

impl Simulated {
    /// A device with `capacity_bytes` bytes in pages of `page_bytes` (a power of two).
    ///
    /// # Panics
    /// The process has had 2^30 of them.
    pub fn new(capacity_bytes: u64, page_bytes: usize) -> Self {
        let state = State {
            next_address: 1 << 40,
            ..State::default()
        };
        Self {
            id: DeviceId::new(DeviceKind::Simulated).expect("fewer than 2^30 devices"),
            host: HostDevice::new(),
            capacity_bytes,
            page_bytes: page_bytes.next_power_of_two().max(64),
            virtual_memory: true,
            state: Arc::new(Mutex::new(state)),
        }
    }

    /// The same device without virtual memory: pools use backings.
    #[must_use]
    pub fn without_virtual_memory(self) -> Self {
        Self {
            virtual_memory: false,
            ..self
        }
    }

    /// The same device with streams of the seeded scheduler.
    #[must_use]
    pub fn seeded(self, seed: u64) -> Self {
        Self {
            host: HostDevice::seeded(seed),
            ..self
        }
    }

    /// The counters now.
    pub fn usage(&self) -> SimulatedUse {
        self.state.lock().used.clone()
    }
}

impl State {
    /// Unused fictitious addresses, at a multiple of `align`.
    fn addresses(&mut self, bytes: usize, align: usize) -> Result<NonNull<u8>, DeviceError> {
        let exhausted = || DeviceError::OutOfMemory {
            requested_bytes: bytes,
            detail: "no addresses left".into(),
        };
        let start = self.next_address.next_multiple_of(align);
        // The gap keeps ranges from touching.
        self.next_address = start
            .checked_add(bytes)
            .and_then(|end| end.checked_add(align))
            .ok_or_else(exhausted)?;
        NonZeroUsize::new(start)
            .map(NonNull::without_provenance)
            .ok_or_else(exhausted)
    }

    fn allocate(&mut self, bytes: u64, capacity_bytes: u64) -> Result<(), DeviceError> {
        if bytes > capacity_bytes - self.used.live_bytes {
            return Err(DeviceError::OutOfMemory {
                requested_bytes: bytes as usize,
                detail: format!(
                    "{} of {capacity_bytes} simulated bytes are in use",
                    self.used.live_bytes
                ),
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

// SAFETY: nothing accesses these addresses.
unsafe impl Memory for Simulated {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        let mut state = self.state.lock();
        state.allocate(bytes as u64, self.capacity_bytes)?;
        let ptr = state.addresses(bytes, self.page_bytes)?;
        state.backings.insert(ptr.addr().get(), bytes);
        Ok(ptr)
    }

    unsafe fn deallocate(&self, ptr: NonNull<u8>, bytes: usize) {
        let mut state = self.state.lock();
        if state.backings.remove(&ptr.addr().get()) == Some(bytes) {
            state.used.live_bytes -= bytes as u64;
        } else {
            state.mistake(format!("{bytes} bytes at {ptr:p} were not allocated"));
        }
    }

    fn granularity_bytes(&self) -> usize {
        self.page_bytes.min(4096)
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        self.virtual_memory.then_some(self as &dyn VirtualMemory)
    }
}

// SAFETY: nothing accesses these addresses, and each is returned once.
unsafe impl VirtualMemory for Simulated {
    fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    fn reserve(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        let mut state = self.state.lock();
        let base = state.addresses(bytes, self.page_bytes)?;
        state.reserved.insert(base.addr().get(), bytes);
        state.used.reserved_address_bytes += bytes as u64;
        Ok(base)
    }

    unsafe fn release(&self, base: NonNull<u8>, bytes: usize) {
        let mut state = self.state.lock();
        let start = base.addr().get();
        if state.reserved.remove(&start) != Some(bytes) {
            state.mistake(format!("{bytes} bytes at {base:p} were not reserved"));
            return;
        }
        state.used.reserved_address_bytes -= bytes as u64;
        if state.mapped.range(start..start + bytes).next().is_some() {
            state.mistake(format!(
                "{bytes} bytes at {base:p} are released with pages mapped"
            ));
        }
    }

    fn create(&self) -> Result<Page, DeviceError> {
        let mut state = self.state.lock();
        state.allocate(self.page_bytes as u64, self.capacity_bytes)?;
        state.next_page += 1;
        let page = state.next_page;
        state.pages.insert(page);
        Ok(Page(page))
    }

    unsafe fn destroy(&self, page: Page) {
        let mut state = self.state.lock();
        if !state.pages.remove(&page.0) {
            state.mistake(format!("{page:?} is destroyed and was not live"));
            return;
        }
        state.used.live_bytes -= self.page_bytes as u64;
        if state.mapped.values().any(|mapped| *mapped == page.0) {
            state.mistake(format!("{page:?} is destroyed while it is mapped"));
        }
    }

    unsafe fn map(&self, at: NonNull<u8>, pages: &[Page]) -> Result<(), DeviceError> {
        let mut state = self.state.lock();
        let start = at.addr().get();
        let bytes = pages.len() * self.page_bytes;
        let range = state
            .reserved
            .range(..=start)
            .next_back()
            .map(|(base, bytes)| base + bytes);

        if range.is_none_or(|end| start + bytes > end) {
            state.mistake(format!(
                "{} pages at {at:p} are not within reserved addresses",
                pages.len()
            ));
        }

        for (i, page) in pages.iter().enumerate() {
            if !state.pages.contains(&page.0) {
                state.mistake(format!("{page:?} is mapped and is not live"));
            }
            if state
                .mapped
                .insert(start + i * self.page_bytes, page.0)
                .is_some()
            {
                state.mistake(format!("{page:?} is mapped over another at {at:p}"));
            }
        }

        state.used.mapped_pages += pages.len() as u64;
        Ok(())
    }

    unsafe fn unmap(&self, at: NonNull<u8>, pages: usize) {
        let mut state = self.state.lock();
        for i in 0..pages {
            if state
                .mapped
                .remove(&(at.addr().get() + i * self.page_bytes))
                .is_none()
            {
                state.mistake(format!("page {i} at {at:p} is unmapped and was not mapped"));
            } else {
                state.used.mapped_pages -= 1;
            }
        }
    }
}

// SAFETY: no operation accesses memory, and the kind is not the host.
unsafe impl Device for Simulated {
    type Stream = HostStream;
    type Event = HostEvent;

    fn kind(&self) -> DeviceKind {
        DeviceKind::Simulated
    }

    fn check_stream(&self, what: &'static str, stream: &HostStream) -> Result<(), DeviceError> {
        self.host.check_stream(what, stream)
    }

    fn create_stream(&self, name: &str) -> Result<HostStream, DeviceError> {
        self.host.create_stream(name)
    }

    fn copy(&self, stream: &HostStream, src: AnySlice, dst: AnySlice) -> Result<(), DeviceError> {
        check_copy(src, dst)?;
        src.check_device("copy, source", self.id)?;
        dst.check_device("copy, destination", self.id)?;
        let state = Arc::clone(&self.state);
        let bytes = src.len_bytes() as u64;
        stream.enqueue("copy", move || {
            state.lock().used.copied_bytes += bytes;
            Ok(())
        })
    }

    fn fill_zero(&self, stream: &HostStream, dst: AnySlice) -> Result<(), DeviceError> {
        dst.check_device("fill_zero", self.id)?;
        stream.enqueue("fill_zero", || Ok(()))
    }

    fn upload(
        &self,
        stream: &HostStream,
        src: &[u8],
        dst: AnySlice,
        limit: Duration,
    ) -> Result<(), DeviceError> {
        same_len("upload", dst.len_bytes(), src.len())?;
        dst.check_device("upload", self.id)?;
        stream.synchronize(limit)
    }

    /// Fills `dst` with zeros.
    fn download(
        &self,
        stream: &HostStream,
        src: AnySlice,
        dst: &mut [u8],
        limit: Duration,
    ) -> Result<(), DeviceError> {
        same_len("download", src.len_bytes(), dst.len())?;
        src.check_device("download", self.id)?;
        stream.synchronize(limit)?;
        dst.fill(0);
        Ok(())
    }
}
