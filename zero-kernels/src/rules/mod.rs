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

/// Every rule with CUDA kernels, with any hyperparameters, and the last phase of those that have
/// phases.
#[cfg(feature = "cuda")]
pub(crate) fn with_kernels() -> Vec<Arc<dyn UpdateRule>> {
    let mut rules: Vec<Arc<dyn UpdateRule>> = vec![
        Arc::new(adam::AdamHyper::default()),
        Arc::new(muon::Muon::default()),
    ];
    let last: Vec<_> = rules.iter().filter_map(|rule| rule.matrix_rule()).collect();
    rules.extend(last.into_iter().map(|matrices| matrices.apply));
    rules
}
