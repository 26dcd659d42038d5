//! The shape of a GPT-2 model: presets, validation, and its parameters by unit.
//!
//! Names and shapes are Hugging Face's (`transformer.h.0.attn.c_attn.weight` is
//! `[n_embd, 3 * n_embd]`, input dimension first), so that the tensors of a Hugging Face folder map
//! one to one. The vocabulary of the GPT-2 presets has Hugging Face's 50257 tokens and is not
//! padded (llm.c pads to 50304 for speed), so every row of a checkpoint's embedding belongs to a
//! token.
//!
//! ```
//! use zero_models::gpt2::config::GptConfig;
//!
//! let config = GptConfig::preset("gpt2-124m").unwrap();
//! assert_eq!(config.parameter_count(), 124_439_808);
//! assert_eq!(config.units().len(), 1 + config.n_layer + 1);
//! ```

mod hf_json;
mod init;

use thiserror::Error;
use zero_shard::{ParamSpec, UnitSpec};

/// An invalid model configuration, or a request that does not fit it.
#[derive(Clone, Debug, Error, PartialEq)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum ConfigError {
    /// No preset has this name.
    #[error("no model preset {0:?}{meant}; the presets are {presets}", meant = meant(.0), presets = PRESETS.join(", "))]
    UnknownPreset(String),
    /// The named size is 0.
    #[error("the model's {0} is 0; it must be at least 1")]
    Zero(&'static str),
    /// The number of heads does not divide the width.
    #[error("the model's width n_embd {n_embd} is not divisible by its n_head {n_head} heads")]
    HeadsDoNotDivide {
        n_embd: usize,
        /// The number of heads.
        n_head: usize,
    },
    /// The parameter count overflows.
    #[error("the model is too large: its parameter count has more than 59 bits")]
    TooLarge,
    /// More blocks than the limit, which bounds the memory for parameter names.
    #[error("the model's n_layer is {0}; it must be {MAX_LAYERS} at most")]
    TooManyLayers(usize),
    /// A number outside its range.
    #[error("the model's {field} is {value}; it must be {expected}")]
    OutOfRange {
        /// The name of the number.
        field: &'static str,
        value: f32,
        /// The allowed range.
        expected: &'static str,
    },
    /// The text is not a JSON object; the parser's message.
    #[error("not a JSON object: {0}")]
    Json(String),
    /// A required key is missing.
    #[error("the key {0:?} is missing")]
    MissingKey(&'static str),
    /// A key has a value of another type.
    #[error("the key {key:?} is {got}; expected {expected}")]
    WrongType {
        key: &'static str,
        /// The expected type.
        expected: &'static str,
        got: String,
    },
    /// A variant of the architecture that this trainer does not support.
    #[error(
        "the key {key:?} is {got}, which this trainer does not support; it supports {supported}"
    )]
    Unsupported {
        key: &'static str,
        got: String,
        /// The supported values.
        supported: &'static str,
    },
    /// The model has no parameter of this name.
    #[error("the model has no parameter {0:?}")]
    UnknownParameter(String),
    /// A range of elements that is outside the parameter or does not have the buffer's length.
    #[error("elements {start}..{end} of {name:?} ({numel} elements) do not fit a buffer of {len}")]
    BadRange {
        name: String,
        start: u64,
        /// The end of the range.
        end: u64,
        numel: u64,
        len: usize,
    },
}

/// Maximum number of blocks. It bounds the memory for the list of parameter names.
const MAX_LAYERS: usize = 1 << 16;

/// Names of the presets, smallest first.
pub const PRESETS: [&str; 5] = ["nano", "gpt2-124m", "gpt2-350m", "gpt2-774m", "gpt2-1.5b"];

/// The names of presets on Hugging Face's hub.
const HUB_NAMES: [(&str, &str); 5] = [
    ("gpt2", "gpt2-124m"),
    ("gpt2-small", "gpt2-124m"),
    ("gpt2-medium", "gpt2-350m"),
    ("gpt2-large", "gpt2-774m"),
    ("gpt2-xl", "gpt2-1.5b"),
];

/// A question about the preset that a name may mean; empty if none is near.
fn meant(name: &str) -> String {
    let name = name.to_lowercase();
    let known = HUB_NAMES
        .iter()
        .find(|(hub, _)| *hub == name.trim_start_matches("openai-community/"));
    let similar = || {
        PRESETS
            .into_iter()
            .find(|preset| !name.is_empty() && preset.starts_with(&name))
    };
    let preset = known.map(|(_, preset)| *preset).or_else(similar);
    preset
        .map(|preset| format!(" (did you mean {preset}?)"))
        .unwrap_or_default()
}

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
}

impl GptConfig {
    /// The preset of this name (see [`PRESETS`]).
    ///
    /// # Errors
    /// [`ConfigError::UnknownPreset`].
    pub fn preset(name: &str) -> Result<Self, ConfigError> {
        let gpt2 = |n_embd: usize, n_layer, n_head| Self {
            vocab_size: 50257,
            n_positions: 1024,
            n_embd,
            n_layer,
            n_head,
            n_inner: 4 * n_embd,
            layer_norm_epsilon: 1e-5,
            tied_head: true,
            initializer_range: 0.02,
        };

        match name {
            "nano" => Ok(Self {
                vocab_size: 256,
                n_positions: 256,
                ..gpt2(128, 4, 4)
            }),
            "gpt2-124m" => Ok(gpt2(768, 12, 12)),
            "gpt2-350m" => Ok(gpt2(1024, 24, 16)),
            "gpt2-774m" => Ok(gpt2(1280, 36, 20)),
            "gpt2-1.5b" => Ok(gpt2(1600, 48, 25)),
            _ => Err(ConfigError::UnknownPreset(name.to_owned())),
        }
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
            ("n_layer", self.n_layer),
            ("n_head", self.n_head),
            ("n_inner", self.n_inner),
        ];

        if let Some(&(field, _)) = sizes.iter().find(|(_, n)| *n == 0) {
            return Err(ConfigError::Zero(field));
        }
        if !self.n_embd.is_multiple_of(self.n_head) {
            return Err(ConfigError::HeadsDoNotDivide {
                n_embd: self.n_embd,
                n_head: self.n_head,
            });
        }

        if self.n_layer > MAX_LAYERS {
            return Err(ConfigError::TooManyLayers(self.n_layer));
        }
        // Sizes of 2^31 or more are rejected before `count` multiplies them, so u128 does not
        // overflow.
        if sizes.iter().any(|(_, n)| *n > i32::MAX as usize) || self.count() > 1 << 59 {
            return Err(ConfigError::TooLarge);
        }

        if !(self.layer_norm_epsilon > 0.0 && self.layer_norm_epsilon.is_finite()) {
            let field = "layer_norm_epsilon";
            let value = self.layer_norm_epsilon;
            return Err(ConfigError::OutOfRange {
                field,
                value,
                expected: "finite and above 0",
            });
        }

        if !(self.initializer_range >= 0.0 && self.initializer_range.is_finite()) {
            let field = "initializer_range";
            let value = self.initializer_range;
            return Err(ConfigError::OutOfRange {
                field,
                value,
                expected: "finite and not negative",
            });
        }

        Ok(())
    }

    /// Width of one attention head.
    pub fn head_dim(&self) -> usize {
        self.n_embd / self.n_head
    }

    /// Elements of all parameters: Ψ of the formulas.
    pub fn parameter_count(&self) -> u64 {
        self.count() as u64
    }

    fn count(&self) -> u128 {
        let [v, p, c, f, l] = [
            self.vocab_size,
            self.n_positions,
            self.n_embd,
            self.n_inner,
            self.n_layer,
        ]
        .map(|n| n as u128);
        let block = 2 * c + (c * 3 * c + 3 * c) + (c * c + c) + 2 * c + (c * f + f) + (f * c + c);
        v * c + p * c + l * block + 2 * c + if self.tied_head { 0 } else { v * c }
    }

    /// The units in forward order: `embedding`, `block.0` .. and `head`.
    ///
    /// With a tied head, `head` has only the last layer norm, and the head's product reads
    /// `transformer.wte.weight` of `embedding`.
    pub fn units(&self) -> Vec<UnitSpec> {
        let [v, p, c, f] =
            [self.vocab_size, self.n_positions, self.n_embd, self.n_inner].map(|n| n as u64);
        let mut units = Vec::with_capacity(self.n_layer + 2);
        units.push(UnitSpec::new(
            "embedding",
            [
                ParamSpec::new("transformer.wte.weight", [v, c]),
                ParamSpec::new("transformer.wpe.weight", [p, c]),
            ],
        ));

        for i in 0..self.n_layer {
            let param = |name: &str, shape: &[u64]| {
                ParamSpec::new(format!("transformer.h.{i}.{name}"), shape)
            };
            units.push(UnitSpec::new(
                format!("block.{i}"),
                [
                    param("ln_1.weight", &[c]),
                    param("ln_1.bias", &[c]),
                    param("attn.c_attn.weight", &[c, 3 * c]),
                    param("attn.c_attn.bias", &[3 * c]),
                    param("attn.c_proj.weight", &[c, c]),
                    param("attn.c_proj.bias", &[c]),
                    param("ln_2.weight", &[c]),
                    param("ln_2.bias", &[c]),
                    param("mlp.c_fc.weight", &[c, f]),
                    param("mlp.c_fc.bias", &[f]),
                    param("mlp.c_proj.weight", &[f, c]),
                    param("mlp.c_proj.bias", &[c]),
                ],
            ));
        }

        let mut head = vec![
            ParamSpec::new("transformer.ln_f.weight", [c]),
            ParamSpec::new("transformer.ln_f.bias", [c]),
        ];
        if !self.tied_head {
            head.push(ParamSpec::new("lm_head.weight", [v, c]));
        }
        units.push(UnitSpec::new("head", head));

        units
    }

    /// The parameter of this name, if the model has it.
    pub fn param(&self, name: &str) -> Option<ParamSpec> {
        self.units()
            .into_iter()
            .flat_map(|u| u.params)
            .find(|p| p.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum_of_units(config: &GptConfig) -> u64 {
        config
            .units()
            .iter()
            .flat_map(|u| &u.params)
            .map(|p| p.shape.iter().product::<u64>())
            .sum()
    }

    #[test]
    fn presets_have_hugging_face_parameter_counts() {
        let expected = [
            ("gpt2-124m", 124_439_808),
            ("gpt2-350m", 354_823_168),
            ("gpt2-774m", 774_030_080),
            ("gpt2-1.5b", 1_557_611_200),
        ];
        for (name, count) in expected {
            assert_eq!(
                GptConfig::preset(name).unwrap().parameter_count(),
                count,
                "{name}"
            );
        }
    }

    #[test]
    fn presets_are_valid_and_units_complete() {
        for name in PRESETS {
            let config = GptConfig::preset(name).unwrap();
            config.validate().unwrap();
            assert_eq!(sum_of_units(&config), config.parameter_count(), "{name}");
            assert_eq!(config.units().len(), config.n_layer + 2);
            zero_shard::Layout::new(&config.units(), 3, 64).unwrap();
        }
    }

    #[test]
    fn only_an_untied_head_has_a_matrix() {
        let tied = GptConfig::preset("nano").unwrap();
        let untied = GptConfig {
            tied_head: false,
            ..tied.clone()
        };
        assert_eq!(tied.param("lm_head.weight"), None);
        assert_eq!(untied.param("lm_head.weight").unwrap().shape, [256, 128]);
        assert_eq!(untied.parameter_count(), tied.parameter_count() + 256 * 128);
        assert_eq!(sum_of_units(&untied), untied.parameter_count());
        assert_eq!(
            untied.units().last().unwrap().params.last().unwrap().name,
            "lm_head.weight"
        );
    }

    #[test]
    fn unknown_preset_error_lists_presets() {
        let error = GptConfig::preset("gpt5").unwrap_err().to_string();
        assert_eq!(
            error,
            "no model preset \"gpt5\"; the presets are nano, gpt2-124m, gpt2-350m, gpt2-774m, gpt2-1.5b"
        );
    }

    #[test]
    fn each_wrong_shape_is_its_own_error() {
        let good = GptConfig::preset("nano").unwrap();
        let cases: [(GptConfig, &str); 12] = [
            (
                GptConfig {
                    vocab_size: 0,
                    ..good.clone()
                },
                "vocab_size is 0",
            ),
            (
                GptConfig {
                    n_positions: 0,
                    ..good.clone()
                },
                "n_positions is 0",
            ),
            (
                GptConfig {
                    n_embd: 0,
                    ..good.clone()
                },
                "n_embd is 0",
            ),
            (
                GptConfig {
                    n_layer: 0,
                    ..good.clone()
                },
                "n_layer is 0",
            ),
            (
                GptConfig {
                    n_head: 0,
                    ..good.clone()
                },
                "n_head is 0",
            ),
            (
                GptConfig {
                    n_inner: 0,
                    ..good.clone()
                },
                "n_inner is 0",
            ),
            (
                GptConfig {
                    n_head: 3,
                    ..good.clone()
                },
                "n_embd 128 is not divisible by its n_head 3",
            ),
            (
                GptConfig {
                    n_layer: MAX_LAYERS + 1,
                    ..good.clone()
                },
                "n_layer is 65537; it must be 65536 at most",
            ),
            (
                GptConfig {
                    n_layer: 1 << 16,
                    n_embd: 1 << 24,
                    n_head: 1,
                    n_inner: 1 << 26,
                    ..good.clone()
                },
                "too large",
            ),
            (
                GptConfig {
                    layer_norm_epsilon: 0.0,
                    ..good.clone()
                },
                "layer_norm_epsilon is 0",
            ),
            (
                GptConfig {
                    layer_norm_epsilon: f32::NAN,
                    ..good.clone()
                },
                "layer_norm_epsilon is NaN",
            ),
            (
                GptConfig {
                    initializer_range: -1.0,
                    ..good.clone()
                },
                "initializer_range is -1",
            ),
        ];

        for (config, part) in cases {
            let error = config.validate().unwrap_err().to_string();
            assert!(error.contains(part), "{error:?} lacks {part:?}");
        }
    }
}
