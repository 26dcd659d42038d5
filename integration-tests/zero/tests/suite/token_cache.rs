//! The folder of kept tokens after processes that were killed.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::support::{Files, on_disk, signal, succeeds, wait_until};
use crate::{folders, place};

/// A command that tokenizes `text` with the model folder in `dir`, and keeps the tokens in `cache`.
fn tokenize(dir: &Path, text: &str) -> Command {
    let mut command = place::zero();
    command
        .args(["train", "--model", "model", "--data", text])
        .args(["--seq-len", "16", "--micro-batch", "1", "--ranks", "1"])
        .args(["--steps", "1", "--device", "cpu"])
        .env("ZERO_TOKEN_CACHE", dir.join("cache"))
        .current_dir(dir);
    command
}

/// The number of parts in the cache.
fn parts(dir: &Path) -> usize {
    fs::read_dir(dir.join("cache")).map_or(0, |entries| {
        entries
            .filter(|entry| {
                let name = entry.as_ref().unwrap().file_name();
                name.to_string_lossy().ends_with(".part")
            })
            .count()
    })
}

/// Starts a process on a text of `words` words, and stops it while it tokenizes. `None` if it was
/// done before.
fn stopped(dir: &Path, words: usize) -> Option<Child> {
    dir.write("large.txt", "w2 w3 w4 w5 ".repeat(words / 4));
    let mut run = tokenize(dir, "large.txt")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();

    let mut has_ended = false;
    wait_until("a part", || {
        has_ended = run.try_wait().unwrap().is_some();
        has_ended || parts(dir) > 0
    });
    if !has_ended {
        signal(&run, "-STOP");
        if parts(dir) == 1 {
            return Some(run);
        }
    }
    let _ignored = run.kill();
    run.wait().unwrap();
    None
}

/// A stopped process lives and holds its lock, until it is killed.
#[test]
fn parts_of_killed_process_are_removed() {
    let dir = &on_disk();
    folders::write(&dir.join("model"));
    dir.write("small.txt", "w6 w7 w8 w9 ".repeat(100_000));
    let mut run = [4_000_000, 16_000_000, 64_000_000]
        .into_iter()
        .find_map(|words| stopped(dir, words))
        .expect("a text that takes longer than to stop a process");

    let small = || tokenize(dir, "small.txt").output().unwrap();
    let beside = small();
    let living = parts(dir);
    run.kill().unwrap();
    run.wait().unwrap();

    succeeds(&beside);
    assert_eq!(living, 1, "the part of a process that lives");
    succeeds(&small());
    assert_eq!(parts(dir), 0, "the part of a process that was killed");
}
