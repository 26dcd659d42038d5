//! The reference trainer.
