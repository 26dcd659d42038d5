//! The edges of `zero`: signals, stops, the default data and folder, tokenizers, odd numbers,
//! narrow terminals.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use zero_models::gpt2::config::GptConfig;

use crate::place;
use crate::support::{
    data, fails, run_tiny, signal, succeeds, temp, tiny, words, write_model, zero,
};

/// Starts a run that does not end by itself and waits for its third step.
fn endless(dir: &Path, more: &[&str]) -> Child {
    let (model, tokens) = (data("model"), data("tokens.u16.bin"));
    let mut args = tiny(&model, &tokens, &["--steps", "1000000", "--metrics", "m"]);
    args.extend(more);
    let mut run = place::zero()
        .args(args)
        .current_dir(dir)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    while steps(dir) < 3 {
        assert!(
            run.try_wait().unwrap().is_none(),
            "the run ended before its third step"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    run
}

fn steps(dir: &Path) -> usize {
    std::fs::read_to_string(dir.join("m")).map_or(0, |text| text.lines().count())
}

/// Each signal saves, prints where, and ends the run with 128 + its number; the saved step is the
/// last one.
#[test]
fn signals_save_and_end() {
    for (name, code) in [("-INT", 130), ("-TERM", 143), ("-HUP", 129)] {
        let dir = temp();
        let run = endless(dir.path(), &[]);
        signal(&run, name);
        let output = run.wait_with_output().unwrap();
        let out = String::from_utf8_lossy(&output.stdout);
        assert_eq!(
            output.status.code(),
            Some(code),
            "{out}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        assert!(
            !String::from_utf8_lossy(&output.stderr).contains("error"),
            "{output:?}"
        );
        let last = steps(dir.path());
        assert!(
            out.contains("checkpoints: checkpoints, at the end"),
            "{out}"
        );
        assert!(
            out.contains(&format!(
                "interrupted at step {last}; continue with --resume checkpoints\n"
            )),
            "{out}"
        );
        assert!(
            out.contains(&format!("checkpoint: checkpoints/step-{last:08}\n")),
            "{out}"
        );
        succeeds(&zero(dir.path(), &["ckpt", "verify", "checkpoints"]));
    }
}

/// The first signal takes effect only after the step.
#[test]
fn second_signal_ends_at_once() {
    let dir = temp();
    // Its first step takes minutes.
    let (model, tokens) = (data("model"), data("tokens.u16.bin"));
    let mut run = place::zero()
        .args(tiny(
            &model,
            &tokens,
            &["--grad-accum", "65536", "--steps", "9", "--metrics", "m"],
        ))
        .current_dir(dir.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();

    while !dir.path().join("m").exists() {
        assert!(run.try_wait().unwrap().is_none(), "the run ended");
        std::thread::sleep(Duration::from_millis(20));
    }

    // Two signals that arrive together count once.
    let code = loop {
        if let Some(status) = run.try_wait().unwrap() {
            break status.code();
        }
        signal(&run, "-TERM");
        std::thread::sleep(Duration::from_millis(50));
    };

    assert_eq!(code, Some(143));
    assert_eq!(steps(dir.path()), 0);
}

/// The clock jumps by more than the limit while every rank waits or computes.
#[test]
fn stop_does_not_count_against_the_time_limit() {
    let dir = temp();
    let mut run = endless(dir.path(), &["--time-limit", "4", "--no-checkpoint"]);
    let before = steps(dir.path());
    signal(&run, "-STOP");
    std::thread::sleep(Duration::from_secs(6));
    signal(&run, "-CONT");
    while steps(dir.path()) < before + 3 {
        assert!(
            run.try_wait().unwrap().is_none(),
            "the run ended: {:?}",
            run.wait_with_output()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    signal(&run, "-INT");
    assert_eq!(run.wait().unwrap().code(), Some(130));
}

/// The files that a run writes into the current folder are not data of the next run or of a resume.
#[test]
fn default_data_is_the_same_again() {
    let dir = temp();
    let text: String = (0..20_000).map(|i| format!("{}\n", i * i % 9973)).collect();
    std::fs::write(dir.path().join("text.txt"), text).unwrap();
    let small = words("train --ranks 2 --seq-len 16 --micro-batch 1 --steps");

    let run = |more: &[&str]| succeeds(&zero(dir.path(), &[&small[..], more].concat()));
    let data = |out: &str| {
        out.lines()
            .find(|line| line.starts_with("data: "))
            .unwrap()
            .to_owned()
    };

    let first = data(&run(&words(
        "2 --metrics m.jsonl --report report --checkpoint runs/a",
    )));

    assert!(first.starts_with("data: .: 1 text file, "), "{first}");
    assert_eq!(data(&run(&["2", "--report", "."])), first);
    assert!(dir.path().join("checkpoints/step-00000002").is_dir());
    succeeds(&zero(dir.path(), &["ckpt", "export", "runs/a", "exported"]));
    let resumed = run(&["3", "--resume", "runs/a"]);
    assert_eq!(data(&resumed), first);
    assert!(!resumed.contains("the data differs"), "{resumed}");
    // The default folder of the run, from another one: still without hidden files.
    std::fs::write(dir.path().join(".hidden"), "hidden").unwrap();
    std::fs::create_dir(dir.path().join("elsewhere")).unwrap();
    let args = ["train", "--resume", "../runs/a", "--steps", "4"];
    let elsewhere = succeeds(&zero(&dir.path().join("elsewhere"), &args));
    assert!(
        elsewhere.contains(": 1 text file, ") && !elsewhere.contains("the data differs"),
        "{elsewhere}"
    );
    // The default folder is in use; another is named.
    let third = run(&["2"]);
    assert!(
        third.contains("checkpoint: checkpoints-2/step-00000002\n"),
        "{third}"
    );
    let none = run(&["2", "--no-checkpoint"]);
    assert!(!none.contains("checkpoint: "), "{none}");
    assert!(!dir.path().join("checkpoints-3").exists());
}

/// A vocabulary of all bytes and of "th", "the" and "end of text", as GPT-2's files have it.
fn write_gpt2_tokenizer(dir: &Path) {
    let alphabet: Vec<char> = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet()
        .into_iter()
        .collect();
    let tokens = alphabet
        .iter()
        .map(char::to_string)
        .chain(["th", "the", "<|endoftext|>"].map(str::to_owned));
    let vocab: serde_json::Map<String, Value> = tokens
        .zip(0..)
        .map(|(token, id)| (token, Value::from(id)))
        .collect();
    std::fs::create_dir_all(dir).unwrap();
    std::fs::write(
        dir.join("vocab.json"),
        serde_json::to_string(&vocab).unwrap(),
    )
    .unwrap();
    std::fs::write(dir.join("merges.txt"), "#version: 0.2\nt h\nth e\n").unwrap();
}

#[test]
fn text_needs_the_tokenizer_of_the_model() {
    let dir = temp();
    std::fs::write(
        dir.path().join("text.txt"),
        "the theme of the thesis<|endoftext|>".repeat(20),
    )
    .unwrap();

    let text = words("train --data text.txt --ranks 1 --steps 1 --no-checkpoint");

    let parts = [
        "text.txt",
        "50,257",
        "--tokenizer FILE",
        "tokenizer.json",
        "vocab.json",
        "merges.txt",
    ];

    fails(
        &zero(dir.path(), &[&text[..], &["--model", "gpt2-124m"]].concat()),
        2,
        &parts,
    );
    let preset = GptConfig::preset("nano").unwrap();

    let config = GptConfig {
        vocab_size: 600,
        n_embd: 8,
        n_head: 1,
        n_positions: 32,
        n_layer: 1,
        n_inner: 8,
        ..preset
    };

    std::fs::create_dir(dir.path().join("model")).unwrap();
    write_model(&dir.path().join("model"), &config.into());
    let with = |more: &[&str]| {
        zero(
            dir.path(),
            &[&text[..], &["--model", "model"], more].concat(),
        )
    };

    fails(&with(&[]), 2, &["600 tokens", "--tokenizer FILE"]);
    write_gpt2_tokenizer(&dir.path().join("gpt2"));
    for path in ["gpt2", "gpt2/vocab.json", "gpt2/merges.txt"] {
        let out = succeeds(&with(&["--tokenizer", path]));
        assert!(
            out.contains("data: text.txt: text, 720 bytes, 320 tokens"),
            "{out}"
        );
    }

    std::fs::remove_file(dir.path().join("gpt2/merges.txt")).unwrap();
    fails(
        &with(&["--tokenizer", "gpt2"]),
        2,
        &words("gpt2 tokenizer.json merges.txt"),
    );
    fails(
        &with(&["--tokenizer", "gpt2/vocab.json"]),
        2,
        &words("gpt2/vocab.json merges.txt"),
    );
    fails(
        &with(&["--tokenizer", "nowhere"]),
        2,
        &["nowhere", "no such file"],
    );
    fails(
        &with(&["--tokenizer", "text.txt"]),
        2,
        &["text.txt", "not a tokenizer"],
    );
    fails(
        &run_tiny(dir.path(), &["--tokenizer", "gpt2"]),
        2,
        &["--tokenizer gpt2", "file of tokens"],
    );
    // The tokenizer of the model's folder is found.
    write_gpt2_tokenizer(&dir.path().join("model"));
    let out = succeeds(&with(&[]));
    assert!(out.contains("720 bytes, 320 tokens"), "{out}");
}

/// Of a folder's files, the error names the one with the token.
#[test]
fn data_errors_name_the_file() {
    let dir = temp();
    let texts = dir.path().join("texts");
    std::fs::create_dir(&texts).unwrap();
    std::fs::write(texts.join("a.txt"), "no pair here. ".repeat(4)).unwrap();
    std::fs::write(texts.join("b.txt"), "first the end\n").unwrap();
    write_gpt2_tokenizer(&dir.path().join("gpt2"));
    // The end token behind each file is one of the model's vocabulary.
    std::fs::write(
        dir.path().join("gpt2/config.json"),
        r#"{"eos_token_id": 0}"#,
    )
    .unwrap();
    let text = ["--data", "texts", "--tokenizer", "gpt2"];
    fails(
        &run_tiny(dir.path(), &text),
        2,
        &["texts/b.txt: token 257 at position 6", "vocabulary of 256"],
    );
}

#[test]
fn odd_numbers_are_plain_errors() {
    let dir = temp();
    for (flag, value) in [
        ("--lr", "-1"),
        ("--lr", "-1e-3"),
        ("--clip", "-1"),
        ("--weight-decay", "-0.1"),
    ] {
        let output = run_tiny(dir.path(), &[flag, value]);
        fails(&output, 2, &[]);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!text.contains("unexpected argument"), "{text}");
    }

    for (flag, name) in [
        ("--lr", "lr"),
        ("--clip", "max_grad_norm"),
        ("--eps", "eps"),
    ] {
        fails(
            &run_tiny(dir.path(), &[flag, "-1"]),
            2,
            &[&format!("error: {flag}: {name} is -1")],
        );
    }

    let out = succeeds(&run_tiny(dir.path(), &["--warmup-steps", "4"]));
    assert!(
        out.contains("note: the warm-up has 4 steps, the run ends at step 3"),
        "{out}"
    );

    for (line, part) in [
        ("train --steps 1e3", "expected a whole number, such as 1000"),
        ("train --data nowhere", "--data nowhere: no such file"),
        (
            "train --tokenizer nowhere",
            "--tokenizer nowhere: no such file",
        ),
        ("train --steps -1", "invalid value '-1' for '--steps <N>'"),
        ("train --ranks -2", "invalid value '-2' for '--ranks <N>'"),
        (
            "plan --gpus -1 --model nano",
            "invalid value '-1' for '--gpus <N>'",
        ),
        ("plan --gpus 1 --params 7.5", "too few for a model"),
        (
            "plan --gpus 1 --params 1e9 --gpu-memory 80",
            "did you mean 80GiB?",
        ),
        (
            "train --no-checkpoint --checkpoint a",
            "cannot be used with",
        ),
    ] {
        let output = zero(dir.path(), &line.split_whitespace().collect::<Vec<_>>());
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{line}: {text}");
        assert!(text.contains(part), "{line}: {text}");
    }
}

#[test]
fn table_has_total_and_peak_in_binary_units() {
    let dir = temp();
    let out = succeeds(&run_tiny(dir.path(), &["--metrics", "m"]));
    for row in ["  total  ", "  peak at one moment  "] {
        assert!(out.contains(row), "{row:?} is not in: {out}");
    }
    let text = std::fs::read_to_string(dir.path().join("m")).unwrap();

    for line in text.lines() {
        let step: Value = serde_json::from_str(line).unwrap();
        let fraction = step["overlap"]["overlap_fraction"].as_f64().unwrap();
        assert!((0.0..=1.0).contains(&fraction), "{line}");
    }

    let plan = succeeds(&zero(
        dir.path(),
        &words("plan --model nano --gpus 2 --gpu-memory 80GB"),
    ));

    for text in [&out, &plan] {
        assert!(
            text.contains("iB") && ![" kB", " MB", " GB"].iter().any(|unit| text.contains(unit)),
            "{text}"
        );
    }
}

/// `script` gives the run a terminal, of 40 columns. Each refresh of the progress is one line of
/// it.
#[test]
fn progress_fits_a_narrow_terminal() {
    let dir = temp();
    if !Command::new("script")
        .arg("--version")
        .output()
        .is_ok_and(|o| String::from_utf8_lossy(&o.stdout).contains("util-linux"))
    {
        eprintln!("SKIPPED progress_fits_a_narrow_terminal: no script of util-linux");
        return;
    }
    let zero = place::zero().get_program().display().to_string();
    let args = tiny("MODEL", "TOKENS", &["--steps", "30"]).join(" ");
    let args = args
        .replace("MODEL", &data("model"))
        .replace("TOKENS", &data("tokens.u16.bin"));
    let line = format!("stty cols 40 rows 20; {zero} {args} --no-checkpoint >/dev/null");
    let mut script = Command::new("script");
    script
        .args(["-q", "-e", "-c", &line, "typescript"])
        .current_dir(dir.path());

    assert!(
        script
            .stdout(Stdio::null())
            .stdin(Stdio::null())
            .status()
            .unwrap()
            .success()
    );

    let shown = std::fs::read_to_string(dir.path().join("typescript")).unwrap();
    let frames: Vec<&str> = shown
        .split(['\r', '\n'])
        .filter(|frame| frame.contains("step "))
        .collect();
    assert!(!frames.is_empty(), "{shown:?}");

    for frame in frames {
        let plain = console::strip_ansi_codes(frame);
        assert!(plain.chars().count() <= 40, "{frame:?}");
    }
}
