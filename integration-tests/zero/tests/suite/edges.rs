//! The edges of `zero`: signals, stops, the default data and folder, tokenizers, odd numbers,
//! narrow terminals.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use zero_models::gpt2::config::GptConfig;

use crate::support::{
    Files, Printed, Runs, count_lines, fails, lines, signal, succeeds, temp, wait_for, words,
    write_model,
};

/// Starts a run that does not end by itself and waits for its third step.
fn endless(dir: &Path, more: &str) -> Child {
    let mut command = dir.tiny_command(&format!("--steps 1000000 --metrics m {more}"));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut run = command.spawn().unwrap();
    wait_for(&mut run, || steps(dir) >= 3);
    run
}

fn steps(dir: &Path) -> usize {
    count_lines(&dir.join("m"))
}

/// Each signal saves, prints where, and ends the run with 128 + its number; the saved step is the
/// last one.
#[test]
fn signals_save_and_end() {
    for (name, code) in [("-INT", 130), ("-TERM", 143), ("-HUP", 129)] {
        let dir = &temp();
        let run = endless(dir, "");
        signal(&run, name);
        let output = run.wait_with_output().unwrap();
        let out = String::from_utf8_lossy(&output.stdout);
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{out}{err}");
        err.omits(&["error"]);
        let last = steps(dir);
        out.shows(&[
            "checkpoints: checkpoints, at the end",
            &format!("interrupted at step {last}; continue with --resume checkpoints\n"),
            &format!("checkpoint: checkpoints/step-{last:08}\n"),
        ]);
        dir.zero("ckpt verify checkpoints");
        let next = last + 1;
        dir.tiny(&format!("--resume checkpoints --steps {next} --metrics m2"));
        assert_eq!(count_lines(&dir.join("m2")), 1);
    }
}

/// The first signal takes effect only after the step.
#[test]
fn second_signal_ends_at_once() {
    let dir = &temp();
    // Its first step takes minutes.
    let mut run = dir.start("--grad-accum 65536 --steps 9 --metrics m");
    wait_for(&mut run, || dir.join("m").exists());

    // Two signals that arrive together count once.
    let code = loop {
        if let Some(status) = run.try_wait().unwrap() {
            break status.code();
        }
        signal(&run, "-TERM");
        std::thread::sleep(Duration::from_millis(50));
    };

    assert_eq!(code, Some(143));
    assert_eq!(steps(dir), 0);
}

/// The clock jumps by more than the limit while every rank waits or computes.
#[test]
fn stop_does_not_count_against_the_time_limit() {
    let dir = &temp();
    let mut run = endless(dir, "--time-limit 4 --no-checkpoint");
    let before = steps(dir);
    signal(&run, "-STOP");
    std::thread::sleep(Duration::from_secs(6));
    signal(&run, "-CONT");
    wait_for(&mut run, || steps(dir) >= before + 3);
    signal(&run, "-INT");
    assert_eq!(run.wait().unwrap().code(), Some(130));
}

/// The files that a run writes into the current folder are not data of the next run or of a resume.
#[test]
fn default_data_is_the_same_again() {
    let dir = &temp();
    let text: String = (0..20_000).map(|i| format!("{}\n", i * i % 9973)).collect();
    dir.write("text.txt", text);
    let run = |more: &str| {
        dir.zero(&format!(
            "train --ranks 2 --seq-len 16 --micro-batch 1 --steps {more}"
        ))
    };
    let data = |out: &str| {
        let line = out.lines().find(|line| line.starts_with("data: "));
        line.unwrap().to_owned()
    };

    let first = data(&run(
        "2 --metrics m.jsonl --report report --checkpoint runs/a",
    ));

    assert!(first.starts_with("data: .: 1 text file, "), "{first}");
    assert_eq!(data(&run("2 --report .")), first);
    assert!(dir.join("checkpoints/step-00000002").is_dir());
    dir.zero("ckpt export runs/a exported");
    let resumed = run("3 --resume runs/a");
    assert_eq!(data(&resumed), first);
    resumed.shows(&["note: differs from the checkpoint: steps 2 -> 3"]);
    resumed.omits(&["the data differs"]);
    // The default folder of the run, from another one: still without hidden files.
    dir.write(".hidden", "hidden");
    std::fs::create_dir(dir.join("elsewhere")).unwrap();
    let elsewhere = dir
        .join("elsewhere")
        .zero("train --resume ../runs/a --steps 4");
    elsewhere.shows(&[": 1 text file, "]);
    elsewhere.omits(&["the data differs"]);
    // The default folder is in use; another is named.
    run("2").shows(&["checkpoint: checkpoints-2/step-00000002\n"]);
    run("2 --no-checkpoint").omits(&["checkpoint: "]);
    assert!(!dir.join("checkpoints-3").exists());
}

/// A vocabulary of all bytes and of "th", "the" and "end of text", as GPT-2's files have it.
fn write_gpt2_tokenizer(dir: &Path) {
    let alphabet: Vec<char> = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet()
        .into_iter()
        .collect();
    let longer = ["th", "the", "<|endoftext|>"].map(str::to_owned);
    let tokens = alphabet.iter().map(char::to_string).chain(longer);
    let vocab: serde_json::Map<String, Value> = tokens
        .zip(0..)
        .map(|(token, id)| (token, Value::from(id)))
        .collect();
    std::fs::create_dir_all(dir).unwrap();
    dir.write("vocab.json", Value::from(vocab).to_string());
    dir.write("merges.txt", "#version: 0.2\nt h\nth e\n");
}

#[test]
fn text_needs_the_tokenizer_of_the_model() {
    let dir = &temp();
    dir.write(
        "text.txt",
        "the theme of the thesis<|endoftext|>".repeat(20),
    );

    let with = |model: &str| {
        let text = "train --data text.txt --ranks 1 --steps 1 --no-checkpoint --model";
        dir.output(&format!("{text} {model}"))
    };
    let parts = "text.txt 50,257 tokenizer.json vocab.json merges.txt";
    let parts = [&words(parts)[..], &["--tokenizer FILE"]].concat();
    fails(&with("gpt2-124m"), 2, &parts);

    let config = GptConfig {
        vocab_size: 600,
        n_embd: 8,
        n_head: 1,
        n_positions: 32,
        n_layer: 1,
        n_inner: 8,
        ..GptConfig::preset("nano").unwrap()
    };
    std::fs::create_dir(dir.join("model")).unwrap();
    write_model(&dir.join("model"), &config.into());
    let by = |tokenizer: &str| with(&format!("model --tokenizer {tokenizer}"));

    fails(&with("model"), 2, &["600 tokens", "--tokenizer FILE"]);
    write_gpt2_tokenizer(&dir.join("gpt2"));
    for path in ["gpt2", "gpt2/vocab.json", "gpt2/merges.txt"] {
        succeeds(&by(path)).shows(&["data: text.txt: text, 720 bytes, 320 tokens"]);
    }

    std::fs::remove_file(dir.join("gpt2/merges.txt")).unwrap();
    for (path, parts) in [
        ("gpt2", &words("gpt2 tokenizer.json merges.txt")[..]),
        ("gpt2/vocab.json", &["gpt2/vocab.json", "merges.txt"]),
        ("nowhere", &["nowhere", "no such file"]),
        ("text.txt", &["text.txt", "not a tokenizer"]),
    ] {
        fails(&by(path), 2, parts);
    }
    dir.refuses("--tokenizer gpt2", &["--tokenizer gpt2", "file of tokens"]);
    // The tokenizer of the model's folder is found.
    write_gpt2_tokenizer(&dir.join("model"));
    succeeds(&with("model")).shows(&["720 bytes, 320 tokens"]);
}

/// Of a folder's files, the error names the one with the token.
#[test]
fn data_errors_name_the_file() {
    let dir = &temp();
    let texts = dir.join("texts");
    std::fs::create_dir(&texts).unwrap();
    texts.write("a.txt", "no pair here. ".repeat(4));
    texts.write("b.txt", "first the end\n");
    write_gpt2_tokenizer(&dir.join("gpt2"));
    // The end token behind each file is one of the model's vocabulary.
    dir.write("gpt2/config.json", r#"{"eos_token_id": 0}"#);
    dir.refuses(
        "--data texts --tokenizer gpt2",
        &["texts/b.txt: token 257 at position 6", "vocabulary of 256"],
    );
}

#[test]
fn odd_numbers_are_plain_errors() {
    let dir = &temp();
    for flag in ["--lr -1e-3", "--weight-decay -0.1"] {
        let output = dir.tiny_output(flag);
        fails(&output, 2, &[]);
        String::from_utf8_lossy(&output.stderr).omits(&["unexpected argument"]);
    }
    for (flag, name) in [
        ("--lr", "lr"),
        ("--clip", "max_grad_norm"),
        ("--eps", "eps"),
    ] {
        let error = format!("error: {flag}: {name} is -1");
        dir.refuses(&format!("{flag} -1"), &[&error]);
    }

    let out = dir.tiny("--warmup-steps 4");
    out.shows(&["note: the warm-up has 4 steps, the run ends at step 3"]);

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
        dir.misuses(line, part);
    }
}

#[test]
fn table_has_total_and_peak_in_binary_units() {
    let dir = &temp();
    let out = dir.tiny("--metrics m");
    out.shows(&["  total  ", "  peak at one moment  "]);
    for step in lines(&dir.join("m")) {
        let fraction = step["overlap"]["overlap_fraction"].as_f64().unwrap();
        assert!((0.0..=1.0).contains(&fraction), "{step}");
    }

    let plan = dir.zero("plan --model nano --gpus 2 --gpu-memory 80GB");

    for text in [&out, &plan] {
        text.shows(&["iB"]);
        text.omits(&[" kB", " MB", " GB"]);
    }
}

/// `script` gives the run a terminal, of 40 columns. Each refresh of the progress is one line of
/// it.
#[test]
fn progress_fits_a_narrow_terminal() {
    let dir = &temp();
    if !Command::new("script")
        .arg("--version")
        .output()
        .is_ok_and(|o| String::from_utf8_lossy(&o.stdout).contains("util-linux"))
    {
        eprintln!("SKIPPED progress_fits_a_narrow_terminal: no script of util-linux");
        return;
    }
    let line = dir.tiny_line("--steps 30");
    let line = format!("stty cols 40 rows 20; {line} --no-checkpoint >/dev/null");
    let mut script = Command::new("script");
    script.args(["-q", "-e", "-c", &line, "typescript"]);
    script.stdout(Stdio::null()).stdin(Stdio::null());
    assert!(script.current_dir(dir).status().unwrap().success());

    let shown = dir.text("typescript");
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
