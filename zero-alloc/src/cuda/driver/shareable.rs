//! Memory that other processes can open. Each allocation is one handle of the driver, mapped whole
//! into its own address range.

use std::ffi::c_uint;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys;
use cudarc::driver::sys::CUdevice_attribute as Attribute;

use super::Context;
use super::memory::{PageProperties, address, raw};
use crate::device::DeviceError;

/// Values of the headers' `CUmemAllocationHandleType`: handles passed as a file descriptor, or
/// (since CUDA 12.3) over NVLink between machines.
const DESCRIPTOR: c_uint = 1;
const FABRIC: c_uint = 8;

/// The allocator of shareable memory on one device.
pub(crate) struct Shareable {
    context: Arc<Context>,
    granularity_bytes: usize,
    /// The handle types that the driver supports here.
    handles: AtomicU32,
}

impl Shareable {
    /// `None` if the device or its driver does not support such memory.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Option<Self>, DeviceError> {
        if !context.has(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)?
            || !context
                .has(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?
        {
            return Ok(None);
        }
        let granularity_bytes =
            context.granularity_bytes(&PageProperties::new(context, DESCRIPTOR)?)?;
        let handles = AtomicU32::new(DESCRIPTOR | FABRIC);
        Ok(Some(Self {
            context: Arc::clone(context),
            granularity_bytes,
            handles,
        }))
    }

    /// Sizes are multiples of this power of two.
    pub(crate) fn granularity_bytes(&self) -> usize {
        self.granularity_bytes
    }

    fn rounded(&self, bytes: usize) -> Option<usize> {
        bytes
            .max(1)
            .checked_next_multiple_of(self.granularity_bytes)
    }

    /// Allocates `bytes`, rounded up to the granularity, as one handle.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        let driver = self.context.bind()?;
        let Some(rounded) = self.rounded(bytes) else {
            let detail = "beyond the address space".to_owned();
            return Err(DeviceError::OutOfMemory {
                requested_bytes: bytes,
                detail,
            });
        };
        let handle = self.create(rounded)?;
        let mapped = self
            .context
            .reserve(rounded, self.granularity_bytes)
            .and_then(|at| {
                // SAFETY: reserved above; the handle was created above with this size.
                let mapped = unsafe { self.map(at, rounded, handle) };
                if mapped.is_err() {
                    // SAFETY: reserved above, with nothing mapped.
                    unsafe { (driver.table.cuMemAddressFree)(raw(at), rounded) };
                }
                mapped.map(|()| at)
            });
        // The mapping keeps the memory alive; without one it is freed here.
        // SAFETY: created above, released once.
        unsafe { (driver.table.cuMemRelease)(handle) };
        mapped
    }

    /// Creates one handle of `bytes` bytes with all handle types that the driver supports. Only an
    /// attempt shows whether it supports fabric handles: a machine may have the hardware without
    /// the permission.
    fn create(&self, bytes: usize) -> Result<sys::CUmemGenericAllocationHandle, DeviceError> {
        let create = |handles| {
            self.context
                .create(bytes, &PageProperties::new(&self.context, handles)?)
        };
        let handles = self.handles.load(Ordering::Relaxed);
        match create(handles) {
            Err(error)
                if handles != DESCRIPTOR && !matches!(error, DeviceError::OutOfMemory { .. }) =>
            {
                let created = create(DESCRIPTOR)?;
                self.handles.store(DESCRIPTOR, Ordering::Relaxed);
                Ok(created)
            }
            created => created,
        }
    }

    /// # Safety
    /// The addresses are reserved with nothing mapped; the handle is live and has that size.
    unsafe fn map(
        &self,
        at: NonNull<u8>,
        bytes: usize,
        handle: sys::CUmemGenericAllocationHandle,
    ) -> Result<(), DeviceError> {
        let driver = self.context.bind()?;
        // SAFETY: the caller's promise.
        unsafe { call_memory!(driver, bytes, cuMemMap(raw(at), bytes, 0, handle, 0)) }?;
        // SAFETY: mapped above.
        unsafe { self.context.set_access(at, bytes) }.inspect_err(|_| {
            // SAFETY: mapped above and unused.
            unsafe { (driver.table.cuMemUnmap)(raw(at), bytes) };
        })
    }

    /// # Safety
    /// `ptr` came from `allocate(bytes)`, nothing uses it, no other process has it open, and it is
    /// freed once.
    pub(crate) unsafe fn deallocate(&self, ptr: NonNull<u8>, bytes: usize) {
        if let (Some(bytes), Ok(driver)) = (self.rounded(bytes), self.context.bind()) {
            // SAFETY: mapped whole by `allocate`; unused, by the caller's promise.
            unsafe { (driver.table.cuMemUnmap)(raw(ptr), bytes) };
            // SAFETY: reserved by `allocate`, with nothing mapped any more.
            unsafe { (driver.table.cuMemAddressFree)(raw(ptr), bytes) };
        }
    }
}

impl Context {
    /// The first address and the size of the allocation that holds `bytes` bytes at `at`.
    ///
    /// # Errors
    /// The bytes span several allocations, or other processes cannot open the allocation; the
    /// driver failed.
    pub(crate) fn shareable(
        &self,
        at: *mut u8,
        bytes: usize,
    ) -> Result<(*mut u8, usize), DeviceError> {
        let driver = self.bind()?;
        let from = at.expose_provenance();
        let mut base = 0;
        let mut size = 0usize;
        // SAFETY: writes an address and a number; accepts any address.
        unsafe {
            call!(
                driver,
                cuMemGetAddressRange_v2(&raw mut base, &raw mut size, from as sys::CUdeviceptr)
            )
        }?;
        let first = address("cuMemGetAddressRange", base)?;
        let refused = |message: String| {
            Err(DeviceError::Driver {
                call: "shareable",
                message,
            })
        };
        if from
            .checked_add(bytes)
            .is_none_or(|end| end > first.addr().get() + size)
        {
            return refused(format!(
                "{bytes} bytes span more than one allocation (the first has {size}), as in a pool of pages"
            ));
        }
        let mut handle = 0;
        // SAFETY: writes one handle; accepts any address.
        if unsafe {
            call!(
                driver,
                cuMemRetainAllocationHandle(&raw mut handle, first.as_ptr().cast())
            )
        }
        .is_err()
        {
            return refused("the memory has no shareable handle, as memory of cuMemAlloc".into());
        }
        let mut properties = MaybeUninit::<PageProperties>::zeroed();
        let call = "cuMemGetAllocationPropertiesFromHandle";
        let get = driver.table.cuMemGetAllocationPropertiesFromHandle;
        // SAFETY: writes the properties, which have the headers' layout; the handle is retained.
        let code = unsafe { get(properties.as_mut_ptr().cast(), handle) };
        // SAFETY: retained above, released once.
        unsafe { (driver.table.cuMemRelease)(handle) };
        driver.check(call, code)?;
        // SAFETY: zeroed, so initialized. Other fields may have values unknown to this struct and
        // are not read.
        if unsafe { PageProperties::handles(properties.as_ptr()) } & (DESCRIPTOR | FABRIC) == 0 {
            return refused("the memory was created for this process alone".into());
        }
        Ok((first.as_ptr(), size))
    }
}
