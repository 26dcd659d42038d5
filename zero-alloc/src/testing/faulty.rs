//! A device whose n-th call of a kind fails.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::device::{AnySlice, BlockNote, Device, DeviceError, DeviceKind, Memory, Page, VirtualMemory};
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
}

#[derive(Debug, Default)]
struct Plan {
    calls: HashMap<Call, u64>,
    failing: HashMap<Call, u64>,
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
        let mut plan = self.plan.lock();
        let count = plan.calls.entry(call).or_default();
        *count += 1;
        let nth = *count;
        if plan.failing.get(&call) == Some(&nth) {
            return Err(DeviceError::Driver { call: "injected", message: format!("{call:?} {nth} fails") });
        }
        Ok(())
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
    type Stream = D::Stream;
    type Event = D::Event;

    fn kind(&self) -> DeviceKind {
        self.inner.kind()
    }

    fn create_stream(&self, name: &str) -> Result<D::Stream, DeviceError> {
        self.enter(Call::CreateStream)?;
        self.inner.create_stream(name)
    }

    fn note_block(&self, note: BlockNote<'_, D::Stream, D::Event>) {
        self.inner.note_block(note);
    }

    fn copy(&self, stream: &D::Stream, src: AnySlice, dst: AnySlice) -> Result<(), DeviceError> {
        self.enter(Call::Copy)?;
        self.inner.copy(stream, src, dst)
    }

    fn fill_zero(&self, stream: &D::Stream, dst: AnySlice) -> Result<(), DeviceError> {
        self.inner.fill_zero(stream, dst)
    }

    fn upload(&self, stream: &D::Stream, src: &[u8], dst: AnySlice, limit: Duration) -> Result<(), DeviceError> {
        self.inner.upload(stream, src, dst, limit)
    }

    fn download(
        &self,
        stream: &D::Stream,
        src: AnySlice,
        dst: &mut [u8],
        limit: Duration,
    ) -> Result<(), DeviceError> {
        self.inner.download(stream, src, dst, limit)
    }
}
