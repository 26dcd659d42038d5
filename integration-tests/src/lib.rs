//! The reference trainer.

pub mod model;
pub mod random;
