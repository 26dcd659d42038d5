//! The parts of a [`Zero`](super::Zero) besides the gathers of stage 3.

use std::fmt::Display;
use std::path::Path;
use std::sync::{Arc, Mutex};

use half::{bf16, f16};
use zero_alloc::Block;
use zero_alloc::device::{AnySlice, DType, Device, DeviceKind, Event, Stream};
use zero_ckpt::{ExchangeFn, Reader, SaveMeta, Store, StoreOptions};
use zero_shard::{Layout, ParamId, ZeroStage};

use crate::{Divisor, RankParams, RankSettings, ShardedAdamW, StepInputs, StepOutcome};
use crate::{UnitSlices, agree};

use super::FrameworkError;
use super::gradients::Gradients;
use super::rank::Rank;
use super::values::{Memory, some};

/// The parameters of a unit between steps.
pub(super) struct UnitParams<D: Device> {
    /// The whole unit at stages 0 to 2, this rank's shard at stage 3.
    pub(super) held: AnySlice,
    /// The optimizer's part: the whole unit at stage 0, else this rank's shard.
    pub(super) own: [(AnySlice, usize); 1],
    /// The parameters are whole after it, at stages 0 to 2.
    pub(super) ready: D::Event,
    pub(super) memory: Memory,
}

/// The key of the framework's part in the checkpoint's trainer document.
const STATE: &str = "framework";

pub(super) struct Core<D: Device> {
    pub(super) rank: Rank<D>,
    pub(super) stage: ZeroStage,
    pub(super) micro_batches: usize,
    pub(super) layout: Layout,
    pub(super) params: Vec<UnitParams<D>>,
    pub(super) gradients: Gradients<D>,
    pub(super) optim: ShardedAdamW<D>,
    /// Steps that ended.
    pub(super) steps: u64,
    /// The framework's part of a checkpoint.
    pub(super) state: serde_json::Value,
    /// Whether the framework has views of parameters between steps.
    pub(super) has_views: bool,
    pub(super) in_step: bool,
    /// Why no further step can begin.
    pub(super) broken: Option<String>,
}

/// Keeps a block until nothing uses its slice.
pub(super) fn kept<D: Device>(block: Block<D>) -> Memory {
    Arc::new(Mutex::new(block))
}

impl<D: Device> Core<D> {
    pub(super) fn check(&self) -> Result<(), FrameworkError> {
        match self.broken.as_ref().or(self.gradients.failure()) {
            None => Ok(()),
            Some(why) => Err(FrameworkError::Broken(why.clone())),
        }
    }

    /// Ends the run: no step can follow, and the other ranks get `why` as their error.
    pub(super) fn fail(&mut self, why: &str) {
        if self.broken.is_none() {
            self.broken = Some(why.to_owned());
            self.rank.comm.abort(why);
        }
    }

    /// `result`; an error ends the run on all ranks.
    pub(super) fn or_fail<R>(
        &mut self,
        result: Result<R, FrameworkError>,
    ) -> Result<R, FrameworkError> {
        result.inspect_err(|error| self.fail(&error.to_string()))
    }

    /// The mean of `value` over ranks.
    pub(super) fn mean(&self, value: f64) -> Result<f64, FrameworkError> {
        let all = self.sum(value)?;
        Ok(all / self.rank.comm.world_size() as f64)
    }

    /// The sum of `value` over ranks.
    pub(super) fn sum(&self, value: f64) -> Result<f64, FrameworkError> {
        let all = self.rank.exchange(&value.to_le_bytes())?;
        let one = |bytes: &Vec<u8>| {
            let bytes = bytes.as_slice().try_into();
            bytes
                .map(f64::from_le_bytes)
                .map_err(|_| FrameworkError::Order)
        };
        all.iter().map(one).sum()
    }

    pub(super) fn unit(&self, name: &str) -> Result<usize, FrameworkError> {
        let units = self.layout.units();
        let found = units.iter().position(|unit| unit.name == name);
        found.ok_or_else(|| FrameworkError::Unknown {
            what: "unit",
            name: name.to_owned(),
            known: some(units.iter().map(|unit| &*unit.name)),
        })
    }

    /// The place of a parameter by its full name.
    pub(super) fn param(&self, name: &str) -> Result<ParamId, FrameworkError> {
        self.layout.find_param(name).ok_or_else(|| {
            let units = self.layout.units().iter();
            FrameworkError::Unknown {
                what: "parameter",
                name: name.to_owned(),
                known: some(units.flat_map(|unit| unit.params.iter().map(|p| &*p.name))),
            }
        })
    }

    /// Waits until the parameters of a unit are whole: the host itself, or the compute stream.
    pub(super) fn wait_for_params(&self, unit: usize) -> Result<(), FrameworkError> {
        let ready = &self.params[unit].ready;
        let rank = &self.rank;
        rank.compute.wait(ready)?;
        if rank.pool.device().kind() == DeviceKind::Host {
            ready.synchronize(rank.limit)?;
        }
        Ok(())
    }

    /// Enqueues the gathers of stages 1 and 2 behind the compute stream.
    pub(super) fn gather(&mut self) -> Result<(), FrameworkError> {
        let Rank {
            comm,
            compute,
            comm_stream,
            ..
        } = &self.rank;

        let is_gathered = matches!(self.stage, ZeroStage::One | ZeroStage::Two);
        if is_gathered {
            comm_stream.wait(&compute.record()?)?;
        }
        for unit in &mut self.params {
            unit.ready = match is_gathered {
                true => {
                    comm.all_gather(comm_stream, unit.own[0].0, unit.held)?;
                    comm_stream.record()?
                }
                false => compute.record()?,
            };
        }
        Ok(())
    }

    /// The elements of `flat`, which the compute stream may read, as fp32.
    pub(super) fn read(&self, flat: AnySlice) -> Result<Vec<f32>, FrameworkError> {
        let Rank {
            pool,
            compute,
            limit,
            ..
        } = &self.rank;

        let mut values = vec![0.0_f32; flat.len()];
        if flat.dtype() == DType::F32 {
            let bytes = bytemuck::cast_slice_mut(&mut values);
            pool.device().download(compute, flat, bytes, *limit)?;
            return Ok(values);
        }
        let mut halves = vec![0_u16; flat.len()];
        let bytes = bytemuck::cast_slice_mut(&mut halves);
        pool.device().download(compute, flat, bytes, *limit)?;
        for (value, half) in values.iter_mut().zip(halves) {
            *value = match flat.dtype() {
                DType::Bf16 => bf16::from_bits(half).to_f32(),
                _ => f16::from_bits(half).to_f32(),
            };
        }
        Ok(values)
    }

    /// Saves a checkpoint, with the other ranks.
    pub(super) fn save(&mut self, folder: &Path) -> Result<(), FrameworkError> {
        let Self {
            rank,
            layout,
            params,
            optim,
            ..
        } = self;

        let exchange = |message: &[u8]| rank.exchange(message);
        let mut exchange = ExchangeFn::new(rank.id(), exchange);
        let options = StoreOptions::default();
        let store = Store::create_on_ranks(folder, rank.id(), options, &mut exchange, |_| Ok(()))?;

        let own: Vec<_> = params.iter().map(|unit| unit.own).collect();
        let own = RankParams {
            layout,
            rank: rank.id(),
            params: &own,
        };
        let mut meta = SaveMeta::default().step(self.steps).stage(self.stage);
        meta.trainer = serde_json::json!({ STATE: self.state });
        optim.save(&rank.compute, &store, meta, &own, &mut exchange, rank.limit)?;
        Ok(())
    }

    /// Opens the newest checkpoint in `folder` on all ranks; all have the error of one.
    pub(super) fn open(&self, folder: &Path) -> Result<Reader, FrameworkError> {
        let reader = Reader::open(folder).and_then(|reader| {
            reader.view(&self.layout)?;
            Ok(reader)
        });
        let settings = reader.as_ref().map(|reader| {
            let manifest = reader.manifest();
            RankSettings::from_iter([("step of the checkpoint", manifest.step)])
        });
        let settings = settings.as_ref().map_err(|error| error as &dyn Display);
        agree(self.rank.comm.rank(), settings, |message| {
            self.rank.exchange(message)
        })?;
        Ok(reader?)
    }

    pub(super) fn load(&mut self, reader: &Reader) -> Result<(), FrameworkError> {
        let own: Vec<_> = self.params.iter().map(|unit| unit.own).collect();
        let own = RankParams {
            layout: &self.layout,
            rank: self.rank.id(),
            params: &own,
        };
        let Rank { compute, limit, .. } = &self.rank;
        self.optim.load(compute, reader, &own, *limit)?;
        self.steps = reader.manifest().step;
        self.state = reader.manifest().trainer[STATE].clone();
        self.gather()
    }

    /// The statistics, the decision and the update of a step.
    pub(super) fn update(
        &mut self,
        loss: f64,
        divisor: f64,
    ) -> Result<StepOutcome, FrameworkError> {
        let Self {
            rank,
            params,
            gradients,
            optim,
            ..
        } = self;

        let order = gradients.order();
        let sums = gradients.sums(rank)?;
        // A gather of the last step reads what the update writes.
        for unit in &*params {
            rank.compute.wait(&unit.ready)?;
        }
        let units: Vec<_> = sums
            .into_iter()
            .zip(&*params)
            .map(|(grad, unit)| UnitSlices {
                grad,
                param: &unit.own,
            })
            .collect();

        // Ranks compare both halves.
        let rate = optim.config().lr.to_bits();
        let rate = rate ^ rate >> 32;
        let flags = u64::from(order) | rate << 32;
        let inputs = StepInputs::new(loss / divisor, Divisor::Sum(divisor)).flags(flags);
        let outcome = optim.step_with(
            &rank.compute,
            &units,
            inputs,
            |message| rank.exchange(message),
            rank.limit,
        )?;
        let differing = outcome.flags().any ^ outcome.flags().all;
        if differing as u32 != 0 {
            return Err(FrameworkError::Order);
        }
        if differing != 0 {
            return Err(FrameworkError::LearningRate);
        }
        if !outcome.is_skipped() {
            self.gather()?;
        }
        self.steps += 1;
        Ok(outcome)
    }
}
