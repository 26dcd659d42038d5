//! A device that fails the n-th call of a kind.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::device::{
    AnySlice, BlockNote, Device, DeviceError, DeviceId, DeviceKind, Memory, Page, Stream,
    VirtualMemory,
};

/// A kind of call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
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

/// A wrapper of another device that injects failures. Clones share the planned failures.
#[derive(Clone, Debug)]
pub struct Faulty<D> {
    inner: D,
    plan: Arc<Mutex<Plan>>,
}

/// Counts a call, and fails it if that is planned.
fn enter(plan: &Mutex<Plan>, call: Call) -> Result<(), DeviceError> {
    let mut plan = plan.lock();
    let count = plan.calls.entry(call).or_default();
    *count += 1;
    let nth = *count;
    if plan.failing.get(&call) == Some(&nth) {
        return Err(DeviceError::Driver {
            call: "injected",
            message: format!("{call:?} {nth} fails"),
        });
    }
    Ok(())
}

impl<D> Faulty<D> {
    /// Wraps `inner`; no call fails yet.
    pub fn new(inner: D) -> Self {
        Self {
            inner,
            plan: Arc::default(),
        }
    }

    /// The wrapped device.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// Makes the `nth` call of this kind from now on fail, 1 being the next; later calls succeed.
    pub fn fail(&self, call: Call, nth: u64) {
        let mut plan = self.plan.lock();
        let at = plan.calls.get(&call).copied().unwrap_or(0) + nth;
        plan.failing.insert(call, at);
    }

    /// The number of calls of this kind.
    pub fn calls(&self, call: Call) -> u64 {
        self.plan.lock().calls.get(&call).copied().unwrap_or(0)
    }

    fn enter(&self, call: Call) -> Result<(), DeviceError> {
        enter(&self.plan, call)
    }
}

/// A stream of a [`Faulty`] device.
#[derive(Clone, Debug)]
pub struct FaultyStream<S> {
    inner: S,
    plan: Arc<Mutex<Plan>>,
}

impl<S> FaultyStream<S> {
    /// The wrapped stream.
    pub fn inner(&self) -> &S {
        &self.inner
    }
}

// SAFETY: every call is the wrapped stream's, or an error.
unsafe impl<S: Stream> Stream for FaultyStream<S> {
    type Event = S::Event;

    fn name(&self) -> &str {
        self.inner.name()
    }

    fn id(&self) -> u64 {
        self.inner.id()
    }

    fn record(&self) -> Result<S::Event, DeviceError> {
        enter(&self.plan, Call::Record)?;
        self.inner.record()
    }

    fn wait(&self, event: &S::Event) -> Result<(), DeviceError> {
        enter(&self.plan, Call::Wait)?;
        self.inner.wait(event)
    }

    fn synchronize(&self, limit: Duration) -> Result<(), DeviceError> {
        self.inner.synchronize(limit)
    }

    fn enqueue_host(
        &self,
        label: &'static str,
        op: impl FnOnce() -> Result<(), DeviceError> + Send + 'static,
    ) -> Result<(), DeviceError> {
        self.inner.enqueue_host(label, op)
    }
}

// SAFETY: every call is the wrapped device's, or an error.
unsafe impl<D: Memory> Memory for Faulty<D> {
    fn id(&self) -> DeviceId {
        self.inner.id()
    }

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
        self.inner
            .virtual_memory()
            .is_some()
            .then_some(self as &dyn VirtualMemory)
    }
}

impl<D: Memory> Faulty<D> {
    fn pages(&self) -> &dyn VirtualMemory {
        self.inner
            .virtual_memory()
            .expect("the wrapped device has virtual memory")
    }
}

// SAFETY: every call is the wrapped device's, or an error.
unsafe impl<D: Memory> VirtualMemory for Faulty<D> {
    fn page_bytes(&self) -> usize {
        self.pages().page_bytes()
    }

    fn reserve(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        self.enter(Call::Reserve)?;
        self.pages().reserve(bytes)
    }

    unsafe fn release(&self, base: NonNull<u8>, bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.pages().release(base, bytes) };
    }

    fn create(&self) -> Result<Page, DeviceError> {
        self.enter(Call::Create)?;
        self.pages().create()
    }

    unsafe fn destroy(&self, page: Page) {
        // SAFETY: the caller's promise.
        unsafe { self.pages().destroy(page) };
    }

    unsafe fn map(&self, at: NonNull<u8>, pages: &[Page]) -> Result<(), DeviceError> {
        self.enter(Call::Map)?;
        // SAFETY: the caller's promise.
        unsafe { self.pages().map(at, pages) }
    }

    unsafe fn unmap(&self, at: NonNull<u8>, pages: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.pages().unmap(at, pages) };
    }
}

// SAFETY: every call is the wrapped device's, or an error.
unsafe impl<D: Device> Device for Faulty<D> {
    type Stream = FaultyStream<D::Stream>;
    type Event = D::Event;

    fn kind(&self) -> DeviceKind {
        self.inner.kind()
    }

    fn check_stream(&self, what: &'static str, stream: &Self::Stream) -> Result<(), DeviceError> {
        self.inner.check_stream(what, &stream.inner)
    }

    fn create_stream(&self, name: &str) -> Result<Self::Stream, DeviceError> {
        self.enter(Call::CreateStream)?;
        Ok(FaultyStream {
            inner: self.inner.create_stream(name)?,
            plan: Arc::clone(&self.plan),
        })
    }

    fn create_urgent_stream(&self, name: &str) -> Result<Self::Stream, DeviceError> {
        self.enter(Call::CreateStream)?;
        Ok(FaultyStream {
            inner: self.inner.create_urgent_stream(name)?,
            plan: Arc::clone(&self.plan),
        })
    }

    fn note_block(&self, note: BlockNote<'_, Self::Stream, D::Event>) {
        self.inner.note_block(match note {
            BlockNote::Allocated {
                ptr,
                bytes,
                purpose,
                stream,
            } => BlockNote::Allocated {
                ptr,
                bytes,
                purpose,
                stream: &stream.inner,
            },
            BlockNote::Freed {
                ptr,
                bytes,
                home,
                uses,
            } => BlockNote::Freed {
                ptr,
                bytes,
                home: &home.inner,
                uses,
            },
        });
    }

    fn copy(&self, stream: &Self::Stream, src: AnySlice, dst: AnySlice) -> Result<(), DeviceError> {
        self.enter(Call::Copy)?;
        self.inner.copy(&stream.inner, src, dst)
    }

    fn fill_zero(&self, stream: &Self::Stream, dst: AnySlice) -> Result<(), DeviceError> {
        self.inner.fill_zero(&stream.inner, dst)
    }

    fn upload(
        &self,
        stream: &Self::Stream,
        src: &[u8],
        dst: AnySlice,
        limit: Duration,
    ) -> Result<(), DeviceError> {
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
