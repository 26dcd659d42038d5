//! The settings of a run that its ranks share.

use std::sync::Arc;
use std::time::Duration;

use zero_alloc::device::DType;
use zero_comm::{PrefetchOptions, WireCodec};
use zero_optim::{OptimizerConfig, StateArrays};
use zero_shard::{AxisTraffic, GridLayout, Layout, LayoutOptions, ShardError, Widths, ZeroStage};

use crate::error::TrainError;
use crate::mesh_settings::MeshSettings;
use crate::offload::settings::{Home, OffloadSettings};
use crate::param_groups::{GroupSettings, KindOf, ModelGroups};
use crate::units::SHARD_ALIGN_ELEMS;

/// Settings that are equal on all ranks.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The ZeRO stage.
    pub stage: ZeroStage,
    /// The ranks over which the stage shards.
    pub mesh: MeshSettings,
    /// Consecutive ranks of a machine, for the bytes between machines; `None`: not known, and none
    /// are counted. It and the ranks of a group divide each other.
    pub node_ranks: Option<usize>,
    /// Type of parameters, and of gradients in collectives.
    pub dtype: DType,
    /// Micro-batches of a step.
    pub grad_accum_steps: usize,
    /// Whether stages 0 and 1 reduce gradients after every micro-batch, as stages 2 and 3 do, with
    /// the same bits. If not, they sum micro-batches on each rank and reduce once a step.
    pub reduce_every_micro_batch: bool,
    /// Elements of a gradient bucket.
    pub bucket_capacity_elems: usize,
    /// Whether communication overlaps compute. If not, each waits for the other: both are on one
    /// stream. For no unit to be gathered ahead, set `prefetch.ahead` to 0 as well.
    pub overlap: bool,
    /// How stage 3 gathers units.
    pub prefetch: PrefetchOptions,
    /// The format in which gathered parameters travel; `None`: as they are. Stages 1 and 2 then
    /// keep this rank's shard apart from the gathered parameters.
    pub gather_codec: Option<Arc<dyn WireCodec>>,
    /// The optimizer.
    pub optimizer: OptimizerConfig,
    /// Rules of tensors that differ from the optimizer's.
    pub groups: GroupSettings,
    /// The kinds of the model's tensors, for the rules.
    pub kind_of: KindOf,
    /// Whether steps are recorded into CUDA graphs, from the third step on; only at stages 0 to 2.
    pub graphs: bool,
    /// The offload.
    pub offload: OffloadSettings,
    /// The timeout of a collective.
    pub limit: Duration,
}

impl Settings {
    /// Settings without offload, parameter groups and graphs: one micro-batch a step, buckets of
    /// 2^20 elements, and a minute for each collective.
    pub fn new(stage: ZeroStage, dtype: DType, kind_of: KindOf) -> Self {
        Self {
            stage,
            mesh: MeshSettings::default(),
            node_ranks: None,
            dtype,
            grad_accum_steps: 1,
            reduce_every_micro_batch: false,
            bucket_capacity_elems: 1 << 20,
            overlap: true,
            prefetch: PrefetchOptions::default(),
            gather_codec: None,
            optimizer: OptimizerConfig::default(),
            groups: GroupSettings::default(),
            kind_of,
            graphs: false,
            offload: OffloadSettings::default(),
            limit: Duration::from_secs(60),
        }
    }

    /// The rules of each tensor of the model.
    ///
    /// # Errors
    /// As [`GroupSettings::resolve`].
    pub fn resolve_groups(&self, layout: &Layout) -> Result<ModelGroups, TrainError> {
        self.groups.resolve(layout, self.kind_of)
    }

    /// The timeout of the host's waits for a stream: longer than a collective's, whose error names
    /// the missing rank.
    pub fn host_limit(&self) -> Duration {
        self.limit.saturating_mul(2)
    }

    /// Whether each rank sums its micro-batches in fp32 and reduces the sum once a step, as DDP and
    /// DeepSpeed do: 2 Ψ elements a step, however many micro-batches it has. The storage of stages
    /// 0 and 1 is the place of the sum, so no scratch is needed. Otherwise every micro-batch is
    /// reduced: with A of them (A + 1) Ψ elements at stage 2, 3 A Ψ at stage 3. The orders of
    /// summation differ, so with A > 1 stages 0 and 1 have the bits of stages 2 and 3 only under
    /// `--reduce-every-micro-batch`.
    ///
    /// Why not always: stages 2 and 3 keep only a shard of the sum; with an optimizer on the host
    /// gradients leave the device after each micro-batch; and the sum of many micro-batches could
    /// overflow fp16 in the collective, where each of them does not.
    pub fn sums_locally(&self) -> bool {
        let possible = !self.stage.shards_grads()
            && !self.offload.updates_on_host()
            && self.dtype != DType::F16;
        possible && self.grad_accum_steps > 1 && !self.reduce_every_micro_batch
    }

    /// Reductions of a unit's gradient in a step.
    pub fn reductions(&self) -> u64 {
        if self.sums_locally() {
            1
        } else {
            self.grad_accum_steps as u64
        }
    }

    /// The dtype of stored gradients: fp32 if several micro-batches are summed.
    pub fn grad_dtype(&self) -> DType {
        if self.grad_accum_steps > 1 {
            DType::F32
        } else {
            self.dtype
        }
    }

    /// Gradient buckets of a rank. One rank needs none: it stores its gradients without them,
    /// unless each micro-batch's are rounded to the dtype of communication and then summed in fp32
    /// on the device.
    pub fn buckets(&self, ranks: usize, on_host: bool) -> usize {
        let sums_leave =
            self.offload.updates_on_host() && (!on_host || self.offload.grads_on_file().is_some());
        let stored = sums_leave || self.sums_locally() || self.grad_dtype() == self.dtype;
        if ranks == 1 && stored { 0 } else { 2 }
    }

    /// Bytes that a rank sends in a step, by axis: an upper bound at stage 3. Offloaded parameters
    /// are gathered from the replicas before each gather of the group.
    ///
    /// # Errors
    /// A sum does not fit 64 bits.
    pub fn axis_traffic(&self, layouts: &GridLayout) -> Result<AxisTraffic, ShardError> {
        let mut axes = layouts.axis_traffic(self.stage, &self.widths(), self.reductions())?;
        if self.stage.shards_params() && self.offload.params != Home::Device {
            let gathers = 2 * self.grad_accum_steps as u64;
            let bytes = &mut axes.replicas.all_gather_bytes;
            *bytes = bytes.saturating_mul(gathers);
        }
        Ok(axes)
    }

    /// Bytes per element, for the memory formulas.
    pub fn widths(&self) -> Widths {
        let state = self.optimizer_state().bytes(1);
        let param = self.dtype.size_bytes();
        let widths = Widths::new(param as u64, state as u64, self.grad_accum_steps as u64);
        let codec = self.gather_codec.as_ref();
        Widths {
            gathered: codec.map_or(widths.gathered, |codec| codec.format()),
            ..widths
        }
    }

    /// The options of the layout of units.
    pub fn layout_options(&self) -> LayoutOptions {
        let options = LayoutOptions::default().shard_align_elems(SHARD_ALIGN_ELEMS);
        self.offload.format.moments.layout_options(options)
    }

    /// The arrays of the optimizer's state.
    pub fn optimizer_state(&self) -> StateArrays {
        self.optimizer.arrays(self.dtype, self.offload.format)
    }
}
