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

/// The storages of gathered units.
pub(crate) struct Storages {
    take: Py<PyAny>,
    give: Py<PyAny>,
    device: DeviceId,
}

impl Storages {
    pub(crate) fn new(take: Py<PyAny>, give: Py<PyAny>, device: DeviceId) -> Self {
        Self { take, give, device }
    }
}

/// A storage in use.
struct Storage {
    give: Py<PyAny>,
    unit: usize,
}

impl Drop for Storage {
    fn drop(&mut self) {
        // An error of Python's would be one of the interpreter that ends.
        Python::try_attach(|py| drop(self.give.call1(py, (self.unit,))));
    }
}

// SAFETY: `take` makes a storage of these bytes, which torch reads only while its unit is whole, and
// which `give` empties. On a GPU torch allocates it for the stream that is current, the engine's.
unsafe impl CallerMemory for Storages {
    fn allocate(
        &mut self,
        unit: usize,
        elems: usize,
        dtype: DType,
    ) -> Result<(AnySlice, Box<dyn Any + Send + Sync>), PrefetchError> {
        let bytes = elems * dtype.size_bytes();
        let taken = Python::attach(|py| {
            let at: usize = self.take.call1(py, (unit, bytes))?.extract(py)?;
            let give = self.give.clone_ref(py);
            Ok::<_, PyErr>((at, Storage { give, unit }))
        });
        let (at, storage) = taken.map_err(|error| no_memory(unit, &error))?;
        Ok((slice(at, elems, dtype, self.device), Box::new(storage)))
    }
}

/// Tensors of torch, for sums of gradients.
pub(crate) struct Tensors {
    /// `allocate(bytes)` returns a tensor and its address.
    allocate: Py<PyAny>,
    device: DeviceId,
}

impl Tensors {
    pub(crate) fn new(allocate: Py<PyAny>, device: DeviceId) -> Self {
        Self { allocate, device }
    }
}

// SAFETY: a tensor of these bytes, which its owner keeps, and which torch does not use; on a GPU in
// the order of the engine's stream, as above.
unsafe impl CallerMemory for Tensors {
    fn allocate(
        &mut self,
        unit: usize,
        elems: usize,
        dtype: DType,
    ) -> Result<(AnySlice, Box<dyn Any + Send + Sync>), PrefetchError> {
        let bytes = elems * dtype.size_bytes();
        let made = Python::attach(|py| self.allocate.call1(py, (bytes,))?.extract(py));
        let (tensor, at): (Py<PyAny>, usize) = made.map_err(|error| no_memory(unit, &error))?;
        Ok((
            slice(at, elems, dtype, self.device),
            Box::new(Owner::new(tensor)),
        ))
    }
}

fn no_memory(unit: usize, error: &PyErr) -> PrefetchError {
    PrefetchError::Memory {
        unit,
        message: error.to_string(),
    }
}

fn slice(at: usize, elems: usize, dtype: DType, device: DeviceId) -> AnySlice {
    // SAFETY: the callers' promise to `CallerMemory`.
    unsafe { AnySlice::from_raw_parts(at as *mut u8, elems, dtype, device) }
}
