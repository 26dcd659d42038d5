//! The pipelined update of optimizer state on NVMe beside what the disk allows: as many bytes read
//! and written at the same time by our store, from memory that nothing else touches, and by fio, in
//! turn, in one run. Usage: `offload_step FOLDER [MILLIONS_OF_ELEMENTS [ROUNDS]]`.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use zero_alloc::device::{AnySlice, DType, Device, Reduced, Stream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_alloc::swap::{SwapBuffer, SwapFile, SwapOptions};
use zero_alloc::{Pool, Purpose};
use zero_kernels::host::HostKernels;
use zero_optim::{
    Divisor, GatheredStats, OptimizerConfig, RankStats, Segment, ShardedOptimizer, StateHome,
    UnitSlices,
};

const LIMIT: Duration = Duration::from_secs(600);
/// Elements of a piece, and its bytes: an fp32 master and two moments each.
const PIECE: usize = 1 << 20;
const PIECE_BYTES: usize = 12 * PIECE;
const BUFFERS: usize = 4;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let dir = args
        .next()
        .ok_or("usage: offload_step FOLDER [MILLIONS_OF_ELEMENTS [ROUNDS]]")?;
    let millions = args.next().map_or(Ok(128), |text| text.parse::<usize>())?;
    let rounds = args.next().map_or(Ok(5), |text| text.parse::<usize>())?;
    let pieces = (millions * 1_000_000).div_ceil(PIECE).max(1);
    println!(
        "{pieces} pieces of {PIECE} elements, {} MB read and as many written",
        pieces * PIECE_BYTES / 1_000_000
    );
    let mut step = Step::new(Path::new(&dir), pieces)?;
    let mut disk = Disk::new(Path::new(&dir), pieces)?;
    step.run()?;
    disk.run()?;
    fio(&dir, pieces * PIECE_BYTES)?;
    let mut ratios = Vec::new();
    let mut of_fio = Vec::new();

    for round in 1..=rounds {
        let fio = fio(&dir, pieces * PIECE_BYTES)?;
        let disk = disk.run()?;
        let step = step.run()?;
        let rate = |time: Duration| (2 * pieces * PIECE_BYTES) as f64 / time.as_secs_f64() / 1e9;
        println!(
            "round {round}: fio {:.2} GB/s, transfers {:.2}, step {:.2}",
            rate(fio),
            rate(disk),
            rate(step)
        );
        ratios.push(disk.as_secs_f64() / step.as_secs_f64());
        of_fio.push(fio.as_secs_f64() / step.as_secs_f64());
    }

    let median = |mut ratios: Vec<f64>| {
        ratios.sort_by(f64::total_cmp);
        ratios[rounds / 2]
    };

    println!(
        "step / transfers {:.2}, step / fio {:.2}, medians of {rounds} rounds",
        median(ratios),
        median(of_fio)
    );
    Ok(())
}

/// The time of one fio job that reads and one that writes at the same time.
fn fio(dir: &str, bytes: usize) -> Result<Duration, Box<dyn Error>> {
    let options = SwapOptions::default();
    let all = [
        "--output-format=json",
        "--ioengine=io_uring",
        "--direct=1",
        "--fixedbufs=1",
    ]
    .map(String::from);

    let sizes = [
        format!("--directory={dir}"),
        format!("--bs={}", options.request_bytes),
        format!("--iodepth={}", options.queue_depth),
        format!("--size={bytes}"),
    ];

    let jobs = [
        "--name=offload_step_r",
        "--rw=read",
        "--name=offload_step_w",
        "--rw=write",
    ]
    .map(String::from);

    // Options before the first name are those of both jobs only in a file, so they are repeated.
    let [read, rw_read, write, rw_write] = jobs;
    let job = |name, rw| [&[name, rw][..], &all[1..], &sizes].concat();
    let args = [
        vec![all[0].clone()],
        job(read, rw_read),
        job(write, rw_write),
    ]
    .concat();
    let out = std::process::Command::new("fio")
        .args(args)
        .output()
        .map_err(|error| format!("fio: {error}; install it (apt-get install fio)"))?;
    for file in ["offload_step_r.0.0", "offload_step_w.0.0"] {
        std::fs::remove_file(Path::new(dir).join(file))?;
    }
    let out: serde_json::Value = serde_json::from_slice(&out.stdout)?;
    let ms = |job: usize, what: &str| out["jobs"][job][what]["runtime"].as_u64();
    let read = ms(0, "read").ok_or("fio failed")?;
    let write = ms(1, "write").ok_or("fio failed")?;

    Ok(Duration::from_millis(read.max(write)))
}

/// An optimizer with its state in a file, bf16 parameters and gradients.
struct Step {
    stream: HostStream,
    optimizer: ShardedOptimizer<HostDevice>,
    grad: AnySlice,
    param: AnySlice,
}

impl Step {
    fn new(dir: &Path, pieces: usize) -> Result<Self, Box<dyn Error>> {
        let device = HostDevice::new();
        let pool = Pool::new(device.clone(), usize::MAX);
        let stream = device.create_stream("update")?;
        let elems = pieces * PIECE;
        let home = StateHome::Nvme {
            dir: dir.to_owned(),
            options: SwapOptions::default(),
            buffers: BUFFERS,
        };

        let threads = std::thread::available_parallelism()?.get().div_ceil(4);
        let kernels = Arc::new(HostKernels::new(threads)?);
        let optimizer = ShardedOptimizer::builder(&pool, kernels, &stream)
            .config(OptimizerConfig::default().sub_group_elems(PIECE))
            .param_dtype(DType::Bf16)
            .offload(home)
            .build(vec![Segment::shard("all", 0..elems)])?;

        let buffer = |purpose| -> Result<AnySlice, Box<dyn Error>> {
            let block = pool.allocate(elems, DType::Bf16, purpose, &stream)?;
            // SAFETY: never freed; only the update's stream uses it.
            let slice = unsafe { block.slice() };
            std::mem::forget(block);
            device.fill_zero(&stream, slice)?;
            Ok(slice)
        };

        let grad = buffer(Purpose::Grads)?;
        let param = buffer(Purpose::Params)?;
        Ok(Self {
            stream,
            optimizer,
            grad,
            param,
        })
    }

    /// The time of an update, from the decision until all is written.
    fn run(&mut self) -> Result<Duration, Box<dyn Error>> {
        let Self {
            stream,
            optimizer,
            grad,
            param,
            ..
        } = self;

        // SAFETY: written before this point of the stream.
        let grad = unsafe { Reduced::new(*grad, stream.record()?) };
        let stats = RankStats::new(&[], 0.0);
        stream.synchronize(LIMIT)?;
        let start = Instant::now();
        optimizer.decide(
            stream,
            GatheredStats::new(&[stats], Divisor::MicroBatches(1)),
            LIMIT,
        )?;

        optimizer.enqueue_unit_update(
            stream,
            0,
            &UnitSlices {
                grad: &grad,
                param: &[(*param, 0)],
            },
        )?;

        stream.synchronize(LIMIT)?;
        optimizer.wait_for_transfers(LIMIT)?;
        Ok(start.elapsed())
    }
}

/// The same transfers without an update: reads and writes are independent of one another.
struct Disk {
    file: SwapFile,
    streams: [HostStream; 2],
    /// The buffers of the reads and of the writes.
    buffers: [Vec<SwapBuffer>; 2],
    pieces: usize,
}

impl Disk {
    fn new(dir: &Path, pieces: usize) -> Result<Self, Box<dyn Error>> {
        let device = HostDevice::new();
        let pool = Pool::new(device.clone(), usize::MAX);
        let streams = [
            device.create_stream("reads")?,
            device.create_stream("writes")?,
        ];
        let file = SwapFile::create(dir, (pieces * PIECE_BYTES) as u64, SwapOptions::default())?;
        let buffer = |stream| SwapBuffer::allocate(&pool, PIECE_BYTES, Purpose::Workspace, stream);
        let of = |stream| {
            (0..BUFFERS)
                .map(|_| buffer(stream))
                .collect::<Result<Vec<_>, _>>()
        };
        let buffers = [of(&streams[0])?, of(&streams[1])?];
        Ok(Self {
            file,
            streams,
            buffers,
            pieces,
        })
    }

    fn run(&mut self) -> Result<Duration, Box<dyn Error>> {
        let lanes = [self.file.lane()?, self.file.lane()?];
        for (lane, buffers) in lanes.iter().zip(&self.buffers) {
            lane.register(buffers);
        }
        let start = Instant::now();
        for piece in 0..self.pieces {
            let offset = (piece * PIECE_BYTES) as u64;
            let slot = piece % BUFFERS;
            // SAFETY: only this stream uses it; `run` waits for the stream.
            let to = unsafe { self.buffers[0][slot].slice() };
            // SAFETY: as above.
            let from = unsafe { self.buffers[1][slot].slice() };
            lanes[0].read(&self.streams[0], &[(offset, to)])?;
            lanes[1].write(&self.streams[1], &[(offset, from)])?;
        }
        self.streams
            .iter()
            .try_for_each(|stream| stream.synchronize(LIMIT))?;
        Ok(start.elapsed())
    }
}
