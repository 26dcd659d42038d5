//! Devices, each with one primary context, and the current context of a thread.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use crate::error::{Failure, Outcome, describe, say};
use crate::settings::settings;
use stand_in_shared::{fresh_number, lock};

/// A device. Its primary context, with the handle `context`, exists while it is retained.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) ordinal: u32,
    pub(crate) context: usize,
    used_bytes: AtomicU64,
    retained: Mutex<u32>,
    /// The code that every call returns after an operation failed; 0 before that.
    failed: AtomicU32,
    /// Whether a test uses the default streams.
    default_streams: AtomicBool,
}

static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();

/// `cuInit`: creates the devices.
pub(crate) fn init() {
    DEVICES.get_or_init(|| (0..settings().devices).map(Device::new).collect());
}

pub(crate) fn all() -> Outcome<&'static [Device]> {
    DEVICES
        .get()
        .map(Vec::as_slice)
        .ok_or(Failure::NotInitialized)
}

/// The device with this ordinal.
pub(crate) fn device(ordinal: i32) -> Outcome<&'static Device> {
    all()?
        .get(usize::try_from(ordinal).unwrap_or(usize::MAX))
        .ok_or(Failure::InvalidDevice)
}

impl Device {
    fn new(ordinal: u32) -> Self {
        let used_bytes = AtomicU64::new(0);
        let failed = AtomicU32::new(0);
        Self {
            ordinal,
            context: fresh_number(),
            used_bytes,
            retained: Mutex::new(0),
            failed,
            default_streams: AtomicBool::new(false),
        }
    }

    pub(crate) fn total_bytes(&self) -> u64 {
        settings().memory_bytes
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        self.total_bytes()
            .saturating_sub(self.used_bytes.load(Ordering::Relaxed))
    }

    /// Counts memory as used until the charge is dropped; `OutOfMemory` if less is free.
    pub(crate) fn charge(&'static self, bytes: u64) -> Outcome<Charge> {
        let charged = self
            .used_bytes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                used.checked_add(bytes)
                    .filter(|&sum| sum <= self.total_bytes())
            });
        charged
            .map(|_| Charge {
                device: self,
                bytes,
            })
            .map_err(|_| Failure::OutOfMemory)
    }

    /// Counts memory as free again after [`Charge::keep`].
    pub(crate) fn uncharge(&self, bytes: u64) {
        self.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Records that an operation failed. Every later call that uses the context returns this
    /// failure.
    pub(crate) fn fail(&self, failure: Failure, what: &str) {
        let first = self
            .failed
            .compare_exchange(0, failure as u32, Ordering::AcqRel, Ordering::Acquire)
            .is_ok();
        if first {
            let name = describe(failure as u32).map_or("", |(name, _)| name.trim_end_matches('\0'));
            say!(
                "device {}: {name}: {what}; the context is unusable from here on",
                self.ordinal
            );
        }
    }

    /// The failure of an earlier operation, if there was one.
    pub(crate) fn check(&self) -> Outcome {
        Failure::from_code(self.failed.load(Ordering::Acquire)).map_or(Ok(()), Err)
    }

    /// Accepts the default streams from now on, as streams that are ordered by events only: CUDA
    /// orders them against blocking streams, too.
    pub(crate) fn accept_default_streams(&self) {
        self.default_streams.store(true, Ordering::Relaxed);
    }

    pub(crate) fn accepts_default_streams(&self) -> bool {
        self.default_streams.load(Ordering::Relaxed)
    }

    pub(crate) fn retain(&self) {
        *lock(&self.retained) += 1;
    }

    pub(crate) fn is_retained(&self) -> bool {
        *lock(&self.retained) > 0
    }

    /// Releases one retention. Returns whether it was the last.
    pub(crate) fn release(&self) -> Outcome<bool> {
        let mut retained = lock(&self.retained);
        *retained = retained.checked_sub(1).ok_or(Failure::InvalidContext)?;
        Ok(*retained == 0)
    }

    /// Clears the failure, as for a new context.
    pub(crate) fn forget_failure(&self) {
        self.failed.store(0, Ordering::Release);
    }
}

/// Memory of a device that is in use.
#[derive(Debug)]
pub(crate) struct Charge {
    device: &'static Device,
    bytes: u64,
}

impl Charge {
    /// Keeps the bytes charged until [`Device::uncharge`].
    pub(crate) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.device.uncharge(self.bytes);
    }
}

thread_local! {
    /// The context stack of this thread, the current one last; 0 is no context.
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Calls `work` with the thread's context stack.
pub(crate) fn with_stack<T>(work: impl FnOnce(&mut Vec<usize>) -> T) -> T {
    CURRENT.with(|stack| work(&mut stack.borrow_mut()))
}

/// The device whose context has this handle.
pub(crate) fn of_context(context: usize) -> Outcome<&'static Device> {
    all()?
        .iter()
        .find(|d| d.context == context && d.is_retained())
        .ok_or(Failure::InvalidContext)
}

/// The device whose context is current on this thread, even if it failed.
pub(crate) fn current_even_failed() -> Outcome<&'static Device> {
    all()?;
    let top = with_stack(|stack| stack.last().copied().unwrap_or(0));
    of_context(top)
}

/// The device whose context is current on this thread, or the failure of the context.
pub(crate) fn current() -> Outcome<&'static Device> {
    let device = current_even_failed()?;
    device.check().map(|()| device)
}
