//! The files beside the weights of a Hugging Face folder: of the tokenizer and for generation.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use zero_ckpt::files::{self, SMALL_FILE_BYTES};

use super::tokenizer_files::{
    GPT2_FILES, OTHER_TOKENIZER, TOKENIZER_FILE, is_present, tokenizer_in,
};
use super::{CONFIG_FILE, HfError};

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

/// The folder of the templates besides the default one.
const TEMPLATES: &str = "additional_chat_templates";

/// Those of [`COMPANIONS`] that hold tokens. Two tokenizers must not be mixed.
const VOCABULARY: [&str; 7] = [
    TOKENIZER_FILE,
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "encoder.json",
    "vocab.bpe",
    "tokenizer.model",
];

/// A name below a folder, and a path.
pub type NamedFile = (String, PathBuf);

/// The files of a model that a run keeps beside its checkpoints: those of the folder of the model,
/// and below [`OTHER_TOKENIZER`] those beside a tokenizer that is not the folder's.
///
/// # Errors
/// A folder cannot be read.
pub fn files_to_keep(
    model: Option<&Path>,
    tokenizer: Option<&Path>,
) -> Result<Vec<NamedFile>, HfError> {
    let mut found = Vec::new();
    let mut own = None;
    if let Some(dir) = model {
        found.extend(companions_in(dir)?);
        own = tokenizer_in(dir)?;
    }

    let is_own = |tokenizer: &Path| {
        let own = [own.as_deref(), model].into_iter().flatten();
        own.into_iter().any(|own| real(own) == real(tokenizer))
    };
    if let Some(tokenizer) = tokenizer.filter(|tokenizer| !is_own(tokenizer)) {
        let named = |(name, path)| (format!("{OTHER_TOKENIZER}/{name}"), path);
        found.extend(beside_tokenizer(tokenizer)?.into_iter().map(named));
    }
    Ok(found)
}

/// The name in an export of one of `names`, which are those of [`files_to_keep`]; `None` for one
/// that is not exported.
pub fn exported_name(name: &str, names: &[String]) -> Option<String> {
    let other = |name: &str| format!("{OTHER_TOKENIZER}/{name}");
    let has_other = names.iter().any(|name| name.starts_with(&other("")));
    let of_other = name.strip_prefix(&other(""));
    let is_replaced = || VOCABULARY.contains(&name) || names.contains(&other(name));
    match of_other {
        None if has_other && is_replaced() => None,
        None => Some(name),
        found => found,
    }
    .filter(|name| *name != CONFIG_FILE)
    .map(str::to_owned)
}

/// Whether files of these names hold a tokenizer.
pub fn have_tokenizer<'a>(mut names: impl Iterator<Item = &'a str>) -> bool {
    names.any(|name| {
        [
            TOKENIZER_FILE,
            "tokenizer.model",
            "vocab.json",
            "encoder.json",
        ]
        .contains(&name)
    })
}

/// The files beside the weights of a folder, and its `config.json`.
fn companions_in(dir: &Path) -> Result<Vec<NamedFile>, HfError> {
    let mut found = Vec::new();
    for name in COMPANIONS.into_iter().chain([CONFIG_FILE]) {
        let path = dir.join(name);
        if is_present(&path)? {
            found.push((name.to_owned(), path));
        }
    }

    let templates = dir.join(TEMPLATES);
    if templates.is_dir() {
        let read = |source| HfError::Read {
            path: templates.clone(),
            source,
        };
        for entry in fs::read_dir(&templates).map_err(read)? {
            let path = entry.map_err(read)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.ends_with(".jinja") {
                found.push((format!("{TEMPLATES}/{name}"), path));
            }
        }
    }
    Ok(found)
}

/// The files of a tokenizer, which is a folder or a file, and those beside it.
fn beside_tokenizer(tokenizer: &Path) -> Result<Vec<NamedFile>, HfError> {
    if tokenizer.is_dir() {
        return companions_in(tokenizer);
    }
    let dir = match tokenizer.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    if tokenizer.ends_with(TOKENIZER_FILE) {
        return companions_in(dir);
    }

    let mut found = companions_in(dir)?;
    found.retain(|(name, _)| !VOCABULARY.contains(&name.as_str()));
    let pair = GPT2_FILES
        .iter()
        .find(|pair| pair.iter().any(|name| tokenizer.ends_with(name)));
    match pair {
        Some(pair) => found.extend(pair.map(|name| (name.to_owned(), dir.join(name)))),
        None => found.push((TOKENIZER_FILE.to_owned(), tokenizer.to_owned())),
    }
    Ok(found)
}

fn real(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

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
    for name in ["generation_config.json", CONFIG_FILE] {
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
