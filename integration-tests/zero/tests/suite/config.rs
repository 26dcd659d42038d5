//! DeepSpeed configurations and the flags that stand beside them, as a user combines them.

use std::path::Path;

use serde_json::Value;

use crate::support::{Files, Printed, Runs, fails, lines, succeeds, temp};

/// Trains on one rank with the configuration `text` and the flags `more`.
fn run(dir: &Path, text: &str, more: &str) -> std::process::Output {
    dir.write("ds.json", text);
    let _ = std::fs::remove_dir_all(dir.join("saved"));
    let fixed = "--config ds.json --ranks 1 --seq-len 8 --threads 1 --checkpoint saved";
    dir.tiny_output(&format!("{fixed} {more}"))
}

/// The steps of a run that must succeed, and its output.
fn steps(dir: &Path, text: &str, more: &str) -> (Vec<Value>, String) {
    let _ = std::fs::remove_file(dir.join("metrics"));
    let out = succeeds(&run(dir, text, &format!("--metrics metrics {more}")));
    (lines(&dir.join("metrics")), out)
}

fn figures(steps: &[Value], key: &str) -> Vec<f64> {
    steps
        .iter()
        .map(|step| step[key].as_f64().unwrap())
        .collect()
}

fn assert_near(got: &[f64], expected: &[f64], context: &str) {
    assert_eq!(got.len(), expected.len(), "{context}");
    for (got, expected) in got.iter().zip(expected) {
        assert!(
            (got - expected).abs() <= 1e-12 * expected.abs(),
            "{context}: {got} {expected}"
        );
    }
}

/// The five templates of accelerate have these values.
const AUTO: &str = r#"{
    "fp16": {"enabled": "auto", "initial_scale_power": 12}, "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {
        "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_gather_16bit_weights_on_model_save": "auto"},
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto"
}"#;

/// The lines `auto: ` of the output, key by key: one for each block of the configuration.
fn assert_autos(out: &str, expected: &[&str]) {
    let lines: Vec<&str> = out
        .lines()
        .filter(|line| line.starts_with("auto: "))
        .collect();
    let blocks: Vec<&str> = lines
        .iter()
        .map(|line| line["auto: ".len()..].split_once(' ').unwrap().0)
        .map(|key| key.split_once('.').map_or("", |k| k.0))
        .collect();
    assert!(blocks.is_sorted_by(|one, next| one < next), "{out}");
    let line = lines.join(", ");
    for part in expected {
        let part = part.replacen(' ', " = ", 1);
        line.shows(&[&part]);
    }
}

#[test]
fn auto_is_resolved_as_by_hugging_face() {
    let dir = &temp();
    let (run, out) = steps(dir, AUTO, "--steps 5");
    // The model has 64 channels. The warm-up has DeepSpeed's least 2 steps: rates 0, 0, lr; then to
    // 0 at step 5.
    assert_autos(
        &out,
        &[
            "fp16.enabled false",
            "bf16.enabled false",
            "optimizer.params.lr 0.001",
            "optimizer.params.betas [0.9,0.999]",
            "optimizer.params.eps 1e-8",
            "optimizer.params.weight_decay 0.01",
            "scheduler.params.total_num_steps 5",
            "scheduler.params.warmup_num_steps 2",
            "scheduler.params.warmup_max_lr 0.001",
            "scheduler.params.warmup_min_lr 0",
            "zero_optimization.reduce_bucket_size 4096",
            "zero_optimization.stage3_prefetch_bucket_size 3686",
            "zero_optimization.stage3_param_persistence_threshold 640",
            "gradient_clipping 1",
            "train_batch_size 1",
            "train_micro_batch_size_per_gpu 1",
            "gradient_accumulation_steps 1",
        ],
    );

    assert_near(
        &figures(&run, "lr"),
        &[0.0, 0.0, 1e-3, 1e-3, 1e-3 * 2.0 / 3.0],
        "two steps of warm-up",
    );

    let flags = "--steps 4 --lr 3e-3 --warmup-steps 3 --clip 0.5 --weight-decay 0.2 --betas 0.8,0.95 \
                 --eps 1e-6 --grad-accum 2";
    let (run, out) = steps(dir, AUTO, flags);
    assert_autos(
        &out,
        &[
            "optimizer.params.lr 0.003",
            "optimizer.params.betas [0.8,0.95]",
            "optimizer.params.eps 1e-6",
            "optimizer.params.weight_decay 0.2",
            "scheduler.params.total_num_steps 4",
            "scheduler.params.warmup_num_steps 3",
            "scheduler.params.warmup_max_lr 0.003",
            "gradient_clipping 0.5",
            "train_batch_size 2",
            "gradient_accumulation_steps 2",
        ],
    );

    let ln = |n: f64| n.ln() / 3f64.ln();
    assert_near(
        &figures(&run, "lr"),
        &[0.0, 0.0, 3e-3 * ln(2.0), 3e-3],
        "flags",
    );
}

#[test]
fn auto_precision_is_that_of_the_flag() {
    let dir = &temp();
    let (run, out) = steps(dir, AUTO, "--dtype fp16 --steps 1");
    assert_autos(&out, &["fp16.enabled true", "bf16.enabled false"]);
    assert_eq!(
        figures(&run, "loss_scale"),
        [4096.0],
        "initial_scale_power 12"
    );
    let (_, out) = steps(dir, AUTO, "--dtype bf16 --steps 1");
    assert_autos(&out, &["fp16.enabled false", "bf16.enabled true"]);
    out.shows(&["parameters in bf16"]);
    // The flag wins over both blocks.
    let text = r#"{"bf16": {"enabled": true}, "fp16": {"enabled": false, "loss_scale": 128}}"#;
    let (run, _) = steps(dir, text, "--dtype fp16 --steps 1");
    assert_eq!(figures(&run, "loss_scale"), [128.0]);
    let text = r#"{"bf16": {"enabled": true}, "communication_data_type": "bf16"}"#;
    let (_, out) = steps(dir, text, "--dtype fp32 --steps 1");
    out.shows(&["note: communication_data_type bf16 is ignored: it is fp32"]);
}

/// A resumed run keeps the schedule that `"auto"` gave the first.
#[test]
fn resume_keeps_the_resolved_schedule() {
    let dir = &temp();
    let rates = |more: &str, metrics: &str| {
        let fixed = "--config ds.json --ranks 1 --seq-len 8 --threads 1 --checkpoint a";
        dir.tiny(&format!("{fixed} --metrics {metrics} {more}"));
        figures(&lines(&dir.join(metrics)), "lr")
    };

    dir.write("ds.json", AUTO);
    let first = rates("--steps 4 --lr 2e-3", "first");
    assert_near(&first, &[0.0, 0.0, 2e-3, 2e-3], "first");
    // The decay ends at step 4, that of the first run.
    let rest = rates("--steps 6 --resume a", "rest");
    assert_near(&rest, &[1e-3, 0.0], "rest");
}

#[test]
fn flags_win_over_a_configured_schedule_or_say_no() {
    let dir = &temp();
    let with = |kind: &str, params: &str| {
        format!(r#"{{"scheduler": {{"type": "{kind}", "params": {{{params}}}}}}}"#)
    };
    let linear = r#""warmup_num_steps": 2, "warmup_type": "linear", "warmup_max_lr": 0.5"#;
    let warmup = with("WarmupLR", linear);
    let decay = with(
        "WarmupDecayLR",
        &format!(r#"{linear}, "total_num_steps": 4"#),
    );
    let cosine = with(
        "WarmupCosineLR",
        r#""warmup_num_steps": 2, "warmup_type": "linear", "total_num_steps": 4"#,
    );
    let rates =
        |text: &str, more: &str| figures(&steps(dir, text, &format!("--steps 4 {more}")).0, "lr");

    for (text, flags) in [
        (&warmup, "--lr 0.002"),
        (&decay, "--lr 0.002"),
        (&decay, "--lr 0.003 --warmup-steps 3"),
    ] {
        let context = format!("{flags}, {text}");
        assert_near(&rates(text, flags), &[0.0, 0.0, 0.001, 0.002], &context);
    }
    // The decay stays: at position 4, after a warm-up of 2, (4 - 3) / (4 - 2) of the rate is left.
    let (longer, out) = steps(dir, &decay, "--lr 0.002 --steps 5 --warmup-steps 2");
    assert_near(&figures(&longer, "lr")[4..], &[0.001], "decay");
    out.shows(&["the learning rate decays until step 4, the run ends at step 5"]);
    assert_near(
        &rates(&cosine, "--lr 0.002")[..3],
        &[0.0, 0.0, 0.001],
        "--lr, WarmupCosineLR",
    );
    let replaced = steps(dir, &decay, "--steps 2 --schedule linear --lr 0.002");
    assert_near(&figures(&replaced.0, "lr"), &[0.002, 0.001], "--schedule");

    assert!(
        replaced
            .1
            .contains("note: --schedule linear replaces the scheduler"),
        "{}",
        replaced.1
    );

    let cycle = with(
        "OneCycle",
        r#""cycle_min_lr": 0.001, "cycle_max_lr": 0.002"#,
    );
    let range = with("LRRangeTest", "");

    let refused: [(&str, &str, &[&str]); 8] = [
        (&cycle, "--lr 0.1", &["--lr 0.1", "OneCycle", "--schedule"]),
        (
            &cycle,
            "--warmup-steps 3",
            &["--warmup-steps 3", "OneCycle", "no warm-up"],
        ),
        (
            &cycle,
            "--betas 0.9,0.95",
            &["--betas 0.9,0.95", "OneCycle", "cycle_momentum"],
        ),
        (&range, "--lr 0.1", &["--lr 0.1", "LRRangeTest"]),
        (
            &warmup,
            "--warmup-steps 0",
            &["--warmup-steps 0", "WarmupLR", "at least 2", "--schedule"],
        ),
        (
            &decay,
            "--min-lr 1e-5",
            &["--min-lr 0.00001", "WarmupDecayLR", "--schedule"],
        ),
        (
            &decay,
            "--decay-steps 2",
            &["--decay-steps 2", "--schedule wsd"],
        ),
        ("{}", "--min-lr 1e-5", &["--min-lr 0.00001", "constant"]),
    ];

    for (text, flag, parts) in refused {
        fails(&run(dir, text, flag), 2, parts);
    }
    dir.misuses("train --betas 0.9", "two numbers, such as 0.9,0.95");
}

#[test]
fn schedules_by_flag_follow_their_formulas() {
    let dir = &temp();
    let rates = |more: &str| {
        let fixed = "--steps 10 --lr 0.008 --min-lr 0.001 --warmup-steps 2";
        figures(
            &steps(dir, "{}", &format!("{fixed} --schedule {more}")).0,
            "lr",
        )
    };

    let expected = |after: fn(f64) -> f64| {
        let after = (2..10).map(|k| 0.001 + 0.007 * after(f64::from(k)));
        [0.004, 0.008].into_iter().chain(after).collect::<Vec<_>>()
    };

    let linear = |k: f64| 1.0 - (k - 2.0) / 8.0;
    let cosine = |k: f64| 0.5 * (1.0 + (std::f64::consts::PI * (k - 2.0) / 8.0).cos());
    // The decay is the last fifth: positions 8 and 9.
    let wsd = |k: f64| if k < 8.0 { 1.0 } else { 1.0 - (k - 8.0) / 2.0 };
    let longer = |k: f64| if k < 6.0 { 1.0 } else { 1.0 - (k - 6.0) / 4.0 };
    assert_near(&rates("linear"), &expected(linear), "linear");
    assert_near(&rates("cosine"), &expected(cosine), "cosine");
    assert_near(&rates("wsd"), &expected(wsd), "wsd");
    assert_near(
        &rates("wsd --decay-steps 4"),
        &expected(longer),
        "--decay-steps",
    );

    let flags = "--schedule constant --warmup-steps 2 --steps 3";
    let constant = figures(&steps(dir, "{}", flags).0, "lr");
    assert_near(&constant, &[5e-4, 1e-3, 1e-3], "constant");
    for (flags, parts) in [
        (
            "--schedule wsd --warmup-steps 2 --decay-steps 2 --steps 3",
            &["2 steps of warm-up", "2 of decay", "3 steps"][..],
        ),
        ("--schedule cosine --min-lr 0.1", &["--min-lr 0.1", "0.001"]),
    ] {
        fails(&run(dir, "{}", flags), 2, parts);
    }
}

/// Sizes of pieces change neither losses nor norms, but how much is gathered ahead.
#[test]
fn sizes_act_and_keep_the_bits() {
    let dir = &temp();
    let with = |keys: &str| {
        let text = format!(r#"{{"zero_optimization": {{"stage": 3, {keys}}}}}"#);
        let (run, out) = steps(dir, &text, "--ranks 2 --steps 2");
        let buckets = run
            .iter()
            .map(|step| step["memory"]["buckets_bytes"].as_u64().unwrap())
            .max()
            .unwrap();
        (
            [figures(&run, "loss"), figures(&run, "grad_norm")],
            buckets,
            out,
        )
    };

    let (expected, ..) = with(r#""overlap_comm": true"#);
    let gathered = |sizes: &str| {
        let keys = format!(r#""stage3_param_persistence_threshold": 0, {sizes}"#);
        let (bits, bytes, _) = with(&keys);
        assert!(bits == expected, "{sizes}");
        bytes
    };
    let none = gathered(r#""stage3_prefetch_bucket_size": 0"#);
    let one = gathered(r#""stage3_prefetch_bucket_size": 1"#);
    // The budget holds two blocks of 49,984 elements.
    let two = gathered(r#""stage3_prefetch_bucket_size": 100000"#);
    let all = gathered(r#""stage3_prefetch_bucket_size": 1e9"#);
    assert!(
        none < one && one < two && two < all,
        "{none} {one} {two} {all}"
    );
    let limit = r#""stage3_prefetch_bucket_size": 1e9, "stage3_max_live_parameters": 100000"#;
    let limited = gathered(limit);
    assert!(limited < all, "{limited} {all}");
    // A limit that is too low is raised.
    for limit in [0, 100] {
        let (bits, _, out) = with(&format!(r#""stage3_max_live_parameters": {limit}"#));
        assert!(bits == expected, "{limit}");
        out.shows(&[&format!("stage3_max_live_parameters {limit} is less")]);
    }
    let (bits, _, out) = with(r#""stage3_max_live_parameters": 1000000000"#);
    assert!(bits == expected);
    out.omits(&["max_live_parameters"]);
    let (bits, _, out) = with(r#""sub_group_size": 0"#);
    assert!(bits == expected);
    out.shows(&["sub_group_size 0 is too small for one launch; using 65536"]);
}

#[test]
fn optimizer_keys_work_as_deepspeeds_do() {
    let dir = &temp();
    let adam = |corrected: bool| {
        format!(
            r#"{{"optimizer": {{"type": "Adam", "params": {{"lr": 1e-3, "bias_correction": {corrected}}}}}}}"#
        )
    };

    let (with, _) = steps(dir, &adam(true), "--steps 2");
    let (without, out) = steps(dir, &adam(false), "--steps 2");
    out.shows(&["no bias correction"]);
    // The first update differs, so the second loss does.
    assert_eq!(with[0]["loss"], without[0]["loss"]);
    assert_ne!(with[1]["loss"], without[1]["loss"]);
    // A scale of 2^32 overflows, and without hysteresis it never halves.
    let text = r#"{"fp16": {"enabled": true, "initial_scale_power": 32, "hysteresis": 0}}"#;
    let (run, out) = steps(dir, text, "--steps 4");
    assert_eq!(figures(&run, "loss_scale"), [4294967296.0; 4]);
    assert!(run.iter().all(|step| step["skipped"] == true), "{run:?}");
    out.shows(&["note: fp16.hysteresis 0", "never halved"]);
}

/// One configuration of each shape that tests/data/shipped_configurations.md lists.
#[test]
fn shapes_of_shipped_configurations() {
    let dir = &temp();
    let offload = r#""offload_optimizer": {"device": "cpu", "pin_memory": true}"#;
    let old = format!(
        r#"{{"bfloat16": {{"enabled": "auto"}}, "zero_optimization": {{"stage": 3, {offload},
        "offload_param": {{"device": "cpu", "pin_memory": true}}, "sub_group_size": 0,
        "stage3_max_live_parameters": 1e9, "stage3_gather_fp16_weights_on_model_save": true}}}}"#
    );

    let taken: [&str; 9] = [
        AUTO,
        // transformers and axolotl; the second also has names without the prefix and limits of 0.
        &old,
        r#"{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3, "overlap_comm": true, "sub_group_size": 0,
            "max_live_parameters": 0, "max_reuse_distance": 0, "gather_16bit_weights_on_model_save": true,
            "stage3_param_persistence_threshold": "auto", "reduce_bucket_size": "auto"}}"#,
        // accelerate: sequence parallelism is set up elsewhere.
        r#"{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 1,
            "train_batch_size": "auto", "seq_parallel_communication_data_type": "bf16"}"#,
        // LLaMA-Factory.
        r#"{"train_batch_size": "auto", "zero_allow_untested_optimizer": true, "zero_force_ds_cpu_optimizer": true,
            "fp16": {"enabled": false, "initial_scale_power": 16}, "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": 0, "allgather_bucket_size": 5e8, "round_robin_gradients": true},
            "comms_config": {"verbose": false}, "monitor_config": {"enabled": true}}"#,
        // axolotl.
        r#"{"zero_optimization": {"stage": 1}, "compile": {"disable": false, "backend": "inductor"},
            "bf16": {"enabled": true}, "fp16": {"enabled": "auto", "auto_cast": false}, "wall_clock_breakdown": false}"#,
        // DeepSpeedExamples.
        r#"{"train_batch_size": 1, "prescale_gradients": true, "gradient_predivide_factor": 8, "optimizer": {
            "type": "Adam", "params": {"lr": 4e-4, "weight_decay": 0.01, "bias_correction": false}}}"#,
        r#"{"train_micro_batch_size_per_gpu": "auto", "autotuning": {"enabled": false, "fast": true},
            "fp16": {"enabled": true, "initial_scale_power": 12}}"#,
        r#"{"train_batch_size": 1, "zero_optimization": false, "optimizer": {"type": "Adam",
            "params": {"lr": 1e-3, "torch_adam": true, "adam_w_mode": true}}, "cuda_visible_devices": 0,
            "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": false}}}}"#,
    ];

    for text in taken {
        succeeds(&run(dir, text, "--steps 1"));
    }
    let refused = [
        (
            r#"{"optimizer": {"type": "Lamb", "params": {"max_coeff": 0.3}}}"#,
            "Lamb",
        ),
        (
            r#"{"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 400}}}"#,
            "OneBitAdam",
        ),
        (r#"{"optimizer": {"type": "ZeroOneAdam"}}"#, "ZeroOneAdam"),
        (
            r#"{"data_efficiency": {"enabled": true, "data_routing": {"enabled": true}}}"#,
            "data_efficiency",
        ),
        (
            r#"{"tensor_parallel": {"tp": {"tp_size": 2}}}"#,
            "tensor_parallel.tp",
        ),
        (
            r#"{"progressive_layer_drop": {"enabled": true, "theta": 0.5}}"#,
            "progressive_layer_drop",
        ),
        (
            r#"{"compression_training": {"layer_reduction": {"enabled": true},
            "weight_quantization": {"shared_parameters": {"enabled": true}}}}"#,
            "compression_training",
        ),
        (
            r#"{"zero_optimization": {"stage": 2, "find_unused_parameters": true}}"#,
            "find_unused_parameters",
        ),
        (
            r#"{"train_batch_size": CONFIG_BATCH_SIZE}"#,
            "line 1 column 22",
        ),
    ];

    for (text, part) in refused {
        fails(&run(dir, text, ""), 2, &[part, "ds.json"]);
    }
}
