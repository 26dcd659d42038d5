//! Settings of what a model keeps of its forward.

use serde::{Deserialize, Serialize};

use super::row::{Row, Setting};

/// What a run recomputes in backward, in `run.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ActivationRecord {
    pub(crate) activation_checkpointing: bool,
    /// Whether a GPU recomputes GELU's output in backward, which changes low bits in 16-bit types.
    #[serde(default)]
    pub(crate) recompute_gelu: bool,
    /// Whether the ranks of tensor parallelism divide the inputs of blocks.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) partition_activations: bool,
    /// Whether the ranks of tensor parallelism divide the tokens between their products.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) sequence_parallel: bool,
}

/// Whether activations are recomputed in backward.
pub(crate) const ACTIVATION_CHECKPOINTING: Setting<bool, ActivationRecord> = Setting {
    of_flags: |args| args.activation_checkpointing,
    of_file: |file| file.activation_checkpointing.map(|_| true),
    of_run: |run| Some(run.activation_checkpointing),
    ..Setting::new(
        Row::new("activation_checkpointing", "--activation-checkpointing"),
        || false,
    )
};

/// Whether a GPU recomputes GELU's output in backward; by default where its memory is too small
/// otherwise.
pub(crate) const RECOMPUTE_GELU: Setting<Option<bool>, ActivationRecord> = Setting {
    of_flags: |args| args.recompute_gelu.map(Some),
    of_run: |run| Some(Some(run.recompute_gelu)),
    idle: |run| match (run.on_gpus, run.checkpointing) {
        (false, _) => Some("this run uses no GPU"),
        (true, true) => Some("checkpointed blocks are recomputed whole"),
        _ => None,
    },
    ..Setting::new(Row::new("recompute_gelu", "--recompute-gelu"), || None)
};

/// Whether the ranks of tensor parallelism divide the inputs of blocks.
pub(crate) const PARTITION_ACTIVATIONS: Setting<bool, ActivationRecord> = Setting {
    of_flags: |args| args.partition_activations,
    of_file: |file| {
        let block = file.activation_checkpointing;
        block.map(|block| block.partition_activations)
    },
    of_run: |run| Some(run.partition_activations),
    ..Setting::new(
        Row::new("partition_activations", "--partition-activations")
            .key("activation_checkpointing.partition_activations"),
        || false,
    )
};

/// Whether the ranks of tensor parallelism divide the tokens between their products.
pub(crate) const SEQUENCE_PARALLEL: Setting<bool, ActivationRecord> = Setting {
    of_flags: |args| args.sequence_parallel,
    of_run: |run| Some(run.sequence_parallel),
    ..Setting::new(Row::new("sequence_parallel", "--sequence-parallel"), || {
        false
    })
};

/// Flags of GPUs only, which no record has.
pub(crate) const SHARE_GPUS: Setting<bool, ()> = only_on_gpus("--share-gpus");
pub(crate) const NO_MATMUL_TIMING: Setting<bool, ()> = only_on_gpus("--no-matmul-timing");

const fn only_on_gpus(flag: &'static str) -> Setting<bool, ()> {
    Setting {
        idle: |run| (!run.on_gpus).then_some("this run uses no GPU"),
        ..Setting::new(Row::new("", flag), || false)
    }
}

/// `--dropout` sets the keys of the model's configuration, which `run.json` has.
const fn dropout(record: &'static str) -> Row {
    Row::new(record, "--dropout")
}

pub(crate) const ROWS: &[Row] = &[
    dropout("model.config.attention_dropout"),
    dropout("model.config.attn_pdrop"),
    dropout("model.config.embd_pdrop"),
    dropout("model.config.resid_pdrop"),
    ACTIVATION_CHECKPOINTING.row,
    RECOMPUTE_GELU.row,
    PARTITION_ACTIVATIONS.row,
    SEQUENCE_PARALLEL.row,
];
