//! How a tokenizer splits text into words, where that is known: then a text can be cut into parts,
//! and words can be looked up, without any change of its tokens.
//!
//! | rules | tokenizers | words |
//! |---|---|---|
//! | [`Rules::Bytes`] | GPT-2, Llama 3, Qwen, SmolLM: byte-level BPE after regular expressions | matches of the expressions |
//! | [`Rules::Spaces`] | Llama 2, Mistral, Gemma: BPE on text whose spaces are `▁` | from one `▁` to the next |
//!
//! Why words of the second kind: such a tokenizer has one word, the whole text. But no merge of its
//! model has a `▁` after another character inside it ([`Merges`] checks this), and merges on
//! the two sides of such a place do not affect each other.
//!
//! # Where a text is cut
//! Between a line break and a letter or digit, if the character before the line break is no space;
//! or between an ASCII letter or digit and a space. The known expressions begin a word at both, and
//! no word before depends on what follows. Property tests compare the tokens with those of the whole text.

use serde_json::Value;
use tokenizers::models::ModelWrapper;
use tokenizers::{AddedToken, Tokenizer};

/// The character that stands for a space.
pub(super) const SPACE: char = '▁';

/// The expression of GPT-2, and of a byte-level pre-tokenizer that names none.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+";

/// Known expressions, without the alternatives for spaces at their ends, which are [`SPACES`].
pub(super) const EXPRESSIONS: [&str; 5] = [
    GPT2,
    // Llama 3.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
    // Qwen 2 and 3.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
    // Mistral Nemo.
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+",
    // OpenAI's o200k.
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+",
];

/// The end of each expression: a run of spaces, but for its last before a word.
pub(super) const SPACES: &str = r"|\s+(?!\S)|\s+";

/// The rules of a tokenizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Rules {
    Bytes {
        /// Each splits the pieces of the one before.
        steps: Vec<SplitRule>,
        /// Whether text is composed first (NFC).
        composed: bool,
    },
    Spaces {
        prefix: Prefix,
        /// Whether each `▁` of a row begins a word.
        each: bool,
        /// Whether no merge has a line break before another character.
        lines: bool,
    },
}

/// One way of splitting pieces into smaller ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SplitRule {
    /// One of [`EXPRESSIONS`], before [`SPACES`].
    Expression(&'static str),
    /// Each digit alone, or rows of digits.
    Digits { alone: bool },
}

/// When a text, or what follows a special token in it, gets a `▁` before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Prefix {
    Never,
    Always,
    /// If it does not start with one.
    Missing,
    /// As `Missing`, and only at the start of a text.
    MissingFirst,
}

impl Rules {
    /// The rules of `tokenizer`; `None` if they are not known, so that texts must be tokenized whole.
    pub(super) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let json = |value: Option<serde_json::Result<Value>>| match value {
            None => Some(Value::Null),
            Some(value) => value.ok(),
        };
        let normalizer = json(tokenizer.get_normalizer().map(serde_json::to_value))?;
        let splitter = json(tokenizer.get_pre_tokenizer().map(serde_json::to_value))?;

        let rules = byte_rules(&normalizer, &splitter)
            .or_else(|| space_rules(tokenizer, &normalizer, &splitter))?;
        let added = tokenizer.get_added_vocabulary().get_added_tokens_decoder();
        let is_plain = added.values().all(|token| rules.allows(token));
        (is_plain && is_supported_model(tokenizer)).then_some(rules)
    }

    /// Whether text can be cut and searched for `token` with the same result.
    fn allows(&self, token: &AddedToken) -> bool {
        let starts_word = token.content.starts_with(is_word);
        let ends_word = token.content.ends_with(is_word);
        let strips = (token.lstrip && starts_word) || (token.rstrip && ends_word);
        let is_cut = (1..token.content.len())
            .any(|at| token.content.is_char_boundary(at) && is_cut(&token.content, at));
        let has_lines = token.content.contains('\n');
        let is_plain = match self {
            Self::Bytes { .. } => true,
            Self::Spaces { .. } => {
                !token.normalized
                    && !token.lstrip
                    && !token.rstrip
                    && !token.single_word
                    && !ends_word
            }
        };
        is_plain && !strips && !is_cut && !has_lines
    }

    /// Whether a text may be cut before byte `at`, a boundary of characters.
    pub(super) fn can_cut(&self, text: &str, at: usize) -> bool {
        match self {
            Self::Bytes { .. } => is_cut(text, at),
            Self::Spaces { lines: true, .. } => is_cut(text, at),
            Self::Spaces { .. } => text[at..].starts_with(' ') && is_cut(text, at),
        }
    }
}

/// Whether text may be cut before byte `at`: see the module.
fn is_cut(text: &str, at: usize) -> bool {
    let (before, after) = text.split_at(at);
    let mut backward = before.chars().rev();
    match (backward.next(), after.chars().next()) {
        (Some('\n'), Some(next)) => {
            is_word(next) && backward.next().is_some_and(|c| !c.is_whitespace())
        }
        (Some(last), Some(' ')) => last.is_ascii_alphanumeric(),
        _ => false,
    }
}

/// Letters and ASCII digits.
fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || (!c.is_ascii() && c.is_alphabetic())
}

fn is_supported_model(tokenizer: &Tokenizer) -> bool {
    match tokenizer.get_model() {
        ModelWrapper::BPE(bpe) => {
            let is_empty = |text: &Option<String>| text.as_ref().is_none_or(String::is_empty);
            bpe.dropout.is_none_or(|rate| rate == 0.0)
                && is_empty(&bpe.continuing_subword_prefix)
                && is_empty(&bpe.end_of_word_suffix)
        }
        _ => false,
    }
}

fn byte_rules(normalizer: &Value, splitter: &Value) -> Option<Rules> {
    let composed = match normalizer["type"].as_str() {
        None => false,
        Some("NFC") => true,
        Some(_) => return None,
    };
    let steps = match splitter["type"].as_str() {
        Some("Sequence") => splitter["pretokenizers"].as_array()?.iter().collect(),
        _ => vec![splitter],
    };

    let (last, first) = steps.split_last()?;
    let is_bytes = last["type"] == "ByteLevel" && last["add_prefix_space"] == false;
    let mut known = first
        .iter()
        .map(|step| known_step(step))
        .collect::<Option<Vec<SplitRule>>>()?;
    if last["use_regex"] != false {
        known.push(SplitRule::Expression(GPT2));
    }
    (is_bytes && !known.is_empty()).then_some(Rules::Bytes {
        steps: known,
        composed,
    })
}

fn known_step(step: &Value) -> Option<SplitRule> {
    match step["type"].as_str()? {
        "Digits" => Some(SplitRule::Digits {
            alone: step["individual_digits"] == true,
        }),
        "Split" => {
            let is_plain = step["behavior"] == "Isolated" && step["invert"] == false;
            let expression = step["pattern"]["Regex"].as_str()?.strip_suffix(SPACES)?;
            let known = EXPRESSIONS.iter().find(|known| **known == expression)?;
            is_plain.then_some(SplitRule::Expression(known))
        }
        _ => None,
    }
}

fn space_rules(tokenizer: &Tokenizer, normalizer: &Value, splitter: &Value) -> Option<Rules> {
    let ModelWrapper::BPE(bpe) = tokenizer.get_model() else {
        return None;
    };
    let has_bytes =
        (0..=255u8).all(|byte| tokenizer.token_to_id(&format!("<0x{byte:02X}>")).is_some());
    if !bpe.byte_fallback || bpe.ignore_merges || !has_bytes {
        return None;
    }

    let is_replace = |step: &Value| {
        step["type"] == "Replace" && step["pattern"]["String"] == " " && step["content"] == "▁"
    };
    let is_prepend = |step: &Value| step["type"] == "Prepend" && step["prepend"] == "▁";
    let (mut prefix, mut replaces) = (Prefix::Never, false);
    match normalizer["type"].as_str() {
        None => {}
        Some("Sequence") => match normalizer["normalizers"].as_array()?.as_slice() {
            [first, second] if is_prepend(first) && is_replace(second) => {
                (prefix, replaces) = (Prefix::Always, true);
            }
            _ => return None,
        },
        Some(_) if is_replace(normalizer) => replaces = true,
        Some(_) => return None,
    }

    let mut each = false;
    match splitter["type"].as_str() {
        None => {}
        Some("Metaspace") if prefix == Prefix::Never && splitter["replacement"] == "▁" => {
            replaces = true;
            each = splitter["split"] == true;
            prefix = match splitter["prepend_scheme"].as_str()? {
                "never" => Prefix::Never,
                "first" => Prefix::MissingFirst,
                "always" => Prefix::Missing,
                _ => return None,
            };
        }
        // After the normalizer there is no space to split at.
        Some("Split") if replaces && splitter["pattern"]["String"] == " " => {}
        Some(_) => return None,
    }

    let model = serde_json::to_value(bpe).ok()?;
    let merges = Merges::of(&model)?;
    (replaces && !merges.cross_words).then_some(Rules::Spaces {
        prefix,
        each,
        lines: !merges.cross_lines,
    })
}

/// What merges of a model cross.
#[derive(Default)]
struct Merges {
    /// A `▁` after another character.
    cross_words: bool,
    /// A line break before another character.
    cross_lines: bool,
}

impl Merges {
    fn of(model: &Value) -> Option<Self> {
        let mut found = Self::default();
        for merge in model["merges"].as_array()? {
            let (left, right) = match merge {
                Value::String(text) => text.split_once(' ')?,
                pair => (pair[0].as_str()?, pair[1].as_str()?),
            };
            // The text of a token of a byte is not its name.
            let has_byte = [left, right]
                .iter()
                .any(|token| token.starts_with("<0x") && token.ends_with('>'));
            let last = left.chars().next_back()?;
            let first = right.chars().next()?;
            found.cross_words |= has_byte || (first == SPACE && last != SPACE);
            found.cross_lines |= last == '\n' && first != '\n';
        }
        Some(found)
    }
}
