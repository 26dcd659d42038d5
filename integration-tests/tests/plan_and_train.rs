//! `zero plan` says what `zero train` on the host then measures, to the byte: model state, buckets, gathered
//! units, what is sent, and in fp32 also activations and the peak.

#[path = "common/place.rs"]
mod place;

use std::path::Path;

use serde_json::Value;

fn zero(line: &str) -> String {
    let output = place::zero().args(line.split_whitespace()).output().unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The metrics of the last of a few steps.
fn trained(folder: &Path, stage: usize, run: &str) -> Value {
    let (data, metrics) = (folder.join("data.txt"), folder.join("metrics.jsonl"));
    std::fs::write(&data, "a text that is long enough to draw a few rows of 64 tokens from\n".repeat(20)).unwrap();
    zero(&format!(
        "train --model nano --ranks 2 --stage {stage} --steps 2 --threads 1 --data {} --metrics {} {run}",
        data.display(),
        metrics.display()
    ));
    let lines = std::fs::read_to_string(&metrics).unwrap();
    serde_json::from_str(lines.lines().last().unwrap()).unwrap()
}

#[test]
fn training_measures_what_was_planned() {
    for run in [
        "--dtype fp32 --micro-batch 2 --seq-len 64",
        "--dtype bf16 --micro-batch 1 --seq-len 64 --grad-accum 2 --bucket-elems 100000",
        "--dtype fp32 --micro-batch 2 --seq-len 32 --activation-checkpointing",
    ] {
        let planned: Value =
            serde_json::from_str(&zero(&format!("plan --model nano --gpus 2 --json {run}"))).unwrap();
        for stage in 0..4 {
            let folder = tempfile::tempdir().unwrap();
            let metrics = trained(folder.path(), stage, run);
            let (measured, planned) = (&metrics["memory"], &planned["stages"][stage]);
            let bytes = |value: &Value| value.as_u64().unwrap();
            for key in ["params_bytes", "grads_bytes", "optimizer_bytes"] {
                assert_eq!(measured[key], planned["gpu"][key], "{key} at stage {stage}: {run}");
            }
            let (sent, most) = (&metrics["comm_bytes"], &planned["sent"]);
            assert_eq!(sent["reduce_scatter"], most["reduce_scatter_bytes"], "stage {stage}: {run}");
            assert_eq!(sent["all_reduce"], most["all_reduce_bytes"], "stage {stage}: {run}");
            // Stage 3 need not gather a unit again that backward uses first.
            let least =
                if stage == 3 { bytes(&most["all_gather_bytes"]) / 2 } else { bytes(&most["all_gather_bytes"]) };
            assert!(
                (least..=bytes(&most["all_gather_bytes"])).contains(&bytes(&sent["all_gather"])),
                "stage {stage}: {run}"
            );
            let moving = bytes(&planned["gpu"]["buckets_bytes"]) + bytes(&planned["gpu"]["gathered_bytes"]);
            assert_eq!(measured["buckets_bytes"], moving, "buckets and gathered units at stage {stage}: {run}");
            if run.contains("fp32") {
                // The host computes in fp32; with 16-bit parameters its activations are twice as wide, and it
                // has fp32 copies of parameters, which a GPU does not need.
                assert_eq!(
                    measured["activations_bytes"], planned["gpu"]["activations_bytes"],
                    "stage {stage}: {run}"
                );
                // Beside what is planned there are the votes and sums of a few bytes a rank.
                let (peak, total) = (bytes(&measured["peak_bytes"]), bytes(&planned["gpu"]["total_bytes"]));
                assert!((total..total + 1024).contains(&peak), "stage {stage}: {peak}, planned {total}: {run}");
            }
        }
    }
}
