//! Text to tokens through a Hugging Face `tokenizer.json`.

use std::path::{Path, PathBuf};

use tokenizers::Tokenizer;

use super::DataError;

/// A part of a text that is tokenized at once is about this long.
const PART_BYTES: usize = 1 << 16;

/// A tokenizer, and the file it came from.
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
        // A file may carry the padding and truncation of one sentence's use; a corpus wants neither.
        inner.with_padding(None);
        let _ = inner.with_truncation(None);
        Ok(Self { path: path.to_owned(), inner })
    }

    /// Appends the tokens of `text`, without the special tokens of a sentence's ends.
    pub(super) fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), DataError> {
        for part in parts(text, PART_BYTES) {
            let encoding = self.inner.encode_fast(part, false).map_err(|e| DataError::Tokenizer {
                path: self.path.clone(),
                message: format!("cannot tokenize: {}", one_line(&e.to_string())),
            })?;
            out.extend_from_slice(encoding.get_ids());
        }
        Ok(())
    }
}

fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Cuts a text into parts of about `size` bytes, so that a large file does not take many times its size.
///
/// A cut is after a line break between two characters that are not space. There GPT-2's own rules begin a
/// new word, so its tokens are those of the uncut text. Where there is no such place within another `size`
/// bytes, the cut is between any two characters.
fn parts(text: &str, size: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let at = cut(rest, size);
        let (part, later) = rest.split_at(at);
        rest = later;
        Some(part)
    })
}

fn cut(text: &str, size: usize) -> usize {
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
    fn parts_are_the_text_cut_after_single_line_breaks() {
        let text = "ab\ncd\n\nef\n gh\nij kl mn\nop\n";
        let parts: Vec<&str> = parts(text, 3).collect();
        assert_eq!(parts.concat(), text);
        assert_eq!(parts[0], "ab\n");
        for part in &parts[..parts.len() - 1] {
            assert!(!part.is_empty());
        }
    }

    #[test]
    fn text_without_line_breaks_is_cut_between_characters() {
        let text = "é".repeat(50);
        for size in 1..20 {
            let parts: Vec<&str> = parts(&text, size).collect();
            assert_eq!(parts.concat(), text, "size {size}");
        }
        assert_eq!(parts("", 4).count(), 0);
    }
}
