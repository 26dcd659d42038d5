//! A device with its context.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ffi::{CStr, c_int};
use std::ptr::NonNull;

use cudarc::driver::sys;
use parking_lot::Mutex;

use super::Driver;
use super::words::Words;
use crate::device::{DeviceError, DeviceId, DeviceKind};

/// The id of the memory of this context: equal for all handles of one context. A context that the
/// driver creates at the address of a destroyed one gets the same id; slices of the destroyed one
/// are invalid by their makers' promise.
fn id_of(raw: sys::CUcontext) -> Result<DeviceId, DeviceError> {
    static IDS: Mutex<BTreeMap<usize, DeviceId>> = Mutex::new(BTreeMap::new());
    Ok(match IDS.lock().entry(raw.addr()) {
        Entry::Occupied(known) => *known.get(),
        Entry::Vacant(new) => *new.insert(DeviceId::new(DeviceKind::Cuda)?),
    })
}

/// An unused event.
pub(super) struct Spare(pub(super) sys::CUevent);

// SAFETY: any thread may use any handle.
unsafe impl Send for Spare {}

/// An unused buffer of pinned host memory.
pub(super) struct SpareBuffer(pub(super) NonNull<u8>);

// SAFETY: any thread may use the memory; it has one owner.
unsafe impl Send for SpareBuffer {}

/// A device and a context on it.
pub(crate) struct Context {
    driver: &'static Driver,
    raw: sys::CUcontext,
    id: DeviceId,
    pub(super) device: sys::CUdevice,
    /// True for the primary context, which this retains; false for a foreign context, which
    /// outlives this.
    retained: bool,
    /// Unused events, without and with timing.
    pub(super) spare: [Mutex<Vec<Spare>>; 2],
    /// Freed with the context: freeing pinned memory may wait for the whole device, so that a host
    /// thread which drops a device while work is pending would stall.
    pub(super) spare_buffers: Mutex<Vec<SpareBuffer>>,
    /// `None` if streams of the device cannot wait for words.
    pub(super) words: Option<Words>,
}

// SAFETY: any thread may use any handle.
unsafe impl Send for Context {}
// SAFETY: as above; the driver synchronizes its own state.
unsafe impl Sync for Context {}

impl Context {
    /// The primary context of the device with this ordinal.
    pub(crate) fn primary(ordinal: usize) -> Result<Self, DeviceError> {
        let driver = Driver::started()?;
        let mut device = 0;
        let mut raw = std::ptr::null_mut();
        let ordinal = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: writes one number.
        unsafe { call!(driver, cuDeviceGet(&raw mut device, ordinal)) }?;
        // SAFETY: writes one handle; the device is the driver's.
        unsafe { call!(driver, cuDevicePrimaryCtxRetain(&raw mut raw, device)) }?;
        let mut context = Self::new(driver, raw, device, true)?;
        context.words = Words::new(&context)?;
        Ok(context)
    }

    /// A context of a framework.
    ///
    /// # Safety
    /// `raw` is a context that outlives the result.
    pub(crate) unsafe fn foreign(raw: sys::CUcontext) -> Result<Self, DeviceError> {
        let driver = Driver::started()?;
        let mut context = Self::new(driver, raw, 0, false)?;
        context.bind()?;
        // SAFETY: writes one number.
        unsafe { call!(driver, cuCtxGetDevice(&raw mut context.device)) }?;
        context.words = Words::new(&context)?;
        Ok(context)
    }

    fn new(
        driver: &'static Driver,
        raw: sys::CUcontext,
        device: sys::CUdevice,
        retained: bool,
    ) -> Result<Self, DeviceError> {
        let (spare, spare_buffers) = Default::default();
        Ok(Self {
            driver,
            raw,
            id: id_of(raw)?,
            device,
            retained,
            spare,
            spare_buffers,
            words: None,
        })
    }

    pub(crate) fn raw(&self) -> sys::CUcontext {
        self.raw
    }

    /// The id of its memory.
    pub(crate) fn id(&self) -> DeviceId {
        self.id
    }

    /// The index of the device among the driver's.
    pub(crate) fn ordinal(&self) -> usize {
        usize::try_from(self.device).unwrap_or(0)
    }

    /// Makes the context current on this thread.
    pub(crate) fn bind(&self) -> Result<&'static Driver, DeviceError> {
        // SAFETY: the context lives as long as `self`.
        unsafe { call!(self.driver, cuCtxSetCurrent(self.raw)) }?;
        Ok(self.driver)
    }

    pub(crate) fn name(&self) -> Result<String, DeviceError> {
        let mut name = [0u8; 256];
        let text = name.as_mut_ptr().cast();
        let len = name.len() as c_int;
        // SAFETY: writes a C string of at most `len` bytes.
        unsafe { call!(self.driver, cuDeviceGetName(text, len, self.device)) }?;
        Ok(CStr::from_bytes_until_nul(&name)
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned())
    }

    pub(crate) fn attribute(&self, which: sys::CUdevice_attribute) -> Result<u32, DeviceError> {
        let mut value = 0;
        // SAFETY: writes one number.
        unsafe {
            call!(
                self.driver,
                cuDeviceGetAttribute(&raw mut value, which, self.device)
            )
        }?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    /// Whether the device has a capability.
    pub(crate) fn has(&self, which: sys::CUdevice_attribute) -> Result<bool, DeviceError> {
        Ok(self.attribute(which)? == 1)
    }

    /// Waits until everything in the context has run, also in destroyed streams. Has no limit.
    pub(crate) fn synchronize(&self) -> Result<(), DeviceError> {
        let driver = self.bind()?;
        // SAFETY: the context is current.
        unsafe { call!(driver, cuCtxSynchronize()) }
    }

    /// Runs `f` while this thread may make calls that other threads' recordings of graphs refuse in
    /// CUDA's global mode, such as mapping memory.
    pub(crate) fn with_relaxed_captures<R>(&self, f: impl FnOnce() -> R) -> Result<R, DeviceError> {
        let driver = self.bind()?;
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: exchanges the mode of this thread, one of the three values of the enum.
        unsafe { call!(driver, cuThreadExchangeStreamCaptureMode(&raw mut mode)) }?;
        let result = f();
        // SAFETY: as above; restores the thread's mode, which the first exchange returned.
        unsafe { call!(driver, cuThreadExchangeStreamCaptureMode(&raw mut mode)) }?;
        Ok(result)
    }

    /// Free and total bytes of the device.
    pub(crate) fn memory_bytes(&self) -> Result<(usize, usize), DeviceError> {
        let driver = self.bind()?;
        let mut free = 0;
        let mut total = 0;
        // SAFETY: writes two numbers.
        unsafe { call!(driver, cuMemGetInfo_v2(&raw mut free, &raw mut total)) }?;
        Ok((free, total))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // Failures are ignored: the driver frees everything when the process ends.
        let _ = self.bind();
        for spare in self
            .spare
            .iter_mut()
            .flat_map(|spare| spare.get_mut().drain(..))
        {
            // SAFETY: an event of this context without another user.
            unsafe { (self.driver.table.cuEventDestroy_v2)(spare.0) };
        }

        for buffer in self.spare_buffers.get_mut().drain(..) {
            // SAFETY: allocated by `take_buffer`, and its last user has returned it.
            unsafe { (self.driver.table.cuMemFreeHost)(buffer.0.as_ptr().cast()) };
        }

        if let Some(page) = self.words.as_mut().and_then(Words::page) {
            // SAFETY: allocated by `Words::new`; no stream waits for a word any more.
            unsafe { (self.driver.table.cuMemFreeHost)(page.as_ptr().cast()) };
        }

        if self.retained {
            // SAFETY: retained once by `primary`; everything made in it is dropped, since it keeps
            // this alive.
            unsafe { (self.driver.table.cuDevicePrimaryCtxRelease_v2)(self.device) };
        }
    }
}
