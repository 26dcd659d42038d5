//! Words of a text by regular expressions, and the tokens of words that were seen before.
//!
//! The expressions end in `\s+(?!\S)|\s+`, whose lookahead a finite automaton does not have. It is
//! done by hand: a run of spaces gives up its last character to the word behind it. The rest is
//! one automaton, whose second pattern is the run of spaces.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use regex_automata::hybrid::dfa::{Cache, Config, DFA};
use regex_automata::hybrid::{BuildError, CacheError};
use regex_automata::util::start;
use regex_automata::{Anchored, MatchKind, PatternID};

use super::rules::SplitRule;

/// Memory for states of an automaton, which are made when they are first reached. Text of all
/// scripts needs less.
const STATE_BYTES: usize = 16 << 20;

/// The pattern of a run of spaces.
const SPACES: PatternID = PatternID::new_unchecked(1);

/// Splits pieces of text into smaller ones.
pub(super) enum Splitter {
    Expression {
        automaton: Box<DFA>,
        cache: Box<Cache>,
    },
    Digits {
        alone: bool,
    },
}

impl Splitter {
    pub(super) fn new(step: SplitRule) -> Result<Self, Box<BuildError>> {
        let expression = match step {
            SplitRule::Expression(expression) => expression,
            SplitRule::Digits { alone } => return Ok(Self::Digits { alone }),
        };
        let config = Config::new()
            .match_kind(MatchKind::LeftmostFirst)
            .cache_capacity(STATE_BYTES);
        let automaton = DFA::builder()
            .configure(config)
            .build_many(&[expression, r"\s+"])?;
        let cache = Box::new(automaton.create_cache());
        Ok(Self::Expression {
            automaton: Box::new(automaton),
            cache,
        })
    }

    /// The end of the first piece of `text` from byte `start` on, which is not the end of the text.
    fn next(&mut self, text: &str, start: usize) -> Result<usize, CacheError> {
        match self {
            Self::Expression { automaton, cache } => next_match(automaton, cache, text, start),
            Self::Digits { alone } => Ok(next_digits(text, start, *alone)),
        }
    }
}

/// Calls `word` for each piece after all `splitters`.
pub(super) fn each_word<'t, E: From<CacheError>>(
    splitters: &mut [Splitter],
    text: &'t str,
    word: &mut impl FnMut(&'t str) -> Result<(), E>,
) -> Result<(), E> {
    let Some((first, others)) = splitters.split_first_mut() else {
        return word(text);
    };
    let mut at = 0;
    while at < text.len() {
        let end = first.next(text, at)?;
        each_word(others, &text[at..end], word)?;
        at = end;
    }
    Ok(())
}

/// The end of the match at `start`.
fn next_match(
    automaton: &DFA,
    cache: &mut Cache,
    text: &str,
    start: usize,
) -> Result<usize, CacheError> {
    let bytes = text.as_bytes();
    let anchored = start::Config::new().anchored(Anchored::Yes);
    // The expressions have no assertions, so each start is possible.
    let Ok(mut state) = automaton.start_state(cache, &anchored) else {
        return Ok(text.len());
    };

    let mut found = None;
    let mut at = start;
    loop {
        // A state is one of a match one byte late.
        state = match bytes.get(at) {
            Some(byte) => automaton.next_state(cache, state, *byte)?,
            None => automaton.next_eoi_state(cache, state)?,
        };
        if state.is_tagged() {
            if state.is_match() {
                found = Some((at, automaton.match_pattern(cache, state, 0)));
            } else if state.is_dead() {
                break;
            }
        }
        if at == bytes.len() {
            break;
        }
        at += 1;
    }

    Ok(match found {
        Some((end, SPACES)) => end_of_spaces(text, start, end),
        Some((end, _)) => end,
        // Each character is in a match; if not, what is left is one piece.
        None => text.len(),
    })
}

/// The end of a run of spaces, whose last character belongs to a word behind it.
fn end_of_spaces(text: &str, start: usize, end: usize) -> usize {
    if end == text.len() {
        return end;
    }
    let last = text[start..end].char_indices().next_back();
    match last {
        Some((at, _)) if at > 0 => start + at,
        _ => end,
    }
}

fn next_digits(text: &str, start: usize, alone: bool) -> usize {
    let mut chars = text[start..].char_indices();
    let Some((_, first)) = chars.next() else {
        return text.len();
    };
    let is_digit = first.is_numeric();
    let later = if is_digit && alone {
        chars.next()
    } else {
        chars.find(|(_, c)| c.is_numeric() != is_digit)
    };
    later.map_or(text.len(), |(at, _)| start + at)
}

/// Longest word that is kept, in bytes.
const WORD_BYTES: usize = 15;

/// Most words that are kept.
const MOST_WORDS: usize = 1 << 18;

/// The tokens of short words.
#[derive(Default)]
pub(super) struct WordTokens {
    /// First token in `tokens` and their number, by word.
    places: HashMap<u128, (u32, u32), BuildHasherDefault<WordHasher>>,
    tokens: Vec<u32>,
}

impl WordTokens {
    /// The tokens of a word, if it is known.
    pub(super) fn get(&self, key: u128) -> Option<&[u32]> {
        let (first, len) = *self.places.get(&key)?;
        self.tokens.get(first as usize..(first + len) as usize)
    }

    pub(super) fn insert(&mut self, key: u128, tokens: &[u32]) {
        if self.places.len() == MOST_WORDS {
            self.places.clear();
            self.tokens.clear();
        }
        // Both are below the number of words times their longest length.
        let first = self.tokens.len() as u32;
        self.tokens.extend_from_slice(tokens);
        self.places.insert(key, (first, tokens.len() as u32));
    }
}

/// The bytes of a short word and its length.
pub(super) fn word_key(word: &str) -> Option<u128> {
    let len = word.len();
    if len > WORD_BYTES {
        return None;
    }
    let mut bytes = [0; 16];
    bytes[..len].copy_from_slice(word.as_bytes());
    bytes[WORD_BYTES] = len as u8;
    Some(u128::from_le_bytes(bytes))
}

/// A hash of one number, as FxHash multiplies and folds.
#[derive(Default)]
struct WordHasher(u64);

impl Hasher for WordHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u128(u128::from(*byte));
        }
    }

    fn write_u128(&mut self, n: u128) {
        let (low, high) = (n as u64, (n >> 64) as u64);
        let mixed = u128::from(low ^ self.0 ^ 0x9e37_79b9_7f4a_7c15)
            * u128::from(high ^ 0xd6e8_feb8_6659_fd93);
        self.0 = (mixed as u64) ^ ((mixed >> 64) as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
