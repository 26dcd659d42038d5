//! The MPI back end, as real processes: this program starts itself under `mpirun` and judges what comes back.
//!
//! `cargo test -p zero-comm --features mpi --test mpi` needs `mpirun`; without it, it says so and passes.

mod common;

use std::process::{Command, ExitCode, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Comm, LIMIT, Streams, view};
use half::bf16;
use zero_alloc::device::{DeviceError, Stream};
use zero_alloc::host::HostDevice;
use zero_comm::conformance::{Plan, check};
use zero_comm::mpi::{MpiWorld, Options};
use zero_comm::{CommError, ReduceOp, threads};

/// How long a rank waits in the tests of faults.
const FAULT_LIMIT: Duration = Duration::from_secs(3);

/// Sums of values whose order of addition shows, as bits.
fn digest(comm: &Comm, streams: &Streams) -> u64 {
    let rank = comm.rank() as u64;
    let draw = |i: u64| ((i * 2_654_435_761 + rank * 40_503) % 10_007) as f32 * 1.7e-3 - 8.0;
    let mut wide: Vec<f32> = (0..5000).map(draw).collect();
    let mut narrow: Vec<bf16> = (0..5000).map(|i| bf16::from_f32(draw(i))).collect();
    let (in_wide, in_narrow) = (view(&mut wide), view(&mut narrow));
    for op in [ReduceOp::Sum, ReduceOp::Avg] {
        comm.all_reduce(&streams.comm, in_wide, in_wide, op).unwrap();
        comm.all_reduce(&streams.comm, in_narrow, in_narrow, op).unwrap();
    }
    streams.synchronize();
    let bits = wide.iter().map(|v| v.to_bits()).chain(narrow.iter().map(|v| u32::from(v.to_bits())));
    bits.fold(0xcbf2_9ce4_8422_2325, |hash, bits| (hash ^ u64::from(bits)).wrapping_mul(0x0100_0000_01b3))
}

fn kill_this_process() -> ! {
    let _never = Command::new("kill").args(["-9", &std::process::id().to_string()]).status();
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// What rank 1 does wrong; every rank then waits for its error and prints it.
fn fault(kind: &str, comm: &Comm, streams: &Streams) -> Result<(), CommError> {
    let (stream, at_fault) = (&streams.comm, comm.rank() == 1);
    let (mut a, mut b, mut bytes) = (vec![1f32; 4096], vec![1f32; 8192], vec![1u8; 4096]);
    let (a, b, bytes) = (view(&mut a), view(&mut b), view(&mut bytes));
    comm.barrier(stream)?;
    match kind {
        "killed-before" if at_fault => {
            streams.synchronize();
            kill_this_process();
        }
        "killed-during" if at_fault => {
            // The other rank is held back, so this one is waiting inside when it dies.
            comm.all_reduce(stream, a, a, ReduceOp::Sum)?;
            std::thread::sleep(Duration::from_millis(200));
            kill_this_process();
        }
        "killed-during" => std::thread::sleep(Duration::from_millis(500)),
        "killed-after" => {
            comm.all_reduce(stream, a, a, ReduceOp::Sum)?;
            stream.synchronize(LIMIT)?;
            if at_fault {
                kill_this_process();
            }
        }
        "stalled" if at_fault => std::thread::sleep(FAULT_LIMIT * 2),
        "count" if at_fault => comm.all_reduce(stream, b, b, ReduceOp::Sum)?,
        "kind" if at_fault => comm.broadcast(stream, a, 0)?,
        "dtype" if at_fault => comm.all_reduce(stream, bytes, bytes, ReduceOp::Sum)?,
        "order" if at_fault => {
            comm.barrier(stream)?;
            comm.all_reduce(stream, a, a, ReduceOp::Sum)?;
        }
        "abort" if at_fault => comm.abort("on purpose"),
        "poison" if at_fault => {
            stream.enqueue("bad", || Err(DeviceError::Closed { stream: "on purpose".to_owned() }))?;
        }
        "panic" if at_fault => stream.enqueue("bad", || panic!("on purpose"))?,
        _ => {}
    }
    comm.all_reduce(stream, a, a, ReduceOp::Sum)?;
    let ended = stream.synchronize(LIMIT);
    comm.failure().map_or(Ok(()), Err)?;
    Ok(ended?)
}

fn rank_main(what: &str) -> ExitCode {
    let limit = if what == "conformance" || what == "digest" { LIMIT } else { FAULT_LIMIT };
    let world = MpiWorld::init(Options { limit }).unwrap();
    let comm: Comm = world.comm();
    let streams = Streams::new(comm.rank());
    let (rank, n) = (comm.rank(), comm.world_size());
    match what {
        "conformance" => {
            let plan = Plan { seed: n as u64, cases: 60, ..Plan::default() };
            check(&HostDevice::new(), &*comm, &streams.comm, plan).unwrap();
            // Twice as many streams as one, and calls on both.
            let mut values = vec![vec![rank as f32; 1000]; 20];
            for (i, values) in values.iter_mut().enumerate() {
                let stream = if i % 3 == rank % 3 { &streams.compute } else { &streams.comm };
                let buffer = view(values);
                comm.all_reduce(stream, buffer, buffer, ReduceOp::Max).unwrap();
            }
            streams.synchronize();
            assert!(values.iter().flatten().all(|&v| v == (n - 1) as f32));
            println!("rank {rank} conforms");
        }
        // Until the link is cut (scripts/two-hosts); the words go to a file, since their way to mpirun is cut, too.
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
            std::fs::write(format!("{file}.saw.{rank}"), format!("rank {rank} saw: {error}\n")).unwrap();
            return ExitCode::FAILURE;
        }
        "digest" => println!("rank {rank} digest {:x}", digest(&comm, &streams)),
        kind => {
            let error = fault(kind, &comm, &streams).expect_err("the fault is seen");
            println!("rank {rank} saw: {error}");
            // Time for the others to say so too, before the launcher ends them.
            std::thread::sleep(Duration::from_millis(500));
            return ExitCode::FAILURE;
        }
    }
    drop(world);
    ExitCode::SUCCESS
}

/// `mpirun -n N this-program --rank WHAT`, ended after a minute.
fn launch(n: usize, what: &str, recovery: bool) -> (Output, Duration) {
    let program = std::env::current_exe().unwrap();
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "-n", &n.to_string()]);
    if recovery {
        // Otherwise the launcher itself ends all ranks when it loses one.
        command.arg("--enable-recovery");
    }
    command.arg(program).args(["--rank", what]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let begun = Instant::now();
    let child = command.spawn().unwrap();
    let (pid, done) = (child.id(), Arc::new(zero_alloc::host::Gate::new(false)));
    let watched = Arc::clone(&done);
    std::thread::spawn(move || {
        if watched.wait_until(LIMIT, String::new, |done| done.then_some(())).is_err() {
            let _gone = Command::new("kill").args(["-9", &pid.to_string()]).status();
        }
    });
    let output = child.wait_with_output().unwrap();
    done.update(|done| *done = true);
    (output, begun.elapsed())
}

fn expect(ok: bool, what: &str, output: &Output) {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(ok, "{what}: {}\n--- stdout\n{out}\n--- stderr\n{err}", output.status);
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, what] = &args[..]
        && flag == "--rank"
    {
        return rank_main(what);
    }
    if Command::new("mpirun").arg("--version").stdout(Stdio::null()).status().is_err() {
        println!("skipped: mpirun is missing");
        return ExitCode::SUCCESS;
    }
    for n in [1, 2, 3, 4] {
        let (output, _) = launch(n, "conformance", false);
        let out = String::from_utf8_lossy(&output.stdout);
        expect(output.status.success() && out.matches("conforms").count() == n, "conformance", &output);
        println!("ok: conformance on {n} processes");
    }
    for n in [2, 4] {
        let over_threads = common::on_ranks(n, threads::Options::default(), |comm, streams| digest(&comm, streams));
        let (output, _) = launch(n, "digest", false);
        let out = String::from_utf8_lossy(&output.stdout);
        let same = (0..n).all(|r| out.contains(&format!("rank {r} digest {:x}", over_threads[r])));
        expect(output.status.success() && same, "the bits of threads", &output);
        println!("ok: {n} processes give the bits of {n} threads");
    }
    let faults = [
        ("killed-before", "rank 1 did not come"),
        ("killed-during", "rank 1"),
        ("killed-after", "rank 1 did not come"),
        ("stalled", "rank 1 did not come"),
        ("count", "all_reduce(sum) of 8192 x fp32"),
        ("kind", "broadcast of 4096 x fp32"),
        ("dtype", "all_reduce(sum) of 4096 x u8"),
        ("order", "barrier"),
        ("abort", "rank 1 aborted: on purpose"),
        ("poison", "rank 1 failed before it ran"),
        ("panic", "rank 1 failed before it ran"),
    ];
    for (kind, words) in faults {
        let (output, time) = launch(3, kind, kind.starts_with("killed"));
        let out = String::from_utf8_lossy(&output.stdout);
        // The stalled rank is still asleep when mpirun ends it.
        let survivors = if kind.starts_with("killed") || kind == "stalled" { 2 } else { 3 };
        let told = out.lines().filter(|line| line.contains("saw:") && line.contains(words)).count();
        let within = time < FAULT_LIMIT + Duration::from_secs(20);
        // With recovery, the launcher counts a lost rank as none of its business.
        let reported = kind.starts_with("killed") || !output.status.success();
        expect(reported && told == survivors && within, kind, &output);
        println!("ok: {kind}: {told} ranks said '{words}' after {time:.1?}");
    }
    let (output, time) = launch(3, "killed-before", false);
    let named = String::from_utf8_lossy(&output.stderr).contains("signal 9");
    expect(!output.status.success() && named, "killed, without recovery", &output);
    println!("ok: mpirun by itself ends all after {time:.1?}");
    ExitCode::SUCCESS
}
