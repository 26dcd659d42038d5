//! The rows of all settings: their names for the user, in a DeepSpeed configuration and in
//! `run.json`.

use super::offload;
use super::row::Row;

/// The rows in the order in which ranks compare them: a setting that others are derived from comes
/// before them.
const ROWS: &[&[Row]] = &[
    RUN,
    MESH,
    MUON,
    QUANTISE,
    BATCH,
    ACTIVATIONS,
    offload::ROWS,
    DATA,
    REST,
    IDENTITY,
];

const RUN: &[Row] = &[
    Row::new("program", ""),
    Row::new("format", "").not_reported(),
    Row::new("batch.ranks", "--ranks"),
    Row::new("stage", "--stage").key("zero_optimization.stage"),
    Row::new("dtype", "--dtype"),
    Row::new("model", "--model"),
    // How weights are drawn no longer matters to a run that resumes.
    Row::new("model.config.initializer_range", "--model").not_reported(),
    Row::new("layout", "--model or --ranks"),
    Row::new("seed", "--seed"),
    Row::new("steps", "--steps"),
];

const MESH: &[Row] = &[
    Row::new("mesh.shard_group", "--shard-group").key("zero_optimization.mics_shard_size"),
    Row::new("mesh.shard_optimizer", "--shard-optimizer"),
    Row::new("mesh.hpz", "--hpz").key("zero_optimization.zero_hpz_partition_size"),
    Row::new("mesh.ulysses", "--ulysses").key("sequence_parallel_size"),
    Row::new("mesh.tensor_parallel", "--tensor-parallel").key("tensor_parallel.autotp_size"),
    // Ranks agree on the route by themselves, since launchers may report other machines to each.
    Row::new("mesh.two_level", "--collectives").not_compared(),
];

const MUON: &[Row] = &[
    Row::new("muon.optimizer", "--optimizer").key("optimizer.type"),
    Row::new("muon.muon_lr", "--muon-lr").key("optimizer.params.muon_lr"),
    Row::new("muon.muon_momentum", "--muon-momentum").key("optimizer.params.momentum"),
    Row::new("muon.muon_adjust", "--muon-adjust"),
    Row::new("muon.ns_steps", "--ns-steps").key("optimizer.params.ns_steps"),
    Row::new("muon.muon_heads", "--muon-heads"),
];

const QUANTISE: &[Row] = &[
    Row::new("quantise.quantize_params", "--quantize-params")
        .key("zero_optimization.zero_quantized_weights"),
    Row::new("quantise.quantize_grads", "--quantize-grads")
        .key("zero_optimization.zero_quantized_gradients"),
    Row::new("quantise.quantize_frozen", "--quantize-frozen")
        .key("zero_optimization.zero_quantized_nontrainable_weights"),
    Row::new("quantise.error_feedback_beta", "--error-feedback-beta"),
    Row::new("quantise.error_feedback_reset", "--error-feedback-reset"),
    Row::new("quantise.error_feedback", "--error-feedback")
        .key("zero_optimization.zeropp_loco_param"),
];

const BATCH: &[Row] = &[
    Row::new("batch.micro_batch", "--micro-batch").key("train_micro_batch_size_per_gpu"),
    Row::new("batch.grad_accum", "--grad-accum").key("gradient_accumulation_steps"),
    Row::new("batch.seq_len", "--seq-len"),
    Row::new("batch", ""),
];

const ACTIVATIONS: &[Row] = &[
    // Keys of the model's configuration.
    Row::new("model.config.attention_dropout", "--dropout"),
    Row::new("model.config.attn_pdrop", "--dropout"),
    Row::new("model.config.embd_pdrop", "--dropout"),
    Row::new("model.config.resid_pdrop", "--dropout"),
    Row::new("activation_checkpointing", "--activation-checkpointing"),
    Row::new("recompute_gelu", "--recompute-gelu"),
    Row::new("partition_activations", "--partition-activations")
        .key("activation_checkpointing.partition_activations"),
    Row::new("sequence_parallel", "--sequence-parallel"),
];

const DATA: &[Row] = &[
    // Before the data, which the split changes.
    Row::new("validation.split", "--val-split"),
    Row::new("data.epochs", "--epochs"),
    Row::new("data.rows.packed", "--pack"),
    Row::new("data.rows.folder", "")
        .not_compared()
        .not_reported(),
    Row::new("data.rows.now", "").not_compared().not_reported(),
    Row::new("data.rows", "--data"),
    Row::new("data.place", "--resume").not_reported(),
    Row::new("data.order", "--data"),
    Row::new("data.tokenizer", "--tokenizer"),
    Row::new("data.tokens", "--data"),
    Row::new("data", "--data"),
    Row::new("data.fingerprint", "--data").not_reported(),
    Row::new("validation.fingerprint", "--val-data"),
    Row::new("validation.eval_every", "--eval-every"),
    Row::new("validation.eval_tokens", "--eval-tokens"),
    Row::new("validation", "--val-data"),
];

const REST: &[Row] = &[
    Row::new("param_groups", "param_groups of --config, or --no-decay-1d"),
    Row::new("optimizer.lr", "--lr").key("optimizer.params.lr"),
    Row::new("optimizer.hyper.beta1", "--betas").key("optimizer.params.betas"),
    Row::new("optimizer.hyper.beta2", "--betas"),
    Row::new("optimizer.hyper.eps", "--eps").key("optimizer.params.eps"),
    Row::new("optimizer.hyper.weight_decay", "--weight-decay").key("optimizer.params.weight_decay"),
    Row::new(
        "optimizer.schedule",
        "--schedule, --warmup-steps, --min-lr or --decay-steps",
    ),
    Row::new("optimizer.max_grad_norm", "--clip").key("gradient_clipping"),
    Row::new("optimizer.loss_scaling", "fp16 of --config"),
    Row::new("optimizer", "optimizer of --config"),
    // Ranks compare what the setting does; see `agreement`.
    Row::new("communication.sums_locally", "--reduce-every-micro-batch"),
    Row::new("communication.bucket_elems", "--bucket-elems")
        .key("zero_optimization.reduce_bucket_size"),
    Row::new("communication.overlap", "--no-overlap"),
    Row::new("communication.cuda_graph", "--cuda-graph"),
    Row::new("communication", "zero_optimization of --config"),
    Row::new("checkpoint", "--checkpoint or --no-checkpoint"),
    Row::new("checkpoint_every", "--checkpoint-every"),
    Row::new("keep_last", "--keep-last"),
    Row::new("check_replicas", "--check-replicas"),
    Row::new("samples", "--sample-every"),
];

/// The identity of a run, and settings of one machine.
const IDENTITY: &[Row] = &[
    Row::new("run", "").not_compared().not_reported(),
    Row::new("resumed_runs", "").not_compared().not_reported(),
    Row::new("model.name", "").not_compared().not_reported(),
    Row::new("model.weights", "").not_compared().not_reported(),
    Row::new("data.path", "").not_compared(),
    Row::new("data.default", "").not_compared().not_reported(),
    Row::new("validation.data", "").not_compared(),
    Row::new("device", "").not_compared(),
    Row::new("gpu", "").not_compared(),
    Row::new("checkpoint_dir", "").not_compared().not_reported(),
    Row::new("metrics", "").not_compared().not_reported(),
    Row::new("csv", "").not_compared().not_reported(),
    Row::new("tensorboard", "").not_compared().not_reported(),
    Row::new("report", "").not_compared().not_reported(),
    Row::new("auto", "").not_compared().not_reported(),
];

/// All rows.
pub(crate) fn rows() -> impl Iterator<Item = &'static Row> {
    ROWS.iter().copied().flatten()
}

/// The row of exactly this name in `run.json`.
pub(crate) fn named(record: &str) -> Option<&'static Row> {
    rows().find(|row| row.record == record)
}

/// The place in the order, and the row of the longest name that covers `name`.
pub(crate) fn covering(name: &str) -> Option<(usize, &'static Row)> {
    let mut longest: Option<(usize, &Row)> = None;
    for (place, row) in rows().enumerate() {
        let rest = name.strip_prefix(row.record);
        let covers = rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        let is_longer = longest.is_none_or(|(_, other)| row.record.len() > other.record.len());
        if covers && is_longer {
            longest = Some((place, row));
        }
    }
    longest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_distinct() {
        let mut names: Vec<&str> = rows().map(|row| row.record).collect();
        names.sort_unstable();
        assert!(names.is_sorted_by(|one, next| one < next), "{names:?}");
    }
}
