//! The shape of a model of the Llama family: presets, validation, its parameters by unit.
//!
//! Names and shapes are Hugging Face's (`model.layers.0.self_attn.q_proj.weight` is
//! `[heads * head_dim, hidden]`, output dimension first). In a unit, matrices that one product reads
//! are neighbours: queries, keys and values; gate and up.

use serde_json::Value;

use crate::config::init::Rule;
use crate::config::rope::Rope;
use crate::config::{
    ConfigError, check_deviation, check_divides, check_dropout, check_positive, check_sizes,
};
use crate::decoder::config::{Biases, DecoderConfig, Dropouts, Names};
use crate::lora::LoraConfig;
use crate::ops::attention;
use crate::ops::linear::MatrixOrder;
use crate::ops::mlp::Mlp;
use crate::ops::norm::NormKind;

/// The architectures, by `model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// `llama`: versions 1 to 3.
    Llama,
    /// `mistral`: with a sliding window in all layers, or none.
    Mistral,
    /// `qwen2`: biases of queries, keys and values.
    Qwen2,
    /// `qwen3`: norms of queries and keys.
    Qwen3,
}

/// The shape of a model of the Llama family.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// The architecture.
    pub family: Family,
    /// Tokens of the vocabulary; rows of the embedding.
    pub vocab_size: usize,
    /// `max_position_embeddings`: the longest sequence, unless YaRN extends it.
    pub max_positions: usize,
    /// Width of the residual stream, C.
    pub hidden: usize,
    /// Blocks.
    pub layers: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys, and of values; divides `heads`.
    pub kv_heads: usize,
    /// Elements of a head; even.
    pub head_dim: usize,
    /// Width inside the MLP, F.
    pub intermediate: usize,
    /// Added to the mean square in RMS norm.
    pub rms_norm_eps: f32,
    /// The rotary embedding.
    pub rope: Rope,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether attention's output has a bias.
    pub output_bias: bool,
    /// Whether the MLP's matrices have biases.
    pub mlp_bias: bool,
    /// Keys that a query of the layers in `windowed` sees.
    pub window: Option<usize>,
    /// Whether each layer has the window; empty if `window` is `None`.
    pub windowed: Vec<bool>,
    /// Whether the head is the transposed embedding.
    pub tied_head: bool,
    /// Standard deviation of the initial weights.
    pub initializer_range: f32,
    /// Probability with which training drops one of attention's probabilities.
    pub attention_dropout: f32,
    /// The keys of special tokens in `config.json`, such as `eos_token_id`, as they were read.
    pub special_tokens: Vec<(&'static str, Value)>,
    /// Adapters on the frozen model.
    pub lora: Option<LoraConfig>,
}

impl LlamaConfig {
    /// Llama 2 with 7 billion parameters.
    pub fn llama2() -> Self {
        Self {
            family: Family::Llama,
            vocab_size: 32000,
            max_positions: 4096,
            hidden: 4096,
            layers: 32,
            heads: 32,
            kv_heads: 32,
            head_dim: 128,
            intermediate: 11008,
            rms_norm_eps: 1e-5,
            rope: Rope::new(10_000.0),
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            window: None,
            windowed: Vec::new(),
            tied_head: false,
            initializer_range: 0.02,
            attention_dropout: 0.0,
            special_tokens: Vec::new(),
            lora: None,
        }
    }

    /// The preset of this name, if the family has it.
    pub fn preset(name: &str) -> Option<Self> {
        let llama2 = Self::llama2();
        let llama3 = Self {
            vocab_size: 128_256,
            max_positions: 8192,
            kv_heads: 8,
            intermediate: 14336,
            rope: Rope::new(500_000.0),
            ..llama2.clone()
        };

        Some(match name {
            "llama2-7b" => llama2,
            "llama2-13b" => Self {
                hidden: 5120,
                layers: 40,
                heads: 40,
                kv_heads: 40,
                intermediate: 13824,
                ..llama2
            },
            "llama2-70b" => Self {
                hidden: 8192,
                layers: 80,
                heads: 64,
                kv_heads: 8,
                intermediate: 28672,
                ..llama2
            },
            "llama3-8b" => llama3,
            "llama3-70b" => Self {
                hidden: 8192,
                layers: 80,
                heads: 64,
                intermediate: 28672,
                ..llama3
            },
            "llama3.2-1b" => Self {
                max_positions: 131_072,
                hidden: 2048,
                layers: 16,
                head_dim: 64,
                intermediate: 8192,
                rope: Rope::new(500_000.0).llama3(32.0, 1.0, 4.0, 8192),
                tied_head: true,
                ..llama3
            },
            "smollm2-135m" => Self {
                vocab_size: 49152,
                max_positions: 8192,
                hidden: 576,
                layers: 30,
                heads: 9,
                kv_heads: 3,
                head_dim: 64,
                intermediate: 1536,
                rope: Rope::new(100_000.0),
                tied_head: true,
                initializer_range: 0.041_666_668,
                ..llama2
            },
            "qwen2.5-0.5b" => Self {
                family: Family::Qwen2,
                vocab_size: 151_936,
                max_positions: 32768,
                hidden: 896,
                layers: 24,
                heads: 14,
                kv_heads: 2,
                head_dim: 64,
                intermediate: 4864,
                rms_norm_eps: 1e-6,
                rope: Rope::new(1_000_000.0),
                qkv_bias: true,
                tied_head: true,
                ..llama2
            },
            _ => return None,
        })
    }

    /// Checks each size and the relations between them.
    ///
    /// # Errors
    /// The first invalid field.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let heads = ("num_attention_heads", self.heads);
        let kv_heads = ("num_key_value_heads", self.kv_heads);
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_positions),
            ("hidden_size", self.hidden),
            heads,
            kv_heads,
            ("head_dim", self.head_dim),
            ("intermediate_size", self.intermediate),
            ("sliding_window", self.window.unwrap_or(1).min(1)),
        ];
        check_sizes(&sizes, ("num_hidden_layers", self.layers), || {
            self.decoder().elems()
        })?;
        check_divides(heads, kv_heads)?;
        check_divides(("head_dim", self.head_dim), ("pairs of", 2))?;
        check_positive("rms_norm_eps", self.rms_norm_eps)?;
        self.rope.validate(self.head_dim)?;
        check_dropout("attention_dropout", self.attention_dropout)?;
        check_deviation("initializer_range", self.initializer_range)
    }

    /// The longest sequence.
    pub fn positions(&self) -> usize {
        self.rope.positions(self.max_positions)
    }

    /// The token whose embedding is 0 at the start and is not trained where it is looked up, as in
    /// transformers: `pad_token_id`.
    fn padding_token(&self) -> Option<usize> {
        let mut tokens = self.special_tokens.iter();
        let (_, token) = tokens.find(|(key, _)| *key == "pad_token_id")?;
        let token = token.as_i64()?;
        // Python's -1 is the last row.
        let token = if token < 0 {
            token + self.vocab_size as i64
        } else {
            token
        };
        usize::try_from(token)
            .ok()
            .filter(|&token| token < self.vocab_size)
    }

    /// The decoder of this shape.
    pub(crate) fn decoder(&self) -> DecoderConfig {
        DecoderConfig {
            vocab: self.vocab_size,
            width: self.hidden,
            layers: self.layers,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            inner: self.intermediate,
            norm: NormKind::Rms,
            eps: self.rms_norm_eps,
            mlp: Mlp::SwiGlu,
            order: MatrixOrder::OutputsFirst,
            biases: Biases {
                qkv: self.qkv_bias,
                output: self.output_bias,
                mlp: self.mlp_bias,
            },
            qk_norm: self.family == Family::Qwen3,
            rope: Some(self.rope),
            scale: attention::scale_of(self.head_dim),
            window: self.window,
            windowed: self.windowed.clone(),
            dropout: Dropouts {
                attention: self.attention_dropout,
                ..Dropouts::default()
            },
            tied_head: self.tied_head,
            padding_token: self.padding_token(),
            lora: self.lora.clone(),
            ..DecoderConfig::empty(&NAMES)
        }
    }

    /// The initial values of a parameter, as transformers chooses them: weights are normal with
    /// standard deviation `initializer_range`, biases 0, gains 1.
    pub(crate) fn rule(&self, name: &str) -> Rule {
        if name.ends_with(".bias") {
            Rule::Constant(0.0)
        } else if name.contains("norm.") {
            Rule::Constant(1.0)
        } else {
            Rule::Normal(self.initializer_range)
        }
    }
}

/// The names of the family's parameters.
const NAMES: Names = Names {
    family: "a model of the Llama family",
    prefix: "model.",
    tokens: "model.embed_tokens.weight",
    positions: "",
    block: "model.layers.",
    norm: "model.norm",
    norm1: "input_layernorm",
    qkv: &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    qk_norm: ["self_attn.q_norm", "self_attn.k_norm"],
    output: "self_attn.o_proj",
    norm2: "post_attention_layernorm",
    up: &["mlp.gate_proj", "mlp.up_proj"],
    down: "mlp.down_proj",
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wrong_shape_is_its_own_error() {
        let good = LlamaConfig::preset("smollm2-135m").unwrap();
        let check = |change: fn(&mut LlamaConfig), expected: &str| {
            let mut config = good.clone();
            change(&mut config);
            let error = config.validate().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };

        check(|c| c.vocab_size = 0, "vocab_size is 0");
        check(|c| c.max_positions = 0, "max_position_embeddings is 0");
        check(|c| c.hidden = 0, "hidden_size is 0");
        check(|c| c.layers = 0, "num_hidden_layers is 0");
        check(
            |c| c.layers = 1 << 17,
            "num_hidden_layers is 131072; it must be",
        );
        check(|c| c.heads = 0, "num_attention_heads is 0");
        check(|c| c.kv_heads = 0, "num_key_value_heads is 0");
        check(
            |c| c.kv_heads = 2,
            "num_attention_heads 9 is not divisible by its num_key_value_heads 2",
        );
        check(|c| c.head_dim = 0, "head_dim is 0");
        check(
            |c| c.head_dim = 63,
            "head_dim 63 is not divisible by its pairs of 2",
        );
        check(|c| c.intermediate = 0, "intermediate_size is 0");
        check(|c| c.window = Some(0), "sliding_window is 0");
        check(|c| c.rms_norm_eps = 0.0, "rms_norm_eps is 0");
        check(
            |c| c.initializer_range = f32::NAN,
            "initializer_range is NaN",
        );
        check(|c| c.rope = Rope::new(0.0), "rope_theta is 0");
        check(
            |c| {
                c.hidden = 1 << 30;
                c.intermediate = 1 << 30;
            },
            "too large",
        );
    }
}
