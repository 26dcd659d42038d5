//! `zero generate` as a user runs it.

use std::path::Path;

use integration_tests::{LLAMA, QWEN2};
use serde_json::Value;
use zero_models::llama::config::LlamaConfig;

use crate::support::{Files, Printed, Runs, data, json, temp, write_model};

fn generated(dir: &Path, flags: &str) -> Value {
    dir.json(&format!("generate --json {flags}"))
}

#[test]
fn greedy_tokens_of_a_folder_are_those_of_transformers() {
    let dir = &temp();
    for oracle in [LLAMA, QWEN2] {
        let greedy = &json(&oracle.data("expected.json"))["greedy"];
        let model = oracle.data("model").display().to_string();
        let ids = greedy["prompt"].to_string().replace(['[', ']', ' '], "");

        let flags = format!("--model {model} --token-ids {ids} --tokens 30");
        for threads in ["", "--threads 1"] {
            let got = generated(dir, &format!("{flags} {threads}"));
            assert_eq!(got["prompt"], greedy["prompt"]);
            assert_eq!(got["tokens"], greedy["of_initial_weights"]);
            assert_eq!(got["end"], "tokens");
            assert_eq!(got["dtype"], "fp32");
        }
        let narrow = generated(dir, &format!("{flags} --dtype bf16"));
        assert_eq!(narrow["dtype"], "bf16");
        assert_eq!(narrow["tokens"].as_array().unwrap().len(), 30);
    }
}

/// A checkpoint and its export have the same weights, so they write the same text.
#[test]
fn checkpoint_and_export_write_the_same() {
    let dir = &temp();
    dir.tiny("--checkpoint saves");
    dir.zero("ckpt export saves out");

    let drawn = "--prompt 'To be' --tokens 20 --temperature 1 --top-k 50 --top-p 0.9 --seed 4";
    let of = |from: &str| generated(dir, &format!("{from} {drawn}"));
    let saved = of("--checkpoint saves");
    assert_eq!(saved["tokens"], of("--model out")["tokens"]);
    assert_eq!(saved["prompt"], serde_json::json!(b"To be"));

    // The model has positions for 64 tokens.
    let greedy = generated(dir, "--checkpoint saves --prompt 'To be'");
    assert_ne!(saved["tokens"], greedy["tokens"]);
    assert_eq!(greedy["end"], "context");
    assert_eq!(greedy["tokens"].as_array().unwrap().len(), 64 - 5);

    dir.fails(
        "generate --checkpoint saves --best --prompt a",
        2,
        &["best"],
    );
}

/// Text is printed as it is, and all else goes to standard error.
#[test]
fn text_is_the_output() {
    let dir = &temp();
    let line = format!("generate --model {} --tokens 9", data("model"));
    dir.write("prompt.txt", "a b");
    let from_file = dir.output(&format!("{line} --prompt-file prompt.txt"));
    let out = dir.output(&format!("{line} --prompt 'a b'"));
    assert_eq!(out.stdout, from_file.stdout);
    assert_eq!(out.stdout.len(), 10, "nine bytes and a line end");
    let notes = String::from_utf8(out.stderr).unwrap();
    notes.shows(&["prompt of 3 tokens"]);
    assert!(notes.ends_with("ended by --tokens\n"), "{notes}");
}

#[test]
fn end_token_ends_the_text() {
    let dir = &temp();
    let model = dir.join("model");
    std::fs::create_dir(&model).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(LLAMA.data("model").join(name), model.join(name)).unwrap();
    }
    // The oracle's continuation is 30 five times, then 227.
    let end = "{\"eos_token_id\": [1, 227]}";
    model.write("generation_config.json", end);
    let got = generated(dir, "--model model --token-ids 0,32,252,231,84,83");
    assert_eq!(got["tokens"], serde_json::json!([30, 30, 30, 30, 30]));
    assert_eq!(got["end"], "end_token");
}

/// Tokens need no tokenizer, whatever the vocabulary.
#[test]
fn token_ids_need_no_tokenizer() {
    let dir = &temp();
    let config = LlamaConfig {
        vocab_size: 600,
        hidden: 8,
        layers: 1,
        heads: 2,
        kv_heads: 1,
        head_dim: 4,
        intermediate: 8,
        max_positions: 16,
        ..LlamaConfig::llama2()
    };
    write_model(dir, &config.into());
    let ids = "--model . --tokens 5 --token-ids 1,599";
    let got = generated(dir, ids);
    assert!(got["text"].is_null());
    let tokens = got["tokens"].to_string().replace(['[', ']'], "");
    assert_eq!(dir.zero(&format!("generate {ids}")), tokens + "\n");
    dir.fails(
        "generate --model . --tokens 5 --prompt a",
        2,
        &["no tokenizer: pass --tokenizer"],
    );
}

#[test]
fn wrong_use_is_an_error() {
    let dir = &temp();
    let model = data("model");
    let long = format!("--prompt {}", "x".repeat(64));
    for (flags, error) in [
        (
            "--prompt a --device cuda",
            "--device cuda: generation runs on the CPU",
        ),
        (
            "--prompt a --temperature -1",
            "--temperature -1: expected 0 or",
        ),
        (
            "--prompt a --top-p 1.5",
            "--top-p 1.5: expected a probability",
        ),
        ("--prompt a --tokens 0", "--tokens 0: expected at least 1"),
        ("--prompt a --threads 0", "--threads 0: expected at least 1"),
        ("--prompt ''", "the prompt has no tokens"),
        (
            &long,
            "the prompt has 64 tokens, and the model positions for 64",
        ),
        (
            "--token-ids 256",
            "token 256 is outside the vocabulary of 256",
        ),
        ("--prompt-file none", "none: failed to read"),
        ("--prompt a --tokenizer none", "none: no such file"),
        (
            "--model none --prompt a",
            "none: the model folder does not exist",
        ),
    ] {
        let from = match flags.starts_with("--model") {
            true => "",
            false => &format!("--model {model}"),
        };
        dir.fails(&format!("generate {from} {flags}"), 2, &[error]);
    }
}
