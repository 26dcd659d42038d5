//! Conversion between a model's shape and the `config.json` of a Hugging Face folder.
//!
//! transformers has moved keys: the rotary embedding is `rope_theta` and `rope_scaling`, or
//! `rope_parameters` since version 5. Both are read; the first is written, which all versions read.

use serde_json::{Map, Value, json};

use super::config::{Family, LlamaConfig};
use super::rope::{Rope, Scaling};
use crate::config::ConfigError;
use crate::config::json::Keys;

/// Keys that are kept for the export, and do not change the model.
const SPECIAL_TOKENS: [&str; 3] = ["bos_token_id", "eos_token_id", "pad_token_id"];

impl Family {
    /// The family of a `model_type`.
    pub(crate) fn of(model_type: &str) -> Option<Self> {
        Some(match model_type {
            "llama" => Self::Llama,
            "mistral" => Self::Mistral,
            "qwen2" => Self::Qwen2,
            "qwen3" => Self::Qwen3,
            _ => return None,
        })
    }

    /// Its `model_type`, and the class in transformers.
    fn names(self) -> [&'static str; 2] {
        match self {
            Self::Llama => ["llama", "LlamaForCausalLM"],
            Self::Mistral => ["mistral", "MistralForCausalLM"],
            Self::Qwen2 => ["qwen2", "Qwen2ForCausalLM"],
            Self::Qwen3 => ["qwen3", "Qwen3ForCausalLM"],
        }
    }
}

impl LlamaConfig {
    /// The configuration in a `config.json` of this family.
    ///
    /// Keys that do not affect the model are ignored. Missing keys have Hugging Face's defaults,
    /// except for sizes, which are required. Null counts as missing.
    ///
    /// # Errors
    /// A missing or mistyped key, an unsupported variant of the architecture, or a shape that
    /// [`validate`](Self::validate) rejects.
    pub(crate) fn from_hf_json(family: Family, keys: &Keys) -> Result<Self, ConfigError> {
        keys.expect("hidden_act", |v| v == "silu", "\"silu\"")?;
        keys.expect("quantization_config", |_| false, "none")?;
        keys.expect("num_local_experts", |_| false, "none")?;
        keys.expect("num_experts", |_| false, "none")?;
        keys.expect("partial_rotary_factor", |v| v == 1.0, "1.0")?;

        let hidden = keys.size("hidden_size")?;
        let heads = keys.size("num_attention_heads")?;
        let layers = keys.size("num_hidden_layers")?;
        let is_llama = family == Family::Llama;
        let attention_bias = keys.flag("attention_bias")?.unwrap_or(false);
        let chosen_bias = attention_bias && matches!(family, Family::Llama | Family::Qwen3);
        let (window, windowed) = windows(family, keys, layers)?;
        let config = Self {
            family,
            vocab_size: keys.size("vocab_size")?,
            max_positions: keys.size("max_position_embeddings")?,
            hidden,
            layers,
            heads,
            kv_heads: match keys.get("num_key_value_heads") {
                None if is_llama => heads,
                _ => keys.size("num_key_value_heads")?,
            },
            head_dim: match keys.get("head_dim") {
                None if family == Family::Qwen3 => 128,
                None => hidden / heads.max(1),
                Some(_) => keys.size("head_dim")?,
            },
            intermediate: keys.size("intermediate_size")?,
            rms_norm_eps: keys.number("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            rope: rope(keys)?,
            qkv_bias: chosen_bias || family == Family::Qwen2,
            output_bias: chosen_bias,
            mlp_bias: is_llama && keys.flag("mlp_bias")?.unwrap_or(false),
            window,
            windowed,
            tied_head: keys.flag("tie_word_embeddings")?.unwrap_or(false),
            initializer_range: keys.number("initializer_range")?.unwrap_or(0.02) as f32,
            attention_dropout: keys.number("attention_dropout")?.unwrap_or(0.0) as f32,
            special_tokens: SPECIAL_TOKENS
                .into_iter()
                .filter_map(|key| Some((key, keys.get(key)?.clone())))
                .collect(),
        };

        config.validate()?;
        Ok(config)
    }

    /// The text of a `config.json` that Hugging Face transformers reads as this model.
    ///
    /// `dtype` is Hugging Face's name of the type of the stored weights: `float32`, `float16` or
    /// `bfloat16`.
    pub(crate) fn to_hf_json(&self, dtype: &str) -> String {
        let [model_type, class] = self.family.names();
        let scaling = match self.rope.scaling {
            Scaling::Default => Value::Null,
            Scaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
            Scaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_positions,
            } => json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_positions,
            }),
        };

        let mut file = json!({
            "architectures": [class],
            "attention_dropout": decimal(self.attention_dropout),
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": decimal(self.initializer_range),
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.max_positions,
            "model_type": model_type,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": decimal(self.rms_norm_eps),
            "rope_scaling": scaling,
            "rope_theta": self.rope.theta,
            "tie_word_embeddings": self.tied_head,
            "torch_dtype": dtype,
            "vocab_size": self.vocab_size,
        });

        let keys = file.as_object_mut().map(std::mem::take).unwrap_or_default();
        let keys = self.with_family_keys(keys);
        // Serializing numbers, flags and strings does not fail.
        serde_json::to_string_pretty(&keys).unwrap_or_default() + "\n"
    }

    fn with_family_keys(&self, mut keys: Map<String, Value>) -> Map<String, Value> {
        let mut set = |key: &str, value: Value| {
            keys.insert(key.to_owned(), value);
        };

        match self.family {
            Family::Llama => {
                set("attention_bias", self.output_bias.into());
                set("mlp_bias", self.mlp_bias.into());
            }
            Family::Mistral => set("sliding_window", self.window.into()),
            Family::Qwen2 | Family::Qwen3 => {
                if self.family == Family::Qwen3 {
                    set("attention_bias", self.output_bias.into());
                }
                set("use_sliding_window", self.window.is_some().into());
                set("sliding_window", self.window.into());
                let name = |windowed: &bool| match windowed {
                    true => SLIDING,
                    false => FULL,
                };
                if self.window.is_some() {
                    set("layer_types", self.windowed.iter().map(name).collect());
                }
            }
        }

        for (key, value) in &self.special_tokens {
            set(key, value.clone());
        }
        keys
    }
}

/// The number whose shortest decimal is that of `value`.
fn decimal(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

/// The kinds of a layer's attention in `layer_types`.
const SLIDING: &str = "sliding_attention";
const FULL: &str = "full_attention";

/// The sliding window, and the layers that have it.
fn windows(
    family: Family,
    keys: &Keys,
    layers: usize,
) -> Result<(Option<usize>, Vec<bool>), ConfigError> {
    let is_qwen = matches!(family, Family::Qwen2 | Family::Qwen3);
    let used = match family {
        Family::Llama => false,
        Family::Mistral => true,
        Family::Qwen2 | Family::Qwen3 => keys.flag("use_sliding_window")?.unwrap_or(false),
    };
    if !used || keys.get("sliding_window").is_none() {
        return Ok((None, Vec::new()));
    }

    let window = keys.size("sliding_window")?;
    let windowed = match keys.get("layer_types") {
        Some(types) if is_qwen => layer_types(types, layers)?,
        _ if is_qwen => {
            let full = match keys.get("max_window_layers") {
                None => 28,
                Some(_) => keys.size("max_window_layers")?,
            };
            (0..layers).map(|layer| layer >= full).collect()
        }
        _ => vec![true; layers.min(crate::config::MAX_LAYERS)],
    };

    match windowed.contains(&true) {
        true => Ok((Some(window), windowed)),
        false => Ok((None, Vec::new())),
    }
}

fn layer_types(types: &Value, layers: usize) -> Result<Vec<bool>, ConfigError> {
    let wrong = || ConfigError::Unsupported {
        key: "layer_types",
        got: types.to_string(),
        supported: "\"full_attention\" or \"sliding_attention\" for each layer",
    };
    let list = types.as_array().filter(|list| list.len() == layers);
    let list = list.ok_or_else(wrong)?;
    list.iter()
        .map(|kind| match kind.as_str() {
            Some(SLIDING) => Ok(true),
            Some(FULL) => Ok(false),
            _ => Err(wrong()),
        })
        .collect()
}

/// The rotary embedding.
fn rope(keys: &Keys) -> Result<Rope, ConfigError> {
    let object = |key: &'static str| match keys.get(key) {
        None => Ok(None),
        Some(Value::Object(object)) => Ok(Some(Keys::of(object.clone()))),
        Some(other) => Err(ConfigError::WrongType {
            key,
            expected: "an object",
            got: other.to_string(),
        }),
    };
    let parameters = match object("rope_parameters")? {
        None => object("rope_scaling")?,
        found => found,
    };
    let parameters = parameters.unwrap_or_default();
    let theta = match parameters.number("rope_theta")? {
        None => keys.number("rope_theta")?,
        found => found,
    };
    let scaling = scaling(&parameters)?;
    Ok(Rope {
        theta: theta.unwrap_or(10_000.0),
        scaling,
    })
}

fn scaling(keys: &Keys) -> Result<Scaling, ConfigError> {
    let kind = keys.get("rope_type").or_else(|| keys.get("type"));
    let required = |key| keys.number(key)?.ok_or(ConfigError::MissingKey(key));
    match kind.and_then(Value::as_str) {
        None if kind.is_none() => Ok(Scaling::Default),
        Some("default") => Ok(Scaling::Default),
        Some("linear") => Ok(Scaling::Linear {
            factor: required("factor")?,
        }),
        Some("llama3") => Ok(Scaling::Llama3 {
            factor: required("factor")?,
            low_freq_factor: required("low_freq_factor")?,
            high_freq_factor: required("high_freq_factor")?,
            original_positions: keys.size("original_max_position_embeddings")?,
        }),
        _ => Err(ConfigError::Unsupported {
            key: "rope_type",
            got: kind.map(Value::to_string).unwrap_or_default(),
            supported: "\"default\", \"linear\" and \"llama3\"",
        }),
    }
}
