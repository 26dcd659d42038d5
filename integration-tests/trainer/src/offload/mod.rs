//! State, parameters and gradients in host memory and on NVMe.

pub(crate) mod host_optimizer;
pub(crate) mod host_params;
pub(crate) mod settings;
pub(crate) mod unit_file;
