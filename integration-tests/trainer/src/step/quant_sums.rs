//! How far the values that a step encodes are from those that arrive, over all ranks.
//!
//! | buffer | elements | lifetime |
//! |---|---|---|
//! | sums of a kind | [`ENTRIES`] | the whole run; encodings add to them, and a step's end sets them to zero |
//! | all ranks' sums | those of each rank | from the step's all-gather to its copy |
//! | copy | the same, in host memory | until the host has read it behind the decision |
//!
//! A kind of values is encoded on one stream, whose order is that of the additions. The sums of a
//! step travel once, as control data, before its update; so those of the parameters that stages 1
//! and 2 gather behind the update are part of the next step, which reads them.

use std::time::Duration;

use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice, Event, Stream};
use zero_alloc::host::HostDevice;
use zero_alloc::{Block, Pool, Purpose};
use zero_comm::{CommError, Communicator};
use zero_kernels::EncodeSums;

use crate::error::TrainError;
use crate::quantised::EncodedSums;
use crate::telemetry::metrics::QuantFigures;

/// Entries of a kind: 2^20 elements are encoded by one launch.
const ENTRIES: usize = 64;
const ENTRY_BYTES: usize = size_of::<EncodeSums>();

const KINDS: usize = 3;

/// The sums of one rank.
pub(crate) struct QuantSums<D: Device> {
    block: Block<D>,
    all: Block<D>,
    copy: Block<HostDevice>,
    streams: Vec<D::Stream>,
}

impl<D: Device> QuantSums<D> {
    /// Sums for encodings on `streams`, of which the first is that of the collectives, over `ranks`
    /// ranks.
    pub(crate) fn new(
        pool: &Pool<D>,
        pinned: &Pool<HostDevice>,
        streams: Vec<D::Stream>,
        ranks: usize,
    ) -> Result<Self, TrainError> {
        let bytes = KINDS * ENTRIES * ENTRY_BYTES;
        let comm_stream = &streams[0];
        let purpose = Purpose::Workspace;
        let host = pinned.device();
        let stream = zero_alloc::device::Device::create_stream(host, "quantisation")?;
        let sums = Self {
            block: pool.allocate(bytes, DType::U8, purpose, comm_stream)?,
            all: pool.allocate(ranks * bytes, DType::U8, purpose, comm_stream)?,
            copy: pinned.allocate(ranks * bytes, DType::U8, purpose, &stream)?,
            streams,
        };
        pool.device().fill_zero(&sums.streams[0], sums.own())?;
        let zeroed = sums.streams[0].record()?;
        sums.streams[1..]
            .iter()
            .try_for_each(|stream| stream.wait(&zeroed))?;
        Ok(sums)
    }

    fn own(&self) -> AnySlice {
        // SAFETY: the streams use it, ordered by events; the drop records them.
        unsafe { self.block.slice() }
    }

    /// The sums of each kind.
    pub(crate) fn of_kinds(&self) -> EncodedSums {
        let own = self.own();
        let len = ENTRIES * ENTRY_BYTES;
        let of_kind = |kind: usize| {
            let part = own.slice(kind * len..(kind + 1) * len);
            // SAFETY: entries of a block, which is aligned for them; all bits are values.
            unsafe { DeviceSlice::from_raw_parts(part.as_ptr().cast(), ENTRIES, own.device()) }
        };
        EncodedSums {
            params: of_kind(0),
            grads: of_kind(1),
            replica_grads: of_kind(2),
        }
    }

    /// Enqueues the exchange of the sums so far, and sets them to zero. Returns the event after
    /// which the host may [read](Self::read) them.
    pub(crate) fn exchange(
        &self,
        device: &D,
        comm: &dyn Communicator<D>,
    ) -> Result<D::Event, TrainError> {
        let [comm_stream, others @ ..] = &self.streams[..] else {
            return Err(TrainError::State("internal error: no stream".to_owned()));
        };
        for stream in others {
            comm_stream.wait(&stream.record()?)?;
        }
        // SAFETY: only this stream uses it; the drop records it.
        let all = unsafe { self.all.slice() };
        // SAFETY: the host reads it behind the event below, and waits for it before the drop.
        let copy = unsafe { self.copy.slice() };
        comm.control_all_gather(comm_stream, self.own(), all)?;
        device.copy(comm_stream, all, copy)?;
        device.fill_zero(comm_stream, self.own())?;
        let done = comm_stream.record()?;
        others.iter().try_for_each(|stream| stream.wait(&done))?;
        Ok(done)
    }

    /// The error and its bound, each relative to the values, of what an exchange sent.
    pub(crate) fn read(
        &self,
        exchanged: &D::Event,
        limit: Duration,
    ) -> Result<[QuantFigures; 2], TrainError> {
        exchanged.synchronize(limit).map_err(CommError::from)?;
        // SAFETY: the copy that writes it has ended, and the next one is enqueued behind this call.
        let copy = unsafe { self.copy.slice() }.typed::<u8>()?;
        // SAFETY: as above; it is host memory.
        let all = unsafe { copy.as_host() };
        let mut totals = [EncodeSums::default(); KINDS];
        for of_rank in all.chunks_exact(KINDS * ENTRIES * ENTRY_BYTES) {
            let kinds = of_rank.chunks_exact(ENTRIES * ENTRY_BYTES);
            for (total, of_kind) in totals.iter_mut().zip(kinds) {
                let entries = of_kind.chunks_exact(ENTRY_BYTES);
                let entries = entries.map(bytemuck::pod_read_unaligned);
                let all: Vec<EncodeSums> = std::iter::once(*total).chain(entries).collect();
                *total = EncodeSums::total(&all);
            }
        }

        let [params, grads, of_replicas] = totals;
        let grads = EncodeSums::total(&[grads, of_replicas]);
        let of = |part: fn(&EncodeSums) -> f64| {
            let relative = |sums: &EncodeSums| {
                (sums.value_sq > 0.0).then(|| (part(sums) / sums.value_sq).sqrt())
            };
            QuantFigures {
                params: relative(&params),
                grads: relative(&grads),
            }
        };
        Ok([of(|sums| sums.error_sq), of(|sums| sums.bound_sq)])
    }
}

impl<D: Device> Drop for QuantSums<D> {
    fn drop(&mut self) {
        for stream in &self.streams {
            // Recording fails only on a closed stream, which no longer uses the blocks.
            let _closed = self.block.record_use(stream);
            let _closed = self.all.record_use(stream);
        }
    }
}
