//! A folder of checkpoints has the files of its model, so that no other folder is needed.

use std::fs;
use std::path::Path;

use integration_tests::LLAMA;
use serde_json::{Value, json};

use crate::support::{Files, Printed, Runs, data, json, losses, succeeds, temp};

/// Files with bytes that a rewrite of their JSON would change.
const FILES: [(&str, &str); 5] = [
    ("generation_config.json", "{\"eos_token_id\" : [0,  7]}"),
    (
        "special_tokens_map.json",
        " {\"eos_token\": \"<|end|>\"}\r\n",
    ),
    ("added_tokens.json", "{}"),
    ("additional_chat_templates/tools.jinja", "{{ tools }}"),
    ("additional_chat_templates/rag.jinja", "{{ documents }}"),
];

/// The tokenizer with a chat template.
const TOKENIZER: [&str; 2] = ["tokenizer.json", "tokenizer_config.json"];

fn copy_tokenizer(dir: &Path) {
    for name in TOKENIZER {
        let from = data(&format!("../examples/tokenizer/{name}"));
        fs::copy(from, dir.join(name)).unwrap();
    }
}

/// A folder with a Llama of 256 tokens, a tokenizer, the other files and keys that only others
/// read.
fn write_model(dir: &Path) {
    fs::create_dir_all(dir.join("additional_chat_templates")).unwrap();
    let weights = LLAMA.data("model/model.safetensors");
    fs::copy(weights, dir.join("model.safetensors")).unwrap();
    copy_tokenizer(dir);
    for (name, text) in FILES {
        dir.write(name, text);
    }
    let mut config = json(&LLAMA.data("model/config.json"));
    config["eos_token_id"] = json!([0, 7, 9]);
    config["pad_token_id"] = Value::Null;
    config["task_specific_params"] = json!({"a": 1});
    dir.write("config.json", config.to_string());
}

fn write_conversations(dir: &Path) {
    let line = |i: usize| {
        let user = json!({"role": "user", "content": format!("What is {i}?")});
        let assistant = json!({"role": "assistant", "content": format!("It is {i}.")});
        json!({"messages": [user, assistant]}).to_string() + "\n"
    };
    let text: String = (0..24).map(line).collect();
    dir.write("chats.jsonl", text);
}

/// Trains on the conversations; returns the standard output, which has the notes.
fn train(dir: &Path, more: &str) -> String {
    let sizes = "--seq-len 48 --micro-batch 1 --threads 1 --ranks 2";
    dir.zero(&format!("train --data chats.jsonl {sizes} {more}"))
}

fn generate(dir: &Path, from: &str) -> Value {
    let mut got = dir.json(&format!(
        "generate --json --prompt 'What is' --tokens 9 {from}"
    ));
    // The times.
    got["prompt_s"].take();
    got["tokens_per_s"].take();
    got
}

/// Every file of the model is in `out` with its bytes; `config.json` with its keys.
fn assert_holds(model: &Path, out: &Path, dtype: &str) {
    for name in FILES.map(|(name, _)| name).into_iter().chain(TOKENIZER) {
        let [before, after] = [model, out].map(|dir| dir.bytes(name));
        assert_eq!(before, after, "{name}");
    }
    let [before, after] = [model, out].map(|dir| json(&dir.join("config.json")));
    let mut expected = before;
    expected["dtype"] = dtype.into();
    assert_eq!(after, expected);
}

#[test]
fn no_other_folder_is_needed() {
    let dir = &temp();
    let at = |name: &str| dir.join(name);
    write_model(&at("model"));
    write_conversations(dir);
    // A run that nothing interrupts, beside the model's folder.
    let once = "--model model --checkpoint once --metrics once.jsonl --steps 6";
    train(dir, once);
    let text = generate(dir, "--checkpoint once");

    dir.zero("ckpt import model imported");
    fs::rename(at("model"), at("moved")).unwrap();
    let out = dir.zero("ckpt export imported of-import");
    out.shows(&["tokenizer.json"]);
    out.omits(&["lacks"]);
    assert_holds(&at("moved"), &at("of-import"), "float32");

    let first = "--model imported --checkpoint runs/a --metrics m.jsonl --steps 3";
    train(dir, first);
    fs::remove_dir_all(at("imported")).unwrap();
    fs::rename(at("runs"), at("elsewhere")).unwrap();
    let notes = train(dir, "--resume elsewhere/a --metrics m.jsonl --steps 6");
    let differences = notes.matches("differs from the checkpoint").count();
    assert_eq!(differences, 1, "the steps: {notes}");
    notes.omits(&["does not exist"]);
    assert_eq!(losses(&at("m.jsonl")), losses(&at("once.jsonl")));
    let kept = fs::read_dir(at("elsewhere/a/model-files")).unwrap();
    assert_eq!(kept.count(), 1);

    for from in ["--checkpoint elsewhere/a", "--model elsewhere/a"] {
        assert_eq!(generate(dir, from), text);
    }
    let inspect = dir.zero("data inspect --model elsewhere/a --data chats.jsonl");
    inspect.shows(&["<|im_start|>assistant"]);
    // They are no text to train on.
    let text = "A text that is long enough for a row of tokens.";
    fs::write(at("elsewhere/a/text.txt"), text).unwrap();
    let notes = dir.zero(
        "train --data elsewhere/a --model nano --steps 1 --seq-len 8 --micro-batch 1 \
         --ranks 1 --no-checkpoint",
    );
    notes.shows(&["a: 1 text file ("]);
    let out = dir.zero("ckpt export elsewhere/a out --dtype bf16");
    out.omits(&["lacks"]);
    assert_holds(&at("moved"), &at("out"), "bfloat16");
    assert!(generate(dir, "--model out")["text"].is_string());

    // The last folder of all is enough for another run.
    train(dir, "--model elsewhere/a --checkpoint again --steps 1");
    dir.zero("ckpt export again of-again");
    assert_holds(&at("moved"), &at("of-again"), "float32");
}

/// A tokenizer that is not the model's keeps its own place: mixed files would be another one.
#[test]
fn other_tokenizer_is_kept_apart() {
    let dir = &temp();
    let at = |name: &str| dir.join(name);
    write_model(&at("model"));
    write_conversations(dir);
    let own = "{\"eos_token\": \"<|end|>\"}";
    fs::write(at("model/tokenizer_config.json"), own).unwrap();
    fs::write(at("model/added_tokens.json"), "{\"x\": 1}").unwrap();
    fs::create_dir(at("tokens")).unwrap();
    copy_tokenizer(&at("tokens"));

    train(
        dir,
        "--model model --tokenizer tokens --checkpoint c --steps 2",
    );
    let text = generate(dir, "--checkpoint c");
    fs::rename(at("tokens"), at("moved")).unwrap();
    fs::rename(at("model"), at("other")).unwrap();
    train(dir, "--resume c --steps 2").omits(&["differs from the checkpoint"]);
    assert_eq!(generate(dir, "--checkpoint c"), text);

    dir.zero("ckpt export c out");
    for name in TOKENIZER {
        let [out, moved] = ["out", "moved"].map(|folder| fs::read(at(folder).join(name)).unwrap());
        assert_eq!(out, moved, "{name}");
    }
    assert!(!at("out/added_tokens.json").exists());
    assert!(at("out/generation_config.json").exists());
}

/// A run on tokens needs a tokenizer for its samples only.
#[test]
fn samples_of_a_resumed_run_have_text() {
    let dir = &temp();
    write_model(&dir.join("model"));
    let tokens = LLAMA.data("tokens.u16.bin").display().to_string();
    dir.tiny(&format!(
        "--data {tokens} --model model --checkpoint c --steps 1 --sample-prompt 'What is' --sample-tokens 4"
    ));
    fs::remove_dir_all(dir.join("model")).unwrap();
    dir.zero("train --resume c --steps 2").shows(&["What is"]);
}

#[test]
fn damaged_files_are_named() {
    let dir = &temp();
    write_model(&dir.join("model"));
    write_conversations(dir);
    train(dir, "--model model --checkpoint c --steps 1");
    let folder = fs::read_dir(dir.join("c/model-files")).unwrap().next();
    let file = folder.unwrap().unwrap().path().join("tokenizer.json");
    let mut bytes = fs::read(&file).unwrap();
    bytes[9] ^= 1;
    fs::write(&file, bytes).unwrap();

    for (line, code) in [
        ("train --resume c --steps 2", 2),
        ("generate --checkpoint c --prompt a", 2),
        ("ckpt export c out", 1),
        ("ckpt verify c", 1),
    ] {
        dir.fails(line, code, &["tokenizer.json", "damaged"]);
    }
    assert!(!dir.join("out").exists());
}

/// As with checkpoints of older versions, the folders that the run names are used if they exist.
#[test]
fn missing_files_are_those_of_recorded_folders() {
    let dir = &temp();
    let at = |name: &str| dir.join(name);
    write_model(&at("model"));
    write_conversations(dir);
    train(dir, "--model model --checkpoint c --steps 1");
    let text = generate(dir, "--checkpoint c");
    fs::remove_dir_all(at("c/model-files")).unwrap();

    assert_eq!(generate(dir, "--checkpoint c"), text);
    dir.zero("ckpt export c of-folder")
        .shows(&["it lacks", "c/model-files/"]);
    assert_holds(&at("model"), &at("of-folder"), "float32");
    let verify = dir.output("ckpt verify c");
    succeeds(&verify);
    let notes = String::from_utf8(verify.stderr).unwrap();
    notes.shows(&["model-files"]);

    // A resume keeps them again.
    fs::rename(at("c"), at("copy")).unwrap();
    train(dir, "--resume copy --steps 2").shows(&["copy/model-files/"]);
    fs::rename(at("model"), at("moved")).unwrap();
    assert!(generate(dir, "--checkpoint copy")["text"].is_string());
    fs::remove_dir_all(at("copy/model-files")).unwrap();

    let error = [
        "tokenizer.json: the tokenizer of the run does not exist",
        "--tokenizer",
    ];
    dir.fails("generate --checkpoint copy --prompt a", 2, &error);
    dir.fails(
        "train --resume copy --steps 3",
        2,
        &["does not exist", "--tokenizer"],
    );
    dir.zero("ckpt export copy bare").shows(&[
        "it lacks: no tokenizer; copy the tokenizer's files",
        "model does not exist here",
    ]);
    assert!(at("bare/config.json").exists() && !at("bare/tokenizer.json").exists());
}

#[test]
fn run_of_bytes_keeps_no_files() {
    let dir = &temp();
    dir.tiny("--checkpoint c --model nano");
    assert!(!dir.join("c/model-files").exists());
    let out = dir.zero("ckpt export c out");
    let lack = "it lacks: no tokenizer: the run had none, its tokens are bytes or come from a file of tokens";
    out.shows(&[lack]);
    let config = json(&dir.join("out/config.json"));
    assert_eq!(config["eos_token_id"], 255);
}

#[test]
fn plan_needs_a_configuration_alone() {
    let dir = &temp();
    fs::create_dir(dir.join("model")).unwrap();
    let mut config = json(&LLAMA.data("model/config.json"));
    let write = |config: &Value| fs::write(dir.join("model/config.json"), config.to_string());
    write(&config).unwrap();
    let plan = "plan --model model --gpus 8 --gpu-memory 80GB";
    dir.zero(plan);
    dir.fails(
        "train --model model --steps 1",
        2,
        &["neither model.safetensors nor"],
    );

    // Longer sequences of this kind have other frequencies.
    config["rope_parameters"] = json!({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4});
    write(&config).unwrap();
    let long = format!("{plan} --seq-len 65");
    let error = [
        "expected 1 to 64, the positions of the model (",
        "rope_type \"dynamic\"",
    ];
    dir.fails(&long, 2, &error);
    // Of YaRN they have not.
    config["rope_parameters"] = json!({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4});
    write(&config).unwrap();
    dir.zero(&long);
}
