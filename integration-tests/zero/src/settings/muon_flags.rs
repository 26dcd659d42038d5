//! The choice of optimizer, and Muon's settings.

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use zero_config::DsMuon;
use zero_kernels::{MatrixScale, Muon};
use zero_trainer::{MuonSettings, Settings};

use crate::flags::parse_whole;

/// The optimizer.
#[derive(Args, Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MuonArgs {
    /// Optimizer: muon updates the matrices of blocks, and AdamW all else. A group of param_groups
    /// in --config may have its own [default: adamw]
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub optimizer: Option<OptimizerChoice>,
    /// Learning rate of Muon, with the schedule of --lr [default: --lr]
    #[arg(long, value_name = "X")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub muon_lr: Option<f64>,
    /// Momentum of Muon [default: 0.95]
    #[arg(long, value_name = "X")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub muon_momentum: Option<f64>,
    /// Factor of Muon's updates by the shape of a matrix [default: original]
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub muon_adjust: Option<MuonAdjust>,
    /// Newton-Schulz steps of Muon [default: 5]
    #[arg(long, value_name = "N", value_parser = parse_whole::<u32>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ns_steps: Option<u32>,
    /// Orthogonalise queries, keys and values of each attention head alone, not of all heads
    /// [default: false]
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub muon_heads: Option<bool>,
}

/// An optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerChoice {
    /// Adam with decoupled weight decay.
    Adamw,
    /// Adam with weight decay in the gradient.
    Adam,
    /// Orthogonalised momentum for matrices, AdamW for the rest.
    Muon,
}

/// Factors of updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MuonAdjust {
    /// The root of outputs / inputs, at least 1.
    Original,
    /// 0.2 times the root of the longer side: about the size of AdamW's updates, so that its
    /// learning rate fits.
    #[value(name = "match_rms_adamw")]
    MatchRmsAdamw,
}

impl MuonArgs {
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// A flag of Muon that was given.
    pub(crate) fn flag(&self) -> Option<&'static str> {
        let given = [
            ("--muon-lr", self.muon_lr.is_some()),
            ("--muon-momentum", self.muon_momentum.is_some()),
            ("--muon-adjust", self.muon_adjust.is_some()),
            ("--ns-steps", self.ns_steps.is_some()),
            ("--muon-heads", self.muon_heads.is_some()),
        ];
        let mut given = given.into_iter().filter(|(_, is_given)| *is_given);
        given.next().map(|(flag, _)| flag)
    }

    /// The record of settings.
    pub(crate) fn of(settings: &Settings) -> Self {
        let MuonSettings {
            by_default,
            rule,
            lr,
            head_elems,
            ..
        } = &settings.muon;
        if !settings.names_muon() {
            return Self::default();
        }
        Self {
            optimizer: by_default.then_some(OptimizerChoice::Muon),
            muon_lr: *lr,
            muon_momentum: Some(rule.momentum),
            muon_adjust: Some(match rule.adjust {
                MatrixScale::MatchRmsAdamw => MuonAdjust::MatchRmsAdamw,
                _ => MuonAdjust::Original,
            }),
            ns_steps: Some(rule.ns_steps),
            muon_heads: head_elems.map(|_| true),
        }
    }

    /// Muon in a run whose weight decay is `weight_decay`, of a model whose heads have `head_elems`
    /// each.
    pub(crate) fn settings(&self, weight_decay: f64, head_elems: Option<usize>) -> MuonSettings {
        let own = Muon::default();
        let rule = Muon {
            weight_decay,
            momentum: self.muon_momentum.unwrap_or(own.momentum),
            ns_steps: self.ns_steps.unwrap_or(own.ns_steps),
            adjust: match self.muon_adjust {
                Some(MuonAdjust::MatchRmsAdamw) => MatrixScale::MatchRmsAdamw,
                Some(MuonAdjust::Original) | None => MatrixScale::Original,
            },
            ..own
        };
        MuonSettings {
            by_default: self.optimizer == Some(OptimizerChoice::Muon),
            lr: self.muon_lr,
            head_elems: head_elems.filter(|_| self.muon_heads == Some(true)),
            rule,
            ..MuonSettings::new(zero_models::matrices_of)
        }
    }

    /// Those of a configuration file.
    pub(crate) fn of_file(muon: &DsMuon) -> Self {
        Self {
            optimizer: Some(OptimizerChoice::Muon),
            muon_lr: muon.lr,
            muon_momentum: muon.momentum,
            muon_adjust: None,
            ns_steps: muon.ns_steps,
            muon_heads: None,
        }
    }
}

/// Muon's settings as text.
pub(crate) fn describe(muon: &MuonSettings) -> String {
    let Muon {
        momentum,
        weight_decay,
        ns_steps,
        adjust,
        ..
    } = muon.rule;
    let lr = match muon.lr {
        Some(lr) => format!("learning rate {lr}, "),
        None => String::new(),
    };
    let adjust = match adjust {
        MatrixScale::MatchRmsAdamw => "match_rms_adamw",
        _ => "original",
    };
    let heads = match muon.head_elems {
        Some(_) => ", each head alone",
        None => "",
    };
    format!(
        "{lr}momentum {momentum}, weight decay {weight_decay}, {ns_steps} steps, {adjust}{heads}"
    )
}
