//! `--breakdown` and the pictures of `--report`.

use serde_json::Value;

use crate::support::{Files, Printed, Runs, json, lines, on_disk};

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
    let dir = &on_disk();
    for stage in ["0", "1", "2", "3"] {
        let metrics = format!("{stage}.jsonl");
        let out = dir.tiny(&format!(
            "--stage {stage} --metrics {metrics} --checkpoint {stage} --checkpoint-every 1 --breakdown"
        ));
        let breakdown =
            "forward, blocks, optimizer, median ms, host wait, 6 N + 12 L C T, fp32 matrix";
        out.shows(&breakdown.split(", ").collect::<Vec<_>>());
        let steps = lines(&dir.join(&metrics));
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
    let dir = &on_disk();
    let config = r#"{"zero_optimization": {"stage": 2}, "wall_clock_breakdown": true}"#;
    dir.write("ds.json", config);
    let with = dir.tiny("--config ds.json --metrics with");
    with.shows(&["median ms"]);
    with.omits(&["is ignored"]);
    dir.tiny("--metrics without").omits(&["median ms"]);
    for step in lines(&dir.join("with")) {
        assert!(step["breakdown"].is_object(), "{step}");
    }
    for step in lines(&dir.join("without")) {
        assert_eq!(step.get("breakdown"), None);
    }
}

/// At other ranks a step has other tokens: those before the resume still count.
#[test]
fn tokens_and_time_left_are_counted() {
    let dir = &on_disk();
    dir.tiny("--metrics m --checkpoint c");
    dir.tiny("--resume c --steps 5 --ranks 1 --metrics m");

    let steps = lines(&dir.join("m"));
    let seen: Vec<&Value> = steps.iter().map(|step| &step["tokens_seen"]).collect();
    assert_eq!(seen, [64, 128, 192, 224, 256]);
    for (i, step) in steps.iter().enumerate() {
        assert_eq!(step["eta_s"] == 0.0, i == 2 || i == 4, "{step}");
    }
}

#[test]
fn report_shows_memory_and_its_peak() {
    let dir = &on_disk();
    for stage in ["0", "3"] {
        dir.tiny(&format!("--stage {stage} --report {stage}"))
            .shows(&["at the peak", "the peak is rank 0's"]);
        let report = dir.join(stage);
        let summary = json(&report.join("summary.json"));
        let peak = &summary["peak"];
        let last = summary["steps"].as_array().unwrap().last().unwrap();
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
            let svg = report.text(picture);
            assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN"), "{svg}");
        }
    }
}

/// The host's update is counted, be it hidden or not; parameters on NVMe need buffers that a small
/// model does not repay.
#[test]
fn offload_is_measured() {
    let dir = &on_disk();
    std::fs::create_dir(dir.join("s")).unwrap();
    let offload = "--offload nvme:s --offload-params nvme:s --metrics m --checkpoint c --breakdown";
    dir.tiny(offload).shows(&[
        "  host's update, all of it",
        "note: --offload-params nvme saves no memory here: a rank needs ",
    ]);

    for step in &lines(&dir.join("m"))[1..] {
        assert!(
            step["breakdown"]["update_ms"].as_f64().unwrap() > 0.0,
            "{step}"
        );
    }
}
