//! The optimizer on the device.

use zero_alloc::device::{AnySlice, Device, DeviceSlice, Reduced, Stream};
use zero_ckpt::Reader;
use zero_comm::SumInto;
use zero_optim::{
    Divisor, Progress, RankParams, Segment, ShardedOptimizer, StateKind, StateRange, StepOutcome,
    UnitSlices,
};

use crate::error::TrainError;
use crate::rank::Rank;
use crate::stages::device_sums::DeviceSums;
use crate::stages::optimizer::{Optimizer, device_steps, no_outcome, write_weights};
use crate::step::inputs::StepInputs;
use crate::workload::Fill;

/// An optimizer on the device.
pub(crate) struct DeviceOptimizer<D: Device> {
    optimizer: ShardedOptimizer<D>,
    /// The parameters that it updates.
    params: Vec<AnySlice>,
    sums: DeviceSums<D>,
}

impl<D: Device> DeviceOptimizer<D> {
    pub(crate) fn new(
        rank: &Rank<D>,
        segments: Vec<Segment>,
        params: Vec<AnySlice>,
    ) -> Result<Self, TrainError> {
        let settings = &rank.settings;
        let groups = rank.groups_held()?;
        let kernels = rank.kernels.clone();
        let optimizer = ShardedOptimizer::builder(&rank.pool, kernels, &rank.compute)
            .config(settings.optimizer.clone())
            .param_dtype(settings.dtype)
            .groups(&groups)
            .format(settings.offload.format);
        let optimizer = match rank.matrices()? {
            Some((matrices, exchange)) => optimizer.matrices(matrices, exchange),
            None => optimizer,
        };
        Ok(Self {
            optimizer: optimizer.build(segments)?,
            params,
            sums: DeviceSums::new(rank)?,
        })
    }

    /// The slices of each unit's parameter.
    fn param_slices(&self) -> Vec<[(AnySlice, usize); 1]> {
        self.params.iter().map(|&param| [(param, 0)]).collect()
    }
}

impl<D: Device> Optimizer<D> for DeviceOptimizer<D> {
    fn loss_scale(&self) -> Result<DeviceSlice<f64>, TrainError> {
        // SAFETY: backward passes read it on the compute stream only, which is the optimizer's
        // stream.
        Ok(unsafe { self.optimizer.device_loss_scale() }?)
    }

    fn local_sum(&self, unit: usize) -> Option<AnySlice> {
        Some(self.sums.unit(unit))
    }

    fn begin_sum(&mut self, _rank: &Rank<D>, unit: usize) -> Result<AnySlice, TrainError> {
        Ok(self.sums.shard(unit))
    }

    fn sum_into(
        &mut self,
        _rank: &Rank<D>,
        unit: usize,
        adds: bool,
    ) -> Result<SumInto<D>, TrainError> {
        Ok(self.sums.target(unit, adds))
    }

    fn take_sum(
        &mut self,
        _rank: &Rank<D>,
        unit: usize,
        _micro: usize,
        sum: Reduced<D>,
    ) -> Result<(), TrainError> {
        self.sums.store(unit, sum);
        Ok(())
    }

    fn prepare_steps(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        let mut config = device_steps(rank.comm.world_size());
        config.rank = rank.comm.rank();
        config.divisor = Divisor::MicroBatches(rank.settings.grad_accum_steps);
        let limit = rank.settings.host_limit();
        Ok(self
            .optimizer
            .prepare_device_steps(&rank.pool, &rank.compute, config, limit)?)
    }

    fn decide(&mut self, rank: &Rank<D>, inputs: StepInputs) -> Result<(), TrainError> {
        let Rank {
            compute,
            comm_stream,
            ..
        } = rank;
        let optimizer = &mut self.optimizer;
        optimizer.enqueue_stats(compute, &self.sums.reduced())?;
        optimizer.enqueue_rank_stats(compute, inputs.loss, inputs.flags)?;
        // SAFETY: the gather is ordered after this and before the advance by the two events below.
        let stats = unsafe { optimizer.rank_stats_slices() }?;
        comm_stream.wait(&compute.record()?)?;
        rank.comm
            .control_all_gather(comm_stream, stats.own, stats.all)?;
        compute.wait(&comm_stream.record()?)?;
        Ok(optimizer.enqueue_advance(compute)?)
    }

    fn expect_outcome(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        Ok(self.optimizer.expect_outcome(&rank.compute)?)
    }

    fn update(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        let params = self.param_slices();
        let sums = self.sums.reduced();
        let units: Vec<UnitSlices<'_, D>> = sums
            .into_iter()
            .zip(&params)
            .map(|(grad, param)| UnitSlices { grad, param })
            .collect();
        Ok(self.optimizer.enqueue_update(&rank.compute, &units)?)
    }

    fn outcome(&mut self, rank: &Rank<D>) -> Result<StepOutcome, TrainError> {
        let limit = rank.settings.host_limit();
        let outcome = self.optimizer.all_outcomes(limit)?.pop();
        outcome.ok_or_else(no_outcome)
    }

    fn skip_outcome(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        Ok(self.optimizer.skip_outcomes(rank.settings.host_limit())?)
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
        let param = [(self.params[range.unit], 0)];
        let limit = rank.settings.host_limit();
        Ok(self
            .optimizer
            .read_state(&rank.compute, range, &param, out, limit)?)
    }

    fn set_weights(
        &mut self,
        rank: &Rank<D>,
        unit: usize,
        elems: usize,
        fill: Fill<'_>,
    ) -> Result<(), TrainError> {
        let limit = rank.settings.host_limit();
        let param = [(self.params[unit], 0)];
        let optimizer = &mut self.optimizer;
        write_weights(optimizer, &rank.compute, (unit, elems), &param, fill, limit)
    }

    fn load(&mut self, rank: &Rank<D>, reader: &Reader) -> Result<(), TrainError> {
        let params = self.param_slices();
        let units = rank.settings.saved_units(params.len());
        let mut load = || {
            for (unit, params) in params.iter().enumerate().take(units) {
                let own = RankParams {
                    layout: rank.layouts.parts(),
                    rank: rank.part(),
                    params,
                };
                let limit = rank.settings.host_limit();
                let optimizer = &mut self.optimizer;
                optimizer.load_unit(&rank.compute, reader, unit, &own, limit)?;
            }
            self.optimizer.load_progress(reader)
        };
        load().map_err(TrainError::unreadable)
    }
}
