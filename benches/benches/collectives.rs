//! Collectives over threads beside the machine's copy bandwidth and PyTorch's gloo, in one run.
//!
//! `cargo bench -p benches --bench collectives [-- --quick | --large] [--no-peer] [--op NAME]`
//!
//! For each size and operation, rounds of the collective, of a plain copy by as many threads, alternate; the
//! best round of each counts. `GB/s` counts the bytes that must move through memory over all ranks, S being the
//! bytes of the whole buffer: reduce-scatter reads N S and writes S; all-gather in place reads S and writes
//! (N-1) S; all-reduce in place reads and writes N S. `copy` counts bytes read and written, by N threads that
//! copy as much in all. gloo is run by `benches/peers/gloo_collectives.py` (needs `python3` with torch; it is
//! named as missing otherwise).

use std::collections::HashMap;
use std::process::Command;
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use zero_alloc::device::{AnySlice, DType, Device, Stream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_alloc::{Block, Pool, Purpose};
use zero_comm::threads::{Options, World};
use zero_comm::{Communicator, ReduceOp};

const LIMIT: Duration = Duration::from_secs(600);
const OPS: [&str; 3] = ["reduce_scatter", "all_gather", "all_reduce"];

/// Bytes through memory over all ranks for a whole buffer of `s` bytes.
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
    fn enqueue(&self, op: &str) {
        let (n, rank) = (self.comm.world_size(), self.comm.rank());
        let own = rank * self.whole.len() / n..(rank + 1) * self.whole.len() / n;
        match op {
            "reduce_scatter" => self.comm.reduce_scatter(&self.stream, self.whole, self.part, ReduceOp::Sum),
            "all_gather" => self.comm.all_gather(&self.stream, self.whole.slice(own), self.whole),
            _ => self.comm.all_reduce(&self.stream, self.whole, self.whole, ReduceOp::Max),
        }
        .expect("the collective is enqueued");
    }
}

/// Times what all threads do, from the first start to the last end.
struct Rounds {
    barrier: Barrier,
    span: Mutex<Option<(Instant, Instant)>>,
}

impl Rounds {
    fn new(n: usize) -> Self {
        Self { barrier: Barrier::new(n), span: Mutex::new(None) }
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
}

/// Seconds of one collective and of one copy, the best of interleaved rounds.
fn measure(op: &'static str, n: usize, bytes: usize, budget: Duration) -> (f64, f64) {
    let comms = World::new(n, Options { limit: LIMIT }).expect("a world");
    let rounds_of = Arc::new(Rounds::new(n));
    let threads: Vec<_> = comms
        .into_iter()
        .map(|comm| {
            let rounds_of = Arc::clone(&rounds_of);
            std::thread::spawn(move || {
                let device = HostDevice::new();
                let stream = device.create_stream("comm").expect("a stream");
                let pool = Pool::new(device.clone(), usize::MAX);
                let len = bytes / 4;
                let block = |len| pool.allocate(len, DType::F32, Purpose::Workspace, &stream).expect("memory");
                let blocks = [block(len), block(len / n)];
                // SAFETY: the blocks outlive the streams' work, which every round waits for.
                let [whole, part] = [0, 1].map(|i| unsafe { blocks[i].slice() });
                device.fill_zero(&stream, whole).and_then(|()| device.fill_zero(&stream, part)).expect("zeros");
                let copied = moved(op, n, bytes) / n / 2;
                let (from, mut to) = (vec![1u8; copied], vec![2u8; copied]);
                let rank = Rank { comm: Arc::new(comm), stream, whole, part, _blocks: blocks };
                let (mut best, mut best_copy) = (f64::INFINITY, f64::INFINITY);
                let mut repeat = 1;
                let begun = Instant::now();
                let mut rounds = 0;
                loop {
                    let time = rounds_of.time(|| {
                        for _ in 0..repeat {
                            rank.enqueue(op);
                        }
                        rank.stream.synchronize(LIMIT).expect("the collective runs");
                    });
                    let copy_time = rounds_of.time(|| {
                        for _ in 0..repeat {
                            to.copy_from_slice(std::hint::black_box(&from));
                            std::hint::black_box(&mut to);
                        }
                    });
                    if rounds > 0 {
                        best = best.min(time.as_secs_f64() / f64::from(repeat));
                        best_copy = best_copy.min(copy_time.as_secs_f64() / f64::from(repeat));
                    }
                    rounds += 1;
                    // All ranks decide alike: rank 0's clock, spread by a collective of 4 bytes.
                    let mut flag = [if begun.elapsed() > budget && rounds > 3 { 1f32 } else { 0.0 }];
                    let mut each = [if time < Duration::from_millis(2) { 1f32 } else { 0.0 }];
                    for value in [&mut flag, &mut each] {
                        // SAFETY: the value outlives the collective, which is waited for at once.
                        let slice = unsafe { zero_alloc::device::DeviceSlice::from_raw_parts(value.as_mut_ptr(), 1) };
                        rank.comm.broadcast(&rank.stream, slice.erase(), 0).expect("a broadcast");
                        rank.stream.synchronize(LIMIT).expect("the broadcast runs");
                    }
                    if flag[0] > 0.0 {
                        return (best, best_copy);
                    }
                    if each[0] > 0.0 {
                        repeat *= 2;
                    }
                }
            })
        })
        .collect();
    let results: Vec<(f64, f64)> = threads.into_iter().map(|t| t.join().expect("a rank")).collect();
    results.into_iter().fold((0.0, 0.0), |(a, b), (c, d)| (f64::max(a, c), f64::max(b, d)))
}

/// gloo's seconds by operation, ranks and bytes; empty where it is missing.
fn gloo(sizes: &[usize]) -> HashMap<(String, usize, usize), f64> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/peers/gloo_collectives.py");
    let sizes: Vec<String> = sizes.iter().map(ToString::to_string).collect();
    let output = match Command::new("python3").arg(script).args(&sizes).output() {
        Ok(output) if output.status.success() => output,
        Ok(output) => {
            println!("gloo is missing: {}", String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or(""));
            return HashMap::new();
        }
        Err(e) => {
            println!("gloo is missing: python3: {e}");
            return HashMap::new();
        }
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let parse = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [op, ranks, bytes, seconds] = words[..] else { return None };
        Some(((op.to_owned(), ranks.parse().ok()?, bytes.parse().ok()?), seconds.parse().ok()?))
    };
    text.lines().filter_map(parse).collect()
}

fn main() {
    let flag = |name: &str| std::env::args().any(|a| a == name);
    let powers: &[u32] = if flag("--large") {
        &[24, 26, 28]
    } else if flag("--quick") {
        &[10, 16, 20, 24]
    } else {
        &[10, 13, 16, 18, 20, 22, 24, 26, 28]
    };
    let sizes: Vec<usize> = powers.iter().map(|p| 1usize << p).collect();
    let budget = Duration::from_millis(if flag("--quick") { 150 } else { 600 });
    let peers = if flag("--no-peer") { HashMap::new() } else { gloo(&sizes) };
    println!("| operation | ranks | bytes | us | GB/s | copy GB/s | of copy | gloo us | x gloo |");
    println!("|---|---|---|---|---|---|---|---|---|");
    let only = std::env::args().skip_while(|a| a != "--op").nth(1);
    for op in OPS.into_iter().filter(|&op| only.as_deref().is_none_or(|only| only == op)) {
        for n in [2, 4] {
            for &bytes in &sizes {
                let (time, copy) = measure(op, n, bytes, budget);
                let total = moved(op, n, bytes) as f64 / 1e9;
                let gloo = peers.get(&(op.to_owned(), n, bytes));
                let peer = gloo.map_or("-".into(), |g| format!("{:.0}", g * 1e6));
                let ratio = gloo.map_or("-".into(), |g| format!("{:.1}", g / time));
                println!(
                    "| {op} | {n} | {bytes} | {:.1} | {:.2} | {:.2} | {:.2} | {peer} | {ratio} |",
                    time * 1e6,
                    total / time,
                    total / copy,
                    copy / time
                );
            }
        }
    }
}
