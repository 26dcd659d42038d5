//! Faults of runs with scratch files: full disks, kills, damage, two runs in one folder. No
//! checkpoint is lost, nothing is left.

use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::support::{Disk, Runs, count_lines, fails, losses, on_disk, wait_for};

/// Flags of a run whose optimizer state, parameters and gradients are in the folder `scratch`.
const NVME: &str = "--offload nvme:scratch --offload-params nvme:scratch --dtype bf16";

fn is_empty(dir: &Path) -> bool {
    fs::read_dir(dir).unwrap().next().is_none()
}

/// A disk that is too small is an error before the first step that names the folder, and the
/// checkpoint stays.
#[test]
fn full_disk_at_start() {
    let dir = &on_disk();
    let Some(disk) = Disk::mount(dir.join("disk"), "100k") else {
        return;
    };

    dir.tiny("--checkpoint c --steps 2");
    let full = format!("--resume c --steps 4 --offload nvme:{}", disk.display());
    fails(
        &dir.tiny_output(&full),
        1,
        &["disk", "free some space or name a folder on another disk"],
    );
    assert!(is_empty(&disk));
    dir.zero("ckpt verify c");
    dir.tiny("--resume c --steps 4");
}

/// Kills at any time, from the start of the process to saves: the folder is empty, every checkpoint
/// that is there is whole, and the run goes on to the losses of one that was never killed.
#[test]
fn kill_in_every_phase() {
    let dir = &on_disk();
    let scratch = dir.join("scratch");
    fs::create_dir(&scratch).unwrap();
    let metrics = dir.join("m");
    let saved = dir.join("d/latest");
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
        if !saved.exists() {
            // A run that was killed before its first save left nothing to resume.
            let _ = fs::remove_file(&metrics);
            let _ = fs::remove_dir_all(dir.join("d"));
        }
        let from = if saved.exists() {
            "resume"
        } else {
            "checkpoint"
        };
        let before = count_lines(&metrics);
        let mut run = dir.start(&format!("{more} --{from} d"));
        if steps > 0 {
            wait_for(&mut run, || {
                count_lines(&metrics) >= before + steps && saved.exists()
            });
        }
        std::thread::sleep(Duration::from_millis(ms));
        run.kill().unwrap(); // SIGKILL
        run.wait().unwrap();
        assert!(is_empty(&scratch), "killed after {steps} steps and {ms} ms");
        if saved.exists() {
            dir.zero("ckpt verify d");
        }
    }

    let end = count_lines(&metrics) + 2;
    for more in [
        "--resume d --metrics m",
        "--checkpoint whole --metrics whole.m",
    ] {
        dir.tiny(&format!("{NVME} --steps {end} {more}"));
    }
    assert_eq!(losses(&metrics), losses(&dir.join("whole.m")));
    assert!(is_empty(&scratch));
}

/// Two runs may use one folder at the same time.
#[test]
fn two_runs_share_a_folder() {
    let dir = &on_disk();
    fs::create_dir(dir.join("scratch")).unwrap();
    let runs = ["a", "b"].map(|name| {
        dir.start(&format!(
            "{NVME} --checkpoint {name} --metrics {name}.m --steps 6"
        ))
    });
    for mut run in runs {
        assert!(run.wait().unwrap().success());
    }
    assert_eq!(losses(&dir.join("a.m")), losses(&dir.join("b.m")));
    assert!(is_empty(&dir.join("scratch")));
}
