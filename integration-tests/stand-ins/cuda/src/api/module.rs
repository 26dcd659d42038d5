//! Modules and launches.
use super::{Out, driver};
use crate::error::Failure;

driver! {
    cuModuleLoadData(module: Out<usize>, _image: usize) {
        module.put(0)?;
        Err(Failure::NotSupported)
    }
}
