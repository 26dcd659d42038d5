//! What a run writes, and what must not destroy it: another run, a full disk, a limit, weights that
//! are not finite.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use crate::support::{
    Files, Printed, Runs, checkpoints, count_lines, data, fails, lines, on_disk, signal, temp,
    wait_for,
};

/// Two runs that start at the same time both find a file without lines.
#[test]
fn metrics_have_one_writer() {
    let dir = &temp();
    let file = fs::File::create(dir.join("m")).unwrap();
    file.lock().unwrap();
    dir.refuses(
        "--metrics m",
        &["--metrics m", "another run is writing", "another file"],
    );
    drop(file);
    dir.tiny("--metrics m");
    assert_eq!(count_lines(&dir.join("m")), 3);
    // Two runs without a file to lock.
    dir.tiny("--metrics /dev/null");
}

#[test]
fn failed_output_saves_and_ends_the_run() {
    for flag in ["--metrics", "--csv"] {
        let dir = &temp();
        let output = dir.tiny_output(&format!("--steps 1000000 {flag} /dev/full --checkpoint c"));
        fails(&output, 1, &["failed to write /dev/full", "No space left"]);
        assert_eq!(checkpoints(&dir.join("c")).len(), 1);
        dir.zero("ckpt verify c");
        let out = String::from_utf8_lossy(&output.stdout);
        out.shows(&["continue with --resume c\n"]);
    }
}

#[test]
fn missing_metrics_lines_are_noted() {
    let dir = &temp();
    dir.tiny("--steps 2 --metrics m --checkpoint c");

    dir.zero("train --resume c --steps 5 --metrics other");

    let out = dir.zero("train --resume c --steps 6 --metrics m");
    out.shows(&["note: m: it has no lines of steps 3 to 5\n"]);
    assert_eq!(count_lines(&dir.join("m")), 3);
}

#[test]
fn report_of_another_run_is_refused() {
    let dir = &temp();
    dir.tiny("--report r --checkpoint c");
    let before = dir.bytes("r/summary.json");
    dir.refuses(
        "--report r",
        &["--report r", "the report of another run", "another folder"],
    );
    assert_eq!(dir.bytes("r/summary.json"), before);
    // The run itself goes on.
    dir.zero("train --resume c --steps 4 --report r");
    assert_ne!(dir.bytes("r/summary.json"), before);
    // A report that cannot be read is not one without steps.
    for (name, part) in [
        (
            "summary.json",
            "not the figures of a report: EOF while parsing",
        ),
        ("run.json", "its run.json cannot be read: EOF while parsing"),
    ] {
        let path = dir.join("r").join(name);
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() / 2]).unwrap();
        dir.fails(
            "train --resume c --steps 5 --report r",
            2,
            &[part, "another folder"],
        );
        fs::write(&path, whole).unwrap();
    }
    fs::create_dir(dir.join("notes")).unwrap();
    dir.write("notes/summary.txt", "mine");
    dir.refuses(
        "--report notes",
        &["--report notes", "summary.txt", "not of a report"],
    );
    assert_eq!(dir.bytes("notes/summary.txt"), b"mine");
}

#[test]
fn report_among_checkpoints_is_refused() {
    let dir = &temp();
    dir.refuses(
        "--report c --checkpoint c",
        &["--report c", "for checkpoints"],
    );
    let out = dir.tiny("--checkpoint c --ranks 1 --check-replicas 2");
    out.shows(&["note: --check-replicas has no effect: this run has one rank"]);
    dir.refuses(
        "--report c --checkpoint d",
        &["--report c", "for checkpoints"],
    );
}

#[test]
fn diverged_run_fails_and_keeps_its_checkpoint() {
    let dir = &temp();
    let saves = "--checkpoint c --checkpoint-every 1 --keep-last 1";
    let output = dir.tiny_output(&format!("{saves} --lr 1e30 --steps 5"));
    let error = [
        "step 5: the loss is not finite, and the last 4 steps were skipped",
        "not saved",
        "lower --lr",
    ];
    fails(&output, 1, &error);
    assert_eq!(checkpoints(&dir.join("c")), [1]);
}

/// The loss is finite, but no gradient is: nothing is learned.
#[test]
fn run_that_ends_with_skipped_steps_fails() {
    let dir = &temp();
    let output = dir.tiny_output("--checkpoint c --lr 1e4 --steps 8");
    let error = [
        "step 8: the last 7 steps were skipped",
        "the checkpoint has the weights of step 1",
        "lower --lr",
    ];
    fails(&output, 1, &error);
    assert_eq!(checkpoints(&dir.join("c")), [8]);
}

#[test]
fn weights_that_are_not_finite_are_named() {
    let dir = &temp();
    let model = dir.join("model");
    fs::create_dir(&model).unwrap();
    let from = |name: &str| data(&format!("model/{name}"));
    fs::copy(from("config.json"), model.join("config.json")).unwrap();
    let mut weights = fs::read(from("model.safetensors")).unwrap();
    let last = weights.len() - 4;
    weights[last..].copy_from_slice(&f32::NAN.to_le_bytes());
    model.write("model.safetensors", weights);
    let output = dir.tiny_output("--model model --checkpoint c");

    fails(
        &output,
        1,
        &[
            "model/model.safetensors: tensor \"transformer.",
            "has NaN at element ",
            "cannot be trained",
        ],
    );

    assert_eq!(checkpoints(&dir.join("c")), [] as [u64; 0]);
}

/// The evaluation takes minutes; the interrupt ends it without a result.
#[test]
fn interrupt_ends_an_evaluation() {
    let dir = &on_disk();
    let tokens = fs::read(data("tokens.u16.bin")).unwrap();
    let long = tokens.repeat((32 << 20) / tokens.len());
    dir.write("long.bin", long);
    let validation = "--val-data long.bin --eval-every 2 --eval-tokens 16000000";
    let mut run = dir.start(&format!(
        "{validation} --steps 9 --metrics m --checkpoint c"
    ));
    wait_for(&mut run, || count_lines(&dir.join("m")) >= 1);

    // Step 2 takes milliseconds; without this the interrupt may end the run before the evaluation.
    std::thread::sleep(Duration::from_millis(500));
    signal(&run, "-INT");

    assert_eq!(run.wait().unwrap().code(), Some(130));
    let steps = lines(&dir.join("m"));
    assert!(steps.len() <= 2, "{steps:?}");
    assert!(
        steps.iter().all(|step| step["validation"].is_null()),
        "{steps:?}"
    );
    assert_eq!(checkpoints(&dir.join("c")), [steps.len() as u64]);
}

/// A small run under a limit of the shell.
fn under(dir: &Path, limit: &str, flags: &str) -> Output {
    let run = dir.tiny_line(flags);
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("{limit}; exec {run}")]);
    shell.current_dir(dir).output().unwrap()
}

/// The system would end the process by a signal.
#[test]
fn limit_of_file_size_is_an_error() {
    let dir = &temp();
    let output = under(dir, "ulimit -f 20", "--checkpoint c");
    fails(&output, 1, &["File too large", "c/.staging"]);
    let text = String::from_utf8_lossy(&output.stderr);
    let error = text.lines().last().unwrap();
    assert_eq!(error.matches("rank ").count(), 1, "{error}");
}

/// The limit grows until the run succeeds: whichever file is the first that cannot be opened,
/// a run that fails for it names the limit.
#[test]
fn limit_of_open_files_is_named() {
    let dir = &temp();
    let mut failures = 0;
    for limit in 4..200 {
        let outputs = [
            ("checkpoint", "c"),
            ("metrics", "m"),
            ("csv", "v"),
            ("tensorboard", "t"),
            ("report", "r"),
        ];
        let outputs = outputs
            .map(|(flag, name)| format!("--{flag} {name}{limit} "))
            .concat();
        let output = under(
            dir,
            &format!("ulimit -n {limit}"),
            &format!("{outputs} --steps 1"),
        );
        if output.status.success() {
            break;
        }
        let code = output.status.code().unwrap_or_default();
        fails(&output, code, &["ulimit -n"]);
        failures += 1;
    }
    assert!(
        failures > 0,
        "the run needs fewer files than the lowest limit"
    );
}

#[test]
fn columns_align_where_ranks_differ() {
    let dir = &temp();
    let out = dir.tiny("--ranks 3 --stage 1 --checkpoint c");
    let table = out.lines().skip_while(|line| !line.starts_with("held by"));
    let rows = table.skip(1).take_while(|line| !line.starts_with("  ("));
    let rows: Vec<&str> = rows.collect();
    assert_eq!(rows.len(), 10, "{out}");
    assert!(rows.iter().all(|row| row.len() == rows[0].len()), "{out}");

    for row in rows {
        if let Some((least, most)) = row.split_once(" to ") {
            assert!(
                !most.starts_with(least.trim_start().rsplit("  ").next().unwrap()),
                "{row}"
            );
        }
    }
}
