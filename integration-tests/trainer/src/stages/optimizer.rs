//! The optimizer of a rank with the gradients' sums that it updates by: on the device, or on the
//! host.
//!
//! Who sums where is chosen here once, when the stage is made:
//!
//! | optimizer | sums over ranks |
//! |---|---|
//! | on the device | on the device |
//! | on the host, which is the device | on the device, in place |
//! | on the host of a GPU, or gradients on NVMe | leave the device unit by unit ([`LeavingSums`]) |

use std::ops::Range;

use zero_alloc::device::{AnySlice, Device, DeviceSlice, Reduced, Stream};
use zero_ckpt::Reader;
use zero_comm::SumInto;
use zero_optim::{
    DeviceStepConfig, Divisor, Progress, RankParams, Segment, ShardedAdamW, StateKind, StateRange,
    StepOutcome, UnitSlices,
};
use zero_shard::UnitLayout;

use crate::error::TrainError;
use crate::offload::host_optimizer::HostOptimizer;
use crate::offload::host_params::SharedParams;
use crate::offload::leaving_sums::LeavingSums;
use crate::rank::{Fill, Parts, Rank};
use crate::stages::device_sums::DeviceSums;
use crate::step::inputs::StepInputs;

/// Steps whose learning rates are uploaded at once.
pub(crate) const STEPS_AHEAD: u64 = 1024;

/// Elements of the weights in host memory at a time while they are set: a unit may be larger than
/// all other host memory.
const CHUNK_ELEMS: usize = 1 << 20;

/// The optimizer of a rank.
pub(crate) enum Optimizer<D: Device> {
    Device(Box<OnDevice<D>>),
    Host(Box<OnHost<D>>),
}

/// An optimizer on the device.
pub(crate) struct OnDevice<D: Device> {
    optimizer: ShardedAdamW<D>,
    /// The parameters that it updates.
    params: Vec<AnySlice>,
    sums: DeviceSums<D>,
}

/// An optimizer on the host.
pub(crate) struct OnHost<D: Device> {
    /// Declared first: its drop waits for the host's work on the sums.
    optimizer: HostOptimizer<D>,
    sums: HostSums<D>,
}

enum HostSums<D: Device> {
    /// In memory that the host shares with the device.
    Shared(DeviceSums<D>),
    Leaving(Box<LeavingSums<D>>),
}

impl<D: Device> Optimizer<D> {
    /// `params` are the device's parameters that the rank updates, if it has them.
    pub(crate) fn new(rank: &Rank<D>, params: Option<Vec<AnySlice>>) -> Result<Self, TrainError> {
        let offload = &rank.settings.offload;
        let segments = segments(rank);
        let params = match params {
            Some(params) if !offload.updates_on_host() => {
                return Ok(Self::Device(Box::new(OnDevice {
                    optimizer: device_optimizer(rank, segments)?,
                    params,
                    sums: DeviceSums::new(rank)?,
                })));
            }
            params => params,
        };
        let mut optimizer = HostOptimizer::new(rank, segments, params)?;
        let leaves = !rank.is_host() || offload.grads_on_file().is_some();
        let sums = if leaves {
            HostSums::Leaving(Box::new(LeavingSums::new(rank, &mut optimizer)?))
        } else {
            HostSums::Shared(DeviceSums::new(rank)?)
        };
        Ok(Self::Host(Box::new(OnHost { optimizer, sums })))
    }

    /// The host's, if the host updates.
    pub(crate) fn on_host(&mut self) -> Option<&mut HostOptimizer<D>> {
        match self {
            Self::Device(_) => None,
            Self::Host(host) => Some(&mut host.optimizer),
        }
    }

    /// The parameters that the host updates, if it does.
    pub(crate) fn host_params(&self) -> Option<SharedParams<D>> {
        match self {
            Self::Device(_) => None,
            Self::Host(host) => Some(host.optimizer.params()),
        }
    }

    /// The loss scale of a backward pass on the compute stream.
    pub(crate) fn loss_scale(&self) -> Result<DeviceSlice<f64>, TrainError> {
        match self {
            // SAFETY: backward passes read it on the compute stream only, which is the optimizer's
            // stream.
            Self::Device(device) => Ok(unsafe { device.optimizer.device_loss_scale() }?),
            Self::Host(host) => host.optimizer.loss_scale(),
        }
    }
}

/// The gradients of a step.
impl<D: Device> Optimizer<D> {
    /// Memory to which all passes of a step add the gradient of `unit`, where the sum of the step
    /// will be. `None` where sums leave the device.
    pub(crate) fn local_sum(&self, unit: usize) -> Option<AnySlice> {
        match self {
            Self::Device(device) => Some(device.sums.unit(unit)),
            Self::Host(host) => match &host.sums {
                HostSums::Shared(sums) => Some(sums.unit(unit)),
                HostSums::Leaving(_) => None,
            },
        }
    }

    /// The place to which the compute stream writes the gradient of `unit`, which is the sum of one
    /// rank's only micro-batch.
    pub(crate) fn begin_sum(
        &mut self,
        rank: &Rank<D>,
        unit: usize,
    ) -> Result<AnySlice, TrainError> {
        match self {
            Self::Device(device) => Ok(device.sums.shard(unit)),
            Self::Host(host) => match &mut host.sums {
                HostSums::Shared(sums) => {
                    host.optimizer.wait_for_release(rank, &rank.compute, unit)?;
                    Ok(sums.shard(unit))
                }
                HostSums::Leaving(sums) => sums.next_buffer(rank, unit, &rank.compute),
            },
        }
    }

    /// The place to which the communication stream writes the sum over ranks of `unit`; or the
    /// earlier sum to which it adds, if `adds`.
    pub(crate) fn sum_into(
        &mut self,
        rank: &Rank<D>,
        unit: usize,
        adds: bool,
    ) -> Result<SumInto<D>, TrainError> {
        match self {
            Self::Device(device) => Ok(device.sums.target(unit, adds)),
            Self::Host(host) => match &mut host.sums {
                HostSums::Shared(sums) => {
                    let into = sums.target(unit, adds);
                    if let SumInto::Write(_) = into {
                        let optimizer = &mut host.optimizer;
                        optimizer.wait_for_release(rank, &rank.comm_stream, unit)?;
                    }
                    Ok(into)
                }
                HostSums::Leaving(sums) => {
                    let buffer = sums.next_buffer(rank, unit, &rank.comm_stream)?;
                    Ok(SumInto::Write(buffer))
                }
            },
        }
    }

    /// Whether the sum of each micro-batch leaves the device.
    pub(crate) fn sums_leave(&self) -> bool {
        matches!(self, Self::Host(host) if matches!(host.sums, HostSums::Leaving(_)))
    }

    /// Takes the sum over ranks of micro-batch `micro`. If it is the last, the host enqueues its
    /// statistics.
    pub(crate) fn take_sum(
        &mut self,
        rank: &Rank<D>,
        unit: usize,
        micro: usize,
        sum: Reduced<D>,
    ) -> Result<(), TrainError> {
        let last = micro + 1 == rank.settings.grad_accum_steps;
        match self {
            Self::Device(device) => {
                device.sums.store(unit, sum);
                Ok(())
            }
            Self::Host(host) => match &mut host.sums {
                HostSums::Shared(sums) => {
                    let sum = sums.store(unit, sum);
                    if last {
                        host.optimizer.take_sum(rank, unit, sum)?;
                    }
                    Ok(())
                }
                HostSums::Leaving(sums) => sums.take(rank, unit, micro, &sum, &mut host.optimizer),
            },
        }
    }
}

/// The end of a step.
impl<D: Device> Optimizer<D> {
    /// Uploads what the next [`STEPS_AHEAD`] decisions need. The outcomes of all earlier steps must
    /// have been read.
    pub(crate) fn prepare_steps(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        let optimizer = match self {
            Self::Device(device) => &mut device.optimizer,
            Self::Host(host) => return host.optimizer.upload_loss_scale(rank),
        };
        let mut config = device_steps(rank.comm.world_size());
        config.rank = rank.comm.rank();
        config.divisor = Divisor::MicroBatches(rank.settings.grad_accum_steps);
        let limit = rank.settings.host_limit();
        Ok(optimizer.prepare_device_steps(&rank.pool, &rank.compute, config, limit)?)
    }

    /// Enqueues this rank's gradient statistics, their all-gather, and the decision (skip or
    /// update, clipping), which is the same on all ranks. A host that updates waits for backward
    /// and decides itself.
    pub(crate) fn decide(&mut self, rank: &Rank<D>, inputs: StepInputs) -> Result<(), TrainError> {
        let Rank {
            compute,
            comm_stream,
            ..
        } = rank;
        let (optimizer, sums) = match self {
            Self::Device(device) => (&mut device.optimizer, &device.sums),
            Self::Host(host) => return host.optimizer.decide(rank, inputs),
        };
        optimizer.enqueue_stats(compute, &sums.reduced())?;
        optimizer.enqueue_rank_stats(compute, inputs.loss, inputs.flags)?;
        // SAFETY: the gather is ordered after this and before the advance by the two events below.
        let stats = unsafe { optimizer.rank_stats_slices() }?;
        comm_stream.wait(&compute.record()?)?;
        rank.comm
            .control_all_gather(comm_stream, stats.own, stats.all)?;
        compute.wait(&comm_stream.record()?)?;
        Ok(optimizer.enqueue_advance(compute)?)
    }

    /// Call it after the decision is enqueued or replayed.
    pub(crate) fn expect_outcome(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        if let Self::Device(device) = self {
            device.optimizer.expect_outcome(&rank.compute)?;
        }
        Ok(())
    }

    /// Enqueues the decided update, a no-op in a skipped step.
    pub(crate) fn update(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        let device = match self {
            Self::Device(device) => device,
            Self::Host(host) => {
                let on_file = match &mut host.sums {
                    HostSums::Shared(_) => None,
                    HostSums::Leaving(sums) => sums.on_file(),
                };
                return host.optimizer.update(rank, on_file);
            }
        };
        let params: Vec<_> = device.params.iter().map(|&param| [(param, 0)]).collect();
        let sums = device.sums.reduced();
        let units: Vec<UnitSlices<'_, D>> = sums
            .into_iter()
            .zip(&params)
            .map(|(grad, param)| UnitSlices { grad, param })
            .collect();
        Ok(device.optimizer.enqueue_update(&rank.compute, &units)?)
    }

    /// Waits for the decision of the enqueued step as [`Self::outcome`], and forgets it.
    pub(crate) fn skip_outcome(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        match self {
            Self::Device(device) => {
                let limit = rank.settings.host_limit();
                device.optimizer.skip_outcomes(limit)?;
            }
            Self::Host(host) => drop(host.optimizer.outcome()),
        }
        Ok(())
    }

    /// Waits for the decision of the enqueued step and returns it.
    pub(crate) fn outcome(&mut self, rank: &Rank<D>) -> Result<StepOutcome, TrainError> {
        let outcome = match self {
            Self::Device(device) => {
                let limit = rank.settings.host_limit();
                device.optimizer.all_outcomes(limit)?.pop()
            }
            Self::Host(host) => host.optimizer.outcome(),
        };
        outcome.ok_or_else(|| {
            TrainError::State("internal error: the device reported no step outcome".to_owned())
        })
    }
}

/// The state: weights, moments and progress.
impl<D: Device> Optimizer<D> {
    /// The step counts and the loss scaler's state, for a checkpoint.
    pub(crate) fn progress(&self) -> Progress {
        match self {
            Self::Device(device) => device.optimizer.progress(),
            Self::Host(host) => host.optimizer.progress(),
        }
    }

    /// The units' segments.
    pub(crate) fn segments(&self) -> &[Segment] {
        match self {
            Self::Device(device) => device.optimizer.segments(),
            Self::Host(host) => host.optimizer.segments(),
        }
    }

    /// Reads a range of the state as fp32.
    pub(crate) fn read_state(
        &mut self,
        rank: &Rank<D>,
        range: &StateRange,
        out: &mut [f32],
    ) -> Result<(), TrainError> {
        let device = match self {
            Self::Device(device) => device,
            Self::Host(host) => return host.optimizer.read_state(rank, range, out),
        };
        let param = [(device.params[range.unit], 0)];
        let limit = rank.settings.host_limit();
        let optimizer = &mut device.optimizer;
        Ok(optimizer.read_state(&rank.compute, range, &param, out, limit)?)
    }

    /// Sets the weights of `unit`, of which the rank has `elems` elements, in parts: `fill` returns
    /// those of a range.
    pub(crate) fn set_weights(
        &mut self,
        rank: &Rank<D>,
        unit: usize,
        elems: usize,
        fill: Fill<'_>,
    ) -> Result<(), TrainError> {
        let parts: Parts = (0..elems)
            .step_by(CHUNK_ELEMS)
            .map(|start| start..elems.min(start + CHUNK_ELEMS))
            .collect();
        let device = match self {
            Self::Device(device) => device,
            Self::Host(host) => return host.optimizer.set_weights(rank, unit, parts, fill),
        };

        let stream = &rank.compute;
        let limit = rank.settings.host_limit();
        let param = [(device.params[unit], 0)];
        let mut values = Vec::new();

        for elems in parts {
            fill(elems.clone(), &mut values)?;
            let range = StateRange {
                kind: StateKind::Master,
                unit,
                elems,
            };
            let optimizer = &mut device.optimizer;
            optimizer.write_state(stream, &range, &param, &values, limit)?;
        }

        Ok(device.optimizer.write_unit_params(stream, unit, &param)?)
    }

    /// Loads weights, moments and progress from a checkpoint.
    pub(crate) fn load(&mut self, rank: &Rank<D>, reader: &Reader) -> Result<(), TrainError> {
        let device = match self {
            Self::Device(device) => device,
            Self::Host(host) => return host.optimizer.load(rank, reader),
        };
        let params: Vec<_> = device.params.iter().map(|&param| [(param, 0)]).collect();
        let own = RankParams {
            layout: rank.layouts.parts(),
            rank: rank.part(),
            params: &params,
        };
        let limit = rank.settings.host_limit();
        device
            .optimizer
            .load(&rank.compute, reader, &own, limit)
            .map_err(TrainError::unreadable)
    }
}

/// The configuration of decisions on the device, for rank 0 of `ranks` ranks.
pub fn device_steps(ranks: usize) -> DeviceStepConfig {
    DeviceStepConfig::new(0, ranks, Divisor::MicroBatches(1), STEPS_AHEAD as usize)
}

/// The parts of the units that this rank updates: its shards, parts of them, or at stage 0 all of
/// each unit.
fn segments<D: Device>(rank: &Rank<D>) -> Vec<Segment> {
    let mut end = 0;
    let segment = |(unit, placed): (usize, &UnitLayout)| {
        let held = rank.held(unit);
        let within = |range: Range<u64>| {
            (range.start - held.start) as usize..(range.end - held.start) as usize
        };
        let own = within(rank.saves(unit));
        let start = end;
        end += (held.end - held.start) as usize;
        Segment::whole(&placed.name, start..end, own).with_counted(within(rank.counted(unit)))
    };
    rank.layout
        .units()
        .iter()
        .enumerate()
        .map(segment)
        .collect()
}

fn device_optimizer<D: Device>(
    rank: &Rank<D>,
    segments: Vec<Segment>,
) -> Result<ShardedAdamW<D>, TrainError> {
    let settings = &rank.settings;
    let groups = rank.groups_held()?;
    Ok(
        ShardedAdamW::builder(&rank.pool, rank.kernels.clone(), &rank.compute)
            .config(settings.optimizer.clone())
            .param_dtype(settings.dtype)
            .groups(&groups)
            .remainders(settings.offload.format.remainder)
            .build(segments)?,
    )
}
