//! Every rule of the configuration file, by tables of (text, outcome).

use serde_json::{Value, json};
use zero_alloc::device::DType;
use zero_kernels::AdamHyper;
use zero_optim::{DynamicScaling, LossScaling, LrSchedule, Warmup, WarmupDecay, WarmupType};

use super::{ActivationCheckpointing, Aio, BatchKeys, ConfigFileError, DsConfig, DsOptimizer};
use super::{OffloadDevice, OffloadOptimizer, OffloadParam, ZeroOptimization};

fn parse(value: &Value) -> Result<DsConfig, ConfigFileError> {
    DsConfig::parse(&value.to_string())
}

/// A configuration that is right and says nothing that is not honoured.
fn quiet(value: Value) -> DsConfig {
    let config = parse(&value).unwrap_or_else(|e| panic!("{value}: {e}"));
    assert!(config.warnings.is_empty(), "{value}: {:?}", config.warnings);
    config
}

fn assert_error(value: &Value, expected: &str) {
    let error = parse(value).expect_err(&value.to_string()).to_string();
    assert!(!error.contains('\n'), "more than one line: {error}");
    assert_eq!(error, expected, "{value}");
}

fn zero(block: Value) -> Value {
    json!({ "zero_optimization": block })
}

#[test]
fn an_empty_file_is_deepspeeds_defaults() {
    let config = quiet(json!({}));
    let expected = DsConfig {
        batch: BatchKeys::default(),
        zero: ZeroOptimization {
            stage: 0,
            reduce_bucket_elems: 500_000_000,
            allgather_bucket_elems: 500_000_000,
            overlap_comm: false,
            sub_group_elems: 1_000_000_000,
            prefetch_bucket_elems: 50_000_000,
            persistence_threshold_elems: 100_000,
            max_live_elems: 1_000_000_000,
            max_reuse_elems: 1_000_000_000,
            gather_16bit_weights_on_save: false,
            offload_optimizer: OffloadOptimizer {
                device: OffloadDevice::None,
                buffer_count: 4,
                pin_memory: true,
                pipeline_read: false,
                pipeline_write: false,
                ratio: 1.0,
            },
            offload_param: OffloadParam {
                device: OffloadDevice::None,
                buffer_count: 5,
                buffer_elems: 100_000_000,
                max_in_cpu_elems: 1_000_000_000,
                pin_memory: true,
            },
        },
        dtype: DType::F32,
        loss_scaling: LossScaling::NONE,
        gradient_clipping: 1.0,
        optimizer: None,
        schedule: None,
        activation_checkpointing: None,
        aio: Aio {
            block_size_bytes: 1_048_576,
            queue_depth: 8,
            intra_op_parallelism: 1,
            single_submit: false,
            overlap_events: true,
        },
        steps_per_print: None,
        wall_clock_breakdown: false,
        warnings: vec![],
    };
    assert_eq!(config, expected);
}

#[test]
fn the_file_of_the_hugging_face_documentation_is_honoured_without_a_warning() {
    let config = quiet(json!({
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
    }));
    assert_eq!(config.zero.stage, 3);
    assert_eq!(config.zero.offload_optimizer.device, OffloadDevice::Cpu);
    assert_eq!(config.zero.offload_param.device, OffloadDevice::Cpu);
    assert!(config.zero.gather_16bit_weights_on_save && config.zero.overlap_comm);
    assert_eq!(config.batch, BatchKeys::default());
    assert_eq!(config.dtype, DType::F32, "enabled: auto is the default, false");
    assert_eq!(config.optimizer.unwrap().lr, 1e-3);
    assert_eq!(config.schedule, Some(LrSchedule::Warmup(Warmup::default())));
    assert_eq!(config.steps_per_print, Some(2000));
}

#[test]
fn a_file_that_says_everything_is_read_in_full() {
    let config = quiet(json!({
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
                "pin_memory": false, "pipeline_read": true, "pipeline_write": true, "fast_init": false}
        },
        "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": true, "profile": false},
        "aio": {"block_size": 4096, "queue_depth": 16, "intra_op_parallelism": 2, "single_submit": true,
            "overlap_events": false, "use_gds": false},
        "communication_data_type": "bf16",
        "data_types": {"grad_accum_dtype": "fp32", "param_dtype": "bf16"},
        "gradient_allreduce_op": "mean", "prescale_gradients": false, "gradient_predivide_factor": 1.0,
        "steps_per_print": 5, "wall_clock_breakdown": true, "memory_breakdown": false, "dump_state": false,
        "sequence_parallel_size": 1,
        "flops_profiler": {"enabled": false, "profile_step": 5}, "tensorboard": {"enabled": false},
        "wandb": {}, "comms_logger": null, "amp": {"enabled": false, "opt_level": "O1"},
        "data_efficiency": {"enabled": false, "seed": 1}, "tensor_parallel": {"autotp_size": 1},
        "compression_training": {"weight_quantization": {
            "shared_parameters": {"enabled": false}, "different_groups": {"wq1": {"params": {"start_bits": 8}}}}},
    }));
    let expected = ZeroOptimization {
        stage: 2,
        reduce_bucket_elems: 1_000_000,
        allgather_bucket_elems: 2_000_000,
        overlap_comm: true,
        sub_group_elems: 3_000_000,
        prefetch_bucket_elems: 4_000_000,
        persistence_threshold_elems: 5_000,
        max_live_elems: 6_000_000,
        max_reuse_elems: 7_000_000,
        offload_optimizer: OffloadOptimizer {
            device: OffloadDevice::Nvme("/local".into()),
            buffer_count: 6,
            pin_memory: false,
            pipeline_read: true,
            pipeline_write: true,
            ratio: 1.0,
        },
        ..ZeroOptimization::default()
    };
    assert_eq!(config.zero, expected);
    let (train_batch_size, micro_batch, grad_accum) = (Some(64), Some(4), Some(2));
    assert_eq!(config.batch, BatchKeys { train_batch_size, micro_batch, grad_accum });
    assert_eq!(config.dtype, DType::Bf16);
    assert_eq!(config.gradient_clipping, 0.5);
    let hyper = AdamHyper { beta1: 0.8, beta2: 0.95, eps: 1e-6, weight_decay: 0.1, decoupled: false };
    assert_eq!(config.optimizer, Some(DsOptimizer { lr: 3e-4, hyper }));
    let schedule = WarmupDecay {
        total_num_steps: 10_000,
        warmup_min_lr: 1e-6,
        warmup_max_lr: 3e-4,
        warmup_num_steps: 100,
        warmup_type: WarmupType::Linear,
    };
    assert_eq!(config.schedule, Some(LrSchedule::WarmupDecay(schedule)));
    let checkpointing = ActivationCheckpointing { partition_activations: true, cpu_checkpointing: true };
    assert_eq!(config.activation_checkpointing, Some(checkpointing));
    let aio = Aio {
        block_size_bytes: 4096,
        queue_depth: 16,
        intra_op_parallelism: 2,
        single_submit: true,
        overlap_events: false,
    };
    assert_eq!(config.aio, aio);
    assert_eq!((config.steps_per_print, config.wall_clock_breakdown), (Some(5), true));
}

#[test]
fn the_old_forms_of_zero_optimization_are_understood() {
    assert_eq!(quiet(zero(json!(true))).zero, ZeroOptimization { stage: 1, ..ZeroOptimization::default() });
    assert_eq!(quiet(zero(json!(false))).zero, ZeroOptimization::default());
    assert_eq!(quiet(zero(json!("auto"))).zero, ZeroOptimization::default());
    let old = quiet(zero(json!({"stage": 2, "cpu_offload": true}))).zero;
    assert_eq!(old.offload_optimizer, OffloadOptimizer { device: OffloadDevice::Cpu, ..Default::default() });
    let old = quiet(zero(json!({"stage": 3, "cpu_offload_param": true, "cpu_offload": false}))).zero;
    assert_eq!(old.offload_param, OffloadParam { device: OffloadDevice::Cpu, ..Default::default() });
    assert_eq!(old.offload_optimizer, OffloadOptimizer::default());
    let old = quiet(zero(json!({"stage": 3, "stage3_gather_fp16_weights_on_model_save": true}))).zero;
    assert!(old.gather_16bit_weights_on_save);
}

#[test]
fn communication_overlaps_at_stage_3_unless_said_otherwise() {
    let cases = [
        (json!({"stage": 2}), false),
        (json!({"stage": 3}), true),
        (json!({"stage": 3, "overlap_comm": "auto"}), true),
        (json!({"stage": 3, "overlap_comm": false}), false),
        (json!({"stage": 1, "overlap_comm": true}), true),
    ];
    for (block, expected) in cases {
        assert_eq!(quiet(zero(block.clone())).zero.overlap_comm, expected, "{block}");
    }
}

#[test]
fn keys_of_stage_3_have_two_names() {
    let names = [
        ("prefetch_bucket_size", 7),
        ("param_persistence_threshold", 8),
        ("max_live_parameters", 9),
        ("max_reuse_distance", 10),
    ];
    for (name, value) in names {
        let long = format!("stage3_{name}");
        let config = |name: &str| quiet(zero(json!({"stage": 3, name: value})));
        assert_eq!(config(name), config(&long));
        assert_ne!(config(name), quiet(zero(json!({"stage": 3}))));
        let both = zero(json!({name: 1, long: 1}));
        let expected =
            format!("zero_optimization.stage3_{name} and zero_optimization.{name} are one setting; give one of them");
        assert_error(&both, &expected);
    }
}

#[test]
fn precision_is_fp32_unless_a_block_is_enabled() {
    let dynamic = |change: fn(&mut DynamicScaling)| {
        let mut scaling = DynamicScaling::default();
        change(&mut scaling);
        LossScaling::Dynamic(scaling)
    };
    let fixed = |scale| LossScaling::Static { scale };
    let cases = [
        (json!({"fp16": {}}), DType::F32, LossScaling::NONE),
        (json!({"fp16": {"enabled": false, "loss_scale": 8}}), DType::F32, LossScaling::NONE),
        (json!({"fp16": {"enabled": true}}), DType::F16, dynamic(|_| ())),
        (json!({"fp16": {"enabled": true, "loss_scale": 0}}), DType::F16, dynamic(|_| ())),
        (json!({"fp16": {"enabled": true, "loss_scale": 128}}), DType::F16, fixed(128.0)),
        (json!({"fp16": {"enabled": true, "loss_scale": 0.5}}), DType::F16, fixed(0.5)),
        (
            json!({"fp16": {"enabled": true, "initial_scale_power": 12, "loss_scale_window": 50, "hysteresis": 4,
                "consecutive_hysteresis": true, "min_loss_scale": 2}}),
            DType::F16,
            dynamic(|s| {
                *s = DynamicScaling {
                    initial_scale_power: 12,
                    window: 50,
                    hysteresis: 4,
                    consecutive_hysteresis: true,
                    min_scale: 2.0,
                    ..*s
                }
            }),
        ),
        (json!({"bf16": {"enabled": true}}), DType::Bf16, LossScaling::NONE),
        (json!({"bfloat16": {"enabled": true}}), DType::Bf16, LossScaling::NONE),
        (json!({"bf16": {"enabled": "auto"}}), DType::F32, LossScaling::NONE),
        (json!({"bf16": {"enabled": true}, "fp16": {"enabled": false}}), DType::Bf16, LossScaling::NONE),
    ];
    for (value, dtype, scaling) in cases {
        let config = quiet(value.clone());
        assert_eq!((config.dtype, config.loss_scaling), (dtype, scaling), "{value}");
    }
    assert_error(
        &json!({"bf16": {"enabled": true}, "fp16": {"enabled": true}}),
        "fp16.enabled and bf16.enabled are one setting; give one of them",
    );
    let both = "bf16 and bfloat16 are one setting; give one of them";
    assert_error(&json!({"bf16": {"enabled": true}, "bfloat16": {"enabled": true}}), both);
}

#[test]
fn adam_means_adamw_unless_it_says_otherwise() {
    let cases = [
        (json!({"type": "Adam"}), true),
        (json!({"type": "adam", "params": {"adam_w_mode": true}}), true),
        (json!({"type": "Adam", "params": {"adam_w_mode": false}}), false),
        (json!({"type": "AdamW"}), true),
        (json!({"type": "AdamW", "params": {"adam_w_mode": false}}), true),
    ];
    for (block, decoupled) in cases {
        let hyper = AdamHyper { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, decoupled };
        let config = quiet(json!({"optimizer": block}));
        assert_eq!(config.optimizer, Some(DsOptimizer { lr: 1e-3, hyper }), "{block}");
    }
}

#[test]
fn every_schedule_is_read_with_deepspeeds_defaults() {
    let cases = [
        (json!({"type": "WarmupLR"}), json!({})),
        (
            json!({"type": "WarmupLR", "params": {"warmup_num_steps": 7, "warmup_type": "log"}}),
            json!({"warmup_num_steps": 7}),
        ),
        (json!({"type": "WarmupDecayLR", "params": {"total_num_steps": 100}}), json!({"total_num_steps": 100})),
        (
            json!({"type": "WarmupCosineLR", "params": {"total_num_steps": 100, "warmup_min_ratio": 0}}),
            json!({"total_num_steps": 100}),
        ),
        (
            json!({"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "decay_mom_rate": 0}}),
            json!({"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}),
        ),
        (json!({"type": "LRRangeTest", "params": {"lr_range_test_staircase": false}}), json!({})),
    ];
    for (block, params) in cases {
        let expected: LrSchedule = serde_json::from_value(json!({"type": block["type"], "params": params})).unwrap();
        assert_eq!(quiet(json!({"scheduler": block})).schedule, Some(expected), "{block}");
    }
}

#[test]
fn what_is_not_honoured_and_harmless_is_a_warning_that_names_the_key() {
    let cases = [
        (zero(json!({"contiguous_gradients": false})), "zero_optimization.contiguous_gradients is not honoured: "),
        (zero(json!({"reduce_scatter": false})), "zero_optimization.reduce_scatter is not honoured: "),
        (zero(json!({"round_robin_gradients": true})), "zero_optimization.round_robin_gradients is not honoured: "),
        (zero(json!({"zero_hpz_partition_size": 8})), "zero_optimization.zero_hpz_partition_size is not honoured: "),
        (
            zero(json!({"stage3_module_granularity_threshold": 5})),
            "zero_optimization.module_granularity_threshold is not",
        ),
        (zero(json!({"leaf_module": {"classes": ["Moe"]}})), "zero_optimization.leaf_module is not honoured: "),
        (zero(json!({"stage3_model_persistence_threshold": 5})), "zero_optimization.model_persistence_threshold is"),
        (zero(json!({"cpu_offload_use_pin_memory": true})), "zero_optimization.cpu_offload_use_pin_memory is not"),
        (
            zero(json!({"offload_optimizer": {"device": "cpu", "super_offload": true}})),
            "zero_optimization.offload_optimizer.super_offload is",
        ),
        (
            zero(json!({"stage": 2, "offload_param": {"device": "cpu"}})),
            "zero_optimization.offload_param is not honoured: it needs stage 3, not 2",
        ),
        (
            json!({"bf16": {"enabled": true, "check_grad_overflow": false}}),
            "bf16.check_grad_overflow is not honoured: ",
        ),
        (
            json!({"bf16": {"enabled": true, "immediate_grad_update": true}}),
            "bf16.immediate_grad_update is not honoured: ",
        ),
        (json!({"fp16": {"enabled": true, "auto_cast": true}}), "fp16.auto_cast is not honoured: "),
        (
            json!({"optimizer": {"type": "Adam", "params": {"torch_adam": true}}}),
            "optimizer.params.torch_adam is not",
        ),
        (json!({"optimizer": {"type": "Adam", "legacy_fusion": true}}), "optimizer.legacy_fusion is not honoured: "),
        (json!({"optimizer": {"type": "Adam", "note": "x"}}), "optimizer.note is not a key that this program knows"),
        (
            json!({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}}),
            "scheduler.params.warmup_type \"cubic\" is unknown: \"log\" is used",
        ),
        (
            json!({"scheduler": {"type": "WarmupLR", "note": 1}}),
            "scheduler.note is not a key that this program knows",
        ),
        (
            json!({"activation_checkpointing": {"number_checkpoints": 4}}),
            "activation_checkpointing.number_checkpoints is",
        ),
        (json!({"activation_checkpointing": {"note": 4}}), "activation_checkpointing.note is not a key that this"),
        (json!({"aio": {"use_gds": true}}), "aio.use_gds is not honoured: files are read through host memory"),
        (json!({"aio": {"note": true}}), "aio.note is not a key that this program knows: it is ignored"),
        (
            json!({"communication_data_type": "fp16"}),
            "communication_data_type is not honoured: gradients travel as the parameters do, as fp32 and not fp16",
        ),
        (
            json!({"data_types": {"grad_accum_dtype": "bf16"}}),
            "data_types.grad_accum_dtype is not honoured: fp32 is used and not bf16",
        ),
        (json!({"data_types": {"buffer_dtype": "bf16"}}), "data_types.buffer_dtype is not honoured: "),
        (json!({"prescale_gradients": true}), "prescale_gradients is not honoured: gradients are divided once"),
        (json!({"gradient_predivide_factor": 2.0}), "gradient_predivide_factor is not honoured: "),
        (json!({"zero_allow_untested_optimizer": true}), "zero_allow_untested_optimizer is not honoured: "),
        (json!({"memory_breakdown": true}), "memory_breakdown is not honoured: "),
        (json!({"dump_state": true}), "dump_state is not honoured: "),
        (json!({"checkpoint": {"tag_validation": "Warn"}}), "checkpoint is not honoured: "),
        (json!({"flops_profiler": {"enabled": true}}), "flops_profiler is not honoured: tokens/s are in --metrics"),
        (json!({"wandb": {"enabled": true, "project": "x"}}), "wandb is not honoured: use --metrics"),
        (json!({"tensorboard": {"output_path": "x"}}), "tensorboard is not honoured: use --metrics"),
        (json!({"trian_batch_size": 8}), "trian_batch_size is not a key that this program knows: it is ignored"),
    ];
    for (value, expected) in cases {
        let config = parse(&value).unwrap_or_else(|e| panic!("{value}: {e}"));
        assert!(matches!(&config.warnings[..], [w] if w.starts_with(expected)), "{value}: {:?}", config.warnings);
    }
    let many = json!({"memory_breakdown": true, "dump_state": true, "note": 1, "other": 2});
    assert_eq!(parse(&many).unwrap().warnings.len(), 4, "each key has its line");
}

#[test]
fn what_would_change_the_results_is_an_error() {
    let cases = [
        zero(json!({"zero_quantized_gradients": true})),
        zero(json!({"zero_quantized_weights": true})),
        zero(json!({"zero_quantized_nontrainable_weights": true})),
        zero(json!({"zenflow": {"topk_ratio": 0.1}})),
        zero(json!({"mics_shard_size": 8})),
        json!({"fp16": {"enabled": true, "fp16_master_weights_and_grads": true}}),
        json!({"bf16": {"enabled": true, "bf16_master_weights_and_grads": true}}),
        json!({"bf16": {"enabled": true, "bf16_optimizer_states": true}}),
        json!({"optimizer": {"type": "Lamb"}}),
        json!({"optimizer": {"type": "OneBitAdam"}}),
        json!({"optimizer": {"type": "Adam", "params": {"amsgrad": true}}}),
        json!({"optimizer": {"type": "Adam", "params": {"bias_correction": false}}}),
        json!({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}),
        json!({"scheduler": {"type": "CosineAnnealing"}}),
        json!({"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": 100}}}),
        json!({"gradient_allreduce_op": "sum"}),
        json!({"sequence_parallel_size": 2}),
        json!({"amp": {"enabled": true}}),
        json!({"torch_autocast": {"enabled": true, "dtype": "bfloat16"}}),
        json!({"data_efficiency": {"enabled": true}}),
        json!({"curriculum_learning": {"enabled": true}}),
        json!({"progressive_layer_drop": {"enabled": true, "theta": 0.5}}),
        json!({"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": true}}}}),
        json!({"tensor_parallel": {"autotp_size": 2}}),
        json!({"elasticity": {"enabled": true, "max_train_batch_size": 2000}}),
        json!({"sparse_attention": {"mode": "fixed"}}),
    ];
    for value in cases {
        let error = parse(&value).expect_err(&value.to_string());
        assert!(matches!(error, ConfigFileError::Unsupported { .. }), "{value}: {error}");
        assert!(error.to_string().contains("is not supported, and ignoring it would change the results"), "{error}");
    }
    assert_error(
        &json!({"optimizer": {"type": "Lion", "params": {}}}),
        "optimizer.type \"Lion\" is not supported, and ignoring it would change the results: \
         the optimizers here are \"Adam\" and \"AdamW\"",
    );
}

#[test]
fn unknown_keys_are_errors_in_the_blocks_where_deepspeed_refuses_them() {
    let cases = [
        (zero(json!({"stages": 2})), "unknown key zero_optimization.stages"),
        (zero(json!({"stage3_stage": 2})), "unknown key zero_optimization.stage3_stage"),
        (zero(json!({"offload_param": {"devise": "cpu"}})), "unknown key zero_optimization.offload_param.devise"),
        (
            zero(json!({"offload_optimizer": {"max_in_cpu": 1}})),
            "unknown key zero_optimization.offload_optimizer.max_in_cpu",
        ),
        (json!({"fp16": {"enabled": false, "loss_scaling": 0}}), "unknown key fp16.loss_scaling"),
        (json!({"bf16": {"loss_scale": 0}}), "unknown key bf16.loss_scale"),
        (json!({"bfloat16": {"x": 0}}), "unknown key bfloat16.x"),
        (
            json!({"optimizer": {"type": "Adam", "params": {"learning_rate": 0}}}),
            "unknown key optimizer.params.learning_rate",
        ),
    ];
    for (value, expected) in cases {
        assert_error(&value, expected);
    }
}

#[test]
fn values_of_another_type_or_out_of_range_are_errors_that_say_what_is_expected() {
    let whole = "a whole number, 0 or above";
    let above = "a whole number above 0";
    let cases = [
        (json!({"train_batch_size": "64"}), format!("train_batch_size is \"64\"; expected {above}")),
        (json!({"train_batch_size": 0}), format!("train_batch_size is 0; expected {above}")),
        (
            json!({"gradient_accumulation_steps": 1.5}),
            format!("gradient_accumulation_steps is 1.5; expected {above}"),
        ),
        (
            json!({"train_micro_batch_size_per_gpu": -1}),
            format!("train_micro_batch_size_per_gpu is -1; expected {above}"),
        ),
        (json!({"steps_per_print": true}), format!("steps_per_print is true; expected {whole}")),
        (json!({"gradient_clipping": -1}), "gradient_clipping is -1; expected a number, 0 (off) or above".into()),
        (json!({"gradient_clipping": "1"}), "gradient_clipping is \"1\"; expected a number, 0 (off) or above".into()),
        (json!({"zero_optimization": 3}), "zero_optimization is 3; expected an object {..}, true or false".into()),
        (zero(json!({"stage": 4})), "zero_optimization.stage is 4; expected 0, 1, 2 or 3".into()),
        (zero(json!({"stage": -1})), "zero_optimization.stage is -1; expected 0, 1, 2 or 3".into()),
        (zero(json!({"stage": 1.5})), "zero_optimization.stage is 1.5; expected 0, 1, 2 or 3".into()),
        (zero(json!({"stage": "3"})), "zero_optimization.stage is \"3\"; expected 0, 1, 2 or 3".into()),
        (
            zero(json!({"reduce_bucket_size": 0})),
            format!("zero_optimization.reduce_bucket_size is 0; expected {above}"),
        ),
        (
            zero(json!({"reduce_bucket_size": 5.5})),
            format!("zero_optimization.reduce_bucket_size is 5.5; expected {above}"),
        ),
        (zero(json!({"overlap_comm": 1})), "zero_optimization.overlap_comm is 1; expected true or false".into()),
        (
            zero(json!({"round_robin_gradients": 1})),
            "zero_optimization.round_robin_gradients is 1; expected true or false".into(),
        ),
        (
            zero(json!({"offload_param": {"device": "gpu"}})),
            "zero_optimization.offload_param.device is \"gpu\"; expected \"none\", \"cpu\" or \"nvme\"".into(),
        ),
        (
            zero(json!({"offload_param": "cpu"})),
            "zero_optimization.offload_param is \"cpu\"; expected an object {..}".into(),
        ),
        (
            zero(json!({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1.5}})),
            "zero_optimization.offload_optimizer.ratio is 1.5; expected a number from 0 to 1".into(),
        ),
        (
            zero(json!({"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}})),
            "zero_optimization.offload_optimizer.ratio is 0.5; expected 1 \
             (a part of the state is offloaded only at stage 3)"
                .into(),
        ),
        (json!({"fp16": true}), "fp16 is true; expected an object {..}".into()),
        (json!({"fp16": {"enabled": 1}}), "fp16.enabled is 1; expected true or false".into()),
        (
            json!({"fp16": {"loss_scale": -1}}),
            "fp16.loss_scale is -1; expected 0 (dynamic) or a scale above 0".into(),
        ),
        (json!({"fp16": {"hysteresis": 0}}), format!("fp16.hysteresis is 0; expected {above}")),
        (json!({"optimizer": {"type": 1}}), "optimizer.type is 1; expected a string".into()),
        (
            json!({"optimizer": {"type": "Adam", "params": {"lr": "fast"}}}),
            "optimizer.params.lr is \"fast\"; expected a number, 0 or above".into(),
        ),
        (
            json!({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}),
            "optimizer.params.betas is [0.9]; expected two numbers of at least 0 and below 1".into(),
        ),
        (
            json!({"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1]}}}),
            "optimizer.params.betas is [0.9,1]; expected two numbers of at least 0 and below 1".into(),
        ),
        (
            json!({"communication_data_type": "int8"}),
            "communication_data_type is \"int8\"; expected \"fp32\", \"fp16\" or \"bf16\"".into(),
        ),
        (json!({"aio": {"queue_depth": 0}}), format!("aio.queue_depth is 0; expected {above}")),
    ];
    for (value, expected) in cases {
        assert_error(&value, &expected);
    }
}

#[test]
fn keys_that_others_make_necessary_are_asked_for() {
    assert_error(&json!({"optimizer": {"params": {}}}), "optimizer.type is missing: the file has an optimizer block");
    assert_error(&json!({"scheduler": {"params": {}}}), "scheduler.type is missing: the file has a scheduler block");
    let nvme = zero(json!({"stage": 3, "offload_param": {"device": "nvme"}}));
    assert_error(&nvme, "nvme_path is missing: the offload device is nvme");
    let both = zero(json!({"cpu_offload": true, "offload_optimizer": {"device": "cpu"}}));
    assert_error(
        &both,
        "zero_optimization.cpu_offload and zero_optimization.offload_optimizer are one setting; give one of them",
    );
}

#[test]
fn wrong_schedules_are_errors_that_name_the_parameter() {
    let cases = [
        (json!({"type": "WarmupDecayLR"}), "total_num_steps"),
        (json!({"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}), "total_num_steps"),
        (json!({"type": "WarmupLR", "params": {"warmup_steps": 5}}), "warmup_steps"),
        (json!({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}), "warmup_num_steps"),
        (json!({"type": "WarmupLR", "params": {"warmup_num_steps": "ten"}}), "ten"),
        (json!({"type": "WarmupLR", "params": {"warmup_min_lr": [0, 1]}}), "sequence"),
        (json!({"type": "WarmupLR", "params": {"warmup_min_lr": -1}}), "warmup_min_lr"),
        (json!({"type": "OneCycle", "params": {"cycle_min_lr": 1}}), "cycle_max_lr"),
    ];
    for (block, part) in cases {
        let error = parse(&json!({"scheduler": block})).expect_err(&block.to_string()).to_string();
        assert!(error.contains(part) && !error.contains('\n'), "{block}: {error}");
    }
}

#[test]
fn a_file_is_read_with_its_comments_and_its_errors_name_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ds.json");
    std::fs::write(&path, "{ // stage 2\n \"zero_optimization\": {\"stage\": 2}, }").unwrap();
    assert_eq!(DsConfig::open(&path).unwrap().zero.stage, 2);
    std::fs::write(&path, "{\n \"zero_optimization\": {\"stage\": 2\n}").unwrap();
    let error = DsConfig::open(&path).unwrap_err().to_string();
    assert_eq!(
        error,
        format!("{}: not a JSON object: EOF while parsing an object at line 3 column 1", path.display())
    );
    std::fs::write(&path, "{\"zero_optimization\": {\"stag\": 2}}").unwrap();
    let error = DsConfig::open(&path).unwrap_err().to_string();
    assert_eq!(error, format!("{}: unknown key zero_optimization.stag", path.display()));
    let missing = dir.path().join("none.json");
    let error = DsConfig::open(&missing).unwrap_err().to_string();
    assert!(error.starts_with(&format!("{}: cannot read: ", missing.display())), "{error}");
}
