//! Checkpoints: what a run saves and restores, and the comparison of replicas before it.

pub(crate) mod replicas;
pub(crate) mod saver;
pub(crate) mod state;
