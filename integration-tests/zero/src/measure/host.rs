//! The figures of a host that trains.

use std::num::NonZero;
use std::time::Duration;

use zero_alloc::device::{DType, Device, Stream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_alloc::{Pool, Purpose};
use zero_comm::threads::{ThreadsComm, World};
use zero_comm::{CommOptions, Communicator};
use zero_models::ops::activation::Activation;
use zero_models::ops::{Threads, linear};
use zero_simulator::Machine;

use super::{LEAST_RUNS, median, median_s, progress};
use crate::error::CliError;
use crate::memory;

/// Rows, and columns and rows of the weight, of the product: those of a block of GPT-2 124M.
const PRODUCT: [usize; 3] = [1024, 3072, 768];
/// Rows and columns of the activation.
const GELU: [usize; 2] = [256, 3072];
/// More than caches hold, on most hosts.
const COPY_BYTES: usize = 256 << 20;
const GATHER_BYTES: usize = 64 << 20;
const GATHERS: usize = 4;
const LIMIT: Duration = Duration::from_secs(120);

/// Measures all but the disk.
pub(super) fn measure() -> Result<Machine, CliError> {
    let cores = cores();
    progress("products");
    let peak_flops = product_flops(cores)?;
    progress("elementwise operations");
    let elementwise = elementwise_bytes_per_s(cores)?;
    progress("memory");
    let memory = memory_bytes_per_s();
    let of_one_thread = copied_bytes_per_s(1);
    progress("collectives of ranks");
    let link = gathered_bytes_per_s(cores.max(2))?;
    Ok(Machine {
        name: name(),
        peak_flops,
        memory_bytes_per_s: memory,
        memory_bytes: memory::free_bytes().unwrap_or(u64::MAX) as f64,
        sms: cores as f64,
        node_gpus: cores,
        link_bytes_per_s: link,
        network_bytes_per_s: link,
        host_link_bytes_per_s: of_one_thread,
        host_memory_bytes_per_s: memory,
        // Measured for any machine.
        disk_bytes_per_s: 1.0,
        cores: Some(cores),
        elementwise_bytes_per_s: Some(elementwise),
        measured: true,
    })
}

/// The cores that this process may use.
pub(super) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// Bytes per second that all cores read and write.
pub(super) fn memory_bytes_per_s() -> f64 {
    copied_bytes_per_s(cores())
}

/// The processor's name.
pub(super) fn name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    match model {
        Some((_, name)) if !name.trim().is_empty() => name.trim().to_owned(),
        _ => "host".to_owned(),
    }
}

/// Operations per second of the products of a run, on all cores.
fn product_flops(cores: usize) -> Result<f64, CliError> {
    let [m, n, k] = PRODUCT;
    let threads = Threads::new(cores).map_err(CliError::failure)?;
    let mut y = vec![0.0; m * n];
    let x = vec![0.5; m * k];
    let w = vec![0.25; k * n];
    let seconds = median_s(|| {
        threads.run(|| linear::product(&mut y, &x, &w, n, None));
        Ok::<_, CliError>(())
    })?;
    Ok(2.0 * (m * n * k) as f64 / seconds)
}

/// Bytes per second that the activation of a block of GPT-2 124M reads and writes, on all cores.
fn elementwise_bytes_per_s(cores: usize) -> Result<f64, CliError> {
    let threads = Threads::new(cores).map_err(CliError::failure)?;
    let x = vec![0.5; GELU[0] * GELU[1]];
    let mut y = x.clone();
    let seconds = median_s(|| {
        threads.run(|| Activation::GeluNew.forward(&mut y, &x));
        Ok::<_, CliError>(())
    })?;
    let moved = 2 * size_of::<f32>() * y.len();
    Ok(moved as f64 / seconds)
}

/// `bytes`, or less where `buffers` of them would take more than a quarter of the free memory.
fn at_most(bytes: usize, buffers: usize) -> usize {
    let free = memory::free_bytes().unwrap_or(u64::MAX) as usize;
    bytes.min(free / 4 / buffers).max(1 << 20)
}

/// Bytes per second that `threads` threads read and write.
fn copied_bytes_per_s(threads: usize) -> f64 {
    let bytes = at_most(COPY_BYTES, 2);
    let from = vec![1u8; bytes];
    let mut to = vec![0u8; bytes];
    let part = bytes.div_ceil(threads);
    let copy = || {
        std::thread::scope(|scope| {
            for (to, from) in to.chunks_mut(part).zip(from.chunks(part)) {
                scope.spawn(|| to.copy_from_slice(from));
            }
        });
        Ok::<_, std::convert::Infallible>(())
    };
    let Ok(seconds) = median_s(copy);
    2.0 * bytes as f64 / seconds
}

/// Bytes per second that a rank of `ranks` sends in a gather between threads.
fn gathered_bytes_per_s(ranks: usize) -> Result<f64, CliError> {
    let bytes = at_most(GATHER_BYTES, ranks);
    let comms = World::new(ranks, CommOptions::default()).map_err(CliError::failure)?;
    let seconds = std::thread::scope(|scope| {
        let all: Vec<_> = comms
            .into_iter()
            .map(|comm| scope.spawn(move || gathers_s(&comm, bytes)))
            .collect();
        let all = all.into_iter().map(|rank| match rank.join() {
            Ok(seconds) => seconds,
            Err(_) => Err(failure!("a rank panicked")),
        });
        all.collect::<Result<Vec<_>, _>>()
    })?;
    let part = (ranks - 1) as f64 / ranks as f64;
    Ok(bytes as f64 * part / median(seconds))
}

/// The median of the seconds of one rank's gathers. All ranks run equally many.
fn gathers_s(comm: &ThreadsComm, bytes: usize) -> Result<f64, CliError> {
    let device = HostDevice::new();
    let stream: HostStream = device.create_stream("gather").map_err(CliError::failure)?;
    let pool = Pool::new(device.clone(), usize::MAX);
    let ranks = Communicator::<HostDevice>::world_size(comm);
    let own = bytes / size_of::<f32>() / ranks;
    let block = pool
        .allocate(own * ranks, DType::F32, Purpose::Workspace, &stream)
        .map_err(CliError::failure)?;
    // SAFETY: the block outlives the gathers, each of which is waited for.
    let whole = unsafe { block.slice() };
    device
        .fill_zero(&stream, whole)
        .map_err(CliError::failure)?;
    let rank = Communicator::<HostDevice>::rank(comm);
    let send = whole.slice(rank * own..(rank + 1) * own);
    let mut seconds = Vec::new();
    for run in 0..=LEAST_RUNS * GATHERS {
        let start = std::time::Instant::now();
        comm.all_gather(&stream, send, whole)
            .map_err(CliError::failure)?;
        stream.synchronize(LIMIT).map_err(CliError::failure)?;
        // The first one also touches the memory.
        if run > 0 {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    Ok(median(seconds))
}
