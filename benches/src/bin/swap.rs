//! Times reads and writes of a swap file beside `fio` on the same disk, in turn in one run.
//!
//! ```text
//! cargo run -p benches --release --bin swap -- [DIR] [MIB] [ROUNDS]
//! ```
//!
//! Each round, for each request size and queue depth: writes and reads of the whole file by
//! io_uring, by the thread pool and by fio (`ioengine=io_uring direct=1 fixedbufs=1`, sequential,
//! the same size, depth and file size), in an order that rotates. The first round only lays out the
//! files. One operation of ours transfers 48 MiB (4 Mi parameters' fp32 state) on one lane: from
//! and to as much memory as fio uses (depth times request, so that caches help both alike), and, as
//! `pieces`, from and to 48 MiB, as an optimizer does. The output has medians in GB/s, and the
//! medians of the rounds' ratios. Linux, with fio (`apt-get install fio`).

#[cfg(not(target_os = "linux"))]
fn main() {
    eprintln!("the swap file needs Linux");
}

#[cfg(target_os = "linux")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    linux::main()
}

#[cfg(target_os = "linux")]
mod linux {
    use std::error::Error;
    use std::path::Path;
    use std::process::Command;
    use std::time::{Duration, Instant};

    use zero_alloc::device::{AnySlice, Device, Stream};
    use zero_alloc::host::{HostDevice, HostStream};
    use zero_alloc::swap::{SwapBuffer, SwapEngine, SwapFile, SwapLane, SwapOptions};
    use zero_alloc::{Pool, Purpose};

    const LIMIT: Duration = Duration::from_secs(600);
    const PIECE_BYTES: usize = 48 << 20;
    /// Bytes of a request and requests in flight.
    const CASES: [(usize, usize); 4] = [(1 << 20, 1), (1 << 20, 8), (1 << 20, 32), (64 << 10, 32)];
    const NAMES: [&str; 4] = ["io_uring", "threads", "pieces", "fio"];

    pub(super) fn main() -> Result<(), Box<dyn Error>> {
        let args: Vec<String> = std::env::args().collect();
        let dir = args.get(1).map_or_else(std::env::temp_dir, Into::into);
        let bytes = args.get(2).map_or(Ok(1024), |mib| mib.parse::<u64>())? << 20;
        let rounds: usize = args.get(3).map_or(Ok(7), |rounds| rounds.parse())?;
        println!("{} MiB, {rounds} rounds, {}", bytes >> 20, dir.display());

        let device = HostDevice::new();
        let stream = device.create_stream("swap")?;
        let pool = Pool::new(device, 2 * PIECE_BYTES);
        let buffer = SwapBuffer::allocate(&pool, PIECE_BYTES, Purpose::Workspace, &stream)?;
        // SAFETY: the buffer outlives the operations, which one stream orders.
        let piece = unsafe { buffer.slice() };

        println!(
            "requests       op     {}   each / fio",
            NAMES.map(|n| format!("{n:>9}")).join("")
        );

        for (request_bytes, depth) in CASES {
            let options = SwapOptions::default()
                .request_bytes(request_bytes)
                .queue_depth(depth);
            let engines = [SwapEngine::IoUring, SwapEngine::Threads];
            let files =
                engines.map(|engine| SwapFile::create(&dir, bytes, options.clone().engine(engine)));
            let mut lanes = Vec::new();
            for file in files {
                let file = file?;
                let lane = file.lane()?;
                lane.register(std::slice::from_ref(&buffer));
                file.notices()
                    .iter()
                    .for_each(|notice| println!("{notice}"));
                lanes.push(lane);
            }
            let path = dir.join("zero-swap-fio");
            let mut rates: [[Vec<f64>; 4]; 2] = Default::default();
            for round in 0..=rounds {
                for (write, rates) in [true, false].into_iter().zip(&mut rates) {
                    for turn in 0..4 {
                        let who = (round + turn) % 4;
                        let memory = piece.slice(0..(depth * request_bytes).min(PIECE_BYTES));
                        let rate = match who {
                            0 => ours(&lanes[0], &stream, memory, bytes, write)?,
                            1 => ours(&lanes[1], &stream, memory, bytes, write)?,
                            2 => ours(&lanes[0], &stream, piece, bytes, write)?,
                            _ => fio(&path, bytes, request_bytes, depth, write)?,
                        };
                        if round > 0 {
                            rates[who].push(rate);
                        }
                    }
                }
            }
            std::fs::remove_file(&path)?;
            for (op, rates) in ["write", "read"].into_iter().zip(&rates) {
                let medians = rates
                    .each_ref()
                    .map(|rates| format!("{:9.2}", median(rates) / 1e9))
                    .join("");
                let ratios = [0, 1, 2].map(|who: usize| {
                    let ratios: Vec<_> = rates[who]
                        .iter()
                        .zip(&rates[3])
                        .map(|(ours, fio)| ours / fio)
                        .collect();
                    format!("{:5.2}", median(&ratios))
                });
                let case = format!("{} KiB x {depth}", request_bytes >> 10);
                println!("{case:<14} {op:<6} {medians}  {}", ratios.join(""));
            }
        }

        Ok(())
    }

    /// Transfers the whole file from or to `memory`, over and over; returns bytes a second.
    fn ours(
        lane: &SwapLane,
        stream: &HostStream,
        memory: AnySlice,
        bytes: u64,
        write: bool,
    ) -> Result<f64, Box<dyn Error>> {
        let len = |at: u64, end: u64, limit: usize| ((end - at).min(limit as u64)) as usize;
        let start = Instant::now();
        for first in (0..bytes).step_by(PIECE_BYTES) {
            let end = first + len(first, bytes, PIECE_BYTES) as u64;
            let range = |at| (at, memory.slice(0..len(at, end, memory.len())));
            let ranges: Vec<_> = (first..end).step_by(memory.len()).map(range).collect();
            if write {
                lane.write(stream, &ranges)?
            } else {
                lane.read(stream, &ranges)?
            }
        }
        stream.synchronize(LIMIT)?;
        Ok(bytes as f64 / start.elapsed().as_secs_f64())
    }

    /// The bytes a second that fio reports.
    fn fio(
        path: &Path,
        bytes: u64,
        request_bytes: usize,
        depth: usize,
        write: bool,
    ) -> Result<f64, Box<dyn Error>> {
        let op = if write { "write" } else { "read" };
        let output = Command::new("fio")
            .args([
                "--name=swap",
                "--ioengine=io_uring",
                "--direct=1",
                "--fixedbufs=1",
                "--output-format=json",
            ])
            .arg(format!("--filename={}", path.display()))
            .args([format!("--rw={op}"), format!("--size={bytes}")])
            .args([
                format!("--bs={request_bytes}"),
                format!("--iodepth={depth}"),
            ])
            .output()
            .map_err(|error| format!("fio: {error}; install it (apt-get install fio)"))?;

        if !output.status.success() {
            return Err(format!("fio: {}", String::from_utf8_lossy(&output.stderr)).into());
        }
        let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        report["jobs"][0][op]["bw_bytes"]
            .as_f64()
            .ok_or_else(|| "fio: no bw_bytes in its report".into())
    }

    fn median(values: &[f64]) -> f64 {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
    }
}
