//! What one rank works with: its streams, memory, communicator and kernels, and the layout that all share.

use std::sync::Arc;
use std::time::Duration;

use zero_alloc::Pool;
use zero_alloc::device::{DType, Device, DeviceError, Memory, Stream};
use zero_alloc::host::Timeline;
use zero_comm::{Communicator, PrefetchOptions};
use zero_kernels::Kernels;
use zero_optim::OptimizerConfig;
use zero_shard::{Layout, Widths, ZeroStage};

use super::recorder::Record;
use crate::error::TrainError;
use crate::model::Pass;

/// What all ranks of a run agree on.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What is sharded.
    pub stage: ZeroStage,
    /// Type of parameters, and of gradients on their way.
    pub dtype: DType,
    /// Micro-batches of a step.
    pub grad_accum_steps: usize,
    /// Elements of a gradient bucket.
    pub bucket_capacity_elems: usize,
    /// Whether communication runs beside compute. Off, each waits for the other, and nothing is gathered ahead.
    pub overlap: bool,
    /// How stage 3 gathers units.
    pub prefetch: PrefetchOptions,
    /// The optimizer.
    pub rules: OptimizerConfig,
    /// Whether steps are recorded into graphs of the device, from the third on: on CUDA, at stages 0 to 2.
    pub graphs: bool,
    /// The longest that a rank waits for the others in a collective.
    pub limit: Duration,
}

impl Settings {
    /// How long the host waits for a stream: longer than a collective on it takes to say which rank did not come.
    pub fn host_limit(&self) -> Duration {
        self.limit.saturating_mul(2)
    }

    /// The dtype in which gradients are kept until the step: fp32 where several micro-batches are summed.
    pub fn grad_dtype(&self) -> DType {
        if self.grad_accum_steps > 1 { DType::F32 } else { self.dtype }
    }

    /// Bytes an element, for the formulas.
    pub fn widths(&self) -> Widths {
        Widths::adam(self.dtype.size_bytes() as u64, self.grad_accum_steps as u64)
    }
}

/// An operation of the host in a stream.
pub type HostOp = Box<dyn FnOnce() -> Result<(), DeviceError> + Send>;

/// How the host takes part in what a device's streams do.
pub struct HostSide<D: Device> {
    /// Memory that operations of the host use, and the device's copies.
    pub memory: Arc<dyn Memory>,
    /// Enqueues an operation of the host on a stream, under a label. It must not wait for the device.
    pub enqueue: fn(&D::Stream, &'static str, HostOp) -> Result<(), DeviceError>,
    /// Records a graph, where the device has such.
    pub record: Option<Record<D>>,
}

/// One rank of a run.
pub struct Rank<D: Device> {
    /// The group of ranks.
    pub comm: Arc<dyn Communicator<D>>,
    /// Operations on flat ranges.
    pub kernels: Arc<dyn Kernels<D>>,
    /// Where all memory comes from.
    pub pool: Pool<D>,
    /// The host's part in the streams.
    pub host: HostSide<D>,
    /// Forward, backward and the optimizer run here.
    pub compute: D::Stream,
    /// Collectives run here, beside compute, ordered by events alone.
    pub comm_stream: D::Stream,
    /// What ran when on the two streams.
    pub timeline: Timeline,
    /// Who owns what.
    pub layout: Arc<Layout>,
    /// The passes of the model.
    pub passes: Vec<Pass>,
    /// What all ranks agree on.
    pub settings: Settings,
}

impl<D: Device> Rank<D> {
    /// A rank on `device`, whose operations `timeline` sees, with streams and a pool of its own. `parts` makes the
    /// kernels, on the compute stream, and says how the host takes part.
    ///
    /// # Errors
    /// The device refused a stream, or `parts` failed.
    pub fn new(
        device: D,
        timeline: Timeline,
        comm: Arc<dyn Communicator<D>>,
        layout: Arc<Layout>,
        passes: Vec<Pass>,
        settings: &Settings,
        parts: impl FnOnce(&D, &D::Stream) -> Result<(Arc<dyn Kernels<D>>, HostSide<D>), TrainError>,
    ) -> Result<Self, TrainError> {
        let index = comm.rank();
        let compute = device.create_stream(&format!("rank {index} compute"))?;
        let comm_stream = device.create_stream(&format!("rank {index} comm"))?;
        let (kernels, host) = parts(&device, &compute)?;
        let pool = Pool::new(device, usize::MAX);
        Ok(Self {
            comm,
            kernels,
            pool,
            host,
            compute,
            comm_stream,
            timeline,
            layout,
            passes,
            settings: settings.clone(),
        })
    }

    /// Elements of `unit` that belong to parameters.
    pub fn numel(&self, unit: usize) -> usize {
        self.layout.units()[unit].numel_elems as usize
    }

    /// How many units.
    pub fn units(&self) -> usize {
        self.layout.units().len()
    }

    /// Units whose gradient is complete when the backward of pass `pass` has run (backward goes from the last
    /// pass to the first).
    pub fn complete_after(&self, pass: usize) -> impl Iterator<Item = usize> + '_ {
        let grads = |p: usize| self.passes[p].grads.iter().copied();
        grads(pass).filter(move |unit| !(0..pass).any(|earlier| grads(earlier).any(|u| u == *unit)))
    }

    /// Blocks the host until both streams have run dry.
    ///
    /// # Errors
    /// The first error of a stream, or the limit passed.
    pub fn synchronize(&self) -> Result<(), TrainError> {
        self.compute.synchronize(self.settings.host_limit())?;
        Ok(self.comm_stream.synchronize(self.settings.host_limit())?)
    }
}
