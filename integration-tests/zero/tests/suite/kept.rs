//! A folder of checkpoints has the files of its model, so that no other folder is needed.

use std::fs;
use std::path::Path;

use integration_tests::LLAMA;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{data, fails, losses, run, run_flags, succeeds, temp, words, zero};

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

/// A folder with a Llama of 256 tokens, a tokenizer, the other files and keys that only others
/// read.
fn write_model(dir: &Path) {
    fs::create_dir_all(dir.join("additional_chat_templates")).unwrap();
    fs::copy(
        LLAMA.data("model/model.safetensors"),
        dir.join("model.safetensors"),
    )
    .unwrap();
    for name in TOKENIZER {
        fs::copy(
            data(&format!("../examples/tokenizer/{name}")),
            dir.join(name),
        )
        .unwrap();
    }
    for (name, text) in FILES {
        fs::write(dir.join(name), text).unwrap();
    }
    let text = fs::read_to_string(LLAMA.data("model/config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["eos_token_id"] = json!([0, 7, 9]);
    config["pad_token_id"] = Value::Null;
    config["task_specific_params"] = json!({"a": 1});
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

fn write_conversations(dir: &Path) {
    let line = |i: usize| {
        let user = json!({"role": "user", "content": format!("What is {i}?")});
        let assistant = json!({"role": "assistant", "content": format!("It is {i}.")});
        json!({"messages": [user, assistant]}).to_string() + "\n"
    };
    let text: String = (0..24).map(line).collect();
    fs::write(dir.join("chats.jsonl"), text).unwrap();
}

/// Trains on the conversations; returns the standard output, which has the notes.
fn train(dir: &Path, more: &[&str]) -> String {
    let args = words("train --data chats.jsonl --threads 1 --ranks 2");
    let args = [&args[..], &["--seq-len", "48", "--micro-batch", "1"], more].concat();
    succeeds(&zero(dir, &args))
}

fn generate(dir: &Path, from: [&str; 2]) -> Value {
    let args = ["generate", "--json", "--prompt", "What is", "--tokens", "9"];
    let text = succeeds(&zero(dir, &[&args[..], &from].concat()));
    let mut got: Value = serde_json::from_str(&text).unwrap();
    // The times.
    got["prompt_s"].take();
    got["tokens_per_s"].take();
    got
}

/// Every file of the model is in `out` with its bytes; `config.json` with its keys.
fn assert_holds(model: &Path, out: &Path, dtype: &str) {
    for name in FILES.map(|(name, _)| name).into_iter().chain(TOKENIZER) {
        let [before, after] = [model, out].map(|dir| fs::read(dir.join(name)).unwrap());
        assert_eq!(before, after, "{name}");
    }
    let [before, after] = [model, out].map(|dir| {
        let text = fs::read_to_string(dir.join("config.json")).unwrap();
        serde_json::from_str::<Value>(&text).unwrap()
    });
    let mut expected = before;
    expected["dtype"] = dtype.into();
    assert_eq!(after, expected);
}

#[test]
fn no_other_folder_is_needed() {
    let dir = temp();
    let at = |name: &str| dir.path().join(name);
    write_model(&at("model"));
    write_conversations(dir.path());
    // A run that nothing interrupts, beside the model's folder.
    let once = words("--model model --checkpoint once --metrics once.jsonl");
    train(dir.path(), &[&once[..], &["--steps", "6"]].concat());
    let text = generate(dir.path(), ["--checkpoint", "once"]);

    succeeds(&zero(dir.path(), &["ckpt", "import", "model", "imported"]));
    fs::rename(at("model"), at("moved")).unwrap();
    let out = succeeds(&run(dir.path(), "ckpt export imported of-import"));
    assert!(
        out.contains("tokenizer.json") && !out.contains("lacks"),
        "{out}"
    );
    assert_holds(&at("moved"), &at("of-import"), "float32");

    let first = words("--model imported --checkpoint runs/a --metrics m.jsonl");
    train(dir.path(), &[&first[..], &["--steps", "3"]].concat());
    fs::remove_dir_all(at("imported")).unwrap();
    fs::rename(at("runs"), at("elsewhere")).unwrap();
    let saves = "elsewhere/a";
    let notes = train(
        dir.path(),
        &["--resume", saves, "--metrics", "m.jsonl", "--steps", "6"],
    );
    let differences = notes.matches("differs from the checkpoint").count();
    assert_eq!(differences, 1, "the steps: {notes}");
    assert!(!notes.contains("does not exist"), "{notes}");
    assert_eq!(losses(&at("m.jsonl")), losses(&at("once.jsonl")));
    let kept = fs::read_dir(at("elsewhere/a/model-files")).unwrap();
    assert_eq!(kept.count(), 1);

    assert_eq!(generate(dir.path(), ["--checkpoint", saves]), text);
    assert_eq!(generate(dir.path(), ["--model", saves]), text);
    let inspect = ["data", "inspect", "--model", saves, "--data", "chats.jsonl"];
    assert!(succeeds(&zero(dir.path(), &inspect)).contains("<|im_start|>assistant"));
    // They are no text to train on.
    fs::write(
        at("elsewhere/a/text.txt"),
        "A text that is long enough for a row of tokens.",
    )
    .unwrap();
    let notes = succeeds(&zero(
        dir.path(),
        &words(&format!(
            "train --data {saves} --model nano --steps 1 --seq-len 8 --micro-batch 1 \
             --ranks 1 --no-checkpoint"
        )),
    ));
    assert!(notes.contains("a: 1 text file ("), "{notes}");
    let export = ["ckpt", "export", saves, "out", "--dtype", "bf16"];
    let out = succeeds(&zero(dir.path(), &export));
    assert!(!out.contains("lacks"), "{out}");
    assert_holds(&at("moved"), &at("out"), "bfloat16");
    assert!(generate(dir.path(), ["--model", "out"])["text"].is_string());

    // The last folder of all is enough for another run.
    let again = ["--model", saves, "--checkpoint", "again", "--steps", "1"];
    train(dir.path(), &again);
    succeeds(&zero(dir.path(), &["ckpt", "export", "again", "of-again"]));
    assert_holds(&at("moved"), &at("of-again"), "float32");
}

/// A tokenizer that is not the model's keeps its own place: mixed files would be another one.
#[test]
fn other_tokenizer_is_kept_apart() {
    let dir = temp();
    let at = |name: &str| dir.path().join(name);
    write_model(&at("model"));
    write_conversations(dir.path());
    let own = "{\"eos_token\": \"<|end|>\"}";
    fs::write(at("model/tokenizer_config.json"), own).unwrap();
    fs::write(at("model/added_tokens.json"), "{\"x\": 1}").unwrap();
    fs::create_dir(at("tokens")).unwrap();
    for name in TOKENIZER {
        fs::copy(
            data(&format!("../examples/tokenizer/{name}")),
            at("tokens").join(name),
        )
        .unwrap();
    }

    let first = words("--model model --tokenizer tokens --checkpoint c --steps 2");
    train(dir.path(), &first);
    let text = generate(dir.path(), ["--checkpoint", "c"]);
    fs::rename(at("tokens"), at("moved")).unwrap();
    fs::rename(at("model"), at("other")).unwrap();
    let notes = train(dir.path(), &["--resume", "c", "--steps", "2"]);
    assert!(!notes.contains("differs from the checkpoint"), "{notes}");
    assert_eq!(generate(dir.path(), ["--checkpoint", "c"]), text);

    succeeds(&zero(dir.path(), &["ckpt", "export", "c", "out"]));
    for name in TOKENIZER {
        assert_eq!(
            fs::read(at("out").join(name)).unwrap(),
            fs::read(at("moved").join(name)).unwrap()
        );
    }
    assert!(!at("out/added_tokens.json").exists());
    assert!(at("out/generation_config.json").exists());
}

/// A run on tokens needs a tokenizer for its samples only.
#[test]
fn samples_of_a_resumed_run_have_text() {
    let dir = temp();
    write_model(&dir.path().join("model"));
    let tokens = LLAMA.data("tokens.u16.bin").display().to_string();
    let samples = ["--sample-prompt", "What is", "--sample-tokens", "4"];
    let first = [
        "--data",
        &tokens,
        "--model",
        "model",
        "--checkpoint",
        "c",
        "--steps",
        "1",
    ];
    let first = [
        &first[..],
        &["--seq-len", "32", "--micro-batch", "1", "--ranks", "1"],
        &samples,
    ]
    .concat();
    succeeds(&zero(dir.path(), &[&["train"], &first[..]].concat()));
    fs::remove_dir_all(dir.path().join("model")).unwrap();
    let out = succeeds(&run(dir.path(), "train --resume c --steps 2"));
    assert!(out.contains("What is"), "{out}");
}

#[test]
fn damaged_files_are_named() {
    let dir = temp();
    write_model(&dir.path().join("model"));
    write_conversations(dir.path());
    train(dir.path(), &words("--model model --checkpoint c --steps 1"));
    let folder = fs::read_dir(dir.path().join("c/model-files"))
        .unwrap()
        .next();
    let file = folder.unwrap().unwrap().path().join("tokenizer.json");
    let mut bytes = fs::read(&file).unwrap();
    bytes[9] ^= 1;
    fs::write(&file, bytes).unwrap();

    let resume = ["train", "--resume", "c", "--steps", "2"];
    let generate = ["generate", "--checkpoint", "c", "--prompt", "a"];
    for (args, code) in [
        (&resume[..], 2),
        (&generate, 2),
        (&["ckpt", "export", "c", "out"], 1),
        (&["ckpt", "verify", "c"], 1),
    ] {
        fails(
            &zero(dir.path(), args),
            code,
            &words("tokenizer.json damaged"),
        );
    }
    assert!(!dir.path().join("out").exists());
}

/// As with checkpoints of older versions, the folders that the run names are used if they exist.
#[test]
fn missing_files_are_those_of_recorded_folders() {
    let dir = temp();
    let at = |name: &str| dir.path().join(name);
    write_model(&at("model"));
    write_conversations(dir.path());
    train(dir.path(), &words("--model model --checkpoint c --steps 1"));
    let text = generate(dir.path(), ["--checkpoint", "c"]);
    fs::remove_dir_all(at("c/model-files")).unwrap();

    assert_eq!(generate(dir.path(), ["--checkpoint", "c"]), text);
    let out = succeeds(&zero(dir.path(), &["ckpt", "export", "c", "of-folder"]));
    assert!(
        out.contains("it lacks") && out.contains("c/model-files/"),
        "{out}"
    );
    assert_holds(&at("model"), &at("of-folder"), "float32");
    let verify = zero(dir.path(), &["ckpt", "verify", "c"]);
    succeeds(&verify);
    let notes = String::from_utf8(verify.stderr).unwrap();
    assert!(notes.contains("model-files"), "{notes}");

    // A resume keeps them again.
    fs::rename(at("c"), at("copy")).unwrap();
    let notes = train(dir.path(), &["--resume", "copy", "--steps", "2"]);
    assert!(notes.contains("copy/model-files/"), "{notes}");
    fs::rename(at("model"), at("moved")).unwrap();
    assert!(generate(dir.path(), ["--checkpoint", "copy"])["text"].is_string());
    fs::remove_dir_all(at("copy/model-files")).unwrap();

    let generate = ["generate", "--checkpoint", "copy", "--prompt", "a"];
    let error = [
        "tokenizer.json: the tokenizer of the run does not exist",
        "--tokenizer",
    ];
    fails(&zero(dir.path(), &generate), 2, &error);
    let resume = ["train", "--resume", "copy", "--steps", "3"];
    fails(
        &zero(dir.path(), &resume),
        2,
        &["does not exist", "--tokenizer"],
    );
    let out = succeeds(&zero(dir.path(), &["ckpt", "export", "copy", "bare"]));
    assert!(
        out.contains("it lacks: no tokenizer; copy the tokenizer's files"),
        "{out}"
    );
    assert!(out.contains("model does not exist here"), "{out}");
    assert!(at("bare/config.json").exists() && !at("bare/tokenizer.json").exists());
}

#[test]
fn run_of_bytes_keeps_no_files() {
    let dir = temp();
    succeeds(&run_flags(dir.path(), "--checkpoint c --model nano"));
    assert!(!dir.path().join("c/model-files").exists());
    let out = succeeds(&zero(dir.path(), &["ckpt", "export", "c", "out"]));
    let lack = "it lacks: no tokenizer: the run had none, its tokens are bytes or come from a file of tokens";
    assert!(out.contains(lack), "{out}");
    let text = fs::read_to_string(dir.path().join("out/config.json")).unwrap();
    let config: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(config["eos_token_id"], 255);
}

/// Runs a command with a folder of only this `config.json`.
fn with_config(config: &Value) -> TempDir {
    let dir = temp();
    fs::create_dir(dir.path().join("model")).unwrap();
    fs::write(dir.path().join("model/config.json"), config.to_string()).unwrap();
    dir
}

#[test]
fn plan_needs_a_configuration_alone() {
    let text = fs::read_to_string(LLAMA.data("model/config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    let dir = with_config(&config);
    let plan = words("plan --model model --gpus 8 --gpu-memory 80GB");
    succeeds(&zero(dir.path(), &plan));
    let train = ["train", "--model", "model", "--steps", "1"];
    fails(
        &zero(dir.path(), &train),
        2,
        &["neither model.safetensors nor"],
    );

    // Longer sequences of this kind have other frequencies.
    config["rope_parameters"] = json!({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4});
    let dir = with_config(&config);
    let long = [&plan[..], &["--seq-len", "65"]].concat();
    let error = [
        "expected 1 to 64, the positions of the model (",
        "rope_type \"dynamic\"",
    ];
    fails(&zero(dir.path(), &long), 2, &error);
    // Of YaRN they have not.
    config["rope_parameters"] = json!({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4});
    let dir = with_config(&config);
    succeeds(&zero(dir.path(), &long));
}
