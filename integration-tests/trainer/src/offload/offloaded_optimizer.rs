//! The optimizer on the host, with the sums of gradients that it updates by.

use zero_alloc::device::{AnySlice, Device, DeviceSlice, Reduced};
use zero_alloc::swap::SwapAccess;
use zero_ckpt::Reader;
use zero_comm::SumInto;
use zero_optim::{Progress, RankParams, Segment, StateKind, StateRange, StepOutcome};

use crate::error::TrainError;
use crate::offload::host_optimizer::HostOptimizer;
use crate::offload::host_params::SharedParams;
use crate::offload::leaving_sums::LeavingSums;
use crate::rank::Rank;
use crate::stages::device_sums::DeviceSums;
use crate::stages::optimizer::{Optimizer, no_outcome, write_weights};
use crate::step::inputs::StepInputs;
use crate::workload::Fill;

/// An optimizer on the host.
pub(crate) struct OffloadedOptimizer<D: Device> {
    /// Declared first: its drop waits for the host's work on the sums.
    host: HostOptimizer<D>,
    sums: HostSums<D>,
}

enum HostSums<D: Device> {
    /// In memory that the host shares with the device.
    Shared(DeviceSums<D>),
    Leaving(Box<LeavingSums<D>>),
}

impl<D: Device> OffloadedOptimizer<D> {
    pub(crate) fn new(
        rank: &Rank<D>,
        segments: Vec<Segment>,
        on_device: Option<Vec<AnySlice>>,
    ) -> Result<Self, TrainError> {
        let mut host = HostOptimizer::new(rank, segments, on_device)?;
        let leaves = !rank.is_host() || rank.settings.offload.grads_on_file().is_some();
        let sums = if leaves {
            HostSums::Leaving(Box::new(LeavingSums::new(rank, &mut host)?))
        } else {
            HostSums::Shared(DeviceSums::new(rank)?)
        };
        Ok(Self { host, sums })
    }
}

impl<D: Device> Optimizer<D> for OffloadedOptimizer<D> {
    fn on_host(&mut self) -> Option<&mut HostOptimizer<D>> {
        Some(&mut self.host)
    }

    fn host_params(&self) -> Option<SharedParams<D>> {
        Some(self.host.params())
    }

    fn loss_scale(&self) -> Result<DeviceSlice<f64>, TrainError> {
        self.host.loss_scale()
    }

    fn local_sum(&self, unit: usize) -> Option<AnySlice> {
        match &self.sums {
            HostSums::Shared(sums) => Some(sums.unit(unit)),
            HostSums::Leaving(_) => None,
        }
    }

    fn begin_sum(&mut self, rank: &Rank<D>, unit: usize) -> Result<AnySlice, TrainError> {
        match &mut self.sums {
            HostSums::Shared(sums) => {
                self.host.wait_for_release(rank, &rank.compute, unit)?;
                Ok(sums.shard(unit))
            }
            HostSums::Leaving(sums) => sums.next_buffer(rank, unit, &rank.compute),
        }
    }

    fn sum_into(
        &mut self,
        rank: &Rank<D>,
        unit: usize,
        adds: bool,
    ) -> Result<SumInto<D>, TrainError> {
        match &mut self.sums {
            HostSums::Shared(sums) => {
                let into = sums.target(unit, adds);
                if let SumInto::Write(_) = into {
                    let stream = &rank.comm_stream;
                    self.host.wait_for_release(rank, stream, unit)?;
                }
                Ok(into)
            }
            HostSums::Leaving(sums) => {
                let buffer = sums.next_buffer(rank, unit, &rank.comm_stream)?;
                Ok(SumInto::Write(buffer))
            }
        }
    }

    fn sums_leave(&self) -> bool {
        matches!(self.sums, HostSums::Leaving(_))
    }

    fn take_sum(
        &mut self,
        rank: &Rank<D>,
        unit: usize,
        micro: usize,
        sum: Reduced<D>,
    ) -> Result<(), TrainError> {
        match &mut self.sums {
            HostSums::Shared(sums) => {
                let sum = sums.store(unit, sum);
                if micro + 1 == rank.settings.grad_accum_steps {
                    self.host.take_sum(rank, unit, sum)?;
                }
                Ok(())
            }
            HostSums::Leaving(sums) => sums.take(rank, unit, micro, &sum, &mut self.host),
        }
    }

    fn prepare_steps(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        self.host.upload_loss_scale(rank)
    }

    fn decide(&mut self, rank: &Rank<D>, inputs: StepInputs) -> Result<(), TrainError> {
        self.host.decide(rank, inputs)
    }

    fn update(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        let on_file = match &mut self.sums {
            HostSums::Shared(_) => None,
            HostSums::Leaving(sums) => sums.on_file(),
        };
        self.host.update(rank, on_file)
    }

    fn outcome(&mut self, _rank: &Rank<D>) -> Result<StepOutcome, TrainError> {
        self.host.outcome().ok_or_else(no_outcome)
    }

    fn skip_outcome(&mut self, _rank: &Rank<D>) -> Result<(), TrainError> {
        drop(self.host.outcome());
        Ok(())
    }

    fn progress(&self) -> Progress {
        self.host.optimizer.progress()
    }

    fn segments(&self) -> &[Segment] {
        self.host.optimizer.segments()
    }

    fn kinds(&self) -> Vec<StateKind> {
        self.host.optimizer.kinds()
    }

    fn read_state(
        &mut self,
        rank: &Rank<D>,
        range: &StateRange,
        out: &mut [f32],
    ) -> Result<(), TrainError> {
        let limit = rank.settings.host_limit();
        let unit = range.unit;
        let is_master = range.kind == StateKind::Master;
        let reads = is_master && self.host.masters_are_in_params(rank, unit);
        let HostOptimizer {
            optimizer,
            stream,
            params,
            ..
        } = &mut self.host;
        let mut params = params.lock();

        let held;
        let param = if reads {
            held = params.acquire(unit, SwapAccess::Read)?;
            held.values
        } else {
            // The optimizer has the values.
            params.unread(unit)
        };
        Ok(optimizer.read_state(stream, range, &[(param, 0)], out, limit)?)
    }

    fn set_weights(
        &mut self,
        rank: &Rank<D>,
        unit: usize,
        elems: usize,
        fill: Fill<'_>,
    ) -> Result<(), TrainError> {
        let limit = rank.settings.host_limit();
        let HostOptimizer {
            optimizer,
            stream,
            params,
            ..
        } = &mut self.host;
        let mut params = params.lock();
        let held = params.acquire(unit, SwapAccess::Update)?;
        let param = [(held.values, 0)];
        write_weights(optimizer, stream, (unit, elems), &param, fill, limit)?;
        Ok(held.write_back()?)
    }

    fn load(&mut self, rank: &Rank<D>, reader: &Reader) -> Result<(), TrainError> {
        let limit = rank.settings.host_limit();
        let HostOptimizer {
            optimizer,
            stream,
            params,
            ..
        } = &mut self.host;
        let mut params = params.lock();
        for unit in 0..rank.settings.saved_units(rank.units()) {
            let held = params.acquire(unit, SwapAccess::Update)?;
            let own = RankParams {
                layout: rank.layouts.parts(),
                rank: rank.part(),
                params: &[(held.values, 0)],
            };
            optimizer
                .load_unit(stream, reader, unit, &own, limit)
                .map_err(TrainError::unreadable)?;
            held.write_back()?;
        }
        optimizer
            .load_progress(reader)
            .map_err(TrainError::unreadable)
    }
}
