//! Words of pinned memory by which the host lets streams go on.
//!
//! A word's life: unused; `WAITING` while a stream waits for it; `RELEASED` by the host; `PASSED`
//! by the stream, and so unused again. A word whose stream never gets there is not used again.

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys;
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use parking_lot::Mutex;

use super::{Context, Queue, non_null};
use crate::device::DeviceError;

const WAITING: u64 = 0;
const RELEASED: u64 = 1;
const PASSED: u64 = 2;
/// `CU_STREAM_WAIT_VALUE_GEQ`, and `CU_STREAM_WRITE_VALUE_DEFAULT`, which writes after all earlier
/// writes of the stream.
const DEFAULT: u32 = 0;

/// The waits at a time; further ones need another way. A page.
pub(crate) const WORDS: usize = 512;

struct State {
    unused: Vec<usize>,
    /// Those that streams may wait for, in the order of their use.
    used: VecDeque<usize>,
}

/// The words of a context.
pub(super) struct Words {
    page: NonNull<[AtomicU64; WORDS]>,
    state: Mutex<State>,
}

// SAFETY: the page has one owner, and any thread may use atomics.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    /// Returns `None` if streams of the device cannot wait for words.
    pub(super) fn new(context: &Context) -> Result<Option<Self>, DeviceError> {
        // Old drivers do not know the attribute.
        if !context
            .has(Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS)
            .unwrap_or(false)
        {
            return Ok(None);
        }
        let driver = context.bind()?;
        let mut page = std::ptr::null_mut();
        let bytes = size_of::<[AtomicU64; WORDS]>();
        // SAFETY: writes one address.
        unsafe { call_memory!(driver, bytes, cuMemHostAlloc(&raw mut page, bytes, 0)) }?;
        let page: NonNull<[AtomicU64; WORDS]> = non_null("cuMemHostAlloc", page.cast())?.cast();
        // SAFETY: allocated above with this size, in whole pages, and nothing uses it yet.
        unsafe { page.write([const { AtomicU64::new(PASSED) }; WORDS]) };
        let state = State {
            unused: (0..WORDS).collect(),
            used: VecDeque::new(),
        };

        Ok(Some(Self {
            page,
            state: Mutex::new(state),
        }))
    }

    fn word(&self, nth: usize) -> &AtomicU64 {
        // SAFETY: written by `new`, freed after the last use of `self`; the host and streams use
        // the words as atomics.
        let words = unsafe { self.page.as_ref() };
        &words[nth]
    }

    fn take(&self) -> Option<usize> {
        let mut state = self.state.lock();
        let State { unused, used } = &mut *state;
        if unused.is_empty() {
            used.retain(|&nth| {
                let waits = self.word(nth).load(Ordering::Acquire) != PASSED;
                if !waits {
                    unused.push(nth);
                }
                waits
            });
        }
        let nth = unused.pop()?;
        used.push_back(nth);
        self.word(nth).store(WAITING, Ordering::Relaxed);
        Some(nth)
    }

    /// The memory, for its release. `None` if a stream may still wait for a word.
    pub(super) fn page(&mut self) -> Option<NonNull<u8>> {
        let passed = |nth: &usize| self.word(*nth).load(Ordering::Acquire) == PASSED;
        self.state
            .lock()
            .used
            .iter()
            .all(passed)
            .then_some(self.page.cast())
    }
}

impl Context {
    /// A word to wait for. `None` if the device has no such waits or too many are pending.
    pub(crate) fn take_word(&self) -> Option<usize> {
        self.words.as_ref()?.take()
    }

    /// Lets the stream that waits for a word go on, after everything that the host wrote.
    pub(crate) fn release_word(&self, nth: usize) {
        if let Some(words) = &self.words {
            words.word(nth).store(RELEASED, Ordering::Release);
        }
    }
}

impl Queue {
    /// Makes later operations wait for the release of a word from [`Context::take_word`].
    pub(crate) fn wait_for_word(&self, nth: usize) -> Result<(), DeviceError> {
        let driver = self.context().bind()?;
        let Some(words) = &self.context().words else {
            let message = "the device has no waits for memory".to_owned();
            return Err(DeviceError::Driver {
                call: "cuStreamWaitValue64",
                message,
            });
        };

        // With unified addresses the device has pinned memory at the host's address.
        let at = words.word(nth).as_ptr().expose_provenance() as sys::CUdeviceptr;
        // SAFETY: the stream is live, and the word until the stream has passed it: the context
        // keeps it.
        unsafe {
            call!(
                driver,
                cuStreamWaitValue64_v2(self.raw(), at, RELEASED, DEFAULT)
            )
        }?;

        // SAFETY: as above; no other stream uses the word meanwhile.
        unsafe {
            call!(
                driver,
                cuStreamWriteValue64_v2(self.raw(), at, PASSED, DEFAULT)
            )
        }
    }
}
