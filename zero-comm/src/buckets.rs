//! Gradient buckets: constant memory in which gradients travel, however large the model is.
//!
//! The one buffer here is the **bucket**: a block of `capacity_elems` elements of the travelling dtype, held as
//! [`Purpose::Buckets`] from [`Buckets::new`] on. Its life, as types:
//!
//! ```text
//! free --begin--> Filling --reduce_scatter, all_reduce--> InFlight --finish--> free, and Done
//!                 producers write                         the communicator     consumers wait
//! ```
//!
//! - [`Filling`]: nothing is on its way; producers' streams write to the bucket. It knows all its producers.
//! - [`InFlight`]: enqueued on the communication stream, behind all producers. The bucket is the communicator's;
//!   what the caller enqueues on that stream next sees the result.
//! - [`Done`]: the event after it; the bucket itself is free for the next [`Buckets::begin`], whose producers'
//!   streams wait for its last use. The host never waits.
//!
//! Which elements travel together is the caller's business: a gradient larger than a bucket is cut in
//! pieces (`zero_shard::bucket_pieces` does it), each piece being the same range of every rank's shard.
//! ZeRO's stages differ only in the launch: stage 0 all-reduces, stages 1 to 3 reduce-scatter.
//!
//! The hazards are those of PEERS' bug lists: a reduction that waits for one of several producers, a bucket
//! that is overwritten before its reader ends, an error path that forgets both (`tests/buckets.rs`).

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use zero_alloc::device::{AnySlice, DType, Device, DeviceError, Stream};
use zero_alloc::{AllocError, Block, Pool, Purpose};

use crate::{CommError, Communicator, ReduceOp};

/// Why a bucket could not be had or launched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BucketError {
    /// Buckets of which there are none, or that hold less than an element a rank.
    #[error("{count} buckets of {capacity_elems} elements for {world_size} ranks")]
    TooSmall {
        /// Buckets asked for.
        count: usize,
        /// Elements of each.
        capacity_elems: usize,
        /// Ranks.
        world_size: usize,
    },
    /// More elements than a bucket holds.
    #[error("{elems} elements for a bucket of {capacity_elems}")]
    TooLong {
        /// Elements asked for.
        elems: usize,
        /// What a bucket holds.
        capacity_elems: usize,
    },
    /// All buckets are still held as `Filling` or `InFlight`.
    #[error("all {count} buckets are held; finish one first")]
    NoneFree {
        /// How many there are.
        count: usize,
    },
    /// The pool has no room for the buckets.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// The collective was refused.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A stream refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// How buckets are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketOptions {
    /// How many; one is filled while the others are in flight. Default: 2.
    pub count: usize,
    /// Elements of each.
    pub capacity_elems: usize,
    /// The dtype in which gradients travel.
    pub dtype: DType,
    /// Whether compute goes on while a bucket is in flight. Off, [`InFlight::finish`] makes the compute stream wait.
    pub overlap: bool,
}

impl BucketOptions {
    /// Two buckets, overlapping with compute.
    pub const fn new(capacity_elems: usize, dtype: DType) -> Self {
        Self { count: 2, capacity_elems, dtype, overlap: true }
    }
}

struct Bucket<D: Device> {
    block: Block<D>,
    /// Points that must be reached before the bucket is written again.
    last_uses: Vec<D::Event>,
}

impl<D: Device> Bucket<D> {
    fn used_on(&mut self, stream: &D::Stream) -> Result<D::Event, DeviceError> {
        self.block.record_use(stream)?;
        let event = stream.record()?;
        self.last_uses.push(event.clone());
        Ok(event)
    }
}

struct Shared<D: Device> {
    comm: Arc<dyn Communicator<D>>,
    compute: D::Stream,
    comm_stream: D::Stream,
    options: BucketOptions,
    free: Mutex<VecDeque<Bucket<D>>>,
}

/// The buckets of one rank.
pub struct Buckets<D: Device>(Arc<Shared<D>>);

impl<D: Device> fmt::Debug for Buckets<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buckets({:?}, {} free)", self.0.options, self.0.free.lock().len())
    }
}

impl<D: Device> Buckets<D> {
    /// Allocates the buckets, the only time that memory is. `compute` is the stream of the usual producer,
    /// `comm_stream` that of the collectives.
    ///
    /// # Errors
    /// No buckets, less than an element a rank, or no room in the pool.
    pub fn new(
        pool: &Pool<D>,
        comm: Arc<dyn Communicator<D>>,
        compute: D::Stream,
        comm_stream: D::Stream,
        options: BucketOptions,
    ) -> Result<Self, BucketError> {
        let BucketOptions { count, capacity_elems, dtype, .. } = options;
        let world_size = comm.world_size();
        if count == 0 || capacity_elems < world_size {
            return Err(BucketError::TooSmall { count, capacity_elems, world_size });
        }
        let mut free = VecDeque::with_capacity(count);
        for _ in 0..count {
            let block = pool.allocate(capacity_elems, dtype, Purpose::Buckets, &compute)?;
            free.push_back(Bucket { block, last_uses: Vec::new() });
        }
        Ok(Self(Arc::new(Shared { comm, compute, comm_stream, options, free: Mutex::new(free) })))
    }

    /// How they were made.
    pub fn options(&self) -> BucketOptions {
        self.0.options
    }

    /// The stream of the collectives.
    pub fn comm_stream(&self) -> &D::Stream {
        &self.0.comm_stream
    }

    /// The next bucket, for `elems` elements to be written on the compute stream, which waits for its last use.
    ///
    /// # Errors
    /// The bucket is too small, all buckets are held, or a stream refused.
    pub fn begin(&self, elems: usize) -> Result<Filling<D>, BucketError> {
        let BucketOptions { count, capacity_elems, .. } = self.0.options;
        if elems > capacity_elems {
            return Err(BucketError::TooLong { elems, capacity_elems });
        }
        let bucket = self.0.free.lock().pop_front().ok_or(BucketError::NoneFree { count })?;
        // SAFETY: it is handed out by unsafe methods alone, whose callers keep to streams that the bucket notes
        // before it is free again or dropped.
        let slice = unsafe { bucket.block.slice() }.slice(0..elems);
        let mut filling = Filling { bucket: Some(bucket), slice, producers: Vec::new(), shared: Arc::clone(&self.0) };
        filling.add_producer(&self.0.compute)?;
        Ok(filling)
    }

    /// Makes `stream` wait for everything launched so far, and for what the caller put behind it on the
    /// communication stream.
    ///
    /// # Errors
    /// A stream refused.
    pub fn wait_all_on(&self, stream: &D::Stream) -> Result<(), DeviceError> {
        stream.wait(&self.0.comm_stream.record()?)
    }
}

/// A bucket that is being written to.
#[must_use = "a bucket that is not launched carries nothing"]
pub struct Filling<D: Device> {
    /// None once launched.
    bucket: Option<Bucket<D>>,
    slice: AnySlice,
    producers: Vec<D::Stream>,
    shared: Arc<Shared<D>>,
}

impl<D: Device> fmt::Debug for Filling<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Filling({} x {}, {:?})", self.slice.len(), self.shared.options.dtype, self.producers)
    }
}

impl<D: Device> Drop for Filling<D> {
    /// Given up: what the producers may still write is over before the bucket is used again.
    fn drop(&mut self) {
        if let Some(mut bucket) = self.bucket.take() {
            let before = std::mem::take(&mut bucket.last_uses);
            for producer in &self.producers {
                // A stream that refuses is closed, and writes no more.
                let _closed = bucket.used_on(producer);
            }
            // All producers wait for the uses before; where no stream took the bucket, those are still its last.
            if bucket.last_uses.is_empty() {
                bucket.last_uses = before;
            }
            self.shared.free.lock().push_back(bucket);
        }
    }
}

impl<D: Device> Filling<D> {
    /// Elements in the bucket.
    pub fn len(&self) -> usize {
        self.slice.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.slice.is_empty()
    }

    /// Lets `stream` write to the bucket too: it waits for the bucket's last use now, and the launch waits for it.
    ///
    /// # Errors
    /// The stream refused.
    pub fn add_producer(&mut self, stream: &D::Stream) -> Result<(), DeviceError> {
        if let Some(bucket) = &self.bucket {
            for event in &bucket.last_uses {
                stream.wait(event)?;
            }
        }
        if self.producers.iter().all(|known| known.id() != stream.id()) {
            self.producers.push(stream.clone());
        }
        Ok(())
    }

    /// Where the elements are to be written: rank q's segment is `q * len / world_size ..` for a reduce-scatter.
    ///
    /// # Safety
    /// The slice is used only by operations enqueued on the compute stream or on streams added by
    /// [`Filling::add_producer`], before this `Filling` is launched or dropped.
    pub unsafe fn slice(&self) -> AnySlice {
        self.slice
    }

    fn launch(
        mut self,
        collective: impl FnOnce(&dyn Communicator<D>, &D::Stream, AnySlice) -> Result<(), CommError>,
    ) -> Result<InFlight<D>, BucketError> {
        let shared = Arc::clone(&self.shared);
        for producer in &self.producers {
            shared.comm_stream.wait(&producer.record()?)?;
        }
        // From here on the bucket is the communication stream's, whatever the call says.
        let (bucket, slice) = (self.bucket.take(), self.slice);
        let in_flight = InFlight { bucket, slice, consumers: Vec::new(), shared: Arc::clone(&shared) };
        // Behind all producers; later uses of the bucket wait for the event that `InFlight` records at its end.
        collective(&*shared.comm, &shared.comm_stream, slice)?;
        Ok(in_flight)
    }

    /// Sends the bucket; this rank's segment of the result goes straight into `shard`, which the
    /// communication stream writes (`shard.len() * world_size == len`).
    ///
    /// # Errors
    /// Counts or dtypes do not fit, or a stream refused.
    pub fn reduce_scatter_into(self, shard: AnySlice, op: ReduceOp) -> Result<InFlight<D>, BucketError> {
        self.launch(|comm, stream, slice| comm.reduce_scatter(stream, slice, shard, op))
    }

    /// Sends the bucket; this rank's segment of the result stays in it ([`InFlight::segment`]), to be added to
    /// an accumulated gradient by an operation that the caller enqueues on the communication stream.
    ///
    /// # Errors
    /// The number of ranks does not divide the length, or a stream refused.
    pub fn reduce_scatter(self, op: ReduceOp) -> Result<InFlight<D>, BucketError> {
        let (rank, n, len) = (self.shared.comm.rank(), self.shared.comm.world_size(), self.len());
        if !len.is_multiple_of(n) {
            let collective = crate::Collective::ReduceScatter;
            return Err(CommError::NotDivisible { collective, len, world_size: n }.into());
        }
        let own = rank * (len / n)..(rank + 1) * (len / n);
        self.launch(|comm, stream, slice| comm.reduce_scatter(stream, slice, slice.slice(own), op))
    }

    /// Sends the bucket; the whole result stays in it ([`InFlight::slice`]), for the caller to copy out by an
    /// operation on the communication stream.
    ///
    /// # Errors
    /// A stream refused.
    pub fn all_reduce(self, op: ReduceOp) -> Result<InFlight<D>, BucketError> {
        self.launch(|comm, stream, slice| comm.all_reduce(stream, slice, slice, op))
    }
}

/// A bucket on its way.
#[must_use = "finish it to learn when its result is there"]
pub struct InFlight<D: Device> {
    /// None once finished.
    bucket: Option<Bucket<D>>,
    slice: AnySlice,
    consumers: Vec<D::Stream>,
    shared: Arc<Shared<D>>,
}

impl<D: Device> fmt::Debug for InFlight<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InFlight({} x {})", self.slice.len(), self.shared.options.dtype)
    }
}

impl<D: Device> Drop for InFlight<D> {
    fn drop(&mut self) {
        // A stream that refuses is closed, and uses the bucket no more.
        let _closed = self.retire();
    }
}

impl<D: Device> InFlight<D> {
    fn retire(&mut self) -> Result<Option<D::Event>, DeviceError> {
        let Some(mut bucket) = self.bucket.take() else { return Ok(None) };
        bucket.last_uses.clear();
        let event = bucket.used_on(&self.shared.comm_stream);
        let consumed = self.consumers.iter().try_for_each(|consumer| bucket.used_on(consumer).map(drop));
        self.shared.free.lock().push_back(bucket);
        consumed.and(event).map(Some)
    }

    /// The whole bucket, as the communication stream will have it.
    ///
    /// # Safety
    /// The slice is used only by operations enqueued on the communication stream or on streams added by
    /// [`InFlight::add_consumer`], before this `InFlight` is finished or dropped.
    pub unsafe fn slice(&self) -> AnySlice {
        self.slice
    }

    /// This rank's segment of the bucket: the result of [`Filling::reduce_scatter`].
    ///
    /// # Safety
    /// As for [`InFlight::slice`].
    pub unsafe fn segment(&self) -> AnySlice {
        let (rank, len) = (self.shared.comm.rank(), self.slice.len() / self.shared.comm.world_size());
        self.slice.slice(rank * len..(rank + 1) * len)
    }

    /// Lets `stream` read the bucket too: it waits for the result, and the bucket's next use waits for it.
    ///
    /// # Errors
    /// A stream refused.
    pub fn add_consumer(&mut self, stream: &D::Stream) -> Result<(), DeviceError> {
        stream.wait(&self.shared.comm_stream.record()?)?;
        if self.consumers.iter().all(|known| known.id() != stream.id()) {
            self.consumers.push(stream.clone());
        }
        Ok(())
    }

    /// Ends the bucket's way: what the caller has enqueued behind the collective on the communication stream
    /// is the last use. Without overlap, the compute stream waits for it here.
    ///
    /// # Errors
    /// A stream refused.
    pub fn finish(mut self) -> Result<Done<D>, DeviceError> {
        let event = match self.retire()? {
            Some(event) => event,
            None => self.shared.comm_stream.record()?,
        };
        if !self.shared.options.overlap {
            self.shared.compute.wait(&event)?;
        }
        Ok(Done { event })
    }
}

/// The point at which a bucket's result is where it belongs.
#[derive(Debug)]
#[must_use = "who reads the result must wait for it"]
pub struct Done<D: Device> {
    event: D::Event,
}

impl<D: Device> Done<D> {
    /// Makes `stream` wait for the result.
    ///
    /// # Errors
    /// The stream refused.
    pub fn wait_on(&self, stream: &D::Stream) -> Result<(), DeviceError> {
        stream.wait(&self.event)
    }

    /// The point itself.
    pub fn event(&self) -> &D::Event {
        &self.event
    }
}
