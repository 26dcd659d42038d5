//! The reference trainer of ZeRO stages 0 to 3, and the commands of the binary `zero`.

pub mod cli;
pub mod config;
pub mod cuda;
pub mod data;
pub mod error;
pub mod hf;
pub mod launcher;
pub mod model;
pub mod ops;
pub mod random;
pub mod trainer;
pub mod workload;
