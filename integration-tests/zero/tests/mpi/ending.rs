//! Signals to `mpirun` and to one rank, and ranks that start late.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use integration_tests::{Files, Folder, Printed};

use super::{has_mpirun, mpirun, train};
use crate::place;

/// Timeout that expires only if a run hangs.
const LIMIT: Duration = Duration::from_secs(300);

/// Micro-batches of a step that takes some seconds.
const STEP_OF_SECONDS: &str = "1000";

fn wait_until(what: &str, mut is_done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_done() {
        assert!(begun.elapsed() < LIMIT, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn steps(dir: &Path) -> usize {
    fs::read_to_string(dir.join("m")).map_or(0, |text| text.lines().count())
}

fn signal(process: &str, name: &str) {
    let sent = Command::new("kill").args([name, process]).status();
    assert!(sent.unwrap().success());
}

/// A run of two ranks in `dir` that only a signal ends.
fn start(dir: &Path, more: &str) -> Child {
    let mut command = mpirun(2, dir);
    command.args(train(
        2,
        &format!("--steps 1000000 --metrics m --checkpoint c {more}"),
    ));
    command.current_dir(dir).stdout(Stdio::piped());
    command.stderr(Stdio::piped()).spawn().unwrap()
}

/// The run ends and has saved its last step; returns what it printed.
fn has_saved(run: Child, dir: &Path) -> String {
    let output = run.wait_with_output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    let last = format!("c/step-{:08}", steps(dir));
    assert!(dir.join(&last).exists(), "no {last}: {text}");
    text
}

/// `mpirun` forwards SIGUSR1 at once and kills nobody, however long a step takes: here longer than
/// the second after which another signal would kill the ranks.
#[test]
fn sigusr1_to_mpirun_saves_after_a_long_step() {
    if !has_mpirun() {
        return;
    }
    let dir = &Folder::on_disk();
    let mut run = start(dir, &format!("--grad-accum {STEP_OF_SECONDS}"));
    wait_until("a step", || {
        assert!(run.try_wait().unwrap().is_none(), "the run ended");
        steps(dir) >= 1
    });
    signal(&run.id().to_string(), "-USR1");
    let text = has_saved(run, dir);
    assert!(text.contains("kill -USR1"), "no note at the start: {text}");
    text.shows(&["a second signal ends it at once"]);
}

/// The other rank learns of the signal, which is the exit code of both.
#[test]
fn sigterm_of_one_rank_is_the_exit_code() {
    if !has_mpirun() {
        return;
    }
    let dir = &Folder::on_disk();
    let run = start(dir, "");
    wait_until("a step", || steps(dir) >= 1);
    let mpirun = run.id().to_string();
    let ranks = Command::new("pgrep")
        .args(["-P", &mpirun])
        .output()
        .unwrap();
    let ranks = String::from_utf8(ranks.stdout).unwrap();
    signal(ranks.lines().last().expect("mpirun has children"), "-TERM");

    let output = run.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(143), "{text}");
    assert!(dir.join(format!("c/step-{:08}", steps(dir))).exists());
}

/// A rank whose start hangs is not known to MPI, so the others say that they wait.
#[test]
fn rank_that_waits_for_the_start_of_others_says_so() {
    if !has_mpirun() {
        return;
    }
    let dir = &Folder::on_disk();
    let args = train(2, "--steps 1 --time-limit 2");
    let late = "until [ -e go ]; do sleep 0.05; done; exec \"$@\"";
    let mut command = mpirun(1, dir);
    command
        .args(&args)
        .args([":", "-n", "1", "sh", "-c", late, "sh"]);
    command.arg(place::zero().get_program()).args(&args);
    command.current_dir(dir).stdout(Stdio::null());
    let mut run = command.stderr(Stdio::piped()).spawn().unwrap();

    let lines = BufReader::new(run.stderr.take().unwrap()).lines();
    let mut lines = lines.map_while(Result::ok);
    let waits = lines.any(|line| line.contains("rank 0 waits in MPI_Init for the other ranks"));
    dir.write("go", "");
    assert!(waits, "the run ended without a note");
    for line in lines {
        eprintln!("{line}");
    }
    assert!(run.wait().unwrap().success());
}
