//! The reference trainer.

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
