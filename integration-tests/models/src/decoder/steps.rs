//! The passes of blocks, as steps in the order of the computation.
//!
//! A rank may share a block with others: the tokens of attention ([`super::sequence`]) and the
//! parameters ([`super::tensor`]). What it computes between two exchanges with them is one operation
//! of the stream; without other ranks a pass is one.

use std::sync::Arc;

use zero_alloc::device::{AnySlice, DeviceSlice};
use zero_alloc::host::{HostDevice, HostStream};
use zero_trainer::ModelError;

use super::engine::Engine;
use super::operations::{Backward, Branch, Forward, Operations};
use super::params::Flat;
use super::sequence_group::SequenceGroup;
use super::slices::{Activations, BlockSlices, ScratchSlices};
use super::tensor_group::TensorGroup;

/// A step. It has the parameters of the pass, and the gradient of its unit in backward.
type StepFn = Box<dyn FnOnce(&Flat<'_>, &mut [f32]) + Send>;

/// The groups of a rank.
pub(super) struct Groups {
    /// `None` if the rank has all tokens of its sequences.
    pub(super) sequence: Option<SequenceGroup>,
    /// `None` if the rank has all parameters.
    pub(super) tensor: Option<TensorGroup<HostDevice>>,
}

/// The steps of a pass.
pub(super) struct Steps<'a> {
    pub(super) engine: &'a Engine,
    pub(super) groups: &'a Groups,
    pub(super) stream: &'a HostStream,
    label: &'static str,
    pass: usize,
    params: &'a [AnySlice],
    grads: &'a [DeviceSlice<f32>],
    /// Those that are not enqueued yet.
    steps: Vec<StepFn>,
}

impl<'a> Steps<'a> {
    /// `grads` is empty in forward.
    pub(super) fn new(
        engine: &'a Engine,
        groups: &'a Groups,
        stream: &'a HostStream,
        label: &'static str,
        pass: usize,
        params: &'a [AnySlice],
        grads: &'a [DeviceSlice<f32>],
    ) -> Self {
        Self {
            engine,
            groups,
            stream,
            label,
            pass,
            params,
            grads,
            steps: Vec::new(),
        }
    }

    pub(super) fn pass(&self) -> usize {
        self.pass
    }

    pub(super) fn activations(&self) -> Activations<DeviceSlice<f32>, BlockSlices> {
        self.engine.buffers.layers.of_pass(self.pass)
    }

    pub(super) fn scratch(&self) -> ScratchSlices {
        self.engine.buffers.scratch
    }

    /// Adds a step.
    pub(super) fn add(
        &mut self,
        step: impl FnOnce(&Operations, &Flat<'_>, &mut [f32]) + Send + 'static,
    ) {
        let ops = Arc::clone(&self.engine.ops);
        self.steps
            .push(Box::new(move |flat, grad| step(&ops, flat, grad)));
    }

    /// Enqueues the steps, before an exchange or at the end.
    pub(super) fn enqueue(&mut self) -> Result<(), ModelError> {
        let steps = std::mem::take(&mut self.steps);
        if steps.is_empty() {
            return Ok(());
        }
        self.engine.enqueue(
            self.stream,
            self.label,
            self.pass,
            self.params,
            self.grads,
            move |flat, mut grads| {
                let grad = grads.first_mut().map_or(&mut [][..], |grad| &mut **grad);
                for step in steps {
                    step(&flat, grad);
                }
            },
        )
    }

    /// Adds a part of a block's forward.
    pub(super) fn forward(&mut self, part: Forward, block: BlockSlices) {
        let x = self.activations().input;
        self.add(move |ops, flat, _| {
            // SAFETY: the buffer is the model's, and the stream orders its passes.
            ops.forward(part, block, unsafe { x.as_host() }, flat);
        });
    }

    /// Adds a part of a block's backward.
    pub(super) fn backward(&mut self, part: Backward, block: BlockSlices, scratch: ScratchSlices) {
        let x = self.activations().input;
        self.add(move |ops, flat, grad| {
            // SAFETY: the buffer is the model's, and the stream orders its passes.
            let x = unsafe { x.as_host() };
            ops.backward(part, scratch.view(), block, x, flat, grad);
        });
    }

    /// A block's forward, with its output if `out` is set.
    pub(super) fn forward_block(
        &mut self,
        out: Option<DeviceSlice<f32>>,
    ) -> Result<(), ModelError> {
        let Activations { input, block, .. } = self.activations();
        self.norm(Forward::Norm1)?;
        self.attend()?;
        self.branch(Branch::Attention, block.mid, input)?;
        self.norm(Forward::Norm2)?;
        self.forward(Forward::Mlp, block);
        out.map_or(Ok(()), |out| self.branch(Branch::Mlp, out, block.mid))
    }

    /// A block's backward, from the gradient of its output in `scratch.dres` to that of its input,
    /// if that is of use.
    pub(super) fn backward_block(&mut self) -> Result<(), ModelError> {
        let block = self.activations().block;
        let s = self.scratch();
        self.begin_partial_sums();

        self.norm_again(Forward::Norm2)?;
        self.gradient_of_branch(Branch::Mlp)?;
        self.backward(Backward::Mlp, block, s);
        self.norm_backward(Backward::Norm2)?;

        self.gradient_of_branch(Branch::Attention)?;
        self.norm_again(Forward::Norm1)?;
        self.attend_backward()?;
        let layer = self.pass - 1;
        if self.engine.ops.config.trains_before(layer) {
            self.norm_backward(Backward::Norm1)?;
        }
        self.end_partial_sums()
    }
}
