//! `--val-data`, `--val-split` and the best checkpoint, as a user sees them.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::support::{Files, Printed, Runs, checkpoints, data, lines, temp};

/// The step and the evaluation of each line of a metrics file that has one.
fn evaluations(file: &Path) -> Vec<(u64, Value)> {
    let evaluation = |line: &Value| Some((line["step"].as_u64()?, line.get("validation")?.clone()));
    lines(file).iter().filter_map(evaluation).collect()
}

fn steps(evaluations: &[(u64, Value)]) -> Vec<u64> {
    evaluations.iter().map(|(step, _)| *step).collect()
}

/// The steps of the checkpoints in `dir`, and the checkpoint that `best` names.
fn saved(dir: &Path) -> (Vec<u64>, String) {
    let best = fs::read_to_string(dir.join("best")).unwrap_or_default();
    let best = best.split(' ').next().unwrap_or_default();
    (checkpoints(dir), best.to_owned())
}

/// Writes a text of one letter, and a text of many letters on which such training raises the loss.
fn texts(dir: &Path) {
    dir.write("a.txt", "a".repeat(2000));
    let letters: String = (0..2000u32)
        .map(|i| char::from(b'b' + (i * i / 7 % 24) as u8))
        .collect();
    dir.write("others.txt", letters);
}

/// A run whose validation loss rises from the first step on.
fn overfit(dir: &Path, more: &str) -> String {
    let common = "--data a.txt --val-data others.txt --eval-every 1 --eval-tokens 100 --lr 1e-2";
    dir.tiny(&format!("{common} {more}"))
}

#[test]
fn evaluations_are_in_metrics_and_table() {
    let dir = &temp();
    let split = "--val-split 0.1 --eval-every 2 --eval-tokens 70";
    let out = dir.tiny(&format!("{split} --steps 5 --metrics m"));
    let found = evaluations(&dir.join("m"));
    assert_eq!(steps(&found), [2, 4, 5]);

    for (_, validation) in &found {
        assert_eq!(validation["tokens"], 64, "two windows");
        let (loss, perplexity) = (
            validation["loss"].as_f64().unwrap(),
            validation["perplexity"].as_f64().unwrap(),
        );
        assert!((perplexity - loss.exp()).abs() < 1e-9 * perplexity);
    }

    let last = format!(
        "validation loss {:.4}",
        found[2].1["loss"].as_f64().unwrap()
    );

    out.shows(&[
        "validation: the last 769 tokens of",
        "every 2 steps",
        &last,
        "perplexity",
        "best validation loss",
    ]);
}

#[test]
fn default_is_ten_evaluations() {
    let dir = &temp();
    dir.tiny("--val-split 0.5 --steps 20 --metrics m");
    let found = evaluations(&dir.join("m"));
    assert_eq!(steps(&found), (1..=10).map(|i| 2 * i).collect::<Vec<_>>());
    // One micro-batch of each rank: the forward of a tenth of two steps is less.
    assert_eq!(found[0].1["tokens"], 64);

    dir.tiny("--val-split 0.5 --eval-every 0 --metrics end");

    assert_eq!(steps(&evaluations(&dir.join("end"))), [3]);
}

#[test]
fn split_is_not_trained_on() {
    let dir = &temp();
    dir.write("text", "a".repeat(900) + &"z".repeat(100));
    let out = dir.tiny("--data text --val-split 0.1");
    out.shows(&["a model of token frequencies alone: 0.0000"]);
    dir.tiny("--data text")
        .omits(&["alone: 0.0000", "validation loss"]);
}

#[test]
fn best_checkpoint_is_kept_beside_the_last() {
    let dir = &temp();
    texts(dir);
    let out = overfit(dir, "--steps 5 --checkpoint c --keep-last 1");
    let kept = saved(&dir.join("c"));
    assert_eq!(kept, (vec![1, 5], "step-00000001".to_owned()));

    out.shows(&["after step 1: c/step-00000001\n"]);
    let inspect = |more: &str| dir.json(&format!("ckpt inspect c --json {more}"))["step"].clone();

    assert_eq!((inspect(""), inspect("--best")), (5.into(), 1.into()));
    dir.zero("ckpt export c model --best")
        .shows(&["of step 1,"]);
}

/// Each checkpoint that was saved for its loss alone is removed when the loss is lower.
#[test]
fn superseded_checkpoints_are_removed() {
    let dir = &temp();
    texts(dir);
    let falling = "--val-split 0.5 --eval-every 1 --steps 5 --checkpoint c --lr 1e-3";
    dir.tiny(&format!("--data a.txt {falling} --checkpoint-every 2"));

    let kept = saved(&dir.join("c"));
    assert_eq!(kept, (vec![2, 4, 5], "step-00000005".to_owned()));
}

#[test]
fn resume_keeps_the_best_and_the_tokens() {
    let dir = &temp();
    texts(dir);
    overfit(dir, "--steps 5 --metrics whole --no-checkpoint");
    overfit(dir, "--steps 3 --metrics first --checkpoint c");

    let out = dir.zero("train --resume c --steps 5 --metrics rest");

    let of = |file: &str| evaluations(&dir.join(file));
    assert_eq!(of("whole"), [of("first"), of("rest")].concat());
    out.shows(&["after step 1: c/step-00000001\n"]);
    assert_eq!(saved(&dir.join("c")).1, "step-00000001");
}

#[test]
fn wrong_validation_is_a_usage_error() {
    let dir = &temp();
    texts(dir);
    dir.write("short.txt", "b".repeat(32));
    dir.write("outside.bin", [1u8, 1].repeat(100));
    let wrong = |flags: &str, parts: &[&str]| {
        dir.refuses(&format!("--data a.txt --checkpoint c {flags}"), parts);
        assert!(!dir.join("c").exists(), "found before the run");
    };

    for split in ["0", "1", "1.5", "-0.1", "NaN"] {
        let flag = format!("--val-split {split}");
        wrong(&flag, &["--val-split", split, "between 0 and 1", "0.1"]);
    }
    for flag in ["--eval-every", "--eval-tokens"] {
        let parts = [flag, "--val-data FILE or --val-split 0.1"];
        wrong(&format!("{flag} 5"), &parts);
    }

    let too_short = ["a.txt", "tokens", "--seq-len 32", "33"];
    let cases: [(&str, &[&str]); 7] = [
        (
            "--val-split 0.1 --val-data others.txt",
            &["--val-data and --val-split", "only one"],
        ),
        (
            "--val-split 0.01",
            &[&too_short[..], &["20 tokens", "larger --val-split"]].concat(),
        ),
        (
            "--val-split 0.99",
            &[&too_short[..], &["smaller --val-split"]].concat(),
        ),
        (
            "--val-data short.txt",
            &["short.txt", "32 tokens", "33", "longer --val-data"],
        ),
        ("--val-data nowhere", &["--val-data", "nowhere"]),
        (
            "--val-data outside.bin",
            &["outside.bin", "257", "vocabulary"],
        ),
        (
            "--val-data others.txt --eval-tokens 31",
            &["--eval-tokens 31", "--seq-len 32"],
        ),
    ];
    for (flags, parts) in cases {
        wrong(flags, parts);
    }
}

#[test]
fn training_data_as_validation_data_prints_a_note() {
    let dir = &temp();
    let tokens = data("tokens.u16.bin");
    let out = dir.tiny(&format!("--val-data {tokens} --steps 1"));
    out.shows(&["note: the validation data is the training data"]);
}

#[test]
fn best_without_validation_is_an_error() {
    let dir = &temp();
    dir.tiny("--checkpoint c");
    dir.fails(
        "ckpt inspect c --best",
        1,
        &["best", "--val-data or --val-split"],
    );
}
