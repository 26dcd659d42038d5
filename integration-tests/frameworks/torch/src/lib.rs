//! The native part of the Python package `zero_torch`: [`zero_optim::framework`] by names, addresses
//! and numbers.
//!
//! Calls run without Python's lock, since the threads of the streams may call back. Memory is
//! torch's: gradients with the tensor as their owner, and at stage 3 the storages that units are
//! gathered into, which torch makes and empties when a unit is used and released.

mod config;
mod connect;
mod detached;
mod membership;
mod rank_engine;
mod torch_memory;
mod transport;

use std::fmt::Display;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

fn failed(error: impl Display) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(config::read_config, module)?)?;
    module.add_function(wrap_pyfunction!(membership::has_several_machines, module)?)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<membership::World>()?;
    module.add_class::<rank_engine::Engine>()
}
