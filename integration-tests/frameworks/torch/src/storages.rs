//! Memory that torch owns.

use std::any::Any;

use pyo3::prelude::*;
use zero_alloc::device::{AnySlice, DType, DeviceId};
use zero_comm::{GatherMemory, PrefetchError};

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
}

impl Storages {
    pub(crate) fn new(take: Py<PyAny>, give: Py<PyAny>) -> Self {
        Self { take, give }
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
// which `give` empties.
unsafe impl GatherMemory for Storages {
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
        let (at, storage) = taken.map_err(|error| PrefetchError::Memory {
            unit,
            message: error.to_string(),
        })?;
        // SAFETY: as above.
        let slice =
            unsafe { AnySlice::from_raw_parts(at as *mut u8, elems, dtype, DeviceId::HOST) };
        Ok((slice, Box::new(storage)))
    }
}
