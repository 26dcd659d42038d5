//! The optimizer on the host (ZeRO-Offload, ZeRO-Infinity).
//!
//! A unit's gradient leaves the device as soon as it is complete, and its statistics
//! are computed while backward goes on. After backward the host exchanges the statistics and
//! decides, exactly as the device would: so clipping and loss scale are exact. Then it updates unit
//! by unit in forward order on a separate stream, and the next forward of a unit waits for that
//! unit's update only:
//!
//! ```text
//! compute  | ... backward 1 |        | forward 0 | forward 1 | ...
//! update   | statistics     | decide | adam 0 | adam 1 | adam 2 | ...
//! ```
//!
//! The optimizer is a `ShardedOptimizer<HostDevice>` on whatever device the model runs: one set of
//! rules and one code of checkpoints. Offload differs only in where gradients
//! (`leaving_sums.rs`), parameters (`host_params.rs`) and state (zero-optim's `pieces.rs`) are. If
//! the device is the host, gradients and parameters stay where they are and only the streams
//! differ, so all of it is tested without a GPU.
//!
//! Why the update does not begin before the norm is known: it would need a rollback, which is not
//! exact. What the next forward does not hide is exposed; to hide it behind backward, too,
//! gradients would have to be a step old.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice, Reduced, Stream};
use zero_alloc::host::{HostDevice, HostEvent, HostStream};
use zero_alloc::swap::{SwapAccess, SwapFile};
use zero_alloc::{Block, Purpose};
use zero_optim::{
    Divisor, GatheredStats, Masters, MatrixDevice, OffloadedMatrices, RankStats, Segment,
    ShardedOptimizer, StateFormat, StateHome, StepOutcome, UnitSlices,
};

use crate::error::TrainError;
use crate::offload::drain::drain;
use crate::offload::host_params::{HostParams, SharedParams};
use crate::offload::settings::{Home, OffloadSettings};
use crate::offload::unit_file::UnitFile;
use crate::rank::Rank;
use crate::rank_exchange::RankExchange;
use crate::step::inputs::StepInputs;
use crate::telemetry::metrics::NvmeBytes;

/// An optimizer on the host.
pub(crate) struct HostOptimizer<D: Device> {
    pub(super) optimizer: ShardedOptimizer<HostDevice>,
    pub(super) stream: HostStream,
    pub(super) params: SharedParams<D>,
    /// The sums over ranks in this step, complete on `stream`.
    grads: Vec<Option<Reduced<HostDevice>>>,
    /// After it the host reads the unit's gradient no more.
    released: Vec<Option<HostEvent>>,
    /// Orders the device's reductions before the host's work.
    copies: D::Stream,
    loss_scale: Block<D>,
    /// The gradients' file, if they are in one.
    grads_file: Option<SwapFile>,
    outcome: Option<StepOutcome>,
    /// The units in the order in which a forward reads them.
    order: Vec<usize>,
    /// Streams of the device that use memory of the host.
    device_streams: Vec<D::Stream>,
    limit: Duration,
}

/// The name of a rank's stream of updates on the host.
pub(crate) fn update_track(rank: usize) -> String {
    format!("rank {rank} update")
}

impl<D: Device> HostOptimizer<D> {
    pub(crate) fn new(
        rank: &Rank<D>,
        segments: Vec<Segment>,
        on_device: Option<Vec<AnySlice>>,
    ) -> Result<Self, TrainError> {
        let index = rank.comm.rank();
        let Rank { settings, host, .. } = rank;
        let stream = host.plain.device().create_stream(&update_track(index))?;
        let copies = rank
            .pool
            .device()
            .create_stream(&format!("rank {index} copies"))?;
        // Before the state, whose first use of the disk would delay pinning.
        let params = HostParams::new(rank, &stream, &segments, on_device)?;
        let groups = rank.groups_held()?;
        let options = &settings.offload;
        let kernels = match options.optimizer {
            Home::Nvme(_) => &host.nvme_kernels,
            _ => &host.kernels,
        };

        let builder = ShardedOptimizer::builder(&host.plain, Arc::clone(kernels), &stream)
            .config(settings.optimizer.clone())
            .param_dtype(settings.dtype)
            .format(options.format)
            .groups(&groups);
        let builder = match options.state_home() {
            Some(home) => builder.offload(home),
            None => builder,
        };

        let builder = match rank.matrices()? {
            Some((matrices, comm)) => {
                let kernels = Arc::clone(&rank.kernels);
                let plain = host.plain.device();
                let offloaded = OffloadedMatrices {
                    on: MatrixDevice::new(kernels, &rank.pool, comm),
                    held: host.pinned.clone(),
                    done: plain.create_stream(&format!("rank {index} exchanges"))?,
                    limit: settings.host_limit(),
                };
                builder.matrices_on_device(matrices, offloaded)
            }
            None => builder,
        };

        let optimizer = builder.build(segments)?;
        if index == 0 {
            let files = [optimizer.file(), params.file()].into_iter().flatten();
            let mut notices: Vec<_> = files.flat_map(SwapFile::notices).collect();
            notices.dedup();
            notices.iter().for_each(|notice| tracing::warn!("{notice}"));
        }

        let loss_scale = rank
            .pool
            .allocate(1, DType::F64, Purpose::Workspace, &rank.compute)?;
        let mut order: Vec<usize> = rank
            .passes
            .iter()
            .flat_map(|pass| pass.forward_reads.clone())
            .collect();
        order.extend(0..rank.units());
        let mut seen = vec![false; rank.units()];
        order.retain(|&unit| !std::mem::replace(&mut seen[unit], true));
        let units = rank.units();
        let mut device_streams = rank.streams();
        device_streams.push(copies.clone());

        Ok(Self {
            optimizer,
            stream,
            params: Arc::new(Mutex::new(params)),
            grads: (0..units).map(|_| None).collect(),
            released: vec![None; units],
            copies,
            loss_scale,
            grads_file: None,
            outcome: None,
            order,
            device_streams,
            limit: settings.host_limit(),
        })
    }

    /// Whether masters of `unit`, or a part of them, are its parameters.
    pub(super) fn masters_are_in_params(&self, rank: &Rank<D>, unit: usize) -> bool {
        let frozen = || {
            self.optimizer
                .pieces(unit)
                .iter()
                .any(|piece| piece.state.is_none())
        };
        let remainders = rank.settings.offload.format.masters == Masters::Remainder;
        rank.settings.dtype == DType::F32 || remainders || frozen()
    }

    /// Uploads the loss scale of the next backward. Blocks the host.
    pub(crate) fn upload_loss_scale(&self, rank: &Rank<D>) -> Result<(), TrainError> {
        // SAFETY: written on the compute stream, on which alone backward passes read it and which
        // is its block's own.
        let slice = unsafe { self.loss_scale.slice() };
        let scale = self.optimizer.loss_scale().to_ne_bytes();
        Ok(rank
            .pool
            .device()
            .upload(&rank.compute, &scale, slice, rank.settings.host_limit())?)
    }

    /// The stream of the host's work.
    pub(crate) fn stream(&self) -> &HostStream {
        &self.stream
    }

    /// The stream of copies from the device.
    pub(crate) fn copies(&self) -> &D::Stream {
        &self.copies
    }

    /// Makes `stream` wait until the host has read the gradient of `unit` of an earlier step.
    pub(crate) fn wait_for_release(
        &mut self,
        rank: &Rank<D>,
        stream: &D::Stream,
        unit: usize,
    ) -> Result<(), TrainError> {
        match self.released[unit].take() {
            Some(released) => Ok(rank.pool.device().wait_for_host(
                stream,
                &released,
                rank.settings.host_limit(),
            )?),
            None => Ok(()),
        }
    }

    /// Takes the sum of a step over ranks of `unit`, in memory that the host can access, and
    /// enqueues its statistics.
    pub(crate) fn take_sum(
        &mut self,
        rank: &Rank<D>,
        unit: usize,
        reduced: &Reduced<D>,
    ) -> Result<(), TrainError> {
        // SAFETY: used by the host's stream behind `done`; the next reduction waits for `released`.
        let slice = unsafe { reduced.slice_on(&self.copies) }?;
        let done = self.copies.record()?;
        rank.pool
            .device()
            .host_waits(&self.stream, &done, rank.settings.host_limit())?;
        self.take_host_sum(unit, slice)
    }

    /// [`Self::take_sum`] of a slice that is complete on the host's stream.
    pub(crate) fn take_host_sum(&mut self, unit: usize, slice: AnySlice) -> Result<(), TrainError> {
        self.enqueue_stats(unit, slice)?;
        // SAFETY: complete at this point of the stream; the next reduction waits for `released`.
        self.grads[unit] = Some(unsafe { Reduced::new(slice, self.stream.record()?) });
        Ok(())
    }

    /// Enqueues the statistics of a sum that is complete on the host's stream, on which its later
    /// uses are, too.
    pub(crate) fn enqueue_stats(&mut self, unit: usize, sum: AnySlice) -> Result<(), TrainError> {
        // SAFETY: complete at this point of the stream; later writes wait for it or are behind it.
        let sum = unsafe { Reduced::new(sum, self.stream.record()?) };
        self.optimizer
            .enqueue_unit_stats(&self.stream, unit, &sum)?;
        self.released[unit] = Some(self.stream.record()?);
        Ok(())
    }

    /// Exchanges the statistics of the step and decides. Blocks the host until backward has ended.
    pub(crate) fn decide(&mut self, rank: &Rank<D>, inputs: StepInputs) -> Result<(), TrainError> {
        let device = rank.pool.device();
        let limit = rank.settings.host_limit();
        let mut loss = [0; 8];
        let mut flags = [0; 8];
        device.download(&rank.compute, inputs.loss.erase(), &mut loss, limit)?;

        // SAFETY: the same memory as bytes, for which the maker of `flags` made the same promises.
        let of_flags = unsafe {
            AnySlice::from_raw_parts(
                inputs.flags.as_ptr().cast(),
                8,
                DType::U8,
                inputs.flags.device(),
            )
        };

        device.download(&rank.compute, of_flags, &mut flags, limit)?;
        let mut own = self
            .optimizer
            .rank_stats(&self.stream, f64::from_ne_bytes(loss), limit)?;
        own.flags = u64::from_ne_bytes(flags);
        let gathered = RankExchange::of(rank).all_gather(bytemuck::bytes_of(&own))?;
        let ranks: Vec<RankStats> = gathered
            .chunks_exact(size_of::<RankStats>())
            .map(bytemuck::pod_read_unaligned)
            .collect();
        let stats = GatheredStats::new(
            &ranks,
            Divisor::MicroBatches(rank.settings.grad_accum_steps),
        );
        self.outcome = Some(self.optimizer.decide(&self.stream, stats, limit)?);

        self.upload_loss_scale(rank)
    }

    /// Enqueues the decided updates, unit by unit in forward order. `on_file`: the gradients,
    /// unless they are in memory.
    pub(crate) fn update(
        &mut self,
        rank: &Rank<D>,
        mut on_file: Option<&mut UnitFile>,
    ) -> Result<(), TrainError> {
        if self.outcome.as_ref().is_none_or(StepOutcome::is_skipped) {
            return Ok(());
        }
        let Self {
            optimizer,
            stream,
            params,
            grads,
            released,
            order,
            ..
        } = self;

        let mut params = params.lock();
        // The device reads the parameters of the last step no more.
        for device_stream in rank.streams() {
            params.wait_for_device(&device_stream.record()?)?;
        }
        let remainders = rank.settings.offload.format.masters == Masters::Remainder;
        let overwritten = rank.settings.dtype != DType::F32 && !remainders;

        for &unit in order.iter().filter(|unit| rank.trains(**unit)) {
            let overwritten = overwritten
                && optimizer
                    .pieces(unit)
                    .iter()
                    .all(|piece| piece.state.is_some());
            let access = if overwritten {
                SwapAccess::Overwrite
            } else {
                SwapAccess::Update
            };
            let mut update = |grad: &Reduced<HostDevice>| {
                let held = params.acquire(unit, access)?;
                let slices = UnitSlices {
                    grad,
                    param: &[(held.values, 0)],
                };
                optimizer.enqueue_unit_update(stream, unit, &slices)?;
                held.write_back()?;
                Ok::<_, TrainError>(())
            };
            match (&mut on_file, &grads[unit]) {
                (Some(file), _) => {
                    let grad = file.acquire(unit, SwapAccess::Read)?;
                    // SAFETY: complete at this point of the stream, on which it is read.
                    update(&unsafe { Reduced::new(grad.values, stream.record()?) })?;
                }
                (None, Some(grad)) => update(grad)?,
                (None, None) => continue,
            }
            released[unit] = Some(stream.record()?);
        }

        if !rank.settings.overlap {
            stream.synchronize(rank.settings.host_limit())?;
        }
        Ok(())
    }

    /// The outcome of the step.
    pub(crate) fn outcome(&mut self) -> Option<StepOutcome> {
        self.outcome.take()
    }

    /// Blocks the host until its updates have run.
    pub(crate) fn synchronize(&self, rank: &Rank<D>) -> Result<(), TrainError> {
        Ok(self.stream.synchronize(rank.settings.host_limit())?)
    }

    /// The scratch files: their length, and what was read and written so far; `None` if there are
    /// none.
    pub(crate) fn nvme(&self) -> Option<NvmeBytes> {
        let params = self.params.lock();
        let files = [
            self.optimizer.file(),
            params.file(),
            self.grads_file.as_ref(),
        ];
        let bytes = files.into_iter().flatten().map(|file| NvmeBytes {
            file_bytes: file.bytes(),
            read_bytes: file.read_bytes(),
            written_bytes: file.written_bytes(),
        });
        bytes.reduce(|a, b| NvmeBytes {
            file_bytes: a.file_bytes + b.file_bytes,
            read_bytes: a.read_bytes + b.read_bytes,
            written_bytes: a.written_bytes + b.written_bytes,
        })
    }

    /// Takes note of the gradients' file.
    pub(crate) fn count(&mut self, grads_file: SwapFile) {
        self.grads_file = Some(grads_file);
    }
}

impl<D: Device> HostOptimizer<D> {
    /// The parameters that it updates.
    pub(crate) fn params(&self) -> SharedParams<D> {
        Arc::clone(&self.params)
    }

    /// The loss scale in memory of the device.
    pub(crate) fn loss_scale(&self) -> Result<DeviceSlice<f64>, TrainError> {
        // SAFETY: backward passes read it on the compute stream, on which it is written and which
        // is its block's own.
        Ok(unsafe { self.loss_scale.slice() }.typed()?)
    }
}

impl<D: Device> Drop for HostOptimizer<D> {
    fn drop(&mut self) {
        // The host uses memory of the stage, and the device memory of the host; pools know of
        // neither.
        self.device_streams
            .iter()
            .for_each(|stream| drain(stream, self.limit));
        drain(&self.stream, self.limit);
    }
}

impl OffloadSettings {
    /// The home of state that is not plainly in host memory.
    fn state_home(&self) -> Option<StateHome> {
        match &self.optimizer {
            Home::Nvme(dir) => Some(StateHome::Nvme {
                dir: dir.clone(),
                options: self.swap(),
                buffers: self.buffers.max(1),
            }),
            _ if self.format == StateFormat::default() => None,
            _ => Some(StateHome::Memory),
        }
    }
}
