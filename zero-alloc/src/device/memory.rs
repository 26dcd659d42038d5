//! The contract of a device's memory.

use std::fmt::Debug;
use std::ptr::NonNull;

use super::{DeviceError, DeviceId, VirtualMemory};

/// The source of **backings**, the large allocations that a pool divides into blocks.
///
/// # Safety
/// `allocate` returns `bytes` bytes, aligned to `granularity_bytes`, with no other owner until they
/// are deallocated. This device's copies and its streams' operations can read and write them; host
/// code can only if they are host memory, which is initialised (to any bytes). `id` never changes,
/// and operations of devices with this id can access the bytes; it is [`DeviceId::HOST`] or
/// [`DeviceId::PINNED`] only if host code can too.
///
/// Why initialised: safe code can then have the memory as `&mut [T]` in place of `MaybeUninit`. A
/// closure that leaves elements out is sound, and `copy_from_slice` is all that it needs.
pub unsafe trait Memory: Debug + Send + Sync {
    /// The id of the memory that `allocate` returns and `virtual_memory` maps.
    fn id(&self) -> DeviceId;

    /// Allocates `bytes` bytes, aligned to [`Memory::granularity_bytes`]; contents are undefined.
    ///
    /// # Errors
    /// The device is out of memory, or the call failed.
    fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError>;

    /// Frees a backing.
    ///
    /// # Safety
    /// `ptr` came from `allocate(bytes)` of this memory, is freed once, and no enqueued operation
    /// uses it any more.
    unsafe fn deallocate(&self, ptr: NonNull<u8>, bytes: usize);

    /// The alignment of every backing; a power of two, at least 64.
    fn granularity_bytes(&self) -> usize;

    /// Virtual memory, if the device has it; pools then use pages instead of backings.
    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        None
    }
}
