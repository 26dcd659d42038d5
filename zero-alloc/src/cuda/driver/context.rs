//! A device with its context.

use std::ffi::{CStr, c_int};

use cudarc::driver::sys;
use parking_lot::Mutex;

use super::Driver;
use crate::device::DeviceError;

/// An event that waits to be used again.
pub(super) struct Spare(pub(super) sys::CUevent);

// SAFETY: any thread may use any handle.
unsafe impl Send for Spare {}

/// A device and a context on it.
pub(in super::super) struct Context {
    pub(super) driver: &'static Driver,
    pub(super) raw: sys::CUcontext,
    pub(super) device: sys::CUdevice,
    /// The primary context, retained by us; otherwise another's, which outlives this by its maker's promise.
    retained: bool,
    /// Events to use again, without and with timing.
    pub(super) spare: [Mutex<Vec<Spare>>; 2],
}

// SAFETY: any thread may use any handle.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks what it must.
unsafe impl Sync for Context {}

impl Context {
    /// The primary context of the device with this ordinal.
    pub(in super::super) fn primary(ordinal: usize) -> Result<Self, DeviceError> {
        let driver = Driver::get()?;
        driver.check("cuInit", driver.init)?;
        let mut device = 0;
        let ordinal = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: writes one number.
        driver.check("cuDeviceGet", unsafe { (driver.table.cuDeviceGet)(&raw mut device, ordinal) })?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle; the device is the driver's.
        let code = unsafe { (driver.table.cuDevicePrimaryCtxRetain)(&raw mut raw, device) };
        driver.check("cuDevicePrimaryCtxRetain", code)?;
        Ok(Self { driver, raw, device, retained: true, spare: Default::default() })
    }

    /// Another's context.
    ///
    /// # Safety
    /// `raw` is a context that outlives the result.
    pub(in super::super) unsafe fn foreign(raw: sys::CUcontext) -> Result<Self, DeviceError> {
        let driver = Driver::get()?;
        driver.check("cuInit", driver.init)?;
        let mut context = Self { driver, raw, device: 0, retained: false, spare: Default::default() };
        context.bind()?;
        let mut device = 0;
        // SAFETY: writes one number.
        driver.check("cuCtxGetDevice", unsafe { (driver.table.cuCtxGetDevice)(&raw mut device) })?;
        context.device = device;
        Ok(context)
    }

    /// The context that is current on this thread, null for none.
    pub(in super::super) fn current() -> Result<sys::CUcontext, DeviceError> {
        let driver = Driver::get()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        driver.check("cuCtxGetCurrent", unsafe { (driver.table.cuCtxGetCurrent)(&raw mut raw) })?;
        Ok(raw)
    }

    pub(in super::super) fn raw(&self) -> sys::CUcontext {
        self.raw
    }

    /// Which of the driver's devices this is.
    pub(in super::super) fn ordinal(&self) -> usize {
        usize::try_from(self.device).unwrap_or(0)
    }

    /// Makes the context current on this thread.
    pub(in super::super) fn bind(&self) -> Result<(), DeviceError> {
        // SAFETY: the context lives as long as this does.
        self.driver.check("cuCtxSetCurrent", unsafe { (self.driver.table.cuCtxSetCurrent)(self.raw) })
    }

    pub(in super::super) fn driver_version(&self) -> Result<(u32, u32), DeviceError> {
        self.driver.version()
    }

    pub(in super::super) fn name(&self) -> Result<String, DeviceError> {
        let mut name = [0u8; 256];
        let get = self.driver.table.cuDeviceGetName;
        // SAFETY: writes at most as many bytes as are there, with a zero behind the text.
        let code = unsafe { get(name.as_mut_ptr().cast(), name.len() as c_int, self.device) };
        self.driver.check("cuDeviceGetName", code)?;
        let text = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        Ok(text.to_string_lossy().into_owned())
    }

    pub(in super::super) fn attribute(&self, which: sys::CUdevice_attribute) -> Result<u32, DeviceError> {
        let mut value = 0;
        // SAFETY: writes one number.
        let code = unsafe { (self.driver.table.cuDeviceGetAttribute)(&raw mut value, which, self.device) };
        self.driver.check("cuDeviceGetAttribute", code)?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    /// Free and total bytes of the device.
    pub(in super::super) fn memory_bytes(&self) -> Result<(usize, usize), DeviceError> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers.
        let code = unsafe { (self.driver.table.cuMemGetInfo_v2)(&raw mut free, &raw mut total) };
        self.driver.check("cuMemGetInfo", code)?;
        Ok((free, total))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // Failures are let be: there is nobody to tell, and the driver cleans up behind a process.
        let _bound = self.bind();
        for spare in self.spare.iter_mut().flat_map(|spare| spare.get_mut().drain(..)) {
            // SAFETY: an event of ours that nothing else names.
            unsafe { (self.driver.table.cuEventDestroy_v2)(spare.0) };
        }
        if self.retained {
            // SAFETY: retained once by `primary`; all that was made in it is gone, since it holds this alive.
            unsafe { (self.driver.table.cuDevicePrimaryCtxRelease_v2)(self.device) };
        }
    }
}
