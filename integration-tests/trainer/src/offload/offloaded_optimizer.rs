//! The optimizer on the host, with the sums of gradients that it updates by.

use zero_alloc::device::{AnySlice, Device, DeviceSlice, Reduced};
use zero_ckpt::Reader;
use zero_comm::SumInto;
use zero_optim::{Progress, Segment, StateKind, StateRange, StepOutcome};

use crate::error::TrainError;
use crate::offload::host_optimizer::HostOptimizer;
use crate::offload::host_params::SharedParams;
use crate::offload::leaving_sums::LeavingSums;
use crate::rank::{Fill, Rank};
use crate::stages::device_sums::DeviceSums;
use crate::stages::optimizer::{Optimizer, no_outcome, parts_of};
use crate::step::inputs::StepInputs;

/// An optimizer on the host.
pub(crate) struct OffloadedOptimizer<D: Device> {
    /// Declared first: its drop waits for the host's work on the sums.
    optimizer: HostOptimizer<D>,
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
        let mut optimizer = HostOptimizer::new(rank, segments, on_device)?;
        let leaves = !rank.is_host() || rank.settings.offload.grads_on_file().is_some();
        let sums = if leaves {
            HostSums::Leaving(Box::new(LeavingSums::new(rank, &mut optimizer)?))
        } else {
            HostSums::Shared(DeviceSums::new(rank)?)
        };
        Ok(Self { optimizer, sums })
    }
}

impl<D: Device> Optimizer<D> for OffloadedOptimizer<D> {
    fn on_host(&mut self) -> Option<&mut HostOptimizer<D>> {
        Some(&mut self.optimizer)
    }

    fn host_params(&self) -> Option<SharedParams<D>> {
        Some(self.optimizer.params())
    }

    fn loss_scale(&self) -> Result<DeviceSlice<f64>, TrainError> {
        self.optimizer.loss_scale()
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
                self.optimizer.wait_for_release(rank, &rank.compute, unit)?;
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
                    self.optimizer.wait_for_release(rank, stream, unit)?;
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
                    self.optimizer.take_sum(rank, unit, sum)?;
                }
                Ok(())
            }
            HostSums::Leaving(sums) => sums.take(rank, unit, micro, &sum, &mut self.optimizer),
        }
    }

    fn prepare_steps(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        self.optimizer.upload_loss_scale(rank)
    }

    fn decide(&mut self, rank: &Rank<D>, inputs: StepInputs) -> Result<(), TrainError> {
        self.optimizer.decide(rank, inputs)
    }

    fn update(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        let on_file = match &mut self.sums {
            HostSums::Shared(_) => None,
            HostSums::Leaving(sums) => sums.on_file(),
        };
        self.optimizer.update(rank, on_file)
    }

    fn outcome(&mut self, _rank: &Rank<D>) -> Result<StepOutcome, TrainError> {
        self.optimizer.outcome().ok_or_else(no_outcome)
    }

    fn skip_outcome(&mut self, _rank: &Rank<D>) -> Result<(), TrainError> {
        drop(self.optimizer.outcome());
        Ok(())
    }

    fn progress(&self) -> Progress {
        self.optimizer.progress()
    }

    fn segments(&self) -> &[Segment] {
        self.optimizer.segments()
    }

    fn kinds(&self) -> Vec<StateKind> {
        self.optimizer.kinds()
    }

    fn read_state(
        &mut self,
        rank: &Rank<D>,
        range: &StateRange,
        out: &mut [f32],
    ) -> Result<(), TrainError> {
        self.optimizer.read_state(rank, range, out)
    }

    fn set_weights(
        &mut self,
        rank: &Rank<D>,
        unit: usize,
        elems: usize,
        fill: Fill<'_>,
    ) -> Result<(), TrainError> {
        let parts = parts_of(elems);
        self.optimizer.set_weights(rank, unit, parts, fill)
    }

    fn load(&mut self, rank: &Rank<D>, reader: &Reader) -> Result<(), TrainError> {
        self.optimizer.load(rank, reader)
    }
}
