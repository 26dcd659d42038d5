//! Tokenization by a Hugging Face `tokenizer.json`, or by GPT-2's `vocab.json` and `merges.txt`.

use std::ops::Range;
use std::path::{Path, PathBuf};

use crc_fast::{CrcAlgorithm, Digest};
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};
use zero_models::hf::tokenizer_files::{GPT2_FILES, TOKENIZER_FILE, gpt2_files};

use super::DataError;

/// Approximate length of the parts that are tokenized at a time.
const PART_BYTES: usize = 1 << 16;

/// GPT-2's only special token.
const END_OF_TEXT: &str = "<|endoftext|>";

/// The byte-level BPE of GPT-2.
fn gpt2(vocab: &Path, merges: &Path) -> tokenizers::Result<Tokenizer> {
    let bpe =
        BPE::from_file(&vocab.display().to_string(), &merges.display().to_string()).build()?;
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

        if !path.exists() {
            return Err(DataError::Missing {
                path: path.to_owned(),
            });
        }

        let pair = |dir: &Path| gpt2_files(dir).map(|(vocab, merges)| Self::Gpt2 { vocab, merges });

        if path.is_dir() {
            let json = path.join(TOKENIZER_FILE);
            let found = if json.is_file() {
                Some(Self::Json(json))
            } else {
                pair(path)
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
            let found = path.parent().and_then(pair);
            return found
                .ok_or_else(|| error("vocab.json and merges.txt must be in the same folder"));
        }
        Ok(Self::Json(path.to_owned()))
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
        let bytes = std::fs::read(file).map_err(|source| DataError::Read {
            path: file.to_owned(),
            source,
        })?;
        digest.update(&(bytes.len() as u64).to_le_bytes());
        digest.update(&bytes);
    }
    Ok(digest.finalize())
}

/// A tokenizer and its file.
pub(crate) struct TextTokenizer {
    path: PathBuf,
    inner: Tokenizer,
}

impl TextTokenizer {
    pub(crate) fn open(path: &Path) -> Result<Self, DataError> {
        let opened = match TokenizerFiles::find(path)? {
            TokenizerFiles::Json(file) => Tokenizer::from_file(file),
            TokenizerFiles::Gpt2 { vocab, merges } => gpt2(&vocab, &merges),
        };
        let mut inner = opened.map_err(|e| DataError::Tokenizer {
            path: path.to_owned(),
            message: format!("not a tokenizer: {}", one_line(&e.to_string())),
        })?;
        // A file may set padding and truncation for single sentences; a corpus must have neither.
        inner.with_padding(None);
        let _ = inner.with_truncation(None);
        Ok(Self {
            path: path.to_owned(),
            inner,
        })
    }

    /// Appends the tokens of `text`, the content of `file`, without special tokens at its ends.
    pub(super) fn encode(
        &self,
        file: &Path,
        text: &str,
        out: &mut Vec<u32>,
    ) -> Result<(), DataError> {
        for part in parts(text, PART_BYTES) {
            let encoding = self.inner.encode_fast(part, false).map_err(|e| {
                let doing = format!("failed to tokenize {}", file.display());
                self.error(&doing, &e)
            })?;
            out.extend_from_slice(encoding.get_ids());
        }
        Ok(())
    }

    /// The tokens of a prompt, with the special tokens that the tokenizer's file puts around a
    /// text.
    pub(crate) fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, DataError> {
        let encoding = self.inner.encode_fast(text, true);
        let encoding = encoding.map_err(|e| self.error("failed to tokenize the prompt", &e))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The tokens of a text without further special tokens, and the bytes of each.
    pub(crate) fn encode_with_places(
        &self,
        text: &str,
    ) -> Result<(Vec<u32>, Vec<Range<usize>>), DataError> {
        let encoding = self.inner.encode(text, false);
        let encoding = encoding.map_err(|e| self.error("failed to tokenize the text", &e))?;
        let places = encoding.get_offsets().iter();
        let places = places.map(|&(start, end)| start..end).collect();
        Ok((encoding.get_ids().to_vec(), places))
    }

    /// The id of a token by its text.
    pub(crate) fn token(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    /// The text of tokens, special ones included.
    pub(crate) fn decode(&self, tokens: &[u32]) -> Result<String, DataError> {
        let text = self.inner.decode(tokens, false);
        text.map_err(|e| self.error("failed to decode tokens", &e))
    }

    fn error(&self, doing: &str, error: &tokenizers::Error) -> DataError {
        DataError::Tokenizer {
            path: self.path.clone(),
            message: format!("{doing}: {}", one_line(&error.to_string())),
        }
    }
}

fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Splits a text into parts of about `size` bytes, since tokenizing needs many times the memory of
/// its input.
///
/// A split is after a line break between two characters other than space. GPT-2's rules begin a new
/// word there, so the tokens equal those of the whole text. If another `size` bytes have no such
/// place, the split is between any two characters.
fn parts(text: &str, size: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let at = split_point(rest, size);
        let (part, later) = rest.split_at(at);
        rest = later;
        Some(part)
    })
}

fn split_point(text: &str, size: usize) -> usize {
    if text.len() <= 2 * size {
        return text.len();
    }
    let bytes = text.as_bytes();
    let is_word = |b: u8| b.is_ascii_graphic();
    let clean = |i: &usize| is_word(bytes[i - 2]) && bytes[i - 1] == b'\n' && is_word(bytes[*i]);
    let boundary = || (size.max(1)..text.len()).find(|&at| text.is_char_boundary(at));
    (size.max(2)..2 * size)
        .find(clean)
        .or_else(boundary)
        .unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_split_after_single_line_breaks() {
        let text = "ab\ncd\n\nef\n gh\nij kl mn\nop\n";
        let parts: Vec<&str> = parts(text, 3).collect();
        assert_eq!(parts.concat(), text);
        assert_eq!(parts[0], "ab\n");
        for part in &parts[..parts.len() - 1] {
            assert!(!part.is_empty());
        }
    }

    #[test]
    fn text_without_line_breaks_is_split() {
        let text = "é".repeat(50);
        for size in 1..20 {
            let parts: Vec<&str> = parts(&text, size).collect();
            assert_eq!(parts.concat(), text, "size {size}");
        }
        assert_eq!(parts("", 4).count(), 0);
    }
}
