//! Virtual memory of a device: address ranges, and pages that are mapped into them.

use std::fmt::Debug;
use std::ptr::NonNull;

use super::DeviceError;

/// A page of a device's memory, as a number that the back end assigns. It can be mapped at several
/// addresses at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Page(pub u64);

/// Address ranges, pages, and mappings. Contents belong to pages: a page that is mapped at two
/// addresses shows the same bytes at both.
///
/// # Safety
/// Ranges returned by `reserve` overlap no other range of the process, pages returned by `create`
/// have no other owner, and mapped pages can be used as backings of [`Memory`](super::Memory) can.
pub unsafe trait VirtualMemory: Debug + Send + Sync {
    /// The size of a page in bytes; a power of two.
    fn page_bytes(&self) -> usize;

    /// Reserves `bytes` of addresses, a multiple of the page size, with no memory mapped.
    ///
    /// # Errors
    /// No free range of this size is left.
    fn reserve(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError>;

    /// Frees an address range.
    ///
    /// # Safety
    /// `base` came from `reserve(bytes)`, nothing is mapped there, and it is freed once.
    unsafe fn release(&self, base: NonNull<u8>, bytes: usize);

    /// Allocates one page.
    ///
    /// # Errors
    /// The device is out of memory.
    fn create(&self) -> Result<Page, DeviceError>;

    /// Frees a page.
    ///
    /// # Safety
    /// It came from `create`, is mapped nowhere, and is freed once.
    unsafe fn destroy(&self, page: Page);

    /// Maps pages consecutively from `at`, for reading and writing. On failure none of them stays
    /// mapped.
    ///
    /// # Errors
    /// The device refused the mapping.
    ///
    /// # Safety
    /// The addresses are within one reserved range, aligned to pages, with nothing mapped there;
    /// the pages are live.
    unsafe fn map(&self, at: NonNull<u8>, pages: &[Page]) -> Result<(), DeviceError>;

    /// Unmaps `pages` pages at `at`.
    ///
    /// # Safety
    /// They are mapped there, and no operation uses those addresses any more.
    unsafe fn unmap(&self, at: NonNull<u8>, pages: usize);
}
