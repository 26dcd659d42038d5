//! The bytes of a text that each of its tokens has.

use std::ops::Range;

use parking_lot::Mutex;
use tokenizers::{PostProcessorWrapper, Tokenizer};

use super::encoder::{Encoder, Failed, NamedTokens, Words, byte_chars};
use super::rules::Rules;

/// Tokens, and the bytes of each.
pub(crate) type PlacedTokens = (Vec<u32>, Vec<Range<usize>>);

/// Finds places for a tokenizer whose tokens are bytes of the text, one behind the other.
///
/// # Why
/// The library keeps the places of all characters through each of its steps, which takes most of
/// its time. Here words are looked up, and the lengths of tokens are added up.
pub(super) struct Places {
    /// The bytes of each token.
    lens: Vec<usize>,
    /// Words of encoders that are not in use.
    idle: Mutex<Vec<Words>>,
}

impl Places {
    /// `None` if tokens are not bytes of the text, or the library reports other places.
    pub(super) fn of(tokenizer: &Tokenizer, rules: Option<&Rules>) -> Option<Self> {
        let Some(Rules::Bytes {
            composed: false, ..
        }) = rules
        else {
            return None;
        };
        if tokenizer.get_post_processor().is_some_and(trims) {
            return None;
        }
        let vocab = tokenizer.get_vocab(false);
        let has_byte = |c: &char| vocab.contains_key(&*c.encode_utf8(&mut [0; 4]));
        if !byte_chars().iter().all(has_byte) {
            return None;
        }

        let added = tokenizer.get_added_vocabulary().get_added_tokens_decoder();
        let of_added = added.iter().map(|(&id, token)| (id, token.content.len()));
        let of_model = vocab.iter().map(|(text, &id)| (id, text.chars().count()));
        let mut lens = Vec::new();
        for (id, len) in of_model.chain(of_added) {
            let id = id as usize;
            lens.resize(lens.len().max(id + 1), 0);
            lens[id] = len;
        }
        Some(Self {
            lens,
            idle: Mutex::new(Vec::new()),
        })
    }

    /// The tokens of a text, and the bytes of each; `None` if they are not all of the text.
    pub(super) fn encode(
        &self,
        tokenizer: &Tokenizer,
        rules: Option<&Rules>,
        named: &NamedTokens,
        text: &str,
    ) -> tokenizers::Result<Option<PlacedTokens>> {
        let idle = self.idle.lock().pop();
        let mut encoder = match idle {
            Some(words) => Encoder::with(tokenizer, rules, named, words),
            None => Encoder::new(tokenizer, rules, named)?,
        };
        let mut tokens = Vec::new();
        let encoded = encoder.encode(text, true, &mut tokens);
        encoded.map_err(|Failed(error)| error)?;
        self.idle.lock().push(encoder.into_words());

        let mut end = 0;
        let place = |token: &u32| {
            let start = end;
            end += self.lens.get(*token as usize)?;
            Some(of_characters(text, start..end))
        };
        let places: Option<Vec<Range<usize>>> = tokens.iter().map(place).collect();
        let places = places.filter(|_| end == text.len());
        Ok(places.map(|places| (tokens, places)))
    }
}

/// All bytes of the characters of which `bytes` are some.
fn of_characters(text: &str, mut bytes: Range<usize>) -> Range<usize> {
    while !text.is_char_boundary(bytes.start) && bytes.start > 0 && bytes.start < text.len() {
        bytes.start -= 1;
    }
    while !text.is_char_boundary(bytes.end) && bytes.end < text.len() {
        bytes.end += 1;
    }
    bytes
}

/// Whether places leave out the spaces of a token.
fn trims(processor: &PostProcessorWrapper) -> bool {
    match processor {
        PostProcessorWrapper::ByteLevel(level) => level.trim_offsets,
        PostProcessorWrapper::Roberta(_) => true,
        PostProcessorWrapper::Sequence(steps) => steps.as_ref().iter().any(trims),
        PostProcessorWrapper::Bert(_) | PostProcessorWrapper::Template(_) => false,
    }
}
