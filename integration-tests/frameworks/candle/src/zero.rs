//! The optimizer: a run of `zero_optim::framework` over the parameters of a model of candle.
//!
//! | parameters | stages 0 and 1 | stage 2 | stage 3 |
//! |---|---|---|---|
//! | of the run, in its pool | whole | shards | shards; a window of gathered units |
//! | of candle's tensors | whole | whole | of one block, while it runs |
//!
//! Whole tensors of candle are written after each update.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{CpuStorage, Device, Result, Storage, Tensor, bail, safetensors};
use zero_alloc::Pool;
use zero_alloc::host::HostDevice;
use zero_comm::Communicator;
use zero_kernels::host::HostKernels;
use zero_optim::framework::{Params, Rank, Zero};
use zero_optim::{OptimizerConfig, RankSettings, StepOutcome, agree};
use zero_shard::ZeroStage;

use crate::error::candle_error;
use crate::hooks::{Claim, Param, ShardedVars};
use crate::muon::ZeroMuon;
use crate::step::{BackwardReport, Record, TrainStep, Unit, Units, scalar};
use crate::values::{release, write};

/// Elements of a message that initial values are sent in.
const MESSAGE_ELEMS: usize = 1 << 20;

/// The settings of a [`ZeroAdamW`], equal on all ranks.
#[derive(Clone, Debug)]
pub struct ZeroConfig {
    /// The stage. At stage 3 the model runs in blocks: [`TrainStep::block`].
    pub stage: ZeroStage,
    /// AdamW's settings; candle's are `ParamsAdamW`.
    pub optimizer: OptimizerConfig,
    /// Muon for matrices of hidden layers. Default: AdamW for all parameters.
    pub muon: Option<ZeroMuon>,
    /// The unit of a parameter, by its name: parameters that are reduced and gathered together.
    pub unit_of: fn(&str) -> &str,
    /// Elements of each of the two buckets.
    pub bucket_elems: usize,
    /// Calls of [`TrainStep::backward`] in a step.
    pub micro_batches: usize,
    /// Limit of each wait; longer than that of the communicator.
    pub limit: Duration,
    /// The device of the streams, such as one with a timeline.
    pub device: HostDevice,
}

impl ZeroConfig {
    /// The default settings at `stage`.
    pub fn new(stage: ZeroStage) -> Self {
        Self {
            stage,
            optimizer: OptimizerConfig::default(),
            muon: None,
            unit_of: unit_of_block,
            bucket_elems: 1 << 22,
            micro_batches: 1,
            limit: Duration::from_secs(300),
            device: HostDevice::new(),
        }
    }
}

/// The name up to its first number, which is a block (`model.layers.3`), or else without its last
/// part (`lm_head` of `lm_head.weight`).
pub fn unit_of_block(name: &str) -> &str {
    let mut end = 0;
    for part in name.split('.') {
        end += part.len();
        if !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()) {
            return &name[..end];
        }
        end += 1;
    }
    name.rsplit_once('.').map_or(name, |(unit, _)| unit)
}

/// AdamW for the trained parameters of a [`ShardedVars`] under ZeRO: the stage determines which of
/// state, gradients and parameters are sharded over the ranks of a communicator.
pub struct ZeroAdamW {
    zero: Zero<HostDevice>,
    comm: Arc<dyn Communicator<HostDevice>>,
    units: Units,
    record: Record,
}

impl std::fmt::Debug for ZeroAdamW {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let params = self.units.params.len();
        write!(f, "ZeroAdamW({:?}, {params} parameters)", self.zero)
    }
}

impl ZeroAdamW {
    /// Creates the optimizer of this rank, after the model is loaded. All ranks call it. The run
    /// starts from rank 0's parameters, because candle's initial values are random and differ.
    ///
    /// # Errors
    /// No parameter is trained, the parameters have another `ZeroAdamW`, a setting is out of range,
    /// an allocation failed, or the ranks' models differ.
    pub fn new(
        comm: Arc<dyn Communicator<HostDevice>>,
        vars: &ShardedVars,
        config: ZeroConfig,
    ) -> Result<Self> {
        let params = vars.finish_loading();
        let Some(first) = params.first() else {
            bail!("no parameter is trained; load the model with ShardedVars::var_builder first");
        };
        let Some(claim) = vars.claim() else {
            bail!(
                "{} and {} other parameters already have a ZeroAdamW; drop it before another is made",
                first.name,
                params.len() - 1
            );
        };
        let created = Self::create(Arc::clone(&comm), claim, (params, vars.frozen()), config);
        created.inspect_err(|error| comm.abort(&error.to_string()))
    }

    fn create(
        comm: Arc<dyn Communicator<HostDevice>>,
        claim: Claim,
        (params, frozen): (Vec<Param>, Vec<String>),
        config: ZeroConfig,
    ) -> Result<Self> {
        let kernels = HostKernels::new(1).map_err(candle_error)?;
        let pool = Pool::new(config.device, usize::MAX);
        let rank = Rank::new(Arc::clone(&comm), pool, Arc::new(kernels)).map_err(candle_error)?;
        let rank = rank.limit(config.limit);
        copy_from_rank_0(&rank, &params, config.limit)?;

        let shape = |param: &Param| param.tensor.dims().iter().map(|&dim| dim as u64).collect();
        let shapes = params.iter().map(|p| (p.name.clone(), shape(p)));
        let shapes: Vec<(String, Vec<u64>)> = shapes.collect();
        let by_name = params.iter().enumerate();
        let by_name: HashMap<&str, usize> = by_name.map(|(i, param)| (&*param.name, i)).collect();

        let ranks = comm.world_size();
        // Why: candle's tensors hold the whole parameters of stage 2, so the run needs its shards
        // only. Gradients and optimizer are alike at both stages.
        let stage_of_run = match config.stage {
            ZeroStage::Two => ZeroStage::Three,
            stage => stage,
        };
        let builder = Zero::builder(rank)
            .stage(stage_of_run)
            .adamw(config.optimizer)
            .micro_batches(config.micro_batches)
            .bucket_elems(config.bucket_elems.max(ranks))
            .params(shapes, |name| (config.unit_of)(name).to_owned());
        let builder = match config.muon {
            Some(muon) => muon.set(builder, &params)?,
            None => builder,
        };
        let zero = builder
            .build(|name, _, values| initial(&params[by_name[name]].tensor, values))
            .map_err(candle_error)?;

        let mut unit_of = vec![0; params.len()];
        let mut units = Vec::new();
        for (index, unit) in zero.layout().units().iter().enumerate() {
            let params = unit.params.iter().map(|param| by_name[&*param.name]);
            let params: Vec<usize> = params.collect();
            params.iter().for_each(|&param| unit_of[param] = index);
            units.push(Unit {
                name: unit.name.clone(),
                params,
                elems: unit.padded_elems,
            });
        }

        let frozen = frozen.iter().map(|name| (config.unit_of)(name));
        let mut frozen: HashSet<String> = frozen.map(str::to_owned).collect();
        for unit in &units {
            frozen.remove(&unit.name);
        }

        let are_sharded = config.stage == ZeroStage::Three;
        if are_sharded {
            params.iter().try_for_each(|param| release(&param.tensor))?;
        }
        Ok(Self {
            zero,
            comm,
            units: Units {
                claim,
                params,
                units,
                unit_of,
                frozen,
                are_sharded,
            },
            record: Record::default(),
        })
    }

    /// Runs a step: `run` computes losses and calls [`TrainStep::backward`] with each; then the
    /// parameters are updated. The outcome, equal on all ranks, has the mean loss.
    ///
    /// # Errors
    /// `run` failed, a parameter has no gradient, a rank failed, or a wait exceeded the limit; the
    /// other ranks then fail, too.
    pub fn step<'m>(
        &mut self,
        run: impl for<'s> FnOnce(&mut TrainStep<'s, 'm>) -> Result<()>,
    ) -> Result<StepOutcome> {
        let step = self.zero.begin().map_err(candle_error)?;
        let units = &self.units;
        let mut step = TrainStep::new(step, units, &mut self.record, true);
        // The other ranks get this cause, rather than that the step was dropped.
        run(&mut step)
            .map_err(|error| units.explain(error))
            .inspect_err(|error| self.comm.abort(&error.to_string()))?;

        let outcome = step.end();
        let outcome = outcome.inspect_err(|error| self.comm.abort(&error.to_string()))?;
        if !outcome.is_skipped() {
            self.read_params()?;
        }
        Ok(outcome)
    }

    /// A [step](Self::step) of one backward, as candle's `Optimizer::backward_step`.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub fn backward_step(&mut self, loss: &Tensor) -> Result<StepOutcome> {
        self.step(|step| step.backward(loss))
    }

    /// Runs blocks without a backward, such as for a validation: `run` returns this rank's loss.
    /// Returns the mean over ranks. All ranks call it.
    ///
    /// # Errors
    /// `run` failed, or a rank failed; the other ranks then fail, too.
    pub fn evaluate<'m>(
        &mut self,
        run: impl for<'s> FnOnce(&mut TrainStep<'s, 'm>) -> Result<Tensor>,
    ) -> Result<f64> {
        let step = self.zero.begin().map_err(candle_error)?;
        let units = &self.units;
        let mut step = TrainStep::new(step, units, &mut self.record, false);
        // The other ranks get this cause, rather than that the step was dropped.
        let loss = run(&mut step).and_then(|loss| scalar(&loss));
        let loss = loss.map_err(|error| units.explain(error));
        let loss = loss.inspect_err(|error| self.comm.abort(&error.to_string()))?;

        let mean = step.end_validation(loss);
        mean.inspect_err(|error| self.comm.abort(&error.to_string()))
    }

    /// Copies the parameters into candle's tensors, at stages 0 to 2.
    fn read_params(&mut self) -> Result<()> {
        let Self {
            zero,
            units,
            record,
            ..
        } = self;
        if units.are_sharded {
            return Ok(());
        }

        let mut step = zero.begin().map_err(candle_error)?;
        for unit in &units.units {
            let copy = |values: &Params<'_>| units.for_each_param(&unit.name, values, write);
            record.copied_params += step.forward(&unit.name, copy).map_err(candle_error)?;
        }
        step.end_without_update().map_err(candle_error)
    }

    /// Saves weights, moments and progress as a checkpoint in `folder`, with the other ranks.
    ///
    /// # Errors
    /// A file could not be written, or a rank failed.
    pub fn save(&mut self, folder: impl AsRef<Path>) -> Result<()> {
        self.zero.save(folder).map_err(candle_error)
    }

    /// Loads the newest checkpoint in `folder`, of any number of ranks and any stage. All ranks
    /// call it.
    ///
    /// # Errors
    /// There is no checkpoint, it is of another model, or a file is damaged.
    pub fn resume(&mut self, folder: impl AsRef<Path>) -> Result<()> {
        self.zero.resume(folder).map_err(candle_error)?;
        self.read_params()
    }

    /// Writes the parameters to a safetensors file, which candle loads. All ranks call it; rank 0
    /// writes the file, and has the whole model in memory for it.
    ///
    /// # Errors
    /// The file could not be written, or a rank failed.
    pub fn save_safetensors(&mut self, file: impl AsRef<Path>) -> Result<()> {
        let is_writer = self.comm.rank() == 0;
        let mut tensors = HashMap::new();
        let collect = |name: &str, shape: &[u64], values: &[f32]| -> Result<()> {
            if is_writer {
                let shape: Vec<usize> = shape.iter().map(|&dim| dim as usize).collect();
                let tensor = Tensor::from_slice(values, shape, &Device::Cpu)?;
                tensors.insert(name.to_owned(), tensor);
            }
            Ok(())
        };
        self.zero.for_each_param(collect).map_err(candle_error)?;
        match is_writer {
            true => safetensors::save(&tensors, file),
            false => Ok(()),
        }
    }

    /// Sets the base learning rate of the next steps.
    ///
    /// # Errors
    /// The rate is negative or not finite.
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        self.zero.set_lr(lr).map_err(candle_error)
    }

    /// The run: layout, pool, optimizer, steps, gathers.
    pub fn zero(&self) -> &Zero<HostDevice> {
        &self.zero
    }

    /// The record of the last backward.
    pub fn backward_report(&self) -> &BackwardReport {
        &self.record.backward
    }

    /// Parameter elements copied into candle's tensors so far.
    pub fn copied_param_elems(&self) -> u64 {
        self.record.copied_params
    }
}

/// Copies the elements of a parameter, which [`copy_from_rank_0`] has checked.
fn initial(tensor: &Tensor, values: &mut [f32]) {
    let (storage, _) = tensor.storage_and_layout();
    if let Storage::Cpu(CpuStorage::F32(elems)) = &*storage {
        values.copy_from_slice(elems);
    }
}

/// Copies the elements of all parameters from rank 0 to the other ranks.
fn copy_from_rank_0(rank: &Rank<HostDevice>, params: &[Param], limit: Duration) -> Result<()> {
    let exchange = |message: &[u8]| {
        let comm = rank.comm();
        comm.exchange(rank.pool(), rank.compute(), message, limit)
    };
    let shape = |param: &Param| (param.name.clone(), format!("{:?}", param.tensor.dims()));
    let shapes = RankSettings::from_iter(params.iter().map(shape));
    agree(rank.comm().rank(), Ok(&shapes), exchange).map_err(candle_error)?;

    for param in params {
        let values = param.tensor.flatten_all()?.to_vec1::<f32>();
        let mut values = values.map_err(|error| {
            candle_core::Error::msg(format!(
                "{} has no elements, since an earlier ZeroAdamW sharded it; load the model again: {error}",
                param.name
            ))
        })?;
        for part in values.chunks_mut(MESSAGE_ELEMS) {
            let message: Vec<u8> = match rank.comm().rank() {
                0 => part.iter().flat_map(|value| value.to_le_bytes()).collect(),
                _ => Vec::new(),
            };
            let messages = exchange(&message).map_err(candle_error)?;
            let (received, _) = messages[0].as_chunks();
            for (value, bytes) in part.iter_mut().zip(received) {
                *value = f32::from_le_bytes(*bytes);
            }
        }
        write(&param.tensor, &values)?;
    }
    Ok(())
}
