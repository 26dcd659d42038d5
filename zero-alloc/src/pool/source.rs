//! The source of a pool's memory: backings, or pages in one range of addresses.

use std::ops::Range;
use std::ptr::NonNull;

use super::backings::Backings;
use crate::device::{Device, DeviceError, Page, VirtualMemory};

/// Address space reserved for a pool without a budget.
const MAX_ADDRESS_BYTES: usize = 1 << 40;

/// One range of addresses, with pages mapped to its low part.
pub(super) struct Arena {
    base: NonNull<u8>,
    address_bytes: usize,
    page_bytes: usize,
    pages: Vec<Page>,
    grows: u64,
}

// SAFETY: the arena owns its addresses and pages; neither is tied to a thread.
unsafe impl Send for Arena {}

impl Arena {
    /// Reserves addresses for `budget_bytes`.
    pub(super) fn new(
        memory: &dyn VirtualMemory,
        budget_bytes: usize,
    ) -> Result<Self, DeviceError> {
        let page_bytes = memory.page_bytes();
        let address_bytes = budget_bytes
            .min(MAX_ADDRESS_BYTES)
            .next_multiple_of(page_bytes)
            .max(page_bytes);
        let base = memory.reserve(address_bytes)?;
        Ok(Self {
            base,
            address_bytes,
            page_bytes,
            pages: Vec::new(),
            grows: 0,
        })
    }

    pub(super) fn address_bytes(&self) -> usize {
        self.address_bytes
    }

    /// Maps pages to the next `bytes`, a multiple of the page size; on failure none stays mapped.
    /// An out-of-memory error reports all of `bytes` as requested, though pages are created one by
    /// one.
    pub(super) fn grow(
        &mut self,
        memory: &dyn VirtualMemory,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        self.grows += 1;
        let at = self.pages.len();
        let mut failure = None;
        for _ in 0..bytes / self.page_bytes {
            match memory.create() {
                Ok(page) => self.pages.push(page),
                Err(DeviceError::OutOfMemory { detail, .. }) => {
                    let created = (self.pages.len() - at) * self.page_bytes;
                    let detail = format!("{created} of {bytes} bytes could be created: {detail}");
                    failure = Some(DeviceError::OutOfMemory {
                        requested_bytes: bytes,
                        detail,
                    });
                    break;
                }
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            }
        }

        if failure.is_none() {
            let start = address(self.base, at * self.page_bytes);
            // SAFETY: within the reserved range (the planner's limit), above everything mapped so
            // far; the pages are new.
            failure = unsafe { memory.map(start, &self.pages[at..]) }.err();
        }

        match failure {
            None => Ok(()),
            Some(error) => {
                for page in self.pages.drain(at..) {
                    // SAFETY: created above, and mapped nowhere.
                    unsafe { memory.destroy(page) };
                }
                Err(error)
            }
        }
    }

    /// Unmaps and destroys the last `bytes`, a multiple of the page size.
    ///
    /// # Safety
    /// No operation uses them any more, and they are mapped nowhere else.
    pub(super) unsafe fn shrink(&mut self, memory: &dyn VirtualMemory, bytes: usize) {
        let kept = self.pages.len() - bytes / self.page_bytes;
        let start = address(self.base, kept * self.page_bytes);
        // SAFETY: mapped by `grow`; unused by the caller's promise.
        unsafe { memory.unmap(start, self.pages.len() - kept) };
        for page in self.pages.drain(kept..) {
            // SAFETY: created by `grow`, unmapped now.
            unsafe { memory.destroy(page) };
        }
    }

    /// The pages of a range of offsets, which starts and ends at pages.
    pub(super) fn pages(&self, offsets: Range<u64>) -> &[Page] {
        let page = self.page_bytes as u64;
        &self.pages[(offsets.start / page) as usize..(offsets.end / page) as usize]
    }

    /// Unmaps and destroys everything.
    ///
    /// # Safety
    /// No operation uses the memory any more, and no page is mapped elsewhere.
    unsafe fn release(self, memory: &dyn VirtualMemory) {
        // SAFETY: mapped by `grow`; unused by the caller's promise.
        unsafe { memory.unmap(self.base, self.pages.len()) };
        for page in self.pages {
            // SAFETY: created by `grow`, unmapped now.
            unsafe { memory.destroy(page) };
        }
        // SAFETY: reserved by `new`, with nothing mapped any more.
        unsafe { memory.release(self.base, self.address_bytes) };
    }
}

fn address(base: NonNull<u8>, offset: usize) -> NonNull<u8> {
    NonNull::new(base.as_ptr().wrapping_add(offset)).unwrap_or(base)
}

/// The memory from which blocks are cut.
pub(super) enum Source {
    /// Large allocations, each a segment of the offset space.
    Backings(Backings),
    /// Pages in one range of addresses.
    Arena(Arena),
}

impl Source {
    /// The address of an offset.
    pub(super) fn address(&self, offset: u64) -> *mut u8 {
        match self {
            Self::Backings(backings) => backings.address(offset),
            Self::Arena(arena) => arena.base.as_ptr().wrapping_add(offset as usize),
        }
    }

    /// Bytes reserved from the device.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Backings(backings) => backings.bytes(),
            Self::Arena(arena) => arena.pages.len() * arena.page_bytes,
        }
    }

    /// The number of requests for more memory.
    pub(super) fn allocations(&self) -> u64 {
        match self {
            Self::Backings(backings) => backings.allocations(),
            Self::Arena(arena) => arena.grows,
        }
    }

    /// Returns everything to the device.
    ///
    /// # Safety
    /// No operation uses the memory any more, and no page is mapped elsewhere.
    pub(super) unsafe fn release(self, device: &impl Device) {
        match self {
            // SAFETY: the caller's promise.
            Self::Backings(backings) => unsafe { backings.release(device) },
            Self::Arena(arena) => {
                if let Some(memory) = device.virtual_memory() {
                    // SAFETY: the caller's promise.
                    unsafe { arena.release(memory) };
                }
            }
        }
    }
}
