//! The parts of a [`Zero`](super::Zero) besides the gathers of stage 3.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::Path;
use std::sync::{Arc, Mutex};

use zero_alloc::device::{AnySlice, DType, Device, DeviceKind, Event, Stream};
use zero_alloc::{Block, Purpose};
use zero_ckpt::{CkptError, ExchangeFn, Reader, SaveMeta, Store, StoreOptions};
use zero_comm::Gather;
use zero_kernels::RankStats;
use zero_shard::{Layout, ParamId, ZeroStage};

use crate::state::download;
use crate::{
    Divisor, GatheredStats, RankParams, RankSettings, ShardedOptimizer, StateKind, StateRange,
    StepOutcome,
};
use crate::{UnitSlices, agree};

use super::FrameworkError;
use super::gradients::{Gradients, Grads};
use super::rank::Rank;
use super::rank_calls::{self, Call, EndOfStep, Losses, StepSettings};
use super::values::{Memory, hash, range_of, some};

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

/// The part of an open step without its guard that is not in [`Core`].
pub(super) struct Paused {
    pub(super) losses: Option<Losses>,
    pub(super) last_error: Option<String>,
}

/// Elements of initial values that travel at a time.
const BROADCAST_ELEMS: usize = 1 << 20;

/// The key of the framework's part in the checkpoint's trainer document.
const STATE: &str = "framework";
/// The key of the update rules of trained parameters.
const UPDATE_RULES: &str = "update_rules";

pub(super) struct Core<D: Device> {
    pub(super) rank: Rank<D>,
    pub(super) stage: ZeroStage,
    pub(super) micro_batches: usize,
    pub(super) layout: Layout,
    pub(super) params: Vec<UnitParams<D>>,
    pub(super) gradients: Gradients<D>,
    pub(super) optim: ShardedOptimizer<D>,
    /// The name of the update rule of each trained parameter.
    pub(super) update_rules: BTreeMap<String, String>,
    /// Steps that ended.
    pub(super) steps: u64,
    /// The framework's part of a checkpoint.
    pub(super) state: serde_json::Value,
    /// The model's `config.json`, or null.
    pub(super) model_config: serde_json::Value,
    /// Whether the framework has views of parameters between steps.
    pub(super) has_views: bool,
    pub(super) in_step: bool,
    /// Steps that began: the number of the current one.
    pub(super) begun: u64,
    /// The open step, while nobody has its guard.
    pub(super) paused: Option<Paused>,
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

    /// As [`Self::check`], for a call between steps.
    pub(super) fn check_between_steps(&self, call: &str) -> Result<(), FrameworkError> {
        self.check()?;
        match self.in_step {
            false => Ok(()),
            true => Err(FrameworkError::Setting(format!(
                "{call} within a step; call it behind Step::end"
            ))),
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

    /// The mean of the losses of validation over ranks.
    pub(super) fn mean(&self, loss: f64) -> Result<f64, FrameworkError> {
        let losses = Losses::Means(loss);
        let all = self.exchange_ends(Call::EndValidation, RankStats::new(&[], loss), losses)?;
        let sum: f64 = all.iter().map(|rank| rank.stats.loss).sum();
        Ok(sum / all.len() as f64)
    }

    /// Sends the end of this rank's step and returns those of all ranks, which have in common what
    /// they must.
    fn exchange_ends(
        &self,
        call: Call,
        stats: RankStats,
        losses: Losses,
    ) -> Result<Vec<EndOfStep>, FrameworkError> {
        let step = StepSettings {
            lr: self.optim.config().lr,
            groups: self.optim.group_rules(),
            micro_batches: self.micro_batches,
        };
        let uses = self.gradients.uses();
        let own = EndOfStep::new(stats, losses, step, uses);
        let messages = self.rank.exchange(call, bytemuck::bytes_of(&own))?;

        let all = EndOfStep::decode(&messages)?;
        if !EndOfStep::agree(&all) {
            let settings = rank_calls::of_step(losses, step, uses, &self.layout);
            self.compare(call, &settings)?;
        }
        Ok(all)
    }

    /// Returns an error on all ranks if the settings of two ranks differ.
    fn compare(&self, call: Call, settings: &RankSettings) -> Result<(), FrameworkError> {
        let exchange = |message: &[u8]| self.rank.exchange(call, message);
        call.compare(self.rank.comm.rank(), settings, exchange)
    }

    /// Writes the initial values to parameters and masters. Returns the hash of each parameter's.
    pub(super) fn initialise(
        &mut self,
        init: &mut impl FnMut(&str, &[u64], &mut [f32]),
    ) -> Result<Vec<(String, u64)>, FrameworkError> {
        let mut hashes = Vec::new();
        for index in 0..self.params.len() {
            let values = self.initial_values(index, init);
            let unit = &self.layout.units()[index];
            for (param, placed) in unit.params.iter().enumerate() {
                hashes.push((placed.name.clone(), hash(&values[range_of(unit, param)])));
            }
            self.write_unit(index, &values)?;
        }
        Ok(hashes)
    }

    /// Writes the initial values of rank 0 to parameters and masters.
    pub(super) fn initialise_from_rank_0(
        &mut self,
        init: &mut impl FnMut(&str, &[u64], &mut [f32]),
    ) -> Result<(), FrameworkError> {
        for index in 0..self.params.len() {
            let elems = self.layout.units()[index].padded_elems as usize;
            let mut values = match self.rank.comm.rank() {
                0 => self.initial_values(index, init),
                _ => vec![0.0; elems],
            };
            // In pieces: what the pool has reserved stays reserved.
            for piece in values.chunks_mut(BROADCAST_ELEMS) {
                self.broadcast(piece)?;
            }
            self.write_unit(index, &values)?;
        }
        Ok(())
    }

    /// Replaces `values` by those of rank 0.
    fn broadcast(&self, values: &mut [f32]) -> Result<(), FrameworkError> {
        let Rank {
            pool,
            compute,
            limit,
            comm,
            ..
        } = &self.rank;
        let block = pool.allocate(values.len(), DType::F32, Purpose::Workspace, compute)?;
        // SAFETY: only the compute stream uses it, which the block was allocated for.
        let sent = unsafe { block.slice() };
        let bytes = bytemuck::cast_slice_mut(values);
        if comm.rank() == 0 {
            pool.device().upload(compute, bytes, sent, *limit)?;
        }
        comm.broadcast(compute, sent, 0)?;
        Ok(pool.device().download(compute, sent, bytes, *limit)?)
    }

    fn initial_values(
        &self,
        index: usize,
        init: &mut impl FnMut(&str, &[u64], &mut [f32]),
    ) -> Vec<f32> {
        let unit = &self.layout.units()[index];
        let mut values = vec![0.0; unit.padded_elems as usize];
        for (param, placed) in unit.params.iter().enumerate() {
            init(
                &placed.name,
                &placed.shape,
                &mut values[range_of(unit, param)],
            );
        }
        values
    }

    /// Writes the values of a whole unit to this rank's part.
    fn write_unit(&mut self, index: usize, values: &[f32]) -> Result<(), FrameworkError> {
        let own = &self.params[index].own;
        let elems = own[0].0.len();
        let start = match elems == values.len() {
            true => 0,
            false => self.layout.units()[index].shard(self.rank.id()).start as usize,
        };
        let range = StateRange {
            kind: StateKind::Master,
            unit: index,
            elems: 0..elems,
        };
        let values = &values[start..start + elems];
        let Rank { compute, limit, .. } = &self.rank;
        self.optim
            .write_state(compute, &range, own, values, *limit)?;
        Ok(self.optim.write_unit_params(compute, index, own)?)
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

    /// The sink of a unit's gradients.
    pub(super) fn grads(&mut self, index: usize) -> Grads<'_, D> {
        Grads {
            rank: &self.rank,
            index,
            unit: &self.layout.units()[index],
            gradients: &mut self.gradients,
        }
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
        let gather = Gather::new(Arc::clone(comm));
        if is_gathered {
            comm_stream.wait(&compute.record()?)?;
        }
        for unit in &mut self.params {
            unit.ready = match is_gathered {
                true => {
                    gather.enqueue(comm_stream, unit.own[0].0, unit.held)?;
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
        download(pool.device(), compute, flat, &mut values, *limit)?;
        Ok(values)
    }

    /// Checks that replicas of parameters are equal.
    fn check_replicas(&self) -> Result<(), FrameworkError> {
        if self.stage.shards_params() || self.rank.comm.world_size() == 1 {
            return Ok(());
        }
        let mut hashes = RankSettings::new();
        for (index, unit) in self.params.iter().enumerate() {
            self.wait_for_params(index)?;
            let values = self.read(unit.held)?;
            hashes.push(&self.layout.units()[index].name, hash(&values));
        }

        let compared = self.compare(Call::Save, &hashes);
        compared.map_err(|error| match error {
            FrameworkError::Differs {
                rank,
                reference,
                what: unit,
                ..
            } => FrameworkError::Replicas {
                rank,
                reference,
                unit,
            },
            error => error,
        })
    }

    /// Saves a checkpoint, with the other ranks.
    pub(super) fn save(&mut self, folder: &Path) -> Result<(), FrameworkError> {
        let mut settings = RankSettings::new();
        self.gradients.uses().push_to(&mut settings);
        settings.push("the state of Zero::set_state", &self.state);
        settings.push(
            "the configuration of Zero::set_model_config",
            &self.model_config,
        );
        self.compare(Call::Save, &settings)?;
        let replicas = self.check_replicas();
        self.or_fail(replicas)?;

        let Self {
            rank,
            layout,
            params,
            optim,
            ..
        } = self;

        let exchange = |message: &[u8]| rank.exchange(Call::Save, message);
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
        meta.trainer = serde_json::json!({ STATE: self.state, UPDATE_RULES: self.update_rules });
        meta.model_config = self.model_config.clone();
        optim.save(&rank.compute, &store, meta, &own, &mut exchange, rank.limit)?;
        Ok(())
    }

    /// Opens the newest checkpoint in `folder`, as rank 0 sees it, on all ranks; all have the error
    /// of one.
    pub(super) fn open(&self, folder: &Path) -> Result<Reader, FrameworkError> {
        let exchange = |message: &[u8]| self.rank.exchange(Call::Resume, message);
        let mut of_store = ExchangeFn::new(self.rank.id(), exchange);
        let open = || Reader::open(folder);
        let reader = Reader::open_on_ranks(folder, self.rank.id(), &mut of_store, open);
        let reader = reader.and_then(|reader| {
            reader.view(&self.layout)?;
            Ok(reader)
        });
        // The ranks may be in different calls: no exchange follows.
        if let Err(error @ CkptError::Exchange { .. }) = reader {
            return Err(error.into());
        }
        let reader = reader.map_err(FrameworkError::from).and_then(|reader| {
            self.check_update_rules(&reader)?;
            Ok(reader)
        });

        let checkpoint = reader.as_ref().map(|reader| {
            let selection = reader.selection();
            let crc64 = format!("{:016x}", selection.crc64);
            RankSettings::from_iter([("checksum of the checkpoint", crc64)])
        });
        let checkpoint = checkpoint.as_ref().map_err(|error| error as &dyn Display);
        agree(self.rank.comm.rank(), checkpoint, exchange)?;
        reader
    }

    /// Checks that the parameters that were trained, and are, have the same update rules: state of
    /// another rule would be read as 0. Older checkpoints do not name them.
    fn check_update_rules(&self, reader: &Reader) -> Result<(), FrameworkError> {
        let saved = &reader.manifest().trainer[UPDATE_RULES];
        let mut all = self.update_rules.iter();
        let other = all.find_map(|(param, now)| {
            let saved = saved[param].as_str().filter(|saved| saved != now)?;
            Some((param, now, saved))
        });
        match other {
            Some((param, now, saved)) => Err(FrameworkError::OtherUpdateRule {
                checkpoint: reader.path().display().to_string(),
                param: param.clone(),
                saved: saved.to_owned(),
                now: now.clone(),
            }),
            None => Ok(()),
        }
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
        self.model_config = reader.manifest().model_config.clone();
        self.gather()
    }

    /// The statistics, the decision and the update of a step.
    pub(super) fn update(&mut self, losses: Losses) -> Result<StepOutcome, FrameworkError> {
        let Rank { compute, limit, .. } = &self.rank;
        self.gradients.complete_sums(&self.rank)?;
        let sums = self.gradients.sums();
        self.optim.enqueue_stats(compute, &sums)?;
        let stats = self.optim.rank_stats(compute, losses.loss(), *limit)?;

        let all = self.exchange_ends(Call::End, stats, losses)?;
        let divisor: f64 = match losses {
            Losses::Means(_) => (all.len() * self.micro_batches) as f64,
            Losses::Sums { .. } => all.iter().map(|rank| rank.weight).sum(),
        };
        let of_rank = |EndOfStep { stats, .. }: &EndOfStep| RankStats {
            loss: stats.loss / divisor,
            ..*stats
        };
        let stats: Vec<RankStats> = all.iter().map(of_rank).collect();
        let gathered = GatheredStats::new(&stats, Divisor::Sum(divisor));

        // A gather of the last step reads what the update writes.
        for unit in &self.params {
            compute.wait(&unit.ready)?;
        }
        let units = sums.into_iter().zip(&self.params);
        let units: Vec<_> = units
            .map(|(grad, unit)| UnitSlices {
                grad,
                param: &unit.own,
            })
            .collect();
        let outcome = self.optim.step(compute, &units, gathered, *limit)?;
        self.gradients.end_update(&self.rank)?;

        if !outcome.is_skipped() {
            self.gather()?;
        }
        self.steps += 1;
        Ok(outcome)
    }
}
