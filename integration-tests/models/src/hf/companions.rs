//! The files beside the weights of a Hugging Face folder: of the tokenizer and for generation.

use std::fs;
use std::path::Path;

use serde_json::Value;

/// Files that belong to a model, not to its weights, and that an export keeps.
pub const COMPANIONS: [&str; 12] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "encoder.json",
    "vocab.bpe",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
];

/// The tokens that end a text, by the folder's `generation_config.json` or else `config.json`;
/// empty if neither names one.
pub fn end_tokens_in(dir: &Path) -> Vec<u32> {
    let of_file = |name: &str| {
        let text = fs::read_to_string(dir.join(name)).ok()?;
        end_tokens_of(&serde_json::from_str(&text).ok()?)
    };
    of_file("generation_config.json")
        .or_else(|| of_file("config.json"))
        .unwrap_or_default()
}

/// `eos_token_id` of a configuration: a token or a list of them.
pub fn end_tokens_of(config: &Value) -> Option<Vec<u32>> {
    let token = |value: &Value| u32::try_from(value.as_u64()?).ok();
    match &config["eos_token_id"] {
        Value::Array(list) => Some(list.iter().filter_map(token).collect()),
        value => Some(vec![token(value)?]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_tokens_are_those_of_generation_first() {
        let dir = tempfile::tempdir().unwrap();
        assert!(end_tokens_in(dir.path()).is_empty());
        fs::write(dir.path().join("config.json"), r#"{"eos_token_id": 7}"#).unwrap();
        assert_eq!(end_tokens_in(dir.path()), [7]);
        let file = dir.path().join("generation_config.json");
        fs::write(&file, r#"{"eos_token_id": [128001, 128009]}"#).unwrap();
        assert_eq!(end_tokens_in(dir.path()), [128_001, 128_009]);
        for without in ["{}", "no JSON", r#"{"eos_token_id": null}"#] {
            fs::write(&file, without).unwrap();
            assert_eq!(end_tokens_in(dir.path()), [7], "{without}");
        }
    }
}
