//! The figures of this machine's GPUs.

use std::time::Duration;

use zero_alloc::cuda::{CudaDevice, CudaStream, PinnedMemory};
use zero_alloc::device::{AnySlice, DType, Device, DeviceError};
use zero_alloc::host::HostDevice;
use zero_alloc::{Block, Pool, Purpose};
use zero_comm::nccl::NcclCommunicator;
use zero_comm::world::Ranks;
use zero_comm::{CommOptions, Communicator};
use zero_models::cuda::matmul::{Matmul, Matrix, Product, workspace_bytes};
use zero_simulator::Machine;

use super::{LEAST_RUNS, host, median, progress};
use crate::error::CliError;
use crate::launcher::free_port;
use crate::output::counted;
use crate::settings::args::{DeviceChoice, TrainArgs};
use crate::train::backend::{self, Backend};

/// Sizes for each multiprocessor, of which an H100 has 132. Rows, columns and sums of the product:
const PRODUCT: [usize; 3] = [64, 64, 32];
/// Bytes that are copied within a GPU, between it and the host, and gathered.
const COPY_BYTES: usize = 8 << 20;
const HOST_BYTES: usize = 2 << 20;
const GATHER_BYTES: usize = 2 << 20;
const LIMIT: Duration = Duration::from_secs(60);
/// The part of a link that [`zero_simulator::ring`] counts on.
const RING_PART: f64 = 0.8;

/// Whether GPUs train on this machine.
pub(super) fn is_used(device: DeviceChoice) -> Result<bool, CliError> {
    let args = TrainArgs {
        device,
        ranks: Some(1),
        ..TrainArgs::default()
    };
    Ok(matches!(backend::choose(&args)?, Backend::Cuda { .. }))
}

/// The GPUs of this machine.
pub(super) fn names() -> Result<String, CliError> {
    let count = CudaDevice::count().map_err(CliError::failure)?;
    let first = CudaDevice::open(0).map_err(CliError::failure)?;
    Ok(format!(
        "{}, {}",
        first.name(),
        counted(count as u64, "GPU")
    ))
}

/// Measures all but the disk, on the first GPU; the links between all.
pub(super) fn measure() -> Result<Machine, CliError> {
    let gpus = CudaDevice::count().map_err(CliError::failure)?;
    let first = Gpu::open(0)?;
    progress("products");
    let peak_flops = first.product_flops()?;
    progress("memory");
    let memory = first.copied_bytes_per_s()?;
    progress("copies from and to the host");
    let host_link = first.host_bytes_per_s()?;
    let (_, memory_bytes) = first.device.memory_bytes().map_err(CliError::failure)?;
    let name = first.device.name().to_owned();
    let sms = first.sms;
    drop(first);
    let link = match gpus {
        // One GPU has no link; the figure is never used.
        0 | 1 => host_link,
        _ => {
            progress("collectives of GPUs");
            gathered_bytes_per_s(gpus, sms * GATHER_BYTES)? / RING_PART
        }
    };
    progress("memory of the host");
    Ok(Machine {
        name,
        peak_flops,
        memory_bytes_per_s: memory,
        memory_bytes: memory_bytes as f64,
        sms: sms as f64,
        node_gpus: gpus,
        link_bytes_per_s: link,
        network_bytes_per_s: link,
        host_link_bytes_per_s: host_link,
        host_memory_bytes_per_s: host::memory_bytes_per_s(),
        // Measured for any machine.
        disk_bytes_per_s: 1.0,
        cores: None,
        elementwise_bytes_per_s: None,
        measured: true,
    })
}

/// One GPU.
struct Gpu {
    device: CudaDevice,
    stream: CudaStream,
    pool: Pool<CudaDevice>,
    /// Multiprocessors.
    sms: usize,
}

impl Gpu {
    fn open(ordinal: usize) -> Result<Self, CliError> {
        let device = CudaDevice::open(ordinal).map_err(CliError::failure)?;
        Ok(Self {
            stream: device.create_stream("measure").map_err(CliError::failure)?,
            pool: Pool::new(device.clone(), usize::MAX),
            sms: device.multiprocessors().map_err(CliError::failure)?,
            device,
        })
    }

    /// Memory of zeros.
    fn zeros(&self, elems: usize, dtype: DType) -> Result<Block<CudaDevice>, CliError> {
        let block = self
            .pool
            .allocate(elems, dtype, Purpose::Workspace, &self.stream)
            .map_err(CliError::failure)?;
        // SAFETY: its users keep the block until the stream has run what they enqueue.
        let slice = unsafe { block.slice() };
        self.device
            .fill_zero(&self.stream, slice)
            .map_err(CliError::failure)?;
        Ok(block)
    }

    /// The median of the device's seconds.
    fn median_s(
        &self,
        what: &'static str,
        mut enqueue: impl FnMut() -> Result<(), DeviceError>,
    ) -> Result<f64, CliError> {
        let runs = (0..4 * LEAST_RUNS).map(|_| {
            self.stream
                .time(what, LIMIT, &mut enqueue)
                .map(|time| time.as_secs_f64())
                .map_err(CliError::failure)
        });
        runs.collect::<Result<_, _>>().map(median)
    }

    /// Operations per second of a product of bf16 matrices.
    fn product_flops(&self) -> Result<f64, CliError> {
        let [m, n, k] = PRODUCT.map(|size| size * self.sms);
        let blocks = [m * k, k * n, m * n].map(|elems| self.zeros(elems, DType::Bf16));
        let [x, w, y] = blocks;
        let blocks = [x?, w?, y?];
        let bytes = workspace_bytes((k * n) as u64) as usize;
        let workspace = self.zeros(bytes, DType::U8)?;
        // SAFETY: the blocks outlive the products, each of which is waited for.
        let [x, w, y] = [0, 1, 2].map(|i| unsafe { blocks[i].slice() });
        // SAFETY: as above.
        let matmul = Matmul::new(&self.device, unsafe { workspace.slice() });
        let matmul = matmul.map_err(CliError::failure)?;
        let x = Matrix::new(x, k);
        let w = Matrix::new(w, n);
        let y = Matrix::new(y, n);
        let product = Product::new(x, w, y);
        // The first one chooses an algorithm.
        matmul
            .run(&self.stream, &product)
            .map_err(CliError::failure)?;
        let seconds = self.median_s("product", || {
            matmul
                .run(&self.stream, &product)
                .map_err(|error| failed("product", &error))
        })?;
        Ok(2.0 * (m * n * k) as f64 / seconds)
    }

    /// Bytes per second that a copy within the GPU reads and writes.
    fn copied_bytes_per_s(&self) -> Result<f64, CliError> {
        let bytes = self.sms * COPY_BYTES;
        let blocks = [self.zeros(bytes, DType::U8)?, self.zeros(bytes, DType::U8)?];
        // SAFETY: the blocks outlive the copies, each of which is waited for.
        let [from, to] = [0, 1].map(|i| unsafe { blocks[i].slice() });
        let seconds = self.copy_s(from, to)?;
        Ok(2.0 * bytes as f64 / seconds)
    }

    /// Bytes per second to the host, whose copies are rarely faster than those from it.
    fn host_bytes_per_s(&self) -> Result<f64, CliError> {
        let bytes = self.sms * HOST_BYTES;
        let of_gpu = self.zeros(bytes, DType::U8)?;
        let memory = std::sync::Arc::new(PinnedMemory::new(&self.device));
        let host = HostDevice::new().with_memory(memory);
        let host = host.map_err(CliError::failure)?;
        let stream = host.create_stream("host").map_err(CliError::failure)?;
        let pool = Pool::new(host, usize::MAX);
        let of_host = pool
            .allocate(bytes, DType::U8, Purpose::Workspace, &stream)
            .map_err(CliError::failure)?;
        // SAFETY: the blocks outlive the copies, each of which is waited for.
        let from = unsafe { of_gpu.slice() };
        // SAFETY: as above.
        let to = unsafe { of_host.slice() };
        Ok(bytes as f64 / self.copy_s(from, to)?)
    }

    fn copy_s(&self, from: AnySlice, to: AnySlice) -> Result<f64, CliError> {
        self.median_s("copy", || self.device.copy(&self.stream, from, to))
    }
}

/// Bytes per second that a GPU sends in a gather of all GPUs.
fn gathered_bytes_per_s(gpus: usize, bytes: usize) -> Result<f64, CliError> {
    let port = free_port().map_err(CliError::failure)?;
    let seconds = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..gpus)
            .map(|rank| scope.spawn(move || gather_s(rank, gpus, port, bytes)))
            .collect();
        let seconds = ranks.into_iter().map(|rank| match rank.join() {
            Ok(seconds) => seconds,
            Err(_) => Err(failure!("a rank panicked")),
        });
        seconds.collect::<Result<Vec<_>, _>>()
    })?;
    let part = (gpus - 1) as f64 / gpus as f64;
    Ok(bytes as f64 * part / median(seconds))
}

/// The median of the seconds of one GPU's gathers.
fn gather_s(rank: usize, gpus: usize, port: u16, bytes: usize) -> Result<f64, CliError> {
    let gpu = Gpu::open(rank)?;
    let ranks = Ranks::new(rank, gpus, rank, "127.0.0.1", port).one_machine(true);
    let options = CommOptions::default().limit(LIMIT);
    let comm = NcclCommunicator::join(&gpu.device, &ranks, options).map_err(CliError::failure)?;
    let own = bytes / size_of::<f32>() / gpus;
    let block = gpu.zeros(own * gpus, DType::F32)?;
    // SAFETY: the block outlives the gathers, each of which is waited for.
    let whole = unsafe { block.slice() };
    let send = whole.slice(rank * own..(rank + 1) * own);
    gpu.median_s("gather", || {
        comm.all_gather(&gpu.stream, send, whole)
            .map_err(|error| failed("gather", &error))
    })
}

fn failed(call: &'static str, error: &dyn std::fmt::Display) -> DeviceError {
    DeviceError::Driver {
        call,
        message: error.to_string(),
    }
}
