use clap::{Parser, error::ErrorKind};
use serde_json::Value;

use super::size::{parse_bytes, parse_count, show_bytes, show_count, with_commas};
use super::{PlanArgs, plan, run, table};
use crate::cli::CliError;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: PlanArgs,
}

fn args(line: &str) -> PlanArgs {
    Line::try_parse_from(["plan"].into_iter().chain(line.split_whitespace())).unwrap().args
}

fn json(line: &str) -> Value {
    serde_json::to_value(plan(&args(line)).unwrap().0).unwrap()
}

fn text(line: &str) -> String {
    table::text(&plan(&args(line)).unwrap().0)
}

fn usage_error(line: &str) -> String {
    match plan(&args(line)) {
        Err(CliError::Usage(message)) => message,
        other => panic!("{line}: {other:?}"),
    }
}

/// arXiv 1910.02054, table 1, in GB for stages 1, 2 and 3. Where the paper cuts digits off (4187.5 to 4187),
/// what is printed here is rounded.
#[test]
fn table_1_of_the_paper() {
    let table = [
        ("7.5e9", 1, ["120 GB", "120 GB", "120 GB"]),
        ("7.5e9", 4, ["52.5 GB", "41.3 GB", "30.0 GB"]),
        ("7.5e9", 16, ["35.6 GB", "21.6 GB", "7.50 GB"]),
        ("7.5e9", 64, ["31.4 GB", "16.6 GB", "1.88 GB"]),
        ("7.5e9", 256, ["30.4 GB", "15.4 GB", "469 MB"]),
        ("7.5e9", 1024, ["30.1 GB", "15.1 GB", "117 MB"]),
        ("128B", 4, ["896 GB", "704 GB", "512 GB"]),
        ("128B", 16, ["608 GB", "368 GB", "128 GB"]),
        ("128B", 64, ["536 GB", "284 GB", "32.0 GB"]),
        ("128B", 256, ["518 GB", "263 GB", "8.00 GB"]),
        ("128B", 1024, ["514 GB", "258 GB", "2.00 GB"]),
        ("1T", 4, ["7.00 TB", "5.50 TB", "4.00 TB"]),
        ("1T", 64, ["4.19 TB", "2.22 TB", "250 GB"]),
        ("1T", 1024, ["4.01 TB", "2.01 TB", "15.6 GB"]),
    ];
    for (params, gpus, shown) in table {
        let report = plan(&args(&format!("--params {params} --gpus {gpus}"))).unwrap().0;
        let states: Vec<String> = report.stages[1..].iter().map(|s| show_bytes(s.states_bytes)).collect();
        assert_eq!(states, shown, "{params} on {gpus}");
        for stage in &report.stages {
            let gpu = stage.gpu;
            assert_eq!(gpu.params_bytes + gpu.grads_bytes + gpu.optimizer_bytes, stage.states_bytes);
        }
    }
}

#[test]
fn a_preset_is_planned_exactly() {
    let report = json("--model gpt2-124m --gpus 1 --dtype fp32 --micro-batch 2 --seq-len 256");
    assert_eq!(report["model"]["params"], 124_439_808u64);
    assert_eq!(report["model"]["assumed_shape"], false);
    let stage = &report["stages"][0];
    // Padding alone comes to the parameters, less than an alignment a unit.
    let states = stage["states_bytes"].as_u64().unwrap();
    assert!((16 * 124_439_808..16 * (124_439_808 + 14 * 16)).contains(&states));
    assert_eq!(stage["sent"]["total_bytes"], 0);
    assert_eq!(stage["fits"], Value::Null);
    assert_eq!(report["advice"], Value::Array(vec![]));
    assert_eq!(report["topologies"], Value::Array(vec![]));
    let four = json("--model gpt2-124m --gpus 4 --dtype bf16");
    let sent = |i: usize| four["stages"][i]["sent"]["total_bytes"].as_u64().unwrap();
    assert_eq!([sent(0), sent(1)], [sent(1), sent(2)]);
    assert_eq!(sent(3), sent(2) / 2 * 3);
}

#[test]
fn the_stage_that_fits_and_sends_least_is_recommended() {
    let report = json("--model gpt2-1.5b --gpus 8 --gpu-memory 24GiB");
    assert_eq!(report["recommended_stage"], 2);
    assert_eq!(report["stages"][0]["fits"], false);
    assert!(report["advice"][0].as_str().unwrap().starts_with("Take stage 2"));
    // With less memory only stage 3 fits, however much it sends.
    let report = json("--model gpt2-1.5b --gpus 8 --gpu-memory 6GB --activation-checkpointing");
    assert_eq!(report["recommended_stage"], 3);
}

#[test]
fn where_nothing_fits_changes_are_named() {
    let shown = text("--model gpt2-1.5b --gpus 2 --gpu-memory 16GB --micro-batch 8");
    assert!(shown.contains("No stage fits"), "{shown}");
    assert!(
        shown.contains("Stage 3 fits with --activation-checkpointing, --micro-batch 1 --grad-accum 8."),
        "{shown}"
    );
    let shown = text("--params 7.5e9 --gpus 4 --gpu-memory 24GB");
    assert!(shown.contains("Stage 3 fits with --offload cpu ("), "{shown}");
    assert!(shown.contains("of host memory in each node; `zero train` cannot do that on GPUs yet)"), "{shown}");
    assert!(shown.contains("Stage 3 fits on "), "{shown}");
    assert!(shown.contains("As it is, the largest model that fits has"), "{shown}");
    // The number of GPUs that is named fits, and one node fewer does not.
    let gpus: u64 = shown.split("Stage 3 fits on ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    let fits = |gpus: u64, nodes: u64| {
        json(&format!("--params 7.5e9 --gpus {gpus} --nodes {nodes} --gpu-memory 24GB"))["stages"][3]["fits"].clone()
    };
    assert_eq!((fits(gpus, gpus / 4), fits(gpus - 4, gpus / 4 - 1)), (Value::Bool(true), Value::Bool(false)));
    let shown = text("--params 1T --gpus 1 --gpu-memory 1GB");
    assert!(shown.contains("Activations, buckets and gathered units alone are more than a GPU has"), "{shown}");
}

#[test]
fn several_nodes_have_topologies() {
    let report = json("--params 7.5e9 --gpus 64 --nodes 8");
    let of = |i: usize, key: &str| report["topologies"][i][key].as_u64().unwrap();
    assert_eq!(report["topologies"].as_array().unwrap().len(), 4);
    assert!(of(1, "node_egress_bytes") < of(0, "node_egress_bytes"));
    assert!(of(2, "node_egress_bytes") < of(1, "node_egress_bytes"));
    assert!(of(2, "states_bytes") > of(1, "states_bytes"));
    assert!(of(3, "node_egress_bytes") < of(1, "node_egress_bytes"));
    assert!(text("--params 7.5e9 --gpus 64 --nodes 8").contains("(hpZ)"));
}

#[test]
fn a_deepspeed_file_is_honoured() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ds.json");
    let content = r#"{
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "bf16": {"enabled": true},
        "zero_optimization": {
            "stage": 2, "reduce_bucket_size": 1000000, "offload_optimizer": {"device": "cpu"}
        }
    }"#;
    std::fs::write(&file, content).unwrap();
    let line = format!("--model gpt2-350m --gpus 4 --gpu-memory 24GiB --config {}", file.display());
    let report = json(&line);
    assert_eq!((&report["micro_batch"], &report["grad_accum"]), (&Value::from(2), &Value::from(3)));
    let stage = &report["stages"][2];
    assert_eq!(stage["configured"], true);
    assert_eq!((&stage["gpu"]["optimizer_bytes"], &stage["gpu"]["grads_bytes"]), (&Value::from(0), &Value::from(0)));
    assert!(stage["host_bytes"].as_u64().unwrap() > 0);
    assert_eq!(stage["gpu"]["buckets_bytes"], 2 * 2 * 1_000_000);
    assert!(text(&line).contains("2 (config)"));
    // Flags win.
    let report = json(&format!("{line} --offload none --micro-batch 5 --grad-accum 1"));
    assert_eq!((&report["micro_batch"], &report["stages"][2]["host_bytes"]), (&Value::from(5), &Value::from(0)));
    let error = usage_error(&format!("--params 1e9 --gpus 4 --config {}", folder.path().join("none").display()));
    assert!(error.contains("none"), "{error}");
}

#[test]
fn each_wrong_use_is_an_error() {
    for (line, part) in [
        ("--model gpt5 --gpus 1", "no model preset \"gpt5\""),
        ("--model nano --gpus 0", "--gpus 0 --nodes 1"),
        ("--model nano --gpus 6 --nodes 4", "--gpus 6 --nodes 4"),
        ("--model nano --gpus 6 --nodes 0", "--gpus 6 --nodes 0"),
        ("--model nano --gpus 1 --seq-len 0", "positions for 1 to 256"),
        ("--model nano --gpus 1 --seq-len 257", "positions for 1 to 256"),
        ("--model nano --gpus 1 --micro-batch 0", "--micro-batch 0: at least 1"),
        ("--model nano --gpus 1 --grad-accum 0", "--grad-accum 0: at least 1"),
        ("--model nano --gpus 1 --bucket-elems 0", "--bucket-elems 0: at least 1"),
        ("--model nano --gpus 1 --gpu-memory 0", "--gpu-memory 0: at least 1"),
        ("--params 1e9 --gpus 1 --seq-len 0", "positions for 1 or more tokens"),
        ("--model nano --gpus 1 --offload disk", "expected none, cpu or nvme:DIR"),
        ("--params 1e18 --gpus 1 --seq-len 18446744073709551615", "64 bits"),
    ] {
        let error = usage_error(line);
        assert!(error.contains(part), "{line}: {error}");
    }
    for (line, kind) in [
        ("--gpus 4", ErrorKind::MissingRequiredArgument),
        ("--model nano", ErrorKind::MissingRequiredArgument),
        ("--model nano --params 1e9 --gpus 1", ErrorKind::ArgumentConflict),
        ("--params none --gpus 1", ErrorKind::ValueValidation),
        ("--params 0 --gpus 1", ErrorKind::ValueValidation),
        ("--params 1e9 --gpus 1 --gpu-memory 24G", ErrorKind::ValueValidation),
    ] {
        let error = Line::try_parse_from(["plan"].into_iter().chain(line.split_whitespace())).err().unwrap();
        assert_eq!((error.kind(), error.exit_code()), (kind, 2), "{line}");
    }
}

#[test]
fn both_forms_are_printed() {
    run(&args("--model nano --gpus 2")).unwrap();
    run(&args("--model nano --gpus 2 --json")).unwrap();
}

#[test]
fn sizes_are_read_and_shown() {
    let counts = [("7.5e9", 7_500_000_000), ("7.5B", 7_500_000_000), ("350M", 350_000_000), ("12", 12), ("2K", 2000)];
    counts.into_iter().for_each(|(text, n)| assert_eq!(parse_count(text), Ok(n), "{text}"));
    for text in ["", "B", "-1", "0", "0.2", "NaN", "inf", "1e19", "7.5X"] {
        assert!(parse_count(text).is_err(), "{text}");
    }
    let sizes = [
        ("24GiB", 24 << 30),
        ("80GB", 80_000_000_000),
        ("1.5KiB", 1536),
        ("7", 7),
        ("18446744073709551615", u64::MAX),
    ];
    sizes.into_iter().for_each(|(text, n)| assert_eq!(parse_bytes(text), Ok(n), "{text}"));
    for text in ["", "GiB", "24G", "-1GB", "NaNGB", "infGB", "18446744073709551615KB", "1e30"] {
        assert!(parse_bytes(text).is_err(), "{text}");
    }
    let shown = [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (1_875_000_000, "1.88 GB"),
        (u64::MAX, "18.4 EB"),
    ];
    shown.into_iter().for_each(|(n, text)| assert_eq!(show_bytes(n), text));
    assert_eq!([show_count(7_500_000_000), show_count(12)], ["7.50B", "12"]);
    assert_eq!([0, 999, 1000, 1_557_611_200].map(with_commas), ["0", "999", "1,000", "1,557,611,200"]);
}
