//! What a run writes, and what must not destroy it: another run, a full disk, a limit, weights that
//! are not finite.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::place;
use crate::support::{
    data, fails, on_disk, run_flags, run_tiny, succeeds, temp, tiny, words, zero,
};

fn checkpoints(dir: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(dir) else {
        return Vec::new();
    };
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.starts_with("step-")).collect();
    names.sort();
    names
}

fn lines(file: &Path) -> usize {
    fs::read_to_string(file).map_or(0, |text| text.lines().count())
}

/// Two runs that start at the same time both find a file without lines.
#[test]
fn metrics_have_one_writer() {
    let dir = temp();
    let file = fs::File::create(dir.path().join("m")).unwrap();
    file.lock().unwrap();
    fails(
        &run_tiny(dir.path(), &["--metrics", "m"]),
        2,
        &["--metrics m", "another run is writing", "another file"],
    );
    drop(file);
    succeeds(&run_tiny(dir.path(), &["--metrics", "m"]));
    assert_eq!(lines(&dir.path().join("m")), 3);
    // Two runs without a file to lock.
    succeeds(&run_tiny(dir.path(), &["--metrics", "/dev/null"]));
}

#[test]
fn failed_metrics_save_and_end_the_run() {
    let dir = temp();
    let output = run_flags(
        dir.path(),
        "--steps 1000000 --metrics /dev/full --checkpoint c",
    );
    fails(&output, 1, &["failed to write /dev/full", "No space left"]);
    assert_eq!(checkpoints(&dir.path().join("c")).len(), 1);
    succeeds(&zero(dir.path(), &["ckpt", "verify", "c"]));
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(out.contains("continue with --resume c\n"), "{out}");
}

#[test]
fn missing_metrics_lines_are_noted() {
    let dir = temp();
    succeeds(&run_flags(
        dir.path(),
        "--steps 2 --metrics m --checkpoint c",
    ));

    succeeds(&zero(
        dir.path(),
        &words("train --resume c --steps 5 --metrics other"),
    ));

    let out = succeeds(&zero(
        dir.path(),
        &words("train --resume c --steps 6 --metrics m"),
    ));
    assert!(
        out.contains("note: m: it has no lines of steps 3 to 5\n"),
        "{out}"
    );
    assert_eq!(lines(&dir.path().join("m")), 3);
}

#[test]
fn report_of_another_run_is_refused() {
    let dir = temp();
    succeeds(&run_flags(dir.path(), "--report r --checkpoint c"));
    let before = fs::read(dir.path().join("r/summary.json")).unwrap();
    fails(
        &run_tiny(dir.path(), &["--report", "r"]),
        2,
        &["--report r", "the report of another run", "another folder"],
    );
    assert_eq!(fs::read(dir.path().join("r/summary.json")).unwrap(), before);
    // The run itself goes on.
    succeeds(&zero(
        dir.path(),
        &words("train --resume c --steps 4 --report r"),
    ));
    assert_ne!(fs::read(dir.path().join("r/summary.json")).unwrap(), before);
    // A report that cannot be read is not one without steps.
    let resume = ["train", "--resume", "c", "--steps", "5", "--report", "r"];
    for (name, part) in [
        (
            "summary.json",
            "not the figures of a report: EOF while parsing",
        ),
        ("run.json", "its run.json cannot be read: EOF while parsing"),
    ] {
        let path = dir.path().join("r").join(name);
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() / 2]).unwrap();
        fails(&zero(dir.path(), &resume), 2, &[part, "another folder"]);
        fs::write(&path, whole).unwrap();
    }
    fs::create_dir(dir.path().join("notes")).unwrap();
    fs::write(dir.path().join("notes/summary.txt"), "mine").unwrap();
    fails(
        &run_tiny(dir.path(), &["--report", "notes"]),
        2,
        &["--report notes", "summary.txt", "not of a report"],
    );
    assert_eq!(
        fs::read(dir.path().join("notes/summary.txt")).unwrap(),
        b"mine"
    );
}

#[test]
fn report_among_checkpoints_is_refused() {
    let dir = temp();
    fails(
        &run_tiny(dir.path(), &["--report", "c", "--checkpoint", "c"]),
        2,
        &["--report c", "for checkpoints"],
    );
    let out = succeeds(&run_flags(
        dir.path(),
        "--checkpoint c --ranks 1 --check-replicas 2",
    ));
    assert!(
        out.contains("note: --check-replicas has no effect: this run has one rank"),
        "{out}"
    );
    fails(
        &run_tiny(dir.path(), &["--report", "c", "--checkpoint", "d"]),
        2,
        &["--report c", "for checkpoints"],
    );
}

#[test]
fn diverged_run_fails_and_keeps_its_checkpoint() {
    let dir = temp();
    let saves = words("--checkpoint c --checkpoint-every 1 --keep-last 1");
    let output = run_tiny(
        dir.path(),
        &[&saves[..], &["--lr", "1e30", "--steps", "5"]].concat(),
    );
    let error = [
        "step 5: the loss is not finite, and the last 4 steps were skipped",
        "not saved",
        "lower --lr",
    ];
    fails(&output, 1, &error);
    assert_eq!(checkpoints(&dir.path().join("c")), ["step-00000001"]);
}

/// The loss is finite, but no gradient is: nothing is learned.
#[test]
fn run_that_ends_with_skipped_steps_fails() {
    let dir = temp();
    let output = run_flags(dir.path(), "--checkpoint c --lr 1e4 --steps 8");
    let error = [
        "step 8: the last 7 steps were skipped",
        "the checkpoint has the weights of step 1",
        "lower --lr",
    ];
    fails(&output, 1, &error);
    assert_eq!(checkpoints(&dir.path().join("c")), ["step-00000008"]);
}

#[test]
fn weights_that_are_not_finite_are_named() {
    let dir = temp();
    let model = dir.path().join("model");
    fs::create_dir(&model).unwrap();
    fs::copy(
        format!("{}/config.json", data("model")),
        model.join("config.json"),
    )
    .unwrap();
    let mut weights = fs::read(format!("{}/model.safetensors", data("model"))).unwrap();
    let last = weights.len() - 4;
    weights[last..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(model.join("model.safetensors"), weights).unwrap();
    let output = zero(
        dir.path(),
        &tiny("model", &data("tokens.u16.bin"), &["--checkpoint", "c"]),
    );

    fails(
        &output,
        1,
        &[
            "model/model.safetensors: tensor \"transformer.",
            "has NaN at element ",
            "cannot be trained",
        ],
    );

    assert_eq!(checkpoints(&dir.path().join("c")), [] as [String; 0]);
}

/// The evaluation takes minutes; the interrupt ends it without a result.
#[test]
fn interrupt_ends_an_evaluation() {
    let dir = on_disk();
    let tokens = fs::read(data("tokens.u16.bin")).unwrap();
    fs::write(
        dir.path().join("long.bin"),
        tokens.repeat((32 << 20) / tokens.len()),
    )
    .unwrap();
    let (model, tokens) = (data("model"), data("tokens.u16.bin"));

    let validation = words("--val-data long.bin --eval-every 2 --eval-tokens 16000000");

    let more = ["--steps", "9", "--metrics", "m", "--checkpoint", "c"];
    let args = tiny(&model, &tokens, &[&validation[..], &more].concat());
    let mut run = place::zero()
        .args(args)
        .current_dir(dir.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();

    while lines(&dir.path().join("m")) < 1 {
        assert!(run.try_wait().unwrap().is_none(), "the run ended");
        std::thread::sleep(Duration::from_millis(20));
    }

    // Step 2 takes milliseconds; without this the interrupt may end the run before the evaluation.
    std::thread::sleep(Duration::from_millis(500));
    assert!(
        Command::new("kill")
            .args(["-INT", &run.id().to_string()])
            .status()
            .unwrap()
            .success()
    );

    assert_eq!(run.wait().unwrap().code(), Some(130));
    let text = fs::read_to_string(dir.path().join("m")).unwrap();
    let mut steps = text.lines().map(serde_json::from_str::<Value>);
    let evaluated = |step: serde_json::Result<Value>| !step.unwrap()["validation"].is_null();
    assert!(!steps.any(evaluated), "{text}");
    assert!(text.lines().count() <= 2, "{text}");
    assert_eq!(
        checkpoints(&dir.path().join("c")),
        [format!("step-{:08}", text.lines().count())]
    );
}

/// The system would end the process by a signal.
#[test]
fn limit_of_file_size_is_an_error() {
    let dir = temp();
    let zero = place::zero().get_program().display().to_string();
    let (model, tokens) = (data("model"), data("tokens.u16.bin"));
    let args = tiny(&model, &tokens, &["--checkpoint", "c"]).join("' '");
    let output = Command::new("sh")
        .args(["-c", &format!("ulimit -f 20; exec '{zero}' '{args}'")])
        .current_dir(dir.path())
        .output()
        .unwrap();
    fails(&output, 1, &["File too large", "c/.staging"]);
    let text = String::from_utf8_lossy(&output.stderr);
    let error = text.lines().last().unwrap();
    assert_eq!(error.matches("rank ").count(), 1, "{error}");
}

/// The limit grows until the run succeeds: whichever file is the first that cannot be opened,
/// a run that fails for it names the limit.
#[test]
fn limit_of_open_files_is_named() {
    let dir = temp();
    let zero = place::zero().get_program().display().to_string();
    let (model, tokens) = (data("model"), data("tokens.u16.bin"));
    let mut failures = 0;
    for limit in 4..200 {
        let name = |output: &str| format!("{output}{limit}");
        let more = [
            ["--checkpoint", &name("c")],
            ["--metrics", &name("m")],
            ["--csv", &name("v")],
            ["--tensorboard", &name("t")],
            ["--report", &name("r")],
            ["--steps", "1"],
        ];
        let args = tiny(&model, &tokens, more.as_flattened()).join("' '");
        let output = Command::new("sh")
            .args(["-c", &format!("ulimit -n {limit}; exec '{zero}' '{args}'")])
            .current_dir(dir.path())
            .output()
            .unwrap();
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
    let dir = temp();
    let out = succeeds(&run_flags(dir.path(), "--ranks 3 --stage 1 --checkpoint c"));
    let table: Vec<&str> = out
        .lines()
        .skip_while(|line| !line.starts_with("held by"))
        .skip(1)
        .collect();
    let rows: Vec<&str> = table
        .into_iter()
        .take_while(|line| !line.starts_with("  ("))
        .collect();
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
