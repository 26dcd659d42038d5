//! A device whose n-th call of a kind fails.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::device::{AnySlice, BlockNote, Device, DeviceError, DeviceKind, Memory, Page, Stream, VirtualMemory};
use crate::planner::CostModel;

/// A kind of call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// [`Memory::allocate`].
    Allocate,
    /// [`VirtualMemory::reserve`].
    Reserve,
    /// [`VirtualMemory::create`].
    Create,
    /// [`VirtualMemory::map`].
    Map,
    /// [`Device::copy`].
    Copy,
    /// [`Device::create_stream`].
    CreateStream,
    /// [`Stream::record`], on any stream of the device.
    Record,
    /// [`Stream::wait`], on any stream of the device.
    Wait,
}

#[derive(Debug, Default)]
struct Plan {
    calls: HashMap<Call, u64>,
    failing: HashMap<Call, u64>,
}

impl Plan {
    /// Counts a call, and fails it where that is planned.
    fn enter(&mut self, call: Call) -> Result<(), DeviceError> {
        let count = self.calls.entry(call).or_default();
        *count += 1;
        let nth = *count;
        if self.failing.get(&call) == Some(&nth) {
            return Err(DeviceError::Driver { call: "injected", message: format!("{call:?} {nth} fails") });
        }
        Ok(())
    }
}

/// Another device, with failures. Cloning gives another handle of the same one.
#[derive(Clone, Debug)]
pub struct Faulty<D> {
    inner: D,
    plan: Arc<Mutex<Plan>>,
}

impl<D> Faulty<D> {
    /// `inner`, which does not fail yet.
    pub fn new(inner: D) -> Self {
        Self { inner, plan: Arc::default() }
    }

    /// The device within.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// The `nth` call of this kind from now on fails, 1 being the next; those after it succeed.
    pub fn fail(&self, call: Call, nth: u64) {
        let mut plan = self.plan.lock();
        let at = plan.calls.get(&call).copied().unwrap_or(0) + nth;
        plan.failing.insert(call, at);
    }

    /// How many calls of this kind there were.
    pub fn calls(&self, call: Call) -> u64 {
        self.plan.lock().calls.get(&call).copied().unwrap_or(0)
    }

    fn enter(&self, call: Call) -> Result<(), DeviceError> {
        self.plan.lock().enter(call)
    }
}

/// A stream of such a device.
#[derive(Clone, Debug)]
pub struct FaultyStream<S> {
    inner: S,
    plan: Arc<Mutex<Plan>>,
}

impl<S> FaultyStream<S> {
    /// The stream within.
    pub fn inner(&self) -> &S {
        &self.inner
    }
}

// SAFETY: the stream within, or an error.
unsafe impl<S: Stream> Stream for FaultyStream<S> {
    type Event = S::Event;

    fn name(&self) -> &str {
        self.inner.name()
    }

    fn id(&self) -> u64 {
        self.inner.id()
    }

    fn record(&self) -> Result<S::Event, DeviceError> {
        self.plan.lock().enter(Call::Record)?;
        self.inner.record()
    }

    fn wait(&self, event: &S::Event) -> Result<(), DeviceError> {
        self.plan.lock().enter(Call::Wait)?;
        self.inner.wait(event)
    }

    fn synchronize(&self, limit: Duration) -> Result<(), DeviceError> {
        self.inner.synchronize(limit)
    }
}

// SAFETY: the device within, or an error.
unsafe impl<D: Memory> Memory for Faulty<D> {
    fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        self.enter(Call::Allocate)?;
        self.inner.allocate(bytes)
    }

    unsafe fn deallocate(&self, ptr: NonNull<u8>, bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.inner.deallocate(ptr, bytes) };
    }

    fn granularity_bytes(&self) -> usize {
        self.inner.granularity_bytes()
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        self.inner.virtual_memory().is_some().then_some(self as &dyn VirtualMemory)
    }

    fn cost(&self) -> CostModel {
        self.inner.cost()
    }
}

impl<D: Memory> Faulty<D> {
    fn pages(&self) -> Result<&dyn VirtualMemory, DeviceError> {
        let none = || DeviceError::Driver { call: "virtual_memory", message: "the device has none".into() };
        self.inner.virtual_memory().ok_or_else(none)
    }
}

// SAFETY: the device within, or an error.
unsafe impl<D: Memory> VirtualMemory for Faulty<D> {
    fn page_bytes(&self) -> usize {
        self.pages().map_or(1, VirtualMemory::page_bytes)
    }

    fn reserve(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        self.enter(Call::Reserve)?;
        self.pages()?.reserve(bytes)
    }

    unsafe fn release(&self, base: NonNull<u8>, bytes: usize) {
        if let Ok(pages) = self.pages() {
            // SAFETY: the caller's promise.
            unsafe { pages.release(base, bytes) };
        }
    }

    fn create(&self) -> Result<Page, DeviceError> {
        self.enter(Call::Create)?;
        self.pages()?.create()
    }

    unsafe fn destroy(&self, page: Page) {
        if let Ok(pages) = self.pages() {
            // SAFETY: the caller's promise.
            unsafe { pages.destroy(page) };
        }
    }

    unsafe fn map(&self, at: NonNull<u8>, pages: &[Page]) -> Result<(), DeviceError> {
        self.enter(Call::Map)?;
        // SAFETY: the caller's promise.
        unsafe { self.pages()?.map(at, pages) }
    }

    unsafe fn unmap(&self, at: NonNull<u8>, pages: usize) {
        if let Ok(memory) = self.pages() {
            // SAFETY: the caller's promise.
            unsafe { memory.unmap(at, pages) };
        }
    }
}

// SAFETY: the device within, or an error.
unsafe impl<D: Device> Device for Faulty<D> {
    type Stream = FaultyStream<D::Stream>;
    type Event = D::Event;

    fn kind(&self) -> DeviceKind {
        self.inner.kind()
    }

    fn create_stream(&self, name: &str) -> Result<Self::Stream, DeviceError> {
        self.enter(Call::CreateStream)?;
        Ok(FaultyStream { inner: self.inner.create_stream(name)?, plan: Arc::clone(&self.plan) })
    }

    fn note_block(&self, note: BlockNote<'_, Self::Stream, D::Event>) {
        self.inner.note_block(match note {
            BlockNote::Taken { ptr, bytes, purpose, stream } => {
                BlockNote::Taken { ptr, bytes, purpose, stream: &stream.inner }
            }
            BlockNote::Freed { ptr, bytes, home, uses } => BlockNote::Freed { ptr, bytes, home: &home.inner, uses },
        });
    }

    fn copy(&self, stream: &Self::Stream, src: AnySlice, dst: AnySlice) -> Result<(), DeviceError> {
        self.enter(Call::Copy)?;
        self.inner.copy(&stream.inner, src, dst)
    }

    fn fill_zero(&self, stream: &Self::Stream, dst: AnySlice) -> Result<(), DeviceError> {
        self.inner.fill_zero(&stream.inner, dst)
    }

    fn upload(&self, stream: &Self::Stream, src: &[u8], dst: AnySlice, limit: Duration) -> Result<(), DeviceError> {
        self.inner.upload(&stream.inner, src, dst, limit)
    }

    fn download(
        &self,
        stream: &Self::Stream,
        src: AnySlice,
        dst: &mut [u8],
        limit: Duration,
    ) -> Result<(), DeviceError> {
        self.inner.download(&stream.inner, src, dst, limit)
    }
}
