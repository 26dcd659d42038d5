//! State, parameters and gradients in host memory and on NVMe.

mod drain;
pub(crate) mod host_optimizer;
pub(crate) mod host_params;
pub(crate) mod leaving_sums;
pub(crate) mod offloaded_optimizer;
pub(crate) mod settings;
mod unit_file;
