//! The shape of a GPT-2 model: presets, validation, and its parameters by unit.
//!
//! Names and shapes are Hugging Face's (`transformer.h.0.attn.c_attn.weight` is
//! `[n_embd, 3 * n_embd]`, input dimension first), so that the tensors of a Hugging Face folder map
//! one to one. The vocabulary of the GPT-2 presets has Hugging Face's 50257 tokens and is not
//! padded (llm.c pads to 50304 for speed), so every row of a checkpoint's embedding belongs to a
//! token.
//!
//! ```
//! use zero_models::ModelConfig;
//!
//! let config = ModelConfig::preset("gpt2-124m").unwrap();
//! assert_eq!(config.parameter_count(), 124_439_808);
//! assert_eq!(config.units().len(), 1 + config.layers() + 1);
//! ```

use serde_json::Value;
use zero_trainer::ModelError;

use crate::config::init::Rule;
use crate::config::{
    ConfigError, check_deviation, check_divides, check_dropout, check_positive, check_sizes,
};
use crate::decoder::config::{Biases, DecoderConfig, Dropouts, Names};
use crate::lora::LoraConfig;
use crate::ops::activation::Activation;
use crate::ops::attention;
use crate::ops::linear::MatrixOrder;
use crate::ops::mlp::Mlp;
use crate::ops::norm::NormKind;

/// The shape of a GPT-2 model.
#[derive(Clone, Debug, PartialEq)]
pub struct GptConfig {
    /// Tokens of the vocabulary; rows of the embedding.
    pub vocab_size: usize,
    /// Longest sequence; rows of the position embedding.
    pub n_positions: usize,
    /// Width of the residual stream, C.
    pub n_embd: usize,
    /// Blocks.
    pub n_layer: usize,
    /// Attention heads a block; divides `n_embd`.
    pub n_head: usize,
    /// Width inside the MLP, F.
    pub n_inner: usize,
    /// Added to the variance in layer norm.
    pub layer_norm_epsilon: f32,
    /// Whether the head is the transposed embedding.
    pub tied_head: bool,
    /// Standard deviation of the initial weights.
    pub initializer_range: f32,
    /// The function of the MLP.
    pub activation: Activation,
    /// Probability with which training drops an element of what attention or the MLP adds to the
    /// residual stream.
    pub resid_pdrop: f32,
    /// The same of the embedding.
    pub embd_pdrop: f32,
    /// The same of attention's probabilities.
    pub attn_pdrop: f32,
    /// Whether attention's scores are divided by the square root of a head's width.
    pub scale_attn_weights: bool,
    /// Whether the scores of block i, from 0, are divided by i + 1, too.
    pub scale_attn_by_inverse_layer_idx: bool,
    /// Whether transformers computes the scores in fp32 in any case, as this crate always does.
    pub reorder_and_upcast_attn: bool,
    /// The keys of special tokens in `config.json`, such as `eos_token_id`, as they were read.
    pub special_tokens: Vec<(&'static str, Value)>,
    /// Adapters on the frozen model.
    pub lora: Option<LoraConfig>,
}

/// A token that marks the begin and the end of a text, as GPT-2's last one.
fn text_ends(token: usize) -> Vec<(&'static str, Value)> {
    ["bos_token_id", "eos_token_id"]
        .map(|key| (key, token.into()))
        .into()
}

impl GptConfig {
    /// A GPT-2 of this size, with OpenAI's vocabulary and positions.
    pub fn gpt2(n_embd: usize, n_layer: usize, n_head: usize) -> Self {
        Self {
            vocab_size: 50257,
            n_positions: 1024,
            n_embd,
            n_layer,
            n_head,
            n_inner: n_embd.saturating_mul(4),
            layer_norm_epsilon: 1e-5,
            tied_head: true,
            initializer_range: 0.02,
            activation: Activation::GeluNew,
            resid_pdrop: 0.0,
            embd_pdrop: 0.0,
            attn_pdrop: 0.0,
            scale_attn_weights: true,
            scale_attn_by_inverse_layer_idx: false,
            reorder_and_upcast_attn: false,
            special_tokens: text_ends(50256),
            lora: None,
        }
    }

    /// The preset of this name, if a GPT-2 has it.
    pub fn preset(name: &str) -> Option<Self> {
        let gpt2 = Self::gpt2;
        Some(match name {
            "nano" => Self {
                vocab_size: 256,
                n_positions: 256,
                // A byte that no UTF-8 text contains.
                special_tokens: text_ends(255),
                ..gpt2(128, 4, 4)
            },
            "gpt2-124m" => gpt2(768, 12, 12),
            "gpt2-350m" => gpt2(1024, 24, 16),
            "gpt2-774m" => gpt2(1280, 36, 20),
            "gpt2-1.5b" => gpt2(1600, 48, 25),
            _ => return None,
        })
    }

    /// Checks each size and the relations between them.
    ///
    /// # Errors
    /// The first invalid field.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("n_positions", self.n_positions),
            ("n_embd", self.n_embd),
            ("n_head", self.n_head),
            ("n_inner", self.n_inner),
        ];
        check_sizes(&sizes, ("n_layer", self.n_layer), || self.decoder().elems())?;
        check_divides(("n_embd", self.n_embd), ("n_head", self.n_head))?;
        check_positive("layer_norm_epsilon", self.layer_norm_epsilon)?;
        check_dropout("resid_pdrop", self.resid_pdrop)?;
        check_dropout("embd_pdrop", self.embd_pdrop)?;
        check_dropout("attn_pdrop", self.attn_pdrop)?;
        check_deviation("initializer_range", self.initializer_range)
    }

    /// The initial values of a parameter: weights are normal with standard deviation
    /// `initializer_range`; the two projections that end in the residual stream (`attn.c_proj`,
    /// `mlp.c_proj`) are smaller by `sqrt(2 * n_layer)`, so that the variance of the stream does
    /// not grow with depth (Radford et al. 2019, section 2.3). Biases are 0, gains 1.
    pub(crate) fn rule(&self, name: &str) -> Rule {
        if name.ends_with(".bias") {
            Rule::Constant(0.0)
        } else if name.contains(".ln_") {
            Rule::Constant(1.0)
        } else if name.ends_with(".c_proj.weight") {
            Rule::Normal(self.initializer_range / (2.0 * self.n_layer as f32).sqrt())
        } else {
            Rule::Normal(self.initializer_range)
        }
    }

    /// Checks that the kernels of GPUs compute the model.
    ///
    /// # Errors
    /// The first key that they do not follow.
    pub(crate) fn check_kernels(&self) -> Result<(), ModelError> {
        let key = match self {
            _ if self.activation != Activation::GeluNew => "activation_function",
            _ if !self.scale_attn_weights => "scale_attn_weights",
            _ if self.scale_attn_by_inverse_layer_idx => "scale_attn_by_inverse_layer_idx",
            _ => return Ok(()),
        };
        Err(ModelError::from(format!(
            "the model's {key} is computed on the CPU only so far: use --device cpu"
        )))
    }

    /// Width of one attention head.
    pub fn head_dim(&self) -> usize {
        self.n_embd / self.n_head.max(1)
    }

    /// The decoder of this shape.
    pub(crate) fn decoder(&self) -> DecoderConfig {
        DecoderConfig {
            vocab: self.vocab_size,
            width: self.n_embd,
            layers: self.n_layer,
            heads: self.n_head,
            kv_heads: self.n_head,
            head_dim: self.head_dim(),
            inner: self.n_inner,
            norm: NormKind::Layer,
            eps: self.layer_norm_epsilon,
            mlp: Mlp::Plain(self.activation),
            order: MatrixOrder::InputsFirst,
            biases: Biases {
                qkv: true,
                output: true,
                mlp: true,
            },
            positions: self.n_positions,
            scale: match self.scale_attn_weights {
                true => attention::scale_of(self.head_dim()),
                false => 1.0,
            },
            scale_by_layer: self.scale_attn_by_inverse_layer_idx,
            dropout: Dropouts {
                embedding: self.embd_pdrop,
                attention: self.attn_pdrop,
                residual: Some(self.resid_pdrop),
            },
            tied_head: self.tied_head,
            lora: self.lora.clone(),
            ..DecoderConfig::empty(&NAMES)
        }
    }
}

/// The names of GPT-2's parameters.
const NAMES: Names = Names {
    family: "GPT-2",
    prefix: "transformer.",
    tokens: "transformer.wte.weight",
    positions: "transformer.wpe.weight",
    block: "transformer.h.",
    norm: "transformer.ln_f",
    norm1: "ln_1",
    qkv: &["attn.c_attn"],
    qk_norm: ["", ""],
    output: "attn.c_proj",
    norm2: "ln_2",
    up: &["mlp.c_fc"],
    down: "mlp.c_proj",
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::MAX_LAYERS;

    #[test]
    fn each_wrong_shape_is_its_own_error() {
        let good = GptConfig::preset("nano").unwrap();
        let check = |change: fn(&mut GptConfig), expected: &str| {
            let mut config = good.clone();
            change(&mut config);
            let error = config.validate().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };

        check(|c| c.vocab_size = 0, "vocab_size is 0");
        check(|c| c.n_positions = 0, "n_positions is 0");
        check(|c| c.n_embd = 0, "n_embd is 0");
        check(|c| c.n_layer = 0, "n_layer is 0");
        check(|c| c.n_head = 0, "n_head is 0");
        check(|c| c.n_inner = 0, "n_inner is 0");
        let divisor = "n_embd 128 is not divisible by its n_head 3";
        check(|c| c.n_head = 3, divisor);
        let most = "n_layer is 65537; it must be 65536 at most";
        check(|c| c.n_layer = MAX_LAYERS + 1, most);
        check(|c| *c = GptConfig::gpt2(1 << 24, 1 << 16, 1), "too large");
        check(|c| c.layer_norm_epsilon = 0.0, "layer_norm_epsilon is 0");
        let nan = "layer_norm_epsilon is NaN";
        check(|c| c.layer_norm_epsilon = f32::NAN, nan);
        check(|c| c.initializer_range = -1.0, "initializer_range is -1");
    }
}
