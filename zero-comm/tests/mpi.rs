//! The MPI back end as real processes: this program starts itself under `mpirun` and checks the
//! output.
//!
//! `cargo test -p zero-comm --features mpi --test mpi` needs `mpirun`; without it, it prints that
//! and passes.

mod common;

use std::process::{Command, ExitCode, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{Comm, LIMIT, Streams, another, call, view};
use half::bf16;
use zero_alloc::device::{AnySlice, DeviceError, Stream};
use zero_alloc::host::HostDevice;
use zero_comm::conformance::{Plan, check};
use zero_comm::mpi::MpiWorld;
use zero_comm::{Collective, CommError, CommOptions, ReduceOp};

/// The faults of rank 1.
const FAULTS: [&str; 11] = [
    "killed-before",
    "killed-during",
    "killed-after",
    "stalled",
    "count",
    "kind",
    "dtype",
    "order",
    "abort",
    "poison",
    "panic",
];

/// Elements per rank in the tests of faults, and the wrong count.
const LEN: usize = 4096;
const OTHER_LEN: usize = 4000;

/// The time limit of collectives in the tests of faults.
const FAULT_LIMIT: Duration = Duration::from_secs(3);

/// A bound of tags that repeats them every [`TAG_PERIOD`] collectives.
const SMALL_TAG_BOUND: i32 = 768 * TAG_PERIOD as i32;
const TAG_PERIOD: usize = 3;

/// A hash of sums that depend on the order of additions.
fn digest(comm: &Comm, streams: &Streams) -> u64 {
    let rank = comm.rank() as u64;
    let draw = |i: u64| ((i * 2_654_435_761 + rank * 40_503) % 10_007) as f32 * 1.7e-3 - 8.0;
    let mut wide: Vec<f32> = (0..5000).map(draw).collect();
    let mut narrow: Vec<bf16> = (0..5000).map(|i| bf16::from_f32(draw(i))).collect();
    let in_wide = view(&mut wide);
    let in_narrow = view(&mut narrow);
    for op in [ReduceOp::Sum, ReduceOp::Avg] {
        comm.all_reduce(&streams.comm, in_wide, in_wide, op)
            .unwrap();
        comm.all_reduce(&streams.comm, in_narrow, in_narrow, op)
            .unwrap();
    }
    streams.synchronize();
    let bits = wide
        .iter()
        .map(|v| v.to_bits())
        .chain(narrow.iter().map(|v| u32::from(v.to_bits())));
    bits.fold(0xcbf2_9ce4_8422_2325, |hash, bits| {
        (hash ^ u64::from(bits)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn kill_this_process() -> ! {
    let _never = Command::new("kill")
        .args(["-9", &std::process::id().to_string()])
        .status();
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Makes rank 1 fail. Returns if rank 1 should then call `which` like the others.
fn misbehave(
    kind: &str,
    which: Collective,
    comm: &Comm,
    streams: &Streams,
    buffers: [AnySlice; 4],
) -> Result<(), CommError> {
    let (stream, [send, recv, send_bytes, recv_bytes]) = (&streams.comm, buffers);
    match kind {
        "killed-before" => {
            streams.synchronize();
            kill_this_process();
        }
        "killed-during" => {
            // The others are delayed, so this rank waits in the collective when it is killed.
            call(comm, streams, which, send, recv, LEN)?;
            std::thread::sleep(Duration::from_millis(200));
            kill_this_process();
        }
        "killed-after" => kill_this_process(),
        "stalled" => std::thread::sleep(FAULT_LIMIT * 2),
        "count" => call(comm, streams, which, send, recv, OTHER_LEN)?,
        "dtype" => call(comm, streams, which, send_bytes, recv_bytes, LEN)?,
        "kind" | "order" => call(comm, streams, another(which), send, recv, LEN)?,
        "abort" => comm.abort("on purpose"),
        "poison" => stream.enqueue("bad", || {
            Err(DeviceError::Closed {
                stream: "on purpose".to_owned(),
            })
        })?,
        "panic" => stream.enqueue("bad", || panic!("on purpose"))?,
        _ => {}
    }

    Ok(())
}

/// Makes rank 1 fail at `which`; every other rank returns its error.
fn fault(kind: &str, which: Collective, comm: &Comm, streams: &Streams) -> Result<(), CommError> {
    let mut send = vec![1f32; LEN * 4];
    let mut recv = vec![1f32; LEN * 4];
    let mut send_bytes = vec![1u8; LEN * 4];
    let mut recv_bytes = vec![1u8; LEN * 4];
    let buffers = [
        view(&mut send),
        view(&mut recv),
        view(&mut send_bytes),
        view(&mut recv_bytes),
    ];
    comm.barrier(&streams.comm)?;

    if kind == "killed-after" {
        call(comm, streams, which, buffers[0], buffers[1], LEN)?;
        streams.comm.synchronize(LIMIT)?;
    }

    if comm.rank() == 1 {
        misbehave(kind, which, comm, streams, buffers)?;
    } else if kind == "killed-during" {
        std::thread::sleep(Duration::from_millis(500));
    }

    call(comm, streams, which, buffers[0], buffers[1], LEN)?;
    if kind == "order" && comm.rank() != 1 {
        call(comm, streams, another(which), buffers[0], buffers[1], LEN)?;
    }

    if kind == "killed-during" {
        // A barrier ends when all ranks have reached it, so the other ranks fail only in the next
        // collective.
        call(comm, streams, which, buffers[0], buffers[1], LEN)?;
    }

    let ended = streams.comm.synchronize(LIMIT);
    comm.failure().map_or(Ok(()), Err)?;
    Ok(ended?)
}

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

fn rank_main(what: &str) -> ExitCode {
    let limit = if matches!(what, "conformance" | "digest" | "tags") {
        LIMIT
    } else {
        FAULT_LIMIT
    };

    let options = CommOptions::default().limit(limit);
    let world = match what {
        "tags" => MpiWorld::init_with_tags_up_to(options, SMALL_TAG_BOUND).unwrap(),
        _ => MpiWorld::init(options).unwrap(),
    };

    let comm: Comm = world.comm();
    let streams = Streams::new(comm.rank());
    let rank = comm.rank();
    let n = comm.world_size();

    match what {
        "conformance" => {
            let plan = Plan::default().seed(n as u64).cases(60);
            check(&HostDevice::new(), &*comm, &streams.comm, plan).unwrap();
            // Calls on two streams.
            let mut values = vec![vec![rank as f32; 1000]; 20];
            for (i, values) in values.iter_mut().enumerate() {
                let stream = if i % 3 == rank % 3 {
                    &streams.compute
                } else {
                    &streams.comm
                };
                let buffer = view(values);
                comm.all_reduce(stream, buffer, buffer, ReduceOp::Max)
                    .unwrap();
            }
            streams.synchronize();
            assert!(values.iter().flatten().all(|&v| v == (n - 1) as f32));
            println!("rank {rank} conforms");
        }
        "tags" => {
            let plan = Plan::default().seed(n as u64).cases(20);
            check(&HostDevice::new(), &*comm, &streams.comm, plan).unwrap();
            reuse_tags(&comm, &streams);
            println!("rank {rank} conforms");
        }
        // Runs until scripts/two-hosts cuts the link. Writes the error to a file, since the
        // connection to mpirun is cut too.
        "until-cut" => {
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
            return ExitCode::FAILURE;
        }
        "digest" => println!("rank {rank} digest {:x}", digest(&comm, &streams)),
        fault_at => {
            let (kind, name) = fault_at.split_once('@').unwrap();
            let which = Collective::ALL
                .into_iter()
                .find(|which| which.name() == name)
                .unwrap();
            let error = fault(kind, which, &comm, &streams).expect_err("the world fails");
            println!("rank {rank} saw: {error}");
            // Time for the other ranks to print their errors, before the launcher ends them.
            std::thread::sleep(Duration::from_millis(500));
            return ExitCode::FAILURE;
        }
    }

    drop(world);
    ExitCode::SUCCESS
}

/// Runs `mpirun -n N this-program --rank WHAT`; kills it after [`LIMIT`].
fn launch(n: usize, what: &str, recovery: bool) -> (Output, Duration) {
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
    (output, begun.elapsed())
}

fn expect(ok: bool, what: &str, output: &Output) {
    let out = String::from_utf8_lossy(&output.stdout);
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(
        ok,
        "{what}: {}\n--- stdout\n{out}\n--- stderr\n{err}",
        output.status
    );
}

/// Checks that all remaining ranks name the right cause, in time.
fn check_fault(kind: &str, which: Collective) {
    let killed = kind.starts_with("killed");
    let what = format!("{kind}@{}", which.name());
    let (output, time) = launch(3, &what, killed);
    let out = String::from_utf8_lossy(&output.stdout);
    let text = match kind {
        "killed-during" => "rank 1".to_owned(),
        "killed-before" | "killed-after" | "stalled" => "rank 1 did not reach it".to_owned(),
        "count" => format!(" of {OTHER_LEN} x fp32"),
        "dtype" => format!(" of {LEN} x u8"),
        "kind" | "order" => another(which).name().to_owned(),
        "abort" => "rank 1 aborted: on purpose".to_owned(),
        _ => "rank 1 failed before running it".to_owned(),
    };

    let named =
        |line: &str| line.contains(&text) && (kind == "abort" || line.contains(which.name()));
    let failed = out
        .lines()
        .filter(|line| line.contains("saw:") && named(line))
        .count();
    // The stalled rank still sleeps when mpirun ends it.
    let survivors = if killed || kind == "stalled" { 2 } else { 3 };
    let within = time < FAULT_LIMIT + Duration::from_secs(20);
    // With `--enable-recovery`, the launcher's exit status ignores a killed rank.
    let reported = killed || !output.status.success();
    expect(reported && failed == survivors && within, &what, &output);
    println!("ok: {what}: {failed} ranks failed with '{text}' after {time:.1?}");
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

    for n in [1, 2, 3, 4] {
        let (output, _) = launch(n, "conformance", false);
        let out = String::from_utf8_lossy(&output.stdout);
        expect(
            output.status.success() && out.matches("conforms").count() == n,
            "conformance",
            &output,
        );
        println!("ok: conformance on {n} processes");
    }

    let (output, _) = launch(3, "tags", false);
    let out = String::from_utf8_lossy(&output.stdout);
    expect(
        output.status.success() && out.matches("conforms").count() == 3,
        "tags",
        &output,
    );
    println!("ok: conformance with tags up to {SMALL_TAG_BOUND}");

    for n in [2, 4] {
        let over_threads = common::on_ranks(n, CommOptions::default(), |comm, streams| {
            digest(&comm, streams)
        });
        let (output, _) = launch(n, "digest", false);
        let out = String::from_utf8_lossy(&output.stdout);
        let same = (0..n).all(|r| out.contains(&format!("rank {r} digest {:x}", over_threads[r])));
        expect(
            output.status.success() && same,
            "the bits of threads",
            &output,
        );
        println!("ok: {n} processes give the bits of {n} threads");
    }

    let cases: Vec<(&str, Collective)> = FAULTS
        .iter()
        .flat_map(|&f| Collective::ALL.map(|which| (f, which)))
        .collect();
    // Two cases run concurrently, since most of their time is waiting for a limit. More would delay
    // the healthy ranks.
    let next = AtomicUsize::new(0);

    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(&(kind, which)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    // A barrier has no count and no type.
                    if which != Collective::Barrier || !matches!(kind, "count" | "dtype") {
                        check_fault(kind, which);
                    }
                }
            });
        }
    });

    let (output, time) = launch(3, "killed-before@all_reduce", false);
    let named = String::from_utf8_lossy(&output.stderr).contains("signal 9");
    expect(
        !output.status.success() && named,
        "killed, without recovery",
        &output,
    );
    println!("ok: mpirun by itself ends all after {time:.1?}");

    ExitCode::SUCCESS
}
