//! The stages: one algorithm a file, and what they share.

pub(crate) mod device_optimizer;
pub(crate) mod device_sums;
pub(crate) mod frozen;
pub(crate) mod grad_errors;
pub(crate) mod gradients;
pub(crate) mod optimizer;
pub(crate) mod optimizer_choice;
pub(crate) mod places;
pub(crate) mod rank_matrices;
pub(crate) mod shards;
pub(crate) mod stage;
pub(crate) mod stage3;
pub(crate) mod stages_0_to_2;
pub(crate) mod storage;
pub(crate) mod whole_params;
