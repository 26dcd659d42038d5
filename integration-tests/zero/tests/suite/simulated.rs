//! `zero measure`, and `zero plan` calibrated on the metrics of runs.

use std::path::Path;

use serde_json::Value;

use crate::support::{HOST, fails, run_tiny, words, zero};

fn text(folder: &Path, line: &str) -> String {
    let args: Vec<&str> = line.split_whitespace().collect();
    let output = zero(folder, &args);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{line}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn machine_is_measured() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let shown = text(
        folder,
        "measure --device cpu --scratch . --network-gb-per-s 25",
    );
    assert!(shown.contains("TFLOP/s in 32 bits"), "{shown}");
    let file = std::fs::read_to_string(folder.join("machine.toml")).unwrap();
    assert!(file.contains("network_bytes_per_s = 25000000000"), "{file}");
    // The scratch file has no name.
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), 1);
    let plan = text(
        folder,
        "plan --model nano --simulate --hardware machine.toml:2x1 --json",
    );
    let plan: Value = serde_json::from_str(&plan).unwrap();
    for stage in plan["stages"].as_array().unwrap() {
        assert!(stage["simulated"]["step_ms"].as_f64().unwrap() > 0.0);
    }

    std::fs::write(folder.join("notes.toml"), "mine = true\n").unwrap();
    let output = zero(folder, &words("measure --device cpu --out notes.toml"));
    fails(&output, 2, &["notes.toml", "is no machine file"]);
    let kept = std::fs::read_to_string(folder.join("notes.toml")).unwrap();
    assert_eq!(kept, "mine = true\n");
    let output = zero(folder, &words("measure --device cpu --scratch missing"));
    fails(&output, 1, &["disk of missing", "--scratch"]);
}

/// One run is predicted by itself: the efficiencies go where the measurement is.
#[test]
fn plans_are_calibrated_on_metrics() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    std::fs::write(folder.join("host.toml"), HOST).unwrap();
    for (stage, metrics) in [("1", "one.jsonl"), ("3", "three.jsonl")] {
        let run = ["--stage", stage, "--steps", "8", "--metrics", metrics];
        assert!(run_tiny(folder, &run).status.success());
    }
    let lines = std::fs::read_to_string(folder.join("one.jsonl")).unwrap();
    let settings: Vec<bool> = lines
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["settings"].is_object())
        .collect();
    assert!(settings[0], "{lines}");
    assert!(settings[1..].iter().all(|has| !has), "{lines}");

    let hardware = "--hardware host.toml:2x1";
    let shown = text(
        folder,
        &format!("plan {hardware} --calibrate one.jsonl three.jsonl --save-efficiencies fit.toml"),
    );
    assert!(shown.contains("ranks 2 stage 3 batch 1x1x32"), "{shown}");
    assert!(shown.contains("calibrated on 2 runs on a host"), "{shown}");
    let predicted = text(
        folder,
        &format!("plan {hardware} --calibrate one.jsonl --predict three.jsonl"),
    );
    assert!(predicted.contains("1 runs: mean error"), "{predicted}");

    let step = |how: &str| {
        let plan = text(
            folder,
            &format!("plan --model nano --simulate {hardware} --json {how}"),
        );
        let plan: Value = serde_json::from_str(&plan).unwrap();
        let at = &plan["stages"][1]["simulated"]["step_ms"];
        (
            at.as_f64().unwrap(),
            plan["simulated_on"]["calibrated_on"].clone(),
        )
    };
    // By the file and by the metrics, the same.
    let by_file = step("--efficiencies fit.toml");
    let by_metrics = step("--calibrate one.jsonl three.jsonl");
    assert_eq!(by_file, by_metrics);
    assert_eq!(by_file.1, "2 runs on a host");

    std::fs::write(folder.join("old.jsonl"), "{\"step\":1,\"step_ms\":2.0}\n").unwrap();
    for (line, says) in [
        (
            "plan --calibrate one.jsonl --predict one.jsonl",
            "needs --hardware",
        ),
        (
            &*format!("plan {hardware} --calibrate old.jsonl --predict one.jsonl"),
            "--calibrate: no file has a run that counts",
        ),
        (
            &*format!("plan {hardware} --calibrate missing.jsonl"),
            "--calibrate missing.jsonl",
        ),
        (&*format!("plan {hardware} --calibrate host.toml"), "line 1"),
    ] {
        let args: Vec<&str> = line.split_whitespace().collect();
        fails(&zero(folder, &args), 2, &[says]);
    }
}

/// A measured step is drawn beside the simulated one.
#[test]
fn timelines_are_drawn_side_by_side() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    std::fs::write(folder.join("host.toml"), HOST).unwrap();
    assert!(run_tiny(folder, &["--report", "report"]).status.success());
    let line = "plan --model nano --simulate --hardware host.toml:2x1 --timeline both.json \
                --timeline-beside report/trace.json";
    text(folder, line);
    let both = std::fs::read_to_string(folder.join("both.json")).unwrap();
    let both: Value = serde_json::from_str(&both).unwrap();
    let events = both["traceEvents"].as_array().unwrap();
    for pid in [0, 1] {
        let of = events.iter().filter(|event| event["pid"] == pid);
        let labels: Vec<_> = of.map(|event| &event["name"]).collect();
        assert!(
            labels.iter().any(|label| **label == "adam"),
            "{pid}: {labels:?}"
        );
    }
    let wrong = line.replace("report/trace.json", "host.toml");
    let args: Vec<&str> = wrong.split_whitespace().collect();
    fails(
        &zero(folder, &args),
        2,
        &["--timeline-beside host.toml", "trace.json"],
    );
}
