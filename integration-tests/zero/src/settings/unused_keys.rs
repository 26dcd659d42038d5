//! Keys of a DeepSpeed configuration that `zero train` does not use, although `zero plan` may.

use zero_shard::ZeroStage;

use zero_config::{DsConfig, ZeroOptimization};
use zero_trainer::Home;

/// One line for each key whose value differs from what `zero train` does, whose ranks cut the
/// parameters or do not.
pub(crate) fn notices(file: &DsConfig, stage: ZeroStage, cuts: bool) -> Vec<String> {
    let (zero, default) = (&file.zero, ZeroOptimization::default());
    let checkpointing = file.activation_checkpointing.unwrap_or_default();
    let keys = [
        (
            checkpointing.partition_activations && !cuts,
            "activation_checkpointing.partition_activations",
            "each rank keeps the inputs of its blocks without --tensor-parallel",
        ),
        (
            zero.allgather_bucket_elems != default.allgather_bucket_elems,
            "zero_optimization.allgather_bucket_size",
            "parameters are gathered by unit (embedding, block, head)",
        ),
        (
            zero.offload_param != Home::Device && !stage.shards_params(),
            "zero_optimization.offload_param",
            "it needs stage 3",
        ),
        (
            zero.max_reuse_elems != default.max_reuse_elems,
            "zero_optimization.max_reuse_distance",
            "a unit is kept only if its next use follows immediately",
        ),
        (
            zero.gather_16bit_weights_on_save,
            "zero_optimization.gather_16bit_weights_on_model_save",
            "`zero ckpt export` writes whole weights from a checkpoint",
        ),
        (
            file.steps_per_print.is_some(),
            "steps_per_print",
            "every step is in the progress bar and in --metrics",
        ),
    ];

    let set = keys.into_iter().filter(|(is_set, ..)| *is_set);
    set.map(|(_, key, reason)| format!("{key} is ignored: {reason}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unused_keys_are_listed() {
        let text = r#"{
            "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": true},
            "zero_optimization": {"stage": 3, "allgather_bucket_size": 2e8, "sub_group_size": 1e6,
                "stage3_max_reuse_distance": 1e6, "stage3_gather_16bit_weights_on_model_save": true},
            "steps_per_print": 10, "wall_clock_breakdown": true}"#;
        let lines = notices(&DsConfig::parse(text).unwrap(), ZeroStage::Three, false);

        let expected = [
            "activation_checkpointing.partition_activations",
            "zero_optimization.allgather_bucket_size",
            "zero_optimization.max_reuse_distance",
            "zero_optimization.gather_16bit_weights_on_model_save",
            "steps_per_print",
        ];

        assert_eq!(
            lines
                .iter()
                .map(|l| l.split(" is ignored: ").next().unwrap())
                .collect::<Vec<_>>(),
            expected
        );

        let defaults = r#"{"activation_checkpointing": {"partition_activations": false},
            "zero_optimization": {"stage": 3, "allgather_bucket_size": 5e8, "sub_group_size": "auto"}}"#;
        assert_eq!(
            notices(&DsConfig::parse(defaults).unwrap(), ZeroStage::Three, false),
            Vec::<String>::new()
        );
        // The stage of the run counts, not that of the file.
        let offload = r#"{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}"#;
        let offload = DsConfig::parse(offload).unwrap();
        assert_eq!(
            notices(&offload, ZeroStage::Three, false),
            Vec::<String>::new()
        );
        let expected = "zero_optimization.offload_param is ignored: it needs stage 3";
        assert_eq!(notices(&offload, ZeroStage::Two, false), [expected]);
    }
}
