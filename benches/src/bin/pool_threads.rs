//! The speed of one pool used by several threads, relative to one thread: pairs of allocation and
//! free, and pairs with one operation enqueued between them. Rounds alternate; the best of each
//! counts. `pool_threads [PAIRS]`: pairs of a thread, by default a million, and a fifth with
//! operations.
//!
//! With fewer cores than threads, each thread runs at most at `cores / threads` of one thread's
//! speed. The output has this ceiling, and the processor time per pair, to which it does not apply.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use zero_alloc::device::{DType, Device, DeviceError, Stream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_alloc::{AllocError, Pool, Purpose};

const ROUNDS: usize = 5;

/// The time of a pair, in nanoseconds.
#[derive(Clone, Copy)]
struct Pair {
    wall_ns: f64,
    cpu_ns: f64,
}

impl Pair {
    fn min(self, other: Self) -> Self {
        Self {
            wall_ns: self.wall_ns.min(other.wall_ns),
            cpu_ns: self.cpu_ns.min(other.cpu_ns),
        }
    }
}

fn run(
    pool: &Pool<HostDevice>,
    stream: &HostStream,
    pairs: usize,
    enqueue: bool,
) -> Result<(), AllocError> {
    for i in 0..pairs {
        // Sizes from 256 bytes to 64 KiB, not all powers of two.
        let bytes = (256 << (i % 9)) - (i % 7) * 8;
        let block = pool.allocate(bytes, DType::U8, Purpose::Activations, stream)?;
        if enqueue {
            stream.enqueue("nothing", || Ok::<_, DeviceError>(()))?;
        }
        drop(block);
    }
    stream.synchronize(Duration::from_secs(600))?;
    Ok(())
}

/// Processor time of this process so far, in nanoseconds; Linux only (fields 14 and 15 of its stat,
/// in ticks of 10 ms).
fn cpu_ns() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat
        .rsplit(')')
        .next()
        .unwrap_or_default()
        .split_whitespace();
    fields
        .skip(11)
        .take(2)
        .filter_map(|ticks| ticks.parse::<f64>().ok())
        .sum::<f64>()
        * 1e7
}

fn measure(threads: usize, pairs: usize, enqueue: bool) -> Result<Pair, AllocError> {
    let device = HostDevice::new();
    let pool = Pool::new(device.clone(), 1 << 30);
    let barrier = Barrier::new(threads);
    let cpu = cpu_ns();
    let times: Result<Vec<f64>, AllocError> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|i| {
                let pool = &pool;
                let device = &device;
                let barrier = &barrier;
                scope.spawn(move || {
                    let stream = device.create_stream(&format!("stream {i}"))?;
                    barrier.wait();
                    let start = Instant::now();
                    run(pool, &stream, pairs, enqueue)?;
                    Ok(start.elapsed().as_nanos() as f64)
                })
            })
            .collect();
        workers
            .into_iter()
            .map(|w| w.join().unwrap_or_else(|p| std::panic::resume_unwind(p)))
            .collect()
    });

    let wall_ns = times?.iter().sum::<f64>() / (threads * pairs) as f64;
    Ok(Pair {
        wall_ns,
        cpu_ns: (cpu_ns() - cpu) / (threads * pairs) as f64,
    })
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let pairs = std::env::args().nth(1);
    let pairs = pairs
        .map_or(Ok(1_000_000), |pairs| pairs.parse::<usize>())?
        .max(5);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for (what, enqueue, pairs) in [
        ("alone", false, pairs),
        ("with one operation enqueued", true, pairs / 5),
    ] {
        let worst = Pair {
            wall_ns: f64::MAX,
            cpu_ns: f64::MAX,
        };
        let mut best = [(1, worst), (2, worst), (8, worst)];
        for _ in 0..ROUNDS {
            for (threads, pair) in &mut best {
                *pair = pair.min(measure(*threads, pairs, enqueue)?);
            }
        }
        let one = best[0].1;
        for (threads, pair) in best {
            println!(
                "pairs {what}, {threads} threads on {cores} cores: {:.0} ns, {:.2} of one thread's speed each \
                 (ceiling {:.2}); {:.0} ns of processor time, {:.2} of one thread's",
                pair.wall_ns,
                one.wall_ns / pair.wall_ns,
                (cores as f64 / threads as f64).min(1.0),
                pair.cpu_ns,
                one.cpu_ns / pair.cpu_ns,
            );
        }
    }

    Ok(())
}
