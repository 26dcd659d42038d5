//! Keys of a DeepSpeed configuration that `zero plan` may reckon with, and that `zero train` has no use for.

use crate::config::{DsConfig, ZeroOptimization};

/// A line for each that asks for something else than what is done.
pub(super) fn notices(file: &DsConfig) -> Vec<String> {
    let (zero, usual) = (&file.zero, ZeroOptimization::default());
    let checkpointing = file.activation_checkpointing.unwrap_or_default();
    let keys = [
        (
            checkpointing.partition_activations,
            "activation_checkpointing.partition_activations",
            "each rank keeps the inputs of its own blocks",
        ),
        (
            checkpointing.cpu_checkpointing,
            "activation_checkpointing.cpu_checkpointing",
            "what is kept stays on the device",
        ),
        (
            zero.allgather_bucket_elems != usual.allgather_bucket_elems,
            "zero_optimization.allgather_bucket_size",
            "parameters are gathered by unit (embedding, block, head)",
        ),
        (
            zero.sub_group_elems != usual.sub_group_elems,
            "zero_optimization.sub_group_size",
            "a shard is updated in one go",
        ),
        (
            zero.max_reuse_elems != usual.max_reuse_elems,
            "zero_optimization.max_reuse_distance",
            "a unit is kept only where its next use follows at once",
        ),
        (
            zero.gather_16bit_weights_on_save,
            "zero_optimization.gather_16bit_weights_on_model_save",
            "`zero ckpt export` makes whole weights of a checkpoint",
        ),
        (file.steps_per_print.is_some(), "steps_per_print", "every step is in the progress bar and in --metrics"),
        (file.wall_clock_breakdown, "wall_clock_breakdown", "times are in --metrics and --report"),
    ];
    let asked = keys.into_iter().filter(|(is_asked, ..)| *is_asked);
    asked.map(|(_, key, why)| format!("{key} is not honoured: {why}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_and_not_done_is_named() {
        let asked = r#"{
            "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": true},
            "zero_optimization": {"stage": 3, "allgather_bucket_size": 2e8, "sub_group_size": 1e6,
                "stage3_max_reuse_distance": 1e6, "stage3_gather_16bit_weights_on_model_save": true},
            "steps_per_print": 10, "wall_clock_breakdown": true}"#;
        let said = notices(&DsConfig::parse(asked).unwrap()).join("\n");
        for key in [
            "partition_activations",
            "cpu_checkpointing",
            "allgather_bucket_size",
            "sub_group_size",
            "max_reuse_distance",
            "gather_16bit_weights_on_model_save",
            "steps_per_print",
            "wall_clock_breakdown",
        ] {
            assert!(said.contains(key), "{key} is not in: {said}");
        }
        let usual = r#"{"activation_checkpointing": {"partition_activations": false},
            "zero_optimization": {"stage": 3, "allgather_bucket_size": 5e8, "sub_group_size": "auto"}}"#;
        assert_eq!(notices(&DsConfig::parse(usual).unwrap()), Vec::<String>::new());
    }
}
