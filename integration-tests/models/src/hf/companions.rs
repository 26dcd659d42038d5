//! The files beside the weights of a Hugging Face folder: of the tokenizer and for generation.

use std::path::Path;

use serde_json::Value;
use zero_ckpt::files::{self, SMALL_FILE_BYTES};

use super::HfError;

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

/// The JSON file of a folder; `None` if there is no entry of that name. A byte order mark at the
/// start is skipped.
///
/// # Errors
/// The file is there, and cannot be read or is not JSON.
pub fn read_json(path: &Path) -> Result<Option<Value>, HfError> {
    let text = files::read_text_if_present(path, SMALL_FILE_BYTES);
    let text = text.map_err(|source| HfError::Read {
        path: path.to_owned(),
        source,
    })?;
    let value = text.map(|text| serde_json::from_str(text.trim_start_matches('\u{feff}')));
    value.transpose().map_err(|error| HfError::Json {
        path: path.to_owned(),
        message: error.to_string(),
    })
}

/// The tokens that end a text, by the folder's `generation_config.json` or else `config.json`;
/// empty if neither names one.
///
/// # Errors
/// One of them is there, and cannot be read or names no token.
pub fn end_tokens_in(dir: &Path) -> Result<Vec<u32>, HfError> {
    for name in ["generation_config.json", "config.json"] {
        if let Some(tokens) = end_tokens_in_file(&dir.join(name))? {
            return Ok(tokens);
        }
    }
    Ok(Vec::new())
}

/// The tokens that end a text, by one configuration file; `None` if it names none or is absent.
///
/// # Errors
/// The file is there, and cannot be read or names no token.
pub fn end_tokens_in_file(path: &Path) -> Result<Option<Vec<u32>>, HfError> {
    let Some(config) = read_json(path)? else {
        return Ok(None);
    };
    let tokens = end_tokens_of(&config);
    if tokens.is_none() && !config["eos_token_id"].is_null() {
        return Err(HfError::EndToken {
            path: path.to_owned(),
            value: config["eos_token_id"].to_string(),
        });
    }
    Ok(tokens)
}

/// `eos_token_id` of a configuration: a token or a list of them.
pub fn end_tokens_of(config: &Value) -> Option<Vec<u32>> {
    let token = |value: &Value| u32::try_from(value.as_u64()?).ok();
    match &config["eos_token_id"] {
        Value::Array(list) => list.iter().map(token).collect(),
        value => Some(vec![token(value)?]),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn end_tokens_are_those_of_generation_first() {
        let dir = tempfile::tempdir().unwrap();
        let ends = || end_tokens_in(dir.path()).unwrap();
        assert!(ends().is_empty());
        fs::write(dir.path().join("config.json"), r#"{"eos_token_id": 7}"#).unwrap();
        assert_eq!(ends(), [7]);
        let file = dir.path().join("generation_config.json");
        fs::write(&file, r#"{"eos_token_id": [128001, 128009]}"#).unwrap();
        assert_eq!(ends(), [128_001, 128_009]);
        for without in ["{}", r#"{"eos_token_id": null}"#] {
            fs::write(&file, without).unwrap();
            assert_eq!(ends(), [7], "{without}");
        }
        fs::write(&file, "\u{feff}{\"eos_token_id\": 3}").unwrap();
        assert_eq!(ends(), [3]);
    }

    #[test]
    fn unusable_file_is_not_absent() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), r#"{"eos_token_id": 7}"#).unwrap();
        let file = dir.path().join("generation_config.json");
        let error = || {
            let error = end_tokens_in(dir.path()).unwrap_err().to_string();
            assert!(error.contains("generation_config.json"), "{error}");
            error
        };

        for (text, expected) in [
            ("no JSON", "not JSON"),
            ("", "not JSON"),
            (r#"{"eos_token_id": "x"}"#, r#"eos_token_id is "x""#),
            (r#"{"eos_token_id": [1, -1]}"#, "eos_token_id is [1,-1]"),
            (
                r#"{"eos_token_id": 4294967296}"#,
                "eos_token_id is 4294967296",
            ),
        ] {
            fs::write(&file, text).unwrap();
            assert!(error().contains(expected), "{text}: {}", error());
        }
        fs::remove_file(&file).unwrap();
        symlink("gone", &file).unwrap();
        assert!(error().contains("does not exist here"), "{}", error());
    }
}
