//! `--val-data`, `--val-split` and the best checkpoint, as a user sees them.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::support::{data, fails, run, run_flags, run_tiny, succeeds, temp, tiny, words, zero};

/// The step and the evaluation of each line of a metrics file that has one.
fn evaluations(file: &Path) -> Vec<(u64, Value)> {
    let lines: Vec<Value> = fs::read_to_string(file)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let evaluation = |line: &Value| Some((line["step"].as_u64()?, line.get("validation")?.clone()));
    lines.iter().filter_map(evaluation).collect()
}

fn steps(evaluations: &[(u64, Value)]) -> Vec<u64> {
    evaluations.iter().map(|(step, _)| *step).collect()
}

/// The checkpoints in `dir`, and the one that `best` names.
fn checkpoints(dir: &Path) -> (Vec<String>, String) {
    let names = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.starts_with("step-")).collect();
    names.sort();
    let best = fs::read_to_string(dir.join("best")).unwrap_or_default();
    (names, best.split(' ').next().unwrap_or_default().to_owned())
}

/// Writes a text of one letter, and a text of many letters on which such training raises the loss.
fn texts(dir: &Path) {
    fs::write(dir.join("a.txt"), "a".repeat(2000)).unwrap();
    let letters: String = (0..2000u32)
        .map(|i| char::from(b'b' + (i * i / 7 % 24) as u8))
        .collect();
    fs::write(dir.join("others.txt"), letters).unwrap();
}

/// A run whose validation loss rises from the first step on.
fn overfit(dir: &Path, more: &[&str]) -> String {
    let model = data("model");
    let common = words("--val-data others.txt --eval-every 1 --eval-tokens 100 --lr 1e-2");
    succeeds(&zero(
        dir,
        &tiny(&model, "a.txt", &[&common, more].concat()),
    ))
}

#[test]
fn evaluations_are_in_metrics_and_table() {
    let dir = temp();
    let split = words("--val-split 0.1 --eval-every 2 --eval-tokens 70");

    let out = succeeds(&run_tiny(
        dir.path(),
        &[&split[..], &["--steps", "5", "--metrics", "m"]].concat(),
    ));
    let found = evaluations(&dir.path().join("m"));
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

    for part in [
        "validation: the last 769 tokens of",
        "every 2 steps",
        &last,
        "perplexity",
        "best validation loss",
    ] {
        assert!(out.contains(part), "{part:?} is not in: {out}");
    }
}

#[test]
fn default_is_ten_evaluations() {
    let dir = temp();
    succeeds(&run_flags(
        dir.path(),
        "--val-split 0.5 --steps 20 --metrics m",
    ));
    let found = evaluations(&dir.path().join("m"));
    assert_eq!(steps(&found), (1..=10).map(|i| 2 * i).collect::<Vec<_>>());
    // One micro-batch of each rank: the forward of a tenth of two steps is less.
    assert_eq!(found[0].1["tokens"], 64);

    succeeds(&run_flags(
        dir.path(),
        "--val-split 0.5 --eval-every 0 --metrics end",
    ));

    assert_eq!(steps(&evaluations(&dir.path().join("end"))), [3]);
}

#[test]
fn split_is_not_trained_on() {
    let dir = temp();
    fs::write(dir.path().join("text"), "a".repeat(900) + &"z".repeat(100)).unwrap();
    let model = data("model");
    let out = succeeds(&zero(
        dir.path(),
        &tiny(&model, "text", &["--val-split", "0.1"]),
    ));
    assert!(
        out.contains("a model of token frequencies alone: 0.0000"),
        "{out}"
    );
    let out = succeeds(&zero(dir.path(), &tiny(&model, "text", &[])));
    assert!(
        !out.contains("alone: 0.0000") && !out.contains("validation loss"),
        "{out}"
    );
}

#[test]
fn best_checkpoint_is_kept_beside_the_last() {
    let dir = temp();
    texts(dir.path());
    let out = overfit(dir.path(), &words("--steps 5 --checkpoint c --keep-last 1"));
    let (names, best) = checkpoints(&dir.path().join("c"));

    assert_eq!(
        (names, best.as_str()),
        (
            vec!["step-00000001".into(), "step-00000005".into()],
            "step-00000001"
        )
    );

    assert!(out.contains("after step 1: c/step-00000001\n"), "{out}");
    let inspect = |more: &[&str]| {
        let out = succeeds(&zero(
            dir.path(),
            &[&["ckpt", "inspect", "c", "--json"], more].concat(),
        ));
        serde_json::from_str::<Value>(&out).unwrap()["step"].clone()
    };

    assert_eq!((inspect(&[]), inspect(&["--best"])), (5.into(), 1.into()));
    let out = succeeds(&run(dir.path(), "ckpt export c model --best"));
    assert!(out.contains("of step 1,"), "{out}");
}

/// Each checkpoint that was saved for its loss alone is removed when the loss is lower.
#[test]
fn superseded_checkpoints_are_removed() {
    let dir = temp();
    texts(dir.path());
    let model = data("model");
    let falling = words("--val-split 0.5 --eval-every 1 --steps 5 --checkpoint c --lr 1e-3");

    succeeds(&zero(
        dir.path(),
        &tiny(
            &model,
            "a.txt",
            &[&falling[..], &["--checkpoint-every", "2"]].concat(),
        ),
    ));

    let (names, best) = checkpoints(&dir.path().join("c"));
    let kept = ["step-00000002", "step-00000004", "step-00000005"];
    assert_eq!(
        (names, best.as_str()),
        (kept.map(str::to_owned).to_vec(), "step-00000005")
    );
}

#[test]
fn resume_keeps_the_best_and_the_tokens() {
    let dir = temp();
    texts(dir.path());
    overfit(
        dir.path(),
        &words("--steps 5 --metrics whole --no-checkpoint"),
    );
    overfit(
        dir.path(),
        &words("--steps 3 --metrics first --checkpoint c"),
    );

    let out = succeeds(&run(
        dir.path(),
        "train --resume c --steps 5 --metrics rest",
    ));

    let of = |file: &str| evaluations(&dir.path().join(file));
    assert_eq!(of("whole"), [of("first"), of("rest")].concat());
    assert!(out.contains("after step 1: c/step-00000001\n"), "{out}");
    assert_eq!(checkpoints(&dir.path().join("c")).1, "step-00000001");
}

#[test]
fn wrong_validation_is_a_usage_error() {
    let dir = temp();
    texts(dir.path());
    fs::write(dir.path().join("short.txt"), "b".repeat(32)).unwrap();
    fs::write(dir.path().join("outside.bin"), [1u8, 1].repeat(100)).unwrap();
    let wrong = |more: &[&str], parts: &[&str]| {
        let model = data("model");
        let output = zero(
            dir.path(),
            &tiny(&model, "a.txt", &[more, &["--checkpoint", "c"]].concat()),
        );
        fails(&output, 2, parts);
        assert!(!dir.path().join("c").exists(), "found before the run");
    };

    for split in ["0", "1", "1.5", "-0.1", "NaN"] {
        wrong(
            &["--val-split", split],
            &["--val-split", split, "between 0 and 1", "0.1"],
        );
    }

    wrong(
        &["--val-split", "0.1", "--val-data", "others.txt"],
        &["--val-data and --val-split", "only one"],
    );
    for flag in ["--eval-every", "--eval-tokens"] {
        wrong(&[flag, "5"], &[flag, "--val-data FILE or --val-split 0.1"]);
    }

    wrong(
        &["--val-split", "0.01"],
        &[
            "a.txt",
            "20 tokens",
            "--seq-len 32",
            "33",
            "larger --val-split",
        ],
    );

    wrong(
        &["--val-split", "0.99"],
        &[
            "a.txt",
            "tokens",
            "--seq-len 32",
            "33",
            "smaller --val-split",
        ],
    );

    wrong(
        &["--val-data", "short.txt"],
        &["short.txt", "32 tokens", "33", "longer --val-data"],
    );
    wrong(&["--val-data", "nowhere"], &["--val-data", "nowhere"]);
    wrong(
        &["--val-data", "outside.bin"],
        &["outside.bin", "257", "vocabulary"],
    );
    wrong(
        &["--val-data", "others.txt", "--eval-tokens", "31"],
        &["--eval-tokens 31", "--seq-len 32"],
    );
}

#[test]
fn training_data_as_validation_data_prints_a_note() {
    let dir = temp();
    let tokens = data("tokens.u16.bin");
    let out = succeeds(&run_tiny(
        dir.path(),
        &["--val-data", &tokens, "--steps", "1"],
    ));
    assert!(
        out.contains("note: the validation data is the training data"),
        "{out}"
    );
}

#[test]
fn best_without_validation_is_an_error() {
    let dir = temp();
    succeeds(&run_tiny(dir.path(), &["--checkpoint", "c"]));
    fails(
        &zero(dir.path(), &["ckpt", "inspect", "c", "--best"]),
        1,
        &["best", "--val-data or --val-split"],
    );
}
