//! `zero measure`, and `zero plan` calibrated on the metrics of runs.

use crate::support::{Files, HOST, Printed, Runs, json, lines, on_disk};

#[test]
fn machine_is_measured() {
    let folder = &on_disk();
    let shown = folder.zero("measure --device cpu --scratch . --network-gb-per-s 25");
    shown.shows(&["TFLOP/s in 32 bits"]);
    let file = folder.text("machine.toml");
    file.shows(&["network_bytes_per_s = 25000000000"]);
    // The scratch file has no name.
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), 1);
    let plan = folder.json("plan --model nano --simulate --hardware machine.toml:2x1 --json");
    for stage in plan["stages"].as_array().unwrap() {
        assert!(stage["simulated"]["step_ms"].as_f64().unwrap() > 0.0);
    }

    folder.write("notes.toml", "mine = true\n");
    folder.fails(
        "measure --device cpu --out notes.toml",
        2,
        &["notes.toml", "is no machine file"],
    );
    let kept = folder.text("notes.toml");
    assert_eq!(kept, "mine = true\n");
    folder.fails(
        "measure --device cpu --scratch missing",
        1,
        &["disk of missing", "--scratch"],
    );
}

/// One run is predicted by itself: the efficiencies go where the measurement is.
#[test]
fn plans_are_calibrated_on_metrics() {
    let folder = &on_disk();
    folder.write("host.toml", HOST);
    for (stage, metrics) in [("1", "one.jsonl"), ("3", "three.jsonl")] {
        folder.tiny(&format!("--stage {stage} --steps 8 --metrics {metrics}"));
    }
    for (i, line) in lines(&folder.join("one.jsonl")).iter().enumerate() {
        assert_eq!(line["settings"].is_object(), i == 0, "{line}");
    }

    let hardware = "--hardware host.toml:2x1";
    let shown = folder.zero(&format!(
        "plan {hardware} --calibrate one.jsonl three.jsonl --save-efficiencies fit.toml"
    ));
    shown.shows(&[
        "ranks 2 stage 3 batch 1x1x32",
        "calibrated on 2 runs on a host",
    ]);
    let predicted = folder.zero(&format!(
        "plan {hardware} --calibrate one.jsonl --predict three.jsonl"
    ));
    predicted.shows(&["1 runs: mean error"]);

    let step = |how: &str| {
        let plan = folder.json(&format!(
            "plan --model nano --simulate {hardware} --json {how}"
        ));
        let time = plan["stages"][1]["simulated"]["step_ms"].clone();
        assert!(time.is_f64(), "{time}");
        (time, plan["simulated_on"]["calibrated_on"].clone())
    };
    // By the file and by the metrics, the same.
    let by_file = step("--efficiencies fit.toml");
    let by_metrics = step("--calibrate one.jsonl three.jsonl");
    assert_eq!(by_file, by_metrics);
    assert_eq!(by_file.1, "2 runs on a host");

    folder.write("old.jsonl", "{\"step\":1,\"step_ms\":2.0}\n");
    let failures = [
        (
            "--calibrate one.jsonl --predict one.jsonl",
            "needs --hardware",
        ),
        (
            "--hardware host.toml:2x1 --calibrate old.jsonl --predict one.jsonl",
            "--calibrate: no file has a run that counts",
        ),
        (
            "--hardware host.toml:2x1 --calibrate missing.jsonl",
            "--calibrate missing.jsonl",
        ),
        ("--hardware host.toml:2x1 --calibrate host.toml", "line 1"),
    ];
    for (flags, part) in failures {
        folder.fails(&format!("plan {flags}"), 2, &[part]);
    }
}

/// A measured step is drawn beside the simulated one.
#[test]
fn timelines_are_drawn_side_by_side() {
    let folder = &on_disk();
    folder.write("host.toml", HOST);
    folder.tiny("--report report");
    let line = "plan --model nano --simulate --hardware host.toml:2x1 --timeline both.json \
                --timeline-beside report/trace.json";
    folder.zero(line);
    let both = json(&folder.join("both.json"));
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
    folder.fails(&wrong, 2, &["--timeline-beside host.toml", "trace.json"]);
}
