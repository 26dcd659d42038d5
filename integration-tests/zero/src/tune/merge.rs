//! A DeepSpeed configuration with what a choice decides.

use serde_json::{Map, Value, json};

use super::Choice;

/// Keys of `zero_optimization` that a choice decides.
const DECIDED: [&str; 10] = [
    "stage",
    "overlap_comm",
    "reduce_bucket_size",
    "mics_shard_size",
    "zero_hpz_partition_size",
    "offload_optimizer",
    "offload_param",
    "cpu_offload",
    "cpu_offload_param",
    "cpu_offload_params",
];

/// Blocks that decide the type of parameters.
const TYPES: [&str; 3] = ["fp16", "bf16", "bfloat16"];

/// The user's configuration, without `autotuning`, and with the stage, the sizes of the batch, the
/// offload and the type of the choice.
pub(super) fn merged(user: &Value, choice: &Choice) -> Value {
    let mut config = user.as_object().cloned().unwrap_or_default();
    let of_choice = choice.deepspeed.as_object().cloned().unwrap_or_default();
    let zero = merged_zero(&config, &of_choice);
    let has_type = TYPES.iter().any(|key| config.contains_key(*key));
    let checkpointing = config.remove("activation_checkpointing");
    config.remove("autotuning");
    config.remove("tensor_parallel");

    for (key, value) in of_choice {
        match key.as_str() {
            "zero_optimization" => {}
            "activation_checkpointing" => {
                config.insert(key, checkpointing.clone().unwrap_or(value));
            }
            other if TYPES.contains(&other) && has_type => {}
            _ => {
                config.insert(key, value);
            }
        }
    }
    config.insert("zero_optimization".to_owned(), Value::Object(zero));
    let tensor_ranks = choice.candidate.tensor_parallel;
    if tensor_ranks > 1 {
        let block = json!({"autotp_size": tensor_ranks});
        config.insert("tensor_parallel".to_owned(), block);
    }
    Value::Object(config)
}

fn merged_zero(user: &Map<String, Value>, choice: &Map<String, Value>) -> Map<String, Value> {
    let block = |keys: &Map<String, Value>| {
        let block = keys.get("zero_optimization").and_then(Value::as_object);
        block.cloned().unwrap_or_default()
    };
    let mut zero = block(user);
    zero.retain(|key, _| !DECIDED.contains(&key.as_str()));
    zero.extend(block(choice));
    zero
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::args::Collectives;
    use crate::tune::UnitSizes;
    use crate::tune::candidate::{Candidate, Groups, Offload};
    use zero_config::DsConfig;

    fn choice(candidate: Candidate) -> Choice {
        Choice {
            stage: candidate.stage,
            step_ms: 1.0,
            step_ms_range: [1.0; 2],
            tokens_per_s: 1.0,
            mfu: 0.5,
            exposed_ms: 0.0,
            bound: "",
            gpu_bytes: 0,
            host_bytes: 0,
            flags: Vec::new(),
            deepspeed: candidate.deepspeed("bf16", 1, 1000, UnitSizes::default()),
            candidate,
        }
    }

    const CANDIDATE: Candidate = Candidate {
        stage: 2,
        groups: Groups::All,
        tensor_parallel: 1,
        micro_batch: 2,
        grad_accum: 3,
        checkpointing: false,
        offload: Offload::None,
        collectives: Collectives::Auto,
        bucket_elems: Some(250),
        prefetch_elems: None,
    };

    #[test]
    fn choices_replace_what_they_decide() {
        let user = json!({
            "train_batch_size": 12,
            "autotuning": {"enabled": true},
            "activation_checkpointing": {"cpu_checkpointing": true},
            "fp16": {"enabled": "auto", "initial_scale_power": 12},
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "sub_group_size": 7},
        });
        let of = |candidate| merged(&user, &choice(candidate));
        let plain = of(CANDIDATE);
        let expected = json!({
            "train_batch_size": 12,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 3,
            "fp16": {"enabled": "auto", "initial_scale_power": 12},
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 2, "overlap_comm": true, "reduce_bucket_size": 250, "sub_group_size": 7},
        });
        assert_eq!(plain, expected);

        let more = of(Candidate {
            tensor_parallel: 2,
            checkpointing: true,
            offload: Offload::Optimizer,
            ..CANDIDATE
        });
        assert_eq!(more["tensor_parallel"]["autotp_size"], 2);
        assert_eq!(more["activation_checkpointing"]["cpu_checkpointing"], true);
        assert_eq!(
            more["zero_optimization"]["offload_optimizer"]["device"],
            "cpu"
        );
        let read = DsConfig::parse(&more.to_string()).unwrap();
        assert_eq!(read.tensor_ranks, Some(2));

        let empty = merged(&json!({"zero_optimization": true}), &choice(CANDIDATE));
        assert_eq!(empty["bf16"]["enabled"], true);
        assert_eq!(empty["zero_optimization"]["stage"], 2);
    }
}
