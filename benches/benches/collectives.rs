//! Compares collectives over threads with the machine's copy bandwidth, PyTorch's gloo and Open
//! MPI, in one run.
//!
//! `cargo bench -p benches --bench collectives [-- --quick | --large] [--no-peer] [--op NAME] [--dtype NAME]`
//!
//! `GB/s` counts the **bytes that must move**, over all N ranks with whole buffers of S bytes:
//! reduce-scatter reads N S and writes S; all-gather in place reads S and writes (N-1) S;
//! all-reduce in place reads and writes N S.
//!
//! - **copy**: N threads with separate memory copy the same number of bytes in all (read plus
//!   written), by `memcpy` or with non-temporal stores, whichever is faster. Small sizes are copied
//!   from cache to cache.
//! - **loop**: for reduce-scatter, a plain loop with the same reads and writes,
//!   `out[i] = a[i] + b[i] + ...`, without synchronization: the limit of the memory for this access
//!   pattern.
//! - **processes**: the same collective between processes over shared memory.
//! - **barrier**: a collective that moves no bytes: the cost of synchronizing the ranks, which each
//!   collective pays twice.
//!
//! Rounds of all of these alternate. The best round of each counts, from the first thread's start
//! to the last one's end. The peers run before: gloo by `benches/peers/gloo_collectives.py`
//! (`python3` with torch), Open MPI by `benches/peers/mpi_collectives.c` (`mpicc`, `mpirun`). A
//! missing peer is reported.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use multiversion::multiversion;
use zero_alloc::device::{AnySlice, DType, Device, Stream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_alloc::{Block, Pool, Purpose};
use zero_comm::processes::ProcessComm;
use zero_comm::threads::{ThreadsComm, World};
use zero_comm::world::Ranks;
use zero_comm::{CommOptions, Communicator, ReduceOp};

const LIMIT: Duration = Duration::from_secs(600);
const OPS: [&str; 3] = ["reduce_scatter", "all_gather", "all_reduce"];

/// Bytes read and written over all ranks for a whole buffer of `s` bytes.
fn moved(op: &str, n: usize, s: usize) -> usize {
    match op {
        "reduce_scatter" => n * s + s,
        "all_gather" => s + (n - 1) * s,
        _ => 2 * n * s,
    }
}

struct Rank {
    comm: Arc<dyn Communicator<HostDevice>>,
    stream: HostStream,
    whole: AnySlice,
    part: AnySlice,
    _blocks: [Block<HostDevice>; 2],
}

impl Rank {
    fn new(comm: Arc<dyn Communicator<HostDevice>>, dtype: DType, bytes: usize) -> Self {
        let device = HostDevice::new();
        let stream = device.create_stream("comm").expect("a stream");
        let pool = Pool::new(device.clone(), usize::MAX);
        let len = bytes / dtype.size_bytes();
        let block = |len| {
            pool.allocate(len, dtype, Purpose::Workspace, &stream)
                .expect("memory")
        };

        let blocks = [block(len), block(len / comm.world_size())];
        // SAFETY: the blocks outlive the streams' work, which every round waits for.
        let [whole, part] = [0, 1].map(|i| unsafe { blocks[i].slice() });
        device
            .fill_zero(&stream, whole)
            .and_then(|()| device.fill_zero(&stream, part))
            .expect("zeros");

        Self {
            comm,
            stream,
            whole,
            part,
            _blocks: blocks,
        }
    }

    fn run(&self, op: &str, repeat: u32) {
        let n = self.comm.world_size();
        let rank = self.comm.rank();
        let own = rank * self.whole.len() / n..(rank + 1) * self.whole.len() / n;
        for _ in 0..repeat {
            match op {
                "reduce_scatter" => {
                    self.comm
                        .reduce_scatter(&self.stream, self.whole, self.part, ReduceOp::Sum)
                }
                "all_gather" => {
                    self.comm
                        .all_gather(&self.stream, self.whole.slice(own.clone()), self.whole)
                }
                "barrier" => self.comm.barrier(&self.stream),
                _ => self
                    .comm
                    .all_reduce(&self.stream, self.whole, self.whole, ReduceOp::Max),
            }
            .expect("the collective is enqueued");
        }

        self.stream.synchronize(LIMIT).expect("the collective runs");
    }
}

/// `out[i] = inputs[0][i] + inputs[1][i] + ...`, for 2 or 4 inputs of equal length.
#[multiversion(targets = "simd")]
fn plain_sum(inputs: &[Vec<f32>], out: &mut [f32]) {
    match inputs {
        [a, b] => out
            .iter_mut()
            .zip(a)
            .zip(b)
            .for_each(|((out, a), b)| *out = a + b),
        [a, b, c, d] => {
            let all = out.iter_mut().zip(a).zip(b).zip(c).zip(d);
            all.for_each(|((((out, a), b), c), d)| *out = a + b + c + d);
        }
        _ => {}
    }
}

/// Copies with non-temporal stores.
#[cfg(target_arch = "x86_64")]
fn copy_past_cache(from: &[u8], to: &mut [u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    let head = to.as_ptr().align_offset(size_of::<__m128i>()).min(to.len());
    for (from, to) in from[head..]
        .as_chunks::<16>()
        .0
        .iter()
        .zip(to[head..].as_chunks_mut::<16>().0)
    {
        // SAFETY: 16 bytes.
        let value = unsafe { _mm_loadu_si128(from.as_ptr().cast()) };
        // SAFETY: 16 bytes, aligned since they follow `head`.
        unsafe { _mm_stream_si128(to.as_mut_ptr().cast(), value) };
    }
    // SAFETY: every x86-64 processor has SSE.
    unsafe { _mm_sfence() };
}

#[cfg(not(target_arch = "x86_64"))]
fn copy_past_cache(from: &[u8], to: &mut [u8]) {
    to.copy_from_slice(from);
}

/// Times work of all threads, from the first start to the last end. All threads get the same time.
struct Rounds {
    barrier: Barrier,
    span: Mutex<Option<(Instant, Instant)>>,
}

impl Rounds {
    fn new(n: usize) -> Self {
        Self {
            barrier: Barrier::new(n),
            span: Mutex::new(None),
        }
    }

    fn time(&self, work: impl FnOnce()) -> Duration {
        *self.span.lock().expect("no panic") = None;
        self.barrier.wait();
        let start = Instant::now();
        work();
        let end = Instant::now();
        {
            let mut span = self.span.lock().expect("no panic");
            *span = Some(span.map_or((start, end), |(a, b)| (a.min(start), b.max(end))));
        }
        self.barrier.wait();
        let (start, end) = self.span.lock().expect("no panic").expect("this thread's");
        self.barrier.wait();
        end - start
    }

    /// Returns the best seconds of each contender. They run in turn until `budget` is spent; the
    /// repetitions of a turn grow until it is long enough to time. All threads see the same times,
    /// so they make the same decisions.
    fn compete(&self, budget: Duration, contenders: &mut [&mut dyn FnMut(u32)]) -> Vec<f64> {
        let mut state = vec![(1u32, f64::INFINITY); contenders.len()];
        let mut spent = Duration::ZERO;
        for round in 0.. {
            for (work, (repeat, best)) in contenders.iter_mut().zip(&mut state) {
                let time = self.time(|| work(*repeat));
                spent += time;
                if round > 0 {
                    *best = best.min(time.as_secs_f64() / f64::from(*repeat));
                }
                if time < Duration::from_millis(2) {
                    *repeat *= 2;
                }
            }
            if spent > budget && round > 3 {
                break;
            }
        }
        state.into_iter().map(|(_, best)| best).collect()
    }
}

/// Seconds of a collective, a copy, a plain loop and a barrier.
fn measure(op: &'static str, dtype: DType, n: usize, bytes: usize, budget: Duration) -> [f64; 4] {
    let comms = World::new(n, CommOptions::default().limit(LIMIT)).expect("a world");
    let rounds = Arc::new(Rounds::new(n));
    let spawn = |comm: ThreadsComm| {
        let rounds = Arc::clone(&rounds);
        std::thread::spawn(move || {
            let rank = Rank::new(Arc::new(comm), dtype, bytes);
            let copied = moved(op, n, bytes) / n / 2;
            let (from, mut to, mut past) =
                (vec![1u8; copied], vec![2u8; copied], vec![3u8; copied]);
            let inputs = vec![vec![1f32; bytes / 4 / n]; n];
            let mut out = vec![0f32; bytes / 4 / n];
            let times = rounds.compete(
                budget,
                &mut [
                    &mut |repeat| rank.run(op, repeat),
                    &mut |repeat| {
                        for _ in 0..repeat {
                            to.copy_from_slice(std::hint::black_box(&from));
                            std::hint::black_box(&mut to);
                        }
                    },
                    &mut |repeat| {
                        for _ in 0..repeat {
                            copy_past_cache(std::hint::black_box(&from), &mut past);
                            std::hint::black_box(&mut past);
                        }
                    },
                    &mut |repeat| {
                        for _ in 0..repeat {
                            plain_sum(std::hint::black_box(&inputs), &mut out);
                            std::hint::black_box(&mut out);
                        }
                    },
                    &mut |repeat| rank.run("barrier", repeat),
                ],
            );
            [times[0], times[1].min(times[2]), times[3], times[4]]
        })
    };

    let threads: Vec<_> = comms.into_iter().map(spawn).collect();
    let mut results = threads.into_iter().map(|t| t.join().expect("a rank"));
    results.next().expect("there are ranks")
}

/// A peer's seconds by operation, ranks and bytes.
type Seconds = HashMap<(String, usize, usize), f64>;

/// Runs a peer and parses its output. If it is missing, prints the reason.
fn peer(name: &str, command: &mut Command) -> Seconds {
    let output = match command.output() {
        Ok(output) if output.status.success() => output,
        Ok(output) => {
            println!(
                "{name} is missing: {}",
                String::from_utf8_lossy(&output.stderr)
                    .lines()
                    .last()
                    .unwrap_or("")
            );
            return Seconds::new();
        }
        Err(error) => {
            println!("{name} is missing: {error}");
            return Seconds::new();
        }
    };

    let parse = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [op, ranks, bytes, seconds] = words[..] else {
            return None;
        };
        Some((
            (op.to_owned(), ranks.parse().ok()?, bytes.parse().ok()?),
            seconds.parse().ok()?,
        ))
    };

    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(parse)
        .collect()
}

/// Starts this program as 2 and as 4 processes.
fn processes(dtype: &str, sizes: &[String]) -> Seconds {
    let run = |n: usize| {
        let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr());
        let port = port.expect("a free port").port();
        let command = |rank: usize| {
            let mut command = Command::new(std::env::current_exe().expect("this program"));
            command.args(["--dtype", dtype]).args(sizes);
            command.envs([
                ("RANK", rank.to_string()),
                ("WORLD_SIZE", n.to_string()),
                ("MASTER_ADDR", "127.0.0.1".to_owned()),
                ("MASTER_PORT", port.to_string()),
            ]);
            command
        };
        let others: Vec<_> = (1..n).map(|rank| command(rank).spawn()).collect();
        let seconds = peer("processes", &mut command(0));
        for other in others.into_iter().flatten() {
            let _ended = { other }.wait();
        }
        seconds
    };
    [2, 4].into_iter().flat_map(run).collect()
}

/// A rank of [`processes`]: the best of 12 rounds, each of about 4 MB or at least once.
fn process_main(ranks: &Ranks, dtype: DType) {
    let options = CommOptions::default().limit(LIMIT);
    let comm: Arc<dyn Communicator<HostDevice>> =
        Arc::new(ProcessComm::join(ranks, options).expect("a world"));
    for op in OPS {
        for bytes in std::env::args().filter_map(|arg| arg.parse().ok()) {
            let rank = Rank::new(Arc::clone(&comm), dtype, bytes);
            let repeat = ((4 << 20) / bytes).clamp(1, 1000) as u32;
            let time = |_| {
                rank.run("barrier", 1);
                let start = Instant::now();
                rank.run(op, repeat);
                start.elapsed().as_secs_f64() / f64::from(repeat)
            };
            let best = (0..12).map(time).fold(f64::INFINITY, f64::min);
            if ranks.rank == 0 {
                println!("{op} {} {bytes} {best:.9}", ranks.world_size);
            }
        }
    }
}

fn gloo(sizes: &[String]) -> Seconds {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/peers/gloo_collectives.py");
    peer("gloo", Command::new("python3").arg(script).args(sizes))
}

fn open_mpi(sizes: &[String]) -> Seconds {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/peers/mpi_collectives.c");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mpi_collectives");
    let _no_lines = peer(
        "mpicc",
        Command::new("mpicc")
            .arg("-O2")
            .arg(source)
            .arg("-o")
            .arg(&program),
    );

    let run = |n: &str| {
        let launch = ["--allow-run-as-root", "--oversubscribe", "-n", n];
        peer(
            "Open MPI",
            Command::new("mpirun")
                .args(launch)
                .arg(&program)
                .args(sizes),
        )
    };

    [run("2"), run("4")].into_iter().flatten().collect()
}

fn main() {
    let flag = |name: &str| std::env::args().any(|a| a == name);
    let value = |name: &str| std::env::args().skip_while(|a| a != name).nth(1);
    let powers: &[u32] = if flag("--large") {
        &[24, 26, 28]
    } else if flag("--quick") {
        &[10, 16, 20, 24]
    } else {
        &[10, 13, 16, 18, 20, 22, 24, 26, 28]
    };

    let sizes: Vec<usize> = powers.iter().map(|p| 1usize << p).collect();
    let dtype = match value("--dtype").as_deref() {
        None | Some("fp32") => DType::F32,
        Some("bf16") => DType::Bf16,
        Some("fp16") => DType::F16,
        Some(other) => return println!("--dtype fp32, bf16 or fp16, not {other}"),
    };
    if let Ok(Some(ranks)) = Ranks::from_env() {
        return process_main(&ranks, dtype);
    }

    let budget = Duration::from_millis(if flag("--quick") { 200 } else { 800 });
    let texts: Vec<String> = sizes.iter().map(ToString::to_string).collect();
    let processes = processes(value("--dtype").as_deref().unwrap_or("fp32"), &texts);
    // The peers support only fp32.
    let peers = !flag("--no-peer") && dtype == DType::F32;
    let (gloo, mpi) = if peers {
        (gloo(&texts), open_mpi(&texts))
    } else {
        Default::default()
    };

    println!(
        "| operation | ranks | bytes | us | GB/s | of copy | of loop | barrier us | processes us | x gloo | x Open MPI |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    let only = value("--op");
    for op in OPS
        .into_iter()
        .filter(|&op| only.as_deref().is_none_or(|only| only == op))
    {
        for n in [2, 4] {
            for &bytes in &sizes {
                let [time, copy, plain, barrier] = measure(op, dtype, n, bytes, budget);
                let rate = moved(op, n, bytes) as f64 / 1e9 / time;
                let key = (op.to_owned(), n, bytes);
                let beside = |peer: &Seconds| {
                    peer.get(&key)
                        .map_or("-".into(), |p| format!("{:.1}", p / time))
                };
                let between = processes.get(&key);
                let between = between.map_or("-".into(), |seconds| format!("{:.1}", seconds * 1e6));
                let of_loop = if op == "reduce_scatter" {
                    format!("{:.2}", plain / time)
                } else {
                    "-".to_owned()
                };
                println!(
                    "| {op} | {n} | {bytes} | {:.1} | {rate:.1} | {:.2} | {of_loop} | {:.1} | {between} | {} | {} |",
                    time * 1e6,
                    copy / time,
                    barrier * 1e6,
                    beside(&gloo),
                    beside(&mpi),
                );
            }
        }
    }
}
