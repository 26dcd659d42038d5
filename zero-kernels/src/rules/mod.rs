//! The update rules of this crate, a folder each: the rule, its function on the host and its
//! kernels.
//!
//! A rule that is only for the host may be in any crate ([`UpdateRule`]).

pub mod adam;
pub mod muon;

#[cfg(feature = "cuda")]
use std::sync::Arc;

#[cfg(feature = "cuda")]
use crate::rule::UpdateRule;

/// Every rule with CUDA kernels, with any hyperparameters.
#[cfg(feature = "cuda")]
pub(crate) fn with_kernels() -> Vec<Arc<dyn UpdateRule>> {
    vec![Arc::new(adam::AdamHyper::default())]
}
