//! Tokens of parts are those of the whole text, by tokenizers of all known kinds.

use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::{Value, json};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::{AddedToken, Tokenizer};

use super::*;
use crate::tokenize::encoder::Encoder;
use crate::tokenize::special::DocumentEnds;

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Text with many of the places that the expressions distinguish.
const CORPUS: &str = "It's the end of the day, isn't it? They'll say 12345 times that THE CAT'S out.\n\n\n\
    def f(x):\n    return x + 1\n\n\tif x > 10:\r\n\t\tprint('über', \"naïve\")\n  \n   the then there\n\
    漢字かな交じり文、それは日本語です。\n中文没有空格。\nРусский текст, ещё раз.\nनमस्ते दुनिया\n🦀🦀 e\u{301}te\u{301} /path//to\n/x\n";

/// A byte-level BPE of `CORPUS` after the pre-tokenizer `splitter`.
fn byte_level(splitter: &Value, normalizer: &Value) -> Tokenizer {
    let mut tokenizer = Tokenizer::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, false)));
    let trainer = BpeTrainer::builder()
        .vocab_size(420)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    let mut trainer = TrainerWrapper::from(trainer);
    let lines = CORPUS.split_inclusive(char::is_whitespace);
    tokenizer
        .train(&mut trainer, lines.map(str::to_owned))
        .unwrap();
    rebuilt(&tokenizer, splitter, normalizer)
}

/// `tokenizer` with another pre-tokenizer and normalizer, and an end token.
fn rebuilt(tokenizer: &Tokenizer, splitter: &Value, normalizer: &Value) -> Tokenizer {
    let mut json = serde_json::to_value(tokenizer).unwrap();
    json["pre_tokenizer"] = splitter.clone();
    json["normalizer"] = normalizer.clone();
    let mut tokenizer: Tokenizer = serde_json::from_value(json).unwrap();
    tokenizer
        .add_special_tokens([AddedToken::from("<|end|>", true)])
        .unwrap();
    tokenizer
}

/// A BPE on text with `▁` for spaces, whose vocabulary has all bytes.
fn spaced(splitter: &Value, normalizer: &Value) -> Tokenizer {
    let mut tokenizer = Tokenizer::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(Metaspace::new('▁', PrependScheme::Always, true)));
    let trainer = BpeTrainer::builder()
        .vocab_size(250)
        .show_progress(false)
        .build();
    let mut trainer = TrainerWrapper::from(trainer);
    let ascii = CORPUS.replace(|c: char| !c.is_ascii() || c == '\n', " ");
    tokenizer.train(&mut trainer, [ascii].into_iter()).unwrap();

    let mut json = serde_json::to_value(&tokenizer).unwrap();
    let vocab = json["model"]["vocab"].as_object_mut().unwrap();
    for name in (0..=255u8)
        .map(|byte| format!("<0x{byte:02X}>"))
        .chain(["<unk>".to_owned()])
    {
        let id = vocab.len();
        vocab.insert(name, json!(id));
    }
    json["model"]["byte_fallback"] = json!(true);
    json["model"]["unk_token"] = json!("<unk>");
    json["model"]["fuse_unk"] = json!(true);
    let tokenizer: Tokenizer = serde_json::from_value(json).unwrap();
    rebuilt(&tokenizer, splitter, normalizer)
}

fn split(expression: &str) -> Value {
    json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
    ]})
}

fn bytes_after(first: &[Value]) -> Value {
    let mut steps = first.to_vec();
    steps.push(json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}));
    json!({"type": "Sequence", "pretokenizers": steps})
}

fn metaspace(scheme: &str, split: bool) -> Value {
    json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split})
}

/// Tokenizers of all known kinds, by name.
static KINDS: LazyLock<Vec<(&str, TextTokenizer)>> = LazyLock::new(|| {
    let none = Value::Null;
    let nfc = json!({"type": "NFC"});
    let digits = |alone: bool| json!({"type": "Digits", "individual_digits": alone});
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let prepend =
        json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]});
    let kinds = [
        ("GPT-2", byte_level(&bytes_after(&[]), &none)),
        ("Llama 3", byte_level(&split(LLAMA3), &none)),
        ("Qwen 2", byte_level(&split(QWEN2), &nfc)),
        ("o200k", byte_level(&split(O200K), &none)),
        ("SmolLM", byte_level(&bytes_after(&[digits(true)]), &none)),
        (
            "rows of digits",
            byte_level(&bytes_after(&[digits(false)]), &none),
        ),
        ("Llama 2", spaced(&none, &prepend)),
        ("Mistral", spaced(&metaspace("first", false), &none)),
        ("always a space", spaced(&metaspace("always", true), &none)),
        ("no prefix", spaced(&metaspace("never", false), &none)),
    ];
    let open = |(name, tokenizer)| (name, TextTokenizer::of(Path::new(name), tokenizer).unwrap());
    kinds.into_iter().map(open).collect()
});

/// The tokens of `text`, cut at each place where it may be.
fn tokens_of_parts(tokenizer: &TextTokenizer, text: &str) -> (Vec<u32>, usize) {
    let rules = tokenizer.rules.as_ref().unwrap();
    let mut encoder = Encoder::new(&tokenizer.inner, Some(rules), &tokenizer.named)
        .ok()
        .unwrap();
    let mut out = Vec::new();
    let (mut from, mut parts) = (0, 0);
    for at in 1..=text.len() {
        if at == text.len() || (text.is_char_boundary(at) && rules.can_cut(text, at)) {
            encoder
                .encode(&text[from..at], from == 0, &mut out)
                .ok()
                .unwrap();
            (from, parts) = (at, parts + 1);
        }
    }
    (out, parts)
}

fn check(text: &str) {
    for (name, tokenizer) in KINDS.iter() {
        let whole = tokenizer.inner.encode_fast(text, false).unwrap();
        let library = tokenizer.inner.encode(text, false).unwrap();
        let places: Vec<_> = library.get_offsets().iter().map(|&(a, b)| a..b).collect();
        let encoded = tokenizer.encode_with_places(text).unwrap();
        assert_eq!(
            encoded,
            (library.get_ids().to_vec(), places),
            "{name}: {text:?}"
        );
        let (tokens, _) = tokens_of_parts(tokenizer, text);
        assert_eq!(tokens, whole.get_ids(), "{name}: {text:?}");
    }
}

/// A generator of text made of pieces where rules differ.
fn texts() -> impl Strategy<Value = String> {
    let pieces = prop::sample::select(vec![
        "a",
        "the",
        "Cat",
        "THE",
        "'s",
        "'LL",
        "'",
        "1",
        "12",
        "1234",
        "٣",
        "½",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        "\u{a0}",
        "\u{3000}",
        "\u{85}",
        ".",
        "...",
        "/",
        "//",
        "é",
        "e\u{301}",
        "\u{301}",
        "漢字",
        "。",
        "ス\u{3099}",
        "नि",
        "🦀",
        "▁",
        "<|end|>",
        "<|",
        "|>",
        "<0x0A>",
        "_",
        "there ",
        "day\nthe",
        "\u{200d}",
        "ǅ",
        "ʰ",
    ]);
    prop::collection::vec(pieces, 0..30).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn parts_have_the_tokens_of_the_whole(text in texts()) {
        check(&text);
    }

    #[test]
    fn any_text_has_the_tokens_of_the_whole(text in "(\\PC|\\s){0,40}") {
        check(&text);
    }
}

#[test]
fn corpus_is_cut_and_has_the_tokens_of_the_whole() {
    check(CORPUS);
    for (name, tokenizer) in KINDS.iter() {
        let (_, parts) = tokens_of_parts(tokenizer, CORPUS);
        assert!(parts > 20, "{name}: {parts} parts");
    }
}

#[test]
fn unknown_kinds_are_tokenized_whole() {
    let null = Value::Null;
    let prefixed = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    let lower = json!({"type": "Lowercase"});
    let unknown = [
        byte_level(&prefixed, &null),
        byte_level(&split(r"\w+|\s+(?!\S)|\s+"), &null),
        byte_level(&bytes_after(&[]), &lower),
        byte_level(&null, &null),
        spaced(&json!({"type": "Whitespace"}), &null),
    ];
    for tokenizer in unknown {
        assert_eq!(Rules::of(&tokenizer), None);
    }

    let mut crossing = byte_level(&bytes_after(&[]), &null);
    crossing
        .add_tokens([AddedToken::from("two words", false)])
        .unwrap();
    assert_eq!(Rules::of(&crossing), None);
}

/// All tokens of `texts` as documents, with any number of threads.
fn streamed(tokenizer: &TextTokenizer, texts: &[&str], threads: usize) -> Vec<u32> {
    let ends = DocumentEnds {
        before: vec![7],
        after: vec![8, 9],
    };
    let mut all = Vec::new();
    tokenizer
        .tokenize(
            threads,
            &ends,
            |pieces| {
                for text in texts {
                    tokenizer.push_document(&mut text.as_bytes(), Path::new("x"), false, pieces)?;
                }
                Ok(())
            },
            |tokens| {
                all.extend(tokens.tokens);
                Ok(())
            },
        )
        .unwrap();
    all
}

#[test]
fn tokens_do_not_depend_on_threads() {
    let long = CORPUS.repeat(700);
    let unbroken = "漢".repeat(90_000);
    let texts = [long.as_str(), "", "short", unbroken.as_str(), CORPUS];
    for (name, tokenizer) in [&KINDS[1], &KINDS[6]] {
        let mut expected = Vec::new();
        for text in texts {
            let (tokens, _) = tokens_of_parts(tokenizer, text);
            expected.extend([vec![7], tokens, vec![8, 9]].concat());
        }
        for threads in [1, 3] {
            let tokens = streamed(tokenizer, &texts, threads);
            assert!(tokens == expected, "{name} on {threads} threads");
        }
    }
}
