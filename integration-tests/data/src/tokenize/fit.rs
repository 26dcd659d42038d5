//! Whether a tokenizer is that of a model.
//!
//! A model's weights have learned what each token means, so another tokenizer makes of them a model
//! with random weights, without an error and with a loss that falls. Three things show it:
//!
//! - The model's folder has a tokenizer, and most tokens of the two have other texts, or the end
//!   token has.
//! - The folder has none, but its `config.json` says which token ends a text, and
//!   `tokenizer_config.json` beside the tokenizer says another. A special token of the tokenizer
//!   is accepted too: the tokenizer of conversations ends a text otherwise than that of its base
//!   model.
//! - The tokenizer has fewer than half of the model's tokens. Embeddings that no text
//!   reaches cost memory and time only, so this is a notice.
//!
//! Not compared: the settings of one folder with each other (Qwen's `config.json` names a token at
//! the start, its tokenizer none), `generation_config.json`, whose end tokens are those of
//! conversations, and `bos_token_id`, which is 1 in many a Llama folder whose tokenizer has no such
//! token. A tokenizer may have more tokens than the model; a text with one of them is
//! [`DataError::OutsideVocabulary`].

use std::path::Path;

use indicatif::HumanCount;
use zero_models::hf::companions::end_tokens_in_file;
use zero_models::hf::tokenizer_files::tokenizer_in;

use super::TextTokenizer;
use crate::DataError;

/// Checks that `tokenizer` fits a model with `vocab_size` tokens, and with the weights of `folder`
/// if it has one. Returns what the user should know.
///
/// # Errors
/// [`DataError::OtherTokenizer`], or a file that is no tokenizer.
pub fn check_tokenizer(
    tokenizer: &Path,
    folder: Option<&Path>,
    vocab_size: usize,
) -> Result<Option<String>, DataError> {
    let given = TextTokenizer::open(tokenizer)?;
    let own = folder.map_or(Ok(None), tokenizer_in);
    let own = own.map_err(DataError::Folder)?;
    if let Some(own) = own.filter(|own| !is_same(own, given.folder())) {
        compare(&given, &TextTokenizer::open(&own)?, folder)?;
    } else if let Some(folder) = folder.filter(|folder| !is_same(folder, given.folder())) {
        compare_ends(&given, folder)?;
    }

    let tokens = given.inner.get_vocab_size(true);
    if tokens >= vocab_size.div_ceil(2) {
        return Ok(None);
    }
    let [tokens, all] = [tokens, vocab_size].map(|n| HumanCount(n as u64));
    Ok(Some(format!(
        "{}: the tokenizer has {tokens} tokens and the model {all}: is it the model's?",
        tokenizer.display()
    )))
}

/// Whether a tokenizer's file or folder is in `folder`.
fn is_same(own: &Path, folder: &Path) -> bool {
    let dir = if own.is_dir() {
        Some(own)
    } else {
        own.parent()
    };
    let real = |path: &Path| match path.as_os_str().is_empty() {
        true => Path::new(".").canonicalize().ok(),
        false => path.canonicalize().ok(),
    };
    dir.is_some_and(|dir| real(dir) == real(folder))
}

/// Compares the tokens of a model's own tokenizer.
fn compare(
    given: &TextTokenizer,
    own: &TextTokenizer,
    folder: Option<&Path>,
) -> Result<(), DataError> {
    let ends = folder.map_or_else(|| Ok(Vec::new()), config_ends)?;
    let common = given.inner.get_vocab_size(true);
    let common = common.min(own.inner.get_vocab_size(true)) as u32;
    let differs = |token: &u32| given.inner.id_to_token(*token) != own.inner.id_to_token(*token);

    let differing: Vec<u32> = (0..common).filter(differs).collect();
    let is_other = 2 * differing.len() > common as usize;
    let token = ends.into_iter().find(differs);
    let Some(token) = token.or_else(|| differing.first().copied().filter(|_| is_other)) else {
        return Ok(());
    };
    Err(DataError::OtherTokenizer {
        path: given.path.clone(),
        token: given.describe(token),
        own: format!("{} in {}", own.describe(token), own.path.display()),
        remedy: "remove --tokenizer to use the model's",
    })
}

/// Compares the end tokens that the folder of the weights and that of the tokenizer name.
fn compare_ends(given: &TextTokenizer, folder: &Path) -> Result<(), DataError> {
    let ends = config_ends(folder)?;
    let Some(end) = given.named_token(given.folder(), "eos_token")? else {
        return Ok(());
    };
    let is_known = ends.iter().any(|id| *id == end || given.is_special(*id));
    let Some(own) = ends.first().filter(|_| !is_known) else {
        return Ok(());
    };
    Err(DataError::OtherTokenizer {
        path: given.path.clone(),
        token: format!("the end token is {}", given.describe(end)),
        own: format!("{own} in {}", folder.join("config.json").display()),
        remedy: "pass the model's, or correct eos_token_id there",
    })
}

/// The end tokens of `config.json`, of which a tokenizer may have added more.
fn config_ends(folder: &Path) -> Result<Vec<u32>, DataError> {
    let ends = end_tokens_in_file(&folder.join("config.json"));
    Ok(ends.map_err(DataError::Folder)?.unwrap_or_default())
}

impl TextTokenizer {
    fn is_special(&self, token: u32) -> bool {
        let added = self.inner.get_added_vocabulary();
        let text = self.inner.id_to_token(token);
        text.is_some_and(|text| added.is_special_token(&text))
    }

    fn describe(&self, token: u32) -> String {
        match self.inner.id_to_token(token) {
            Some(text) => format!("token {token} {text:?}"),
            None => format!("token {token} without a text"),
        }
    }
}

#[cfg(test)]
mod tests {
    use integration_tests::{Files, Folder, Printed};
    use serde_json::{Value, json};

    use super::*;

    /// Writes a folder with a tokenizer of `words`, and the named files.
    /// Words in angle brackets are special tokens.
    fn folder(words: &[&str], files: &[(&str, Value)]) -> Folder {
        let dir = Folder::on_disk();
        if !words.is_empty() {
            let vocab: serde_json::Map<_, _> = words
                .iter()
                .enumerate()
                .map(|(id, word)| ((*word).to_owned(), json!(id)))
                .collect();
            let special = words.iter().enumerate();
            let special: Vec<Value> = special
                .filter(|(_, word)| word.starts_with('<'))
                .map(|(id, word)| {
                    json!({
                        "id": id, "content": word, "special": true, "single_word": false,
                        "lstrip": false, "rstrip": false, "normalized": false
                    })
                })
                .collect();
            let tokenizer = json!({
                "version": "1.0",
                "added_tokens": special,
                "model": {"type": "WordLevel", "vocab": vocab, "unk_token": words[0]}
            });
            dir.write("tokenizer.json", tokenizer.to_string());
        }
        for (name, content) in files {
            dir.write(name, content.to_string());
        }
        dir
    }

    fn error(tokenizer: &Path, model: &Path) -> String {
        let found = check_tokenizer(tokenizer, Some(model), 4);
        found.unwrap_err().to_string()
    }

    fn fits(tokenizer: &Path, model: &Path) {
        let found = check_tokenizer(tokenizer, Some(model), 4);
        assert_eq!(found.unwrap(), None);
    }

    #[test]
    fn tokenizer_with_other_texts_is_an_error() {
        let config = ("config.json", json!({"eos_token_id": 3}));
        let model = folder(&["a", "b", "c", "<end>"], &[config]);

        fits(&model, &model);
        fits(&folder(&["a", "b", "c", "<end>"], &[]), &model);
        // A word was renamed, or some were added.
        fits(&folder(&["a", "B", "c", "<end>"], &[]), &model);
        fits(&folder(&["a", "b", "c", "<end>", "d"], &[]), &model);

        let other = error(&folder(&["x", "y", "z", "<end>"], &[]), &model);
        other.shows(&[r#"token 0 "x""#, r#"token 0 "a" in "#, "remove --tokenizer"]);

        let end = error(&folder(&["a", "b", "c", "</s>"], &[]), &model);
        end.shows(&[r#"token 3 "</s>""#]);
    }

    #[test]
    fn other_end_token_is_an_error() {
        let settings = ("tokenizer_config.json", json!({"eos_token": "<end>"}));
        let tokenizer = folder(&["a", "b", "c", "<end>"], &[settings]);
        let model = |end: Value| folder(&[], &[("config.json", json!({"eos_token_id": end}))]);

        for end in [json!(3), json!([1, 3]), Value::Null] {
            fits(&tokenizer, &model(end));
        }
        let other = error(&tokenizer, &model(json!(2)));
        other.shows(&[
            r#"the end token is token 3 "<end>""#,
            "correct eos_token_id there",
        ]);
        error(&tokenizer, &model(json!(9)));
    }

    #[test]
    fn end_of_conversations_is_no_error() {
        let settings = ("tokenizer_config.json", json!({"eos_token": "<turn>"}));
        let tokenizer = folder(&["a", "b", "<turn>", "<end>"], &[settings]);
        let model = |end| folder(&[], &[("config.json", json!({"eos_token_id": end}))]);
        fits(&tokenizer, &model(3));
        error(&tokenizer, &model(1));
    }

    /// Qwen2's folder names a token at the start, and its tokenizer none.
    #[test]
    fn start_token_is_not_compared() {
        let settings = (
            "tokenizer_config.json",
            json!({"bos_token": null, "eos_token": "<end>"}),
        );
        let tokenizer = folder(&["a", "b", "c", "<end>"], &[settings]);
        let config = json!({"bos_token_id": 1, "eos_token_id": 3});
        fits(&tokenizer, &folder(&[], &[("config.json", config)]));
    }

    #[test]
    fn folder_is_not_compared_with_itself() {
        let files = [
            ("config.json", json!({"eos_token_id": 0})),
            ("tokenizer_config.json", json!({"eos_token": "<end>"})),
        ];
        let model = folder(&["a", "b", "c", "<end>"], &files);
        fits(&model, &model);
    }

    #[test]
    fn small_tokenizer_is_a_notice() {
        let tokenizer = folder(&["a", "b", "c", "d"], &[]);
        let of = |vocab_size| check_tokenizer(&tokenizer, None, vocab_size).unwrap();
        assert_eq!(of(8), None);
        let notice = of(9).unwrap();
        notice.shows(&["has 4 tokens and the model 9"]);
    }
}
