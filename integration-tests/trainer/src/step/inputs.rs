//! What a step gives to its decision.

use zero_alloc::device::DeviceSlice;

/// This rank's loss and flags for the all-gather at the end of a step, in device memory, read in
/// compute-stream order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepInputs {
    /// Sum of the losses of its micro-batches.
    pub(crate) loss: DeviceSlice<f64>,
    /// 64 bits; every rank receives their OR and their AND over all ranks.
    pub(crate) flags: DeviceSlice<u64>,
}
