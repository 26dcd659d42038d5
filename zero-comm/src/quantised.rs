//! Reductions of gradients that travel in blocks of few bits.
//!
//! With N = K * M ranks in two hops, of K ranks within a machine and M between machines:
//!
//! ```text
//! gradient, N shards --encode--> all_to_all, K parts --decode, sum in fp32--> M shards
//!   M shards, fp32   --encode--> all_to_all, M parts --decode, sum in fp32--> this rank's shard
//! ```
//!
//! Each value is rounded once a hop, and never while it is summed. Source: qgZ of ZeRO++ (arXiv
//! 2306.10209, section 3.3), which sums within a machine first so that few bytes leave it.
//!
//! **Error feedback.** What the encoding of a hop left out is added to the next gradient of the
//! same elements. A rank has an error for each element that it encodes: of the whole unit in the
//! first hop, of M shards in the second. Source: LoCo (arXiv 2407.04480).

use std::ops::Range;
use std::sync::Arc;

use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice};
use zero_kernels::{EncodeSums, Feedback};
use zero_shard::BlockFormat;

use crate::call::Group;
use crate::encoded::Encoder;
use crate::{CommError, Communicator};

/// The errors of this rank's quantised reductions of a unit, which the next one adds and updates.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct UnitFeedback<'a> {
    /// For each hop, the errors of the elements that it encodes, in the unit's order: of all ranks'
    /// shards in the first hop, then of the shards that this rank passes on.
    pub errors: &'a [DeviceSlice<f32>],
    /// The part of the error that stays ([`Feedback::keep`]).
    pub keep: f32,
}

impl<'a> UnitFeedback<'a> {
    /// With these errors.
    pub const fn new(errors: &'a [DeviceSlice<f32>], keep: f32) -> Self {
        Self { errors, keep }
    }
}

/// The feedback of a range of each shard.
#[derive(Clone)]
pub(crate) struct PieceFeedback<'a> {
    pub(crate) unit: UnitFeedback<'a>,
    pub(crate) in_shard: Range<usize>,
    /// Elements of a shard.
    pub(crate) shard_elems: usize,
}

/// The hops of a reduction.
#[derive(Clone)]
pub(crate) struct Quantised<D: Device> {
    hops: Vec<(Arc<dyn Communicator<D>>, BlockFormat)>,
    encoder: Encoder<D>,
}

impl<D: Device> Quantised<D> {
    /// Hops over the ranks of `group`, without those of one rank.
    pub(crate) fn new(
        group: Group,
        hops: Vec<(Arc<dyn Communicator<D>>, BlockFormat)>,
        encoder: Encoder<D>,
    ) -> Result<Self, CommError> {
        let mut place = 0;
        let mut product = 1;
        for (comm, _) in &hops {
            place = place * comm.world_size() + comm.rank();
            product *= comm.world_size();
        }
        if product != group.world_size || place != group.rank {
            return Err(CommError::Hops {
                hops: hops.iter().map(|(comm, _)| comm.world_size()).collect(),
                world_size: group.world_size,
            });
        }
        let hops = hops.into_iter().filter(|(comm, _)| comm.world_size() > 1);
        Ok(Self {
            hops: hops.collect(),
            encoder,
        })
    }

    /// For each hop, the segments that this rank encodes.
    pub(crate) fn segments(&self) -> Vec<usize> {
        let ranks = |(comm, _): &(Arc<dyn Communicator<D>>, _)| comm.world_size();
        let from = |hop: usize| self.hops[hop..].iter().map(ranks).product();
        (0..self.hops.len()).map(from).collect()
    }

    pub(crate) fn formats(&self) -> Vec<BlockFormat> {
        self.hops.iter().map(|(_, format)| *format).collect()
    }

    pub(crate) fn add_to(&mut self, sums: DeviceSlice<EncodeSums>) {
        self.encoder.add_to(sums);
    }

    /// Enqueues the sum of `grad`, of a segment for each rank, to `sum`, which has the length of a
    /// segment and may be this rank's in `grad`. The other segments keep their values.
    pub(crate) fn sum(
        &self,
        stream: &D::Stream,
        grad: AnySlice,
        sum: AnySlice,
        feedback: Option<PieceFeedback<'_>>,
    ) -> Result<(), CommError> {
        let of_hops = self.segments();
        let segments = of_hops.first().copied().unwrap_or(1);
        if grad.len() != sum.len() * segments {
            return Err(CommError::Count {
                what: "quantised reduction: send",
                expected: sum.len() * segments,
                got: grad.len(),
            });
        }

        let mut from = grad;
        let mut partial = None;
        for (nth, ((comm, format), segments)) in self.hops.iter().zip(of_hops).enumerate() {
            let parts = comm.world_size();
            let elems = from.len() / parts;
            let bytes = format.bytes(elems);
            let wire = self
                .encoder
                .allocate(stream, 2 * parts * bytes, DType::U8)?;
            let send = wire.slice().slice(0..parts * bytes);
            let recv = wire.slice().slice(parts * bytes..2 * parts * bytes);

            match &feedback {
                Some(piece) => {
                    self.encode_with(stream, *format, (from, segments), send, piece, nth)?;
                }
                None => self.encode(stream, *format, (from, parts), send, None)?,
            }
            comm.all_to_all(stream, send, recv)?;

            let is_last = nth + 1 == self.hops.len();
            let scratch = match is_last {
                true => None,
                false => Some(self.encoder.allocate(stream, elems, DType::F32)?),
            };
            from = scratch.as_ref().map_or(sum, |scratch| scratch.slice());
            self.encoder
                .sum_blocks(stream, *format, (recv, parts), from)?;
            // Until the next hop has read it.
            drop(std::mem::replace(&mut partial, scratch));
        }
        Ok(())
    }

    /// Encodes `parts` parts, each from the start of a block on.
    fn encode(
        &self,
        stream: &D::Stream,
        format: BlockFormat,
        (from, parts): (AnySlice, usize),
        send: AnySlice,
        feedback: Option<Feedback>,
    ) -> Result<(), CommError> {
        let elems = from.len() / parts;
        let at_once = match elems.is_multiple_of(format.elems()) {
            true => from.len(),
            false => elems,
        };
        let bytes = format.bytes(at_once);
        for part in 0..from.len().div_ceil(at_once.max(1)) {
            let range = part * at_once..(part + 1) * at_once;
            let feedback = feedback.map(|all| Feedback {
                error: all.error.slice(range.clone()),
                ..all
            });
            let blocks = send.slice(part * bytes..(part + 1) * bytes);
            self.encoder
                .encode_blocks(stream, format, from.slice(range), blocks, feedback)?;
        }
        Ok(())
    }

    /// Encodes `segments` segments, each with the errors of its elements.
    fn encode_with(
        &self,
        stream: &D::Stream,
        format: BlockFormat,
        (from, segments): (AnySlice, usize),
        send: AnySlice,
        piece: &PieceFeedback<'_>,
        hop: usize,
    ) -> Result<(), CommError> {
        let PieceFeedback {
            unit,
            in_shard,
            shard_elems,
        } = piece;
        let expected = segments * shard_elems;
        let errors = unit.errors.get(hop).copied();
        let got = errors.map_or(0, |errors| errors.len());
        let (Some(errors), true) = (errors, got == expected) else {
            return Err(CommError::Count {
                what: "quantised reduction: errors of a hop",
                expected,
                got,
            });
        };
        let elems = in_shard.len();
        if !elems.is_multiple_of(format.elems()) {
            return Err(CommError::PartialBlock {
                elems,
                block_elems: format.elems(),
            });
        }

        let feedback = |error| {
            Some(Feedback {
                error,
                keep: unit.keep,
            })
        };
        if elems == *shard_elems {
            return self.encode(stream, format, (from, 1), send, feedback(errors));
        }
        let bytes = format.bytes(elems);
        for segment in 0..segments {
            let start = segment * shard_elems + in_shard.start;
            let error = errors.slice(start..start + elems);
            let from = from.slice(segment * elems..(segment + 1) * elems);
            let blocks = send.slice(segment * bytes..(segment + 1) * bytes);
            self.encode(stream, format, (from, 1), blocks, feedback(error))?;
        }
        Ok(())
    }
}
