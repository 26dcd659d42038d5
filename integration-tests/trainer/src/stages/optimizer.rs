//! The optimizer of a rank with the gradients' sums that it updates by: on the device, or on the
//! host.

use std::time::Duration;

use zero_alloc::device::{AnySlice, Device, DeviceSlice, Reduced};
use zero_ckpt::Reader;
use zero_comm::SumInto;
use zero_optim::{
    DeviceStepConfig, Divisor, Progress, Segment, ShardedOptimizer, StateKind, StateRange,
    StepOutcome,
};

use crate::error::TrainError;
use crate::offload::host_optimizer::HostOptimizer;
use crate::offload::host_params::SharedParams;
use crate::rank::Rank;
use crate::step::inputs::StepInputs;
use crate::workload::Fill;

/// Steps whose learning rates are uploaded at once: 24 KiB a set of rates.
pub(crate) const STEPS_AHEAD: u64 = 768;

/// Elements of the weights in host memory at a time while they are set: a unit may be larger than
/// all other host memory.
const CHUNK_ELEMS: usize = 1 << 20;

/// The optimizer of a rank.
pub(crate) trait Optimizer<D: Device>: Send {
    /// The host's, if the host updates.
    fn on_host(&mut self) -> Option<&mut HostOptimizer<D>> {
        None
    }

    /// The parameters that the host updates, if it does.
    fn host_params(&self) -> Option<SharedParams<D>> {
        None
    }

    /// The loss scale of a backward pass on the compute stream.
    fn loss_scale(&self) -> Result<DeviceSlice<f64>, TrainError>;

    // The gradients of a step.

    /// Memory to which all passes of a step add the gradient of `unit`, where the sum of the step
    /// will be. `None` where sums leave the device.
    fn local_sum(&self, unit: usize) -> Option<AnySlice>;

    /// The place to which the compute stream writes the gradient of `unit`, which is the sum of one
    /// rank's only micro-batch.
    fn begin_sum(&mut self, rank: &Rank<D>, unit: usize) -> Result<AnySlice, TrainError>;

    /// The place to which the communication stream writes the sum over ranks of `unit`; or the
    /// earlier sum to which it adds, if `adds`.
    fn sum_into(
        &mut self,
        rank: &Rank<D>,
        unit: usize,
        adds: bool,
    ) -> Result<SumInto<D>, TrainError>;

    /// Whether the sum of each micro-batch leaves the device.
    fn sums_leave(&self) -> bool {
        false
    }

    /// Takes the sum over ranks of micro-batch `micro`. If it is the last, the host enqueues its
    /// statistics.
    fn take_sum(
        &mut self,
        rank: &Rank<D>,
        unit: usize,
        micro: usize,
        sum: Reduced<D>,
    ) -> Result<(), TrainError>;

    // The end of a step.

    /// Uploads what the next [`STEPS_AHEAD`] decisions need. The outcomes of all earlier steps must
    /// have been read.
    fn prepare_steps(&mut self, rank: &Rank<D>) -> Result<(), TrainError>;

    /// Enqueues this rank's gradient statistics, their all-gather, and the decision (skip or
    /// update, clipping), which is the same on all ranks. A host that updates waits for backward
    /// and decides itself.
    fn decide(&mut self, rank: &Rank<D>, inputs: StepInputs) -> Result<(), TrainError>;

    /// Call it after the decision is enqueued or replayed.
    fn expect_outcome(&mut self, _rank: &Rank<D>) -> Result<(), TrainError> {
        Ok(())
    }

    /// Enqueues the decided update, a no-op in a skipped step.
    fn update(&mut self, rank: &Rank<D>) -> Result<(), TrainError>;

    /// Waits for the decision of the enqueued step and returns it.
    fn outcome(&mut self, rank: &Rank<D>) -> Result<StepOutcome, TrainError>;

    /// Waits for the decision of the enqueued step as [`Self::outcome`], and forgets it.
    fn skip_outcome(&mut self, rank: &Rank<D>) -> Result<(), TrainError>;

    // The state: weights, slots of the update rule and progress.

    /// The step counts and the loss scaler's state, for a checkpoint.
    fn progress(&self) -> Progress;

    /// The units' segments.
    fn segments(&self) -> &[Segment];

    /// The kinds of state.
    fn kinds(&self) -> Vec<StateKind>;

    /// Reads a range of the state as fp32.
    fn read_state(
        &mut self,
        rank: &Rank<D>,
        range: &StateRange,
        out: &mut [f32],
    ) -> Result<(), TrainError>;

    /// Sets the weights of `unit`, of which the rank has `elems` elements, in parts: `fill` returns
    /// those of a range.
    fn set_weights(
        &mut self,
        rank: &Rank<D>,
        unit: usize,
        elems: usize,
        fill: Fill<'_>,
    ) -> Result<(), TrainError>;

    /// Loads weights, slots and progress from a checkpoint.
    fn load(&mut self, rank: &Rank<D>, reader: &Reader) -> Result<(), TrainError>;
}

/// The error of an outcome that is missing.
pub(crate) fn no_outcome() -> TrainError {
    TrainError::State("internal error: the device reported no step outcome".to_owned())
}

/// Writes the weights of a unit of `elems` elements, in parts, and the parameter with them.
pub(crate) fn write_weights<D: Device>(
    optimizer: &mut ShardedOptimizer<D>,
    stream: &D::Stream,
    (unit, elems): (usize, usize),
    param: &[(AnySlice, usize)],
    fill: Fill<'_>,
    limit: Duration,
) -> Result<(), TrainError> {
    let mut values = Vec::new();
    for start in (0..elems).step_by(CHUNK_ELEMS) {
        let part = start..elems.min(start + CHUNK_ELEMS);
        fill(part.clone(), &mut values)?;
        let range = StateRange {
            kind: StateKind::Master,
            unit,
            elems: part,
        };
        optimizer.write_state(stream, &range, param, &values, limit)?;
    }
    Ok(optimizer.write_unit_params(stream, unit, param)?)
}

/// The configuration of decisions on the device, for rank 0 of `ranks` ranks.
pub fn device_steps(ranks: usize) -> DeviceStepConfig {
    DeviceStepConfig::new(0, ranks, Divisor::MicroBatches(1), STEPS_AHEAD as usize)
}
