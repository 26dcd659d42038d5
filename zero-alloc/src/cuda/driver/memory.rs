//! Device memory, pinned host memory, and virtual memory.

use std::ffi::{c_int, c_uint};
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys;
use cudarc::driver::sys::CUdevice_attribute as Attribute;

use super::context::SpareBuffer;
use super::{Context, PINNING_REFUSED, non_null};
use crate::device::{DeviceError, Page, VirtualMemory};

/// The size of a pinned buffer: large enough to make the cost of starting a copy negligible.
pub(crate) const BUFFER_BYTES: usize = 4 << 20;

/// A device address that the driver wrote.
pub(super) fn address(
    call: &'static str,
    raw: sys::CUdeviceptr,
) -> Result<NonNull<u8>, DeviceError> {
    non_null(call, std::ptr::with_exposed_provenance_mut(raw as usize))
}

pub(super) fn raw(ptr: NonNull<u8>) -> sys::CUdeviceptr {
    ptr.addr().get() as sys::CUdeviceptr
}

impl Context {
    /// Allocates device memory; the driver may wait for the whole device.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        let driver = self.bind()?;
        let mut ptr = 0;
        // SAFETY: writes one address.
        unsafe { call_memory!(driver, bytes, cuMemAlloc_v2(&raw mut ptr, bytes.max(1))) }?;
        address("cuMemAlloc", ptr)
    }

    /// # Safety
    /// `ptr` came from [`Context::allocate`], nothing uses it, and it is freed once.
    pub(crate) unsafe fn deallocate(&self, ptr: NonNull<u8>) {
        if let Ok(driver) = self.bind() {
            // SAFETY: the caller's promise. It fails only after an earlier, final failure of the
            // context.
            unsafe { (driver.table.cuMemFree_v2)(raw(ptr)) };
        }
    }

    /// [`BUFFER_BYTES`] of host memory that the device accesses directly: an unused buffer of the
    /// context, or a new one.
    pub(crate) fn take_buffer(&self) -> Result<NonNull<u8>, DeviceError> {
        if let Some(SpareBuffer(ptr)) = self.spare_buffers.lock().pop() {
            return Ok(ptr);
        }
        let driver = self.bind()?;
        let mut ptr = std::ptr::null_mut();
        // Flags 0: the host would read write-combined memory slowly.
        // SAFETY: writes one address.
        unsafe {
            call_memory!(
                driver,
                BUFFER_BYTES,
                cuMemHostAlloc(&raw mut ptr, BUFFER_BYTES, 0)
            )
        }?;
        non_null("cuMemHostAlloc", ptr.cast())
    }

    /// Keeps a buffer for later use.
    ///
    /// # Safety
    /// `ptr` came from [`Context::take_buffer`] of this context, nothing uses it, and it is
    /// returned once.
    pub(crate) unsafe fn return_buffer(&self, ptr: NonNull<u8>) {
        self.spare_buffers.lock().push(SpareBuffer(ptr));
    }

    /// Page-locks host memory for the copies of all devices. Returns the driver's message if the
    /// system refuses.
    ///
    /// # Safety
    /// The range is mapped until [`Context::unregister`], and is of no other registration.
    pub(crate) unsafe fn register(
        &self,
        ptr: NonNull<u8>,
        bytes: usize,
    ) -> Result<Option<String>, DeviceError> {
        const PORTABLE: c_uint = 1;
        let driver = self.bind()?;
        // SAFETY: mapped, by the caller's promise.
        let code =
            unsafe { (driver.table.cuMemHostRegister_v2)(ptr.as_ptr().cast(), bytes, PORTABLE) };
        let refused = PINNING_REFUSED.contains(&code);
        match driver.check("cuMemHostRegister", code) {
            Err(error) if refused => Ok(Some(error.to_string())),
            checked => checked.map(|()| None),
        }
    }

    /// # Safety
    /// `ptr` is the start of a range that [`Context::register`] has pinned, and no copy uses it.
    pub(crate) unsafe fn unregister(&self, ptr: NonNull<u8>) {
        if let Ok(driver) = self.bind() {
            // SAFETY: the caller's promise. It fails only after an earlier, final failure of the
            // context.
            unsafe { (driver.table.cuMemHostUnregister)(ptr.as_ptr().cast()) };
        }
    }

    /// The recommended granularity, in bytes, of memory with these properties; a power of two.
    pub(super) fn granularity_bytes(
        &self,
        properties: &PageProperties,
    ) -> Result<usize, DeviceError> {
        let driver = self.bind()?;
        let mut bytes = 0;
        let recommended =
            sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        let properties = std::ptr::from_ref(properties).cast();
        // SAFETY: writes one number, reads the properties, which have the headers' layout.
        unsafe {
            call!(
                driver,
                cuMemGetAllocationGranularity(&raw mut bytes, properties, recommended)
            )
        }?;
        if !bytes.is_power_of_two() {
            let message = format!("expected a power of two, got {bytes} bytes");
            return Err(DeviceError::Driver {
                call: "cuMemGetAllocationGranularity",
                message,
            });
        }
        Ok(bytes)
    }

    /// Creates physical memory; returns the driver's handle.
    pub(super) fn create(
        &self,
        bytes: usize,
        properties: &PageProperties,
    ) -> Result<u64, DeviceError> {
        let driver = self.bind()?;
        let mut handle = 0;
        let properties = std::ptr::from_ref(properties).cast();
        // SAFETY: writes one handle, reads the properties, which have the headers' layout.
        unsafe {
            call_memory!(
                driver,
                bytes,
                cuMemCreate(&raw mut handle, bytes, properties, 0)
            )
        }?;
        Ok(handle)
    }

    /// Reserves addresses without memory.
    pub(super) fn reserve(&self, bytes: usize, align: usize) -> Result<NonNull<u8>, DeviceError> {
        let driver = self.bind()?;
        let mut base = 0;
        // SAFETY: writes one address; the driver selects the range.
        unsafe {
            call_memory!(
                driver,
                bytes,
                cuMemAddressReserve(&raw mut base, bytes, align, 0, 0)
            )
        }?;
        address("cuMemAddressReserve", base)
    }

    /// Allows the device to read and write the mapped range.
    ///
    /// # Safety
    /// The range is mapped.
    pub(super) unsafe fn set_access(
        &self,
        at: NonNull<u8>,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let driver = self.bind()?;
        let access = Access::whole(self);
        // SAFETY: the caller's promise; reads one description, which has the headers' layout.
        unsafe {
            call_memory!(
                driver,
                bytes,
                cuMemSetAccess(raw(at), bytes, (&raw const access).cast(), 1)
            )
        }
    }
}

// The next three structs have the layout of NVIDIA's headers. cudarc's definitions differ between
// toolkit versions.

#[repr(C)]
pub(super) struct Location {
    kind: sys::CUmemLocationType,
    id: c_int,
}

#[repr(C)]
pub(super) struct PageProperties {
    kind: sys::CUmemAllocationType,
    /// A set of `CUmemAllocationHandleType`.
    handles: c_uint,
    location: Location,
    /// A pointer, null here.
    win32: usize,
    compression: u8,
    /// Network cards may access the memory directly.
    network: u8,
    usage: u16,
    reserved: [u8; 4],
}

#[repr(C)]
struct Access {
    location: Location,
    flags: sys::CUmemAccess_flags,
}

const _: () = assert!(size_of::<Location>() == size_of::<sys::CUmemLocation>());
const _: () = assert!(size_of::<PageProperties>() == size_of::<sys::CUmemAllocationProp>());
const _: () = assert!(align_of::<PageProperties>() >= align_of::<sys::CUmemAllocationProp>());
const _: () = assert!(size_of::<Access>() == size_of::<sys::CUmemAccessDesc>());

impl Location {
    fn of(context: &Context) -> Self {
        Self {
            kind: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: context.device,
        }
    }
}

impl PageProperties {
    /// Memory of the context's device, for this process alone.
    fn new(context: &Context) -> Result<Self, DeviceError> {
        let network =
            context.has(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)?;
        Ok(Self {
            kind: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            handles: 0,
            location: Location::of(context),
            win32: 0,
            compression: 0,
            network: u8::from(network),
            usage: 0,
            reserved: [0; 4],
        })
    }
}

impl Access {
    /// Read and write access for the context's device.
    fn whole(context: &Context) -> Self {
        Self {
            location: Location::of(context),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        }
    }
}

/// Address ranges, and pages of device memory. A page is named by the driver's handle.
pub(crate) struct Pages {
    context: Arc<Context>,
    page_bytes: usize,
    properties: PageProperties,
}

impl std::fmt::Debug for Pages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pages({} bytes each)", self.page_bytes)
    }
}

impl Pages {
    /// Pages of the size that the device recommends.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        let properties = PageProperties::new(context)?;
        let page_bytes = context.granularity_bytes(&properties)?;
        Ok(Self {
            context: Arc::clone(context),
            page_bytes,
            properties,
        })
    }
}

// SAFETY: the driver reserves ranges that overlap no others, and creates pages without another
// owner.
unsafe impl VirtualMemory for Pages {
    fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    fn reserve(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        self.context.reserve(bytes, self.page_bytes)
    }

    unsafe fn release(&self, base: NonNull<u8>, bytes: usize) {
        if let Ok(driver) = self.context.bind() {
            // SAFETY: reserved by `reserve`, with nothing mapped, by the caller's promise.
            unsafe { (driver.table.cuMemAddressFree)(raw(base), bytes) };
        }
    }

    fn create(&self) -> Result<Page, DeviceError> {
        self.context
            .create(self.page_bytes, &self.properties)
            .map(Page)
    }

    unsafe fn destroy(&self, page: Page) {
        if let Ok(driver) = self.context.bind() {
            // SAFETY: created by `create`, mapped nowhere, by the caller's promise.
            unsafe { (driver.table.cuMemRelease)(page.0) };
        }
    }

    unsafe fn map(&self, at: NonNull<u8>, pages: &[Page]) -> Result<(), DeviceError> {
        if pages.is_empty() {
            return Ok(());
        }
        let driver = self.context.bind()?;
        let mut mapped = 0;
        let mut result = Ok(());

        for page in pages {
            let to = raw(at) + (mapped * self.page_bytes) as sys::CUdeviceptr;
            // SAFETY: by the caller's promise the addresses are reserved, nothing is mapped there,
            // the page is live.
            result = unsafe {
                call_memory!(
                    driver,
                    self.page_bytes,
                    cuMemMap(to, self.page_bytes, 0, page.0, 0)
                )
            };
            if result.is_err() {
                break;
            }
            mapped += 1;
        }

        if result.is_ok() {
            // SAFETY: the range was mapped above.
            result = unsafe { self.context.set_access(at, mapped * self.page_bytes) };
        }

        if result.is_err() {
            // SAFETY: mapped above and unused.
            unsafe { self.unmap(at, mapped) };
        }

        result
    }

    unsafe fn unmap(&self, at: NonNull<u8>, pages: usize) {
        if pages > 0
            && let Ok(driver) = self.context.bind()
        {
            // SAFETY: by the caller's promise the pages are mapped there and unused.
            unsafe { (driver.table.cuMemUnmap)(raw(at), pages * self.page_bytes) };
        }
    }
}
