//! The interface of a model: units of parameters, and passes that read them.
//!
//! A [`Model`] computes and owns activations only. The stages pass it parameters before each pass
//! and read gradients after it, so that they decide what is stored, gathered, reduced and freed. A
//! pass usually reads one unit; the head of a GPT-2 with a tied embedding reads two.

use std::error::Error;
use std::ops::Range;
use std::sync::Arc;

use zero_alloc::device::{AnySlice, Device, DeviceSlice};
use zero_comm::Communicator;

use crate::batch::Batch;

/// The error of a model or of its data, in whatever type they have. Its text is the whole message.
pub type ModelError = Box<dyn Error + Send + Sync>;

/// A part of the model between two points where parameters may be gathered and freed. Backward runs
/// the passes in reverse; in the last pass, whose backward follows its forward, both read the same
/// units.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// Units whose parameters the forward reads.
    pub forward_reads: Vec<usize>,
    /// Units whose parameters the backward reads.
    pub backward_reads: Vec<usize>,
    /// Units to whose gradients the backward adds.
    pub grads: Vec<usize>,
}

impl Pass {
    /// A pass that reads one unit, forward and backward, and adds to its gradient.
    pub fn of_unit(unit: usize) -> Self {
        Self {
            forward_reads: vec![unit],
            backward_reads: vec![unit],
            grads: vec![unit],
        }
    }
}

/// The place of a unit's gradient in a backward pass.
#[derive(Clone, Copy, Debug)]
pub enum Grad {
    /// fp32 sums, to which the pass adds.
    Add(DeviceSlice<f32>),
    /// The gradient in the dtype of communication, which the pass writes: every element of every
    /// tensor of the unit exactly once, each an fp32 sum rounded once. Only if
    /// [`Model::writes_grad`] returns true for the pass and the unit.
    Write(AnySlice),
}

impl Grad {
    /// The elements of `range`.
    ///
    /// # Panics
    /// `range` is not within the gradient, as with a Rust slice.
    #[must_use]
    pub fn slice(self, range: Range<usize>) -> Self {
        match self {
            Self::Add(sums) => Self::Add(sums.slice(range)),
            Self::Write(out) => Self::Write(out.slice(range)),
        }
    }

    /// The elements: sums, or undefined before the pass.
    pub fn elements(self) -> AnySlice {
        match self {
            Self::Add(sums) => sums.erase(),
            Self::Write(out) => out,
        }
    }

    /// The sums to which a pass adds.
    ///
    /// # Errors
    /// [`Self::Write`]: the pass cannot write a gradient. `what` names the pass.
    pub fn sums(self, what: &str) -> Result<DeviceSlice<f32>, ModelError> {
        match self {
            Self::Add(sums) => Ok(sums),
            Self::Write(_) => Err(ModelError::from(format!(
                "{what}: this pass only adds to fp32 gradients; pass Grad::Add unless Model::writes_grad returns true"
            ))),
        }
    }
}

/// The ranks with which a rank computes a micro-batch. A model enqueues their collectives on the
/// stream of its passes, all ranks in the same order.
pub struct ModelRanks<D: Device> {
    /// Each has a part of the parameters, as [`Workload::tensor_cut`](crate::Workload::tensor_cut)
    /// cuts them.
    pub tensor: Option<Arc<dyn Communicator<D>>>,
    /// Each computes a part of the tokens of each sequence: with T tokens and S ranks, rank s
    /// tokens [s T / S, (s + 1) T / S).
    pub sequence: Option<Arc<dyn Communicator<D>>>,
}

impl<D: Device> ModelRanks<D> {
    /// Checks that there are no other ranks, for a model that computes whole micro-batches.
    ///
    /// # Errors
    /// Ranks share sequences.
    pub fn check_alone(&self) -> Result<(), ModelError> {
        match (&self.sequence, &self.tensor) {
            (None, None) => Ok(()),
            (None, Some(comm)) => Err(ModelError::from(format!(
                "{} ranks have parts of the parameters, and this model computes whole ones: set MeshSettings::tensor_ranks to None",
                comm.world_size()
            ))),
            (Some(comm), _) => Err(ModelError::from(format!(
                "{} ranks share each sequence, and this model computes whole sequences: set MeshSettings::sequence_ranks to None",
                comm.world_size()
            ))),
        }
    }
}

impl<D: Device> Clone for ModelRanks<D> {
    fn clone(&self) -> Self {
        Self {
            tensor: self.tensor.clone(),
            sequence: self.sequence.clone(),
        }
    }
}

impl<D: Device> Default for ModelRanks<D> {
    /// Alone.
    fn default() -> Self {
        Self {
            tensor: None,
            sequence: None,
        }
    }
}

/// A model on a device. All calls enqueue on `stream` and return.
///
/// # Safety
/// A call uses the slices that it is passed only in operations that it enqueues on `stream`, or on
/// streams that wait for it before them and that it waits for after them: the trainer frees
/// parameters, gradients and the loss scale, or writes them, behind that point. It writes only to
/// gradients. A slice that [`Self::token_logits`] returns is valid for operations on `stream` until
/// the next call.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no model on `{D}`",
    note = "the crate documentation of zero_trainer shows a model of 60 lines"
)]
pub unsafe trait Model<D: Device>: Send {
    /// Sets the next micro-batch: that of all ranks with which this one computes it.
    ///
    /// # Errors
    /// The stream failed, or the batch has what the model does not support.
    fn set_batch(&mut self, stream: &D::Stream, batch: &Batch) -> Result<(), ModelError>;

    /// Computes pass `pass` forward; `params` are the flat parameters of its `forward_reads`, in
    /// order, in fp32, bf16 or fp16.
    ///
    /// # Errors
    /// The stream failed.
    fn forward(
        &mut self,
        stream: &D::Stream,
        pass: usize,
        params: &[AnySlice],
    ) -> Result<(), ModelError>;

    /// Computes pass `pass` backward. `params` are the flat parameters of its `backward_reads`,
    /// `grads` the flat gradients of its `grads`. Adds to them, or writes to them ([`Grad`]), the
    /// gradient of the micro-batch's loss ([`Batch::divisor`]) times `loss_scale[0]`, which is read in stream
    /// order. fp32 sums are zero before the first pass that adds to them.
    ///
    /// # Errors
    /// The stream failed.
    fn backward(
        &mut self,
        stream: &D::Stream,
        pass: usize,
        params: &[AnySlice],
        grads: &[Grad],
        loss_scale: DeviceSlice<f64>,
    ) -> Result<(), ModelError>;

    /// Whether the backward of `pass` can write the gradient of `unit`, instead of adding to it. No
    /// other pass adds to such a gradient.
    fn writes_grad(&self, _pass: usize, _unit: usize) -> bool {
        false
    }

    /// Adds the losses, in nats, of those of the first `tokens` tokens of the micro-batch that are
    /// trained, and that this rank computes, to
    /// [`Model::loss`], after its forward. `params` are the flat parameters of the `forward_reads`
    /// of the last pass. Computes no gradient. Only evaluations call it: without them a model need
    /// not have it.
    ///
    /// # Errors
    /// The stream failed, or the model has no evaluation.
    fn add_losses(
        &mut self,
        _stream: &D::Stream,
        _params: &[AnySlice],
        _tokens: usize,
    ) -> Result<(), ModelError> {
        Err("this model computes no validation loss: implement Model::add_losses".into())
    }

    /// Enqueues the logits of token `token` of the micro-batch, after its forward, and returns them:
    /// `[vocab]`, in memory of the model that its next call may overwrite. `params` are those of
    /// [`Model::add_losses`]. Only samples of text call it, on a rank that computes the token:
    /// without them a model need not have it.
    ///
    /// # Errors
    /// The stream failed, or the model gives no logits.
    fn token_logits(
        &mut self,
        _stream: &D::Stream,
        _params: &[AnySlice],
        _token: usize,
    ) -> Result<AnySlice, ModelError> {
        Err("this model writes no text: implement Model::token_logits".into())
    }

    /// One fp64, to which each micro-batch's backward adds its loss in nats.
    ///
    /// # Safety
    /// The slice is used on the stream of the passes only, before the model is dropped.
    unsafe fn loss(&self) -> DeviceSlice<f64>;
}
