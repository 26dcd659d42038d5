//! Every rule of the configuration file, in tables of configurations and outcomes.

use integration_tests::Printed;
use serde_json::{Value, json};
use zero_alloc::device::DType;
use zero_kernels::AdamHyper;
use zero_optim::{DynamicScaling, LossScaling, LrSchedule, Warmup, WarmupDecay, WarmupType};

use super::deepspeed::{ActivationCheckpointing, Aio};
use super::optimizer::{DsMuon, DsOptimizer};
use super::{BatchKeys, ConfigFileError, DsConfig, ZeroOptimization};
use zero_shard::Home;

/// Parses a configuration that must be valid and without warnings.
fn quiet(text: &str) -> DsConfig {
    let config = DsConfig::parse(text).unwrap_or_else(|e| panic!("{text}: {e}"));
    assert!(config.warnings.is_empty(), "{text}: {:?}", config.warnings);
    config
}

fn zero(block: &str) -> ZeroOptimization {
    quiet(&format!(r#"{{"zero_optimization": {block}}}"#)).zero
}

/// The lines `configuration => outcome` of a table. `zero {..}` abbreviates
/// `{"zero_optimization": {..}}`.
fn cases(table: &str) -> impl Iterator<Item = (String, &str)> {
    table
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .map(|line| {
            let (text, outcome) = line.split_once(" => ").unwrap();
            match text.strip_prefix("zero ") {
                Some(block) => (format!(r#"{{"zero_optimization": {block}}}"#), outcome),
                None => (text.to_owned(), outcome),
            }
        })
}

/// Asserts that each configuration of a table fails with its outcome.
fn assert_errors(table: &str) {
    for (text, expected) in cases(table) {
        let error = DsConfig::parse(&text).expect_err(&text).to_string();
        assert_eq!(error, expected, "{text}");
    }
}

#[test]
fn empty_file_has_deepspeeds_defaults() {
    assert_eq!(quiet("{}"), DsConfig::default());
}

#[test]
fn hugging_face_example_has_no_warnings() {
    let config = quiet(
        r#"{
        "fp16": {
            "enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
            "hysteresis": 2, "min_loss_scale": 1
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": true},
            "offload_param": {"device": "cpu", "pin_memory": true},
            "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9,
            "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": true
        },
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
    }"#,
    );

    let expected = ZeroOptimization {
        stage: 3,
        sub_group_elems: Some(1_000_000_000),
        offload_optimizer: Home::Host,
        offload_param: Home::Host,
        gather_16bit_weights_on_save: true,
        overlap_comm: Some(true),
        ..ZeroOptimization::default()
    };

    assert_eq!(config.zero, expected);
    assert_eq!(config.batch, BatchKeys::default());
    assert_eq!(
        (config.dtype, config.gradient_clipping),
        (None, None),
        "auto is left to the run"
    );
    assert_eq!(config.autos.len(), 15);

    for key in [
        "fp16.enabled",
        "optimizer.params.betas",
        "zero_optimization.prefetch_bucket_size",
    ] {
        assert!(config.is_auto(key), "{key}");
    }

    assert_eq!(config.optimizer.unwrap().lr, 1e-3);
    assert_eq!(config.schedule, Some(LrSchedule::Warmup(Warmup::default())));
    assert_eq!(config.steps_per_print, Some(2000));
}

#[test]
fn file_with_all_keys_is_read() {
    let config = quiet(
        r#"{
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
        "bf16": {"enabled": true, "check_grad_overflow": true},
        "gradient_clipping": 0.5,
        "optimizer": {"type": "Adam", "params": {
            "lr": 3e-4, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1, "adam_w_mode": false,
            "torch_adam": false, "bias_correction": true, "amsgrad": false}},
        "scheduler": {"type": "WarmupDecayLR", "params": {
            "total_num_steps": 1e4, "warmup_min_lr": [1e-6], "warmup_max_lr": 3e-4, "warmup_num_steps": 100,
            "warmup_type": "linear", "last_batch_iteration": -1}},
        "zero_optimization": {
            "stage": 2, "reduce_bucket_size": 1e6, "allgather_bucket_size": 2e6, "overlap_comm": true,
            "sub_group_size": 3e6, "prefetch_bucket_size": 4e6, "param_persistence_threshold": 5e3,
            "max_live_parameters": 6e6, "max_reuse_distance": 7e6,
            "contiguous_gradients": true, "reduce_scatter": true, "allgather_partitions": true,
            "round_robin_gradients": false,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/local", "buffer_count": 6,
                "pin_memory": true, "ratio": 1, "pipeline_read": true, "pipeline_write": true, "fast_init": false}
        },
        "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": true, "profile": false},
        "aio": {"block_size": 4096, "queue_depth": 16, "intra_op_parallelism": 1, "thread_count": 1,
            "single_submit": false, "overlap_events": true, "use_gds": false},
        "communication_data_type": "bf16",
        "data_types": {"grad_accum_dtype": "fp32", "param_dtype": "bf16"},
        "gradient_allreduce_op": "mean", "prescale_gradients": false, "gradient_predivide_factor": 1.0,
        "steps_per_print": 5, "wall_clock_breakdown": true, "memory_breakdown": false, "dump_state": false,
        "sequence_parallel_size": 1,
        "flops_profiler": {"enabled": false, "profile_step": 5}, "tensorboard": {"enabled": false},
        "wandb": {}, "comms_logger": null, "amp": {"enabled": false, "opt_level": "O1"},
        "data_efficiency": {"enabled": false, "seed": 1}, "tensor_parallel": {"autotp_size": 1},
        "compression_training": {"weight_quantization": {
            "shared_parameters": {"enabled": false}, "different_groups": {"wq1": {"params": {"start_bits": 8}}}}}
    }"#,
    );

    let hyper = AdamHyper {
        beta1: 0.8,
        beta2: 0.95,
        eps: 1e-6,
        weight_decay: 0.1,
        decoupled: false,
        bias_correction: true,
    };

    let schedule = WarmupDecay {
        total_num_steps: 10_000,
        warmup_min_lr: 1e-6,
        warmup_max_lr: 3e-4,
        warmup_num_steps: 100,
        warmup_type: WarmupType::Linear,
    };

    let expected = DsConfig {
        batch: BatchKeys {
            train_batch_size: Some(64),
            micro_batch: Some(4),
            grad_accum: Some(2),
        },
        sequence_ranks: Some(1),
        tensor_ranks: Some(1),
        zero: ZeroOptimization {
            stage: 2,
            reduce_bucket_elems: 1_000_000,
            allgather_bucket_elems: 2_000_000,
            overlap_comm: Some(true),
            sub_group_elems: Some(3_000_000),
            prefetch_bucket_elems: 4_000_000,
            persistence_threshold_elems: 5_000,
            max_live_elems: 6_000_000,
            max_reuse_elems: 7_000_000,
            offload_optimizer: Home::Nvme("/local".into()),
            offload_optimizer_buffers: Some(6),
            ..ZeroOptimization::default()
        },
        has_stage: true,
        dtype: Some(DType::Bf16),
        requested_types: vec![
            ("communication_data_type".to_owned(), DType::Bf16),
            ("data_types.param_dtype".to_owned(), DType::Bf16),
        ],
        gradient_clipping: Some(0.5),
        optimizer: Some(DsOptimizer {
            lr: 3e-4,
            hyper,
            moments: None,
            muon: None,
        }),
        schedule: Some(LrSchedule::WarmupDecay(schedule)),
        activation_checkpointing: Some(ActivationCheckpointing {
            partition_activations: true,
            cpu_checkpointing: true,
        }),
        aio: Aio {
            queue_depth: Some(16),
            block_bytes: Some(4096),
        },
        steps_per_print: Some(5),
        wall_clock_breakdown: true,
        ..DsConfig::default()
    };

    assert_eq!(config, expected);
}

#[test]
fn old_forms_of_zero_optimization_are_read() {
    let default = ZeroOptimization::default;
    assert_eq!(
        zero("true"),
        ZeroOptimization {
            stage: 1,
            ..default()
        }
    );

    assert_eq!(zero("false"), default());
    assert_eq!(zero(r#""auto""#), default());
    assert_eq!(
        zero(r#"{"cpu_offload": true}"#).offload_optimizer,
        Home::Host
    );
    let old = zero(r#"{"stage": 3, "cpu_offload_param": true, "cpu_offload": false}"#);
    assert_eq!(
        (old.offload_optimizer, old.offload_param),
        (Home::Device, Home::Host)
    );
    assert!(
        zero(r#"{"stage": 3, "stage3_gather_fp16_weights_on_model_save": true}"#)
            .gather_16bit_weights_on_save
    );
}

#[test]
fn overlap_is_the_default_at_stage_3() {
    let table = r#"
        zero {"stage": 2} => false
        zero {"stage": 3} => true
        zero {"stage": 3, "overlap_comm": "auto"} => true
        zero {"stage": 3, "overlap_comm": false} => false
        zero {"stage": 1, "overlap_comm": true} => true
    "#;
    for (text, expected) in cases(table) {
        let zero = quiet(&text).zero;
        assert_eq!(zero.overlaps_at(zero.stage).to_string(), expected, "{text}");
    }
    // The stage of the run counts, not that of the file.
    let zero = zero(r#"{"stage": 2}"#);
    assert!(zero.overlaps_at(3) && !zero.overlaps_at(2));
}

#[test]
fn stage_3_keys_have_two_names() {
    for name in [
        "prefetch_bucket_size",
        "param_persistence_threshold",
        "max_live_parameters",
        "max_reuse_distance",
    ] {
        let config = |name: &str| zero(&format!(r#"{{"stage": 3, "{name}": 7}}"#));
        assert_eq!(config(name), config(&format!("stage3_{name}")));
        assert_ne!(config(name), zero(r#"{"stage": 3}"#));
        assert_errors(&format!(
            "zero {{\"{name}\": 1, \"stage3_{name}\": 1}} => \
             zero_optimization.stage3_{name} and zero_optimization.{name} conflict; remove one of them"
        ));
    }
}

#[test]
fn precision_is_fp32_unless_enabled() {
    let table = r#"
        {} => none none
        {"fp16": {}} => fp32 dynamic
        {"fp16": {"enabled": false, "loss_scale": 8}} => fp32 8
        {"fp16": {"enabled": "auto", "loss_scale": 8}} => none 8
        {"fp16": {"enabled": true}} => fp16 dynamic
        {"fp16": {"enabled": true, "loss_scale": 0}} => fp16 dynamic
        {"fp16": {"enabled": true, "loss_scale": 128}} => fp16 128
        {"fp16": {"enabled": true, "loss_scale": 0.5}} => fp16 0.5
        {"bf16": {"enabled": true}} => bf16 none
        {"bfloat16": {"enabled": true}} => bf16 none
        {"bf16": {"enabled": false}} => fp32 none
        {"bf16": {"enabled": "auto"}} => none none
        {"bf16": "auto"} => none none
        {"bf16": {"enabled": true}, "fp16": {"enabled": false}} => bf16 dynamic
        {"bf16": {"enabled": "auto"}, "fp16": {"enabled": false}} => none dynamic
        {"bf16": {"enabled": false}, "fp16": {"enabled": false}} => fp32 dynamic
    "#;
    for (text, expected) in cases(table) {
        let config = quiet(&text);
        let is_auto = config.is_auto("bf16.enabled") || config.is_auto("fp16.enabled");
        assert_eq!(is_auto, text.contains("auto"), "{text}");
        let dtype = config.dtype.map_or("none", DType::name);
        let scaling = match config.loss_scaling {
            None => "none".to_owned(),
            Some(LossScaling::Static { scale }) => scale.to_string(),
            Some(dynamic) => {
                assert_eq!(dynamic, LossScaling::Dynamic(DynamicScaling::default()));
                "dynamic".to_owned()
            }
        };
        assert_eq!(format!("{dtype} {scaling}"), expected, "{text}");
    }

    let config = quiet(
        r#"{"fp16": {"enabled": true, "initial_scale_power": 12, "loss_scale_window": 50, "hysteresis": 4,
            "consecutive_hysteresis": true, "min_loss_scale": 2}}"#,
    );
    let expected = DynamicScaling::default()
        .initial_scale_power(12)
        .window(50)
        .hysteresis(4)
        .consecutive_hysteresis(true)
        .min_scale(2.0);
    assert_eq!(config.loss_scaling, Some(LossScaling::Dynamic(expected)));

    // DeepSpeed's scale never halves then.
    let config = DsConfig::parse(r#"{"fp16": {"enabled": true, "hysteresis": 0}}"#).unwrap();
    assert_eq!(
        config.warnings,
        ["fp16.hysteresis 0: as in DeepSpeed, the loss scale never halves"]
    );
    let expected = DynamicScaling::default().hysteresis(0);
    assert_eq!(config.loss_scaling, Some(LossScaling::Dynamic(expected)));
}

#[test]
fn adam_decouples_decay_by_default() {
    let table = r#"
        {"optimizer": {"type": "Adam"}} => true
        {"optimizer": {"type": "adam", "params": {"adam_w_mode": true}}} => true
        {"optimizer": {"type": "Adam", "params": {"adam_w_mode": false}}} => false
        {"optimizer": {"type": "AdamW"}} => true
        {"optimizer": {"type": "AdamW", "params": {"adam_w_mode": false}}} => true
        {"optimizer": {"type": "AdamW", "params": {"bias_correction": false}}} => true
    "#;
    for (text, decoupled) in cases(table) {
        let decoupled = decoupled == "true";
        let bias_correction = !text.contains("bias_correction");
        let hyper = AdamHyper {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            decoupled,
            bias_correction,
        };
        assert_eq!(
            quiet(&text).optimizer,
            Some(DsOptimizer {
                lr: 1e-3,
                hyper,
                moments: None,
                muon: None,
            }),
            "{text}"
        );
    }
}

#[test]
fn muon_has_deepspeeds_keys() {
    let optimizer = |params: &str| {
        let text = format!(r#"{{"optimizer": {{"type": "Muon", "params": {params}}}}}"#);
        let optimizer = quiet(&text).optimizer.unwrap();
        (
            optimizer.lr,
            optimizer.hyper.weight_decay,
            optimizer.muon.unwrap(),
        )
    };
    let muon = |lr, momentum, ns_steps| DsMuon {
        lr,
        momentum,
        ns_steps,
    };
    assert_eq!(optimizer("{}"), (3e-4, 0.0, muon(Some(0.02), None, None)));
    assert_eq!(optimizer(r#"{"lr": 0.5}"#), (0.5, 0.0, DsMuon::default()));
    assert_eq!(optimizer(r#"{"lr": "auto"}"#).2, DsMuon::default());
    assert_eq!(
        optimizer(r#"{"adam_lr": 0.5}"#),
        (0.5, 0.0, muon(Some(0.02), None, None))
    );
    let both = r#"{"lr": 0.5, "muon_lr": 0.02, "adam_lr": 0.001, "momentum": 0.9, "weight_decay": 0.1, "ns_steps": 3}"#;
    assert_eq!(
        optimizer(both),
        (0.001, 0.1, muon(Some(0.02), Some(0.9), Some(3)))
    );
    // The rate of both is that of the one without its own.
    assert_eq!(
        optimizer(r#"{"lr": 0.5, "adam_lr": 0.1}"#),
        (0.1, 0.0, muon(Some(0.5), None, None))
    );
    assert_eq!(
        optimizer(r#"{"lr": 0.5, "muon_lr": 0.1}"#),
        (0.5, 0.0, muon(Some(0.1), None, None))
    );

    // Defaults of the Adam that updates the rest.
    let text = r#"{"optimizer": {"type": "Muon", "params": {"adam_w_mode": false}}}"#;
    let hyper = quiet(text).optimizer.unwrap().hyper;
    assert_eq!((hyper.beta1, hyper.beta2, hyper.eps), (0.9, 0.95, 1e-10));
    assert!(!hyper.decoupled);
}

#[test]
fn other_keys_of_muon_are_named() {
    let parse = |params: &str| {
        let text = format!(r#"{{"optimizer": {{"type": "Muon", "params": {params}}}}}"#);
        DsConfig::parse(&text)
    };
    let warnings = parse(r#"{"ns_method": "gram"}"#).unwrap().warnings;
    assert_eq!(
        warnings,
        [
            "optimizer.params.ns_method is ignored: products are in fp32 on cores and in bf16 on GPUs"
        ]
    );
    let error = parse(r#"{"per_head_muon": true}"#).unwrap_err().to_string();
    assert!(error.contains("optimizer.params.per_head_muon"), "{error}");
    assert!(error.contains("--muon-heads"), "{error}");
}

#[test]
fn schedules_have_deepspeeds_defaults() {
    // The outcome has the parameters that differ from the defaults.
    let table = r#"
        {"type": "WarmupLR"} => {}
        {"type": "WarmupLR", "params": {"warmup_num_steps": 7, "warmup_type": "log"}} => {"warmup_num_steps": 7}
        {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}} => {"total_num_steps": 18446744073709551615}
        {"type": "WarmupDecayLR", "params": {"total_num_steps": 100}} => {"total_num_steps": 100}
        {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_min_ratio": 0}} => {"total_num_steps": 9}
        {"type": "OneCycle", "params": {"cycle_min_lr": 1, "cycle_max_lr": 2, "decay_mom_rate": 0}} => {"cycle_min_lr": 1, "cycle_max_lr": 2}
        {"type": "LRRangeTest", "params": {"lr_range_test_staircase": false}} => {}
    "#;
    for (block, params) in cases(table) {
        let block: Value = serde_json::from_str(&block).unwrap();
        let params: Value = serde_json::from_str(params).unwrap();
        let expected: LrSchedule =
            serde_json::from_value(json!({"type": block["type"], "params": params})).unwrap();
        assert_eq!(
            quiet(&json!({"scheduler": block}).to_string()).schedule,
            Some(expected),
            "{block}"
        );
    }
}

#[test]
fn harmless_differences_are_warnings() {
    let table = r#"
        zero {"contiguous_gradients": false} => zero_optimization.contiguous_gradients is ignored:
        zero {"reduce_scatter": false} => zero_optimization.reduce_scatter is ignored:
        zero {"round_robin_gradients": true} => zero_optimization.round_robin_gradients is ignored:
        zero {"stage3_module_granularity_threshold": 5} => zero_optimization.module_granularity_threshold is ignored:
        zero {"leaf_module": {"classes": ["Moe"]}} => zero_optimization.leaf_module is ignored:
        zero {"stage3_model_persistence_threshold": 5} => zero_optimization.model_persistence_threshold is ignored:
        zero {"cpu_offload_use_pin_memory": true} => zero_optimization.cpu_offload_use_pin_memory is ignored:
        zero {"offload_optimizer": {"super_offload": true}} => zero_optimization.offload_optimizer.super_offload is ignored:
        zero {"offload_optimizer": {"pin_memory": false}} => zero_optimization.offload_optimizer.pin_memory is ignored:
        zero {"offload_optimizer": {"pipeline_read": false}} => zero_optimization.offload_optimizer.pipeline_read is ignored:
        zero {"offload_optimizer": {"pipeline_write": false}} => zero_optimization.offload_optimizer.pipeline_write is ignored:
        zero {"offload_param": {"pin_memory": false}} => zero_optimization.offload_param.pin_memory is ignored:
        zero {"offload_param": {"buffer_count": 4}} => zero_optimization.offload_param.buffer_count is ignored:
        zero {"offload_param": {"buffer_size": 1e9}} => zero_optimization.offload_param.buffer_size is ignored:
        zero {"offload_param": {"max_in_cpu": 1}} => zero_optimization.offload_param.max_in_cpu is ignored:
        {"bf16": {"check_grad_overflow": false}} => bf16.check_grad_overflow is ignored:
        {"bf16": {"immediate_grad_update": true}} => bf16.immediate_grad_update is ignored:
        {"fp16": {"auto_cast": true}} => fp16.auto_cast is ignored:
        {"optimizer": {"type": "Adam", "params": {"torch_adam": true}}} => optimizer.params.torch_adam is ignored:
        {"optimizer": {"type": "Adam", "legacy_fusion": true}} => optimizer.legacy_fusion is ignored:
        {"optimizer": {"type": "Adam", "note": "x"}} => unknown key optimizer.note is ignored
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}} => scheduler.params.warmup_type "cubic" is
        {"scheduler": {"type": "WarmupLR", "note": 1}} => unknown key scheduler.note is ignored
        {"activation_checkpointing": {"number_checkpoints": 4}} => activation_checkpointing.number_checkpoints is ignored:
        {"activation_checkpointing": {"note": 4}} => unknown key activation_checkpointing.note is ignored
        {"aio": {"use_gds": true}} => aio.use_gds is ignored:
        {"aio": {"thread_count": 4}} => aio.thread_count is ignored:
        {"aio": {"intra_op_parallelism": 2}} => aio.intra_op_parallelism is ignored:
        {"aio": {"single_submit": true}} => aio.single_submit is ignored:
        {"aio": {"overlap_events": false}} => aio.overlap_events is ignored:
        {"aio": {"note": true}} => unknown key aio.note is ignored
        {"data_types": {"grad_accum_dtype": "bf16"}} => data_types.grad_accum_dtype is ignored: it is fp32
        {"data_types": {"buffer_dtype": "bf16"}} => data_types.buffer_dtype is ignored:
        {"prescale_gradients": true} => prescale_gradients is ignored: gradients are divided once
        {"gradient_predivide_factor": 2.0} => gradient_predivide_factor is ignored:
        {"zero_allow_untested_optimizer": true} => zero_allow_untested_optimizer is ignored:
        {"memory_breakdown": true} => memory_breakdown is ignored:
        {"dump_state": true} => dump_state is ignored:
        {"checkpoint": {"tag_validation": "Warn"}} => checkpoint is ignored:
        {"flops_profiler": {"enabled": true}} => flops_profiler is ignored: tokens/s are in --metrics
        {"trian_batch_size": 8} => unknown key trian_batch_size is ignored
    "#;
    for (text, expected) in cases(table) {
        let config = DsConfig::parse(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
        assert!(
            matches!(&config.warnings[..], [w] if w.starts_with(expected)),
            "{text}: {:?}",
            config.warnings
        );
    }

    let many = r#"{"memory_breakdown": true, "dump_state": true, "note": 1, "other": 2}"#;
    assert_eq!(
        DsConfig::parse(many).unwrap().warnings.len(),
        4,
        "one line per key"
    );
}

#[test]
fn settings_that_change_results_are_errors() {
    let table = r#"
        zero {"zenflow": {"topk_ratio": 0.1}} => zero_optimization.zenflow {"topk_ratio":0.1}
        {"fp16": {"fp16_master_weights_and_grads": true}} => fp16.fp16_master_weights_and_grads true
        {"bf16": {"bf16_master_weights_and_grads": true}} => bf16.bf16_master_weights_and_grads true
        {"bf16": {"bf16_optimizer_states": true}} => bf16.bf16_optimizer_states true
        {"optimizer": {"type": "Lamb"}} => optimizer.type "Lamb"
        {"optimizer": {"type": "Adam", "params": {"amsgrad": true}}} => optimizer.params.amsgrad true
        {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}} => optimizer.params.max_grad_norm 1
        {"scheduler": {"type": "CosineAnnealing"}} => scheduler.type "CosineAnnealing"
        {"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": 9}}} => scheduler.params.last_batch_iteration 9
        {"gradient_allreduce_op": "sum"} => gradient_allreduce_op "sum"
        {"amp": {"enabled": true}} => amp {"enabled":true}
        {"torch_autocast": {"enabled": true}} => torch_autocast {"enabled":true}
        {"data_efficiency": {"enabled": true}} => data_efficiency {"enabled":true}
        {"curriculum_learning": {"enabled": true}} => curriculum_learning {"enabled":true}
        {"progressive_layer_drop": {"enabled": true, "theta": 0.5}} => progressive_layer_drop {"enabled":true,"theta":0.5}
        {"compression_training": {"x": {"shared_parameters": {"enabled": true}}}} => compression_training {"x":{"sha
        {"elasticity": {"enabled": true}} => elasticity {"enabled":true}
        {"sparse_attention": {"mode": "fixed"}} => sparse_attention {"mode":"fixed"}
    "#;
    for (text, expected) in cases(table) {
        let error = DsConfig::parse(&text).expect_err(&text);
        assert!(
            matches!(error, ConfigFileError::Unsupported { .. }),
            "{text}: {error}"
        );
        let error = error.to_string();
        assert!(error.starts_with(expected), "{text}: {error}");
        error.shows(&[" is not supported, and ignoring it would change the results: "]);
    }
}

#[test]
fn unknown_keys_are_errors_in_strict_blocks() {
    let table = r#"
        zero {"stages": 2} => unknown key zero_optimization.stages
        zero {"stages": "auto"} => unknown key zero_optimization.stages
        zero {"stage3_stage": 2} => unknown key zero_optimization.stage3_stage
        zero {"offload_param": {"devise": "cpu"}} => unknown key zero_optimization.offload_param.devise
        zero {"offload_optimizer": {"max_in_cpu": 1}} => unknown key zero_optimization.offload_optimizer.max_in_cpu
        {"fp16": {"enabled": false, "loss_scaling": 0}} => unknown key fp16.loss_scaling
        {"bf16": {"loss_scale": 0}} => unknown key bf16.loss_scale
        {"bfloat16": {"x": 0}} => unknown key bfloat16.x
        {"optimizer": {"type": "Adam", "params": {"learning_rate": 0}}} => unknown key optimizer.params.learning_rate
    "#;
    for (text, expected) in cases(table) {
        let error = DsConfig::parse(&text).expect_err(&text).to_string();
        assert_eq!(
            error,
            format!("{expected}, which DeepSpeed rejects, too: correct or remove it"),
            "{text}"
        );
    }
}

#[test]
fn wrong_values_name_the_expected_ones() {
    assert_errors(
        r#"
        {"train_batch_size": "64"} => train_batch_size is "64"; expected a whole number above 0
        {"train_batch_size": 0} => train_batch_size is 0; expected a whole number above 0
        {"gradient_accumulation_steps": 1.5} => gradient_accumulation_steps is 1.5; expected a whole number above 0
        {"train_micro_batch_size_per_gpu": -1} => train_micro_batch_size_per_gpu is -1; expected a whole number above 0
        {"steps_per_print": true} => steps_per_print is true; expected a whole number, 0 or above
        {"gradient_clipping": -1} => gradient_clipping is -1; expected a number, 0 (off) or above
        {"gradient_clipping": "1"} => gradient_clipping is "1"; expected a number, 0 (off) or above
        zero 3 => zero_optimization is 3; expected an object {..}, true or false
        zero {"stage": 4} => zero_optimization.stage is 4; expected 0, 1, 2, 3 or "auto"
        zero {"stage": -1} => zero_optimization.stage is -1; expected 0, 1, 2, 3 or "auto"
        zero {"stage": 1.5} => zero_optimization.stage is 1.5; expected 0, 1, 2, 3 or "auto"
        zero {"stage": "3"} => zero_optimization.stage is "3"; expected 0, 1, 2, 3 or "auto"
        zero {"reduce_bucket_size": 5.5} => zero_optimization.reduce_bucket_size is 5.5; expected a whole number, 0 or above
        zero {"overlap_comm": 1} => zero_optimization.overlap_comm is 1; expected true or false
        zero {"round_robin_gradients": 1} => zero_optimization.round_robin_gradients is 1; expected true or false
        zero {"offload_param": {"device": "gpu"}} => zero_optimization.offload_param.device is "gpu"; expected "none", "cpu" or "nvme"
        zero {"offload_param": "cpu"} => zero_optimization.offload_param is "cpu"; expected an object {..}
        zero {"offload_param": {"pin_memory": 1}} => zero_optimization.offload_param.pin_memory is 1; expected true or false
        zero {"stage": 3, "offload_optimizer": {"ratio": 0.5}} => zero_optimization.offload_optimizer.ratio is 0.5; expected 1: the whole optimizer state is offloaded
        zero {"offload_optimizer": {"buffer_count": 0}} => zero_optimization.offload_optimizer.buffer_count is 0; expected a whole number above 0
        {"fp16": true} => fp16 is true; expected an object {..}
        {"fp16": {"enabled": 1}} => fp16.enabled is 1; expected true or false
        {"fp16": {"loss_scale": -1}} => fp16.loss_scale is -1; expected 0 (dynamic) or a scale above 0
        {"fp16": {"hysteresis": -1}} => fp16.hysteresis is -1; expected a whole number, 0 or above
        {"optimizer": {"type": 1}} => optimizer.type is 1; expected a string
        {"optimizer": {"type": "Adam", "params": {"lr": "fast"}}} => optimizer.params.lr is "fast"; expected a number, 0 or above
        {"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}} => optimizer.params.betas is [0.9]; expected two numbers, each at least 0 and below 1
        {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1]}}} => optimizer.params.betas is [0.9,1]; expected two numbers, each at least 0 and below 1
        {"communication_data_type": "int8"} => communication_data_type is "int8"; expected "fp32", "fp16" or "bf16"
        {"aio": {"queue_depth": 0}} => aio.queue_depth is 0; expected a whole number from 1 to 4096
        {"aio": {"block_size": 1000000}} => aio.block_size is 1000000; expected a multiple of 4096 up to 1073741824
    "#,
    );
}

#[test]
fn missing_and_conflicting_keys_are_errors() {
    assert_errors(
        r#"
        {"optimizer": {"params": {}}} => optimizer.type is missing: the file has an optimizer block
        {"scheduler": {"params": {}}} => scheduler.type is missing: the file has a scheduler block
        zero {"stage": 3, "offload_param": {"device": "nvme"}} => nvme_path is missing: the offload device is nvme
        zero {"cpu_offload": true, "offload_optimizer": {"device": "cpu"}} => zero_optimization.cpu_offload and zero_optimization.offload_optimizer conflict; remove one of them
        {"bf16": {"enabled": true}, "fp16": {"enabled": true}} => fp16.enabled and bf16.enabled conflict; remove one of them
        {"bf16": {"enabled": true}, "bfloat16": {"enabled": true}} => bf16 and bfloat16 conflict; remove one of them
    "#,
    );
}

#[test]
fn wrong_schedules_name_the_parameter() {
    let table = r#"
        {"type": "WarmupDecayLR"} => total_num_steps
        {"type": "WarmupLR", "params": {"warmup_steps": 5}} => warmup_steps
        {"type": "WarmupLR", "params": {"warmup_num_steps": 0}} => warmup_num_steps
        {"type": "WarmupLR", "params": {"warmup_num_steps": "ten"}} => ten
        {"type": "WarmupLR", "params": {"warmup_min_lr": [0, 1]}} => sequence
        {"type": "WarmupLR", "params": {"warmup_min_lr": -1}} => warmup_min_lr
        {"type": "OneCycle", "params": {"cycle_min_lr": 1}} => cycle_max_lr
    "#;
    for (block, part) in cases(table) {
        let error = DsConfig::parse(&format!(r#"{{"scheduler": {block}}}"#))
            .expect_err(&block)
            .to_string();
        assert!(
            error.contains(part) && !error.contains('\n'),
            "{block}: {error}"
        );
    }
}

#[test]
fn file_errors_name_path_and_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ds.json");
    std::fs::write(
        &path,
        "{ // stage 2\n \"zero_optimization\": {\"stage\": 2}, }",
    )
    .unwrap();
    assert_eq!(DsConfig::open(&path).unwrap().zero.stage, 2);

    for (text, expected) in [
        (
            "{\n \"zero_optimization\": {\"stage\": 2\n}",
            "not a JSON object: EOF while parsing an object at line 3 column 1",
        ),
        (
            "{\"zero_optimization\": {\"stag\": 2}}",
            "unknown key zero_optimization.stag, which DeepSpeed rejects, too: correct or remove it",
        ),
    ] {
        std::fs::write(&path, text).unwrap();
        let error = DsConfig::open(&path).unwrap_err().to_string();
        assert_eq!(error, format!("{}: {expected}", path.display()));
    }

    let missing = dir.path().join("none.json");
    let error = DsConfig::open(&missing).unwrap_err().to_string();
    assert!(
        error.starts_with(&format!("{}: failed to read the file: ", missing.display())),
        "{error}"
    );
}

/// Comments, a trailing comma and numbers such as 5e6 are allowed.
#[test]
fn comments_are_allowed() {
    let text = r#"{
        "train_batch_size": 64,
        "gradient_accumulation_steps": 2,     // the micro-batch is derived
        "bf16": {"enabled": true},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 5e6},
        "steps_per_print": 10,
    }"#;

    let config = DsConfig::parse(text).unwrap();

    assert_eq!(config.zero.stage, 3);
    assert_eq!(config.zero.prefetch_bucket_elems, 5_000_000);
    let batch = config.batch.resolve(4, None, None, 8).unwrap();
    assert_eq!(batch.micro_batch, 8);
}
