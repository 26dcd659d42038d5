//! Conversion between a model's shape and the `config.json` of a Hugging Face folder.
//!
//! transformers has moved keys: the rotary embedding is `rope_theta` and `rope_scaling`, or
//! `rope_parameters` since version 5. Both are read; the first is written, which all versions read.
//! In a file with both, `rope_scaling` replaces `rope_parameters`, as in transformers.

use serde_json::{Value, json};

use super::config::{Family, LlamaConfig};
use crate::config::ConfigError;
use crate::config::json::{self, Keys, decimal};
use crate::config::rope::{Rope, Scaling, Yarn};

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
    /// The configuration in a `config.json` of this family, and warnings about it.
    ///
    /// Keys that do not affect the model are ignored. Missing keys have Hugging Face's defaults,
    /// except for sizes, which are required. Null counts as missing.
    ///
    /// # Errors
    /// A missing or mistyped key, an unsupported variant of the architecture, or a shape that
    /// [`validate`](Self::validate) rejects.
    pub(crate) fn from_hf_json(
        family: Family,
        keys: &Keys,
    ) -> Result<(Self, Vec<String>), ConfigError> {
        keys.expect("hidden_act", |v| v == "silu", "\"silu\"")?;
        keys.expect(
            "quantization_config",
            |v| v["quant_method"] == "bitsandbytes" && v["load_in_4bit"] == true,
            "none, or 4 bits of bitsandbytes",
        )?;
        keys.expect("num_local_experts", |_| false, "none")?;
        keys.expect("num_experts", |_| false, "none")?;

        let hidden = keys.size("hidden_size")?;
        let heads = keys.size("num_attention_heads")?;
        let layers = keys.size("num_hidden_layers")?;
        let is_llama = family == Family::Llama;
        let attention_bias = keys.flag_or("attention_bias", false)?;
        let chosen_bias = attention_bias && matches!(family, Family::Llama | Family::Qwen3);
        let (window, windowed) = windows(family, keys, layers)?;
        let max_positions = keys.size("max_position_embeddings")?;
        let mut warnings = Vec::new();
        let config = Self {
            family,
            vocab_size: keys.size("vocab_size")?,
            max_positions,
            hidden,
            layers,
            heads,
            kv_heads: match keys.get("num_key_value_heads") {
                None if is_llama => heads,
                _ => keys.size("num_key_value_heads")?,
            },
            head_dim: match family {
                Family::Qwen3 => keys.size_or("head_dim", 128)?,
                _ => keys.size_or("head_dim", hidden / heads.max(1))?,
            },
            intermediate: keys.size("intermediate_size")?,
            rms_norm_eps: keys.number_or("rms_norm_eps", 1e-6)?,
            rope: rope(keys, max_positions, &mut warnings)?,
            qkv_bias: chosen_bias || family == Family::Qwen2,
            output_bias: chosen_bias,
            mlp_bias: is_llama && keys.flag_or("mlp_bias", false)?,
            window,
            windowed,
            tied_head: keys.flag_or("tie_word_embeddings", false)?,
            initializer_range: keys.number_or("initializer_range", 0.02)?,
            attention_dropout: keys.number_or("attention_dropout", 0.0)?,
            special_tokens: keys.special_tokens(),
            lora: None,
        };

        config.validate()?;
        Ok((config, warnings))
    }

    /// The text of a `config.json` that Hugging Face transformers reads as this model.
    ///
    /// `dtype` is Hugging Face's name of the type of the stored weights: `float32`, `float16` or
    /// `bfloat16`.
    pub(crate) fn to_hf_json(&self, dtype: &str) -> String {
        let [model_type, class] = self.family.names();
        let keys = json!({
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
            "rope_scaling": self.rope.scaling.to_json(),
            "rope_theta": self.rope.theta,
            "tie_word_embeddings": self.tied_head,
            "torch_dtype": dtype,
            "vocab_size": self.vocab_size,
        });

        json::text(self.with_family_keys(keys), &self.special_tokens)
    }

    fn with_family_keys(&self, mut keys: Value) -> Value {
        match self.family {
            Family::Llama => {
                keys["attention_bias"] = self.output_bias.into();
                keys["mlp_bias"] = self.mlp_bias.into();
            }
            Family::Mistral => keys["sliding_window"] = self.window.into(),
            Family::Qwen2 | Family::Qwen3 => {
                if self.family == Family::Qwen3 {
                    keys["attention_bias"] = self.output_bias.into();
                }
                keys["use_sliding_window"] = self.window.is_some().into();
                keys["sliding_window"] = self.window.into();
                let name = |windowed: &bool| match windowed {
                    true => SLIDING,
                    false => FULL,
                };
                if self.window.is_some() {
                    keys["layer_types"] = self.windowed.iter().map(name).collect();
                }
            }
        }
        keys
    }
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
        Family::Qwen2 | Family::Qwen3 => keys.flag_or("use_sliding_window", false)?,
    };
    if !used || keys.get("sliding_window").is_none() {
        return Ok((None, Vec::new()));
    }

    let window = keys.size("sliding_window")?;
    let windowed = match keys.get("layer_types") {
        Some(types) if is_qwen => layer_types(types, layers)?,
        _ if is_qwen => {
            let full = keys.size_or("max_window_layers", 28)?;
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

/// The theta without the key.
const DEFAULT_THETA: f64 = 10_000.0;

/// The positions of the context before it was extended.
const ORIGINAL: &str = "original_max_position_embeddings";

/// The rotary embedding.
fn rope(
    keys: &Keys,
    max_positions: usize,
    warnings: &mut Vec<String>,
) -> Result<Rope, ConfigError> {
    let object = |key: &'static str| match keys.get(key) {
        None => Ok(None),
        Some(Value::Object(object)) if object.is_empty() => Ok(None),
        Some(Value::Object(object)) => Ok(Some(Keys::of(object.clone()))),
        Some(other) => Err(ConfigError::WrongType {
            key,
            expected: "an object",
            got: other.to_string(),
        }),
    };
    let parameters = object("rope_parameters")?;
    let added = object("rope_scaling")?;
    let replaced = added.is_some();
    let chosen = match (added, &parameters) {
        (Some(added), _) => added,
        (None, Some(parameters)) => parameters.clone(),
        (None, None) => Keys::default(),
    };

    for keys in [keys, &chosen] {
        keys.expect("partial_rotary_factor", |v| v == 1.0, "1.0")?;
    }
    for key in [FULL, SLIDING] {
        chosen.expect(key, |_| false, "one rotary embedding for all layers")?;
    }
    let theta = match chosen.number("rope_theta")? {
        None => keys.number("rope_theta")?,
        found => found,
    };
    let theta = theta.unwrap_or(DEFAULT_THETA);
    if let Some(parameters) = parameters.filter(|_| replaced) {
        warnings.push(both(theta, parameters.number("rope_theta")?));
    }

    // The key at the top replaces the one beside the type, in transformers, too.
    let holder = match keys.get(ORIGINAL) {
        Some(_) => keys,
        None => &chosen,
    };
    let original = holder.size_or(ORIGINAL, max_positions)?;
    Ok(Rope {
        theta,
        scaling: Scaling::from_keys(&chosen, original, max_positions)?,
    })
}

/// A warning about a file with both spellings, whose theta is `theta`.
fn both(theta: f64, replaced: Option<f64>) -> String {
    let text = "config.json has rope_scaling and rope_parameters: the first replaces the second, as in transformers";
    match replaced.filter(|replaced| *replaced != theta) {
        None => text.to_owned(),
        Some(replaced) => format!(
            "{text}, and the model has rope_theta {theta}, not {replaced}; to keep that, move it into rope_scaling"
        ),
    }
}

impl Scaling {
    /// The scaling that the keys of `rope_scaling` or `rope_parameters` describe.
    fn from_keys(
        keys: &Keys,
        original_positions: usize,
        max_positions: usize,
    ) -> Result<Self, ConfigError> {
        let kind = keys.get("rope_type").or_else(|| keys.get("type"));
        let required = |key| keys.number(key)?.ok_or(ConfigError::MissingKey(key));
        let name = kind.map_or("default", |kind| kind.as_str().unwrap_or_default());
        Ok(match name {
            "default" => Self::Default,
            "linear" => Self::Linear {
                factor: required("factor")?,
            },
            "dynamic" => Self::Dynamic {
                factor: required("factor")?,
            },
            "llama3" => Self::Llama3 {
                factor: required("factor")?,
                low_freq_factor: required("low_freq_factor")?,
                high_freq_factor: required("high_freq_factor")?,
                original_positions,
            },
            "yarn" => Self::Yarn(Yarn {
                factor: match keys.is_null("factor") {
                    true => max_positions as f64 / original_positions as f64,
                    false => required("factor")?,
                },
                original_positions,
                attention_factor: keys.number("attention_factor")?,
                beta_fast: keys.number("beta_fast")?,
                beta_slow: keys.number("beta_slow")?,
                mscale: keys.number("mscale")?,
                mscale_all_dim: keys.number("mscale_all_dim")?,
                // Null is false, in Python.
                truncate: keys.flag("truncate")?.unwrap_or(!keys.is_null("truncate")),
            }),
            _ => {
                return Err(ConfigError::Unsupported {
                    key: "rope_type",
                    got: kind.map(Value::to_string).unwrap_or_default(),
                    supported: "\"default\", \"linear\", \"dynamic\", \"llama3\" and \"yarn\"",
                });
            }
        })
    }

    /// The value of `rope_scaling`.
    fn to_json(self) -> Value {
        match self {
            Self::Default => Value::Null,
            Self::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
            Self::Dynamic { factor } => json!({"rope_type": "dynamic", "factor": factor}),
            Self::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_positions,
            } => json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                ORIGINAL: original_positions,
            }),
            Self::Yarn(yarn) => yarn.to_json(),
        }
    }
}

impl Yarn {
    fn to_json(self) -> Value {
        let mut value = json!({
            "rope_type": "yarn",
            "factor": self.factor,
            ORIGINAL: self.original_positions,
        });
        let optional = [
            ("attention_factor", self.attention_factor),
            ("beta_fast", self.beta_fast),
            ("beta_slow", self.beta_slow),
            ("mscale", self.mscale),
            ("mscale_all_dim", self.mscale_all_dim),
        ];
        for (key, number) in optional {
            if let Some(number) = number {
                value[key] = number.into();
            }
        }
        if !self.truncate {
            value["truncate"] = false.into();
        }
        value
    }
}

#[cfg(test)]
mod tests {
    use serde_json::from_str;

    use super::*;
    use crate::ModelConfig;

    /// A `config.json` with `edits`; a null removes a key.
    fn with(edits: Value) -> String {
        let mut file = json!({"model_type": "qwen2", "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40,
            "max_position_embeddings": 64});
        for (key, value) in edits.as_object().unwrap() {
            file[key] = value.clone();
        }
        file.to_string()
    }

    fn read(text: &str) -> Result<(LlamaConfig, Vec<String>), ConfigError> {
        match ModelConfig::from_hf_json(text)? {
            (ModelConfig::Llama(config), warnings) => Ok((config, warnings)),
            (ModelConfig::Gpt2(_), _) => panic!("not of the family"),
        }
    }

    /// tests/data/rope.json has the bits that transformers computes. Its powers are within an ulp.
    #[test]
    fn frequencies_are_those_of_transformers() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/rope.json");
        let cases: Vec<Value> = from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        assert!(cases.len() > 70);
        let mut differing = 0;
        for case in &cases {
            let name = case["name"].as_str().unwrap();
            let (config, _) = read(case["config"].as_str().unwrap()).unwrap();
            let got = config.rope.frequencies(config.head_dim);
            let want = case["bits"].as_array().unwrap().iter();
            let want: Vec<f32> = want
                .map(|bits| f32::from_bits(bits.as_u64().unwrap() as u32))
                .collect();
            assert_eq!(got.len(), want.len(), "{name}");
            for (got, want) in got.iter().zip(&want) {
                let error = (got - want).abs() / want;
                assert!(error < 2.0 * f32::EPSILON, "{name}: {got} for {want}");
                differing += usize::from(got != want);
            }
            let factor = case["attention_factor"].as_f64().unwrap();
            assert_eq!(config.rope.attention_scaling(), factor as f32, "{name}");
        }
        // transformers' powers have errors of an ulp, ours of a half.
        let lists = cases.iter().filter_map(|case| case["bits"].as_array());
        let all: usize = lists.map(Vec::len).sum();
        assert!(50 * differing < all, "{differing} of {all}");
    }

    #[test]
    fn scaling_reads_back_as_written() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/rope.json");
        let cases: Vec<Value> = from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        for case in &cases {
            let (config, _) = read(case["config"].as_str().unwrap()).unwrap();
            let written = config.to_hf_json("float32");
            assert_eq!(read(&written), Ok((config, vec![])), "{written}");
        }
    }

    #[test]
    fn rope_scaling_replaces_rope_parameters() {
        let both = |parameters: Value, scaling: Value, top: Value| {
            let text = with(
                json!({"rope_parameters": parameters, "rope_scaling": scaling, "rope_theta": top}),
            );
            let (config, warnings) = read(&text).unwrap();
            (config.rope, warnings.concat())
        };
        let linear = |theta: f64| Rope {
            theta,
            scaling: Scaling::Linear { factor: 2.0 },
        };
        let named = json!({"rope_type": "default", "rope_theta": 5e5});
        let added = json!({"type": "linear", "factor": 2.0});

        let (rope, warning) = both(named.clone(), added.clone(), Value::Null);
        assert_eq!(rope, linear(1e4));
        assert!(
            warning.contains("rope_theta 10000, not 500000;"),
            "{warning}"
        );
        let (rope, warning) = both(named.clone(), added.clone(), json!(7.0));
        assert_eq!(rope, linear(7.0));
        assert!(warning.contains("rope_theta 7, not 500000;"), "{warning}");
        let (rope, warning) = both(named.clone(), added.clone(), json!(5e5));
        assert_eq!(rope, linear(5e5));
        assert!(warning.ends_with("as in transformers"), "{warning}");

        // Null and an empty object are false in Python, and replace nothing.
        for none in [Value::Null, json!({})] {
            let (rope, warning) = both(named.clone(), none.clone(), Value::Null);
            assert_eq!((rope, warning.as_str()), (Rope::new(5e5), ""));
            let (rope, warning) = both(none, added.clone(), Value::Null);
            assert_eq!((rope, warning.as_str()), (linear(1e4), ""));
        }
    }

    #[test]
    fn yarn_extends_positions() {
        let yarn = |factor: Value| {
            let scaling =
                json!({"type": "yarn", "factor": factor, "original_max_position_embeddings": 32});
            let (config, _) = read(&with(json!({"rope_scaling": scaling}))).unwrap();
            let json: Value = from_str(&config.to_hf_json("float32")).unwrap();
            assert_eq!(json["max_position_embeddings"], 64);
            ModelConfig::from(config).max_positions()
        };
        assert_eq!(yarn(json!(8.0)), 256);
        assert_eq!(yarn(json!(1.5)), 64);
        assert_eq!(yarn(json!(1e30)), i32::MAX as usize);
    }

    #[test]
    fn each_wrong_rope_is_an_error() {
        let yarn = |key: &str, value: Value| {
            let mut scaling = json!({"rope_type": "yarn", "factor": 4.0});
            scaling[key] = value;
            json!({"rope_scaling": scaling})
        };
        let kind = |kind: Value| json!({"rope_scaling": {"rope_type": kind, "factor": 2.0}});
        for (edits, expected) in [
            (
                kind(json!("longrope")),
                "\"rope_type\" is \"longrope\", which",
            ),
            (kind(json!(7)), "\"rope_type\" is 7, which"),
            (
                json!({"rope_scaling": {"type": "yarn"}}),
                "\"factor\" is missing",
            ),
            (
                json!({"rope_scaling": {"type": "dynamic"}}),
                "\"factor\" is missing",
            ),
            (
                json!({"rope_scaling": "yarn"}),
                "\"rope_scaling\" is \"yarn\"; expected an object",
            ),
            (
                json!({"rope_parameters": 7}),
                "\"rope_parameters\" is 7; expected an object",
            ),
            (
                json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
                "\"full_attention\" is {\"rope_type\":\"default\"}, which",
            ),
            (
                json!({"rope_parameters": {"partial_rotary_factor": 0.5}}),
                "\"partial_rotary_factor\" is 0.5, which",
            ),
            (
                json!({"partial_rotary_factor": 0.5}),
                "\"partial_rotary_factor\" is 0.5, which",
            ),
            (yarn("factor", json!(-1.0)), "rope factor is -1;"),
            (yarn("factor", json!(f64::MAX)), "rope factor is inf;"),
            (yarn("beta_fast", json!(-1.0)), "rope beta_fast is -1;"),
            (yarn("beta_slow", json!(-2.0)), "rope beta_slow is -2;"),
            (
                yarn("attention_factor", json!(0.0)),
                "rope attention_factor is 0;",
            ),
            (yarn("rope_theta", json!(1.0)), "rope_theta - 1 is 0;"),
            (
                yarn("original_max_position_embeddings", json!(0)),
                "original_max_position_embeddings is 0;",
            ),
            (
                yarn("original_max_position_embeddings", json!(1.5)),
                "\"original_max_position_embeddings\" is 1.5; expected a whole number",
            ),
            (
                yarn("truncate", json!(1)),
                "\"truncate\" is 1; expected true or false",
            ),
            (
                json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}),
                "head_dim - 2, for rope_type \"dynamic\", is 0;",
            ),
        ] {
            let error = read(&with(edits)).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}: {expected}");
        }
    }
}
