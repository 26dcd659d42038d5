//! The transfers between ranks when a unit is gathered, and when its gradient is reduced.
//!
//! ```text
//! Gather   shards of all ranks --(encode)--> all_gather --(decode)--> the whole unit
//! Reduce   gradients of all ranks --> reduce_scatter or all_reduce --> the sum, a shard or whole
//! ```
//!
//! Every gather of parameters and every reduction of gradients is one of these two. Gradients
//! travel in the dtype of the buckets that they were packed into; parameters as they are, or in the
//! format of a [`WireCodec`].

use std::fmt;
use std::sync::Arc;

use zero_alloc::device::{AnySlice, DType, Device};
use zero_alloc::{Pool, Purpose};
use zero_kernels::{KernelError, Kernels};
use zero_shard::{WireFormat, ZeroStage};

use crate::{Collective, CommError, Communicator, ReduceOp};

/// A format in which parameters travel, such as a narrower dtype.
///
/// A gathered unit has the decoded values on all ranks alike, that of the shard's owner included.
/// The shard itself keeps its values, so it must not be a part of the gathered unit.
///
/// # Safety
/// The slices are memory of a pool, which is used again when the call's operations have ended:
///
/// - [`encode`](Self::encode) only reads `shard` and only writes `wire`;
/// - [`decode`](Self::decode) only reads `wire` and only writes `whole`;
/// - both by the `cast` of that call alone, on these slices or ranges of them;
/// - no slice is kept.
pub unsafe trait WireCodec: fmt::Debug + Send + Sync {
    /// The dtype of the elements that collectives transmit.
    fn dtype(&self) -> DType;

    /// The bytes of an encoded shard.
    fn format(&self) -> WireFormat;

    /// Enqueues writing the encoded `shard` to `wire`.
    ///
    /// # Errors
    /// A dtype is not supported, or the stream returned an error.
    fn encode(
        &self,
        cast: WireCast<'_>,
        shard: AnySlice,
        wire: AnySlice,
    ) -> Result<(), KernelError>;

    /// Enqueues decoding `ranks` encoded shards, one after the other in `wire`, to `whole`.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    fn decode(
        &self,
        cast: WireCast<'_>,
        wire: AnySlice,
        whole: AnySlice,
        ranks: usize,
    ) -> Result<(), KernelError>;
}

/// Enqueues, on the stream of the collective, the conversion of the elements of the first slice to
/// the dtype of the second, of the same length.
pub type WireCast<'a> = &'a dyn Fn(AnySlice, AnySlice) -> Result<(), KernelError>;

/// A codec with what it needs on the device.
#[derive(Clone)]
struct Coded<D: Device> {
    codec: Arc<dyn WireCodec>,
    kernels: Arc<dyn Kernels<D>>,
    pool: Pool<D>,
}

/// Gathers units from the shards of all ranks.
#[derive(Clone)]
pub struct Gather<D: Device> {
    comm: Arc<dyn Communicator<D>>,
    coded: Option<Coded<D>>,
}

impl<D: Device> fmt::Debug for Gather<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let codec = self.coded.as_ref().map(|coded| &coded.codec);
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

    /// The same, with shards in the format of `codec`. A gather allocates the encoded unit from
    /// `pool` and frees it in stream order.
    #[must_use]
    pub fn with_codec(
        self,
        codec: Arc<dyn WireCodec>,
        kernels: Arc<dyn Kernels<D>>,
        pool: Pool<D>,
    ) -> Self {
        let coded = Coded {
            codec,
            kernels,
            pool,
        };
        Self {
            coded: Some(coded),
            ..self
        }
    }

    /// The ranks.
    pub fn comm(&self) -> &Arc<dyn Communicator<D>> {
        &self.comm
    }

    /// Enqueues the gather of this rank's `shard` and those of the others to `whole`, in rank
    /// order. Without a codec `shard` may be this rank's part of `whole`.
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
            Some(coded) => self.enqueue_coded(coded, stream, shard, whole),
        }
    }

    fn enqueue_coded(
        &self,
        coded: &Coded<D>,
        stream: &D::Stream,
        shard: AnySlice,
        whole: AnySlice,
    ) -> Result<(), CommError> {
        let Coded {
            codec,
            kernels,
            pool,
        } = coded;

        let dtype = codec.dtype();
        let bytes = codec.format().bytes(shard.len() as u64);
        let too_large = CommError::CountsTooLarge {
            collective: Collective::AllGather,
        };
        let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
        let bytes = bytes.ok_or(too_large)?;
        if !bytes.is_multiple_of(dtype.size_bytes()) {
            return Err(CommError::PartialElement { bytes, dtype });
        }
        let len = bytes / dtype.size_bytes();
        let ranks = self.comm.world_size();
        let mut block = pool.allocate(len * ranks, dtype, Purpose::Buckets, stream)?;
        // SAFETY: only this stream uses the block, and it is recorded before the block is dropped.
        let wire = unsafe { block.slice() };

        let cast = |from, to| kernels.cast(stream, from, to, 1.0);
        let own = wire.slice(self.comm.rank() * len..(self.comm.rank() + 1) * len);
        let enqueued = codec
            .encode(&cast, shard, own)
            .map_err(CommError::from)
            .and_then(|()| self.comm.all_gather(stream, own, wire))
            .and_then(|()| Ok(codec.decode(&cast, wire, whole, ranks)?));
        block.record_use(stream)?;
        enqueued
    }
}

/// Sums gradients over ranks.
#[derive(Clone)]
pub struct Reduce<D: Device> {
    comm: Arc<dyn Communicator<D>>,
    /// Whether a rank keeps its shard of the sum only.
    scatters: bool,
}

impl<D: Device> fmt::Debug for Reduce<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kept = if self.scatters { "shards" } else { "wholes" };
        write!(f, "Reduce({:?}, keeps {kept})", self.comm.group())
    }
}

impl<D: Device> Reduce<D> {
    /// Each rank keeps its shard of the sum, by reduce-scatter: stages 1 to 3 of ZeRO.
    pub fn scatter(comm: Arc<dyn Communicator<D>>) -> Self {
        Self {
            comm,
            scatters: true,
        }
    }

    /// Every rank keeps the whole sum, by all-reduce: stage 0.
    pub fn all(comm: Arc<dyn Communicator<D>>) -> Self {
        Self {
            comm,
            scatters: false,
        }
    }

    /// As a stage of ZeRO keeps gradients.
    pub fn of_stage(stage: ZeroStage, comm: Arc<dyn Communicator<D>>) -> Self {
        Self {
            comm,
            scatters: stage.shards_optimizer(),
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
        self.comm.reduce_scatter(stream, grad, own, ReduceOp::Sum)?;
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
        if self.scatters {
            self.comm
                .reduce_scatter_overwriting(stream, grad, sum, ReduceOp::Sum)
        } else {
            self.comm.all_reduce(stream, grad, sum, ReduceOp::Sum)
        }
    }
}
