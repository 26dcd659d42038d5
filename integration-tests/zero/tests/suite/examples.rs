//! Fine-tuning on examples, against PyTorch (`scripts/torch_examples.py`).

use std::fs;
use std::path::Path;
use std::process::Output;

use integration_tests::LLAMA;
use serde_json::Value;

use crate::support::{fails, losses, succeeds, temp, words, zero};

/// A file of the oracle.
fn oracle(name: &str) -> String {
    let path = integration_tests::data("../examples").join(name);
    path.display().to_string()
}

fn expected() -> Value {
    serde_json::from_str(&fs::read_to_string(oracle("expected.json")).unwrap()).unwrap()
}

/// Trains as the oracle, with the flags `more`; returns the losses.
fn train(dir: &Path, more: &[&str]) -> Vec<f64> {
    succeeds(&run_train(dir, more));
    let losses = losses(&dir.join("m.jsonl"));
    losses.iter().map(|loss| loss.as_f64().unwrap()).collect()
}

fn run_train(dir: &Path, more: &[&str]) -> Output {
    let model = LLAMA.data("model").display().to_string();
    let data = oracle("examples.jsonl");
    let tokenizer = oracle("tokenizer");
    let args = format!(
        "train --model {model} --data {data} --tokenizer {tokenizer} --seq-len 40 --seed 5 --lr 1e-3 \
         --weight-decay 0.01 --threads 1 --metrics m.jsonl --report report"
    );
    zero(dir, &[&words(&args)[..], more].concat())
}

/// The ranks, micro-batches and rows of a micro-batch that are 8 rows a step.
const SHAPES: [[&str; 3]; 3] = [["1", "4", "2"], ["2", "2", "2"], ["4", "1", "2"]];

fn shape([ranks, grad_accum, micro_batch]: [&'static str; 3]) -> [&'static str; 6] {
    [
        "--ranks",
        ranks,
        "--grad-accum",
        grad_accum,
        "--micro-batch",
        micro_batch,
    ]
}

fn check_losses(stages: &[&str], shapes: &[[&'static str; 3]]) {
    let expected = expected();
    for (key, pack) in [("padded", "--pack=false"), ("packed", "--pack")] {
        let expected: Vec<f64> = serde_json::from_value(expected[key].clone()).unwrap();
        for stage in stages {
            for &of in shapes {
                let dir = temp();
                let more = ["--stage", stage, "--epochs", "3", "--no-checkpoint", pack];
                let got = train(dir.path(), &[&more[..], &shape(of)].concat());
                assert_eq!(got.len(), expected.len(), "{key}");
                for (step, (got, expected)) in got.iter().zip(&expected).enumerate() {
                    let difference = (got - expected).abs();
                    assert!(
                        difference < 1e-5,
                        "{key}, stage {stage}, {of:?}, step {step}: {got}, {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn losses_are_those_of_torch_at_all_stages() {
    check_losses(&["0", "1", "2"], &SHAPES[1..2]);
}

#[test]
fn losses_are_those_of_torch_at_any_ranks() {
    check_losses(&["3"], &SHAPES);
}

/// A run that ends within an epoch goes on at the same row, on other ranks.
#[test]
fn resume_goes_on_within_an_epoch() {
    let dir = temp();
    let first = ["--steps", "4", "--checkpoint", "c"];
    train(dir.path(), &[&first[..], &shape(SHAPES[1])].concat());
    let rest = ["--resume", "c", "--epochs", "3", "--checkpoint", "c"];
    let got = train(dir.path(), &[&rest[..], &shape(SHAPES[0])].concat());
    let expected: Vec<f64> = serde_json::from_value(expected()["padded"].clone()).unwrap();
    assert_eq!(got.len(), expected.len());
    for (got, expected) in got.iter().zip(&expected) {
        assert!((got - expected).abs() < 1e-5, "{got}, {expected}");
    }
}

/// With steps of another size a run goes on behind the rows that it has trained, ends after the
/// same epochs, and is then finished at any size of a step.
#[test]
fn resume_with_other_steps_keeps_the_place() {
    let dir = temp();
    let rows = fs::read_to_string(oracle("examples.jsonl")).unwrap();
    let rows = rows.lines().count() - 1; // one is left out
    let first = ["--steps", "2", "--checkpoint", "c"];
    train(dir.path(), &[&first[..], &shape(SHAPES[1])].concat());

    let rest = ["--resume", "c", "--epochs", "2", "--checkpoint", "c"];
    let resumed = run_train(dir.path(), &[&rest[..], &shape(["1", "1", "3"])].concat());
    succeeds(&resumed);
    let steps = 2 + (rows - 16).div_ceil(3) + rows.div_ceil(3);
    let notice = format!(
        "a step has 3 rows, the checkpoint's had 8: the data goes on behind the 16 rows that were trained, and the run ends at \
         step {steps};"
    );
    let text = String::from_utf8_lossy(&resumed.stdout);
    assert!(text.contains(&notice), "{text}");
    assert_eq!(losses(&dir.path().join("m.jsonl")).len(), steps);

    for shape in [["1", "1", "3"], ["2", "1", "1"], ["1", "2", "5"]] {
        let rest = ["--resume", "c", "--checkpoint", "c"];
        let finished = run_train(dir.path(), &[&rest[..], &self::shape(shape)].concat());
        succeeds(&finished);
        assert_eq!(
            losses(&dir.path().join("m.jsonl")).len(),
            steps,
            "{shape:?}"
        );
    }
}

#[test]
fn inspect_marks_what_is_trained() {
    let dir = temp();
    let (data, tokenizer) = (oracle("examples.jsonl"), oracle("tokenizer"));
    let args = [
        "data",
        "inspect",
        "--data",
        &data,
        "--tokenizer",
        &tokenizer,
        "--seq-len",
        "40",
        "--rows",
        "2",
    ];
    let text = succeeds(&zero(dir.path(), &args));
    assert!(
        text.contains("21 examples (`prompt` and `completion`), 20 rows an epoch"),
        "{text}"
    );
    assert!(
        text.contains("text: Which shard does rank 0 own?[[ The first of each unit.<|end|>]]"),
        "{text}"
    );
    assert!(
        text.contains("line 2") && !text.contains("line 3"),
        "{text}"
    );

    let json = succeeds(&zero(
        dir.path(),
        &[&args[..], &["--json", "--pack"]].concat(),
    ));
    let json: Value = serde_json::from_str(&json).unwrap();
    let expected = expected();
    assert_eq!(
        json["rows"],
        expected["packed_rows"].as_array().unwrap().len()
    );
    assert_eq!(json["left_out"], 1);
    let first = json["first_rows"][0].as_array().unwrap();
    assert_eq!(first[0]["line"], 9, "example 8 is the longest");
    let tokens: Vec<Value> = first[..2]
        .iter()
        .flat_map(|piece| piece["tokens"].as_array().unwrap().clone())
        .collect();
    assert_eq!(Value::from(tokens), expected["examples"]["8"]["tokens"]);
}

#[test]
fn inspect_says_why() {
    let dir = temp();
    let inspect = |more: &[&str]| zero(dir.path(), &[&["data", "inspect"], more].concat());
    fs::write(dir.path().join("a.txt"), "to be or not\n").unwrap();
    let text = succeeds(&inspect(&words("--data a.txt --seq-len 4 --rows 2")));
    let expected = "a.txt: text, 13 bytes, read as bytes\n\
                    read as text: it is text, and its name is not that of rows (.jsonl, .json) or of tokens (.bin)\n\
                    rows are trained at random places\n\
                    [[text in double brackets]] is trained\n\n\
                    row 0\n  tokens 0 to 4\n  text: t[[o be]]\n  tokens: 116 [[111 32 98 101]]\n\n\
                    row 1\n  tokens 4 to 8\n  text: e[[ or ]]\n  tokens: 101 [[32 111 114 32]]\n";
    assert_eq!(text, expected);

    let tokens: Vec<u8> = (1000_u16..1010).flat_map(u16::to_le_bytes).collect();
    fs::write(dir.path().join("a.bin"), tokens).unwrap();
    let json = succeeds(&inspect(&["--data", "a.bin", "--json"]));
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["kind"], "tokens");
    assert_eq!(json["why"], "u16 by its name");
    assert_eq!(json["first_rows"][0][1]["tokens"][8], 1009, "a short row");

    let tokenizer = oracle("tokenizer");
    let folder = temp();
    fs::write(folder.path().join("b.txt"), "The host.").unwrap();
    let path = folder.path().display().to_string();
    let text = succeeds(&inspect(&["--data", &path, "--tokenizer", &tokenizer]));
    assert!(
        text.contains("read as the text files of a folder: it is a folder"),
        "{text}"
    );
    assert!(text.contains("text: The[[ host.\\n<|end|>]]"), "{text}");
}

/// `zero train`, its validation data and `zero data inspect` read the same, and refuse the same.
#[test]
fn data_is_what_it_is_said_to_be() {
    let dir = temp();
    let row = "{\"prompt\": \"a\", \"completion\": \" b\"}";
    let alpaca = "{\"instruction\": \"add\", \"input\": \"\", \"output\": \"\\t2\"}";
    for (name, content, expected) in [
        (
            "mark.jsonl",
            format!("\u{feff}{row}\r\n"),
            "(`prompt` and `completion`)",
        ),
        (
            "nan.jsonl",
            row.replace("{", "{\"x\": NaN, "),
            "(`prompt` and `completion`)",
        ),
        (
            "list.json",
            format!("[\n{row},\n{row}\n]"),
            "2 examples (`prompt` and `completion`)",
        ),
        (
            "alpaca.jsonl",
            alpaca.to_owned(),
            "1 example (`instruction` and `output`)",
        ),
        (
            "text.jsonl",
            "{\"text\": \"a b\"}".to_owned(),
            "1 example (`text`)",
        ),
    ] {
        fs::write(dir.path().join(name), content).unwrap();
        let args = [
            "train",
            "--data",
            name,
            "--steps",
            "1",
            "--no-checkpoint",
            "--ranks",
            "1",
        ];
        let out = succeeds(&zero(
            dir.path(),
            &[&args[..], &["--seq-len", "192"]].concat(),
        ));
        let data = out.lines().find(|line| line.starts_with("data: ")).unwrap();
        assert!(data.contains(expected), "{data}");
        let first = match name {
            "alpaca.jsonl" => "; first: \"\\t2\"",
            _ => "; first: \" b\"",
        };
        assert!(data.ends_with(first), "{data}");
    }

    fs::write(dir.path().join("text.txt"), "to be or not ".repeat(99)).unwrap();
    let refused: [(&str, &[u8], &str); 5] = [
        (
            "keys.jsonl",
            b"{\"question\": \"a\", \"answer\": \"b\"}\n",
            "it has the keys `question`, `answer`, and must have",
        ),
        (
            "comment.jsonl",
            b"# a comment\n{}\n",
            "comment.jsonl, line 1: a comment",
        ),
        (
            "packed.jsonl.gz",
            b"\x1f\x8b\x08\0\0",
            "packed.jsonl.gz: a gzip archive, which is not read as data; unpack it",
        ),
        (
            "wide.bin",
            &[7, 1, 0, 0].repeat(20),
            "wide.bin: read as u16, every second token is 0",
        ),
        (
            "rows.txt",
            row.as_bytes(),
            "rows.txt: rows of JSON with `prompt` and `completion`",
        ),
    ];
    for (name, content, expected) in refused {
        fs::write(dir.path().join(name), content).unwrap();
        let train = ["train", "--data", name, "--no-checkpoint"];
        let validation = [
            "train",
            "--data",
            "text.txt",
            "--val-data",
            name,
            "--no-checkpoint",
        ];
        let inspect = ["data", "inspect", "--data", name];
        for args in [&train[..], &validation, &inspect] {
            fails(&zero(dir.path(), args), 2, &[expected]);
        }
    }
}

#[test]
fn other_tokenizer_is_an_error_of_all_commands() {
    let dir = temp();
    let model = LLAMA.data("model");
    for file in fs::read_dir(&model).unwrap() {
        let path = file.unwrap().path();
        fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    let config = dir.path().join("config.json");
    let text = fs::read_to_string(&config).unwrap();
    let mut document: Value = serde_json::from_str(&text).unwrap();
    // An ordinary token of the tokenizer.
    document["eos_token_id"] = Value::from(40);
    fs::write(&config, document.to_string()).unwrap();

    let (data, tokenizer) = (oracle("examples.jsonl"), oracle("tokenizer"));
    let files = ["--model", ".", "--tokenizer", &tokenizer];
    let train = ["train", "--data", &data, "--no-checkpoint"];
    let inspect = ["data", "inspect", "--data", &data];
    let generate = ["generate", "--prompt", "a"];
    for command in [&train[..], &inspect, &generate] {
        let parts = [
            "the end token is token",
            "but 40 in ./config.json",
            "pass the model's, or correct eos_token_id there",
        ];
        fails(&zero(dir.path(), &[command, &files].concat()), 2, &parts);
    }
}

#[test]
fn a_wrong_line_is_named() {
    let dir = temp();
    let file = dir.path().join("d.jsonl");
    fs::write(
        &file,
        "{\"prompt\": \"a\", \"completion\": \"b\"}\n\n{\"text\": \"a\"}\n",
    )
    .unwrap();
    let run = |more: &[&str]| {
        zero(
            dir.path(),
            &[&["train", "--data", "d.jsonl", "--no-checkpoint"], more].concat(),
        )
    };
    fails(
        &run(&[]),
        2,
        &[
            "d.jsonl, line 3: it has `text`, but",
            "line 1 has `prompt` and `completion`",
        ],
    );
    fs::write(&file, "{\"prompt\": \"a\", \"completion\": \"b\"}\n").unwrap();
    fails(
        &run(&["--steps", "1", "--epochs", "1"]),
        2,
        &["pass only one of them"],
    );
    fails(
        &run(&["--epochs", "0"]),
        2,
        &["--epochs 0: expected a number above 0"],
    );
    fs::write(&file, "{\"prompt\": \"a\", \"completion\": \"\"}\n").unwrap();
    fails(&run(&[]), 2, &["1 examples, and none has a trained token"]);
    fs::write(dir.path().join("t.txt"), "some text").unwrap();
    let text = ["train", "--data", "t.txt", "--pack"];
    fails(
        &zero(dir.path(), &text),
        2,
        &["t.txt: --pack needs examples"],
    );
}

#[cfg(not(feature = "parquet"))]
#[test]
fn parquet_names_its_feature() {
    let dir = temp();
    let path = dir.path().join("a.parquet");
    fs::write(&path, "PAR1").unwrap();
    let output = zero(dir.path(), &["data", "inspect", "--data", "a.parquet"]);
    let parts = [
        "a.parquet: this program was built without parquet",
        "--features zero/parquet",
    ];
    fails(&output, 2, &parts);
}
