//! The tokens at the two ends of a document.

use std::path::Path;

use zero_models::hf::companions::{end_tokens_in, read_json};

use super::{END_OF_TEXT, TextTokenizer, caught};
use crate::DataError;

/// The tokens before and after each document.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DocumentEnds {
    /// What the tokenizer's post-processor puts before a text, such as Llama's `<s>`.
    pub(crate) before: Vec<u32>,
    /// The end token, and what the post-processor puts after a text.
    pub(crate) after: Vec<u32>,
}

impl TextTokenizer {
    /// The ends of documents: by the post-processor, and if `separate` with the end token of
    /// [`Self::end_token`] behind each.
    ///
    /// # Errors
    /// A file that may name the end token cannot be used.
    pub(crate) fn document_ends(&self, separate: bool) -> Result<DocumentEnds, DataError> {
        let mut ends = self.processed_ends().unwrap_or_default();
        let end = if separate { self.end_token()? } else { None };
        if let Some(end) = end.filter(|end| ends.after.last() != Some(end)) {
            ends.after.push(end);
        }
        Ok(ends)
    }

    /// What the post-processor adds to a text.
    fn processed_ends(&self) -> Option<DocumentEnds> {
        let tokens = |special| caught(|| self.inner.encode_fast("a", special)).ok();
        let (plain, processed) = (tokens(false)?, tokens(true)?);
        let (plain, processed) = (plain.get_ids(), processed.get_ids());
        let mut places = 0..=processed.len().checked_sub(plain.len())?;
        let at = places.find(|&at| processed[at..].starts_with(plain))?;
        Some(DocumentEnds {
            before: processed[..at].to_vec(),
            after: processed[at + plain.len()..].to_vec(),
        })
    }

    /// The token that ends a document: that which `tokenizer_config.json` beside the tokenizer
    /// names, or else `generation_config.json` or `config.json`, or else GPT-2's.
    fn end_token(&self) -> Result<Option<u32>, DataError> {
        let dir = self.folder();
        let mut end = self.named_token(dir, "eos_token")?;
        if end.is_none() {
            let ends = end_tokens_in(dir).map_err(DataError::Folder)?;
            end = ends.first().copied();
        }
        let known = end.filter(|token| self.inner.id_to_token(*token).is_some());
        Ok(known.or_else(|| self.token(END_OF_TEXT)))
    }

    /// The folder of the tokenizer.
    pub(super) fn folder(&self) -> &Path {
        if self.path.is_dir() {
            return &self.path;
        }
        self.path.parent().unwrap_or(Path::new(""))
    }

    /// A token of `tokenizer_config.json`: its text, or an object with it.
    ///
    /// # Errors
    /// The file is there and cannot be used.
    pub(super) fn named_token(&self, dir: &Path, key: &str) -> Result<Option<u32>, DataError> {
        let config = read_json(&dir.join("tokenizer_config.json")).map_err(DataError::Folder)?;
        let Some(config) = config else {
            return Ok(None);
        };
        let token = &config[key];
        let text = token.as_str().or_else(|| token["content"].as_str());
        Ok(text.and_then(|text| self.token(text)))
    }
}
