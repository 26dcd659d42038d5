//! Checks a tokenizer before it is used: a file of a stranger may name rules that crash
//! its library, never end, or make gigabytes of a word.
//!
//! | part | checked |
//! |---|---|
//! | normalizer | what its steps may make of a byte, together ([`MAX_GROWTH`]); each table of characters ([`charsmap`]) |
//! | normalizer, pre-tokenizer, decoder | expressions end ([`check_expression`]), no pattern or length is 0 |
//! | post-processor | its template has the text once, and tokens that it describes |
//! | decoder | what its steps may make of a byte |
//! | model | its longest token and word, its ids |
//!
//! Why on the parts that the library has read, written as JSON again: its reader accepts several
//! forms. The normalizer is checked before the whole is read, since reading applies it to the added
//! tokens.

use serde::Deserialize;
use serde_json::Value;
use tokenizers::models::ModelWrapper;
use tokenizers::{
    DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, Tokenizer,
};

use super::charsmap;

/// Bytes that the steps of a normalizer or a decoder may make of one. SentencePiece's tables make
/// 11 of one at most, and a space becomes the 3 of `▁`.
const MAX_GROWTH: usize = 64;
/// Bytes that a normalizer may put before a text.
const MAX_PREPENDED_BYTES: usize = 1024;
/// Steps of a part.
const MAX_STEPS: usize = 64;
/// Tokens that a post-processor may put around a text.
const MAX_TEMPLATE_TOKENS: usize = 64;
/// Characters of a word that WordPiece may search for in the vocabulary: the time grows with their
/// cube.
const MAX_WORD_CHARS: usize = 512;
/// Bytes of a token of Unigram: the time grows with their square.
const MAX_UNIGRAM_TOKEN_BYTES: usize = 256;
/// Above all ids: vocabularies have a few hundred thousand, and memory grows with the largest.
const MAX_IDS: u32 = 1 << 24;
/// Backtracking steps of an expression on a probe. Those of known tokenizers take a few hundred.
const MAX_BACKTRACKS: usize = 100_000;
/// Length of a probe in bytes, at least.
const PROBE_REPEATS: usize = 64;

/// The parts of a tokenizer beside its model and added tokens.
#[derive(Deserialize)]
pub(super) struct TokenizerParts {
    #[serde(default)]
    normalizer: Value,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    post_processor: Option<PostProcessorWrapper>,
    decoder: Option<DecoderWrapper>,
}

impl TokenizerParts {
    /// Checks the parts. The error says what is wrong.
    pub(super) fn check(&self) -> Result<(), String> {
        check_tables(&self.normalizer)?;
        let normalizer = Option::<NormalizerWrapper>::deserialize(&self.normalizer);
        let normalizer = normalizer.map_err(|e| format!("its normalizer: {e}"))?;
        let mut growth = 1;
        for step in &steps(&normalizer, "normalizers")? {
            growth = grown(growth, normalizer_growth(step)?).map_err(in_part("normalizer"))?;
        }

        for step in steps(&self.pre_tokenizer, "pretokenizers")? {
            check_splitter(&step).map_err(in_part("pre_tokenizer"))?;
        }

        let mut tokens = 0;
        for step in steps(&self.post_processor, "processors")? {
            tokens += template_tokens(&step).map_err(in_part("post_processor"))?;
        }
        if tokens > MAX_TEMPLATE_TOKENS {
            return Err(format!(
                "its post_processor puts {tokens} tokens around each text; at most {MAX_TEMPLATE_TOKENS} are supported"
            ));
        }

        let mut growth = 1;
        for step in steps(&self.decoder, "decoders")? {
            if step["type"] == "Replace" {
                growth = grown(growth, replace_growth(&step)?).map_err(in_part("decoder"))?;
            }
        }
        Ok(())
    }
}

/// Checks all tables of characters in a normalizer, in any form: the library reserves the memory
/// that the start of a table names.
fn check_tables(normalizer: &Value) -> Result<(), String> {
    let mut open = vec![normalizer];
    while let Some(value) = open.pop() {
        match value {
            Value::Array(values) => open.extend(values),
            Value::Object(fields) => {
                if let Some(Value::String(table)) = fields.get("precompiled_charsmap") {
                    charsmap::growth(table)
                        .map_err(|why| format!("its precompiled_charsmap: {why}"))?;
                }
                open.extend(fields.values());
            }
            _ => {}
        }
    }
    Ok(())
}

fn in_part(part: &'static str) -> impl Fn(String) -> String {
    move |why| format!("its {part}: {why}")
}

/// The steps of a part, those of sequences one by one.
fn steps(part: &Option<impl serde::Serialize>, list: &str) -> Result<Vec<Value>, String> {
    let value = serde_json::to_value(part).map_err(|e| e.to_string())?;
    let mut found = Vec::new();
    let mut open = vec![value];
    while let Some(mut step) = open.pop() {
        if let Value::Array(inner) = step[list].take() {
            open.extend(inner.into_iter().rev());
        } else if !step.is_null() {
            found.push(step);
        }
        if found.len() + open.len() > MAX_STEPS {
            return Err(format!(
                "its {list} are more than {MAX_STEPS}, which is not supported"
            ));
        }
    }
    Ok(found)
}

/// The growth by all steps so far and one more.
fn grown(so_far: usize, by: usize) -> Result<usize, String> {
    let all = so_far.saturating_mul(by.max(1));
    if all > MAX_GROWTH {
        return Err(format!(
            "it may make {all} bytes of one; at most {MAX_GROWTH} are supported"
        ));
    }
    Ok(all)
}

/// Bytes that a step of a normalizer may make of one.
fn normalizer_growth(step: &Value) -> Result<usize, String> {
    match step["type"].as_str() {
        Some("Replace") => replace_growth(step),
        Some("Prepend") => {
            let bytes = step["prepend"].as_str().unwrap_or_default().len();
            if bytes > MAX_PREPENDED_BYTES {
                return Err(format!(
                    "its normalizer puts {bytes} bytes before each text; at most {MAX_PREPENDED_BYTES} are supported"
                ));
            }
            Ok(1)
        }
        Some("Precompiled") => {
            let table = step["precompiled_charsmap"].as_str().unwrap_or_default();
            charsmap::growth(table).map_err(|why| format!("its precompiled_charsmap: {why}"))
        }
        Some("ByteLevel") => Ok(2),
        _ => Ok(1),
    }
}

/// Bytes that a replacement may make of one.
fn replace_growth(step: &Value) -> Result<usize, String> {
    let content = step["content"].as_str().unwrap_or_default().len();
    if let Some(text) = step["pattern"]["String"].as_str() {
        if text.is_empty() {
            return Err("a Replace has an empty pattern".to_owned());
        }
        return Ok(content.div_ceil(text.len()));
    }
    let expression = step["pattern"]["Regex"].as_str().unwrap_or_default();
    let matches_nothing = check_expression(expression)?;
    Ok(content + usize::from(matches_nothing))
}

fn check_splitter(step: &Value) -> Result<(), String> {
    match step["type"].as_str() {
        Some("FixedLength") if step["length"] == 0 => {
            Err("a FixedLength has the length 0".to_owned())
        }
        Some("Split") if step["pattern"]["String"] == "" => {
            Err("a Split has an empty pattern".to_owned())
        }
        Some("Split") => {
            if let Some(expression) = step["pattern"]["Regex"].as_str() {
                check_expression(expression)?;
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Checks that an expression ends within [`MAX_BACKTRACKS`] steps on texts that repeat characters;
/// returns whether it matches the empty text.
///
/// Why it matters: the library stops splitting, in silence, where an expression gives up.
fn check_expression(expression: &str) -> Result<bool, String> {
    let shown: String = expression.chars().take(40).collect();
    let regex = fancy_regex::RegexBuilder::new(expression)
        .backtrack_limit(MAX_BACKTRACKS)
        .build();
    let regex = regex.map_err(|e| format!("the expression {shown:?}: {e}"))?;
    let too_long = |on: &str| {
        format!(
            "the expression {shown:?} takes more than {MAX_BACKTRACKS} steps on {on:?}: such an expression may never end"
        )
    };

    let own: String = expression
        .chars()
        .filter(|c| c.is_alphanumeric())
        .take(PROBE_REPEATS)
        .collect();
    let mut units: Vec<String> = ["a", "A", "0", " ", "\n", ".", "'", "é", "中"]
        .map(String::from)
        .into();
    units.extend(own.chars().map(String::from));
    units.push(own);
    units.sort_unstable();
    units.dedup();
    for unit in units {
        for end in ["", "\u{1}"] {
            let text = unit.repeat(PROBE_REPEATS.div_ceil(unit.len().max(1))) + end;
            if regex.find_iter(&text).any(|found| found.is_err()) {
                return Err(too_long(&text));
            }
        }
    }
    regex.is_match("").map_err(|_| too_long(""))
}

/// The tokens that a template puts around a text.
fn template_tokens(step: &Value) -> Result<usize, String> {
    if step["type"] != "TemplateProcessing" {
        return Ok(0);
    }
    let described = &step["special_tokens"];
    let mut tokens = 0;
    for list in ["single", "pair"] {
        let pieces = step[list].as_array().map(Vec::as_slice).unwrap_or_default();
        for piece in pieces {
            let Some(name) = piece["SpecialToken"]["id"].as_str() else {
                continue;
            };
            let Some(ids) = described[name]["ids"].as_array() else {
                return Err(format!(
                    "its template has the token {name:?}, which its special_tokens lack"
                ));
            };
            if let Some(id) = ids.iter().find(|id| id.as_u64() >= Some(MAX_IDS.into())) {
                return Err(format!(
                    "the token {name:?} has the id {id}, {}",
                    too_large()
                ));
            }
            if list == "single" {
                tokens += ids.len();
            }
        }
    }

    let single = step["single"].as_array().map(Vec::as_slice);
    let texts = single.unwrap_or_default().iter();
    let texts: Vec<&Value> = texts
        .map(|piece| &piece["Sequence"]["id"])
        .filter(|id| !id.is_null())
        .collect();
    if !matches!(&texts[..], [id] if **id == "A") {
        return Err("its template for one text must have that text, A, once".to_owned());
    }
    Ok(tokens)
}

/// Checks the model and the added tokens.
pub(super) fn check_model(tokenizer: &Tokenizer) -> Result<(), String> {
    let vocab = tokenizer.get_vocab(true);
    if let Some((token, id)) = vocab.iter().find(|(_, id)| **id >= MAX_IDS) {
        return Err(format!(
            "the token {token:?} has the id {id}, {}",
            too_large()
        ));
    }
    let added = tokenizer.get_added_vocabulary().get_added_tokens_decoder();
    if let Some(id) = added.keys().find(|id| **id >= MAX_IDS) {
        return Err(format!("an added token has the id {id}, {}", too_large()));
    }

    match tokenizer.get_model() {
        ModelWrapper::WordPiece(model) if model.max_input_chars_per_word > MAX_WORD_CHARS => {
            Err(format!(
                "its max_input_chars_per_word is {}; at most {MAX_WORD_CHARS} are supported",
                model.max_input_chars_per_word
            ))
        }
        ModelWrapper::Unigram(_) => {
            let longest = vocab.keys().map(String::len).max().unwrap_or(0);
            if longest > MAX_UNIGRAM_TOKEN_BYTES {
                return Err(format!(
                    "its longest token has {longest} bytes; at most {MAX_UNIGRAM_TOKEN_BYTES} are supported in Unigram"
                ));
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

fn too_large() -> String {
    format!("and ids must be below {MAX_IDS}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::rules::{EXPRESSIONS, SPACES};
    use super::*;

    fn check(part: &str, value: Value) -> Result<(), String> {
        let parts: TokenizerParts = serde_json::from_value(json!({ part: value })).unwrap();
        parts.check()
    }

    /// Those of published tokenizers.
    #[test]
    fn known_expressions_pass() {
        let known = EXPRESSIONS.map(|known| format!("{known}{SPACES}"));
        let others = [
            " {2,}",
            r"[\n\r\t]",
            r"\s+$",
            "▁+\n+|\n+|▁+",
            r"(?:\r?\n)+(?!\r?\n)",
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
            r"[!-/:-~]?[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ];
        for expression in known.iter().map(String::as_str).chain(others) {
            assert_eq!(check_expression(expression), Ok(false), "{expression}");
        }
        assert_eq!(check_expression("a*"), Ok(true));
    }

    #[test]
    fn catastrophic_expressions_are_errors() {
        for expression in [
            r"(a+)+(?=z)\1",
            r"(?=a)(a|a)*(?<=b)z",
            r"(x+x+)+(?=y)y",
            r"(\s*)*(?=!)\1!",
            "(",
        ] {
            assert!(check_expression(expression).is_err(), "{expression}");
        }
    }

    /// The steps of T5, NLLB, Llama 2, BERT and Gemma stay within the limits.
    #[test]
    fn known_steps_pass() {
        let replace = |pattern: Value, content| json!({"type": "Replace", "pattern": pattern, "content": content});
        let llama = [
            json!({"type": "Prepend", "prepend": "▁"}),
            replace(json!({"String": " "}), "▁"),
        ];
        check(
            "normalizer",
            json!({"type": "Sequence", "normalizers": llama}),
        )
        .unwrap();
        let nllb = [
            json!({"type": "NFKC"}),
            replace(json!({"Regex": " {2,}"}), "▁"),
        ];
        check(
            "normalizer",
            json!({"type": "Sequence", "normalizers": nllb}),
        )
        .unwrap();
        let decoder = [
            replace(json!({"String": "▁"}), " "),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
            json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}),
        ];
        check("decoder", json!({"type": "Sequence", "decoders": decoder})).unwrap();
        let bert = json!({"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [101], "tokens": ["[CLS]"]}}});
        check("post_processor", bert).unwrap();
    }

    /// The library reads steps without a type, too.
    #[test]
    fn untyped_steps_are_checked() {
        let error = check("normalizer", json!({"prepend": "x".repeat(2000)})).unwrap_err();
        assert!(error.contains("2000 bytes before"), "{error}");
    }
}
