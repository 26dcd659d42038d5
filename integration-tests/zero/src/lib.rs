//! The commands of the binary `zero`: training, planning and checkpoint tools.

pub mod cli;
pub mod config;
pub mod data;
pub mod launcher;
pub mod workload;
