//! A configuration: what `zero tune` varies.

use serde_json::{Value, json};
use zero_trainer::Home;

use crate::plan::PlanArgs;
use crate::settings::args::{Collectives, MeshArgs, OffloadArgs, OptimizerRanks};

/// The name that [`Candidate::flags`] have for the DeepSpeed configuration.
pub(crate) const CONFIG_FILE: &str = "deepspeed.json";

/// How the ranks of a run share its states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Groups {
    /// Over all ranks.
    All,
    /// Over the ranks of a node, the nodes alike.
    Node,
    /// Over the ranks of a node, and the optimizer state over all.
    NodeAndWorld,
    /// Parameters over the ranks of a node, all else over all.
    Hpz,
}

/// Where states are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Offload {
    /// On the GPU.
    None,
    /// The optimizer state in host memory.
    Optimizer,
    /// And the parameters, at stage 3.
    Params,
}

/// A configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) stage: u8,
    pub(crate) groups: Groups,
    pub(crate) tensor_parallel: usize,
    pub(crate) micro_batch: u64,
    pub(crate) grad_accum: u64,
    pub(crate) checkpointing: bool,
    pub(crate) offload: Offload,
    /// The route of collectives over all ranks; [`Collectives::Auto`] where there is only one.
    pub(crate) collectives: Collectives,
    /// Elements of a gradient bucket; `None`: the largest unit.
    pub(crate) bucket_elems: Option<u64>,
    /// Elements that stage 3 gathers ahead of their use; `None`: one unit.
    pub(crate) prefetch_elems: Option<u64>,
}

/// Sizes of a model, in elements of a rank's part of it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct UnitSizes {
    pub(crate) largest: u64,
    /// The unit of the median size.
    pub(crate) block: u64,
    pub(crate) all: u64,
}

impl Candidate {
    /// The plan of this configuration, for which flags have no prefetch. `group`: data ranks of a
    /// node.
    pub(crate) fn plan(&self, base: &PlanArgs, group: usize) -> PlanArgs {
        let with = |is: bool| is.then_some(group);
        let mesh = MeshArgs {
            shard_group: with(matches!(self.groups, Groups::Node | Groups::NodeAndWorld)),
            shard_optimizer: (self.groups == Groups::NodeAndWorld).then_some(OptimizerRanks::World),
            hpz: with(self.groups == Groups::Hpz),
            tensor_parallel: (self.tensor_parallel > 1).then_some(self.tensor_parallel),
            collectives: Some(self.collectives),
            ..MeshArgs::default()
        };
        let host = |is: bool| is.then_some(Home::Host);
        PlanArgs {
            micro_batch: Some(self.micro_batch),
            grad_accum: Some(self.grad_accum),
            activation_checkpointing: self.checkpointing,
            mesh,
            offload: OffloadArgs {
                offload: host(self.offload != Offload::None),
                offload_params: host(self.offload == Offload::Params),
                ..OffloadArgs::default()
            },
            bucket_elems: self.bucket_elems.or(base.bucket_elems),
            ..base.clone()
        }
    }

    /// The same configuration with the default communication: variants of one choice.
    pub(crate) fn without_communication(&self) -> Self {
        Self {
            collectives: Collectives::Auto,
            bucket_elems: None,
            prefetch_elems: None,
            ..*self
        }
    }

    /// The flags of `zero train`. It has none for prefetch, so they name the file of
    /// [`Self::deepspeed`].
    pub(crate) fn flags(&self, group: usize) -> Vec<String> {
        let mut flags = vec![
            format!("--stage {}", self.stage),
            format!("--micro-batch {}", self.micro_batch),
            format!("--grad-accum {}", self.grad_accum),
        ];
        let mut add = |is: bool, flag: String| {
            if is {
                flags.push(flag);
            }
        };
        let tensor = self.tensor_parallel;
        add(tensor > 1, format!("--tensor-parallel {tensor}"));
        let grouped = matches!(self.groups, Groups::Node | Groups::NodeAndWorld);
        add(grouped, format!("--shard-group {group}"));
        add(
            self.groups == Groups::NodeAndWorld,
            "--shard-optimizer world".to_owned(),
        );
        add(self.groups == Groups::Hpz, format!("--hpz {group}"));
        add(self.checkpointing, "--activation-checkpointing".to_owned());
        add(self.offload != Offload::None, "--offload cpu".to_owned());
        add(
            self.offload == Offload::Params,
            "--offload-params cpu".to_owned(),
        );
        match self.collectives {
            Collectives::Auto => {}
            Collectives::Flat => flags.push("--collectives flat".to_owned()),
            Collectives::TwoLevel => flags.push("--collectives two-level".to_owned()),
        }
        if let Some(elems) = self.bucket_elems {
            flags.push(format!("--bucket-elems {elems}"));
        }
        if self.prefetch_elems.is_some() {
            flags.push(format!("--config {CONFIG_FILE}"));
        }
        flags
    }

    /// The same in DeepSpeed's words; tensor parallelism is Megatron's there. `bucket_elems`: the
    /// bucket, if the candidate sets none.
    pub(crate) fn deepspeed(
        &self,
        dtype: &str,
        group: usize,
        bucket_elems: u64,
        units: UnitSizes,
    ) -> Value {
        let mut zero = json!({
            "stage": self.stage,
            "overlap_comm": true,
            "reduce_bucket_size": self.bucket_elems.unwrap_or(bucket_elems),
        });
        if self.stage == 3 {
            let ahead = self.prefetch_elems.unwrap_or(units.block);
            zero["stage3_prefetch_bucket_size"] = ahead.into();
        }
        if self.prefetch_elems.is_some() {
            // The simulated step has no limits besides, where DeepSpeed's defaults are some. Padding
            // is less than the units.
            zero["stage3_max_live_parameters"] = units.all.saturating_mul(2).into();
            zero["stage3_param_persistence_threshold"] = 0.into();
        }
        match self.groups {
            Groups::All => {}
            Groups::Node | Groups::NodeAndWorld => zero["mics_shard_size"] = group.into(),
            Groups::Hpz => zero["zero_hpz_partition_size"] = group.into(),
        }
        if self.offload != Offload::None {
            zero["offload_optimizer"] = json!({"device": "cpu", "pin_memory": true});
        }
        if self.offload == Offload::Params {
            zero["offload_param"] = json!({"device": "cpu", "pin_memory": true});
        }
        let mut config = json!({
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.grad_accum,
            "zero_optimization": zero,
        });
        match dtype {
            "bf16" => config["bf16"] = json!({"enabled": true}),
            "fp16" => config["fp16"] = json!({"enabled": true}),
            _ => {}
        }
        if self.checkpointing {
            config["activation_checkpointing"] = json!({});
        }
        config
    }
}
