//! The shape of a model of the Llama family: presets, validation, its parameters by unit.
//!
//! Names and shapes are Hugging Face's (`model.layers.0.self_attn.q_proj.weight` is
//! `[heads * head_dim, hidden]`, output dimension first). In a unit, matrices that one product reads
//! are neighbours: queries, keys and values; gate and up.

use std::ops::Range;

use serde_json::Value;
use zero_shard::{ParamSpec, UnitSpec};

use super::rope::Rope;
use crate::config::init::Rule;
use crate::config::{
    ConfigError, check_deviation, check_divides, check_dropout, check_positive, check_sizes,
};

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
}

/// Elements of a block's parameters, in the order of [`LlamaConfig::units`]; those that the model
/// does not have are 0.
pub(crate) struct BlockElems {
    pub(crate) norm: usize,
    pub(crate) qkv: usize,
    pub(crate) qkv_bias: usize,
    pub(crate) qk_norm: usize,
    pub(crate) output: usize,
    pub(crate) output_bias: usize,
    pub(crate) gate_up: usize,
    pub(crate) gate_up_bias: usize,
    pub(crate) down: usize,
    pub(crate) down_bias: usize,
}

impl BlockElems {
    /// The sizes in order.
    pub(crate) fn in_order(&self) -> [usize; 11] {
        [
            self.norm,
            self.qkv,
            self.qkv_bias,
            self.qk_norm,
            self.output,
            self.output_bias,
            self.norm,
            self.gate_up,
            self.gate_up_bias,
            self.down,
            self.down_bias,
        ]
    }

    /// The ranges in the unit of the parameters [`in_order`](Self::in_order). With tensor parallelism
    /// (`cut`) those that all ranks have are behind the others.
    pub(crate) fn places(&self, cut: bool) -> [Range<usize>; 11] {
        const REPLICATED: [usize; 5] = [0, 3, 5, 6, 10];
        let elems = self.in_order();
        let is_behind = |i: &usize| cut && REPLICATED.contains(i);
        let mut places = [const { 0..0 }; 11];
        let mut end = 0;
        let first = (0..11).filter(|i| !is_behind(i));
        for i in first.chain((0..11).filter(is_behind)) {
            places[i] = end..end + elems[i];
            end += elems[i];
        }
        places
    }
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
        check_sizes(&sizes, ("num_hidden_layers", self.layers), || self.count())?;
        check_divides(heads, kv_heads)?;
        check_divides(("head_dim", self.head_dim), ("pairs of", 2))?;
        check_positive("rms_norm_eps", self.rms_norm_eps)?;
        self.rope.validate(self.head_dim)?;
        check_dropout("attention_dropout", self.attention_dropout)?;
        check_deviation("initializer_range", self.initializer_range)
    }

    /// Elements of all parameters: Ψ of the formulas.
    pub fn parameter_count(&self) -> u64 {
        self.count() as u64
    }

    fn count(&self) -> u128 {
        let [v, c, f, d, h, kv, l] = [
            self.vocab_size,
            self.hidden,
            self.intermediate,
            self.head_dim,
            self.heads,
            self.kv_heads,
            self.layers,
        ]
        .map(|n| n as u128);
        let has = |flag: bool, elems: u128| if flag { elems } else { 0 };
        let qkv = (h + 2 * kv) * d;
        let attention = qkv * c
            + has(self.qkv_bias, qkv)
            + has(self.has_qk_norm(), 2 * d)
            + c * h * d
            + has(self.output_bias, c);
        let mlp = 3 * c * f + has(self.mlp_bias, 2 * f + c);
        v * c + l * (2 * c + attention + mlp) + c + has(!self.tied_head, v * c)
    }

    /// The longest sequence.
    pub fn positions(&self) -> usize {
        self.rope.positions(self.max_positions)
    }

    /// Whether queries and keys have norms.
    pub(crate) fn has_qk_norm(&self) -> bool {
        self.family == Family::Qwen3
    }

    /// The token whose embedding is 0 at the start and is not trained where it is looked up, as in
    /// transformers: `pad_token_id`.
    pub(crate) fn padding_token(&self) -> Option<usize> {
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

    /// The sizes of a block's part on one of the ranks of tensor parallelism.
    pub(crate) fn cut(&self, ranks: usize) -> Self {
        Self {
            heads: self.heads / ranks,
            kv_heads: self.kv_heads / ranks,
            intermediate: self.intermediate / ranks,
            ..self.clone()
        }
    }

    /// Elements of a token's queries, keys and values.
    pub(crate) fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Elements of a token's queries.
    pub(crate) fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Keys that a query of a layer sees in sequences of `seq` tokens.
    pub(crate) fn window_of(&self, layer: usize, seq: usize) -> usize {
        match self.window {
            Some(window) if self.windowed.get(layer).copied().unwrap_or(true) => window.min(seq),
            _ => seq,
        }
    }

    pub(crate) fn block_elems(&self) -> BlockElems {
        let c = self.hidden;
        let f = self.intermediate;
        let has = |flag: bool, elems: usize| if flag { elems } else { 0 };
        BlockElems {
            norm: c,
            qkv: self.qkv_width() * c,
            qkv_bias: has(self.qkv_bias, self.qkv_width()),
            qk_norm: has(self.has_qk_norm(), 2 * self.head_dim),
            output: c * self.q_width(),
            output_bias: has(self.output_bias, c),
            gate_up: 2 * f * c,
            gate_up_bias: has(self.mlp_bias, 2 * f),
            down: c * f,
            down_bias: has(self.mlp_bias, c),
        }
    }

    /// The units in forward order: `embedding`, `block.0` .. and `head`.
    ///
    /// With a tied head, `head` has only the last norm, and the head's product reads
    /// `model.embed_tokens.weight` of `embedding`.
    pub fn units(&self) -> Vec<UnitSpec> {
        let c = self.hidden as u64;
        let embedding = [self.vocab_size as u64, c];
        let mut units = Vec::with_capacity(self.layers + 2);
        units.push(UnitSpec::new(
            "embedding",
            [ParamSpec::new("model.embed_tokens.weight", embedding)],
        ));

        for i in 0..self.layers {
            units.push(UnitSpec::new(format!("block.{i}"), self.block_params(i)));
        }

        let mut head = vec![ParamSpec::new("model.norm.weight", [c])];
        if !self.tied_head {
            head.push(ParamSpec::new("lm_head.weight", embedding));
        }
        units.push(UnitSpec::new("head", head));

        units
    }

    fn block_params(&self, layer: usize) -> Vec<ParamSpec> {
        let [c, f, d] = [self.hidden, self.intermediate, self.head_dim].map(|n| n as u64);
        let q = self.q_width() as u64;
        let kv = self.kv_heads as u64 * d;
        let mut params = Vec::new();
        let mut add = |present: bool, name: &str, shape: &[u64]| {
            if present {
                params.push(ParamSpec::new(
                    format!("model.layers.{layer}.{name}"),
                    shape,
                ));
            }
        };

        add(true, "input_layernorm.weight", &[c]);
        add(true, "self_attn.q_proj.weight", &[q, c]);
        add(true, "self_attn.k_proj.weight", &[kv, c]);
        add(true, "self_attn.v_proj.weight", &[kv, c]);
        add(self.qkv_bias, "self_attn.q_proj.bias", &[q]);
        add(self.qkv_bias, "self_attn.k_proj.bias", &[kv]);
        add(self.qkv_bias, "self_attn.v_proj.bias", &[kv]);
        add(self.has_qk_norm(), "self_attn.q_norm.weight", &[d]);
        add(self.has_qk_norm(), "self_attn.k_norm.weight", &[d]);
        add(true, "self_attn.o_proj.weight", &[c, q]);
        add(self.output_bias, "self_attn.o_proj.bias", &[c]);
        add(true, "post_attention_layernorm.weight", &[c]);
        add(true, "mlp.gate_proj.weight", &[f, c]);
        add(true, "mlp.up_proj.weight", &[f, c]);
        add(self.mlp_bias, "mlp.gate_proj.bias", &[f]);
        add(self.mlp_bias, "mlp.up_proj.bias", &[f]);
        add(true, "mlp.down_proj.weight", &[c, f]);
        add(self.mlp_bias, "mlp.down_proj.bias", &[c]);
        params
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

#[cfg(test)]
mod tests {
    use super::*;

    const PRESETS: [(&str, u64); 8] = [
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3.2-1b", 1_235_814_400),
        ("smollm2-135m", 134_515_008),
        ("qwen2.5-0.5b", 494_032_768),
    ];

    #[test]
    fn presets_have_hugging_face_parameter_counts() {
        for (name, count) in PRESETS {
            let config = LlamaConfig::preset(name).unwrap();
            config.validate().unwrap();
            assert_eq!(config.parameter_count(), count, "{name}");
        }
    }

    #[test]
    fn the_count_is_that_of_the_units_and_of_the_block() {
        for (name, _) in PRESETS {
            for (family, bias) in [(Family::Llama, true), (Family::Qwen3, false)] {
                let config = LlamaConfig {
                    family,
                    output_bias: bias,
                    mlp_bias: bias,
                    tied_head: bias,
                    ..LlamaConfig::preset(name).unwrap()
                };

                let units = config.units();
                let elems = |unit: &UnitSpec| -> u64 {
                    let sizes = unit.params.iter().map(|p| p.shape.iter().product::<u64>());
                    sizes.sum()
                };
                let sum: u64 = units.iter().map(elems).sum();
                assert_eq!(sum, config.parameter_count(), "{name}");
                let block: usize = config.block_elems().in_order().iter().sum();
                assert_eq!(elems(&units[1]), block as u64, "{name}");
            }
        }
    }

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
