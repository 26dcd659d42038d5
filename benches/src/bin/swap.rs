//! Times reads and writes of a swap file beside `fio` on the same disk, in turn in one run.
//!
//! ```text
//! cargo run -p benches --release --bin swap -- [DIR] [MIB] [ROUNDS]
//! ```
//!
//! Each round, for each request size and queue depth: writes and reads of the whole file by io_uring, by the thread
//! pool and by fio (`ioengine=io_uring direct=1 fixedbufs=1`, sequential, the same size, depth and file size), in an
//! order that rotates. The first round only lays out the files. Ours transfers pieces of 48 MiB (4 Mi parameters' fp32
//! state) on one lane, one operation each. The output has medians in GB/s, and the median of the rounds' ratios. Linux, with
//! fio (`apt-get install fio`).

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

    use zero_alloc::device::{AnySlice, DType, Device, Stream};
    use zero_alloc::host::{HostDevice, HostStream};
    use zero_alloc::swap::{SwapEngine, SwapFile, SwapLane, SwapOptions};
    use zero_alloc::{Pool, Purpose};

    const LIMIT: Duration = Duration::from_secs(600);
    const PIECE_BYTES: usize = 48 << 20;
    /// Bytes of a request and requests in flight.
    const CASES: [(usize, usize); 5] = [(1 << 20, 1), (1 << 20, 8), (1 << 20, 32), (64 << 10, 1), (64 << 10, 32)];
    const NAMES: [&str; 3] = ["io_uring", "threads", "fio"];

    pub(super) fn main() -> Result<(), Box<dyn Error>> {
        let args: Vec<String> = std::env::args().collect();
        let dir = args.get(1).map_or_else(std::env::temp_dir, Into::into);
        let bytes = args.get(2).map_or(Ok(1024), |mib| mib.parse::<u64>())? << 20;
        let rounds: usize = args.get(3).map_or(Ok(7), |rounds| rounds.parse())?;
        println!("{} MiB, {rounds} rounds, {}", bytes >> 20, dir.display());

        let device = HostDevice::new();
        let stream = device.create_stream("swap")?;
        let pool = Pool::new(device, 2 * PIECE_BYTES);
        let block = pool.allocate(PIECE_BYTES, DType::U8, Purpose::Workspace, &stream)?;
        // SAFETY: the block outlives the operations, which one stream orders.
        let piece = unsafe { block.slice() };

        println!(
            "requests       op     {}   io_uring / fio   threads / fio",
            NAMES.map(|n| format!("{n:>9}")).join("")
        );
        for (request_bytes, depth) in CASES {
            let options = SwapOptions::default().request_bytes(request_bytes).queue_depth(depth);
            let engines = [SwapEngine::IoUring, SwapEngine::Threads];
            let files = engines.map(|engine| SwapFile::create(&dir, bytes, options.clone().engine(engine)));
            let mut lanes = Vec::new();
            for file in files {
                let file = file?;
                let lane = file.lane()?;
                lane.register(&[piece])?;
                file.notices().iter().for_each(|notice| println!("{notice}"));
                lanes.push(lane);
            }
            let path = dir.join("zero-swap-fio");
            let mut rates: [[Vec<f64>; 3]; 2] = Default::default();
            for round in 0..=rounds {
                for (write, rates) in [true, false].into_iter().zip(&mut rates) {
                    for turn in 0..3 {
                        let who = (round + turn) % 3;
                        let rate = match lanes.get(who) {
                            Some(lane) => ours(lane, &stream, piece, bytes, write)?,
                            None => fio(&path, bytes, request_bytes, depth, write)?,
                        };
                        if round > 0 {
                            rates[who].push(rate);
                        }
                    }
                }
            }
            std::fs::remove_file(&path)?;
            for (op, rates) in ["write", "read"].into_iter().zip(&rates) {
                let medians = rates.each_ref().map(|rates| format!("{:9.2}", median(rates) / 1e9)).join("");
                let ratio = |who: usize| {
                    let ratios: Vec<_> = rates[who].iter().zip(&rates[2]).map(|(ours, fio)| ours / fio).collect();
                    median(&ratios)
                };
                let case = format!("{} KiB x {depth}", request_bytes >> 10);
                println!("{case:<14} {op:<6} {medians} {:16.2} {:15.2}", ratio(0), ratio(1));
            }
        }
        Ok(())
    }

    /// Transfers the whole file; returns bytes a second.
    fn ours(
        lane: &SwapLane,
        stream: &HostStream,
        piece: AnySlice,
        bytes: u64,
        write: bool,
    ) -> Result<f64, Box<dyn Error>> {
        let start = Instant::now();
        for at in (0..bytes).step_by(piece.len()) {
            let range = [(at, piece.slice(0..(piece.len() as u64).min(bytes - at) as usize))];
            if write { lane.write(stream, &range)? } else { lane.read(stream, &range)? }
        }
        stream.synchronize(LIMIT)?;
        Ok(bytes as f64 / start.elapsed().as_secs_f64())
    }

    /// The bytes a second that fio reports.
    fn fio(path: &Path, bytes: u64, request_bytes: usize, depth: usize, write: bool) -> Result<f64, Box<dyn Error>> {
        let op = if write { "write" } else { "read" };
        let output = Command::new("fio")
            .args(["--name=swap", "--ioengine=io_uring", "--direct=1", "--fixedbufs=1", "--output-format=json"])
            .arg(format!("--filename={}", path.display()))
            .args([format!("--rw={op}"), format!("--size={bytes}")])
            .args([format!("--bs={request_bytes}"), format!("--iodepth={depth}")])
            .output()
            .map_err(|error| format!("fio: {error}; install it (apt-get install fio)"))?;
        if !output.status.success() {
            return Err(format!("fio: {}", String::from_utf8_lossy(&output.stderr)).into());
        }
        let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        report["jobs"][0][op]["bw_bytes"].as_f64().ok_or_else(|| "fio: no bw_bytes in its report".into())
    }

    fn median(values: &[f64]) -> f64 {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
    }
}
