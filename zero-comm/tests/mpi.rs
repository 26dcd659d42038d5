//! The MPI back end as real processes: this program starts itself under `mpirun` and checks the
//! output.
//!
//! `cargo test -p zero-comm --features mpi --test mpi` needs `mpirun`; without it, it prints that
//! and passes.

mod common;

use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::launched::{self, Ended, FAULTS, expect};
use common::{Comm, LIMIT, Streams, view};
use zero_alloc::device::Stream;
use zero_alloc::host::HostDevice;
use zero_comm::conformance::{Plan, check};
use zero_comm::mpi::MpiWorld;
use zero_comm::{CommOptions, ReduceOp};

/// A bound of tags that repeats them every [`TAG_PERIOD`] collectives.
const SMALL_TAG_BOUND: i32 = 768 * TAG_PERIOD as i32;
const TAG_PERIOD: usize = 3;

/// Calls on two streams while rank 0's first call is late: those a period later have its tags.
fn reuse_tags(comm: &Comm, streams: &Streams) {
    let rank = comm.rank();
    let n = comm.world_size();
    let mut values: Vec<_> = (0..4 * TAG_PERIOD)
        .map(|call| vec![(rank + call) as f32; 100])
        .collect();

    if rank == 0 {
        // Enough for the other stream to pass the first call, if nothing held it.
        let late = || {
            std::thread::sleep(Duration::from_millis(300));
            Ok(())
        };
        streams.compute.enqueue("late", late).unwrap();
    }

    for (call, values) in values.iter_mut().enumerate() {
        let stream = if call == 0 {
            &streams.compute
        } else {
            &streams.comm
        };
        let buffer = view(values);
        comm.all_reduce(stream, buffer, buffer, ReduceOp::Max)
            .unwrap();
    }

    streams.synchronize();
    for (call, values) in values.iter().enumerate() {
        let expected = (n - 1 + call) as f32;
        assert!(
            values.iter().all(|&v| v == expected),
            "call {call}: expected {expected}, got {}",
            values[0]
        );
    }
}

/// Runs until scripts/two-hosts cuts the link. Writes the error to a file, since the connection to
/// mpirun is cut too.
fn run_until_cut(comm: &Comm, streams: &Streams) {
    let rank = comm.rank();
    let file = std::env::var("ZERO_TEST_FILE").expect("where to write");
    let mut values = vec![1f32; 100_000];
    for round in 0.. {
        let buffer = view(&mut values);
        let called = comm.all_reduce(&streams.comm, buffer, buffer, ReduceOp::Max);
        if called.is_err() || streams.comm.synchronize(LIMIT).is_err() {
            break;
        }
        if round == 3 {
            std::fs::write(format!("{file}.runs.{rank}"), "").unwrap();
        }
    }
    let error = comm.failure().expect("the cut is seen");
    std::fs::write(
        format!("{file}.saw.{rank}"),
        format!("rank {rank} saw: {error}\n"),
    )
    .unwrap();
}

fn rank_main(what: &str) -> ExitCode {
    let options = CommOptions::default().limit(match what {
        "until-cut" => launched::FAULT_LIMIT,
        _ => launched::limit_of(what),
    });
    let world = match what {
        "tags" => MpiWorld::init_with_tags_up_to(options, SMALL_TAG_BOUND).unwrap(),
        _ => MpiWorld::init(options).unwrap(),
    };

    let comm: Comm = world.comm();
    let streams = Streams::new(comm.rank());
    match what {
        "tags" => {
            let plan = Plan::default().seed(comm.world_size() as u64).cases(20);
            check(&HostDevice::new(), &*comm, &streams.comm, plan).unwrap();
            reuse_tags(&comm, &streams);
            println!("rank {} conforms", comm.rank());
            ExitCode::SUCCESS
        }
        "until-cut" => {
            run_until_cut(&comm, &streams);
            ExitCode::FAILURE
        }
        what => {
            let ended = launched::rank_main(what, &comm);
            if what.contains('@') {
                // Time for the other ranks to print their errors, before mpirun ends them.
                std::thread::sleep(Duration::from_millis(500));
            }
            ended
        }
    }
}

/// Runs `mpirun -n N this-program --rank WHAT`; kills it after [`LIMIT`].
fn launch(n: usize, what: &str, recovery: bool) -> Ended {
    let program = std::env::current_exe().unwrap();
    let mut command = Command::new("mpirun");
    command.args([
        "--allow-run-as-root",
        "--oversubscribe",
        "-n",
        &n.to_string(),
    ]);

    if recovery {
        // Otherwise the launcher ends all ranks when one is killed.
        command.arg("--enable-recovery");
    }

    // Launchers that share a folder sometimes remove it while another makes it.
    let folder = tempfile::tempdir().unwrap();
    command.env("OMPI_MCA_orte_tmpdir_base", folder.path());
    command
        .arg(program)
        .args(["--rank", what])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let begun = Instant::now();
    let child = command.spawn().unwrap();
    let pid = child.id();
    let done = Arc::new(zero_alloc::host::Monitor::new(false));
    let watched = Arc::clone(&done);

    std::thread::spawn(move || {
        if watched
            .wait_until(LIMIT, String::new, |done| done.then_some(()))
            .is_err()
        {
            let _gone = Command::new("kill").args(["-9", &pid.to_string()]).status();
        }
    });

    let output = child.wait_with_output().unwrap();
    done.update(|done| *done = true);
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr);
    Ended {
        succeeded: output.status.success(),
        text: format!(
            "{}\n--- stdout\n{stdout}\n--- stderr\n{stderr}",
            output.status
        ),
        stdout,
        time: begun.elapsed(),
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, what] = &args[..]
        && flag == "--rank"
    {
        return rank_main(what);
    }

    if Command::new("mpirun")
        .arg("--version")
        .stdout(Stdio::null())
        .status()
        .is_err()
    {
        println!("skipped: mpirun is missing");
        return ExitCode::SUCCESS;
    }

    let ended = launch(3, "tags", false);
    let conform = ended.stdout.matches("conforms").count();
    expect(ended.succeeded && conform == 3, "tags", &ended);
    println!("ok: conformance with tags up to {SMALL_TAG_BOUND}");

    launched::check_all(
        &|n, what| launch(n, what, what.starts_with("killed")),
        &FAULTS,
        &|kind, which| match kind {
            "killed-during" => vec!["rank 1", which.name()],
            _ => vec!["rank 1 did not reach it", which.name()],
        },
    );

    let ended = launch(3, "killed-before@all_reduce", false);
    let named = ended.text.contains("signal 9");
    expect(
        !ended.succeeded && named,
        "killed, without recovery",
        &ended,
    );
    println!("ok: mpirun by itself ends all after {:.1?}", ended.time);

    ExitCode::SUCCESS
}
