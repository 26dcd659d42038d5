//! Memory that torch owns.

use std::any::Any;

use pyo3::prelude::*;
use zero_alloc::device::{AnySlice, DType, DeviceId};
use zero_comm::{CallerMemory, PrefetchError};

/// An object that keeps memory. Its drop takes Python's lock, unless the interpreter has ended.
pub(crate) struct Owner(Option<Py<PyAny>>);

impl Owner {
    pub(crate) fn new(object: Py<PyAny>) -> Self {
        Self(Some(object))
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let object = self.0.take();
        if Python::try_attach(|_| ()).is_some() {
            Python::try_attach(move |_| drop(object));
        } else {
            // Nobody frees it any more.
            std::mem::forget(object);
        }
    }
}

/// Tensors of torch, for what belongs to a unit.
pub(crate) struct Tensors {
    /// `allocate(unit, bytes)` returns the owner of memory, and its address.
    allocate: Py<PyAny>,
    device: DeviceId,
}

impl Tensors {
    pub(crate) fn new(allocate: Py<PyAny>, device: DeviceId) -> Self {
        Self { allocate, device }
    }
}

// SAFETY: the memory of a tensor or a storage of these bytes, which its owner keeps. Of a gathered
// unit torch reads it while the unit is whole, else not at all; on a GPU torch allocates it for the
// stream that is current, the engine's.
unsafe impl CallerMemory for Tensors {
    fn allocate(
        &mut self,
        unit: usize,
        elems: usize,
        dtype: DType,
    ) -> Result<(AnySlice, Box<dyn Any + Send + Sync>), PrefetchError> {
        let bytes = elems * dtype.size_bytes();
        let made = Python::attach(|py| self.allocate.call1(py, (unit, bytes))?.extract(py));
        let (owner, at): (Py<PyAny>, usize) =
            made.map_err(|error: PyErr| PrefetchError::Memory {
                unit,
                message: error.to_string(),
            })?;
        // SAFETY: as above.
        let slice = unsafe { AnySlice::from_raw_parts(at as *mut u8, elems, dtype, self.device) };
        Ok((slice, Box::new(Owner::new(owner))))
    }
}
