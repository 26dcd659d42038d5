//! Tokens of a text part by part, as of the whole text.

use std::borrow::Cow;

use aho_corasick::{AhoCorasick, MatchKind};
use regex_automata::hybrid::CacheError;
use tokenizers::Tokenizer;
use tokenizers::tokenizer::{Model, NormalizedString, Normalizer};

use super::rules::{Prefix, Rules, SPACE, SplitRule};
use super::words::{Splitter, WordTokens, each_word, word_key};

/// The tokens that a text may name, such as `<|endoftext|>`.
#[derive(Clone)]
pub(super) struct NamedTokens {
    search: Option<AhoCorasick>,
    ids: Vec<u32>,
    /// Whether all are found by their text alone, before it is normalized.
    are_plain: bool,
}

impl NamedTokens {
    pub(super) fn of(tokenizer: &Tokenizer) -> tokenizers::Result<Self> {
        let added = tokenizer.get_added_vocabulary().get_added_tokens_decoder();
        let (ids, contents): (Vec<u32>, Vec<&str>) = added
            .iter()
            .map(|(id, token)| (*id, token.content.as_str()))
            .unzip();
        let search = if ids.is_empty() {
            None
        } else {
            let kind = MatchKind::LeftmostLongest;
            Some(AhoCorasick::builder().match_kind(kind).build(contents)?)
        };
        let mut tokens = added.values();
        let are_plain = tokens.all(|t| !(t.normalized || t.lstrip || t.rstrip || t.single_word));
        Ok(Self {
            search,
            ids,
            are_plain,
        })
    }

    fn occur_in(&self, text: &str) -> bool {
        self.search
            .as_ref()
            .is_some_and(|search| search.is_match(text))
    }
}

/// Tokenizes parts of texts on one thread.
pub(super) struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    rules: Option<&'a Rules>,
    named: &'a NamedTokens,
    words: Words,
}

/// The words that an encoder knows, for the next encoder of the same tokenizer.
pub(super) struct Words {
    splitters: Vec<Splitter>,
    known: WordTokens,
    /// The character of each byte in the vocabulary of a byte-level model.
    chars: [char; 256],
    /// A word as the model has it.
    mapped: String,
}

impl Words {
    fn new(rules: Option<&Rules>) -> tokenizers::Result<Self> {
        let steps: &[SplitRule] = match rules {
            Some(Rules::Bytes { steps, .. }) => steps,
            _ => &[],
        };
        let splitters = steps.iter().map(|step| Splitter::new(*step));
        Ok(Self {
            splitters: splitters.collect::<Result<_, _>>()?,
            known: WordTokens::default(),
            chars: byte_chars(),
            mapped: String::new(),
        })
    }
}

/// A failure of the tokenizer.
pub(super) struct Failed(pub(super) tokenizers::Error);

impl From<CacheError> for Failed {
    fn from(error: CacheError) -> Self {
        Self(Box::new(error))
    }
}

impl From<tokenizers::Error> for Failed {
    fn from(error: tokenizers::Error) -> Self {
        Self(error)
    }
}

impl<'a> Encoder<'a> {
    pub(super) fn new(
        tokenizer: &'a Tokenizer,
        rules: Option<&'a Rules>,
        named: &'a NamedTokens,
    ) -> tokenizers::Result<Self> {
        let words = Words::new(rules)?;
        Ok(Self::with(tokenizer, rules, named, words))
    }

    /// An encoder that knows words of an earlier one.
    pub(super) fn with(
        tokenizer: &'a Tokenizer,
        rules: Option<&'a Rules>,
        named: &'a NamedTokens,
        words: Words,
    ) -> Self {
        Self {
            tokenizer,
            rules,
            named,
            words,
        }
    }

    pub(super) fn into_words(self) -> Words {
        self.words
    }

    /// Appends the tokens of a part of a text; `starts` if it is the first.
    pub(super) fn encode(
        &mut self,
        part: &str,
        starts: bool,
        out: &mut Vec<u32>,
    ) -> Result<(), Failed> {
        match self.rules {
            Some(Rules::Bytes { composed, .. }) => self.encode_bytes(part, *composed, out),
            Some(Rules::Spaces { prefix, each, .. }) => {
                self.encode_spaces(part, starts, *prefix, *each, out)
            }
            None => self.encode_whole(part, out),
        }
    }

    fn encode_whole(&self, text: &str, out: &mut Vec<u32>) -> Result<(), Failed> {
        let encoding = self.tokenizer.encode_fast(text, false)?;
        out.extend_from_slice(encoding.get_ids());
        Ok(())
    }

    fn encode_bytes(
        &mut self,
        part: &str,
        composed: bool,
        out: &mut Vec<u32>,
    ) -> Result<(), Failed> {
        let named = self.named;
        if !named.are_plain && (named.occur_in(part) || named.occur_in(&self.compose(part)?)) {
            return self.encode_whole(part, out);
        }

        let mut at = 0;
        for found in named
            .search
            .iter()
            .flat_map(|search| search.find_iter(part))
        {
            self.encode_words(&part[at..found.start()], composed, out)?;
            out.push(named.ids[found.pattern().as_usize()]);
            at = found.end();
        }
        self.encode_words(&part[at..], composed, out)
    }

    /// Appends the tokens of text without named tokens.
    fn encode_words(
        &mut self,
        text: &str,
        composed: bool,
        out: &mut Vec<u32>,
    ) -> Result<(), Failed> {
        let text = if composed {
            self.compose(text)?
        } else {
            Cow::Borrowed(text)
        };
        let model = self.tokenizer.get_model();
        let Words {
            splitters,
            known,
            chars,
            mapped,
        } = &mut self.words;
        each_word(splitters, &text, &mut |word: &str| {
            push_word(known, out, word, |out| {
                mapped.clear();
                mapped.extend(word.bytes().map(|byte| chars[usize::from(byte)]));
                out.extend(model.tokenize(mapped)?.iter().map(|token| token.id));
                Ok(())
            })
        })
    }

    /// The text in composed form (NFC). Line breaks and ASCII compose with nothing, so that lines
    /// of ASCII are left alone.
    fn compose<'t>(&self, text: &'t str) -> Result<Cow<'t, str>, Failed> {
        let Some(normalizer) = self.tokenizer.get_normalizer().filter(|_| !text.is_ascii()) else {
            return Ok(Cow::Borrowed(text));
        };
        let mut composed = String::with_capacity(text.len());
        for line in text.split_inclusive('\n') {
            if line.is_ascii() {
                composed.push_str(line);
            } else {
                let mut line = NormalizedString::from(line);
                normalizer.normalize(&mut line)?;
                composed.push_str(line.get());
            }
        }
        Ok(Cow::Owned(composed))
    }

    fn encode_spaces(
        &mut self,
        part: &str,
        starts: bool,
        prefix: Prefix,
        each: bool,
        out: &mut Vec<u32>,
    ) -> Result<(), Failed> {
        let named = self.named;
        let (mut at, mut starts_text) = (0, starts);
        let mut starts_section = starts;
        for found in named
            .search
            .iter()
            .flat_map(|search| search.find_iter(part))
        {
            let section = &part[at..found.start()];
            self.encode_section(
                section,
                prefix.of(section, starts_section, starts_text),
                each,
                out,
            )?;
            out.push(named.ids[found.pattern().as_usize()]);
            at = found.end();
            (starts_section, starts_text) = (true, false);
        }
        let section = &part[at..];
        self.encode_section(
            section,
            prefix.of(section, starts_section, starts_text),
            each,
            out,
        )
    }

    /// Appends the tokens of text without named tokens.
    fn encode_section(
        &mut self,
        text: &str,
        prefixed: bool,
        each: bool,
        out: &mut Vec<u32>,
    ) -> Result<(), Failed> {
        let mut spaced = String::with_capacity(text.len() + text.len() / 2);
        if prefixed {
            spaced.push(SPACE);
        }
        spaced.extend(text.chars().map(|c| if c == ' ' { SPACE } else { c }));

        let model = self.tokenizer.get_model();
        let known = &mut self.words.known;
        let mut rest = spaced.as_str();
        while !rest.is_empty() {
            let (word, later) = rest.split_at(end_of_spaced_word(rest, each));
            rest = later;
            push_word(known, out, word, |out| {
                out.extend(model.tokenize(word)?.iter().map(|token| token.id));
                Ok(())
            })?;
        }
        Ok(())
    }
}

impl Prefix {
    /// Whether a section of a text gets a space before it.
    fn of(self, section: &str, starts_section: bool, starts_text: bool) -> bool {
        let is_missing = !section.starts_with([SPACE, ' ']);
        let is_wanted = match self {
            Self::Never => false,
            Self::Always => starts_section,
            Self::Missing => starts_section && is_missing,
            Self::MissingFirst => starts_text && is_missing,
        };
        is_wanted && !section.is_empty()
    }
}

/// The end of the first word: before a space that follows another character; if `each`, before the
/// next space.
fn end_of_spaced_word(text: &str, each: bool) -> usize {
    let spaces = text.len() - text.trim_start_matches(SPACE).len();
    if each && spaces > SPACE.len_utf8() {
        return SPACE.len_utf8();
    }
    let next = text[spaces..].find(SPACE);
    next.map_or(text.len(), |at| spaces + at)
}

/// Appends the tokens of a word: those that it had before, or those that `encode` appends.
fn push_word(
    known: &mut WordTokens,
    out: &mut Vec<u32>,
    word: &str,
    encode: impl FnOnce(&mut Vec<u32>) -> Result<(), Failed>,
) -> Result<(), Failed> {
    let key = word_key(word);
    if let Some(tokens) = key.and_then(|key| known.get(key)) {
        out.extend_from_slice(tokens);
        return Ok(());
    }
    let first = out.len();
    encode(out)?;
    if let Some(key) = key {
        known.insert(key, &out[first..]);
    }
    Ok(())
}

/// GPT-2's character of each byte: printable ones stand for themselves, the others for characters
/// from 256 on.
pub(super) fn byte_chars() -> [char; 256] {
    let mut others = (256u32..).filter_map(char::from_u32);
    std::array::from_fn(|byte| {
        let own = char::from(byte as u8);
        match own {
            '!'..='~' | '¡'..='¬' | '®'..='ÿ' => own,
            _ => others.next().unwrap_or(own),
        }
    })
}

#[cfg(test)]
mod tests {
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    use super::*;

    #[test]
    fn bytes_have_the_characters_of_the_alphabet() {
        let own: std::collections::HashSet<char> = byte_chars().into_iter().collect();
        let alphabet: std::collections::HashSet<char> = ByteLevel::alphabet().into_iter().collect();
        assert_eq!(own, alphabet);
    }
}
