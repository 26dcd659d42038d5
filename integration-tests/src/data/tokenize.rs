//! Tokenization by a Hugging Face `tokenizer.json`.

use std::path::{Path, PathBuf};

use tokenizers::Tokenizer;

use super::DataError;

/// Approximate length of the parts that are tokenized at a time.
const PART_BYTES: usize = 1 << 16;

/// A tokenizer and its file.
pub(super) struct TextTokenizer {
    path: PathBuf,
    inner: Tokenizer,
}

impl TextTokenizer {
    pub(super) fn open(path: &Path) -> Result<Self, DataError> {
        if !path.is_file() {
            return Err(DataError::Missing { path: path.to_owned() });
        }
        let mut inner = Tokenizer::from_file(path)
            .map_err(|e| DataError::Tokenizer { path: path.to_owned(), message: one_line(&e.to_string()) })?;
        // A file may set padding and truncation for single sentences; a corpus must have neither.
        inner.with_padding(None);
        let _ = inner.with_truncation(None);
        Ok(Self { path: path.to_owned(), inner })
    }

    /// Appends the tokens of `text`, without special tokens at its ends.
    pub(super) fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), DataError> {
        for part in parts(text, PART_BYTES) {
            let encoding = self.inner.encode_fast(part, false).map_err(|e| DataError::Tokenizer {
                path: self.path.clone(),
                message: format!("failed to tokenize: {}", one_line(&e.to_string())),
            })?;
            out.extend_from_slice(encoding.get_ids());
        }
        Ok(())
    }
}

fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Splits a text into parts of about `size` bytes, since tokenizing needs many times the memory of its input.
///
/// A split is after a line break between two characters other than space. GPT-2's rules begin a new word there, so
/// the tokens equal those of the whole text. If another `size` bytes have no such place, the split is between any two
/// characters.
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
    (size.max(2)..2 * size).find(clean).unwrap_or_else(|| text.ceil_char_boundary(size.max(1)))
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
