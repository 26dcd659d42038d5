//! Muon for the matrices of hidden layers.

use std::collections::HashSet;
use std::sync::Arc;

use candle_core::{Result, bail};
use zero_alloc::host::HostDevice;
use zero_kernels::Muon;
use zero_optim::framework::Builder;
use zero_optim::{GroupRules, Matrix};

use crate::hooks::Param;

/// Muon for matrices of hidden layers, beside AdamW for all other parameters.
#[derive(Clone, Debug)]
pub struct ZeroMuon {
    /// The rule.
    pub rule: Muon,
    /// Its learning rate, as a factor of AdamW's.
    pub lr_scale: f64,
    /// Whether a parameter is of a hidden layer, by its name: those of two dimensions have Muon.
    /// The last layer should keep AdamW.
    pub is_hidden: fn(&str) -> bool,
    /// The matrices of a parameter, by its name and as one matrix: split what is fused, such as
    /// queries, keys and values ([`Matrix::split`]).
    pub split: fn(&str, Matrix) -> Vec<Matrix>,
}

impl ZeroMuon {
    /// The default rule, with AdamW's learning rate and nothing fused.
    pub fn new(is_hidden: fn(&str) -> bool) -> Self {
        Self {
            rule: Muon::default(),
            lr_scale: 1.0,
            is_hidden,
            split: |_, whole| vec![whole],
        }
    }

    /// Sets the rule for the matrices in `params`.
    pub(crate) fn set(
        self,
        builder: Builder<HostDevice>,
        params: &[Param],
    ) -> Result<Builder<HostDevice>> {
        let Self {
            rule,
            lr_scale,
            is_hidden,
            split,
        } = self;
        let hidden = params
            .iter()
            .filter(|param| param.tensor.rank() == 2 && is_hidden(&param.name));
        let hidden: Vec<&Param> = hidden.collect();
        if let Some(Param { name, .. }) = hidden.iter().find(|param| param.is_embedding) {
            bail!(
                "Muon is for matrices of hidden layers, and {name} is an embedding: let \
                 ZeroMuon::is_hidden reject it, so that AdamW updates it"
            );
        }
        if hidden.is_empty() {
            bail!(
                "Muon would update nothing: ZeroMuon::is_hidden accepts no parameter of two \
                 dimensions; the names are such as {}",
                params.last().map_or("", |param| &param.name)
            );
        }

        let names: HashSet<String> = hidden.iter().map(|param| param.name.clone()).collect();
        let others = GroupRules::default();
        let of_muon = others.lr_scale(lr_scale);
        Ok(builder
            .groups([others, of_muon], move |name| {
                usize::from(names.contains(name))
            })
            .group_rule(1, Arc::new(rule))
            .matrices(move |name, shape| match *shape {
                [outputs, inputs] => split(name, Matrix::linear(outputs as usize, inputs as usize)),
                _ => Vec::new(),
            }))
    }
}
