//! The reference trainer.

pub mod hf;
pub mod model;
pub mod random;
