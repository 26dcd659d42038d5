//! `zero train` under `mpirun`: the losses are bit-identical to those of threads, and a killed rank ends the run.
//!
//! Run with `cargo test -p integration-tests --features mpi --test mpi`. Without `mpirun` it prints SKIPPED and passes.

#[path = "mpi/agreement.rs"]
mod agreement;
#[path = "common/place.rs"]
mod place;

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn data(name: &str) -> String {
    place::data(name).display().to_string()
}

fn has_mpirun() -> bool {
    let found = Command::new("mpirun").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !found {
        eprintln!("SKIPPED: no mpirun here (Debian: openmpi-bin)");
    }
    found
}

fn train(ranks: usize, more: &[&str]) -> Vec<String> {
    let mut args: Vec<String> =
        ["train", "--seq-len", "32", "--micro-batch", "1", "--clip", "1"].map(String::from).to_vec();
    if !more.contains(&"--checkpoint") {
        args.push("--no-checkpoint".into());
    }
    args.extend(["--model".into(), data("model"), "--data".into(), data("tokens.u16.bin")]);
    args.extend(["--ranks".into(), ranks.to_string()]);
    args.extend(more.iter().map(|s| (*s).to_owned()));
    args
}

/// `folder` is for the launcher's files: launchers that share one sometimes remove it while another makes it.
fn mpirun(ranks: usize, folder: &Path) -> Command {
    let mut command = Command::new("mpirun");
    command.env("OMPI_MCA_orte_tmpdir_base", folder);
    command.args(["--allow-run-as-root", "--oversubscribe", "-n", &ranks.to_string()]);
    command.arg(place::zero().get_program());
    command
}

fn losses(file: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(file).unwrap();
    let values = text.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap());
    values.map(|v| format!("{} {}", v["loss"], v["grad_norm"])).collect()
}

fn succeeds(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_losses_are_those_of_threads() {
    if !has_mpirun() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for ranks in [2, 4] {
        for stage in ["0", "1", "2", "3"] {
            for dtype in ["fp32", "bf16"] {
                let files = ["threads", "mpi"].map(|name| dir.path().join(format!("{name}-{ranks}-{stage}-{dtype}")));
                let paths = files.each_ref().map(|f| f.display().to_string());
                let flags = |path: &str| -> Vec<String> {
                    train(
                        ranks,
                        &["--steps", "4", "--grad-accum", "2", "--stage", stage, "--dtype", dtype, "--metrics", path],
                    )
                };
                succeeds(&place::zero().args(flags(&paths[0])).output().unwrap());
                succeeds(&mpirun(ranks, dir.path()).args(flags(&paths[1])).output().unwrap());
                assert_eq!(losses(&files[0]), losses(&files[1]), "{ranks} ranks, stage {stage}, {dtype}");
            }
        }
    }
}

#[test]
fn a_killed_rank_ends_the_run() {
    if !has_mpirun() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let metrics = dir.path().join("metrics");
    let path = metrics.display().to_string();
    let args = train(3, &["--steps", "1000000", "--time-limit", "20", "--metrics", &path]);
    let mut run = mpirun(3, dir.path()).args(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while std::fs::read_to_string(&metrics).map_or(0, |t| t.lines().count()) < 2 {
        assert!(Instant::now() < deadline, "the run did not start");
        std::thread::sleep(Duration::from_millis(50));
    }
    let ranks = Command::new("pgrep").args(["-P", &run.id().to_string()]).output().unwrap();
    let ranks = String::from_utf8(ranks.stdout).unwrap();
    let victim = ranks.lines().last().expect("mpirun has children");
    assert!(Command::new("kill").args(["-9", victim]).status().unwrap().success());
    let deadline = Instant::now() + Duration::from_secs(30);
    let status = loop {
        if let Some(status) = run.try_wait().unwrap() {
            break status;
        }
        assert!(Instant::now() < deadline, "the run goes on without a rank");
        std::thread::sleep(Duration::from_millis(50));
    };
    assert!(!status.success());
    let alive = |rank: &&str| Path::new(&format!("/proc/{rank}/exe")).read_link().is_ok();
    while let Some(rank) = ranks.lines().find(alive) {
        assert!(Instant::now() < deadline, "process {rank} is left");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Every rank takes up the settings and the id of the run.
#[test]
fn a_resume_needs_no_flag() {
    if !has_mpirun() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let run = |steps: &str, metrics: &str, checkpoint: &str| {
        let flags = ["--grad-accum", "2", "--lr", "0.01", "--stage", "2", "--steps", steps];
        let outputs = ["--metrics", &path(metrics), "--checkpoint", &path(checkpoint)];
        succeeds(&mpirun(2, dir.path()).args(train(2, &[&flags[..], &outputs].concat())).output().unwrap());
    };
    run("4", "whole", "a");
    run("2", "first", "b");
    let rest = ["train", "--resume", &path("b"), "--steps", "4", "--metrics", &path("rest")];
    succeeds(&mpirun(2, dir.path()).args(rest).output().unwrap());
    let losses = |name: &str| losses(&dir.path().join(name));
    assert_eq!(losses("whole"), [losses("first"), losses("rest")].concat());
    let run_of = |step: u64| {
        let text = std::fs::read(dir.path().join(format!("b/step-{step:08}/run.json"))).unwrap();
        serde_json::from_slice::<serde_json::Value>(&text).unwrap()["run"].to_string()
    };
    assert_eq!(run_of(2), run_of(4));
}

/// The other ranks resume from the checkpoint that rank 0 verified, and receive its error.
#[test]
fn rank_0_finds_the_checkpoint() {
    if !has_mpirun() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let first = ["--steps", "2", "--checkpoint", &path("d"), "--checkpoint-every", "1"];
    succeeds(&mpirun(2, dir.path()).args(train(2, &first)).output().unwrap());
    let damage = |step: u64| {
        let shard = dir.path().join(format!("d/step-{step:08}/shard-00001-of-00002.safetensors"));
        let mut bytes = std::fs::read(&shard).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(shard, bytes).unwrap();
    };
    let resume = || {
        let args = ["train", "--resume", &path("d"), "--steps", "3", "--metrics", &path("m"), "--no-checkpoint"];
        mpirun(2, dir.path()).args(args).output().unwrap()
    };
    damage(2);
    let resumed = resume();
    succeeds(&resumed);
    let text = [resumed.stdout, resumed.stderr].concat();
    assert!(String::from_utf8_lossy(&text).contains("step-00000002 is passed over"));
    assert_eq!(losses(&dir.path().join("m")).len(), 2);
    damage(1);
    let failed = resume();
    let text = String::from_utf8_lossy(&failed.stderr);
    assert_eq!(failed.status.code(), Some(2), "{text}");
    assert!(text.contains("no complete checkpoint") && !text.contains("panicked"), "{text}");
}
