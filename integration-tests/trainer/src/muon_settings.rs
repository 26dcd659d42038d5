//! Muon for matrices: its settings, and the tensors that have it.

use zero_kernels::Muon;
use zero_optim::{GroupRule, Matrix};
use zero_shard::ParamPlacement;

use crate::error::TrainError;

/// Returns the matrices in a tensor, by its name, its shape and [`MuonSettings::head_elems`]: those
/// of blocks' linear layers. None in embeddings, the head, norms and biases.
pub type MatricesOf = fn(&str, &[u64], Option<usize>) -> Vec<Matrix>;

/// Muon in a run.
#[derive(Clone, Copy, Debug)]
pub struct MuonSettings {
    /// Whether tensors with matrices have it, unless their group has another rule. If not, those of
    /// groups with it have.
    pub by_default: bool,
    /// The rule.
    pub rule: Muon,
    /// Its learning rate, in place of the optimizer's, with the same schedule.
    pub lr: Option<f64>,
    /// Outputs of an attention head, if those of queries, keys and values are a matrix for each
    /// head.
    pub head_elems: Option<usize>,
    /// The matrices of the model's tensors.
    pub matrices_of: MatricesOf,
}

impl MuonSettings {
    /// Muon in groups that name it.
    pub fn new(matrices_of: MatricesOf) -> Self {
        Self {
            by_default: false,
            rule: Muon::default(),
            lr: None,
            head_elems: None,
            matrices_of,
        }
    }

    /// The matrices in a tensor, by its name and shape.
    pub(crate) fn matrices(&self, name: &str, shape: &[u64]) -> Vec<Matrix> {
        (self.matrices_of)(name, shape, self.head_elems)
    }

    /// Whether a tensor has Muon; `group` is the rule that its group names.
    ///
    /// # Errors
    /// Its group names Muon, and it has no matrices.
    pub(crate) fn updates(
        &self,
        param: &ParamPlacement,
        group: Option<GroupRule>,
    ) -> Result<bool, TrainError> {
        let has_matrices = !self.matrices(&param.name, &param.shape).is_empty();
        match group {
            None => Ok(self.by_default && has_matrices),
            Some(GroupRule::Muon) if has_matrices => Ok(true),
            Some(GroupRule::Muon) => Err(TrainError::Usage(format!(
                "param_groups: Muon is for matrices of linear layers in blocks, and {} of shape {:?} is none: give its \
                 group \"optimizer\": \"adamw\", or narrow the group",
                param.name, param.shape
            ))),
            Some(_) => Ok(false),
        }
    }

    /// The factor of the learning rate, whose base is `lr`.
    pub(crate) fn lr_scale(&self, lr: f64) -> f64 {
        match self.lr {
            Some(own) if lr > 0.0 => own / lr,
            _ => 1.0,
        }
    }
}
