//! The tokens at the two ends of a document.

use std::fs;
use std::path::Path;

use serde_json::Value;
use zero_models::hf::companions::end_tokens_in;

use super::{END_OF_TEXT, TextTokenizer};

/// The tokens before and after each document.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::data) struct DocumentEnds {
    /// What the tokenizer's post-processor puts before a text, such as Llama's `<s>`.
    pub(in crate::data) before: Vec<u32>,
    /// The end token, and what the post-processor puts after a text.
    pub(in crate::data) after: Vec<u32>,
}

impl TextTokenizer {
    /// The ends of documents: by the post-processor, and if `separate` with the end token of
    /// [`Self::end_token`] behind each.
    pub(in crate::data) fn document_ends(&self, separate: bool) -> DocumentEnds {
        let mut ends = self.processed_ends().unwrap_or_default();
        let end = self.end_token().filter(|_| separate);
        if let Some(end) = end.filter(|end| ends.after.last() != Some(end)) {
            ends.after.push(end);
        }
        ends
    }

    /// What the post-processor adds to a text.
    fn processed_ends(&self) -> Option<DocumentEnds> {
        let tokens = |special| self.inner.encode_fast("a", special).ok();
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
    fn end_token(&self) -> Option<u32> {
        let dir = self.folder();
        self.named_token(dir, "eos_token")
            .or_else(|| end_tokens_in(dir).first().copied())
            .filter(|token| self.inner.id_to_token(*token).is_some())
            .or_else(|| self.token(END_OF_TEXT))
    }

    /// The folder of the tokenizer.
    pub(super) fn folder(&self) -> &Path {
        if self.path.is_dir() {
            return &self.path;
        }
        self.path.parent().unwrap_or(Path::new(""))
    }

    /// A token of `tokenizer_config.json`: its text, or an object with it.
    pub(super) fn named_token(&self, dir: &Path, key: &str) -> Option<u32> {
        let text = fs::read_to_string(dir.join("tokenizer_config.json")).ok()?;
        let config: Value = serde_json::from_str(&text).ok()?;
        let token = &config[key];
        self.token(token.as_str().or_else(|| token["content"].as_str())?)
    }
}
