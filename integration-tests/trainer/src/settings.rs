//! The settings of a run that its ranks share.

use std::time::Duration;

use zero_alloc::device::DType;
use zero_comm::PrefetchOptions;
use zero_kernels::Codec;
use zero_optim::{OptimizerConfig, StateArrays, StateKind};
use zero_shard::{
    AxisTraffic, BlockFormat, GridLayout, Layout, LayoutOptions, ParamSpec, ShardError, Sharding,
    UnitSpec, Widths, WireFormat, ZeroStage,
};

use crate::error::TrainError;
use crate::frozen_layout::in_blocks;
use crate::mesh_settings::MeshSettings;
use crate::muon_settings::MuonSettings;
use crate::offload::settings::{Home, OffloadSettings};
use crate::param_groups::{GroupRule, GroupSettings, KindOf, ModelGroups};
use crate::quantised::{QuantisedGrads, wire_of};

/// Alignment of shards in elements: 32 bytes of a 16-bit type.
pub const SHARD_ALIGN_ELEMS: u64 = 16;

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
    /// keep this rank's shard apart from the gathered parameters. Not at stage 0, which gathers
    /// none.
    pub gather_codec: Option<Codec>,
    /// The formats in which gradients travel; `None`: in `dtype`.
    pub quantised_grads: Option<QuantisedGrads>,
    /// The format of frozen units with linear layers: in memory and where they are gathered;
    /// `None`: in `dtype`.
    pub quantised_frozen: Option<BlockFormat>,
    /// The optimizer.
    pub optimizer: OptimizerConfig,
    /// Muon for matrices, in place of the optimizer.
    pub muon: MuonSettings,
    /// Rules of tensors that differ from the optimizer's.
    pub groups: GroupSettings,
    /// The kinds of the model's tensors, for the rules.
    pub kind_of: KindOf,
    /// The number of units of adapters, which are the model's first ones: only they are trained and
    /// saved, and a resumed run takes the others from the initial weights. `None`: all units are.
    pub adapters: Option<usize>,
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
            quantised_grads: None,
            quantised_frozen: None,
            optimizer: OptimizerConfig::default(),
            muon: MuonSettings::new(|_, _, _| Vec::new()),
            groups: GroupSettings::default(),
            kind_of,
            adapters: None,
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
        let muon = (&self.muon, self.muon.lr_scale(self.optimizer.lr));
        let mut groups = self.groups.resolve(layout, self.kind_of, Some(muon))?;
        groups.freeze_from(self.saved_units(layout.units().len()));
        let state = self.state_arrays().map(|of| of.map(|arrays| arrays.wire()));
        let own = state[0][0];
        let is_own = |format: &WireFormat| *format == own;
        let alike = is_own(&state[0][1]) && (!groups.has_matrices() || state[1].iter().all(is_own));
        groups.state = (!alike).then_some(state);
        groups.in_blocks = match self.quantised_frozen {
            Some(format) => in_blocks(format, self.kind_of, &groups, layout),
            None => vec![None; layout.units().len()],
        };
        Ok(groups)
    }

    /// The number of units, of `units`, that are saved: the first ones.
    pub(crate) fn saved_units(&self, units: usize) -> usize {
        self.adapters.map_or(units, |adapters| adapters.min(units))
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

    /// The layout of the adapters in `layout`, if only they are trained.
    ///
    /// # Errors
    /// A size does not fit 64 bits.
    pub fn adapter_layout(&self, layout: &Layout) -> Result<Option<Layout>, ShardError> {
        let Some(adapters) = self.adapters else {
            return Ok(None);
        };
        let units = layout.units().iter().take(adapters).map(|unit| {
            let params = unit.params.iter();
            let params = params.map(|param| ParamSpec::new(&param.name, param.shape.clone()));
            UnitSpec::new(&unit.name, params.collect::<Vec<_>>())
        });
        let units: Vec<_> = units.collect();
        Layout::with_options(&units, layout.world_size(), self.layout_options()).map(Some)
    }

    /// Bytes that a rank sends in a step, by axis: an upper bound at stage 3. Offloaded parameters
    /// are gathered from the replicas before each gather of the group. Only what is trained is
    /// reduced, and gathered after the update.
    ///
    /// # Errors
    /// A sum does not fit 64 bits.
    pub fn axis_traffic(&self, layouts: &GridLayout) -> Result<AxisTraffic, ShardError> {
        let Some(adapters) = self.adapter_layout(layouts.parts())? else {
            return self.traffic_of(layouts);
        };
        let trained = self.traffic_of(&self.mesh.layouts(&adapters)?)?;
        if !self.stage.shards_params() {
            return Ok(trained);
        }
        let mut axes = self.traffic_of(layouts)?;
        for (axis, trained) in [
            (&mut axes.all, trained.all),
            (&mut axes.group, trained.group),
            (&mut axes.replicas, trained.replicas),
        ] {
            let all_gather_bytes = axis.all_gather_bytes;
            *axis = trained;
            axis.all_gather_bytes = all_gather_bytes;
        }
        Ok(axes)
    }

    /// [`Self::axis_traffic`] if all units are trained.
    fn traffic_of(&self, layouts: &GridLayout) -> Result<AxisTraffic, ShardError> {
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
        let param = self.dtype.size_bytes();
        let widths = Widths::new(param as u64, 0, self.grad_accum_steps as u64);
        Widths {
            gathered: self.gather_codec.map_or(widths.gathered, wire_of),
            reduced: self.quantised_grads.map(|grads| grads.wire()),
            optimizer: self.optimizer_state().wire(),
            ..widths
        }
    }

    /// The options of the layout of units.
    pub fn layout_options(&self) -> LayoutOptions {
        self.aligned(LayoutOptions::default().shard_align_elems(SHARD_ALIGN_ELEMS))
    }

    /// `options` with the alignment that state and communication in blocks need.
    pub fn aligned(&self, options: LayoutOptions) -> LayoutOptions {
        let options = self.offload.format.moments.layout_options(options);
        match self.encodes_blocks() || self.quantised_frozen.is_some() {
            false => options,
            true => options.in_blocks(),
        }
    }

    /// Whether anything travels in blocks.
    pub(crate) fn encodes_blocks(&self) -> bool {
        matches!(self.gather_codec, Some(Codec::Blocks(_))) || self.quantised_grads.is_some()
    }

    /// Checks the formats of communication.
    ///
    /// # Errors
    /// A format that the stage, the groups, tensor parallelism or graphs do not allow.
    pub fn check_formats(&self) -> Result<(), TrainError> {
        self.check_frozen()?;
        let is_whole = !self.stage.shards_optimizer();
        let grads = self.quantised_grads;
        let refusal = match () {
            () if self.gather_codec.is_none() && grads.is_none() => return Ok(()),
            () if is_whole && grads.is_some() => {
                "quantised gradients at stage 0, which all-reduces them and keeps whole sums: use stage 1, 2 or 3"
            }
            () if is_whole => {
                "quantised parameters at stage 0, which gathers none: use stage 1, 2 or 3"
            }
            // A block across the end of what is cut would round what all ranks have differently on
            // each.
            () if self.encodes_blocks()
                && self.mesh.tensor_ranks.is_some_and(|ranks| ranks > 1) =>
            {
                "values in blocks with tensor parallelism: blocks are ranges of whole parameters, and tensor parallelism \
                 cuts them; use one of the two"
            }
            () if self.graphs && self.gather_codec.is_some() => {
                "gathers with a codec cannot be recorded into CUDA graphs, because encoded units are in memory that is \
                 allocated and freed during the step: set Settings::graphs to false"
            }
            () if self.graphs => {
                "quantised gradients cannot be recorded into CUDA graphs, because what is encoded is in memory that is \
                 allocated and freed during the step: set Settings::graphs to false"
            }
            () if grads.is_some_and(|grads| grads.feedback.is_some())
                && matches!(self.mesh.sharding, Sharding::Hybrid | Sharding::Replicated)
                && self.mesh.shard_group.is_some() =>
            {
                "error feedback in groups of ranks that sum their gradients first: use hpZ, or no groups, or no error \
                 feedback"
            }
            () => return Ok(()),
        };
        Err(TrainError::Usage(refusal.to_owned()))
    }

    /// Bytes of error feedback on a rank, whose layouts are `layouts`.
    pub fn feedback_bytes(&self, layouts: &GridLayout) -> u64 {
        let has_feedback = self.quantised_grads.is_some_and(|of| of.feedback.is_some());
        let ranks = layouts.grads(0).0.world_size();
        if !has_feedback || ranks == 1 {
            return 0;
        }
        let groups = layouts.grid().groups();
        let group = layouts.grid().group_size();
        let second = if groups > 1 && group > 1 { groups } else { 0 };
        let shards = ranks.saturating_add(second);
        let shard = layouts.grads(0).0.shard_elems();
        shards.saturating_mul(shard).saturating_mul(4)
    }

    /// Bytes that reductions and gathers of encoded values allocate at once, for a bucket of
    /// `bucket_elems` elements and a largest unit of `unit_elems`.
    pub fn encoded_bytes(&self, layouts: &GridLayout, bucket_elems: u64, unit_elems: u64) -> u64 {
        let wire = |format: WireFormat, elems: u64| format.bytes(elems).unwrap_or(u64::MAX);
        let gathered = match self.gather_codec {
            Some(codec) => wire(wire_of(codec), unit_elems),
            None => 0,
        };
        let reduced = match self.quantised_grads {
            Some(grads) if layouts.grads(0).0.world_size() > 1 => {
                let [first, second] = grads.wire();
                let of_first = wire(first, bucket_elems).saturating_mul(2);
                let passed_on = bucket_elems / layouts.grid().group_size();
                let of_second = match layouts.grid().groups() {
                    1 => 0,
                    _ => wire(second, passed_on)
                        .saturating_mul(2)
                        .saturating_add(passed_on.saturating_mul(4)),
                };
                of_first
                    .max(of_second)
                    .saturating_add(passed_on.saturating_mul(4))
            }
            _ => 0,
        };
        gathered.max(reduced)
    }

    /// Checks that frozen units can be in blocks.
    fn check_frozen(&self) -> Result<(), TrainError> {
        let why = match self.quantised_frozen {
            None => return Ok(()),
            Some(_) if self.mesh.tensor_ranks.is_some_and(|ranks| ranks > 1) => {
                "tensor parallelism cuts parameters, and their blocks with them"
            }
            Some(_) if self.offload.params != Home::Device => {
                "offloaded parameters are not in blocks"
            }
            Some(_) if self.graphs => {
                "they are decoded to memory that is allocated and freed during the step, which CUDA graphs cannot record"
            }
            Some(_) => return Ok(()),
        };
        Err(TrainError::Usage(format!(
            "frozen units in blocks: {why}; use one of the two"
        )))
    }

    /// The arrays of the optimizer's state, of parameters that are not small.
    pub fn optimizer_state(&self) -> StateArrays {
        self.optimizer.arrays(self.dtype, self.offload.format)
    }

    /// Whether Muon may update a tensor: by default, or in a group.
    pub fn names_muon(&self) -> bool {
        let mut groups = self.groups.groups.iter();
        self.muon.by_default || groups.any(|group| group.optimizer == Some(GroupRule::Muon))
    }

    /// The kinds of state of a run, in the order of checkpoints, each with arrays that have it.
    pub fn state_kinds(&self, has_matrices: bool) -> Vec<(StateKind, StateArrays)> {
        let [[adam, _], [muon, _]] = self.state_arrays();
        let of_muon = Some(muon).filter(|_| has_matrices);
        let mut kinds: Vec<(StateKind, StateArrays)> = Vec::new();
        for arrays in [adam].into_iter().chain(of_muon) {
            for kind in arrays.kinds() {
                if kinds.iter().all(|(other, _)| *other != kind) {
                    kinds.push((kind, arrays.clone()));
                }
            }
        }
        kinds
    }

    /// The arrays of the state of AdamW's tensors, and of Muon's: of those that are not small, and
    /// of small ones ([`BlockFormat::holds`]).
    pub(crate) fn state_arrays(&self) -> [[StateArrays; 2]; 2] {
        let large = self.offload.format;
        let small = large.moments(large.moments.without_blocks());
        let muon = |format| StateArrays::new(&self.muon.rule, self.dtype, format);
        [
            [large, small].map(|format| self.optimizer.arrays(self.dtype, format)),
            [large, small].map(muon),
        ]
    }
}
