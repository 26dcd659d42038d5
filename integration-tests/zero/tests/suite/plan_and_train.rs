//! `zero plan` predicts the memory and traffic that `zero train` measures on the host, to the byte:
//! model state, buckets, gathered units, activations, the peak and bytes sent. tests/cuda compares
//! a GPU's.

use std::path::Path;

use serde_json::{Value, json};
use zero_models::gpt2::config::GptConfig;
use zero_models::llama::config::{Family, LlamaConfig};

use crate::place;
use crate::support::write_model;

fn zero(line: &str) -> String {
    let output = place::zero()
        .args(line.split_whitespace())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{line}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// Trains two steps on two ranks and returns the metrics of the last.
fn trained(folder: &Path, model: &str, stage: usize, run: &str) -> Value {
    trained_on(2, folder, model, stage, run)
}

fn trained_on(ranks: usize, folder: &Path, model: &str, stage: usize, run: &str) -> Value {
    let (data, metrics) = (folder.join("data.txt"), folder.join("metrics.jsonl"));
    std::fs::write(
        &data,
        "a text that is long enough to draw a few rows of 64 tokens from\n".repeat(20),
    )
    .unwrap();
    zero(&format!(
        "train --no-checkpoint --model {model} --ranks {ranks} --stage {stage} --steps 2 --threads 1 --data {} --metrics {} {run}",
        data.display(),
        metrics.display()
    ));
    let lines = std::fs::read_to_string(&metrics).unwrap();
    serde_json::from_str(lines.lines().last().unwrap()).unwrap()
}

#[test]
fn plan_matches_training() {
    for run in [
        // On a GPU passes write gradients to buckets that hold a unit, and no unit needs scratch.
        // On the host it does.
        "--dtype fp32 --micro-batch 2 --seq-len 64 --bucket-elems 1000",
        "--dtype bf16 --micro-batch 1 --seq-len 64 --grad-accum 2 --bucket-elems 100000",
        "--dtype fp32 --micro-batch 2 --seq-len 32 --grad-accum 3 --activation-checkpointing --bucket-elems 1000",
    ] {
        compare("nano", run);
    }
}

/// Wide and narrow feed-forward layers, and an embedding as large as several blocks.
#[test]
fn plan_matches_training_of_other_shapes() {
    for (n_inner, tied_head) in [(96, true), (5, false)] {
        let folder = tempfile::tempdir().unwrap();
        let preset = GptConfig::preset("nano").unwrap();
        let config = GptConfig {
            n_embd: 16,
            n_head: 2,
            n_positions: 32,
            n_layer: 5,
            n_inner,
            tied_head,
            ..preset
        };
        write_model(folder.path(), &config.into());
        compare(
            folder.path().to_str().unwrap(),
            "--dtype fp32 --micro-batch 3 --seq-len 32 --bucket-elems 1000",
        );
    }
}

/// Grouped queries, a width of heads that does not divide the hidden size, biases or norms of heads, a tied
/// and an untied head.
#[test]
fn plan_matches_training_of_the_llama_family() {
    let llama = LlamaConfig {
        vocab_size: 256,
        max_positions: 32,
        hidden: 24,
        layers: 4,
        heads: 4,
        kv_heads: 2,
        head_dim: 10,
        intermediate: 40,
        ..LlamaConfig::llama2()
    };
    let qwen2 = LlamaConfig {
        family: Family::Qwen2,
        qkv_bias: true,
        tied_head: true,
        ..llama.clone()
    };
    let qwen3 = LlamaConfig {
        family: Family::Qwen3,
        kv_heads: 1,
        ..llama.clone()
    };
    let runs = [
        (llama, "--dtype bf16 --micro-batch 2"),
        (qwen2, "--dtype fp32 --micro-batch 1 --grad-accum 2"),
        (
            qwen3,
            "--dtype fp32 --micro-batch 2 --activation-checkpointing",
        ),
    ];
    for (config, run) in runs {
        let folder = tempfile::tempdir().unwrap();
        write_model(folder.path(), &config.into());
        let run = format!("{run} --seq-len 32 --bucket-elems 1000");
        compare(folder.path().to_str().unwrap(), &run);
    }
}

/// DeepSpeed's buckets have 5e8 elements; both programs limit them to the largest unit.
#[test]
fn bucket_of_a_configuration_is_limited() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ds.json");
    std::fs::write(
        &file,
        json!({ "zero_optimization": { "stage": 2 } }).to_string(),
    )
    .unwrap();
    let run = format!("--micro-batch 1 --seq-len 64 --config {}", file.display());
    let planned: Value =
        serde_json::from_str(&zero(&format!("plan --model nano --gpus 2 --json {run}"))).unwrap();
    let measured = trained(folder.path(), "nano", 2, &run);
    assert_eq!(
        measured["memory"]["buckets_bytes"],
        planned["stages"][2]["gpu"]["buckets_bytes"]
    );
}

/// Groups of ranks on machines of one, two and four ranks.
#[test]
fn plan_matches_training_in_groups() {
    let run = "--dtype bf16 --micro-batch 1 --seq-len 64 --grad-accum 2 --bucket-elems 100000";
    for (groups, least_stage) in [
        ("--shard-group 2", 1),
        ("--shard-group 2 --shard-optimizer world", 1),
        ("--hpz 2", 3),
    ] {
        for of_node in [1, 2, 4] {
            for stage in least_stage..4 {
                compare_on(
                    4,
                    ("nano", stage),
                    &format!("--nodes {}", 4 / of_node),
                    &format!("--ranks-per-node {of_node}"),
                    &format!("{run} {groups}"),
                );
            }
        }
    }
}

/// Collectives over all ranks in one ring and in two levels, as `auto` and each flag choose.
#[test]
fn plan_matches_training_of_routes() {
    let run = "--dtype bf16 --micro-batch 1 --seq-len 64 --grad-accum 2 --bucket-elems 100000";
    for (of_node, route) in [
        (2, ""),
        (1, ""),
        (2, "--collectives flat"),
        (2, "--collectives two-level"),
    ] {
        for stage in 0..4 {
            compare_on(
                4,
                ("nano", stage),
                &format!("--nodes {}", 4 / of_node),
                &format!("--ranks-per-node {of_node}"),
                &format!("{run} {route}"),
            );
        }
    }
}

/// Ranks that share sequences, on machines with whole groups of them or parts of one. In fp32 a GPU
/// exchanges as many bytes as the host.
#[test]
fn plan_matches_training_of_shared_sequences() {
    let run = "--dtype fp32 --micro-batch 1 --seq-len 64 --grad-accum 2 --bucket-elems 100000";
    for (share, of_node, checkpointing) in
        [(2, 4, ""), (2, 1, ""), (4, 2, "--activation-checkpointing")]
    {
        compare_on(
            4,
            ("nano", 2),
            &format!("--nodes {}", 4 / of_node),
            &format!("--ranks-per-node {of_node}"),
            &format!("{run} --shard-group 2 --ulysses {share} {checkpointing}"),
        );
    }
}

/// Ranks with parts of the parameters, on machines of whole groups of them. In fp32 a GPU sums as many
/// bytes as the host.
#[test]
fn plan_matches_training_of_parts() {
    let run = "--dtype fp32 --micro-batch 1 --seq-len 64 --grad-accum 2 --bucket-elems 100000";
    let partitions = "--activation-checkpointing --partition-activations";
    for (parts, of_node, stage, more) in [(2, 4, 1, ""), (2, 2, 2, partitions), (4, 4, 2, "")] {
        compare_on(
            4,
            ("nano", stage),
            &format!("--nodes {}", 4 / of_node),
            &format!("--ranks-per-node {of_node}"),
            &format!("{run} --tensor-parallel {parts} {more}"),
        );
    }
}

/// Compares the plan and the measurements of each stage.
fn compare(model: &str, run: &str) {
    for stage in 0..4 {
        compare_on(2, (model, stage), "", "", run);
    }
}

fn compare_on(
    ranks: usize,
    (model, stage): (&str, usize),
    planned: &str,
    trained: &str,
    run: &str,
) {
    let planned: Value = serde_json::from_str(&zero(&format!(
        "plan --model {model} --gpus {ranks} --json {planned} {run}"
    )))
    .unwrap();

    let folder = tempfile::tempdir().unwrap();
    let metrics = trained_on(
        ranks,
        folder.path(),
        model,
        stage,
        &format!("{trained} {run}"),
    );
    let (measured, planned) = (&metrics["memory"], &planned["stages"][stage]);
    let bytes = |value: &Value| value.as_u64().unwrap();
    for key in ["params_bytes", "grads_bytes", "optimizer_bytes"] {
        assert_eq!(
            measured[key], planned["gpu"][key],
            "{key} at stage {stage}: {run}"
        );
    }
    let (sent, most) = (&metrics["comm_bytes"], &planned["sent"]);
    assert_eq!(
        sent["reduce_scatter"], most["reduce_scatter_bytes"],
        "stage {stage}: {run}"
    );
    assert_eq!(
        sent["all_reduce"], most["all_reduce_bytes"],
        "stage {stage}: {run}"
    );
    assert_eq!(
        sent["all_to_all"], most["all_to_all_bytes"],
        "stage {stage}: {run}"
    );
    // Less by the gathers that stage 3 does not need.
    let most_between = bytes(&most["node_egress_bytes"]);
    let between = bytes(&sent["between"]);
    assert!(
        if stage == 3 {
            between <= most_between
        } else {
            between == most_between
        },
        "stage {stage}: {between} between nodes, planned {most_between}: {run}"
    );
    // Stage 3 keeps the unit that ends forward and starts backward.
    let least = if stage == 3 {
        bytes(&most["all_gather_bytes"]) / 2
    } else {
        bytes(&most["all_gather_bytes"])
    };
    assert!(
        (least..=bytes(&most["all_gather_bytes"])).contains(&bytes(&sent["all_gather"])),
        "stage {stage}: {run}"
    );
    let moving = bytes(&planned["gpu"]["buckets_bytes"]) + bytes(&planned["gpu"]["gathered_bytes"]);
    assert_eq!(
        measured["buckets_bytes"], moving,
        "buckets and gathered units at stage {stage}: {run}"
    );
    let cores = &planned["on_cores"];
    assert_eq!(
        measured["activations_bytes"], cores["activations"],
        "stage {stage}: {run}"
    );
    // Statistics and sums of a few bytes per rank are not planned.
    let parts = ["state", "activations", "buckets", "gathered", "workspace"];
    let total: u64 = parts.iter().map(|part| bytes(&cores[part])).sum();
    let peak = bytes(&measured["peak_bytes"]);
    assert!(
        (total..total + 1024).contains(&peak),
        "stage {stage}: {peak}, planned {total}: {run}"
    );
}
