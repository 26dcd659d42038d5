//! Quantised communication: parameters and gradients that travel in blocks of 8 or 4 bits.

use std::fmt;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use zero_config::ZeroOptimization;
use zero_shard::BlockFormat;
use zero_trainer::Settings;

use crate::flags::parse_whole;

/// Quantised communication.
#[derive(Args, Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct QuantiseArgs {
    /// Send parameters in 8 bits where they are gathered (qwZ of ZeRO++): at stage 3 before each
    /// use, at stages 1 and 2 after the update. Masters stay exact; the numbers change slightly,
    /// and alike at all stages. --metrics has the error, and its bound [default: none]
    #[arg(long, value_name = "none|int8", value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantize_params: Option<ParamBits>,
    /// Send gradients in 8 or 4 bits (qgZ of ZeRO++), summed in fp32: the first format within a
    /// machine or a group, the second, by default the same, between them [default: none]
    #[arg(long, value_name = "none|int8|int4[,int8|int4]")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantize_grads: Option<GradBits>,
    /// Keep the matrices of frozen blocks (param_groups with "trainable": false) in 4 or 8 bits,
    /// and send them so where stage 3 gathers them; they are decoded where a pass reads them.
    /// Embeddings, norms and biases stay as they are [default: none]
    #[arg(long, value_name = "none|nf4|int8", value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantize_frozen: Option<FrozenBits>,
    /// Add what rounding left out of a gradient to the next one (LoCo): 4 bytes a parameter on each
    /// rank, and between machines 4 bytes for its machine's part of them; kept in checkpoints
    /// [default: false]
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_feedback: Option<bool>,
    /// With --error-feedback: the part of the earlier error that stays in the new one, LoCo's
    /// err_beta [default: 0]
    #[arg(long, value_name = "X", value_parser = parse_keep)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_feedback_beta: Option<f32>,
    /// With --error-feedback: set the errors to zero every N steps, LoCo's reset_T; 0 never does
    /// [default: 0]
    #[arg(long, value_name = "N", value_parser = parse_whole::<u64>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_feedback_reset: Option<u64>,
}

/// The format of gathered parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ParamBits {
    /// As they are.
    None,
    /// 8 bits.
    Int8,
}

/// The format of frozen matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FrozenBits {
    /// As they are.
    None,
    /// NormalFloat of 4 bits, in blocks of 64.
    Nf4,
    /// 8 bits, in blocks of 256.
    Int8,
}

impl FrozenBits {
    pub(crate) fn format(self) -> Option<BlockFormat> {
        match self {
            Self::None => None,
            Self::Nf4 => Some(BlockFormat::Nf4),
            Self::Int8 => Some(BlockFormat::Int8),
        }
    }
}

/// The formats of gradients, within a machine and between machines; `None`: as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct GradBits(pub(crate) Option<[BlockFormat; 2]>);

impl GradBits {
    /// DeepSpeed's `zero_quantized_gradients`.
    const DEEPSPEED: Self = Self(Some([BlockFormat::Int8, BlockFormat::Int4]));
}

impl FromStr for GradBits {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let format = |name: &str| match name.trim() {
            "int8" => Ok(BlockFormat::Int8),
            "int4" => Ok(BlockFormat::Int4),
            _ => Err("expected none, or one or two of int8 and int4 with a comma".to_owned()),
        };
        match text.split_once(',') {
            None if text == "none" => Ok(Self(None)),
            None => format(text).map(|both| Self(Some([both; 2]))),
            Some((within, between)) => Ok(Self(Some([format(within)?, format(between)?]))),
        }
    }
}

impl fmt::Display for GradBits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |format| match format {
            BlockFormat::Int8 => "int8",
            _ => "int4",
        };
        match self.0 {
            None => f.write_str("none"),
            Some([within, between]) if within == between => f.write_str(name(within)),
            Some([within, between]) => write!(f, "{},{}", name(within), name(between)),
        }
    }
}

impl TryFrom<String> for GradBits {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<GradBits> for String {
    fn from(bits: GradBits) -> Self {
        bits.to_string()
    }
}

fn parse_keep(text: &str) -> Result<f32, String> {
    let parsed = text.parse().ok().filter(|x| (0.0..1.0).contains(x));
    parsed.ok_or_else(|| "expected at least 0 and below 1".to_owned())
}

impl QuantiseArgs {
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// The record of settings.
    pub(crate) fn of(settings: &Settings) -> Self {
        let grads = settings.quantised_grads;
        let feedback = grads.and_then(|grads| grads.feedback);
        Self {
            quantize_params: settings.gather_codec.map(|_| ParamBits::Int8),
            quantize_grads: grads.map(|grads| GradBits(Some([grads.within, grads.between]))),
            quantize_frozen: settings.quantised_frozen.map(|format| match format {
                BlockFormat::Int8 => FrozenBits::Int8,
                _ => FrozenBits::Nf4,
            }),
            error_feedback: feedback.map(|_| true),
            error_feedback_beta: feedback.map(|feedback| feedback.keep),
            error_feedback_reset: feedback.and_then(|feedback| feedback.reset_every),
        }
    }

    /// Those of a configuration file.
    pub(crate) fn of_file(zero: &ZeroOptimization) -> Self {
        let loco = zero.loco.filter(|_| zero.quantized_gradients);
        Self {
            quantize_params: zero.quantized_weights.then_some(ParamBits::Int8),
            quantize_grads: zero.quantized_gradients.then_some(GradBits::DEEPSPEED),
            quantize_frozen: zero.quantized_frozen.then_some(FrozenBits::Int8),
            error_feedback: loco.map(|_| true),
            error_feedback_beta: loco.map(|loco| loco.err_beta as f32),
            error_feedback_reset: loco.map(|loco| loco.reset_steps),
        }
    }
}
