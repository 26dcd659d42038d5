//! `--breakdown` and the pictures of `--report`.

use std::path::Path;

use serde_json::Value;

use crate::support::{data, lines, succeeds, tiny, words, zero};

/// Runs three steps of the tiny model in `dir`; returns the output.
fn run(dir: &Path, more: &[&str]) -> String {
    let (model, tokens) = (data("model"), data("tokens.u16.bin"));
    let (flags, pairs): (Vec<&str>, Vec<&str>) =
        more.iter().partition(|flag| **flag == "--breakdown");
    succeeds(&zero(dir, &[tiny(&model, &tokens, &pairs), flags].concat()))
}

fn sum(parts: &Value) -> f64 {
    parts
        .as_object()
        .unwrap()
        .values()
        .map(|ms| ms.as_f64().unwrap())
        .sum()
}

#[test]
fn breakdown_sums_to_the_wall_time() {
    let dir = tempfile::tempdir().unwrap();
    for stage in ["0", "1", "2", "3"] {
        let metrics = format!("{stage}.jsonl");
        let flags = [
            "--breakdown",
            "--stage",
            stage,
            "--metrics",
            &metrics,
            "--checkpoint",
            stage,
            "--checkpoint-every",
            "1",
        ];
        let out = run(dir.path(), &flags);
        for text in [
            "median ms",
            "forward",
            "blocks",
            "optimizer",
            "host wait",
            "6 N + 12 L C T",
            "fp32 matrix",
        ] {
            assert!(out.contains(text), "{text:?} is not in: {out}");
        }
        let steps = lines(&dir.path().join(&metrics));
        assert_eq!(steps.len(), 3);
        for step in &steps {
            let breakdown = &step["breakdown"];
            let (wall, parts) = (breakdown["wall_ms"].as_f64().unwrap(), &breakdown["parts"]);
            assert!((sum(parts) / wall - 1.0).abs() < 1e-9, "{breakdown}");
            assert!(wall >= step["step_ms"].as_f64().unwrap(), "{step}");
            for pass in ["forward_ms", "backward_ms"] {
                let of_unit = |unit: &str| breakdown["units"][unit][pass].as_f64().unwrap();
                let of_units: f64 = ["embedding", "block", "head"]
                    .into_iter()
                    .map(of_unit)
                    .sum();
                assert!(
                    of_units > 0.0 && (of_units / parts[pass].as_f64().unwrap() - 1.0).abs() < 1e-9
                );
            }
            assert!(breakdown["comm"]["reduce_ms"].as_f64().unwrap() > 0.0);
            assert!(
                breakdown["tflops"].as_f64().unwrap() > 0.0
                    && breakdown["mfu"].as_f64().unwrap() > 0.0
            );
        }
    }
}

#[test]
fn breakdown_only_on_request() {
    let dir = tempfile::tempdir().unwrap();
    let config = r#"{"zero_optimization": {"stage": 2}, "wall_clock_breakdown": true}"#;
    std::fs::write(dir.path().join("ds.json"), config).unwrap();
    let with = run(dir.path(), &["--config", "ds.json", "--metrics", "with"]);
    assert!(
        !with.contains("is ignored") && with.contains("median ms"),
        "{with}"
    );
    let without = run(dir.path(), &["--metrics", "without"]);
    assert!(!without.contains("median ms"), "{without}");
    assert!(
        lines(&dir.path().join("with"))
            .iter()
            .all(|step| step["breakdown"].is_object())
    );
    assert!(
        lines(&dir.path().join("without"))
            .iter()
            .all(|step| step.get("breakdown").is_none())
    );
}

/// At other ranks a step has other tokens: those before the resume still count.
#[test]
fn tokens_and_time_left_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    run(dir.path(), &["--metrics", "m", "--checkpoint", "c"]);
    run(
        dir.path(),
        &words("--resume c --steps 5 --ranks 1 --metrics m"),
    );

    let steps = lines(&dir.path().join("m"));
    let seen: Vec<u64> = steps
        .iter()
        .map(|step| step["tokens_seen"].as_u64().unwrap())
        .collect();
    assert_eq!(seen, [64, 128, 192, 224, 256]);
    let left: Vec<f64> = steps
        .iter()
        .map(|step| step["eta_s"].as_f64().unwrap())
        .collect();
    assert!(
        left.iter()
            .enumerate()
            .all(|(i, left)| (*left == 0.0) == (i == 2 || i == 4)),
        "{left:?}"
    );
}

#[test]
fn report_shows_memory_and_its_peak() {
    let dir = tempfile::tempdir().unwrap();
    for stage in ["0", "3"] {
        let out = run(dir.path(), &["--stage", stage, "--report", stage]);
        assert!(
            out.contains("at the peak") && out.contains("the peak is rank 0's"),
            "{out}"
        );
        let report = dir.path().join(stage);
        let summary: Value =
            serde_json::from_slice(&std::fs::read(report.join("summary.json")).unwrap()).unwrap();
        let (peak, last) = (
            &summary["peak"],
            summary["steps"].as_array().unwrap().last().unwrap(),
        );
        // The copy for a checkpoint is not the pool's.
        let held = last["memory"]["peak_bytes"].as_u64().unwrap()
            - last["memory"]["staging_bytes"].as_u64().unwrap();
        assert_eq!(peak["bytes"], held);
        assert_eq!(sum(&peak["holders"]), peak["bytes"].as_f64().unwrap());
        assert!(
            (0.0..=1.0).contains(&peak["fraction_of_step"].as_f64().unwrap()),
            "{peak}"
        );
        // Only stage 3 allocates during a step.
        assert_eq!(
            peak["moment"] == "during the whole step",
            stage == "0",
            "{peak}"
        );
        for picture in ["memory.svg", "loss.svg"] {
            let svg = std::fs::read_to_string(report.join(picture)).unwrap();
            assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN"), "{svg}");
        }
    }
}

/// The host's update is counted, be it hidden or not; parameters on NVMe need buffers that a small
/// model does not repay.
#[test]
fn offload_is_measured() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("s")).unwrap();
    let offload = ["--offload", "nvme:s", "--offload-params", "nvme:s"];
    let out = run(
        dir.path(),
        &[
            &offload[..],
            &["--breakdown", "--metrics", "m", "--checkpoint", "c"],
        ]
        .concat(),
    );

    assert!(out.contains("  host's update, all of it"), "{out}");
    assert!(
        out.contains("note: --offload-params nvme saves no memory here: a rank needs "),
        "{out}"
    );

    for step in &lines(&dir.path().join("m"))[1..] {
        assert!(
            step["breakdown"]["update_ms"].as_f64().unwrap() > 0.0,
            "{step}"
        );
    }
}
