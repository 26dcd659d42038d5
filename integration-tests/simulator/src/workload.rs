//! A model that computes nothing: its units, its passes, and what they enqueue.

use std::fmt;
use std::sync::Arc;

use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice};
use zero_alloc::host::HostStream;
use zero_alloc::schedule::Work;
use zero_alloc::{Block, Pool, Purpose};
use zero_shard::{ParamSpec, TensorCut, UnitSpec};
use zero_trainer::{
    Batch, BatchAt, Grad, InitialWeights, Model, ModelError, ModelRanks, Pass, Workload,
};

/// The label of a pass. Its [`Work::class`] is [`pass_class`].
pub(crate) const PASS: &str = "pass";

/// The type of a block's output.
pub(crate) const OUTPUT: DType = DType::Bf16;

/// The computation of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PassKind {
    Embedding,
    Block,
    Head,
}

/// The class of a pass's operations.
pub(crate) fn pass_class(kind: PassKind, backward: bool) -> u32 {
    2 * kind as u32 + u32::from(backward)
}

/// How tensor parallelism cuts a parameter.
pub(crate) type Cut = Arc<dyn Fn(&ParamSpec) -> TensorCut + Send + Sync>;

/// Units, passes and activations of a transformer, for schedules.
#[derive(Clone)]
pub(crate) struct ShapeWorkload {
    pub(crate) units: Vec<UnitSpec>,
    pub(crate) passes: Vec<Pass>,
    /// How tensor parallelism cuts a parameter.
    pub(crate) cut: Cut,
    /// Whether backward computes the forward of a block again, with its sums.
    pub(crate) recompute: bool,
    /// Whether a pass that alone has a unit's gradient writes it, and does not add to zeros.
    pub(crate) writes_grads: bool,
}

impl ShapeWorkload {
    fn kind(&self, pass: usize) -> PassKind {
        match pass {
            _ if pass + 1 == self.passes.len() => PassKind::Head,
            0 => PassKind::Embedding,
            _ => PassKind::Block,
        }
    }

    /// Whether only `pass` adds to the gradient of `unit`.
    fn alone(&self, pass: usize, unit: usize) -> bool {
        let mut passes = self.passes.iter().enumerate();
        passes.all(|(other, p)| other == pass || !p.grads.contains(&unit))
    }
}

impl<D: Device<Stream = HostStream>> Workload<D> for ShapeWorkload {
    fn units(&self) -> Vec<UnitSpec> {
        self.units.clone()
    }

    fn passes(&self) -> Vec<Pass> {
        self.passes.clone()
    }

    fn tensor_cut(&self, param: &ParamSpec) -> TensorCut {
        (self.cut)(param)
    }

    fn model(
        &self,
        pool: &Pool<D>,
        compute: &HostStream,
        ranks: &ModelRanks<D>,
    ) -> Result<Box<dyn Model<D>>, ModelError> {
        let sequence_ranks = ranks.sequence.as_ref().map_or(1, |comm| comm.world_size());
        let allocate = |elems, dtype| pool.allocate(elems, dtype, Purpose::Activations, compute);
        Ok(Box::new(ShapeModel {
            loss: allocate(1, DType::F64)?,
            output: allocate(2 * sequence_ranks.max(1), OUTPUT)?,
            ranks: ranks.clone(),
            workload: self.clone(),
        }))
    }

    fn weights(&self) -> Result<Box<InitialWeights<'_>>, ModelError> {
        Err("the model of a schedule has no weights".into())
    }

    fn batch(&self, _at: BatchAt, _batch: &mut Batch) -> Result<(), ModelError> {
        Ok(())
    }
}

struct ShapeModel<D: Device> {
    loss: Block<D>,
    /// As few elements as its exchanges need: their sizes are set when a step is simulated, so one
    /// schedule is that of all micro-batches.
    output: Block<D>,
    ranks: ModelRanks<D>,
    workload: ShapeWorkload,
}

impl<D: Device<Stream = HostStream>> ShapeModel<D> {
    /// Enqueues a pass: one operation, or as many as it has exchanges with the ranks that share its
    /// micro-batch, each before one. Tensor parallelism sums outputs, twice in each forward and
    /// backward of a block; ranks that share sequences exchange what attention reads and writes.
    fn enqueue(&self, stream: &HostStream, pass: usize, backward: bool) -> Result<(), ModelError> {
        let kind = self.workload.kind(pass);
        let class = pass_class(kind, backward);
        let of_block = match backward && self.workload.recompute {
            true => 4,
            false => 2,
        };
        let sums = match (&self.ranks.tensor, kind) {
            (None, _) => 0,
            (Some(_), PassKind::Block) => of_block,
            (Some(_), PassKind::Embedding | PassKind::Head) => 1,
        };
        let exchanges = match (&self.ranks.sequence, kind) {
            (Some(_), PassKind::Block) => of_block,
            _ => 0,
        };
        let parts = sums.max(exchanges).max(1);
        for part in 0..parts {
            let work = Work::bytes(parts).class(class);
            stream.enqueue_sized(PASS, work, || Ok(()))?;
            // SAFETY: no operation of a schedule accesses memory.
            let output = unsafe { self.output.slice() };
            if let Some(tensor) = &self.ranks.tensor
                && part < sums
            {
                let output = output.slice(0..1);
                tensor.all_reduce(stream, output, output, zero_comm::ReduceOp::Sum)?;
            }
            if let Some(sequence) = &self.ranks.sequence
                && part < exchanges
            {
                let ranks = sequence.world_size();
                let [send, recv] = [0..ranks, ranks..2 * ranks].map(|range| output.slice(range));
                sequence.all_to_all(stream, send, recv)?;
            }
        }
        Ok(())
    }
}

// SAFETY: its operations access no memory.
unsafe impl<D: Device<Stream = HostStream>> Model<D> for ShapeModel<D> {
    fn set_batch(&mut self, _stream: &HostStream, _batch: &Batch) -> Result<(), ModelError> {
        Ok(())
    }

    fn forward(
        &mut self,
        stream: &HostStream,
        pass: usize,
        _params: &[AnySlice],
    ) -> Result<(), ModelError> {
        self.enqueue(stream, pass, false)
    }

    fn backward(
        &mut self,
        stream: &HostStream,
        pass: usize,
        _params: &[AnySlice],
        _grads: &[Grad],
        _loss_scale: DeviceSlice<f64>,
    ) -> Result<(), ModelError> {
        self.enqueue(stream, pass, true)
    }

    fn writes_grad(&self, pass: usize, unit: usize) -> bool {
        self.workload.writes_grads && self.workload.alone(pass, unit)
    }

    unsafe fn loss(&self) -> DeviceSlice<f64> {
        // SAFETY: no operation of a schedule accesses memory.
        let loss = unsafe { self.loss.slice() };
        // SAFETY: the block has one element of this type.
        unsafe { DeviceSlice::from_raw_parts(loss.as_ptr().cast(), 1, loss.device()) }
    }
}

impl fmt::Debug for ShapeWorkload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (units, passes) = (self.units.len(), self.passes.len());
        write!(f, "ShapeWorkload({units} units, {passes} passes)")
    }
}
