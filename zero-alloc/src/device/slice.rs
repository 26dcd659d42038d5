//! Non-owning views of device memory.
//!
//! Making a slice is the only unsafe step: the maker promises that, for as long as any copy of the
//! slice or any operation enqueued with it is used, the memory stays valid and conflicting accesses
//! are ordered by streams and events. Passing slices on is then safe, as with a kernel launch. A
//! slice carries the [`DeviceId`] of its memory, and every operation refuses slices of memory that
//! it cannot access.

use std::marker::PhantomData;
use std::ops::Range;

use super::{DType, DeviceError, DeviceId, Element, same_len, watch};

/// A typed view of `len` elements of device memory. `Copy`, and owns nothing.
pub struct DeviceSlice<T> {
    ptr: *mut T,
    len: usize,
    device: DeviceId,
    _elements: PhantomData<T>,
}

// SAFETY: a slice is an address and a length; its maker promised that accesses through it are
// ordered.
unsafe impl<T: Send> Send for DeviceSlice<T> {}
// SAFETY: as above; `&DeviceSlice` allows no more than a copy of it.
unsafe impl<T: Send> Sync for DeviceSlice<T> {}

impl<T> Clone for DeviceSlice<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for DeviceSlice<T> {}

impl<T> std::fmt::Debug for DeviceSlice<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceSlice({:p}; {})", self.ptr, self.len)
    }
}

impl<T> DeviceSlice<T> {
    /// A view of `len` elements at `ptr`, in memory with the id `device`:
    /// [`Memory::id`](super::Memory::id) of the memory that allocated it; for a framework's
    /// pointers, of the device that accesses them.
    ///
    /// # Safety
    /// `ptr` is aligned for `T` and valid for reads and writes of `len` elements by the operations
    /// of `device` (null is fine for 0), for as long as any copy of the slice or operation enqueued
    /// with it is used, also by a graph; conflicting accesses to it are ordered by streams and
    /// events. Host memory is initialised, with values of `T`.
    pub const unsafe fn from_raw_parts(ptr: *mut T, len: usize, device: DeviceId) -> Self {
        Self {
            ptr,
            len,
            device,
            _elements: PhantomData,
        }
    }

    /// The number of elements.
    pub const fn len(self) -> usize {
        self.len
    }

    /// Whether the slice has no elements.
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The address of the first element, on the device.
    pub const fn as_ptr(self) -> *mut T {
        self.ptr
    }

    /// The id of its memory.
    pub const fn device(self) -> DeviceId {
        self.device
    }

    /// The elements of `range`.
    ///
    /// # Panics
    /// `range` is not within the slice, as with a Rust slice.
    pub fn slice(self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "range {range:?} of a slice of {}",
            self.len
        );
        Self {
            ptr: self.ptr.wrapping_add(range.start),
            len: range.end - range.start,
            ..self
        }
    }

    /// The elements as a Rust slice; for host memory only.
    ///
    /// # Safety
    /// The memory is the host's, initialised, and nothing writes to it while the result lives.
    pub unsafe fn as_host<'a>(self) -> &'a [T] {
        if self.len == 0 {
            return &[];
        }
        watch::touch(self.ptr.addr(), self.len * size_of::<T>(), false);
        // SAFETY: valid and aligned by the promise of `from_raw_parts`, unwritten by the caller's.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }

    /// The elements as a mutable Rust slice; for host memory only.
    ///
    /// # Safety
    /// The memory is the host's, initialised (the blocks of a pool of host memory are), and nothing
    /// else accesses it while the result lives.
    pub unsafe fn as_host_mut<'a>(self) -> &'a mut [T] {
        if self.len == 0 {
            return &mut [];
        }
        watch::touch(self.ptr.addr(), self.len * size_of::<T>(), true);
        // SAFETY: valid and aligned by the promise of `from_raw_parts`, exclusive by the caller's.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}

impl<T: Element> DeviceSlice<T> {
    /// The same view with its dtype known at run time.
    pub fn erase(self) -> AnySlice {
        AnySlice {
            ptr: self.ptr.cast(),
            len: self.len,
            dtype: T::DTYPE,
            device: self.device,
        }
    }
}

/// A view of `len` elements whose dtype is known at run time. `Copy`, and owns nothing.
#[derive(Clone, Copy)]
pub struct AnySlice {
    ptr: *mut u8,
    len: usize,
    device: DeviceId,
    dtype: DType,
}

// The id is in what would be padding otherwise.
#[cfg(target_pointer_width = "64")]
const _: () = assert!(size_of::<AnySlice>() == 24);

// SAFETY: as for `DeviceSlice`.
unsafe impl Send for AnySlice {}
// SAFETY: as for `DeviceSlice`.
unsafe impl Sync for AnySlice {}

impl std::fmt::Debug for AnySlice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AnySlice({:p}; {} x {})", self.ptr, self.len, self.dtype)
    }
}

impl AnySlice {
    /// A view of `len` elements of `dtype` at `ptr`, in memory with the id `device`; see
    /// [`DeviceSlice::from_raw_parts`].
    ///
    /// # Safety
    /// As for [`DeviceSlice::from_raw_parts`].
    pub const unsafe fn from_raw_parts(
        ptr: *mut u8,
        len: usize,
        dtype: DType,
        device: DeviceId,
    ) -> Self {
        Self {
            ptr,
            len,
            device,
            dtype,
        }
    }

    /// The number of elements.
    pub const fn len(self) -> usize {
        self.len
    }

    /// Whether the slice has no elements.
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The size in bytes.
    pub const fn len_bytes(self) -> usize {
        self.len * self.dtype.size_bytes()
    }

    /// The type of the elements.
    pub const fn dtype(self) -> DType {
        self.dtype
    }

    /// The address of the first element, on the device.
    pub const fn as_ptr(self) -> *mut u8 {
        self.ptr
    }

    /// The id of its memory.
    pub const fn device(self) -> DeviceId {
        self.device
    }

    /// Checks that operations of the device with the id `device` can access the slice; every back
    /// end calls this before it enqueues the operation `what`. An empty slice is never accessed.
    ///
    /// # Errors
    /// [`DeviceError::AnotherDevice`].
    #[inline]
    pub fn check_device(self, what: &'static str, device: DeviceId) -> Result<(), DeviceError> {
        if device.accesses(self.device) || self.len == 0 {
            return Ok(());
        }
        Err(DeviceError::AnotherDevice {
            what,
            expected: device,
            got: self.device,
        })
    }

    /// The elements of `range`.
    ///
    /// # Panics
    /// `range` is not within the slice, as with a Rust slice.
    pub fn slice(self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "range {range:?} of a slice of {}",
            self.len
        );
        let ptr = self.ptr.wrapping_add(range.start * self.dtype.size_bytes());
        Self {
            ptr,
            len: range.end - range.start,
            ..self
        }
    }

    /// The same memory as bytes.
    pub const fn bytes(self) -> Self {
        Self {
            len: self.len_bytes(),
            dtype: DType::U8,
            ..self
        }
    }

    /// Reports to the seeded scheduler that the running operation reads (or, if `write`, writes)
    /// these elements: for operations that use the address instead of [`DeviceSlice::as_host`].
    pub fn note_access(self, write: bool) {
        watch::touch(self.ptr.addr(), self.len_bytes(), write);
    }

    /// The same view with its element type known at compile time.
    ///
    /// # Errors
    /// The elements are of another dtype.
    pub fn typed<T: Element>(self) -> Result<DeviceSlice<T>, DeviceError> {
        if self.dtype == T::DTYPE {
            Ok(DeviceSlice {
                ptr: self.ptr.cast(),
                len: self.len,
                device: self.device,
                _elements: PhantomData,
            })
        } else {
            Err(DeviceError::DTypeMismatch {
                expected: T::DTYPE,
                got: self.dtype,
            })
        }
    }
}

/// Checks the two sides of a copy on a device, except for their devices.
pub(crate) fn check_copy(src: AnySlice, dst: AnySlice) -> Result<(), DeviceError> {
    same_len("copy", src.len, dst.len)?;
    if src.dtype != dst.dtype {
        return Err(DeviceError::DTypeMismatch {
            expected: src.dtype,
            got: dst.dtype,
        });
    }
    if (src.ptr as usize).abs_diff(dst.ptr as usize) < src.len_bytes() {
        return Err(DeviceError::Overlap {
            bytes: src.len_bytes(),
        });
    }
    Ok(())
}
