//! Ranks that are processes, over shared memory and over bytes that this program moves: it starts
//! itself once a rank and checks the output.

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::launched::{self, Ended, FAULTS, FOLDER};
use common::{Comm, LIMIT};
use zero_comm::processes::{Carrier, Part, ProcessComm};
use zero_comm::world::Ranks;
use zero_comm::{Collective, CommOptions};

/// Sockets to the other ranks; `None` in this rank's place.
struct Sockets(Vec<Option<UnixStream>>);

impl Sockets {
    /// Connects to the ranks below this one, and accepts those above.
    fn connect(folder: &Path, rank: usize, world_size: usize) -> Self {
        let place = |rank: usize| folder.join(rank.to_string());
        let listener = UnixListener::bind(place(rank)).unwrap();
        let mut sockets: Vec<Option<UnixStream>> = (0..world_size).map(|_| None).collect();
        for (lower, socket) in sockets.iter_mut().enumerate().take(rank) {
            let begun = Instant::now();
            let mut connected = loop {
                match UnixStream::connect(place(lower)) {
                    Ok(connected) => break connected,
                    Err(error) => assert!(begun.elapsed() < LIMIT, "{error}"),
                }
                std::thread::sleep(Duration::from_millis(2));
            };
            connected.write_all(&[rank as u8]).unwrap();
            *socket = Some(connected);
        }
        for _ in rank + 1..world_size {
            let (mut accepted, _) = listener.accept().unwrap();
            let mut other = [0];
            accepted.read_exact(&mut other).unwrap();
            sockets[usize::from(other[0])] = Some(accepted);
        }
        Self(sockets)
    }
}

impl Carrier for Sockets {
    fn exchange(&self, parts: Vec<Part<'_>>) -> Result<(), String> {
        std::thread::scope(|scope| {
            let moves = parts.into_iter().map(|Part { rank, send, recv }| {
                let mut socket = self.0[rank].as_ref().unwrap();
                let sent = scope.spawn(move || socket.write_all(send));
                (socket.read_exact(recv), sent)
            });
            let moves: Vec<_> = moves.collect();
            moves.into_iter().try_for_each(|(received, sent)| {
                let sent = sent.join().unwrap();
                received.and(sent).map_err(|error| error.to_string())
            })
        })
    }

    fn abort(&self) {
        for socket in self.0.iter().flatten() {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

fn rank_main(what: &str) -> ExitCode {
    let ranks = Ranks::from_env().unwrap().unwrap();
    let options = CommOptions::default().limit(launched::limit_of(what));
    let comm = match std::env::var_os(FOLDER).map(PathBuf::from) {
        None => ProcessComm::join(&ranks, options),
        Some(folder) => {
            let sockets = Sockets::connect(&folder, ranks.rank, ranks.world_size);
            ProcessComm::join_over(&ranks, options, Arc::new(sockets))
        }
    };
    let comm: Comm = Arc::new(comm.unwrap());
    launched::rank_main(what, &comm)
}

/// Starts this program as `n` ranks. Ranks that still sleep when the others have ended are killed.
fn launch(n: usize, what: &str) -> Ended {
    launch_in(None, n, what)
}

/// As [`launch`], of ranks that share no memory.
fn launch_apart(n: usize, what: &str) -> Ended {
    let folder = tempfile::tempdir().unwrap();
    launch_in(Some(folder.path()), n, what)
}

fn launch_in(folder: Option<&Path>, n: usize, what: &str) -> Ended {
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
            .envs(folder.map(|folder| (FOLDER, folder)))
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
    let texts = |kind: &str, which: Collective| match kind {
        "stalled" | "stopped" => vec!["rank 1 did not reach it within", which.name()],
        _ => vec!["rank 1", "its process or its connection ended"],
    };
    launched::check_all(&launch, &faults, &texts);
    println!("over bytes that the program moves:");
    let faults = [
        "killed-before",
        "killed-during",
        "stalled",
        "count",
        "pair",
        "abort",
        "panic",
    ];
    launched::check_all(&launch_apart, &faults, &texts);
    ExitCode::SUCCESS
}
