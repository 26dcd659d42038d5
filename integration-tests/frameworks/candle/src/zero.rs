//! The optimizer: stages 1 and 2 of ZeRO over candle's tensors.
//!
//! Each rank updates its shard of every unit in candle's own memory (fp32 parameters are their own
//! masters), and then the shards are gathered, unit by unit, through one block that a unit fits in.
//! candle computes on the host's thread, so a step waits for its own work before it returns.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{Result, Tensor, bail};
use zero_alloc::device::{AnySlice, DType, Device, Reduced, Stream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_alloc::{Block, Pool, Purpose};
use zero_comm::{BucketOptions, Buckets, Communicator, WaitOnDrop};
use zero_kernels::host::HostKernels;
use zero_optim::{
    Divisor, OptimizerConfig, Segment, ShardedAdamW, StepInputs, StepOutcome, UnitSlices,
};
use zero_shard::{Layout, ParamId, ParamSpec, UnitSpec, ZeroStage};

use crate::hooks::{Claim, Receiver, ShardedVars, Sink, with_locked};
use crate::reducer::{BackwardReport, Failure, Reducer, candle_error};

/// Address space of the pool; memory is used as it is needed.
const POOL_BYTES: usize = 1 << 40;

/// The settings of a [`ZeroAdamW`], equal on all ranks.
#[derive(Clone, Debug)]
pub struct ZeroConfig {
    /// Stage 1 or 2.
    pub stage: ZeroStage,
    /// AdamW's settings; candle's are `ParamsAdamW`.
    pub optimizer: OptimizerConfig,
    /// The unit of a parameter, by its name: parameters that are reduced and gathered together.
    pub unit_of: fn(&str) -> &str,
    /// Elements of each of the two buckets.
    pub bucket_elems: usize,
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
            unit_of: unit_of_block,
            bucket_elems: 1 << 22,
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

/// A range of a parameter's elements, and its offset in a unit or in a shard of it.
struct PieceOfParam {
    param: usize,
    elems: Range<usize>,
    at: usize,
}

impl PieceOfParam {
    fn of(&self, params: &[AnySlice]) -> (AnySlice, usize) {
        (params[self.param].slice(self.elems.clone()), self.at)
    }
}

/// AdamW for the trained parameters of a [`ShardedVars`], with its state (and at stage 2 the
/// gradients) sharded over the ranks of a communicator.
pub struct ZeroAdamW {
    sink: Sink,
    params: Vec<Tensor>,
    layout: Arc<Layout>,
    comm: Arc<dyn Communicator<HostDevice>>,
    pool: Pool<HostDevice>,
    compute: HostStream,
    comm_stream: HostStream,
    optimizer: ShardedAdamW<HostDevice>,
    /// The sums of gradients; `sink` has slices of it.
    grads: Block<HostDevice>,
    /// Per unit: this rank's shard, with offsets in the shard, and the other ranks' with offsets in
    /// the unit.
    own: Vec<Vec<PieceOfParam>>,
    others: Vec<Vec<PieceOfParam>>,
    loss: f64,
    copied_params: u64,
    limit: Duration,
}

impl std::fmt::Debug for ZeroAdamW {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "ZeroAdamW(rank {} of {}, {} parameters)",
            self.comm.rank(),
            self.comm.world_size(),
            self.params.len()
        )
    }
}

impl Drop for ZeroAdamW {
    fn drop(&mut self) {
        // The hooks in the model live on. The buckets record their uses themselves.
        *self.sink.lock() = Receiver::None;
        for stream in [&self.compute, &self.comm_stream] {
            // Recording fails only on a closed stream, which no longer uses the block.
            let _closed = self.grads.record_use(stream);
        }
    }
}

fn index(range: Range<u64>) -> Range<usize> {
    range.start as usize..range.end as usize
}

/// The units in the order of their first parameter, and the place of each parameter.
fn units_of(
    params: &[crate::hooks::Param],
    unit_of: fn(&str) -> &str,
) -> (Vec<UnitSpec>, Vec<ParamId>) {
    let (mut units, mut places) = (Vec::<UnitSpec>::new(), Vec::with_capacity(params.len()));
    let mut known = HashMap::new();
    for param in params {
        let name = unit_of(&param.name);
        let unit = *known.entry(name).or_insert(units.len());
        if unit == units.len() {
            units.push(UnitSpec::new(name, Vec::<ParamSpec>::new()));
        }
        places.push(ParamId {
            unit,
            param: units[unit].params.len(),
        });
        let shape: Vec<u64> = param.tensor.dims().iter().map(|&dim| dim as u64).collect();
        units[unit]
            .params
            .push(ParamSpec::new(param.name.as_str(), shape));
    }
    (units, places)
}

impl ZeroAdamW {
    /// Creates the optimizer of this rank, after the model is loaded. All ranks call it; rank 0's
    /// parameters are copied to the others, because candle's initial values are random and differ.
    ///
    /// # Errors
    /// The stage is not 1 or 2, no parameter is trained, the parameters have another `ZeroAdamW`, a
    /// setting is out of range, an allocation failed, or the ranks' models differ.
    pub fn new(
        comm: Arc<dyn Communicator<HostDevice>>,
        vars: &ShardedVars,
        config: ZeroConfig,
    ) -> Result<Self> {
        Self::create(comm, vars, config).map_err(candle_error)
    }

    fn create(
        comm: Arc<dyn Communicator<HostDevice>>,
        vars: &ShardedVars,
        config: ZeroConfig,
    ) -> std::result::Result<Self, Failure> {
        let whole = match config.stage {
            ZeroStage::One => true,
            ZeroStage::Two => false,
            stage => {
                return Err(
                    format!("stage {} is not supported, only 1 and 2", stage.number()).into(),
                );
            }
        };

        let (params, sink) = vars.finish_loading();
        let Some(first) = params.first() else {
            return Err(
                "no parameter is trained; load the model with ShardedVars::var_builder first"
                    .into(),
            );
        };

        // Why before anything else: the other optimizer must stay as it is. Its reducer's sums are
        // in its memory.
        let claim = Claim::of(&sink).ok_or_else(|| {
            let others = params.len() - 1;
            format!(
                "{} and {others} other parameters already have a ZeroAdamW; drop it before another is made",
                first.name
            )
        })?;

        let (units, places) = units_of(&params, config.unit_of);
        let layout = Arc::new(Layout::new(&units, comm.world_size() as u64, 1)?);
        let rank = comm.rank() as u64;

        let (device, kernels) = (config.device, Arc::new(HostKernels::new(1)?));
        let pool = Pool::new(device.clone(), POOL_BYTES);
        let (compute, comm_stream) = (
            device.create_stream("compute")?,
            device.create_stream("comm")?,
        );
        let options = BucketOptions::new(config.bucket_elems.max(comm.world_size()), DType::F32);

        let buckets = Buckets::new(
            &pool,
            comm.clone(),
            compute.clone(),
            comm_stream.clone(),
            options,
        )?;

        let elems = if whole {
            layout.padded_elems()
        } else {
            layout.shard_elems()
        };

        let grads = pool.allocate(elems as usize, DType::F32, Purpose::Grads, &compute)?;
        // SAFETY: used on the two streams, which the drop records; `Reduced` orders the reads after
        // the sums, and the step before the next sums.
        let all_sums = unsafe { grads.slice() };

        let ids: HashMap<ParamId, usize> = places
            .iter()
            .enumerate()
            .map(|(param, &id)| (id, param))
            .collect();
        let (mut own, mut others, mut segments, mut sums) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());

        for (unit, placed) in layout.units().iter().enumerate() {
            let shard = placed.shard(rank);
            let pieces =
                |range: Range<u64>, base: u64| -> std::result::Result<Vec<PieceOfParam>, Failure> {
                    let pieces = placed.params_in(range)?.map(|piece| PieceOfParam {
                        param: ids[&ParamId {
                            unit,
                            param: piece.param,
                        }],
                        elems: index(piece.in_param),
                        at: (piece.in_flat.start - base) as usize,
                    });
                    Ok(pieces.collect())
                };
            own.push(pieces(shard.clone(), shard.start)?);
            let mut of_others = pieces(0..shard.start, 0)?;
            of_others.extend(pieces(shard.end..placed.padded_elems, 0)?);
            others.push(of_others);
            let padding = shard
                .end
                .saturating_sub(shard.start.max(placed.numel_elems));
            segments.push(
                Segment::shard(&placed.name, index(placed.shard_range()))
                    .with_padding(padding as usize),
            );
            let sum = if whole {
                layout.own_in_whole(unit, rank)?
            } else {
                placed.shard_range()
            };
            sums.push(all_sums.slice(index(sum)));
        }

        let optimizer = ShardedAdamW::builder(&pool, kernels.clone(), &compute)
            .config(config.optimizer)
            .build(segments)?;
        let reducer = Reducer {
            layout: layout.clone(),
            places,
            buckets,
            kernels,
            compute: compute.clone(),
            sums,
            reduced: layout.units().iter().map(|_| None).collect(),
            waiting: Vec::new(),
            micro_batches: 0,
            backward: None,
            report: BackwardReport::default(),
        };

        let sink = claim.keep(reducer);
        let params = params.into_iter().map(|param| param.tensor).collect();
        let (loss, copied_params, limit) = (0.0, 0, config.limit);
        let mut zero = Self {
            sink,
            params,
            layout,
            comm,
            pool,
            compute,
            comm_stream,
            optimizer,
            grads,
            own,
            others,
            loss,
            copied_params,
            limit,
        };

        zero.with_params(|zero, params| {
            params
                .iter()
                .try_for_each(|&param| Ok(zero.comm.broadcast(&zero.comm_stream, param, 0)?))
        })?;
        Ok(zero)
    }

    /// Runs backward. The reduction of a unit starts when its last gradient is known, and runs
    /// beside the rest of backward. Several calls before a step add up, as micro-batches.
    ///
    /// # Errors
    /// candle failed, a parameter got no gradient, `loss` depends on parameters of another
    /// `ZeroAdamW`, or a reduction was not enqueued; the other ranks then fail, too.
    pub fn backward(&mut self, loss: &Tensor) -> Result<()> {
        let result = self.try_backward(loss);
        self.abort_on_error(&result);
        result
    }

    fn try_backward(&mut self, loss: &Tensor) -> Result<()> {
        self.loss += f64::from(loss.to_dtype(candle_core::DType::F32)?.to_scalar::<f32>()?);
        self.with_reducer(|reducer| {
            reducer.begin();
            Ok(())
        })?;
        // Not under the lock, which the hooks take.
        let store = loss.backward();
        self.with_reducer(|reducer| {
            reducer.backward = None;
            Ok(())
        })?;
        let store = store?;
        let kept = self
            .params
            .iter()
            .filter(|param| store.get(param).is_some())
            .count();

        self.with_reducer(|reducer| {
            reducer.report.kept_by_candle = kept;
            reducer.end()
        })
    }

    /// Updates the parameters from the gradients since the last step. The outcome, equal on all
    /// ranks, has the mean loss.
    ///
    /// # Errors
    /// No backward precedes, a rank failed, or a wait exceeded the limit; the other ranks then
    /// fail, too.
    pub fn step(&mut self) -> Result<StepOutcome> {
        let result = self.try_step().map_err(candle_error);
        self.abort_on_error(&result);
        result
    }

    fn try_step(&mut self) -> std::result::Result<StepOutcome, Failure> {
        let (reduced, micro_batches) = self.with_reducer(|reducer| {
            let reduced: Vec<_> = reducer
                .reduced
                .iter_mut()
                .filter_map(Option::take)
                .collect();
            Ok((reduced, std::mem::take(&mut reducer.micro_batches)))
        })?;
        if micro_batches == 0 || reduced.len() != self.own.len() {
            return Err("a step without a complete backward before it".into());
        }
        let loss = std::mem::take(&mut self.loss) / (micro_batches * self.comm.world_size()) as f64;
        let inputs = StepInputs::new(loss, Divisor::MicroBatches(micro_batches));
        self.with_params(|zero, params| {
            let outcome = zero.update(params, &reduced, inputs)?;
            if !outcome.is_skipped() {
                zero.all_gather(params)?;
            }
            Ok(outcome)
        })
    }

    /// Updates this rank's shards in candle's memory.
    fn update(
        &mut self,
        params: &[AnySlice],
        reduced: &[Reduced<HostDevice>],
        inputs: StepInputs,
    ) -> std::result::Result<StepOutcome, Failure> {
        let own: Vec<Vec<_>> = self
            .own
            .iter()
            .map(|unit| unit.iter().map(|piece| piece.of(params)).collect())
            .collect();
        let units: Vec<_> = reduced
            .iter()
            .zip(&own)
            .map(|(grad, param)| UnitSlices { grad, param })
            .collect();
        let exchange = |message: &[u8]| {
            Ok::<_, Failure>(
                self.comm
                    .exchange(&self.pool, &self.compute, message, self.limit)?,
            )
        };
        self.optimizer
            .step_with(&self.compute, &units, inputs, exchange, self.limit)
    }

    /// Copies the shards that the other ranks updated into candle's tensors.
    fn all_gather(&mut self, params: &[AnySlice]) -> std::result::Result<(), Failure> {
        self.comm_stream.wait(&self.compute.record()?)?;
        let device = self.pool.device();
        for (unit, (own, others)) in self
            .layout
            .units()
            .iter()
            .zip(self.own.iter().zip(&self.others))
        {
            // On one stream from the first use to the last: the next unit reuses the memory in its
            // order.
            let block = self.pool.allocate(
                unit.padded_elems as usize,
                DType::F32,
                Purpose::Buckets,
                &self.comm_stream,
            )?;
            // SAFETY: used on the block's own stream alone.
            let whole = unsafe { block.slice() };
            let shard = whole.slice(index(unit.shard(self.comm.rank() as u64)));
            for (param, at) in own.iter().map(|piece| piece.of(params)) {
                device.copy(&self.comm_stream, param, shard.slice(at..at + param.len()))?;
                self.copied_params += param.len() as u64;
            }
            self.comm.all_gather(&self.comm_stream, shard, whole)?;
            for (param, at) in others.iter().map(|piece| piece.of(params)) {
                device.copy(&self.comm_stream, whole.slice(at..at + param.len()), param)?;
                self.copied_params += param.len() as u64;
            }
        }

        Ok(())
    }

    /// Locks candle's tensors, calls `run` with their elements, and waits until its operations have
    /// ended.
    fn with_params<R>(
        &mut self,
        run: impl FnOnce(&mut Self, &[AnySlice]) -> std::result::Result<R, Failure>,
    ) -> std::result::Result<R, Failure> {
        let (params, mut result) = (self.params.clone(), None);
        let locked = Box::new(|slices: &[AnySlice]| {
            let (comm, limit) = (self.comm.clone(), self.limit);
            let streams = [self.compute.clone(), self.comm_stream.clone()];
            // candle may use the memory again after this.
            let _wait = WaitOnDrop::new(comm.clone(), streams.clone(), limit);
            let ran = run(self, slices).and_then(|value| {
                streams
                    .iter()
                    .try_for_each(|stream| stream.synchronize(limit))?;
                Ok(value)
            });
            if let Err(error) = &ran {
                // The collectives that this rank has enqueued end.
                comm.abort(&error.to_string());
            }
            result = Some(ran);
            Ok::<(), candle_core::Error>(())
        });

        // SAFETY: the slices are used on the two streams, and `WaitOnDrop` waits for both when it
        // is dropped, also in a panic.
        unsafe { with_locked(&params, locked) }?;
        result.unwrap_or_else(|| Err("the parameters could not be locked".into()))
    }

    fn with_reducer<R>(&self, run: impl FnOnce(&mut Reducer) -> Result<R>) -> Result<R> {
        match &mut *self.sink.lock() {
            Receiver::Reducer(reducer) => run(reducer),
            Receiver::None | Receiver::Claimed => {
                bail!("the receiver of the gradients of these parameters is missing")
            }
        }
    }

    fn abort_on_error<R>(&self, result: &Result<R>) {
        if let Err(error) = result {
            self.comm.abort(&error.to_string());
        }
    }

    /// [`Self::backward`] and [`Self::step`], as candle's `Optimizer::backward_step`.
    ///
    /// # Errors
    /// Those of [`Self::backward`] and [`Self::step`].
    pub fn backward_step(&mut self, loss: &Tensor) -> Result<StepOutcome> {
        self.backward(loss)?;
        self.step()
    }

    /// The record of the last backward.
    ///
    /// # Errors
    /// Another optimizer of these parameters was created and dropped.
    pub fn backward_report(&self) -> Result<BackwardReport> {
        self.with_reducer(|reducer| Ok(reducer.report.clone()))
    }

    /// Parameter elements copied so far, to and from the gathered units.
    pub fn copied_param_elems(&self) -> u64 {
        self.copied_params
    }

    /// The layout of the trained parameters.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The pool of gradients, optimizer state and buckets.
    pub fn pool(&self) -> &Pool<HostDevice> {
        &self.pool
    }

    /// The optimizer of this rank's shards, for a checkpoint or `set_lr`.
    pub fn optimizer(&mut self) -> &mut ShardedAdamW<HostDevice> {
        &mut self.optimizer
    }
}
