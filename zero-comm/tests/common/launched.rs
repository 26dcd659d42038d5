//! Tests of a world of processes, over any back end: a test program starts itself once a rank, and
//! checks the output of the ranks.

use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use half::bf16;
use zero_alloc::device::{AnySlice, DeviceError, Stream};
use zero_alloc::host::HostDevice;
use zero_comm::conformance::{Plan, check};
use zero_comm::{Collective, CommError, CommOptions, ReduceOp};

use super::{Comm, LIMIT, Streams, another, call, unmatched, unmatched_text, view};

/// The faults of rank 1.
pub const FAULTS: [&str; 12] = [
    "killed-before",
    "killed-during",
    "killed-after",
    "stalled",
    "count",
    "pair",
    "kind",
    "dtype",
    "order",
    "abort",
    "poison",
    "panic",
];

/// The variable of the folder where ranks that share no memory meet. They cannot split.
pub const FOLDER: &str = "ZERO_TEST_FOLDER";

/// Elements per rank in the tests of faults, and the wrong count.
const LEN: usize = 4096;
const OTHER_LEN: usize = 4000;

/// The time limit of collectives in the tests of faults.
pub const FAULT_LIMIT: Duration = Duration::from_secs(3);

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

/// Only rank 0 sends, to the last rank, and more than fits into one round of shared memory.
fn one_rank_sends(comm: &Comm, streams: &Streams) {
    const MUCH: usize = 300_000;
    let n = comm.world_size();
    let mut sent = vec![0; n];
    let mut received = vec![0; n];
    if comm.rank() == 0 {
        sent[n - 1] = MUCH;
    }
    if comm.rank() == n - 1 {
        received[0] = MUCH;
    }

    let mut send: Vec<f32> = (0..sent.iter().sum::<usize>()).map(|i| i as f32).collect();
    let mut recv = vec![0f32; received.iter().sum()];
    let from = view(&mut send);
    let to = view(&mut recv);
    comm.all_to_all_uneven(&streams.comm, from, to, &sent, &received)
        .unwrap();
    streams.synchronize();
    assert!(recv.iter().enumerate().all(|(i, &value)| value == i as f32));
}

fn signal_this_process(signal: &str) {
    let id = std::process::id().to_string();
    let sent = Command::new("kill").args([signal, &id]).status();
    assert!(sent.is_ok_and(|sent| sent.success()));
}

fn kill_this_process() -> ! {
    signal_this_process("-9");
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
        "stopped" => signal_this_process("-STOP"),
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

    if kind == "pair" {
        unmatched(comm, streams, buffers[0], buffers[1], LEN)?;
    } else {
        call(comm, streams, which, buffers[0], buffers[1], LEN)?;
    }
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

/// The time limit of collectives in the test `what`.
pub fn limit_of(what: &str) -> Duration {
    match what.contains('@') {
        true => FAULT_LIMIT,
        false => LIMIT,
    }
}

/// A rank's part of the test `what`: `conformance`, `digest`, or `FAULT@COLLECTIVE`.
pub fn rank_main(what: &str, comm: &Comm) -> ExitCode {
    let streams = Streams::new(comm.rank());
    let rank = comm.rank();
    let n = comm.world_size();
    match what {
        "conformance" => {
            let splits = std::env::var_os(FOLDER).is_none();
            let plan = Plan::default().seed(n as u64).cases(60).splits(splits);
            check(&HostDevice::new(), &**comm, &streams.comm, plan).unwrap();
            one_rank_sends(comm, &streams);
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
        "digest" => println!("rank {rank} digest {:x}", digest(comm, &streams)),
        fault_at => {
            let (kind, name) = fault_at.split_once('@').unwrap();
            let which = Collective::ALL
                .into_iter()
                .find(|which| which.name() == name)
                .unwrap();
            let error = fault(kind, which, comm, &streams).expect_err("the world fails");
            println!("rank {rank} saw: {error}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// The ranks of a test, after all have ended.
pub struct Ended {
    pub succeeded: bool,
    pub stdout: String,
    /// All that was printed, for messages.
    pub text: String,
    pub time: Duration,
}

pub fn expect(ok: bool, what: &str, ended: &Ended) {
    assert!(ok, "{what}: {}", ended.text);
}

/// Checks conformance, that sums have the bits of those over threads, and all `faults`. `launch`
/// runs a test with a number of ranks; `texts` are what the error says of a rank that is lost or
/// late at a collective.
pub fn check_all(
    launch: &(dyn Fn(usize, &str) -> Ended + Sync),
    faults: &[&str],
    texts: &(dyn Fn(&str, Collective) -> Vec<&'static str> + Sync),
) {
    for n in [1, 2, 3, 4] {
        let ended = launch(n, "conformance");
        let conform = ended.stdout.matches("conforms").count();
        expect(ended.succeeded && conform == n, "conformance", &ended);
        println!("ok: conformance on {n} processes");
    }

    for n in [2, 4] {
        let over_threads = super::on_ranks(n, CommOptions::default(), |comm, streams| {
            digest(&comm, streams)
        });
        let ended = launch(n, "digest");
        let has = |r: usize| format!("rank {r} digest {:x}", over_threads[r]);
        let same = (0..n).all(|r| ended.stdout.contains(&has(r)));
        expect(ended.succeeded && same, "the bits of threads", &ended);
        println!("ok: {n} processes give the bits of {n} threads");
    }

    // A barrier has no count and no type.
    let cases: Vec<(&str, Collective)> = faults
        .iter()
        .flat_map(|&fault| Collective::ALL.map(|which| (fault, which)))
        .filter(|(kind, which)| match *kind {
            "count" | "dtype" => *which != Collective::Barrier,
            // Of all ranks together.
            "pair" => *which == Collective::AllToAll,
            // To the others it is as one that is stalled.
            "stopped" => *which == Collective::AllReduce,
            _ => true,
        })
        .collect();
    // Two cases run concurrently, since most of their time is waiting for a limit. More would delay
    // the healthy ranks.
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(&(kind, which)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let ended = launch(3, &format!("{kind}@{}", which.name()));
                    check_fault(kind, which, &ended, texts(kind, which));
                }
            });
        }
    });
}

/// Checks that all remaining ranks name the right cause, in time.
fn check_fault(kind: &str, which: Collective, ended: &Ended, texts: Vec<&str>) {
    let killed = kind.starts_with("killed");
    let count = format!(" of {OTHER_LEN} x fp32");
    let dtype = format!(" of {LEN} x u8");
    let pair = unmatched_text(LEN);
    let texts = match kind {
        "count" => vec![&count, which.name(), "rank 1"],
        "dtype" => vec![&dtype, which.name(), "rank 1"],
        "pair" => vec![&pair, which.name()],
        "kind" | "order" => vec![another(which).name(), which.name(), "rank 1"],
        "abort" => vec!["rank 1 aborted: on purpose"],
        "poison" | "panic" => vec!["rank 1 failed before running it", which.name()],
        _ => texts,
    };

    let named = |line: &str| texts.iter().all(|text| line.contains(text));
    let failed = ended.stdout.lines();
    let failed = failed.filter(|line| line.contains("saw:") && named(line));
    let failed = failed.count();
    // The stalled rank still sleeps when the launcher ends it.
    let survivors = if killed || matches!(kind, "stalled" | "stopped") {
        2
    } else {
        3
    };
    let within = ended.time < FAULT_LIMIT + Duration::from_secs(20);
    // Under `mpirun --enable-recovery`, the exit status ignores a killed rank.
    let reported = killed || !ended.succeeded;
    let what = format!("{kind}@{}", which.name());
    expect(reported && failed == survivors && within, &what, ended);
    println!(
        "ok: {what}: {failed} ranks failed with {texts:?} after {:.1?}",
        ended.time
    );
}
