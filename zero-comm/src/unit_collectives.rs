//! The transfers between ranks when a unit is gathered, and when its gradient is reduced.
//!
//! ```text
//! Gather   shards of all ranks --(encode)--> all_gather --(decode)--> the whole unit
//! Reduce   gradients of all ranks --> reduce_scatter or all_reduce --> the sum, a shard or whole
//!          or, quantised, for each hop: encode --> all_to_all --> decode, sum in fp32 --> the shard
//! ```
//!
//! Every gather of parameters and every reduction of gradients is one of these two. Gradients
//! travel in the dtype of the buckets that they were packed into, or in blocks
//! ([`Reduce::quantised`]); parameters as they are, or in a [`Codec`].

use std::fmt;
use std::sync::Arc;

use zero_alloc::Pool;
use zero_alloc::device::{AnySlice, Device, DeviceSlice};
use zero_kernels::{Codec, EncodeSums, Kernels};
use zero_shard::{BlockFormat, ZeroStage};

use crate::encoded::{Encoder, check_values};
use crate::quantised::{PieceFeedback, Quantised};
use crate::{Collective, CommError, Communicator, ReduceOp};

/// Gathers units from the shards of all ranks.
#[derive(Clone)]
pub struct Gather<D: Device> {
    comm: Arc<dyn Communicator<D>>,
    coded: Option<(Codec, Encoder<D>)>,
}

impl<D: Device> fmt::Debug for Gather<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let codec = self.coded.as_ref().map(|(codec, _)| codec);
        write!(f, "Gather({:?}, codec: {codec:?})", self.comm.group())
    }
}

impl<D: Device> From<Arc<dyn Communicator<D>>> for Gather<D> {
    fn from(comm: Arc<dyn Communicator<D>>) -> Self {
        Self::new(comm)
    }
}

impl<D: Device> Gather<D> {
    /// Gathers over the ranks of `comm`; shards travel as they are.
    pub fn new(comm: Arc<dyn Communicator<D>>) -> Self {
        Self { comm, coded: None }
    }

    /// The same, with shards in the format of `codec`: blocks, bf16 or fp32. A gathered unit has
    /// the decoded values on all ranks alike, that of the shard's owner included. A gather
    /// allocates the encoded unit from `pool` and frees it in stream order.
    ///
    /// # Errors
    /// Remainders, which are no values.
    pub fn with_codec(
        self,
        codec: Codec,
        kernels: Arc<dyn Kernels<D>>,
        pool: Pool<D>,
    ) -> Result<Self, CommError> {
        check_values(codec)?;
        Ok(Self {
            coded: Some((codec, Encoder::new(kernels, pool))),
            ..self
        })
    }

    /// The same, with the statistics of the blocks that this rank encodes added to `sums`, in the
    /// order of the stream. Without blocks there are none.
    #[must_use]
    pub fn with_sums(mut self, sums: DeviceSlice<EncodeSums>) -> Self {
        if let Some((_, encoder)) = &mut self.coded {
            encoder.add_to(sums);
        }
        self
    }

    /// The ranks.
    pub fn comm(&self) -> &Arc<dyn Communicator<D>> {
        &self.comm
    }

    /// Enqueues the gather of this rank's `shard` and those of the others to `whole`, in rank
    /// order. `shard` may be this rank's part of `whole`, and with a codec then has the decoded
    /// values afterwards.
    ///
    /// # Errors
    /// Lengths or dtypes do not match, memory is exhausted, or the stream returned an error.
    pub fn enqueue(
        &self,
        stream: &D::Stream,
        shard: AnySlice,
        whole: AnySlice,
    ) -> Result<(), CommError> {
        match &self.coded {
            None => self.comm.all_gather(stream, shard, whole),
            Some(coded) => self.enqueue_coded(coded, stream, shard, whole, false),
        }
    }

    /// Enqueues the gather of the shards of the other ranks to their parts of `whole`, of which
    /// this rank's part is its shard and keeps its values: exact ones, where the others get decoded
    /// ones.
    ///
    /// # Errors
    /// As [`Self::enqueue`].
    pub fn enqueue_others(&self, stream: &D::Stream, whole: AnySlice) -> Result<(), CommError> {
        let len = whole.len() / self.comm.world_size();
        let start = self.comm.rank() * len;
        let shard = whole.slice(start..start + len);
        match &self.coded {
            None => self.comm.all_gather(stream, shard, whole),
            Some(coded) => self.enqueue_coded(coded, stream, shard, whole, true),
        }
    }

    fn enqueue_coded(
        &self,
        (codec, encoder): &(Codec, Encoder<D>),
        stream: &D::Stream,
        shard: AnySlice,
        whole: AnySlice,
        keeps_own: bool,
    ) -> Result<(), CommError> {
        let ranks = self.comm.world_size();
        let rank = self.comm.rank();
        let elems = shard.len();
        if whole.len() != elems * ranks {
            return Err(CommError::Count {
                what: "gather: whole",
                expected: elems * ranks,
                got: whole.len(),
            });
        }
        let len = codec.bytes(elems) / codec.dtype().size_bytes();
        let scratch = encoder.allocate(stream, len * ranks, codec.dtype())?;
        let wire = scratch.slice();
        let own = wire.slice(rank * len..(rank + 1) * len);

        encoder.encode(stream, *codec, shard, own)?;
        self.comm.all_gather(stream, own, wire)?;
        let decoded = match keeps_own {
            true => [0..rank, rank + 1..ranks],
            false => [0..ranks, ranks..ranks],
        };
        let slices = (wire, whole);
        decoded
            .into_iter()
            .try_for_each(|ranks| encoder.decode_shards(stream, *codec, slices, elems, ranks))
    }
}

/// Sums gradients over ranks.
#[derive(Clone)]
pub struct Reduce<D: Device> {
    comm: Arc<dyn Communicator<D>>,
    /// Whether a rank keeps its shard of the sum only.
    scatters: bool,
    quantised: Option<Quantised<D>>,
}

impl<D: Device> fmt::Debug for Reduce<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kept = if self.scatters { "shards" } else { "wholes" };
        write!(f, "Reduce({:?}, keeps {kept}", self.comm.group())?;
        match &self.quantised {
            Some(quantised) => write!(f, ", {:?})", quantised.formats()),
            None => f.write_str(")"),
        }
    }
}

impl<D: Device> Reduce<D> {
    /// Each rank keeps its shard of the sum, by reduce-scatter: stages 1 to 3 of ZeRO.
    pub fn scatter(comm: Arc<dyn Communicator<D>>) -> Self {
        Self {
            comm,
            scatters: true,
            quantised: None,
        }
    }

    /// Every rank keeps the whole sum, by all-reduce: stage 0.
    pub fn all(comm: Arc<dyn Communicator<D>>) -> Self {
        Self {
            comm,
            scatters: false,
            quantised: None,
        }
    }

    /// As a stage of ZeRO keeps gradients.
    pub fn of_stage(stage: ZeroStage, comm: Arc<dyn Communicator<D>>) -> Self {
        Self {
            comm,
            scatters: stage.shards_optimizer(),
            quantised: None,
        }
    }

    /// The same, with gradients that travel in blocks: for each of `hops` an all-to-all of encoded
    /// shards over its ranks, which are decoded and summed in fp32 in rank order, and encoded again
    /// for the next (qgZ of ZeRO++, arXiv 2306.10209). Rank r of the reduction is rank `r / (ranks
    /// of the later hops)` of the first hop, and so on: one hop over all ranks, or those of
    /// [`TwoLevel::levels`](crate::TwoLevel::levels). One rank alone encodes nothing.
    ///
    /// A block with an infinity or NaN is decoded as NaN on its owner. The encoded gradients are
    /// allocated from `pool` and freed in stream order.
    ///
    /// # Errors
    /// Every rank keeps the whole sum, or the hops are not over the ranks of the reduction.
    pub fn quantised(
        self,
        hops: Vec<(Arc<dyn Communicator<D>>, BlockFormat)>,
        kernels: Arc<dyn Kernels<D>>,
        pool: Pool<D>,
    ) -> Result<Self, CommError> {
        if !self.scatters {
            return Err(CommError::QuantisedAllReduce);
        }
        let encoder = Encoder::new(kernels, pool);
        let quantised = Quantised::new(self.comm.group(), hops, encoder)?;
        let has_others = self.comm.world_size() > 1;
        Ok(Self {
            quantised: has_others.then_some(quantised),
            ..self
        })
    }

    /// For each hop of a quantised reduction over several ranks, the shards that this rank encodes:
    /// [`UnitFeedback::errors`](crate::UnitFeedback::errors) has an element for each of theirs.
    pub fn hop_shards(&self) -> Vec<usize> {
        let quantised = self.quantised.as_ref();
        quantised.map_or_else(Vec::new, Quantised::segments)
    }

    /// The same, with the statistics of the blocks that this rank encodes added to `sums`, in the
    /// order of the stream.
    #[must_use]
    pub fn with_sums(mut self, sums: DeviceSlice<EncodeSums>) -> Self {
        if let Some(quantised) = &mut self.quantised {
            quantised.add_to(sums);
        }
        self
    }

    /// Elements that are reduced together: the cuts of a shard are multiples of it.
    pub fn align_elems(&self) -> usize {
        match self.quantised {
            Some(_) => BlockFormat::ALIGN_ELEMS as usize,
            None => 1,
        }
    }

    /// The ranks.
    pub fn comm(&self) -> &Arc<dyn Communicator<D>> {
        &self.comm
    }

    /// The parts of a gradient of which a rank keeps one: the number of ranks, or 1.
    pub fn shards(&self) -> usize {
        if self.scatters {
            self.comm.world_size()
        } else {
            1
        }
    }

    /// Enqueues the sum of `grad` over ranks in its own memory, and returns where it is: this
    /// rank's shard, or all of `grad`. The rest of `grad` keeps its values or has partial sums.
    ///
    /// # Errors
    /// The number of ranks does not divide the length, the dtype is not supported, or the stream
    /// returned an error.
    pub fn sum_in_place(&self, stream: &D::Stream, grad: AnySlice) -> Result<AnySlice, CommError> {
        self.sum_in_place_with(stream, grad, None)
    }

    pub(crate) fn sum_in_place_with(
        &self,
        stream: &D::Stream,
        grad: AnySlice,
        feedback: Option<PieceFeedback<'_>>,
    ) -> Result<AnySlice, CommError> {
        if !self.scatters {
            self.comm.all_reduce(stream, grad, grad, ReduceOp::Sum)?;
            return Ok(grad);
        }
        let ranks = self.comm.world_size();
        let len = grad.len();
        if !len.is_multiple_of(ranks) {
            return Err(CommError::NotDivisible {
                collective: Collective::ReduceScatter,
                len,
                world_size: ranks,
            });
        }
        let rank = self.comm.rank();
        let own = grad.slice(rank * (len / ranks)..(rank + 1) * (len / ranks));
        match &self.quantised {
            Some(quantised) => quantised.sum(stream, grad, own, feedback)?,
            None => self.comm.reduce_scatter(stream, grad, own, ReduceOp::Sum)?,
        }
        Ok(own)
    }

    /// Enqueues the sum of `grad` over ranks to `sum`, which has the length of a shard, or of all
    /// of `grad`. The contents of `grad` are unspecified afterwards.
    ///
    /// # Errors
    /// Lengths or dtypes do not match, or the stream returned an error.
    pub fn sum_to(
        &self,
        stream: &D::Stream,
        grad: AnySlice,
        sum: AnySlice,
    ) -> Result<(), CommError> {
        self.sum_to_with(stream, grad, sum, None)
    }

    pub(crate) fn sum_to_with(
        &self,
        stream: &D::Stream,
        grad: AnySlice,
        sum: AnySlice,
        feedback: Option<PieceFeedback<'_>>,
    ) -> Result<(), CommError> {
        match &self.quantised {
            Some(quantised) => quantised.sum(stream, grad, sum, feedback),
            None if self.scatters => {
                self.comm
                    .reduce_scatter_overwriting(stream, grad, sum, ReduceOp::Sum)
            }
            None => self.comm.all_reduce(stream, grad, sum, ReduceOp::Sum),
        }
    }
}
