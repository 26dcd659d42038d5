//! Memory that other processes may open: each allocation is one handle of the driver, whole, under addresses of its
//! own.

use std::ffi::c_uint;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys;
use cudarc::driver::sys::CUdevice_attribute as Attribute;

use super::Context;
use super::memory::{Access, PageProperties, address, raw};
use crate::device::DeviceError;

/// How a handle is given to another process, by the headers' `CUmemAllocationHandleType`: as a file descriptor, or
/// (since CUDA 12.3) over NVLink between machines.
const DESCRIPTOR: c_uint = 1;
const FABRIC: c_uint = 8;

/// What makes such memory on one device.
pub(in super::super) struct Shareable {
    context: Arc<Context>,
    granularity_bytes: usize,
    network: bool,
    /// Handle types that the driver makes here.
    handles: AtomicU32,
}

impl Shareable {
    /// `None` where the device or its driver has no such memory.
    pub(in super::super) fn new(context: &Arc<Context>) -> Result<Option<Self>, DeviceError> {
        let has = |which| Ok::<bool, DeviceError>(context.attribute(which)? == 1);
        if !has(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)?
            || !has(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?
        {
            return Ok(None);
        }
        let network = has(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)?;
        let granularity_bytes = context.granularity_bytes(&PageProperties::new(context, DESCRIPTOR, network))?;
        let handles = AtomicU32::new(DESCRIPTOR | FABRIC);
        Ok(Some(Self { context: Arc::clone(context), granularity_bytes, network, handles }))
    }

    /// Sizes are multiples of this, a power of two.
    pub(in super::super) fn granularity_bytes(&self) -> usize {
        self.granularity_bytes
    }

    fn whole(&self, bytes: usize) -> Option<usize> {
        bytes.max(1).checked_next_multiple_of(self.granularity_bytes)
    }

    /// `bytes` or more, as one handle.
    pub(in super::super) fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        self.context.bind()?;
        let (driver, mut base) = (self.context.driver, 0);
        let Some(whole) = self.whole(bytes) else {
            let detail = "more than there are addresses".to_owned();
            return Err(DeviceError::OutOfMemory { requested_bytes: bytes, detail });
        };
        let handle = self.create(whole)?;
        // SAFETY: writes one address; wherever there is room.
        let code = unsafe { (driver.table.cuMemAddressReserve)(&raw mut base, whole, self.granularity_bytes, 0, 0) };
        let reserved = driver.check_memory("cuMemAddressReserve", code, whole).and_then(|()| {
            let at = address("cuMemAddressReserve", base)?;
            // SAFETY: reserved just now; the handle was made just now, of this size.
            let mapped = unsafe { self.map(at, whole, handle) };
            if mapped.is_err() {
                // SAFETY: reserved just now, with nothing mapped.
                unsafe { (driver.table.cuMemAddressFree)(base, whole) };
            }
            mapped.map(|()| at)
        });
        // The mapping keeps the memory from here on; without one it goes.
        // SAFETY: created above, given up once.
        unsafe { (driver.table.cuMemRelease)(handle) };
        reserved
    }

    /// One handle of `whole` bytes, of all types that the driver makes here. Whether it makes the second is seen by
    /// trying: a machine may have the hardware and not the permission.
    fn create(&self, whole: usize) -> Result<sys::CUmemGenericAllocationHandle, DeviceError> {
        let create = |handles| {
            let (properties, mut handle) = (PageProperties::new(&self.context, handles, self.network), 0);
            let create = self.context.driver.table.cuMemCreate;
            // SAFETY: writes one handle, reads the properties, which have the headers' layout.
            let code = unsafe { create(&raw mut handle, whole, (&raw const properties).cast(), 0) };
            self.context.driver.check_memory("cuMemCreate", code, whole).map(|()| handle)
        };
        let handles = self.handles.load(Ordering::Relaxed);
        match create(handles) {
            Err(error) if handles != DESCRIPTOR && !matches!(error, DeviceError::OutOfMemory { .. }) => {
                let created = create(DESCRIPTOR)?;
                self.handles.store(DESCRIPTOR, Ordering::Relaxed);
                Ok(created)
            }
            created => created,
        }
    }

    /// # Safety
    /// The addresses are reserved with nothing mapped; the handle lives and has that size.
    unsafe fn map(
        &self,
        at: NonNull<u8>,
        whole: usize,
        handle: sys::CUmemGenericAllocationHandle,
    ) -> Result<(), DeviceError> {
        let (driver, access) = (self.context.driver, Access::whole(&self.context));
        // SAFETY: the caller's promise.
        let code = unsafe { (driver.table.cuMemMap)(raw(at), whole, 0, handle, 0) };
        driver.check_memory("cuMemMap", code, whole)?;
        // SAFETY: mapped just now; reads one description, which has the headers' layout.
        let code = unsafe { (driver.table.cuMemSetAccess)(raw(at), whole, (&raw const access).cast(), 1) };
        driver.check_memory("cuMemSetAccess", code, whole).inspect_err(|_| {
            // SAFETY: mapped just now, and nobody knows.
            unsafe { (driver.table.cuMemUnmap)(raw(at), whole) };
        })
    }

    /// # Safety
    /// `ptr` came from `allocate(bytes)`, nothing uses it, no other process has it open, and it is given back once.
    pub(in super::super) unsafe fn deallocate(&self, ptr: NonNull<u8>, bytes: usize) {
        let (table, Some(whole)) = (&self.context.driver.table, self.whole(bytes)) else { return };
        if self.context.bind().is_ok() {
            // SAFETY: mapped whole by `allocate`; unused, by the caller's promise.
            unsafe { (table.cuMemUnmap)(raw(ptr), whole) };
            // SAFETY: reserved by `allocate`, with nothing mapped any more.
            unsafe { (table.cuMemAddressFree)(raw(ptr), whole) };
        }
    }
}

impl Context {
    /// The allocation that holds `bytes` at `at`: its first address and its size.
    ///
    /// # Errors
    /// They lie in more than one, or in one that other processes cannot open; the driver failed.
    pub(in super::super) fn shareable(&self, at: *mut u8, bytes: usize) -> Result<(*mut u8, usize), DeviceError> {
        self.bind()?;
        let (driver, from) = (self.driver, at.expose_provenance());
        let (mut base, mut size) = (0, 0usize);
        let get = driver.table.cuMemGetAddressRange_v2;
        // SAFETY: writes an address and a number; takes any address.
        let code = unsafe { get(&raw mut base, &raw mut size, from as sys::CUdeviceptr) };
        driver.check("cuMemGetAddressRange", code)?;
        let first = address("cuMemGetAddressRange", base)?;
        let refused = |message: String| Err(DeviceError::Driver { call: "shareable", message });
        if from.checked_add(bytes).is_none_or(|end| end > first.addr().get() + size) {
            return refused(format!(
                "{bytes} bytes lie in more than one allocation (the first holds {size}), as those of a pool of pages do"
            ));
        }
        let mut handle = 0;
        let retain = driver.table.cuMemRetainAllocationHandle;
        // SAFETY: writes one handle; takes any address.
        let code = unsafe { retain(&raw mut handle, first.as_ptr().cast()) };
        if driver.check("cuMemRetainAllocationHandle", code).is_err() {
            return refused("the memory has no handle that could be given away, as that of cuMemAlloc".into());
        }
        let mut properties = MaybeUninit::<PageProperties>::zeroed();
        let get = driver.table.cuMemGetAllocationPropertiesFromHandle;
        // SAFETY: writes the properties, which have the headers' layout; the handle is held.
        let code = unsafe { get(properties.as_mut_ptr().cast(), handle) };
        // SAFETY: retained above, given up once.
        unsafe { (driver.table.cuMemRelease)(handle) };
        driver.check("cuMemGetAllocationPropertiesFromHandle", code)?;
        // SAFETY: zeroed at least. Only this number is looked at: the driver's other words may be none of ours.
        if unsafe { PageProperties::handles(properties.as_ptr()) } & (DESCRIPTOR | FABRIC) == 0 {
            return refused("the memory was made for this process alone".into());
        }
        Ok((first.as_ptr(), size))
    }
}
