//! Settings of quantised communication.

use zero_alloc::device::DeviceSlice;
use zero_kernels::{Codec, EncodeSums};
use zero_shard::{BlockFormat, WireFormat};

/// Gradients that travel in blocks of few bits, each value rounded once a hop and summed in fp32
/// (`zero_comm`'s quantised reductions). Not at stage 0, whose ranks keep whole sums.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantisedGrads {
    /// Within a machine or a group of ranks; in one ring, between all ranks.
    pub within: BlockFormat,
    /// Between machines, or between groups.
    pub between: BlockFormat,
    /// Adds to a gradient what rounding left out of the one before.
    pub feedback: Option<ErrorFeedback>,
}

/// Error feedback of quantised gradients. Each rank has an error in fp32 for each element that it
/// encodes: of all parameters, and of its machine's part of them between machines.
///
/// The errors are of gradients that were applied: they are set to zero behind a skipped step, and
/// where the loss scale changes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ErrorFeedback {
    /// The part of the error that stays: `err_beta` of LoCo; 0 adds the whole error once.
    pub keep: f32,
    /// Steps from one reset of the errors to zero to the next: `reset_T` of LoCo.
    pub reset_every: Option<u64>,
}

impl QuantisedGrads {
    /// Both hops in one format, without feedback.
    pub const fn new(format: BlockFormat) -> Self {
        Self {
            within: format,
            between: format,
            feedback: None,
        }
    }

    pub(crate) fn wire(&self) -> [WireFormat; 2] {
        [self.within.wire(), self.between.wire()]
    }
}

/// The format in which a codec travels.
pub(crate) fn wire_of(codec: Codec) -> WireFormat {
    match codec {
        Codec::Blocks(format) => format.wire(),
        _ => WireFormat::plain(codec.dtype().size_bytes() as u64),
    }
}

/// The sums of errors of what a rank encodes, by kind.
#[derive(Clone, Copy)]
pub(crate) struct EncodedSums {
    pub(crate) params: DeviceSlice<EncodeSums>,
    pub(crate) grads: DeviceSlice<EncodeSums>,
    /// Of gradients that replicas sum, which are encoded on the replicas' stream.
    pub(crate) replica_grads: DeviceSlice<EncodeSums>,
}
