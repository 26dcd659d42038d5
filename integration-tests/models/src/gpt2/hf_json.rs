//! Conversion between a model's shape and the `config.json` of a Hugging Face GPT-2 folder.

use crate::config::ConfigError;
use crate::config::json::{self, Keys, decimal};
use crate::gpt2::config::GptConfig;
use crate::ops::activation::Activation;
use serde_json::{Value, json};

impl GptConfig {
    /// The configuration in a GPT-2 `config.json`, and warnings about defaults that change training.
    ///
    /// Keys that do not affect the model are ignored. Missing keys have Hugging Face's defaults,
    /// except for sizes: `n_inner` defaults to `4 * n_embd`, and the others are required. Null
    /// counts as missing.
    ///
    /// # Errors
    /// Text that is not a JSON object, a missing or mistyped key, an unsupported variant of the
    /// architecture, or a shape that [`validate`](Self::validate) rejects.
    pub(crate) fn from_hf_json(keys: &Keys) -> Result<(Self, Vec<String>), ConfigError> {
        keys.expect("model_type", |v| v == "gpt2", "\"gpt2\"")?;
        let activation = |v: &Value| v.as_str().and_then(Activation::of);
        keys.expect(
            "activation_function",
            |v| activation(v).is_some(),
            "\"gelu_new\", \"gelu\", \"relu\" and \"silu\"",
        )?;
        keys.expect("add_cross_attention", |v| v == false, "false")?;

        let dropout = |key| keys.number_or(key, DEFAULT_PDROP);
        let n_embd = keys.size("n_embd")?;
        let config = Self {
            vocab_size: keys.size("vocab_size")?,
            n_positions: keys.size("n_positions")?,
            n_embd,
            n_layer: keys.size("n_layer")?,
            n_head: keys.size("n_head")?,
            n_inner: keys.size_or("n_inner", n_embd.saturating_mul(4))?,
            layer_norm_epsilon: keys.number_or("layer_norm_epsilon", 1e-5)?,
            tied_head: keys.flag_or("tie_word_embeddings", true)?,
            initializer_range: keys.number_or("initializer_range", 0.02)?,
            activation: keys
                .get("activation_function")
                .and_then(activation)
                .unwrap_or_default(),
            resid_pdrop: dropout("resid_pdrop")?,
            embd_pdrop: dropout("embd_pdrop")?,
            attn_pdrop: dropout("attn_pdrop")?,
            scale_attn_weights: keys.flag_or("scale_attn_weights", true)?,
            scale_attn_by_inverse_layer_idx: keys.flag_or(INVERSE_LAYER, false)?,
            reorder_and_upcast_attn: keys.flag_or(UPCAST, false)?,
            special_tokens: keys.special_tokens(),
            lora: None,
        };

        config.validate()?;
        Ok((config, warnings(keys)))
    }

    /// The text of a `config.json` that Hugging Face transformers reads as this model.
    ///
    /// `dtype` is Hugging Face's name of the type of the stored weights: `float32`, `float16` or
    /// `bfloat16`.
    pub(crate) fn to_hf_json(&self, dtype: &str) -> String {
        let mut keys = json!({
            "activation_function": self.activation.name(),
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": decimal(self.attn_pdrop),
            "embd_pdrop": decimal(self.embd_pdrop),
            "initializer_range": decimal(self.initializer_range),
            "layer_norm_epsilon": decimal(self.layer_norm_epsilon),
            "model_type": "gpt2",
            "n_ctx": self.n_positions,
            "n_embd": self.n_embd,
            "n_head": self.n_head,
            "n_inner": self.n_inner,
            "n_layer": self.n_layer,
            "n_positions": self.n_positions,
            "resid_pdrop": decimal(self.resid_pdrop),
            "scale_attn_weights": self.scale_attn_weights,
            "tie_word_embeddings": self.tied_head,
            "torch_dtype": dtype,
            "vocab_size": self.vocab_size,
        });
        // Defaults are not written, as in folders of earlier versions.
        for (key, flag) in [
            (INVERSE_LAYER, self.scale_attn_by_inverse_layer_idx),
            (UPCAST, self.reorder_and_upcast_attn),
        ] {
            if flag {
                keys[key] = true.into();
            }
        }
        json::text(keys, &self.special_tokens)
    }
}

const INVERSE_LAYER: &str = "scale_attn_by_inverse_layer_idx";
const UPCAST: &str = "reorder_and_upcast_attn";

/// The probabilities of dropout in transformers' `GPT2Config`.
const DEFAULT_PDROP: f64 = 0.1;

/// Names the probabilities of dropout that are missing, if any.
fn warnings(keys: &Keys) -> Vec<String> {
    let all = ["resid_pdrop", "embd_pdrop", "attn_pdrop"];
    let missing: Vec<_> = all
        .into_iter()
        .filter(|key| keys.get(key).is_none())
        .collect();
    if missing.is_empty() {
        return Vec::new();
    }
    let missing = missing.join(", ");
    vec![format!(
        "the model's config.json has no {missing}: training has GPT-2's dropout of {DEFAULT_PDROP} unless --dropout sets another"
    )]
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    const GOOD: &str = r#"{"model_type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 64,
        "n_layer": 3, "n_head": 4, "n_inner": null, "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-05, "resid_pdrop": 0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "summary_type": "cls_index"}"#;

    fn read(text: &str) -> Result<(GptConfig, Vec<String>), ConfigError> {
        GptConfig::from_hf_json(&Keys::parse(text)?)
    }

    /// `GOOD` with one key set to a JSON value.
    fn with(key: &str, json: &str) -> String {
        let mut value: Value = serde_json::from_str(GOOD).unwrap();
        value[key] = serde_json::from_str(json).unwrap();
        value.to_string()
    }

    #[test]
    fn missing_keys_take_hugging_face_defaults() {
        let (config, warnings) = read(GOOD).unwrap();
        let expected = GptConfig {
            lora: None,
            vocab_size: 256,
            n_positions: 64,
            n_embd: 64,
            n_layer: 3,
            n_head: 4,
            n_inner: 256,
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
            special_tokens: Vec::new(),
        };

        assert_eq!(config, expected);
        assert!(warnings.is_empty(), "{warnings:?}");
        let (config, _) = read(&with("n_inner", "96")).unwrap();
        assert_eq!(config.n_inner, 96);
        let (config, _) = read(&with("tie_word_embeddings", "false")).unwrap();
        assert!(!config.tied_head);
        let same = read(&with("activation_function", "\"gelu_pytorch_tanh\""))
            .unwrap()
            .0;
        assert_eq!(same, expected);
    }

    #[test]
    fn what_is_written_reads_back_the_same() {
        for name in ["nano", "gpt2-124m"] {
            for tied_head in [true, false] {
                let config = GptConfig {
                    tied_head,
                    n_inner: 99,
                    activation: Activation::Silu,
                    resid_pdrop: 0.1,
                    embd_pdrop: 0.25,
                    attn_pdrop: 0.3,
                    scale_attn_weights: tied_head,
                    scale_attn_by_inverse_layer_idx: tied_head,
                    reorder_and_upcast_attn: tied_head,
                    ..GptConfig::preset(name).unwrap()
                };
                let text = config.to_hf_json("float32");
                assert_eq!(read(&text), Ok((config, vec![])), "{text}");
            }
        }

        let text = GptConfig::preset("nano").unwrap().to_hf_json("bfloat16");
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            value["layer_norm_epsilon"], 1e-5,
            "written as the f32's shortest decimal: {text}"
        );
    }

    /// A GPT-2 with the vocabulary of others has their special tokens.
    #[test]
    fn special_tokens_are_kept() {
        for (key, value) in [
            ("eos_token_id", "[7, 9]"),
            ("pad_token_id", "151643"),
            ("bos_token_id", "0"),
        ] {
            let (config, _) = read(&with(key, value)).unwrap();
            let written: Value = serde_json::from_str(&config.to_hf_json("float32")).unwrap();
            assert_eq!(written[key].to_string(), value.replace(' ', ""));
            let keys = ["bos_token_id", "eos_token_id", "pad_token_id"];
            assert_eq!(
                keys.iter().filter(|key| written.get(key).is_some()).count(),
                1
            );
            assert_eq!(read(&written.to_string()), Ok((config, vec![])));
        }
    }

    #[test]
    fn missing_dropout_is_transformers_default() {
        let (config, warnings) = read(&with("attn_pdrop", "null")).unwrap();
        assert_eq!([config.resid_pdrop, config.attn_pdrop], [0.0, 0.1]);
        let expected = "the model's config.json has no attn_pdrop: training has GPT-2's dropout of 0.1 unless --dropout sets another";
        assert_eq!(warnings, [expected]);
    }

    #[test]
    fn each_wrong_file_is_an_error_that_names_the_key() {
        let cases = [
            (
                "not json".into(),
                "not a JSON object: expected ident at line 1 column 2",
            ),
            ("[1]".into(), "not a JSON object: the text is an array"),
            ("3".into(), "not a JSON object: the text is a number"),
            (
                with("vocab_size", "null"),
                "the key \"vocab_size\" is missing",
            ),
            (
                with("n_layer", "\"three\""),
                "the key \"n_layer\" is \"three\"; expected a whole number",
            ),
            (
                with("n_embd", "-64"),
                "the key \"n_embd\" is -64; expected a whole number",
            ),
            (
                with("n_embd", "64.5"),
                "the key \"n_embd\" is 64.5; expected a whole number",
            ),
            (
                with("n_inner", "true"),
                "the key \"n_inner\" is true; expected a whole number",
            ),
            (
                with("layer_norm_epsilon", "\"x\""),
                "the key \"layer_norm_epsilon\" is \"x\"; expected a number",
            ),
            (
                with("tie_word_embeddings", "1"),
                "the key \"tie_word_embeddings\" is 1; expected true or false",
            ),
            (
                with("attn_pdrop", "true"),
                "the key \"attn_pdrop\" is true; expected a number",
            ),
            (
                with("embd_pdrop", "1"),
                "the model's embd_pdrop is 1; it must be at least 0 and below 1",
            ),
            (
                with("n_head", "5"),
                "the model's n_embd 64 is not divisible by its n_head 5",
            ),
            (
                with("n_head", "0"),
                "the model's n_head is 0; it must be at least 1",
            ),
        ];

        for (text, expected) in cases {
            assert_eq!(read(&text).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn each_variant_that_is_not_computed_is_an_error() {
        let cases = [
            ("model_type", "\"llama\""),
            ("activation_function", "\"tanh\""),
            ("activation_function", "1"),
            ("add_cross_attention", "true"),
        ];

        for (key, value) in cases {
            let error = read(&with(key, value)).unwrap_err();
            assert!(
                matches!(&error, ConfigError::Unsupported { key: k, .. } if *k == key),
                "{error}"
            );
            assert!(
                error
                    .to_string()
                    .starts_with(&format!("the key {key:?} is {value}, which")),
                "{error}"
            );
        }
    }
}
