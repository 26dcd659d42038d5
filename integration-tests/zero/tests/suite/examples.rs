//! Fine-tuning on examples, against PyTorch (`scripts/torch_examples.py`).

use std::fs;
use std::path::Path;

use integration_tests::LLAMA;
use serde_json::Value;

use crate::support::{Files, Printed, Runs, json, losses, temp};

/// A file of the oracle.
fn oracle(name: &str) -> String {
    let path = integration_tests::data("../examples").join(name);
    path.display().to_string()
}

fn expected() -> Value {
    json(Path::new(&oracle("expected.json")))
}

/// Trains as the oracle, with the flags `more`; returns the output and the losses.
fn train(dir: &Path, more: &str) -> (String, Vec<f64>) {
    let model = LLAMA.data("model").display().to_string();
    let data = oracle("examples.jsonl");
    let tokenizer = oracle("tokenizer");
    let out = dir.zero(&format!(
        "train --model {model} --data {data} --tokenizer {tokenizer} --seq-len 40 --seed 5 --lr 1e-3 \
         --weight-decay 0.01 --threads 1 --metrics m.jsonl --report report {more}"
    ));
    let losses = losses(&dir.join("m.jsonl"));
    let losses = losses.iter().map(|loss| loss.as_f64().unwrap());
    (out, losses.collect())
}

/// 8 rows a step.
const SHAPES: [&str; 3] = [
    "--ranks 1 --grad-accum 4 --micro-batch 2",
    "--ranks 2 --grad-accum 2 --micro-batch 2",
    "--ranks 4 --grad-accum 1 --micro-batch 2",
];

fn assert_losses(got: &[f64], key: &str, context: &str) {
    let expected: Vec<f64> = serde_json::from_value(expected()[key].clone()).unwrap();
    assert_eq!(got.len(), expected.len(), "{context}");
    for (step, (got, expected)) in got.iter().zip(&expected).enumerate() {
        assert!(
            (got - expected).abs() < 1e-5,
            "{context}, step {step}: {got}, {expected}"
        );
    }
}

fn check_losses(stages: &[&str], shapes: &[&str]) {
    for (key, pack) in [("padded", "--pack=false"), ("packed", "--pack")] {
        for stage in stages {
            for shape in shapes {
                let flags = format!("--stage {stage} --epochs 3 --no-checkpoint {pack} {shape}");
                let (_, got) = train(&temp(), &flags);
                assert_losses(&got, key, &flags);
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
    let dir = &temp();
    train(dir, &format!("--steps 4 --checkpoint c {}", SHAPES[1]));
    let rest = format!("--resume c --epochs 3 --checkpoint c {}", SHAPES[0]);
    let (_, got) = train(dir, &rest);
    assert_losses(&got, "padded", &rest);
}

/// With steps of another size a run goes on behind the rows that it has trained, ends after the
/// same epochs, and is then finished at any size of a step.
#[test]
fn resume_with_other_steps_keeps_the_place() {
    let dir = &temp();
    let rows = fs::read_to_string(oracle("examples.jsonl")).unwrap();
    let rows = rows.lines().count() - 1; // one is left out
    train(dir, &format!("--steps 2 --checkpoint c {}", SHAPES[1]));

    let rest = "--resume c --checkpoint c --ranks";
    let three = format!("{rest} 1 --grad-accum 1 --micro-batch 3");
    let (resumed, losses) = train(dir, &format!("{three} --epochs 2"));
    let steps = 2 + (rows - 16).div_ceil(3) + rows.div_ceil(3);
    let notice = format!(
        "a step has 3 rows, the checkpoint's had 8: the data goes on behind the 16 rows that were trained, and the run ends at \
         step {steps};"
    );
    resumed.shows(&[&notice]);
    assert_eq!(losses.len(), steps);

    let two = format!("{rest} 2 --grad-accum 1 --micro-batch 1");
    let ten = format!("{rest} 1 --grad-accum 2 --micro-batch 5");
    for flags in [three, two, ten] {
        assert_eq!(train(dir, &flags).1.len(), steps, "{flags}");
    }
}

#[test]
fn inspect_marks_what_is_trained() {
    let dir = &temp();
    let (data, tokenizer) = (oracle("examples.jsonl"), oracle("tokenizer"));
    let inspect =
        format!("data inspect --data {data} --tokenizer {tokenizer} --seq-len 40 --rows 2");
    let text = dir.zero(&inspect);
    text.shows(&[
        "21 examples (`prompt` and `completion`), 20 rows an epoch",
        "text: Which shard does rank 0 own?[[ The first of each unit.<|end|>]]",
        "line 2",
    ]);
    text.omits(&["line 3"]);

    let json = dir.json(&format!("{inspect} --json --pack"));
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
    let dir = &temp();
    dir.write("a.txt", "to be or not\n");
    let text = dir.zero("data inspect --data a.txt --seq-len 4 --rows 2");
    let expected = "a.txt: text, 13 bytes, read as bytes\n\
                    read as text: it is text, and its name is not that of rows (.jsonl, .json) or of tokens (.bin)\n\
                    rows are trained at random places\n\
                    [[text in double brackets]] is trained\n\n\
                    row 0\n  tokens 0 to 4\n  text: t[[o be]]\n  tokens: 116 [[111 32 98 101]]\n\n\
                    row 1\n  tokens 4 to 8\n  text: e[[ or ]]\n  tokens: 101 [[32 111 114 32]]\n";
    assert_eq!(text, expected);

    let tokens: Vec<u8> = (1000_u16..1010).flat_map(u16::to_le_bytes).collect();
    dir.write("a.bin", tokens);
    let json = dir.json("data inspect --data a.bin --json");
    assert_eq!(json["kind"], "tokens");
    assert_eq!(json["why"], "u16 by its name");
    assert_eq!(json["first_rows"][0][1]["tokens"][8], 1009, "a short row");

    let tokenizer = oracle("tokenizer");
    let folder = &temp();
    folder.write("b.txt", "The host.");
    folder
        .zero(&format!("data inspect --data . --tokenizer {tokenizer}"))
        .shows(&[
            "read as the text files of a folder: it is a folder",
            "text: The[[ host.\\n<|end|>]]",
        ]);
}

/// `zero train`, its validation data and `zero data inspect` read the same, and refuse the same.
#[test]
fn data_is_what_it_is_said_to_be() {
    let dir = &temp();
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
        dir.write(name, content);
        let line = format!("train --data {name} --steps 1 --no-checkpoint --ranks 1 --seq-len 192");
        let out = dir.zero(&line);
        let data = out.lines().find(|line| line.starts_with("data: ")).unwrap();
        data.shows(&[expected]);
        let first = match name {
            "alpaca.jsonl" => "; first: \"\\t2\"",
            _ => "; first: \" b\"",
        };
        assert!(data.ends_with(first), "{data}");
    }

    dir.write("text.txt", "to be or not ".repeat(99));
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
        dir.write(name, content);
        for line in [
            format!("train --data {name} --no-checkpoint"),
            format!("train --data text.txt --val-data {name} --no-checkpoint"),
            format!("data inspect --data {name}"),
        ] {
            dir.fails(&line, 2, &[expected]);
        }
    }
}

#[test]
fn other_tokenizer_is_an_error_of_all_commands() {
    let dir = &temp();
    let model = LLAMA.data("model");
    for file in fs::read_dir(&model).unwrap() {
        let path = file.unwrap().path();
        fs::copy(&path, dir.join(path.file_name().unwrap())).unwrap();
    }
    let config = dir.join("config.json");
    let mut document = json(&config);
    // An ordinary token of the tokenizer.
    document["eos_token_id"] = Value::from(40);
    fs::write(&config, document.to_string()).unwrap();

    let (data, tokenizer) = (oracle("examples.jsonl"), oracle("tokenizer"));
    for command in [
        format!("train --data {data} --no-checkpoint"),
        format!("data inspect --data {data}"),
        "generate --prompt a".to_owned(),
    ] {
        let parts = [
            "the end token is token",
            "but 40 in ./config.json",
            "pass the model's, or correct eos_token_id there",
        ];
        dir.fails(
            &format!("{command} --model . --tokenizer {tokenizer}"),
            2,
            &parts,
        );
    }
}

#[test]
fn a_wrong_line_is_named() {
    let dir = &temp();
    let row = "{\"prompt\": \"a\", \"completion\": \"b\"}\n";
    let empty = row.replace("\"b\"", "\"\"");
    let other = format!("{row}\n{{\"text\": \"a\"}}\n");
    let wrong = "d.jsonl, line 3: it has `text`, but";
    let cases: [(&str, &str, &[&str]); 4] = [
        (&other, "", &[wrong, "line 1 has `prompt` and `completion`"]),
        (row, "--steps 1 --epochs 1", &["pass only one of them"]),
        (
            row,
            "--epochs 0",
            &["--epochs 0: expected a number above 0"],
        ),
        (&empty, "", &["1 examples, and none has a trained token"]),
    ];
    for (text, flags, parts) in cases {
        dir.write("d.jsonl", text);
        let line = format!("train --data d.jsonl --no-checkpoint {flags}");
        dir.fails(&line, 2, parts);
    }
    dir.write("t.txt", "some text");
    let text = "train --data t.txt --pack";
    dir.fails(text, 2, &["t.txt: --pack needs examples"]);
}

#[cfg(not(feature = "parquet"))]
#[test]
fn parquet_names_its_feature() {
    let dir = &temp();
    let path = dir.join("a.parquet");
    fs::write(&path, "PAR1").unwrap();
    let parts = [
        "a.parquet: this program was built without parquet",
        "--features zero/parquet",
    ];
    dir.fails("data inspect --data a.parquet", 2, &parts);
}
