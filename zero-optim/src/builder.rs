//! Making an optimizer.

use std::sync::Arc;
use std::time::Duration;

use zero_alloc::device::{DType, Device};
use zero_alloc::host::HostDevice;
#[cfg(target_os = "linux")]
use zero_alloc::swap::{SwapFile, SwapRing};
use zero_alloc::{Pool, Purpose};
use zero_kernels::step::{GradStats, StepScalars};
use zero_kernels::{Codec, Kernels, Slot, UpdateRule};

use crate::controller::{OptimizerConfig, StepController};
use crate::format::{Masters, StateArrays, StateFormat, StateHome};
use crate::groups::Resolved;
use crate::matrices::check_elements;
use crate::matrix_exchange::MatrixDevice;
use crate::matrix_update::MatrixExchange;
use crate::pieces::{Pieces, view};
use crate::segments::check_segments;
use crate::{
    AllToAll, Matrices, OffloadedMatrices, OptimError, ParamGroups, Segment, ShardedOptimizer,
};

/// Elements of fp64 that a [`GradStats`] takes, of which there is one per unit.
const GRAD_STATS_ELEMS: usize = size_of::<GradStats>() / size_of::<f64>();
/// Elements of fp32 that a [`StepScalars`] takes, of which there is one per set of rates.
const STEP_SCALARS_ELEMS: usize = size_of::<StepScalars>() / size_of::<f32>();

/// Makes the state of an optimizer away from the device's memory: [`Pieces::offloaded`], which
/// there is for hosts only.
type MakeOffloaded<D> = fn(
    &Pool<D>,
    &<D as Device>::Stream,
    &Resolved,
    usize,
    &StateHome,
) -> Result<Pieces<D>, OptimError>;

/// The settings of a [`ShardedOptimizer`] to be; see [`ShardedOptimizer::builder`].
#[must_use = "`build` makes the optimizer"]
pub struct OptimizerBuilder<'a, D: Device> {
    pool: &'a Pool<D>,
    kernels: Arc<dyn Kernels<D>>,
    stream: &'a D::Stream,
    config: OptimizerConfig,
    param_dtype: DType,
    groups: Option<&'a ParamGroups>,
    rule: Option<Arc<dyn UpdateRule>>,
    format: StateFormat,
    offloaded: Option<(MakeOffloaded<D>, StateHome)>,
    matrices: Option<MatrixExchange<D>>,
}

impl<D: Device> std::fmt::Debug for OptimizerBuilder<'_, D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OptimizerBuilder")
            .field("config", &self.config)
            .field("param_dtype", &self.param_dtype)
            .finish_non_exhaustive()
    }
}

impl<D: Device> ShardedOptimizer<D> {
    /// An optimizer with memory of `pool`, whose first operations are on `stream`. By default for
    /// fp32 parameters, with the default settings, state in memory of the device, and one group.
    pub fn builder<'a>(
        pool: &'a Pool<D>,
        kernels: Arc<dyn Kernels<D>>,
        stream: &'a D::Stream,
    ) -> OptimizerBuilder<'a, D> {
        OptimizerBuilder {
            pool,
            kernels,
            stream,
            config: OptimizerConfig::default(),
            param_dtype: DType::F32,
            groups: None,
            rule: None,
            format: StateFormat::default(),
            offloaded: None,
            matrices: None,
        }
    }
}

impl<'a, D: Device> OptimizerBuilder<'a, D> {
    /// Sets the settings of the updates.
    pub fn config(mut self, config: OptimizerConfig) -> Self {
        self.config = config;
        self
    }

    /// Sets the dtype of the parameters: fp32, bf16 or fp16.
    pub fn param_dtype(mut self, param_dtype: DType) -> Self {
        self.param_dtype = param_dtype;
        self
    }

    /// Sets parameter groups: one loss scale, one decision, one norm over all trained gradients,
    /// and one state, without elements for frozen parameters. With equal rules the launches and
    /// bits are those without groups. All ranks pass the same rules; the runs are those of this
    /// rank's elements.
    pub fn groups(mut self, groups: &'a ParamGroups) -> Self {
        self.groups = Some(groups);
        self
    }

    /// Sets the update rule of groups without another, in place of
    /// [the settings' own](OptimizerConfig::rule).
    pub fn rule(mut self, rule: Arc<dyn UpdateRule>) -> Self {
        self.rule = Some(rule);
        self
    }

    /// Sets the formats of masters and moments. Moments in bf16 need
    /// [`Self::offload`]; those of 8 and 4 bits need groups of [`ParamGroups::of_layout`], of an
    /// aligned layout ([`Moments::layout_options`](crate::Moments::layout_options)).
    ///
    /// [`Masters::Remainder`], for bf16 parameters: masters as a 16-bit remainder beside each
    /// parameter, 10 bytes of Adam's state an element in place of 12, and 26 bytes of traffic an
    /// update in place of 28. Parameter and remainder together have the bits of the fp32 master,
    /// and its updates are the same; checkpoints load into either.
    ///
    /// The parameter is the master rounded to nearest, as without remainders, but a master exactly
    /// halfway between two parameters rounds away from zero and not to even. To even is impossible:
    /// 65,537 masters round to a parameter whose last bit is even, and 16 bits tell 65,536 apart.
    ///
    /// [`ShardedOptimizer::init_masters`] then accepts bf16 weights only, and
    /// [`ShardedOptimizer::write_state`] sets the parameters with the masters.
    pub fn format(mut self, format: StateFormat) -> Self {
        self.format = format;
        self
    }

    /// Sets the matrices of update rules that see them whole, and the exchange with the ranks among
    /// which the state is sharded.
    pub fn matrices(mut self, matrices: Matrices, comm: impl AllToAll<D> + 'static) -> Self {
        let device = MatrixDevice::new(Arc::clone(&self.kernels), self.pool, comm);
        self.matrices = Some(MatrixExchange {
            matrices,
            of_waves: Box::new(device),
            pool: self.pool.clone(),
        });
        self
    }

    /// Allocates the state for `segments` and enqueues zeroing the slots. Masters are undefined
    /// until [`ShardedOptimizer::init_masters`].
    ///
    /// # Errors
    /// A setting is outside its range, kernels for CUDA have no products for matrices, the segments
    /// do not tile the state, the groups' runs do not tile the elements of the segments, the format
    /// does not fit the parameters, an allocation failed, or the file of offloaded state could not
    /// be made.
    pub fn build(self, segments: Vec<Segment>) -> Result<ShardedOptimizer<D>, OptimError> {
        let Self {
            pool,
            kernels,
            stream,
            param_dtype,
            ..
        } = self;

        if !matches!(param_dtype, DType::F32 | DType::Bf16 | DType::F16) {
            return Err(OptimError::ParamDType { dtype: param_dtype });
        }
        if self.format.masters == Masters::Remainder && param_dtype != DType::Bf16 {
            return Err(OptimError::Remainders { dtype: param_dtype });
        }
        let mut controller = StepController::new(self.config)?;
        let config = controller.config();
        let one_group = ParamGroups::default();
        let groups = self.groups.unwrap_or(&one_group);
        let rule = self.rule.unwrap_or_else(|| config.rule());
        let elems = check_segments(&segments)?;
        let groups = groups.resolve(config, &rule, (param_dtype, self.format), &segments, elems)?;
        let sub_group_elems = config.sub_group_elems;
        controller.set_rates(groups.rates.clone());

        let mut exchange = self.matrices;
        match &mut exchange {
            Some(exchange) => {
                exchange.matrices.check(&segments, &groups)?;
                exchange.of_waves.set_rules(groups.rules_of_matrices())?;
            }
            None => check_elements(&segments, &groups, |_| 0)?,
        }

        for slot in groups.arrays.iter().flat_map(StateArrays::slots) {
            // Device steps are enqueued before their numbers are known, which select random bits.
            let is_random = slot.codec == Codec::Bf16 && self.offloaded.is_none();
            if is_random || !kernels.updates(slot.codec) {
                let Slot { name, codec } = *slot;
                return Err(OptimError::SlotOnDevice { slot: name, codec });
            }
        }
        let state = match self.offloaded {
            Some((make, home)) => make(pool, stream, &groups, sub_group_elems, &home)?,
            None => Pieces::on_device(pool, stream, &groups)?,
        };

        let workspace = |elems, dtype| pool.allocate(elems, dtype, Purpose::Workspace, stream);
        let shards: Vec<usize> = segments.iter().map(|s| s.counted.len()).collect();
        let scratch_elems = kernels.stats_scratch_elems(&shards);
        let optim = ShardedOptimizer {
            state,
            is_updating: false,
            exchange,
            device: pool.device().clone(),
            kernels,
            controller,
            format: self.format,
            param_dtype,
            stats: workspace(GRAD_STATS_ELEMS * segments.len(), DType::F64)?,
            stats_scratch: workspace(scratch_elems, DType::F64)?,
            scalars: workspace(STEP_SCALARS_ELEMS * groups.rates.len(), DType::F32)?,
            device_steps: None,
            names: segments.iter().map(|s| s.name.clone()).collect(),
            segments,
            groups,
            stream: stream.clone(),
        };

        // Frozen units have no launch that writes their statistics.
        if (0..optim.segments.len()).any(|unit| optim.is_frozen(unit)) {
            optim.device.fill_zero(stream, view(&optim.stats))?;
        }
        Ok(optim)
    }
}

impl OptimizerBuilder<'_, HostDevice> {
    /// For a host that updates in place of a device (ZeRO-Offload, arXiv 2101.06840): state in
    /// pieces in host memory or on NVMe. Gradients and parameters are in host memory, which may be
    /// pinned. On NVMe the update of a unit is a pipeline of transfers and launches, with the bits
    /// of the update in memory unless the format rounds.
    pub fn offload(mut self, home: StateHome) -> Self {
        self.offloaded = Some((Pieces::offloaded, home));
        self
    }

    /// [`Self::matrices`], which a device updates in place of the host: directions and updates are
    /// copied.
    pub fn matrices_on_device<E: Device>(
        mut self,
        matrices: Matrices,
        offloaded: OffloadedMatrices<E>,
    ) -> Self {
        let pool = offloaded.held.clone();
        self.matrices = Some(MatrixExchange {
            matrices,
            of_waves: Box::new(offloaded),
            pool,
        });
        self
    }
}

impl ShardedOptimizer<HostDevice> {
    /// The scratch file of state on NVMe, with its length, the bytes read and written so far, and
    /// its notices.
    #[cfg(target_os = "linux")]
    pub fn file(&self) -> Option<&SwapFile> {
        self.state.ring().map(SwapRing::file)
    }

    /// Waits at most `limit` until all state is written to the file on NVMe.
    ///
    /// # Errors
    /// A transfer failed, or the limit passed.
    pub fn wait_for_transfers(&self, limit: Duration) -> Result<(), OptimError> {
        self.check_state()?;
        self.state.wait_for_transfers(limit)
    }
}
