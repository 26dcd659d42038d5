//! Ranks that are processes, over shared memory: this program starts itself once a rank and checks
//! the output.

mod common;

use std::net::TcpListener;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::launched::{self, Ended, FAULTS};
use common::{Comm, LIMIT};
use zero_comm::CommOptions;
use zero_comm::processes::ProcessComm;
use zero_comm::world::Ranks;

fn rank_main(what: &str) -> ExitCode {
    let ranks = Ranks::from_env().unwrap().unwrap();
    let options = CommOptions::default().limit(launched::limit_of(what));
    let comm: Comm = Arc::new(ProcessComm::join(&ranks, options).unwrap());
    launched::rank_main(what, &comm)
}

/// Starts this program as `n` ranks. Ranks that still sleep when the others have ended are killed.
fn launch(n: usize, what: &str) -> Ended {
    let begun = Instant::now();
    // The listener is dropped, and its port is free again.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr();
    let port = port.unwrap().port().to_string();
    let spawn = |rank: usize| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--rank", what])
            .envs([
                ("RANK", &*rank.to_string()),
                ("WORLD_SIZE", &*n.to_string()),
                ("MASTER_ADDR", "127.0.0.1"),
                ("MASTER_PORT", &*port),
            ])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let mut children: Vec<Child> = (0..n).map(spawn).collect();

    let sleeps =
        |rank: usize| rank == 1 && (what.starts_with("stalled") || what.starts_with("stopped"));
    loop {
        let ended = |(rank, child): (usize, &mut Child)| {
            sleeps(rank) || child.try_wait().unwrap().is_some()
        };
        let all = children.iter_mut().enumerate().all(ended);
        if all || begun.elapsed() > LIMIT {
            break;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let time = begun.elapsed();

    let mut ended = Ended {
        succeeded: true,
        stdout: String::new(),
        text: String::new(),
        time,
    };
    for (rank, mut child) in children.into_iter().enumerate() {
        // It has ended, or it sleeps.
        let _ = child.kill();
        let output = child.wait_with_output().unwrap();
        ended.succeeded &= output.status.success();
        ended.stdout += &String::from_utf8_lossy(&output.stdout);
        let stderr = String::from_utf8_lossy(&output.stderr);
        let stdout = String::from_utf8_lossy(&output.stdout);
        ended.text += &format!("\n--- rank {rank}: {}\n{stdout}{stderr}", output.status);
    }
    ended
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, what] = &args[..]
        && flag == "--rank"
    {
        return rank_main(what);
    }

    let faults = [&FAULTS[..], &["stopped"]].concat();
    launched::check_all(&launch, &faults, &|kind, which| match kind {
        "stalled" | "stopped" => vec!["rank 1 did not reach it within", which.name()],
        _ => vec!["rank 1", "its process or its connection ended"],
    });
    ExitCode::SUCCESS
}
