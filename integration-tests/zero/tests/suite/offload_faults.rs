//! Faults of runs with scratch files: full disks, kills, damage, two runs in one folder. No
//! checkpoint is lost, nothing is left.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::place;
use crate::support::{data, fails, lines, losses, on_disk, run_tiny, succeeds, tiny, words, zero};

/// Flags of a run whose optimizer state, parameters and gradients are in the folder `scratch`.
const NVME: &str = "--offload nvme:scratch --offload-params nvme:scratch --dtype bf16";

fn is_empty(dir: &Path) -> bool {
    fs::read_dir(dir).unwrap().next().is_none()
}

/// A disk that is too small is an error before the first step that names the folder, and the
/// checkpoint stays.
#[test]
fn full_disk_at_start() {
    let dir = on_disk();
    let disk = dir.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=100k", "tmpfs"])
        .arg(&disk)
        .status();

    if !mounted.is_ok_and(|status| status.success()) {
        eprintln!("SKIPPED full_disk_at_start: mounting a tmpfs needs root");
        return;
    }

    let path = format!("nvme:{}", disk.display());
    let first = run_tiny(dir.path(), &["--checkpoint", "c", "--steps", "2"]);
    let full = run_tiny(
        dir.path(),
        &["--resume", "c", "--steps", "4", "--offload", &path],
    );
    let left = is_empty(&disk);

    assert!(
        Command::new("umount")
            .arg(&disk)
            .status()
            .unwrap()
            .success()
    );

    succeeds(&first);
    fails(
        &full,
        1,
        &["disk", "free some space or name a folder on another disk"],
    );
    assert!(left);
    succeeds(&zero(dir.path(), &["ckpt", "verify", "c"]));
    succeeds(&run_tiny(dir.path(), &["--resume", "c", "--steps", "4"]));
}

/// Kills at any time, from the start of the process to saves: the folder is empty, every checkpoint
/// that is there is whole, and the run goes on to the losses of one that was never killed.
#[test]
fn kill_in_every_phase() {
    let dir = on_disk();
    let scratch = dir.path().join("scratch");
    fs::create_dir(&scratch).unwrap();
    let (model, tokens) = (data("model"), data("tokens.u16.bin"));
    let (metrics, saved) = (dir.path().join("m"), dir.path().join("d/latest"));
    let written = || fs::read_to_string(&metrics).map_or(0, |text| text.lines().count());

    let more = format!("{NVME} --steps 1000000 --checkpoint-every 1 --keep-last 2 --metrics m");

    // Steps to wait for, then milliseconds.
    for (steps, ms) in [
        (0, 0),
        (0, 30),
        (0, 100),
        (1, 0),
        (3, 1),
        (2, 7),
        (4, 15),
        (3, 40),
    ] {
        let from = if saved.exists() {
            ["--resume", "d"]
        } else {
            ["--checkpoint", "d"]
        };
        if from[0] == "--checkpoint" {
            // A run that was killed before its first save left nothing to resume.
            let _ = fs::remove_file(&metrics);
            let _ = fs::remove_dir_all(dir.path().join("d"));
        }
        let args = [&words(&more)[..], &from].concat();
        let mut run = place::zero();
        let run = run
            .args(tiny(&model, &tokens, &args))
            .current_dir(dir.path());
        let (mut run, before) = (
            run.stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap(),
            written(),
        );
        while steps > 0 && (written() < before + steps || !saved.exists()) {
            assert!(run.try_wait().unwrap().is_none(), "the run ended");
            std::thread::sleep(Duration::from_millis(2));
        }
        std::thread::sleep(Duration::from_millis(ms));
        run.kill().unwrap(); // SIGKILL
        run.wait().unwrap();
        assert!(is_empty(&scratch), "killed after {steps} steps and {ms} ms");
        if saved.exists() {
            succeeds(&zero(dir.path(), &["ckpt", "verify", "d"]));
        }
    }

    let end = (lines(&metrics).len() + 2).to_string();
    let to_end = |more: &[&str]| {
        succeeds(&run_tiny(
            dir.path(),
            &[&words(NVME)[..], &["--steps", &end], more].concat(),
        ))
    };

    to_end(&["--resume", "d", "--metrics", "m"]);
    to_end(&["--checkpoint", "whole", "--metrics", "whole.m"]);
    assert_eq!(losses(&metrics), losses(&dir.path().join("whole.m")));
    assert!(is_empty(&scratch));
}

/// Two runs may use one folder at the same time.
#[test]
fn two_runs_share_a_folder() {
    let dir = on_disk();
    fs::create_dir(dir.path().join("scratch")).unwrap();
    let (model, tokens) = (data("model"), data("tokens.u16.bin"));
    let start = |saves: &str, metrics: &str| {
        let args = format!("{NVME} --checkpoint {saves} --metrics {metrics} --steps 6");
        let args = words(&args);
        let mut run = place::zero();
        run.args(tiny(&model, &tokens, &args))
            .current_dir(dir.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    };

    let runs = [start("a", "a.m"), start("b", "b.m")];
    for mut run in runs {
        assert!(run.wait().unwrap().success());
    }
    assert_eq!(
        losses(&dir.path().join("a.m")),
        losses(&dir.path().join("b.m"))
    );
    assert!(is_empty(&dir.path().join("scratch")));
}
