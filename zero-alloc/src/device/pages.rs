//! Virtual memory: addresses and pages apart, for back ends that have it.

use std::fmt::Debug;
use std::ptr::NonNull;

use super::DeviceError;

/// A page of a device's memory, named by its back end. It is mapped at any number of addresses at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Page(pub u64);

/// Ranges of addresses, pages, and the mapping between the two. Contents belong to pages: a page that is mapped at
/// two addresses shows the same bytes at both.
///
/// # Safety
/// What `reserve` gives is in no other range of this process, what `create` gives is in no other's hands, and mapped
/// pages can be used as [`Memory`](super::Memory)'s backings can.
pub unsafe trait VirtualMemory: Debug + Send + Sync {
    /// The size of a page; a power of two.
    fn page_bytes(&self) -> usize;

    /// Sets `bytes` of addresses aside, whole pages, with nothing behind them.
    ///
    /// # Errors
    /// There is no such range left.
    fn reserve(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError>;

    /// Gives addresses back.
    ///
    /// # Safety
    /// `base` came from `reserve(bytes)`, nothing is mapped there any more, and it is given back once.
    unsafe fn release(&self, base: NonNull<u8>, bytes: usize);

    /// Takes one page from the device.
    ///
    /// # Errors
    /// The device has none left.
    fn create(&self) -> Result<Page, DeviceError>;

    /// Gives a page back.
    ///
    /// # Safety
    /// It came from `create`, is mapped nowhere any more, and is given back once.
    unsafe fn destroy(&self, page: Page);

    /// Maps pages one behind the other from `at`, for reading and writing. Where it fails, none of them stays mapped.
    ///
    /// # Errors
    /// The device refused.
    ///
    /// # Safety
    /// The addresses are within one reserved range, aligned to pages, with nothing mapped there; the pages live.
    unsafe fn map(&self, at: NonNull<u8>, pages: &[Page]) -> Result<(), DeviceError>;

    /// Takes the mapping of `pages` pages at `at` away.
    ///
    /// # Safety
    /// They are mapped there, and no operation uses those addresses any more.
    unsafe fn unmap(&self, at: NonNull<u8>, pages: usize);
}
