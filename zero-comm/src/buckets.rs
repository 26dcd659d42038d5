//! Gradient buckets: gradients are reduced through a constant amount of memory.
//!
//! A **bucket** is a block of `capacity_elems` elements of the reduction's dtype, allocated by
//! [`Buckets::new`] as [`Purpose::Buckets`]. Its states are types:
//!
//! ```text
//! free --begin--> Filling --reduce, reduce_to--> InFlight --finish--> free, and an event
//!                 producers write                the collective runs  consumers wait
//! ```
//!
//! - [`Filling`]: producers write to the bucket; their streams are recorded.
//! - [`InFlight`]: the collective is enqueued on the communication stream, behind all producers.
//!   Operations that the caller enqueues on that stream next see the result.
//! - The event is after it. The bucket is free for the next [`Buckets::begin`], whose
//!   producers' streams wait for its last use. The host never waits.
//!
//! [`Buckets::reduce_unit`] does all of this for the gradient of a unit: it cuts it into pieces,
//! each the same range of every rank's shard (`zero_shard::bucket_pieces`), packs each into a
//! bucket and stores its sum. A caller with other packing chooses the elements of each bucket
//! itself. A rank keeps its shard of a sum or all of it, as the buckets' [`Reduce`] says.
//!
//! With one rank, no bucket is needed where the sum has the reduction's dtype or all parts have it:
//! the compute stream then packs the gradient straight into its destination, with the same single
//! rounding.
//!
//! Hazards, each with a test in `tests/suite/buckets.rs`: a reduction that waits for only one of
//! several producers; a bucket that is overwritten before its last reader ends; an error path that
//! omits either wait.
//!
//! Why packing is here, for which this crate depends on zero-kernels (casts) and zero-shard (cuts):
//! a framework with an allocation for each parameter passes slices with offsets, and each gradient
//! is copied once, into the bucket. One launch packs all segments of a bucket. Where a bucket has
//! room for the largest unit, as the trainer's have on GPUs, a unit is one launch and one
//! collective.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use zero_alloc::device::{
    AnySlice, DType, Device, DeviceError, DeviceKind, Element, Reduced, Stream,
};
use zero_alloc::{AllocError, Block, Pool, Purpose};
use zero_kernels::{KernelError, Kernels, Segments};
use zero_shard::bucket_pieces;

use crate::quantised::PieceFeedback;
use crate::{CommError, Reduce, UnitFeedback};

/// The failure of an operation on buckets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
#[non_exhaustive]
pub enum BucketError {
    /// No buckets for several ranks, or less than one element, or one block, per rank in each.
    #[error(
        "{count} buckets of {capacity_elems} elements: {world_size} ranks need at least one bucket of {least_elems} elements"
    )]
    TooSmall {
        count: usize,
        capacity_elems: usize,
        world_size: usize,
        /// Elements of the least bucket.
        least_elems: usize,
    },
    /// More elements than a bucket's capacity.
    #[error("{elems} elements exceed a bucket's capacity of {capacity_elems}")]
    TooLong {
        elems: usize,
        /// Capacity of a bucket.
        capacity_elems: usize,
    },
    /// All buckets are `Filling` or `InFlight`.
    #[error("all {count} buckets are in use; finish one first")]
    NoneFree { count: usize },
    /// A part of a gradient is outside the unit, or overlaps the part before it.
    #[error(
        "part {index} of the gradient covers elements {start}..{end} of the unit; it must be within {free}..{len}"
    )]
    Part {
        /// Position of the part.
        index: usize,
        /// Its start in the unit.
        start: usize,
        /// Its end in the unit.
        end: usize,
        /// End of the part before it.
        free: usize,
        /// Elements of the unit.
        len: usize,
    },
    /// The allocation of the buckets failed.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// The collective was not enqueued.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The packing or the sum was not enqueued.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A stream returned an error.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Number, size and dtype of buckets: `BucketOptions::new(1 << 20, DType::Bf16).count(3)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BucketOptions {
    /// Number of buckets; one is filled while the others are in flight. Default: 2. One rank may
    /// have none.
    pub count: usize,
    /// Capacity of each.
    pub capacity_elems: usize,
    /// The dtype of the reduction.
    pub dtype: DType,
}

impl BucketOptions {
    /// Two buckets.
    pub const fn new(capacity_elems: usize, dtype: DType) -> Self {
        Self {
            count: 2,
            capacity_elems,
            dtype,
        }
    }
}
zero_alloc::setters!(BucketOptions { count: usize });

struct Bucket<D: Device> {
    block: Block<D>,
    /// Events that the next write to the bucket waits for.
    last_uses: Vec<D::Event>,
}

impl<D: Device> Bucket<D> {
    fn record_use(&mut self, stream: &D::Stream) -> Result<D::Event, DeviceError> {
        self.block.record_use(stream)?;
        let event = stream.record()?;
        self.last_uses.push(event.clone());
        Ok(event)
    }
}

/// The destination of the sum of a unit's gradients over ranks.
#[derive(Debug)]
#[non_exhaustive]
pub enum SumInto<D: Device> {
    /// The sum replaces the elements: the first micro-batch of a step. They are written after all
    /// work on the compute stream and on the communication stream, which the caller makes wait for
    /// other streams that read an earlier sum ([`Reduced::wait_for_readers`]).
    Write(AnySlice),
    /// The sum is added to that of earlier micro-batches, in fp32.
    Add(Reduced<D>),
}

/// A [`SumInto`] that may be written behind the work on the communication stream.
struct Sum {
    sum: AnySlice,
    add: bool,
}

impl Sum {
    fn new<D: Device>(comm_stream: &D::Stream, into: SumInto<D>) -> Result<Self, DeviceError> {
        Ok(match into {
            SumInto::Write(sum) => Self { sum, add: false },
            SumInto::Add(earlier) => {
                earlier.wait_for_readers(comm_stream)?;
                Self {
                    // SAFETY: its readers are waited for. The result replaces this value: who made
                    // the elements orders what follows after it.
                    sum: unsafe { earlier.slice_on(comm_stream) }?,
                    add: true,
                }
            }
        })
    }

    fn reduced<D: Device>(&self, done: D::Event) -> Reduced<D> {
        // SAFETY: the sum is written before the event, behind the communication stream, which waits
        // for the readers of the earlier sum. The maker of `sum` orders all other writes, and those
        // of `SumInto::Write` after such readers.
        unsafe { Reduced::new(self.sum, done) }
    }
}

struct Shared<D: Device> {
    device: D,
    reduce: Reduce<D>,
    compute: D::Stream,
    comm_stream: D::Stream,
    options: BucketOptions,
    free: Mutex<VecDeque<Bucket<D>>>,
}

/// The buckets of one rank.
pub struct Buckets<D: Device>(Arc<Shared<D>>);

impl<D: Device> fmt::Debug for Buckets<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Buckets({:?}, {} free)",
            self.0.options,
            self.0.free.lock().len()
        )
    }
}

impl<D: Device> Buckets<D> {
    /// Allocates the buckets; later operations allocate no device memory. `compute` is the first
    /// producer's stream, `comm_stream` that of the collectives ([`Device::create_urgent_stream`]).
    /// If they are the same stream, nothing overlaps.
    ///
    /// # Errors
    /// No buckets, less than one element (of a quantised reduction: one block) per rank, a stream
    /// of another device than the pool's, or the allocation failed.
    pub fn new(
        pool: &Pool<D>,
        reduce: Reduce<D>,
        compute: D::Stream,
        comm_stream: D::Stream,
        options: BucketOptions,
    ) -> Result<Self, BucketError> {
        let BucketOptions {
            count,
            capacity_elems,
            dtype,
        } = options;

        for stream in [&compute, &comm_stream] {
            pool.device().check_stream("Buckets::new", stream)?;
        }
        let world_size = reduce.comm().world_size();
        let least_elems = world_size * reduce.align_elems();
        if count == 0 && world_size > 1 || capacity_elems < least_elems {
            return Err(BucketError::TooSmall {
                count,
                capacity_elems,
                world_size,
                least_elems,
            });
        }

        let mut free = VecDeque::with_capacity(count);
        for _ in 0..count {
            let block = pool.allocate(capacity_elems, dtype, Purpose::Buckets, &compute)?;
            free.push_back(Bucket {
                block,
                last_uses: Vec::new(),
            });
        }

        let device = pool.device().clone();
        Ok(Self(Arc::new(Shared {
            device,
            reduce,
            compute,
            comm_stream,
            options,
            free: Mutex::new(free),
        })))
    }

    /// The stream of the collectives.
    pub fn comm_stream(&self) -> &D::Stream {
        &self.0.comm_stream
    }

    /// Returns a free bucket for `elems` elements. The compute stream, its first producer, waits
    /// for its last use.
    ///
    /// # Errors
    /// The bucket is too small, all buckets are in use, or a stream returned an error.
    pub fn begin(&self, elems: usize) -> Result<Filling<D>, BucketError> {
        let BucketOptions {
            count,
            capacity_elems,
            ..
        } = self.0.options;

        if elems > capacity_elems {
            return Err(BucketError::TooLong {
                elems,
                capacity_elems,
            });
        }

        let bucket = self
            .0
            .free
            .lock()
            .pop_front()
            .ok_or(BucketError::NoneFree { count })?;
        // SAFETY: only unsafe methods return the slice. Their callers use it only on streams that
        // are recorded in the block before the bucket is free again or dropped.
        let slice = unsafe { bucket.block.slice() }.slice(0..elems);
        let mut filling = Filling {
            bucket: Some(bucket),
            slice,
            producers: Vec::new(),
            shared: Arc::clone(&self.0),
        };

        filling.add_producer(&self.0.compute)?;
        Ok(filling)
    }

    /// Sums the gradients of a unit over all ranks. `into` has the length of what a rank keeps: a
    /// shard, of which the unit has `world_size`, or the unit. `parts` are the gradient's slices
    /// with their offsets in the unit, ascending and without overlap, in fp32, bf16 or fp16;
    /// elements between them are zero. The compute stream packs them into buckets, and only then
    /// may change them.
    ///
    /// # Errors
    /// A part is outside the unit or overlaps another, a dtype or a device does not match, all
    /// buckets are in use, or a stream returned an error.
    pub fn reduce_unit(
        &self,
        kernels: &dyn Kernels<D>,
        parts: &[(AnySlice, usize)],
        into: SumInto<D>,
    ) -> Result<Reduced<D>, BucketError> {
        self.reduce_unit_with(kernels, parts, into, None)
    }

    /// As [`Self::reduce_unit`], with the errors of earlier quantised reductions of the unit.
    ///
    /// # Errors
    /// As [`Self::reduce_unit`]; or the errors have other lengths, or the shards are not of whole
    /// blocks.
    pub fn reduce_unit_with(
        &self,
        kernels: &dyn Kernels<D>,
        parts: &[(AnySlice, usize)],
        into: SumInto<D>,
        feedback: Option<UnitFeedback<'_>>,
    ) -> Result<Reduced<D>, BucketError> {
        let Shared {
            reduce,
            comm_stream,
            options,
            ..
        } = &*self.0;

        let to = Sum::new(comm_stream, into)?;
        let ranks = reduce.comm().world_size();
        let len = to.sum.len();
        // An all-reduce has one segment; its cuts are those of a reduce-scatter.
        let segments = reduce.shards();
        let cut = ranks * reduce.align_elems();
        let capacity_elems = options.capacity_elems / cut * cut;
        check_parts(parts, segments * len)?;
        let narrow = to.sum.dtype() == options.dtype;
        let exact = |(part, _): &(AnySlice, usize)| part.dtype() == options.dtype;
        if ranks == 1 && (narrow && !to.add || parts.iter().all(exact)) {
            return self.store(kernels, parts, &to);
        }
        let range = |range: Range<u64>| range.start as usize..range.end as usize;
        let mut done = None;

        for piece in bucket_pieces(len as u64, segments as u64, capacity_elems as u64) {
            let of_shard = range(piece.in_shard.clone());
            let filling = self.begin(piece.elems() as usize)?;
            let part = Segments {
                start: of_shard.start,
                len: of_shard.len(),
                stride: len,
                count: segments,
            };
            kernels.pack(&self.0.compute, parts, part, filling.slice)?;
            let feedback = feedback.map(|unit| PieceFeedback {
                unit,
                in_shard: of_shard.clone(),
                shard_elems: len,
            });
            done = Some(filling.sum(kernels, &to, of_shard, feedback)?);
        }

        Ok(to.reduced(done.map_or_else(|| comm_stream.record(), Ok)?))
    }

    /// Stores the gradient of the only rank.
    fn store(
        &self,
        kernels: &dyn Kernels<D>,
        parts: &[(AnySlice, usize)],
        to: &Sum,
    ) -> Result<Reduced<D>, BucketError> {
        let Shared {
            compute,
            comm_stream,
            ..
        } = &*self.0;

        // The first wait makes the communication stream a part of a recording of the compute
        // stream.
        comm_stream.wait(&compute.record()?)?;
        compute.wait(&comm_stream.record()?)?;
        let len = to.sum.len();
        if to.add {
            let sum = to.sum.typed()?;
            parts.iter().try_for_each(|&(part, at)| {
                kernels.accumulate(compute, part, sum.slice(at..at + part.len()))
            })?;
        } else {
            kernels.pack(
                compute,
                parts,
                Segments {
                    start: 0,
                    len,
                    stride: len,
                    count: 1,
                },
                to.sum,
            )?;
        }

        Ok(to.reduced(compute.record()?))
    }

    /// Makes `stream` wait for everything enqueued on the communication stream so far.
    ///
    /// # Errors
    /// A stream returned an error.
    pub fn wait_all_on(&self, stream: &D::Stream) -> Result<(), DeviceError> {
        stream.wait(&self.0.comm_stream.record()?)
    }
}

/// Checks that the parts ascend within the unit's `len` elements, without overlap.
fn check_parts(parts: &[(AnySlice, usize)], len: usize) -> Result<(), BucketError> {
    let mut free = 0;
    for (index, &(part, start)) in parts.iter().enumerate() {
        let end = start.saturating_add(part.len());
        if start < free || end > len {
            return Err(BucketError::Part {
                index,
                start,
                end,
                free,
                len,
            });
        }
        free = end;
    }
    Ok(())
}

/// A bucket that producers write to.
#[must_use = "a bucket that is not launched reduces nothing"]
pub struct Filling<D: Device> {
    /// `None` once launched.
    bucket: Option<Bucket<D>>,
    slice: AnySlice,
    producers: Vec<D::Stream>,
    shared: Arc<Shared<D>>,
}

impl<D: Device> fmt::Debug for Filling<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Filling({} x {}, {:?})",
            self.slice.len(),
            self.shared.options.dtype,
            self.producers
        )
    }
}

impl<D: Device> Drop for Filling<D> {
    /// Frees the bucket; its next use waits for the producers' enqueued writes.
    fn drop(&mut self) {
        if let Some(mut bucket) = self.bucket.take() {
            let before = std::mem::take(&mut bucket.last_uses);
            for producer in &self.producers {
                // A stream that returns an error is closed, and writes no more.
                let _closed = bucket.record_use(producer);
            }
            // Each producer waits for the earlier uses, so its event covers them; without a
            // producer, they are still the last.
            if bucket.last_uses.is_empty() {
                bucket.last_uses = before;
            }
            self.shared.free.lock().push_back(bucket);
        }
    }
}

impl<D: Device> Filling<D> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.slice.len()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.slice.is_empty()
    }

    /// Adds a stream that writes to the bucket: it waits for the bucket's last use, and the launch
    /// waits for it.
    ///
    /// # Errors
    /// The stream returned an error, or is of another device.
    pub fn add_producer(&mut self, stream: &D::Stream) -> Result<(), DeviceError> {
        self.shared.device.check_stream("add_producer", stream)?;
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

    /// The bucket's elements. For a reduce-scatter, rank q's segment starts at
    /// `q * len / world_size`.
    ///
    /// # Safety
    /// The slice is used only by operations enqueued on the compute stream or on streams added by
    /// [`Filling::add_producer`], before this `Filling` is launched or dropped; none is enqueued
    /// while [`Filling::write`] runs.
    pub unsafe fn slice(&self) -> AnySlice {
        self.slice
    }

    /// Waits at most `limit` for the producers, and so for the bucket's last use, then calls
    /// `write` with the bucket's elements in host memory. Their values are unspecified before; on
    /// other devices a copy is transferred afterwards.
    ///
    /// # Errors
    /// The bucket has another dtype, a producer failed, or the limit passed.
    pub fn write<T: Element, R>(
        &mut self,
        limit: Duration,
        write: impl FnOnce(&mut [T]) -> R,
    ) -> Result<R, DeviceError> {
        let (
            slice,
            Shared {
                device, compute, ..
            },
        ) = (self.slice.typed::<T>()?, &*self.shared);
        for producer in &self.producers {
            producer.synchronize(limit)?;
        }
        if device.kind() == DeviceKind::Host {
            // SAFETY: host memory of a pool, which `Memory` promises to be initialised. Only
            // producers use it before the launch, which is borrowed, and they have ended.
            return Ok(write(unsafe { slice.as_host_mut() }));
        }
        let mut copy = vec![T::zeroed(); slice.len()];
        let result = write(&mut copy);
        device.upload(compute, bytemuck::cast_slice(&copy), self.slice, limit)?;
        Ok(result)
    }

    /// Sums the bucket, to which producers wrote the gradient of a whole unit in the unit's order,
    /// over all ranks. `into` has the length of what a rank keeps: a shard, or the unit.
    ///
    /// # Errors
    /// The length or the device of `into` does not match, or a stream returned an error.
    pub fn reduce_unit(
        self,
        kernels: &dyn Kernels<D>,
        into: SumInto<D>,
    ) -> Result<Reduced<D>, BucketError> {
        self.reduce_unit_with(kernels, into, None)
    }

    /// As [`Self::reduce_unit`], with the errors of earlier quantised reductions of the unit.
    ///
    /// # Errors
    /// As [`Self::reduce_unit`]; or the errors have other lengths, or the shards are not of whole
    /// blocks.
    pub fn reduce_unit_with(
        self,
        kernels: &dyn Kernels<D>,
        into: SumInto<D>,
        feedback: Option<UnitFeedback<'_>>,
    ) -> Result<Reduced<D>, BucketError> {
        let to = Sum::new(&self.shared.comm_stream, into)?;
        let expected = self.len() / self.shared.reduce.shards();
        let got = to.sum.len();
        if got * self.shared.reduce.shards() != self.len() {
            return Err(KernelError::LengthMismatch {
                what: "reduce_unit: into".into(),
                expected,
                got,
            }
            .into());
        }
        let feedback = feedback.map(|unit| PieceFeedback {
            unit,
            in_shard: 0..got,
            shard_elems: got,
        });
        let done = self.sum(kernels, &to, 0..got, feedback)?;
        Ok(to.reduced(done))
    }

    /// Enqueues the sum of the bucket over ranks and its storing in elements `of_sum` of `to`.
    fn sum(
        self,
        kernels: &dyn Kernels<D>,
        to: &Sum,
        of_sum: Range<usize>,
        feedback: Option<PieceFeedback<'_>>,
    ) -> Result<D::Event, BucketError> {
        let sum = to.sum.slice(of_sum);
        if !to.add && sum.dtype() == self.shared.options.dtype {
            let in_flight = self.launch(|reduce, stream, bucket| {
                let enqueued = reduce.sum_to_with(stream, bucket, sum, feedback);
                enqueued.map(|()| sum)
            })?;
            return Ok(in_flight.finish()?);
        }

        let in_flight = self
            .launch(|reduce, stream, bucket| reduce.sum_in_place_with(stream, bucket, feedback))?;
        let comm_stream = &in_flight.shared.comm_stream;
        if to.add {
            kernels.accumulate(comm_stream, in_flight.result, sum.typed()?)?;
        } else {
            kernels.cast(comm_stream, in_flight.result, sum, 1.0)?;
        }
        Ok(in_flight.finish()?)
    }

    /// Sums the bucket over ranks; the communication stream writes what this rank keeps of the sum
    /// into `sum`. The bucket's contents are unspecified afterwards.
    ///
    /// # Errors
    /// Segments or dtypes do not match, or a stream returned an error.
    pub fn reduce_to(self, sum: AnySlice) -> Result<InFlight<D>, BucketError> {
        self.launch(|reduce, stream, bucket| reduce.sum_to(stream, bucket, sum).map(|()| sum))
    }

    /// Sums the bucket over ranks; what this rank keeps of the sum stays in it
    /// ([`InFlight::result`]). The caller copies it, or adds it to an accumulated gradient, by an
    /// operation on the communication stream.
    ///
    /// # Errors
    /// The number of ranks does not divide the length, or a stream returned an error.
    pub fn reduce(self) -> Result<InFlight<D>, BucketError> {
        self.launch(Reduce::sum_in_place)
    }

    fn launch(
        mut self,
        collective: impl FnOnce(&Reduce<D>, &D::Stream, AnySlice) -> Result<AnySlice, CommError>,
    ) -> Result<InFlight<D>, BucketError> {
        let shared = Arc::clone(&self.shared);
        for producer in &self.producers {
            shared.comm_stream.wait(&producer.record()?)?;
        }
        // From here on the communication stream may use the bucket, even if the call returns an
        // error.
        let bucket = self.bucket.take();
        let mut in_flight = InFlight {
            bucket,
            result: self.slice,
            shared: Arc::clone(&shared),
        };
        // Behind all producers; later uses of the bucket wait for the event that `InFlight` records
        // at its end.
        in_flight.result = collective(&shared.reduce, &shared.comm_stream, self.slice)?;
        Ok(in_flight)
    }
}

/// A bucket whose collective is enqueued.
#[must_use = "finish it to get the event of its result"]
pub struct InFlight<D: Device> {
    /// `None` once finished.
    bucket: Option<Bucket<D>>,
    /// The part of the sum that this rank keeps.
    result: AnySlice,
    shared: Arc<Shared<D>>,
}

impl<D: Device> fmt::Debug for InFlight<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "InFlight({} x {})",
            self.result.len(),
            self.shared.options.dtype
        )
    }
}

impl<D: Device> Drop for InFlight<D> {
    fn drop(&mut self) {
        // A stream that returns an error is closed, and uses the bucket no more.
        let _closed = self.retire();
    }
}

impl<D: Device> InFlight<D> {
    fn retire(&mut self) -> Result<Option<D::Event>, DeviceError> {
        let Some(mut bucket) = self.bucket.take() else {
            return Ok(None);
        };
        let before = std::mem::take(&mut bucket.last_uses);
        let event = bucket.record_use(&self.shared.comm_stream);
        if event.is_err() {
            bucket.last_uses.extend(before);
        }
        self.shared.free.lock().push_back(bucket);
        event.map(Some)
    }

    /// The part of the sum that this rank keeps, in the bucket: its segment, or the whole.
    ///
    /// # Safety
    /// The slice is used only by operations enqueued on the communication stream, before this
    /// `InFlight` is finished or dropped.
    pub unsafe fn result(&self) -> AnySlice {
        self.result
    }

    /// Frees the bucket. Its next use waits for the operations enqueued so far on the communication
    /// stream. Returns the event after them, which readers of the result wait for.
    ///
    /// # Errors
    /// A stream returned an error.
    pub fn finish(mut self) -> Result<D::Event, DeviceError> {
        let event = self.retire()?;
        event.map_or_else(|| self.shared.comm_stream.record(), Ok)
    }
}
