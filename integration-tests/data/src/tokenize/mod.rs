//! Tokenization by a Hugging Face `tokenizer.json`, or by GPT-2's `vocab.json` and `merges.txt`.
//!
//! Texts are tokenized part by part on several threads ([`stream`]), with the tokens of the whole
//! text ([`rules`]): a part is split into words ([`words`]), and the tokens of a word are looked up
//! or made by the model ([`encoder`]).

mod charsmap;

mod encoder;
mod fit;
mod places;
mod rules;
mod special;
pub(super) mod stream;
#[cfg(test)]
mod tests;
mod untrusted;
mod words;

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use crc_fast::{CrcAlgorithm, Digest};
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};
use zero_ckpt::files;
use zero_models::hf::tokenizer_files::{GPT2_FILES, TOKENIZER_FILE, gpt2_files, is_present};

use super::DataError;
use encoder::NamedTokens;
pub use fit::check_tokenizer;
use places::{PlacedTokens, Places};
use rules::Rules;
pub(super) use special::DocumentEnds;
use untrusted::{TokenizerParts, check_model};

/// GPT-2's only special token.
const END_OF_TEXT: &str = "<|endoftext|>";

/// Longest file of a tokenizer. That of Gemma 3, with 262,144 tokens, has 33 MB.
const TOKENIZER_BYTES: u64 = 64 << 20;

/// The byte-level BPE of GPT-2, of the texts of its two files.
fn gpt2(vocab: &str, merges: &str) -> tokenizers::Result<Tokenizer> {
    let vocab: HashMap<String, u32> = serde_json::from_str(vocab)?;
    let lines = merges.lines().filter(|line| !line.starts_with("#version"));
    let merges = lines.filter(|line| !line.is_empty()).map(|line| {
        let pair = line
            .split_once(' ')
            .filter(|(_, right)| !right.contains(' '));
        let (left, right) = pair.ok_or_else(|| format!("the merge {line:?} is not two tokens"))?;
        Ok((left.to_owned(), right.to_owned()))
    });
    let merges = merges.collect::<Result<Vec<_>, String>>()?;
    let bpe = BPE::builder()
        .vocab_and_merges(vocab.into_iter().collect::<Vocab>(), merges)
        .build()?;
    let mut tokenizer = Tokenizer::new(bpe);
    tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
    tokenizer.with_decoder(Some(ByteLevel::new(false, true, true)));
    if tokenizer.token_to_id(END_OF_TEXT).is_some() {
        tokenizer.add_special_tokens([AddedToken::from(END_OF_TEXT, true)])?;
    }
    Ok(tokenizer)
}

/// The files of a tokenizer.
enum TokenizerFiles {
    Json(PathBuf),
    Gpt2 { vocab: PathBuf, merges: PathBuf },
}

impl TokenizerFiles {
    /// Those of a file, or of a folder: its `tokenizer.json`, or else GPT-2's two.
    fn find(path: &Path) -> Result<Self, DataError> {
        let error = |message: &str| DataError::Tokenizer {
            path: path.to_owned(),
            message: message.to_owned(),
        };

        if !is_present(path).map_err(DataError::Folder)? {
            return Err(DataError::Missing {
                path: path.to_owned(),
            });
        }

        let pair = |dir: &Path| {
            let files = gpt2_files(dir).map_err(DataError::Folder)?;
            Ok(files.map(|(vocab, merges)| Self::Gpt2 { vocab, merges }))
        };

        if path.is_dir() {
            let json = path.join(TOKENIZER_FILE);
            let found = if is_present(&json).map_err(DataError::Folder)? {
                Some(Self::Json(json))
            } else {
                pair(path)?
            };
            return found.ok_or_else(|| {
                error("the folder has neither tokenizer.json nor vocab.json and merges.txt")
            });
        }

        if GPT2_FILES
            .as_flattened()
            .iter()
            .any(|name| path.ends_with(name))
        {
            let found = path.parent().map_or(Ok(None), pair)?;
            return found
                .ok_or_else(|| error("vocab.json and merges.txt must be in the same folder"));
        }
        Ok(Self::Json(path.to_owned()))
    }

    /// Reads the files and makes the tokenizer of them.
    fn open(&self) -> Result<Tokenizer, DataError> {
        let mut texts = Vec::new();
        for file in self.paths() {
            let text = files::read_text(file, TOKENIZER_BYTES);
            texts.push(text.map_err(|source| DataError::Read {
                path: file.to_owned(),
                source,
            })?);
        }
        let loaded = match &texts[..] {
            [vocab, merges] => caught(|| gpt2(vocab, merges)),
            texts => caught(|| {
                let text = texts.concat();
                let text = text.trim_start_matches('\u{feff}');
                let parts: TokenizerParts = serde_json::from_str(text)?;
                parts.check()?;
                text.parse()
            }),
        };
        let loaded = loaded.and_then(|tokenizer| {
            check_model(&tokenizer)?;
            probe(&tokenizer)?;
            Ok(tokenizer)
        });
        loaded.map_err(|error| DataError::Tokenizer {
            path: self.paths()[0].to_owned(),
            message: format!(
                "not a tokenizer that can be used: {}",
                one_line(&error.to_string())
            ),
        })
    }

    fn paths(&self) -> Vec<&Path> {
        match self {
            Self::Json(file) => vec![file],
            Self::Gpt2 { vocab, merges } => vec![vocab, merges],
        }
    }
}

/// The checksum of the files that [`super::DataSource::tokenizer`] reads.
///
/// # Errors
/// There is no tokenizer, or a failed read.
pub fn tokenizer_checksum(path: &Path) -> Result<u64, DataError> {
    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
    for file in TokenizerFiles::find(path)?.paths() {
        let bytes = files::read(file, TOKENIZER_BYTES).map_err(|source| DataError::Read {
            path: file.to_owned(),
            source,
        })?;
        digest.update(&(bytes.len() as u64).to_le_bytes());
        digest.update(&bytes);
    }
    Ok(digest.finalize())
}

/// A tokenizer and its file.
pub struct TextTokenizer {
    path: PathBuf,
    inner: Tokenizer,
    /// `None` if texts must be tokenized whole.
    rules: Option<Rules>,
    named: NamedTokens,
    /// `None` if the library must find the places of tokens.
    places: Option<Places>,
}

impl TextTokenizer {
    /// Opens the tokenizer of a file or a folder.
    ///
    /// # Errors
    /// There is none, or its rules are not supported or not safe.
    pub fn open(path: &Path) -> Result<Self, DataError> {
        let opened = TokenizerFiles::find(path)?.open()?;
        let made = caught(|| Self::of(path, opened));
        made.map_err(|e| DataError::Tokenizer {
            path: path.to_owned(),
            message: format!("not a tokenizer: {}", one_line(&e.to_string())),
        })
    }

    fn of(path: &Path, mut inner: Tokenizer) -> tokenizers::Result<Self> {
        // A file may set padding and truncation for single sentences; a corpus must have neither.
        inner.with_padding(None);
        let _ = inner.with_truncation(None);
        let rules = Rules::of(&inner);
        Ok(Self {
            path: path.to_owned(),
            places: Places::of(&inner, rules.as_ref()),
            rules,
            named: NamedTokens::of(&inner)?,
            inner,
        })
    }

    /// The file or folder that it was opened from.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The tokens of a prompt, with the special tokens that the tokenizer's file puts around a
    /// text.
    ///
    /// # Errors
    /// The library rejects the text.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, DataError> {
        let encoding = caught(|| self.inner.encode_fast(text, true));
        let encoding = encoding.map_err(|e| self.error("failed to tokenize the prompt", &e))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The tokens of a text without further special tokens, and the bytes of each.
    pub(crate) fn encode_with_places(&self, text: &str) -> Result<PlacedTokens, DataError> {
        let failed = |error| self.error("failed to tokenize the text", &error);
        if let Some(places) = &self.places {
            let inner = &self.inner;
            let rules = self.rules.as_ref();
            let encoded = caught(|| places.encode(inner, rules, &self.named, text));
            if let Some(encoded) = encoded.map_err(failed)? {
                return Ok(encoded);
            }
        }
        let encoding = caught(|| self.inner.encode(text, false));
        let encoding = encoding.map_err(failed)?;
        let places = encoding.get_offsets().iter();
        let places = places.map(|&(start, end)| start..end).collect();
        Ok((encoding.get_ids().to_vec(), places))
    }

    /// The id of a token by its text.
    pub(crate) fn token(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    /// The text of tokens, special ones included.
    ///
    /// # Errors
    /// The library rejects the tokens.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, DataError> {
        let text = caught(|| self.inner.decode(tokens, false));
        text.map_err(|e| self.error("failed to decode tokens", &e))
    }

    fn file_error(&self, file: &Path, error: &tokenizers::Error) -> DataError {
        self.error(&format!("failed to tokenize {}", file.display()), error)
    }

    fn error(&self, doing: &str, error: &tokenizers::Error) -> DataError {
        DataError::Tokenizer {
            path: self.path.clone(),
            message: format!("{doing}: {}", one_line(&error.to_string())),
        }
    }
}

/// Calls the library; a panic there becomes an error. After it the tokenizer is not used any more.
fn caught<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> tokenizers::Result<T> {
    let failed = |panic: Box<dyn Any + Send>| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        let text = text.unwrap_or("without a message");
        Err(format!("its rules make the tokenizers library panic ({text})").into())
    };
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(failed)
}

/// Tokenizes and decodes a text that most rules apply to, to find those that panic. Not an error: a
/// tokenizer that rejects the text, since it may be made for another alphabet.
fn probe(tokenizer: &Tokenizer) -> tokenizers::Result<()> {
    let ascii: String = (' '..='~').collect();
    let long = "a".repeat(600);
    let text = format!("{ascii}\t\r\n\n  Größe, cafe\u{301}, 漢字 and 🦀: 12.5 ﷺ don't {long} ");
    for special in [false, true] {
        let ends = caught(|| {
            let Ok(encoding) = tokenizer.encode(text.as_str(), special) else {
                return Ok(());
            };
            let _decoded = tokenizer.decode(encoding.get_ids(), false);
            Ok(())
        });
        ends?;
    }
    Ok(())
}

fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}
