//! Device memory, pinned host memory, and addresses and pages apart.

use std::ffi::{c_int, c_uint};
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys;
use cudarc::driver::sys::CUdevice_attribute as Attribute;

use super::{Context, Queue};
use crate::device::{DeviceError, Page, VirtualMemory};

/// An address on the device, from what the driver wrote.
pub(super) fn address(call: &'static str, raw: sys::CUdeviceptr) -> Result<NonNull<u8>, DeviceError> {
    let ptr = std::ptr::with_exposed_provenance_mut(raw as usize);
    NonNull::new(ptr).ok_or_else(|| DeviceError::Driver { call, message: "it gave a null address".into() })
}

pub(super) fn raw(ptr: NonNull<u8>) -> sys::CUdeviceptr {
    ptr.addr().get() as sys::CUdeviceptr
}

impl Context {
    /// Device memory; the driver may wait for the whole device.
    pub(in super::super) fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        self.bind()?;
        let mut ptr = 0;
        // SAFETY: writes one address.
        let code = unsafe { (self.driver.table.cuMemAlloc_v2)(&raw mut ptr, bytes.max(1)) };
        self.driver.check_memory("cuMemAlloc", code, bytes)?;
        address("cuMemAlloc", ptr)
    }

    /// # Safety
    /// `ptr` came from [`Context::allocate`], nothing uses it, and it is given back once.
    pub(in super::super) unsafe fn deallocate(&self, ptr: NonNull<u8>) {
        if self.bind().is_ok() {
            // SAFETY: the caller's promise. A failure is an earlier one of the context: then all is lost anyway.
            unsafe { (self.driver.table.cuMemFree_v2)(raw(ptr)) };
        }
    }
}

impl Context {
    /// Gives back what the driver's own pool holds and nobody has.
    pub(in super::super) fn trim(&self) -> Result<(), DeviceError> {
        self.bind()?;
        let (driver, mut pool) = (self.driver, std::ptr::null_mut());
        // SAFETY: writes one handle.
        let code = unsafe { (driver.table.cuDeviceGetDefaultMemPool)(&raw mut pool, self.device) };
        driver.check("cuDeviceGetDefaultMemPool", code)?;
        // SAFETY: the device's own pool, which always lives.
        driver.check("cuMemPoolTrimTo", unsafe { (driver.table.cuMemPoolTrimTo)(pool, 0) })
    }

    /// Host memory that the device reads and writes directly. Flags 0: write-combined memory would be slow for
    /// the host to read.
    pub(in super::super) fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        self.bind()?;
        let mut ptr = std::ptr::null_mut();
        // SAFETY: writes one address.
        let code = unsafe { (self.driver.table.cuMemHostAlloc)(&raw mut ptr, bytes.max(1), 0) };
        self.driver.check_memory("cuMemHostAlloc", code, bytes)?;
        let null = || DeviceError::Driver { call: "cuMemHostAlloc", message: "it gave a null address".into() };
        NonNull::new(ptr.cast()).ok_or_else(null)
    }

    /// # Safety
    /// `ptr` came from [`Context::allocate_pinned`], nothing uses it, and it is given back once.
    pub(in super::super) unsafe fn deallocate_pinned(&self, ptr: NonNull<u8>) {
        if self.bind().is_ok() {
            // SAFETY: the caller's promise.
            unsafe { (self.driver.table.cuMemFreeHost)(ptr.as_ptr().cast()) };
        }
    }
}

impl Queue {
    /// Device memory from the driver's own pool, in the order of this queue.
    pub(in super::super) fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        self.context.bind()?;
        let (driver, mut ptr) = (self.context.driver, 0);
        // SAFETY: writes one address; the queue lives.
        let code = unsafe { (driver.table.cuMemAllocAsync)(&raw mut ptr, bytes.max(1), self.raw) };
        driver.check_memory("cuMemAllocAsync", code, bytes)?;
        address("cuMemAllocAsync", ptr)
    }

    /// # Safety
    /// `ptr` came from [`Queue::allocate`], nothing but what this queue has been given so far uses it, and it is
    /// given back once.
    pub(in super::super) unsafe fn deallocate(&self, ptr: NonNull<u8>) {
        if self.context.bind().is_ok() {
            // SAFETY: the caller's promise; the queue lives.
            unsafe { (self.context.driver.table.cuMemFreeAsync)(raw(ptr), self.raw) };
        }
    }
}

/// Where pages lie, as the driver's headers have it since virtual memory came. cudarc's own changes its shape with
/// the toolkit's version.
#[repr(C)]
pub(super) struct Location {
    kind: sys::CUmemLocationType,
    id: c_int,
}

#[repr(C)]
pub(super) struct PageProperties {
    kind: sys::CUmemAllocationType,
    /// Types of `CUmemAllocationHandleType`, any of them together.
    handles: c_uint,
    location: Location,
    win32: *mut std::ffi::c_void,
    compression: u8,
    /// Network cards may read and write the pages directly.
    network: u8,
    usage: u16,
    reserved: [u8; 4],
}

#[repr(C)]
pub(super) struct Access {
    location: Location,
    flags: sys::CUmemAccess_flags,
}

const _: () = assert!(size_of::<Location>() == size_of::<sys::CUmemLocation>());
const _: () = assert!(size_of::<PageProperties>() == size_of::<sys::CUmemAllocationProp>());
const _: () = assert!(align_of::<PageProperties>() >= align_of::<sys::CUmemAllocationProp>());
const _: () = assert!(size_of::<Access>() == size_of::<sys::CUmemAccessDesc>());

impl Location {
    fn of(context: &Context) -> Self {
        Self { kind: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: context.device }
    }
}

impl PageProperties {
    /// Memory of the context's device, for handles of these types (0: for this process alone).
    pub(super) fn new(context: &Context, handles: c_uint, network: bool) -> Self {
        Self {
            kind: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            handles,
            location: Location::of(context),
            win32: std::ptr::null_mut(),
            compression: 0,
            network: u8::from(network),
            usage: 0,
            reserved: [0; 4],
        }
    }

    /// The handle types, of properties whose other fields may hold what is no value of theirs.
    ///
    /// # Safety
    /// `properties` is valid for reads, with its handle types initialised.
    pub(super) unsafe fn handles(properties: *const Self) -> c_uint {
        // SAFETY: within what the caller promises is there.
        let handles = unsafe { &raw const (*properties).handles };
        // SAFETY: initialised, as the caller promises.
        unsafe { handles.read() }
    }
}

impl Access {
    /// Reading and writing by the context's device.
    pub(super) fn whole(context: &Context) -> Self {
        Self { location: Location::of(context), flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE }
    }
}

impl Context {
    /// What sizes of such memory are best multiples of; a power of two.
    pub(super) fn granularity_bytes(&self, properties: &PageProperties) -> Result<usize, DeviceError> {
        self.bind()?;
        let (mut bytes, get) = (0usize, self.driver.table.cuMemGetAllocationGranularity);
        let recommended = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: writes one number, reads the properties, which have the headers' layout.
        let code = unsafe { get(&raw mut bytes, std::ptr::from_ref(properties).cast(), recommended) };
        self.driver.check("cuMemGetAllocationGranularity", code)?;
        if !bytes.is_power_of_two() {
            let message = format!("pages of {bytes} bytes are no power of two");
            return Err(DeviceError::Driver { call: "cuMemGetAllocationGranularity", message });
        }
        Ok(bytes)
    }
}

/// Ranges of addresses, and pages of device memory. A page is named by the driver's handle.
pub(in super::super) struct Pages {
    context: Arc<Context>,
    page_bytes: usize,
    network: bool,
}

impl std::fmt::Debug for Pages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pages({} bytes each)", self.page_bytes)
    }
}

impl Pages {
    /// Pages as large as the device likes them.
    pub(in super::super) fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        let network = Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
        let network = context.attribute(network)? == 1;
        let page_bytes = context.granularity_bytes(&PageProperties::new(context, 0, network))?;
        Ok(Self { context: Arc::clone(context), page_bytes, network })
    }
}

// SAFETY: ranges and pages are the driver's.
unsafe impl VirtualMemory for Pages {
    fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    fn reserve(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        self.context.bind()?;
        let (driver, mut base) = (self.context.driver, 0);
        // SAFETY: writes one address; wherever there is room.
        let code = unsafe { (driver.table.cuMemAddressReserve)(&raw mut base, bytes, self.page_bytes, 0, 0) };
        driver.check_memory("cuMemAddressReserve", code, bytes)?;
        address("cuMemAddressReserve", base)
    }

    unsafe fn release(&self, base: NonNull<u8>, bytes: usize) {
        if self.context.bind().is_ok() {
            // SAFETY: reserved by `reserve`, with nothing mapped, by the caller's promise.
            unsafe { (self.context.driver.table.cuMemAddressFree)(raw(base), bytes) };
        }
    }

    fn create(&self) -> Result<Page, DeviceError> {
        self.context.bind()?;
        let properties = PageProperties::new(&self.context, 0, self.network);
        let (driver, mut handle) = (self.context.driver, 0);
        let create = driver.table.cuMemCreate;
        // SAFETY: writes one handle, reads the properties, which have the headers' layout.
        let code = unsafe { create(&raw mut handle, self.page_bytes, (&raw const properties).cast(), 0) };
        driver.check_memory("cuMemCreate", code, self.page_bytes)?;
        Ok(Page(handle))
    }

    unsafe fn destroy(&self, page: Page) {
        if self.context.bind().is_ok() {
            // SAFETY: created by `create`, mapped nowhere, by the caller's promise.
            unsafe { (self.context.driver.table.cuMemRelease)(page.0) };
        }
    }

    unsafe fn map(&self, at: NonNull<u8>, pages: &[Page]) -> Result<(), DeviceError> {
        if pages.is_empty() {
            return Ok(());
        }
        self.context.bind()?;
        let (driver, start) = (self.context.driver, raw(at));
        let mut mapped = 0;
        let mut result = Ok(());
        for page in pages {
            let to = start + (mapped * self.page_bytes) as sys::CUdeviceptr;
            // SAFETY: by the caller's promise the addresses are reserved, nothing is mapped there, the page lives.
            let code = unsafe { (driver.table.cuMemMap)(to, self.page_bytes, 0, page.0, 0) };
            result = driver.check_memory("cuMemMap", code, self.page_bytes);
            if result.is_err() {
                break;
            }
            mapped += 1;
        }
        if result.is_ok() {
            let access = Access::whole(&self.context);
            let (set, bytes) = (driver.table.cuMemSetAccess, mapped * self.page_bytes);
            // SAFETY: the range was mapped just now; reads one description, which has the headers' layout.
            let code = unsafe { set(start, bytes, (&raw const access).cast(), 1) };
            result = driver.check_memory("cuMemSetAccess", code, bytes);
        }
        if result.is_err() {
            // SAFETY: these were mapped just now, and nobody knows.
            unsafe { self.unmap(at, mapped) };
        }
        result
    }

    unsafe fn unmap(&self, at: NonNull<u8>, pages: usize) {
        if pages > 0 && self.context.bind().is_ok() {
            // SAFETY: by the caller's promise the pages are mapped there and unused.
            unsafe { (self.context.driver.table.cuMemUnmap)(raw(at), pages * self.page_bytes) };
        }
    }
}
