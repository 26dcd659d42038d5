//! Making a [`Zero`].

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use zero_alloc::Purpose;
use zero_alloc::device::{DType, Device, Stream};
use zero_alloc::host::HostDevice;
use zero_comm::{
    BucketOptions, Buckets, CallerMemory, PrefetchOptions, PrefetchReport, Prefetcher, Reduce,
    WaitOnDrop,
};
use zero_kernels::UpdateRule;
use zero_shard::{
    Layout, LayoutOptions, ParamId, ParamPlacement, ParamSpec, TensorPart, UnitLayout, UnitSpec,
    ZeroStage,
};

use crate::{
    CommExchange, GroupRules, Matrices, Matrix, MatrixParam, OptimizerBuilder, OptimizerConfig,
    ParamGroups, RankSettings, Segment, ShardedOptimizer, StateFormat, StateHome, agree,
};

use super::FrameworkError;
use super::core::{Core, UnitParams, kept};
use super::gradients::{Gradients, SumOptions};
use super::rank::Rank;
use super::rank_calls::Call;
use super::values::short_name;
use super::zero::Zero;

/// Elements of the largest bucket by default: 64 MiB in bf16.
const MAX_BUCKET_ELEMS: usize = 32 << 20;

/// Returns the position of the rules of a parameter, by its full name.
type GroupOf = Box<dyn Fn(&str) -> usize>;

/// Returns the matrices in a parameter, by its full name and shape.
type MatricesOf = Box<dyn Fn(&str, &[u64]) -> Vec<Matrix>>;

/// Sets the place of the optimizer's state.
type Offload<D> = Box<dyn for<'a> FnOnce(OptimizerBuilder<'a, D>) -> OptimizerBuilder<'a, D>>;

impl<D: Device> Zero<D> {
    /// The settings of a run on `rank`: stage 2 in fp32, one micro-batch a step, AdamW with its
    /// default settings.
    pub fn builder(rank: Rank<D>) -> Builder<D> {
        Builder::new(rank)
    }
}

/// The settings of a [`Zero`] to be, the same on all ranks.
#[must_use = "`build` makes the run"]
pub struct Builder<D: Device> {
    rank: Rank<D>,
    stage: ZeroStage,
    dtype: DType,
    reduce_dtype: Option<DType>,
    config: OptimizerConfig,
    micro_batches: usize,
    adds_gradients: bool,
    units: Vec<UnitSpec>,
    rules: Vec<GroupRules>,
    group_of: GroupOf,
    bucket_elems: Option<usize>,
    prefetch: PrefetchOptions,
    rule: Option<Arc<dyn UpdateRule>>,
    group_updates: Vec<(usize, Arc<dyn UpdateRule>)>,
    matrices_of: MatricesOf,
    format: StateFormat,
    offload: Option<Offload<D>>,
    gather_memory: Option<Box<dyn CallerMemory>>,
    gradient_memory: Option<Box<dyn CallerMemory>>,
    waiting_units: usize,
}

impl<D: Device> fmt::Debug for Builder<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("rank", &self.rank)
            .field("stage", &self.stage)
            .field("dtype", &self.dtype)
            .field("units", &self.units.len())
            .finish_non_exhaustive()
    }
}

impl<D: Device> Builder<D> {
    pub(super) fn new(rank: Rank<D>) -> Self {
        Self {
            rank,
            stage: ZeroStage::Two,
            dtype: DType::F32,
            reduce_dtype: None,
            config: OptimizerConfig::default(),
            micro_batches: 1,
            adds_gradients: false,
            units: Vec::new(),
            rules: vec![GroupRules::default()],
            group_of: Box::new(|_| 0),
            bucket_elems: None,
            prefetch: PrefetchOptions::default(),
            rule: None,
            group_updates: Vec::new(),
            matrices_of: Box::new(|_, shape| match *shape {
                [outputs, inputs] => vec![Matrix::linear(outputs as usize, inputs as usize)],
                _ => Vec::new(),
            }),
            format: StateFormat::default(),
            offload: None,
            gather_memory: None,
            gradient_memory: None,
            waiting_units: usize::MAX,
        }
    }

    /// Sets the stage. Default: 2.
    pub fn stage(mut self, stage: ZeroStage) -> Self {
        self.stage = stage;
        self
    }

    /// Sets the dtype of the parameters: fp32 (default), bf16 or fp16. The optimizer has fp32
    /// masters of 16-bit parameters.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// Sets the dtype in which gradients travel. Default: that of the parameters.
    pub fn reduce_dtype(mut self, dtype: DType) -> Self {
        self.reduce_dtype = Some(dtype);
        self
    }

    /// Sets AdamW, its schedule, clipping and loss scale.
    pub fn adamw(mut self, config: OptimizerConfig) -> Self {
        self.config = config;
        self
    }

    /// Sets the update rule, in place of AdamW; schedule, clipping and loss scale are still those of
    /// [`Self::adamw`].
    pub fn rule(mut self, rule: Arc<dyn UpdateRule>) -> Self {
        self.rule = Some(rule);
        self
    }

    /// Sets the update rule of a group of [`Self::groups`], in place of that of all, such as
    /// [`Muon`](zero_kernels::Muon) for the matrices of blocks: not for embeddings and the head.
    pub fn group_rule(mut self, group: usize, rule: Arc<dyn UpdateRule>) -> Self {
        self.group_updates.push((group, rule));
        self
    }

    /// Sets the matrices in a parameter, by its full name and shape, for rules that see them whole.
    /// Default: a parameter of two dimensions is that of a linear layer, outputs by inputs. Split
    /// what is fused, such as queries, keys and values ([`Matrix::split`]).
    pub fn matrices(mut self, matrices_of: impl Fn(&str, &[u64]) -> Vec<Matrix> + 'static) -> Self {
        self.matrices_of = Box::new(matrices_of);
        self
    }

    /// Sets the formats of the optimizer's state. Default: fp32.
    pub fn format(mut self, format: StateFormat) -> Self {
        self.format = format;
        self
    }

    /// Sets the number of micro-batches of a step. Default: 1.
    pub fn micro_batches(mut self, micro_batches: usize) -> Self {
        self.micro_batches = micro_batches;
        self
    }

    /// Makes a second gradient of a parameter in one micro-batch add to the first, as PyTorch's do.
    /// Default: it is an error, as after a backward that failed and was called again.
    pub fn add_gradients(mut self) -> Self {
        self.adds_gradients = true;
        self
    }

    /// Adds a unit, such as a layer, in the order of forward: its parameters, with names and
    /// shapes, are gathered and reduced together. Their full names begin with `UNIT.`.
    pub fn unit<P: Into<String>, S: Into<Vec<u64>>>(
        mut self,
        name: impl Into<String>,
        params: impl IntoIterator<Item = (P, S)>,
    ) -> Self {
        let name = name.into();
        let scoped = |(param, shape): (P, S)| {
            let param: String = param.into();
            ParamSpec::new(format!("{name}.{param}"), shape)
        };
        let params: Vec<_> = params.into_iter().map(scoped).collect();
        self.units.push(UnitSpec::new(name, params));
        self
    }

    /// Adds parameters with full names, in the order of forward; `unit_of` returns the unit of a
    /// name, such as `blocks.3` of `blocks.3.mlp.weight`.
    pub fn params<P: Into<String>, S: Into<Vec<u64>>>(
        mut self,
        params: impl IntoIterator<Item = (P, S)>,
        unit_of: impl Fn(&str) -> String,
    ) -> Self {
        let params = params
            .into_iter()
            .map(|(name, shape)| ParamSpec::new(name, shape));
        self.units.extend(UnitSpec::by_name(params, unit_of));
        self
    }

    /// Sets parameter groups: `group_of` returns the position in `rules` for the full name of a
    /// parameter.
    pub fn groups(
        mut self,
        rules: impl Into<Vec<GroupRules>>,
        group_of: impl Fn(&str) -> usize + 'static,
    ) -> Self {
        self.rules = rules.into();
        self.group_of = Box::new(group_of);
        self
    }

    /// Sets the elements of a bucket; there are two. Default: the largest unit, at most 32 Mi
    /// elements. A larger unit is reduced in pieces.
    pub fn bucket_elems(mut self, elems: usize) -> Self {
        self.bucket_elems = Some(elems);
        self
    }

    /// Sets the limits of gathers at stage 3. Default: one unit ahead.
    pub fn prefetch(mut self, options: PrefetchOptions) -> Self {
        self.prefetch = options;
        self
    }

    /// Gathers units at stage 3 into memory of the framework, which its tensors can own. The units
    /// are those of [`Zero::layout`], with its padding behind their parameters.
    pub fn gather_memory(mut self, memory: impl CallerMemory + 'static) -> Self {
        self.gather_memory = Some(Box::new(memory));
        self
    }

    /// Sums gradients, in fp32, in memory of the framework, which has it back between an update and
    /// the next backward. By default it is the pool's, where gathers can use it meanwhile.
    pub fn gradient_memory(mut self, memory: impl CallerMemory + 'static) -> Self {
        self.gradient_memory = Some(Box::new(memory));
        self
    }

    /// Makes the call with the last gradient of a unit wait while those of more than `units` units
    /// are not packed, so that a backward that is faster than its reductions does not pile up
    /// gradients. On a device it is the host that waits. Default: no bound.
    pub fn waiting_units(mut self, units: usize) -> Self {
        self.waiting_units = units;
        self
    }

    /// Makes the run. `init` writes the initial values of a parameter, by its full name and shape:
    /// the same on all ranks, so do not seed by rank. All ranks call it.
    ///
    /// # Errors
    /// A rank has other settings or initial values, or could not start: all ranks have the error.
    pub fn build(
        self,
        mut init: impl FnMut(&str, &[u64], &mut [f32]),
    ) -> Result<Zero<D>, FrameworkError> {
        self.build_with(|core| core.initialise(&mut init), |_| Ok(()))
    }

    /// As [`Self::build`], with the initial values of rank 0 on all ranks: `init` is called on that
    /// rank only. A unit at a time travels and is whole in memory.
    ///
    /// # Errors
    /// A rank has other settings, or could not start: all ranks have the error.
    pub fn build_from_rank_0(
        self,
        mut init: impl FnMut(&str, &[u64], &mut [f32]),
    ) -> Result<Zero<D>, FrameworkError> {
        self.build_with(
            |_| Ok(Vec::new()),
            |core| core.initialise_from_rank_0(&mut init),
        )
    }

    /// Makes the run. `before` makes the initial values of this rank, whose hashes the ranks compare
    /// with their settings; `after` those that need communication.
    fn build_with(
        self,
        before: impl FnOnce(&mut Core<D>) -> Result<Vec<(String, u64)>, FrameworkError>,
        after: impl FnOnce(&mut Core<D>) -> Result<(), FrameworkError>,
    ) -> Result<Zero<D>, FrameworkError> {
        let rank = self.rank.comm.rank();
        let comm = Arc::clone(&self.rank.comm);
        let exchange = self.rank.exchanger(Call::Build);
        let made = self.make().and_then(|(mut zero, mut settings)| {
            for (name, hash) in before(&mut zero.core)? {
                settings.push(format!("hash of the initial values of {name}"), hash);
            }
            zero.core.gradients.identify(&settings);
            Ok((zero, settings))
        });

        let settings = made.as_ref().map(|(_, settings)| settings);
        let settings = settings.map_err(|error| error as &dyn fmt::Display);
        agree(rank, settings, exchange)?;
        let (mut zero, _) = made?;
        let gathered = after(&mut zero.core).and_then(|()| zero.core.gather());
        gathered.inspect_err(|error| comm.abort(&error.to_string()))?;
        Ok(zero)
    }

    /// Makes the run without communication.
    fn make(self) -> Result<(Zero<D>, RankSettings), FrameworkError> {
        // Why without `..`: a new setting does not compile until it is used, and so is agreed on.
        let Self {
            rank,
            stage,
            dtype,
            reduce_dtype,
            config,
            micro_batches,
            adds_gradients,
            units,
            rules,
            group_of,
            bucket_elems,
            prefetch,
            rule,
            group_updates,
            matrices_of,
            format,
            offload,
            gather_memory,
            gradient_memory,
            waiting_units,
        } = self;

        let ranks = rank.comm.world_size();
        let options = format.moments.layout_options(LayoutOptions::default());
        let layout = Layout::with_options(&units, ranks as u64, options)?;
        check(&units, micro_batches)?;
        let mut settings = settings(&units, stage, micro_batches);
        settings.push("add_gradients", adds_gradients);
        let groups = Groups::new(&layout, rules, &*group_of)?;

        let wait = WaitOnDrop::new(
            Arc::clone(&rank.comm),
            [rank.compute.clone(), rank.comm_stream.clone()],
            rank.limit,
        );
        let params = units_params(&rank, &layout, stage, dtype)?;

        let segments = match stage.shards_optimizer() {
            true => Segment::shards(&layout),
            false => Segment::wholes(&layout, rank.id()),
        };
        let mut of_rank = groups.of_rank(&layout, rank.id(), stage)?;
        of_rank.updates = group_updates;
        let own = rule.clone().unwrap_or_else(|| config.rule());
        let matrices_of = |id: ParamId| {
            let group = groups.of(id);
            let rule = of_rank.update_of(group, &own).matrix_rule();
            rule.filter(|_| groups.rules_of(id).trainable)?;
            let param = &layout.units()[id.unit].params[id.param];
            let matrices = matrices_of(&param.name, &param.shape);
            Some(MatrixParam {
                group,
                matrices,
                cut: None,
            })
        };
        let rule_of = |(id, placed): (ParamId, &ParamPlacement)| {
            let trained = groups.rules_of(id).trainable;
            let rule = of_rank.update_of(groups.of(id), &own).name();
            trained.then(|| (placed.name.clone(), rule.to_owned()))
        };
        let update_rules = layout.params().filter_map(rule_of).collect();
        let by_unit = false;
        let replicated = !stage.shards_optimizer();
        let place = (rank.id(), TensorPart::whole());
        let matrices = Matrices::new(&layout, place, replicated, by_unit, matrices_of)?;
        let optim = ShardedOptimizer::builder(&rank.pool, Arc::clone(&rank.kernels), &rank.compute)
            .config(config)
            .param_dtype(dtype)
            .format(format)
            .groups(&of_rank);
        let optim = match rule {
            Some(rule) => optim.rule(rule),
            None => optim,
        };
        let optim = match offload {
            Some(offload) => offload(optim),
            None => optim,
        };
        let optim = match matrices.is_empty() {
            true => optim,
            false => {
                let comm = Arc::clone(&rank.comm);
                let exchange = CommExchange::new(comm, rank.comm_stream.clone());
                optim.matrices(matrices, exchange)
            }
        };
        let optim = optim.build(segments)?;
        for (name, value) in optim.settings().iter() {
            settings.push(name, value);
        }
        let largest = layout.units().iter().map(|unit| unit.padded_elems as usize);
        let largest = largest
            .max()
            .unwrap_or(0)
            .clamp(ranks, MAX_BUCKET_ELEMS.max(ranks));
        let capacity = bucket_elems.unwrap_or(largest);
        let options = BucketOptions::new(capacity, reduce_dtype.unwrap_or(dtype));
        settings.push("buckets", format!("{options:?}"));
        let buckets = Buckets::new(
            &rank.pool,
            Reduce::of_stage(stage, Arc::clone(&rank.comm)),
            rank.compute.clone(),
            rank.comm_stream.clone(),
            options,
        )?;
        let trained = |unit, param| groups.rules_of(ParamId { unit, param }).trainable;
        settings.push("prefetch", format!("{prefetch:?}"));
        let sums = SumOptions {
            stage,
            micro_batches,
            adds: adds_gradients,
            waiting_units,
        };
        let gradients = Gradients::new(&layout, sums, buckets, gradient_memory, trained);

        let mut prefetcher = stage.shards_params().then(|| {
            Prefetcher::new(
                rank.pool.clone(),
                Arc::clone(&rank.comm),
                rank.compute.clone(),
                rank.comm_stream.clone(),
                params.iter().map(|unit| unit.held).collect(),
                prefetch,
            )
        });
        if let (Some(prefetcher), Some(memory)) = (&mut prefetcher, gather_memory) {
            prefetcher.set_memory(memory, rank.limit);
        }

        let zero = Zero {
            _wait: wait,
            prefetcher,
            core: Core {
                rank,
                stage,
                micro_batches,
                layout,
                params,
                gradients,
                optim,
                update_rules,
                steps: 0,
                state: serde_json::Value::Null,
                model_config: serde_json::Value::Null,
                has_views: false,
                in_step: false,
                begun: 0,
                paused: None,
                broken: None,
            },
            report: PrefetchReport::default(),
        };
        Ok((zero, settings))
    }
}

impl Builder<HostDevice> {
    /// Keeps the optimizer's state in pieces, in host memory or on NVMe.
    pub fn offload(mut self, home: StateHome) -> Self {
        self.offload = Some(Box::new(move |optim| optim.offload(home)));
        self
    }
}

/// The parameter groups of a model.
struct Groups {
    rules: Vec<GroupRules>,
    /// The group of each parameter of each unit.
    units: Vec<Vec<usize>>,
}

impl Groups {
    /// Calls `group_of` once for each parameter.
    fn new(
        layout: &Layout,
        rules: Vec<GroupRules>,
        group_of: &dyn Fn(&str) -> usize,
    ) -> Result<Self, FrameworkError> {
        let group_of = |param: &ParamPlacement| match group_of(&param.name) {
            group if group < rules.len() => Ok(group),
            group => Err(FrameworkError::Setting(format!(
                "{} is in group {group} of {}",
                param.name,
                rules.len()
            ))),
        };
        let of_unit = |unit: &UnitLayout| unit.params.iter().map(group_of).collect();
        let units: Result<_, _> = layout.units().iter().map(of_unit).collect();
        let units = units?;
        Ok(Self { rules, units })
    }

    fn of(&self, id: ParamId) -> usize {
        self.units[id.unit][id.param]
    }

    fn rules_of(&self, id: ParamId) -> &GroupRules {
        &self.rules[self.of(id)]
    }

    /// The groups of the elements whose state a rank has.
    fn of_rank(
        &self,
        layout: &Layout,
        rank: u64,
        stage: ZeroStage,
    ) -> Result<ParamGroups, FrameworkError> {
        let rank = stage.shards_optimizer().then_some(rank);
        let params = layout.params();
        let assigned = params.map(|(id, placed)| (placed.name.clone(), self.of(id)));
        let groups = ParamGroups::of_layout(self.rules.clone(), layout, rank, |id| self.of(id))?;
        Ok(groups.assigned(assigned).settable())
    }
}

fn check(units: &[UnitSpec], micro_batches: usize) -> Result<(), FrameworkError> {
    let refuse = |why: &str| Err(FrameworkError::Setting(why.to_owned()));
    if units.iter().all(|unit| unit.params.is_empty()) {
        return refuse("there are no parameters; add units");
    }
    if micro_batches == 0 {
        return refuse("micro_batches is 0; it must be at least 1");
    }
    units.iter().try_for_each(check_names)
}

/// Checks that no name means two parameters of the unit.
fn check_names(unit: &UnitSpec) -> Result<(), FrameworkError> {
    let full: HashSet<&str> = unit.params.iter().map(|param| &*param.name).collect();
    for param in &unit.params {
        let short = short_name(&unit.name, &param.name).filter(|short| full.contains(short));
        if let Some(short) = short {
            return Err(FrameworkError::Setting(format!(
                "in unit {:?} the name {short:?} means two parameters, {short} and {}; rename one",
                unit.name, param.name
            )));
        }
    }
    Ok(())
}

/// The settings, besides the optimizer's, that are equal on all ranks.
fn settings(units: &[UnitSpec], stage: ZeroStage, micro_batches: usize) -> RankSettings {
    let mut settings = RankSettings::new();
    settings.push("stage", stage);
    settings.push("micro_batches", micro_batches);
    for unit in units {
        for param in &unit.params {
            let shape = format!("{:?} in {}", param.shape, unit.name);
            settings.push(format!("shape of {}", param.name), shape);
        }
    }
    settings
}

fn index(range: Range<u64>) -> Range<usize> {
    range.start as usize..range.end as usize
}

/// Allocates the parameters of all units.
fn units_params<D: Device>(
    rank: &Rank<D>,
    layout: &Layout,
    stage: ZeroStage,
    dtype: DType,
) -> Result<Vec<UnitParams<D>>, FrameworkError> {
    let mut params = Vec::new();
    for unit in layout.units() {
        let elems = match stage.shards_params() {
            true => unit.shard_elems,
            false => unit.padded_elems,
        };
        let block = rank
            .pool
            .allocate(elems as usize, dtype, Purpose::Params, &rank.compute)?;
        // SAFETY: `memory` keeps the block beside the slice, and with every view of it; `Zero`
        // waits for the streams that use it before it drops both.
        let held = unsafe { block.slice() };
        rank.pool.device().fill_zero(&rank.compute, held)?;
        let own = match stage {
            ZeroStage::One | ZeroStage::Two => held.slice(index(unit.shard(rank.id()))),
            ZeroStage::Zero | ZeroStage::Three => held,
        };
        params.push(UnitParams {
            held,
            own: [(own, 0)],
            ready: rank.compute.record()?,
            memory: kept(block),
        });
    }
    Ok(params)
}
