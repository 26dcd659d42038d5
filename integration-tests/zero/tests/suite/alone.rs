//! A run that nobody watches: it is killed, its terminal closes, its cluster warns it.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use proptest::prelude::Rng;
use proptest::test_runner::TestRunner;

use crate::monitors::{agree_with_metrics, event_files};
use crate::support::{Printed, Runs, checkpoints, signal, started, temp, wait_for, wait_until};

/// The whole lines of a file.
fn whole_lines(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().map(str::to_owned).collect()
}

/// The names of the files in `dir`.
fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.collect()
}

/// The lines of `name` and of the files beside it.
fn lines_and_moved(dir: &Path, name: &str) -> BTreeSet<String> {
    let is_of = |found: &String| found == name || found.starts_with(&format!("{name}.after-step-"));
    let files = names(dir).into_iter().filter(is_of);
    files
        .flat_map(|file| whole_lines(&dir.join(file)))
        .collect()
}

/// Three kills, times `ZERO_PROPTEST_FACTOR`. Each resumed run has no flag but `--resume`.
#[test]
fn killed_run_goes_on_in_its_files() {
    let factor = std::env::var("ZERO_PROPTEST_FACTOR").ok();
    let kills = 3 * factor.and_then(|n| n.parse().ok()).unwrap_or(1_u64);
    let mut runner = TestRunner::default();
    let mut random = |below: u64| runner.rng().next_u64() % below;

    let dir = &temp();
    let first = "--metrics m --tensorboard t --csv t.csv --steps 1000000 --checkpoint c --checkpoint-every 3";
    let again = || started(dir.command("train --resume c"));
    let rows = || whole_lines(&dir.join("t.csv")).len();
    let mut written = BTreeSet::new();

    for kill in 0..kills {
        let before = rows();
        let mut run = if kill == 0 { dir.start(first) } else { again() };
        // Some kills come while the run starts, and moves lines; the first one when there is a
        // checkpoint.
        let more = if kill == 0 { 9 } else { random(12) as usize };
        let is_early = kill > 0 && random(3) == 0;
        wait_for(&mut run, || {
            is_early || (rows() >= before + more && dir.join("c/latest").exists())
        });
        std::thread::sleep(Duration::from_micros(random(if is_early {
            400_000
        } else {
            20_000
        })));
        run.kill().unwrap();
        run.wait().unwrap();
        written.extend(whole_lines(&dir.join("m")));
        written.extend(whole_lines(&dir.join("t.csv")));
    }

    let before = rows();
    let mut run = again();
    wait_for(&mut run, || rows() > before);
    signal(&run, "-TERM");
    assert_eq!(run.wait().unwrap().code(), Some(143));

    let steps = agree_with_metrics(dir);
    assert!(
        steps.iter().copied().eq(1..=steps.len() as u64),
        "{steps:?}"
    );
    // No line was lost, and nothing else is left.
    let mut kept = lines_and_moved(dir, "m");
    kept.extend(lines_and_moved(dir, "t.csv"));
    assert!(written.is_subset(&kept));
    for name in names(dir).iter().chain(&names(&dir.join("t"))) {
        assert!(!name.starts_with('.'), "{name} is left");
    }
    assert!(!event_files(&dir.join("t")).is_empty());
}

/// A run that goes on until a signal ends it, started by `shell` in place of "$@".
fn started_by(dir: &Path, shell: &str, more: &str) -> Command {
    let flags = format!("--metrics m --steps 1000000 --checkpoint c {more}");
    let run = dir.tiny_command(&flags);
    let mut command = Command::new("sh");
    command.args(["-c", shell, "sh"]);
    command.arg(run.get_program()).args(run.get_args());
    command.current_dir(dir).stdin(Stdio::null());
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// Waits until the run has computed some more steps.
fn steps_go_on(run: &mut Child, dir: &Path) {
    let steps = || whole_lines(&dir.join("m")).len();
    let before = steps();
    wait_for(run, || steps() >= before + 3);
}

/// Ends the run by a signal; it has saved its last step.
fn saves_at(mut run: Child, dir: &Path, name: &str, code: i32) {
    signal(&run, name);
    assert_eq!(run.wait().unwrap().code(), Some(code), "{name}");
    let last = format!("c/step-{:08}", whole_lines(&dir.join("m")).len());
    assert!(dir.join(&last).exists(), "{name}: no {last}");
}

#[test]
fn signals_that_are_ignored_at_the_start_end_nothing() {
    let dir = &temp();
    // nohup ignores the first, a shell without job control the second.
    let mut run = started_by(dir, "trap '' HUP INT; exec \"$@\"", "")
        .spawn()
        .unwrap();
    steps_go_on(&mut run, dir);
    for name in ["-HUP", "-INT", "-HUP"] {
        signal(&run, name);
        steps_go_on(&mut run, dir);
    }
    // The warning of a cluster before a time limit.
    saves_at(run, dir, "-USR1", 138);
}

/// A pseudo-terminal: the end that a person types into, and that of the programs.
fn terminal() -> (fs::File, fs::File) {
    let mut ends = [-1; 2];
    let [person, programs] = &mut ends;
    // SAFETY: two integers to write to; the name, the settings and the size may be null.
    let made = unsafe {
        libc::openpty(
            person,
            programs,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            std::ptr::null_mut(),
        )
    };
    assert_eq!(made, 0);
    // SAFETY: just opened, and owned by nobody else.
    let [person, programs] = ends.map(|fd| unsafe { fs::File::from_raw_fd(fd) });
    // The programs must not hold the person's end open.
    // SAFETY: an open descriptor; the call changes only its flag.
    let set = unsafe { libc::fcntl(person.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) };
    assert_eq!(set, 0);
    (person, programs)
}

/// Starts a run whose controlling terminal is `programs`.
fn start_in(programs: fs::File, dir: &Path, shell: &str, more: &str) -> Child {
    let mut in_session = Command::new("setsid");
    let command = started_by(dir, shell, more);
    in_session
        .arg("--ctty")
        .arg(command.get_program())
        .args(command.get_args());
    in_session.current_dir(dir);
    in_session.stdin(programs.try_clone().unwrap());
    in_session
        .stdout(programs.try_clone().unwrap())
        .stderr(programs);
    in_session.spawn().unwrap()
}

/// Reads what the programs print, which would otherwise wait, until they end or `closes` is set and
/// they print more. Then it closes the terminal.
fn read_all(mut person: fs::File, closes: Arc<AtomicBool>) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut text = Vec::new();
        let mut part = [0; 4096];
        // The end of a terminal is an error.
        while let Ok(n @ 1..) = person.read(&mut part) {
            text.extend_from_slice(&part[..n]);
            if closes.load(Ordering::Relaxed) {
                break;
            }
        }
        String::from_utf8_lossy(&text).into_owned()
    })
}

#[test]
fn typed_interrupt_saves() {
    let dir = &temp();
    let (mut person, programs) = terminal();
    let printed = read_all(person.try_clone().unwrap(), Arc::default());
    let mut run = start_in(programs, dir, "exec \"$@\"", "");
    steps_go_on(&mut run, dir);
    person.write_all(&[3]).unwrap();
    assert_eq!(run.wait().unwrap().code(), Some(130));
    let last = format!("c/step-{:08}", whole_lines(&dir.join("m")).len());
    assert!(dir.join(last).exists());
    let printed = printed.join().unwrap();
    printed.shows(&[
        "interrupted: the run ends after this step",
        "continue with --resume c",
    ]);
}

/// The terminal of a run that ignores SIGHUP closes: its prints fail, and it goes on to its end.
#[test]
fn closed_terminal_ends_no_run_under_nohup() {
    let dir = &temp();
    let (person, programs) = terminal();
    // The report is written after the last print.
    let more = "--steps 400 --report r";
    let mut run = start_in(programs, dir, "trap '' HUP; exec \"$@\"", more);
    let closes = Arc::new(AtomicBool::new(false));
    let printed = read_all(person, Arc::clone(&closes));
    steps_go_on(&mut run, dir);
    closes.store(true, Ordering::Relaxed);
    printed.join().unwrap();
    assert_eq!(run.wait().unwrap().code(), Some(0));
    assert_eq!(whole_lines(&dir.join("m")).len(), 400);
    assert!(dir.join("r/summary.json").exists());
}

/// Everything that reads checkpoints, in turn, while a run saves after each step and keeps one.
#[test]
fn readers_beside_a_run_find_its_newest_checkpoint() {
    let dir = &temp();
    let saves = "--checkpoint-every 1 --keep-last 1";
    let mut run = started_by(dir, "exec \"$@\"", saves).spawn().unwrap();
    wait_until("a checkpoint", || dir.join("c/latest").exists());

    let readers = [
        "ckpt verify c",
        "ckpt inspect c",
        "ckpt export c model",
        "generate --checkpoint c --token-ids 1,2 --tokens 1",
        "train --resume c --checkpoint d --steps 1",
    ];
    for _ in 0..3 {
        for reader in readers {
            steps_go_on(&mut run, dir);
            let output = dir.output(reader);
            let text = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{reader:?}: {text}");
            text.omits(&["skipped"]);
            for made in ["model", "d"] {
                let _ = fs::remove_dir_all(dir.join(made));
            }
        }
    }
    saves_at(run, dir, "-TERM", 143);
    // A checkpoint that a reader held is removed by a later save.
    assert_eq!(checkpoints(&dir.join("c")).len(), 1);
}
