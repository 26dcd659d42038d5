//! `zero plan` predicts the memory and traffic that `zero train` measures on the host, to the byte:
//! model state, buckets, gathered units, activations, the peak and bytes sent. tests/cuda compares
//! a GPU's.

use std::path::Path;

use serde_json::{Value, json};
use zero_models::gpt2::config::GptConfig;
use zero_models::llama::config::{Family, LlamaConfig};

use crate::support::{Files, Printed, Runs, lines, on_disk, succeeds, write_model};

/// Trains two steps on `ranks` ranks and returns the metrics of the last.
fn trained(ranks: usize, folder: &Path, model: &str, stage: usize, run: &str) -> Value {
    let text = "a text that is long enough to draw a few rows of 64 tokens from\n".repeat(20);
    folder.write("data.txt", text);
    folder.zero(&format!(
        "train --no-checkpoint --model {model} --ranks {ranks} --stage {stage} --steps 2 --threads 1 \
         --data data.txt --metrics metrics.jsonl {run}"
    ));
    lines(&folder.join("metrics.jsonl")).pop().unwrap()
}

/// Each head's matrices alone are other updates, and the run says so.
#[test]
fn heads_of_muon_are_a_flag() {
    let [all, heads] = ["", " --muon-heads"].map(|flag| {
        let run = format!("--optimizer muon{flag}");
        trained(2, &on_disk(), "nano", 3, &run)["loss"].take()
    });
    assert_ne!(all, heads);

    let folder = &on_disk();
    folder.write("data.txt", "a text that is long enough. ".repeat(50));
    let run = "train --no-checkpoint --model nano --steps 1 --data data.txt";
    let shown = succeeds(&folder.output(&format!("{run} --optimizer muon --muon-heads")));
    shown.shows(&["original, each head alone"]);
    folder.fails(
        &format!("{run} --muon-heads"),
        2,
        &["--muon-heads is Muon's: add --optimizer muon"],
    );
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
        let folder = &on_disk();
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
        write_model(folder, &config.into());
        compare(
            folder.to_str().unwrap(),
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
        let folder = &on_disk();
        write_model(folder, &config.into());
        let run = format!("{run} --seq-len 32 --bucket-elems 1000");
        compare(folder.to_str().unwrap(), &run);
    }
}

/// DeepSpeed's buckets have 5e8 elements; both programs limit them to the largest unit.
#[test]
fn bucket_of_a_configuration_is_limited() {
    let folder = &on_disk();
    let config = json!({ "zero_optimization": { "stage": 2 } });
    folder.write("ds.json", config.to_string());
    let run = "--micro-batch 1 --seq-len 64 --config ds.json";
    let planned = folder.json(&format!("plan --model nano --gpus 2 --json {run}"));
    let measured = trained(2, folder, "nano", 2, run);
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
    let folder = &on_disk();
    let planned = folder.json(&format!(
        "plan --model {model} --gpus {ranks} --json {planned} {run}"
    ));
    let metrics = self::trained(ranks, folder, model, stage, &format!("{trained} {run}"));
    let (measured, planned) = (&metrics["memory"], &planned["stages"][stage]);
    let (sent, most) = (&metrics["comm_bytes"], &planned["sent"]);
    let gpu = &planned["gpu"];
    let cores = &planned["on_cores"];
    let bytes = |value: &Value| value.as_u64().unwrap();
    let moving = bytes(&gpu["buckets_bytes"]) + bytes(&gpu["gathered_bytes"]);
    for (what, got, expected) in [
        (
            "parameters",
            &measured["params_bytes"],
            &gpu["params_bytes"],
        ),
        ("gradients", &measured["grads_bytes"], &gpu["grads_bytes"]),
        (
            "optimizer state",
            &measured["optimizer_bytes"],
            &gpu["optimizer_bytes"],
        ),
        (
            "buckets and gathered units",
            &measured["buckets_bytes"],
            &moving.into(),
        ),
        (
            "activations",
            &measured["activations_bytes"],
            &cores["activations"],
        ),
        (
            "reduce-scatter",
            &sent["reduce_scatter"],
            &most["reduce_scatter_bytes"],
        ),
        ("all-reduce", &sent["all_reduce"], &most["all_reduce_bytes"]),
        ("all-to-all", &sent["all_to_all"], &most["all_to_all_bytes"]),
    ] {
        assert_eq!(got, expected, "{what} at stage {stage}: {run}");
    }

    // Stage 3 sends less between nodes by the gathers that it does not need, and keeps the unit that
    // ends forward and starts backward. Statistics and sums of a few bytes per rank are not planned.
    let between = bytes(&most["node_egress_bytes"]);
    let gathered = bytes(&most["all_gather_bytes"]);
    let parts = ["state", "activations", "buckets", "gathered", "workspace"];
    let total: u64 = parts.iter().map(|part| bytes(&cores[part])).sum();
    let (least_between, least_gathered) = match stage {
        3 => (0, gathered / 2),
        _ => (between, gathered),
    };
    for (what, got, expected) in [
        ("between nodes", &sent["between"], least_between..=between),
        ("all-gather", &sent["all_gather"], least_gathered..=gathered),
        ("peak", &measured["peak_bytes"], total..=total + 1023),
    ] {
        assert!(
            expected.contains(&bytes(got)),
            "{what} at stage {stage}: {got}, planned {expected:?}: {run}"
        );
    }
}
