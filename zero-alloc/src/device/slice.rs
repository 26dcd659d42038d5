//! Non-owning views of device memory.
//!
//! Making a slice is the only unsafe step: the maker promises that, for as long as any copy of the slice or any
//! operation enqueued with it is used, the memory stays valid and conflicting accesses are ordered by streams and
//! events. Passing slices on is then safe, as with a kernel launch.

use std::marker::PhantomData;
use std::ops::Range;

use super::{DType, DeviceError, Element, same_len, watch};

/// A typed view of `len` elements of device memory. `Copy`, and owns nothing.
pub struct DeviceSlice<T> {
    ptr: *mut T,
    len: usize,
    _elements: PhantomData<T>,
}

// SAFETY: a slice is an address and a length; its maker promised that accesses through it are ordered.
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
    /// A view of `len` elements at `ptr`.
    ///
    /// # Safety
    /// `ptr` is aligned for `T` and valid for reads and writes of `len` elements (null is fine for 0), for
    /// as long as any copy of the slice or operation enqueued with it is used; conflicting accesses to
    /// it are ordered by streams and events.
    pub const unsafe fn from_raw_parts(ptr: *mut T, len: usize) -> Self {
        Self { ptr, len, _elements: PhantomData }
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

    /// The elements of `range`.
    ///
    /// # Panics
    /// `range` is not within the slice, as with a Rust slice.
    pub fn slice(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "range {range:?} of a slice of {}", self.len);
        Self { ptr: self.ptr.wrapping_add(range.start), len: range.end - range.start, _elements: PhantomData }
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
    /// The memory is the host's, initialised, and nothing else accesses it while the result lives.
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
        AnySlice { ptr: self.ptr.cast(), len: self.len, dtype: T::DTYPE }
    }
}

/// A view of `len` elements whose dtype is known at run time. `Copy`, and owns nothing.
#[derive(Clone, Copy)]
pub struct AnySlice {
    ptr: *mut u8,
    len: usize,
    dtype: DType,
}

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
    /// A view of `len` elements of `dtype` at `ptr`.
    ///
    /// # Safety
    /// As for [`DeviceSlice::from_raw_parts`].
    pub const unsafe fn from_raw_parts(ptr: *mut u8, len: usize, dtype: DType) -> Self {
        Self { ptr, len, dtype }
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

    /// The elements of `range`.
    ///
    /// # Panics
    /// `range` is not within the slice, as with a Rust slice.
    pub fn slice(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "range {range:?} of a slice of {}", self.len);
        let ptr = self.ptr.wrapping_add(range.start * self.dtype.size_bytes());
        Self { ptr, len: range.end - range.start, dtype: self.dtype }
    }

    /// The same memory as bytes.
    pub const fn bytes(self) -> Self {
        Self { ptr: self.ptr, len: self.len_bytes(), dtype: DType::U8 }
    }

    /// Reports to the seeded scheduler that the running operation reads (or, if `write`, writes) these elements: for
    /// operations that use the address instead of [`DeviceSlice::as_host`].
    pub fn note_access(self, write: bool) {
        watch::touch(self.ptr.addr(), self.len_bytes(), write);
    }

    /// The same view with its element type known at compile time.
    ///
    /// # Errors
    /// The elements are of another dtype.
    pub fn typed<T: Element>(self) -> Result<DeviceSlice<T>, DeviceError> {
        if self.dtype == T::DTYPE {
            Ok(DeviceSlice { ptr: self.ptr.cast(), len: self.len, _elements: PhantomData })
        } else {
            Err(DeviceError::DTypeMismatch { expected: T::DTYPE, got: self.dtype })
        }
    }
}

/// Checks the two sides of a copy on a device.
pub(crate) fn check_copy(src: AnySlice, dst: AnySlice) -> Result<(), DeviceError> {
    same_len("copy", src.len, dst.len)?;
    if src.dtype != dst.dtype {
        return Err(DeviceError::DTypeMismatch { expected: src.dtype, got: dst.dtype });
    }
    if (src.ptr as usize).abs_diff(dst.ptr as usize) < src.len_bytes() {
        return Err(DeviceError::Overlap { bytes: src.len_bytes() });
    }
    Ok(())
}
