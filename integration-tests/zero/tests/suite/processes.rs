//! Ranks as processes of this machine, which the program starts itself or torchrun has started.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::support::*;

/// The commands of `ranks` ranks as torchrun starts them, `machine` on each machine.
fn launched(dir: &Path, ranks: usize, machine: usize, flags: &str) -> Vec<Command> {
    // The listener is dropped, and its port is free again.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr();
    let port = port.unwrap().port();
    let rank = |rank: usize| {
        let mut command = dir.tiny_command(flags);
        command.envs([
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", ranks.to_string()),
            ("LOCAL_RANK", (rank % machine).to_string()),
            ("LOCAL_WORLD_SIZE", machine.to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("MASTER_PORT", port.to_string()),
        ]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    (0..ranks).map(rank).collect()
}

fn spawned(commands: Vec<Command>) -> Vec<Child> {
    let spawn = |mut command: Command| command.spawn().unwrap();
    commands.into_iter().map(spawn).collect()
}

/// Also of groups, and of ranks that share sequences or have parts of each parameter: their
/// communicators are splits of the world.
#[test]
fn the_losses_are_those_of_threads() {
    for (ranks, flags) in [
        (2, "--stage 0 --dtype bf16"),
        (3, "--stage 1"),
        (4, "--stage 2 --dtype bf16"),
        (2, "--stage 3"),
        (4, "--stage 1 --shard-group 2"),
        (4, "--stage 3 --hpz 2"),
        (4, "--stage 3 --ulysses 4 --dropout 0.1"),
        (
            4,
            "--stage 2 --tensor-parallel 2 --ulysses 2 --sequence-parallel",
        ),
    ] {
        let dir = &temp();
        let flags = format!("--ranks {ranks} --no-checkpoint --clip 1 {flags}");
        dir.tiny(&format!("{flags} --metrics threads"));
        dir.tiny(&format!("{flags} --metrics own --comm processes"));
        for rank in spawned(launched(
            dir,
            ranks,
            ranks,
            &format!("{flags} --metrics torchrun"),
        )) {
            succeeds(&rank.wait_with_output().unwrap());
        }
        for metrics in ["own", "torchrun"] {
            let lines = lines(&dir.join(metrics));
            assert_eq!(lines.len(), 3);
            assert_eq!(
                losses(&dir.join(metrics)),
                losses(&dir.join("threads")),
                "{flags}"
            );
        }
    }
}

/// A checkpoint of processes resumes as threads, and the reverse, by the choice of rank 0.
#[test]
fn checkpoints_resume_in_processes() {
    let dir = &temp();
    dir.tiny("--steps 6 --no-checkpoint --metrics whole");
    dir.tiny("--steps 2 --checkpoint c --metrics a --comm processes");
    dir.zero("train --resume c --steps 4 --metrics b");
    for rank in spawned(launched(dir, 2, 2, "--resume c --steps 6 --metrics d")) {
        succeeds(&rank.wait_with_output().unwrap());
    }
    let parts = ["a", "b", "d"].map(|name| losses(&dir.join(name)));
    assert_eq!(parts.concat(), losses(&dir.join("whole")));
}

/// The processes that a run has started.
fn children(run: &Child) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{}/task", run.id())).unwrap();
    let of_thread = |thread: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(thread.unwrap().path().join("children")).unwrap()
    };
    let all: String = threads.map(of_thread).collect();
    all.split_whitespace()
        .map(|id| id.parse().unwrap())
        .collect()
}

/// All other ranks end with the name of the one that was killed.
#[test]
fn a_killed_rank_is_named() {
    let dir = &temp();
    let flags = "--ranks 3 --steps 1000000 --no-checkpoint";
    let mut ranks = spawned(launched(dir, 3, 3, &format!("{flags} --metrics m")));
    wait_for(&mut ranks[0], || count_lines(&dir.join("m")) > 1);
    signal(&ranks[1], "-KILL");
    for (rank, run) in ranks.into_iter().enumerate() {
        let output = run.wait_with_output().unwrap();
        if rank != 1 {
            fails(&output, 1, &["rank 1", "ended"]);
        }
    }

    let mut run = dir.start(&format!("{flags} --comm processes --metrics n"));
    wait_for(&mut run, || count_lines(&dir.join("n")) > 1);
    let children = children(&run);
    assert_eq!(children.len(), 3);
    let killed = Command::new("kill")
        .args(["-9", &children[2].to_string()])
        .status();
    assert!(killed.unwrap().success());
    assert_eq!(run.wait().unwrap().code(), Some(1));
    wait_until("a rank is left", || {
        children.iter().all(|child| !is_running(*child))
    });
}

#[test]
fn what_cannot_be_is_refused() {
    let dir = &temp();
    for (ranks, machine, flags, parts) in [
        (
            2,
            2,
            "--ranks 3",
            &["--ranks 3: the launcher started 2 ranks"][..],
        ),
        (2, 1, "--ranks 2", &["several machines", "by MPI only"]),
        (
            2,
            1,
            "--ranks 2 --comm processes",
            &["several machines", "by MPI only"],
        ),
        (2, 2, "--device cuda --comm processes", &["through NCCL"]),
    ] {
        for rank in spawned(launched(dir, ranks, machine, flags)) {
            fails(&rank.wait_with_output().unwrap(), 2, parts);
        }
    }
}
