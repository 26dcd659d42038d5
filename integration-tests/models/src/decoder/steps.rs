//! The passes of blocks, as steps in the order of the computation.
//!
//! A rank may share a block with others: the tokens of attention ([`super::sequence`]) and the
//! parameters ([`super::tensor`]). What it computes between two exchanges with them is one operation
//! of the stream; without other ranks a pass is one.

use std::sync::Arc;

use zero_alloc::device::{AnySlice, DeviceSlice};
use zero_alloc::host::HostStream;
use zero_trainer::ModelError;

use super::arch::{Backward, Forward, HostArch};
use super::engine::Engine;
use super::groups::Groups;
use super::params::Flat;
use super::slices::{Activations, ScratchSlices};

/// A step. It has the parameters of the pass, and the gradient of its unit in backward.
type Step = Box<dyn FnOnce(&Flat<'_>, &mut [f32]) + Send>;

/// The steps of a pass.
pub(super) struct Steps<'a, A: HostArch> {
    pub(super) engine: &'a Engine<A>,
    pub(super) groups: &'a Groups,
    pub(super) stream: &'a HostStream,
    label: &'static str,
    pass: usize,
    params: &'a [AnySlice],
    grads: &'a [DeviceSlice<f32>],
    /// Those that are not enqueued yet.
    steps: Vec<Step>,
}

impl<'a, A: HostArch> Steps<'a, A> {
    /// `grads` is empty in forward.
    pub(super) fn new(
        engine: &'a Engine<A>,
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

    pub(super) fn activations(&self) -> Activations<DeviceSlice<f32>, A::Block> {
        self.engine.buffers.layers.of_pass(self.pass)
    }

    pub(super) fn scratch(&self) -> ScratchSlices {
        self.engine.buffers.scratch
    }

    /// Adds a step.
    pub(super) fn add(&mut self, step: impl FnOnce(&A, &Flat<'_>, &mut [f32]) + Send + 'static) {
        let arch = Arc::clone(&self.engine.arch);
        self.steps
            .push(Box::new(move |flat, grad| step(&arch, flat, grad)));
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
    pub(super) fn forward(&mut self, part: Forward, block: A::Block) {
        let x = self.activations().input;
        self.add(move |arch, flat, _| {
            // SAFETY: the buffer is the model's, and the stream orders its passes.
            arch.forward(part, block, unsafe { x.as_host() }, flat);
        });
    }

    /// Adds a part of a block's backward.
    pub(super) fn backward(&mut self, part: Backward, block: A::Block, scratch: ScratchSlices) {
        let x = self.activations().input;
        self.add(move |arch, flat, grad| {
            // SAFETY: the buffer is the model's, and the stream orders its passes.
            let x = unsafe { x.as_host() };
            arch.backward(part, scratch.view(), block, x, flat, grad);
        });
    }
}
