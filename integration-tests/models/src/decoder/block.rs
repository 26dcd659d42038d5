//! A block's forward and backward, as steps.

use zero_alloc::device::DeviceSlice;
use zero_trainer::ModelError;

use super::arch::{Backward, Branch, Forward, HostArch};
use super::slices::Activations;
use super::steps::Steps;

impl<A: HostArch> Steps<'_, A> {
    /// A block's forward, with its output if `out` is set.
    pub(super) fn forward_block(
        &mut self,
        out: Option<DeviceSlice<f32>>,
    ) -> Result<(), ModelError> {
        let Activations { input, block, .. } = self.activations();
        self.norm(Forward::Norm1)?;
        self.attend()?;
        self.branch(Branch::Attention, A::mid(block), input)?;
        self.norm(Forward::Norm2)?;
        self.forward(Forward::Mlp, block);
        out.map_or(Ok(()), |out| self.branch(Branch::Mlp, out, A::mid(block)))
    }

    /// A block's backward, from the gradient of its output in `scratch.dres` to that of its input.
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
        self.norm_backward(Backward::Norm1)?;
        self.end_partial_sums()
    }
}
