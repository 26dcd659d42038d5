mod llama_70b;
mod muon_bytes;
mod simulate;
mod wrong_use;

use clap::Parser;
use integration_tests::Printed;
use serde_json::Value;

use super::largest::largest_model_params;
use super::stage::{UNITS_VISITED, evaluate};
use super::{PlanArgs, PlanRequest, plan, run, table};
use crate::error::CliError;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: PlanArgs,
}

fn args(line: &str) -> PlanArgs {
    Line::try_parse_from(["plan"].into_iter().chain(line.split_whitespace()))
        .unwrap()
        .args
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

/// GPUs that share sequences have a part of the activations, and longer sequences fit.
#[test]
fn shared_sequences() {
    let of = |share: u64| {
        json(&format!(
            "--model llama3-8b --gpus 8 --ulysses {share} --seq-len 8192 --gpu-memory 40GiB --activation-checkpointing"
        ))
    };
    let [alone, shared] = [of(1), of(8)];
    let stage = |report: &Value| report["stages"][3].clone();
    assert_eq!(stage(&alone)["sent"]["all_to_all_bytes"], 0);
    // 32 layers, thrice each; of 32 query heads of 128, 8 of keys and 8 of values, and the 32 attended
    // ones, a GPU sends 7 of 8 parts of its 1024 tokens in bf16.
    assert_eq!(
        stage(&shared)["sent"]["all_to_all_bytes"],
        2 * 32 * 3 * 1024 * (48 + 32) * 128 / 8 * 7
    );
    let activations = |report: &Value| stage(report)["gpu"]["activations_bytes"].as_u64().unwrap();
    let [of_alone, of_shared] = [&alone, &shared].map(activations);
    assert!(of_shared * 4 < of_alone, "{of_shared} of {of_alone}");
    assert_eq!(shared["ulysses"], 8);

    // The longest sequence fits, and one with another token for each GPU does not.
    let line = "--model llama3-8b --gpus 8 --gpu-memory 22GiB --activation-checkpointing";
    let longest = |share: u64| {
        let report = json(&format!("{line} --ulysses {share} --seq-len 64"));
        stage(&report)["longest_seq_len"].as_u64().unwrap()
    };
    let fits = |share: u64, tokens: u64| {
        let report = json(&format!("{line} --ulysses {share} --seq-len {tokens}"));
        stage(&report)["fits"].as_bool().unwrap()
    };
    for share in [1, 4] {
        let tokens = longest(share);
        assert!(fits(share, tokens), "{tokens} tokens, {share} GPUs");
        let more = tokens + share;
        assert!(
            more > 8192 || !fits(share, more),
            "{more} tokens, {share} GPUs"
        );
    }
    assert!(longest(4) > longest(1));

    usage_error("--model gpt2-124m --gpus 8 --ulysses 8").shows(&["12 attention heads"]);
    usage_error("--model gpt2-124m --gpus 8 --ulysses 3").shows(&["divides the 8 ranks"]);
}

/// arXiv 1910.02054, table 2: the largest models, in billions of parameters, whose states fit the 32 GB
/// of each of 64 GPUs for each part of the parameters; without ZeRO, and at stages 1, 2 and 3.
#[test]
fn table_2_of_the_paper() {
    const GB: f64 = 1e9;
    for parts in [1, 2, 4, 8, 16] {
        let of_stages = [
            (2.0, 16.0),
            (7.6, 4.0 + 12.0 / 64.0),
            (14.4, 2.0 + 14.0 / 64.0),
            (128.0, 16.0 / 64.0),
        ];
        for (stage, (billions, bytes_per_param)) in of_stages.into_iter().enumerate() {
            let params = billions * parts as f64 * 1e9;
            let in_gb = params * bytes_per_param / parts as f64 / GB;
            assert!(
                (in_gb - 32.0).abs() < 0.32,
                "{parts} parts, stage {stage}: {in_gb}"
            );

            // The states of a model of about that size, by its parameters.
            let hidden = 8192;
            let layers = (params / (12.0 * hidden as f64 * hidden as f64)).round();
            let gpus = 64 * parts;
            let report = json(&format!(
                "--layers {layers} --hidden {hidden} --vocab 1024 --seq-len 1024 --gpus {gpus} --nodes {} \
                 --tensor-parallel {parts}",
                gpus / 16
            ));
            let params = report["model"]["params"].as_u64().unwrap() as f64;
            let states = report["stages"][stage]["states_bytes"].as_u64().unwrap() as f64;
            // Norms and biases are on all parts.
            let expected = params * bytes_per_param / parts as f64;
            let excess = states / expected - 1.0;
            assert!(
                (0.0..0.005).contains(&excess),
                "{parts} parts, stage {stage}: {excess}"
            );
        }
    }
}

/// GPUs with parts of the parameters, and of the inputs of blocks.
#[test]
fn parts_of_parameters() {
    let line = "--model llama3-8b --gpus 16 --nodes 2 --seq-len 8192 --activation-checkpointing";
    let of = |flags: &str| json(&format!("{line} {flags}"));
    let alone = of("");
    let cut = of("--tensor-parallel 8");
    let partitioned = of("--tensor-parallel 8 --partition-activations");
    assert_eq!(cut["tensor_parallel"], 8);
    let gpu = |report: &Value, key: &str| report["stages"][3]["gpu"][key].as_u64().unwrap() as f64;
    // States are over all GPUs either way.
    let states = gpu(&cut, "params_bytes") / gpu(&alone, "params_bytes");
    assert!((1.0..1.01).contains(&states), "{states}");
    // By hand: of 33 rows of 8192 x 4096 in bf16 a GPU keeps an eighth, and two whole ones.
    let row = 8192.0 * 4096.0 * 2.0;
    let saved = gpu(&cut, "activations_bytes") - gpu(&partitioned, "activations_bytes");
    let expected = 33.0 * row - (2.0 * row + 33.0 * row / 8.0);
    // Each part is aligned.
    assert!(
        (saved - expected).abs() < 33.0 * 512.0,
        "{saved} for {expected}"
    );
    // Sums of activations: two in each forward and backward of 32 blocks, one again, and two.
    let sent = |report: &Value, key: &str| report["stages"][3]["sent"][key].as_u64().unwrap();
    let summed = row * (5.0 * 32.0 + 2.0) * 2.0 * 7.0 / 8.0;
    assert_eq!(sent(&cut, "all_reduce_bytes") as f64, summed);
    let gathered = sent(&partitioned, "all_gather_bytes") - sent(&cut, "all_gather_bytes");
    assert_eq!(gathered as f64, 31.0 * row * 7.0 / 8.0);

    // With sequence parallelism a GPU has an eighth of those rows, of the stream behind attention and of
    // the statistics of three norms; and sums of a block's two norms.
    let divided = of("--tensor-parallel 8 --sequence-parallel");
    let saved = gpu(&cut, "activations_bytes") - gpu(&divided, "activations_bytes");
    let statistics = 3.0 * 8192.0 * 4.0;
    let expected = (34.0 * row + statistics) * 7.0 / 8.0 - 2.0 * 4096.0 * 4.0;
    assert!((saved - expected).abs() < 4096.0, "{saved} for {expected}");
    // Its sums are reduce-scatters. A block gathers the inputs of its first products in forward, again
    // and in backward, and the gradients of its second ones; one each of the embedding and the head.
    let scattered = sent(&divided, "reduce_scatter_bytes") - sent(&cut, "reduce_scatter_bytes");
    assert_eq!(scattered as f64, summed / 2.0);
    let gathered = sent(&divided, "all_gather_bytes") - sent(&cut, "all_gather_bytes");
    assert_eq!(gathered as f64, row * (8.0 * 32.0 + 2.0) * 7.0 / 8.0);
    let norms = 4.0 * 4096.0 * (2.0 * 32.0 + 1.0) * 2.0 * 7.0 / 8.0;
    assert_eq!(sent(&divided, "all_reduce_bytes") as f64, norms);

    usage_error("--model gpt2-124m --gpus 8 --sequence-parallel")
        .shows(&["use --tensor-parallel M"]);
    let flags = "--tensor-parallel 2 --sequence-parallel --activation-checkpointing --partition-activations";
    usage_error(&format!("--model gpt2-124m --gpus 8 {flags}")).shows(&["set one of the two"]);
    usage_error("--params 7e9 --gpus 8 --tensor-parallel 2").shows(&["pass --model"]);
    usage_error("--model gpt2-124m --gpus 16 --nodes 2 --tensor-parallel 16")
        .shows(&["on nodes of 8 GPUs"]);
    usage_error("--model gpt2-124m --gpus 8 --tensor-parallel 8").shows(&["n_head 12"]);
}

/// arXiv 1910.02054, table 1, in GB for stages 1, 2 and 3. The paper truncates the values.
#[test]
fn table_1_of_the_paper() {
    let table: [(&str, u64, [f64; 3]); 14] = [
        ("7.5e9", 1, [120.0, 120.0, 120.0]),
        ("7.5e9", 4, [52.5, 41.3, 30.0]),
        ("7.5e9", 16, [35.6, 21.6, 7.5]),
        ("7.5e9", 64, [31.4, 16.6, 1.88]),
        ("7.5e9", 256, [30.4, 15.4, 0.47]),
        ("7.5e9", 1024, [30.1, 15.1, 0.12]),
        ("128B", 4, [896.0, 704.0, 512.0]),
        ("128B", 16, [608.0, 368.0, 128.0]),
        ("128B", 64, [536.0, 284.0, 32.0]),
        ("128B", 256, [518.0, 263.0, 8.0]),
        ("128B", 1024, [513.0, 257.0, 2.0]),
        ("1T", 4, [7000.0, 5500.0, 4000.0]),
        ("1T", 64, [4187.0, 2218.0, 250.0]),
        ("1T", 1024, [4011.0, 2013.0, 15.6]),
    ];

    for (params, gpus, shown) in table {
        let report = plan(&args(&format!("--params {params} --gpus {gpus}")))
            .unwrap()
            .0;
        for (stage, gb) in report.stages[1..].iter().zip(shown) {
            let states = stage.states_bytes as f64 / 1e9;
            assert!(
                (states - gb).abs() < if gb > 100.0 { 1.0 } else { 0.1 },
                "{params} on {gpus}: {states}, not {gb}"
            );
        }
        for stage in &report.stages {
            let gpu = stage.gpu;
            assert_eq!(
                gpu.params_bytes + gpu.grads_bytes + gpu.optimizer_bytes,
                stage.states_bytes
            );
        }
    }
}

#[test]
fn preset_is_planned_exactly() {
    let report = json("--model gpt2-124m --gpus 1 --dtype fp32 --micro-batch 2 --seq-len 256");
    assert_eq!(report["model"]["params"], 124_439_808u64);
    assert_eq!(report["model"]["assumed_shape"], false);
    let stage = &report["stages"][0];
    // The states exceed 16 bytes a parameter only by padding: less than an alignment a unit.
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
fn fitting_stage_with_least_traffic_is_recommended() {
    let report = json("--model gpt2-1.5b --gpus 8 --gpu-memory 24GiB");
    assert_eq!(report["recommended_stage"], 2);
    assert_eq!(report["stages"][0]["fits"], false);
    assert!(
        report["advice"][0]
            .as_str()
            .unwrap()
            .starts_with("Use stage 2")
    );
    // With less memory only stage 3 fits, so its larger traffic does not matter.
    let report = json("--model gpt2-1.5b --gpus 8 --gpu-memory 6GB --activation-checkpointing");
    assert_eq!(report["recommended_stage"], 3);
}

#[test]
fn changes_are_proposed_if_nothing_fits() {
    text("--model gpt2-1.5b --gpus 2 --gpu-memory 16GB --micro-batch 16").shows(&[
        "No stage fits",
        "Stage 3 fits with --activation-checkpointing, --micro-batch 1 --grad-accum 16.",
    ]);
    let shown = text("--params 7.5e9 --gpus 4 --gpu-memory 24GB");
    shown.shows(&[
        "Stage 3 fits with --offload cpu (",
        "of host memory in each node)",
        "Stage 3 fits on ",
        "The largest model that fits without changes has",
    ]);

    // The recommended number of GPUs fits, and one node fewer does not.
    let gpus: u64 = shown
        .split("Stage 3 fits on ")
        .nth(1)
        .unwrap()
        .split(' ')
        .next()
        .unwrap()
        .parse()
        .unwrap();

    let fits = |gpus: u64, nodes: u64| {
        json(&format!(
            "--params 7.5e9 --gpus {gpus} --nodes {nodes} --gpu-memory 24GB"
        ))["stages"][3]["fits"]
            .clone()
    };

    assert_eq!(
        (fits(gpus, gpus / 4), fits(gpus - 4, gpus / 4 - 1)),
        (Value::Bool(true), Value::Bool(false))
    );
    text("--params 1T --gpus 1 --gpu-memory 1MiB")
        .shows(&["Activations alone exceed the memory of a GPU"]);
    // Where smaller buckets are enough, the largest that is; twice that does not fit.
    let line = "--params 30e9 --gpus 64 --nodes 8 --gpu-memory 14GiB --activation-checkpointing";
    let shown = text(line);
    let elems = shown
        .split("Stage 3 fits with --bucket-elems ")
        .nth(1)
        .unwrap_or_else(|| panic!("{shown}"));
    let elems: u64 = elems.split('.').next().unwrap().parse().unwrap();
    let fits =
        |elems: u64| json(&format!("{line} --bucket-elems {elems}"))["stages"][3]["fits"].clone();
    assert_eq!(
        (fits(elems), fits(2 * elems)),
        (Value::Bool(true), Value::Bool(false))
    );
}

/// The largest model has its run's buckets, not those of the requested model.
#[test]
fn largest_model_does_not_depend_on_the_asked_one() {
    let largest = |line: &str| {
        json(line)["stages"][3]["largest_model_params"]
            .as_u64()
            .unwrap()
    };

    let small = largest("--params 1e9 --gpus 8 --gpu-memory 24GiB");
    assert!(small > 8_000_000_000, "{small}");
    assert_eq!(largest("--params 70e9 --gpus 8 --gpu-memory 24GiB"), small);
    let many = largest("--params 1e12 --gpus 1024 --gpu-memory 80GB --activation-checkpointing");
    assert!(many > 700_000_000_000, "{many}");
    // Of a DeepSpeed file with a small bucket, the bucket is that of the file.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ds.json");
    let content = r#"{"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_max_live_parameters": 1e9}}"#;
    std::fs::write(&file, content).unwrap();
    let line = format!("--gpus 8 --gpu-memory 24GiB --config {}", file.display());
    let size = largest(&format!("--params 1e9 {line}"));
    let fits =
        |params: u64| json(&format!("--params {params} {line}"))["stages"][3]["fits"].clone();
    assert_eq!(
        (fits(size), fits(size + size / 10)),
        (Value::Bool(true), Value::Bool(false))
    );
}

/// The changes of each sentence of advice.
fn advised(line: &str) -> Vec<Vec<String>> {
    let report = json(line);
    let sentences = report["advice"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(Value::as_str);
    let flags = sentences.filter_map(|sentence| sentence.strip_prefix("Stage 3 fits with "));
    let flags = flags.map(|flags| flags.split(" (").next().unwrap().trim_end_matches('.'));
    flags
        .map(|flags| flags.split(", ").map(str::to_owned).collect())
        .collect()
}

#[test]
fn advice_has_no_needless_change() {
    let advised = advised("--params 70e9 --gpus 8 --gpu-memory 24GiB");
    assert_eq!(
        advised,
        [["--activation-checkpointing", "--offload-params cpu"]]
    );
}

/// The time of a plan, without a clock.
#[test]
fn huge_questions_end_soon() {
    for line in [
        "--params 1e18 --gpus 8 --gpu-memory 80GiB",
        "--params 1e16 --gpus 8 --gpu-memory 80GiB",
        "--params 1e18 --gpus 65536 --nodes 64 --gpu-memory 1PiB --offload-params cpu",
        "--params 1e9 --gpus 1024000000 --nodes 1000000 --gpu-memory 1PiB",
    ] {
        UNITS_VISITED.set(0);
        plan(&args(line)).unwrap();
        let visited = UNITS_VISITED.get();
        assert!(visited < 2_000_000, "{line}: {visited} units");
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(16))]

    #[test]
    fn advice_fits_and_is_minimal(
        params in 1u64..400, gpus in 1u64..17, memory in 4u64..80, micro_batch in 1u64..9,
    ) {
        let line = format!("--params {params}e9 --gpus {gpus} --gpu-memory {memory}GiB");
        let rows = format!("--micro-batch {micro_batch}");
        let fits = |changes: &[String]| {
            // A change replaces the flag of the question.
            let changes = changes.join(" ");
            let rows = if changes.contains("--micro-batch") { "" } else { &rows };
            json(&format!("{line} {rows} {changes}"))["stages"][3]["fits"].as_bool().unwrap()
        };
        for changes in advised(&format!("{line} {rows}")) {
            proptest::prop_assert!(fits(&changes), "{} {} {:?}", line, rows, changes);
            for left_out in 0..changes.len() {
                let mut fewer = changes.clone();
                fewer.remove(left_out);
                proptest::prop_assert!(!fits(&fewer), "{} {} {:?}", line, rows, fewer);
            }
        }
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]

    #[test]
    fn largest_model_fits_and_a_tenth_more_does_not(
        nodes in 1u64..200, of_node in 1u64..9, memory in 20u32..38, more in 0u64..1000, stage in 0u64..4,
        dtype in 0usize..2, offload in 0usize..4, checkpointing: bool, micro_batch in 1u64..9,
    ) {
        let gpus = nodes * of_node;
        let memory = (1u64 << memory) * (1000 + more) / 1000;
        let dtype = ["fp32", "bf16"][dtype];
        let offload = ["", "--offload cpu", "--offload nvme:/d --moments bf16", "--offload-params cpu"][offload];
        let checkpointing = if checkpointing { "--activation-checkpointing" } else { "" };
        let line = format!(
            "--params 1e9 --gpus {gpus} --nodes {nodes} --gpu-memory {memory} --dtype {dtype} --micro-batch {micro_batch} \
             {offload} {checkpointing}"
        );
        let stage = zero_shard::ZeroStage::from_number(stage).unwrap();
        let (request, _) = PlanRequest::new(&args(&line)).unwrap();
        let fits = |params: u64| evaluate(&request.with_about(params), stage).unwrap().fits;
        match largest_model_params(&request, stage).unwrap() {
            0 => proptest::prop_assert_eq!(fits(1), Some(false)),
            params => {
                proptest::prop_assert_eq!(fits(params), Some(true), "{} with {}", line, params);
                proptest::prop_assert_eq!(fits(params + params.div_ceil(10)), Some(false), "{} with {}", line, params);
            }
        }
    }
}

/// Parameters and activations of any shape are those of a GPT-2 of that shape.
#[test]
fn shape_is_planned_exactly() {
    let preset = json("--model gpt2-124m --gpus 2");
    let shape = json("--layers 12 --hidden 768 --gpus 2");
    assert_eq!(shape["stages"], preset["stages"]);
    assert_eq!(shape["model"]["params"], 124_439_808u64);
    assert_eq!(shape["model"]["assumed_shape"], false);

    let figures = |line: &str| {
        let report = json(&format!("--layers 12 --hidden 768 --gpus 2 {line}"));
        (
            report["model"]["params"].as_u64().unwrap(),
            report["stages"][0]["gpu"]["activations_bytes"]
                .as_u64()
                .unwrap(),
        )
    };

    let base = figures("--heads 12 --kv-heads 12 --ffn 3072 --vocab 50257");
    assert_eq!(base, figures(""));
    let (params, activations) = figures("--ffn 4096");
    assert_eq!(params - base.0, 12 * 1024 * (2 * 768 + 1));
    assert!(activations > base.1);
    assert_eq!(figures("--vocab 60257").0 - base.0, 10_000 * 768);
    assert_eq!(figures("--heads 6").0, base.0);
    // A position for each token of a sequence.
    assert_eq!(figures("--seq-len 2048").0 - base.0, 1024 * 768);

    // Fewer key and value heads than heads: a Llama, whose positions have no parameters.
    let llama = |kv_heads: u64| {
        let attention = 768 * 768 * 2 + 2 * 768 * 64 * kv_heads;
        let layer = attention + 3 * 768 * 3072 + 2 * 768;
        12 * layer + 2 * 32000 * 768 + 768
    };
    assert_eq!(figures("--kv-heads 4").0, llama(4));
    assert_eq!(figures("--kv-heads 4 --seq-len 2048").0, llama(4));
    assert_eq!(figures("--architecture llama").0, llama(12));
}

#[test]
fn gigabytes_of_a_card_are_explained() {
    let shown = text("--model nano --gpus 1 --gpu-memory 24GB");
    let part = "24GB is read as 24,000,000,000 bytes (22.35 GiB); a card sold as 24GB has about 24 GiB: --gpu-memory 24GiB";
    shown.shows(&[part]);
    assert!(!text("--model nano --gpus 1 --gpu-memory 24GiB").contains("is read as"));
}

/// A step takes no less than the drive needs for its transfers.
#[test]
fn wear_is_limited_by_the_drive() {
    let line = "--params 1e9 --gpus 8 --offload nvme:/d --peak-tflops 1000";
    let of = |more: &str| json(&format!("{line} {more}"))["stages"][1]["wear"].clone();
    let wear = of("");
    assert_eq!(wear["waits_for_drive"], true);
    let a_day = wear["written_bytes_per_day"].as_f64().unwrap();
    assert!((a_day / (7e9 * 86_400.0) - 1.0).abs() < 1e-9, "{a_day}");
    assert_eq!(of("--drive-gb-per-s 1e6")["waits_for_drive"], false);
    text(line).shows(&["the time of the drive, and a drive of 7 GB/s (assumed: --drive-gb-per-s)"]);
}

#[test]
fn several_nodes_have_topologies() {
    let report = json("--params 7.5e9 --gpus 64 --nodes 8");
    let of = |i: usize, key: &str| report["topologies"][i][key].as_u64().unwrap();
    assert_eq!(report["topologies"].as_array().unwrap().len(), 5);
    assert!(of(1, "node_egress_bytes") < of(0, "node_egress_bytes"));
    assert!(of(2, "node_egress_bytes") < of(1, "node_egress_bytes"));
    assert!((1..4).all(|i| of(i + 1, "states_bytes") > of(i, "states_bytes")));
    assert!((2..5).all(|i| of(i, "node_egress_bytes") < of(1, "node_egress_bytes")));
    assert!(text("--params 7.5e9 --gpus 64 --nodes 8").contains("(hpZ)"));
}

#[test]
fn deepspeed_file_is_honoured() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ds.json");
    let content = r#"{
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "bf16": {"enabled": true},
        "zero_optimization": {
            "stage": 2, "reduce_bucket_size": 1000000, "offload_optimizer": {"device": "cpu"}
        }
    }"#;
    std::fs::write(&file, content).unwrap();
    let line = format!(
        "--model gpt2-350m --gpus 4 --gpu-memory 24GiB --config {}",
        file.display()
    );
    let report = json(&line);
    assert_eq!(
        (&report["micro_batch"], &report["grad_accum"]),
        (&Value::from(2), &Value::from(3))
    );
    let stage = &report["stages"][2];
    assert_eq!(stage["configured"], true);

    assert_eq!(
        (
            &stage["gpu"]["optimizer_bytes"],
            &stage["gpu"]["grads_bytes"]
        ),
        (&Value::from(0), &Value::from(0))
    );

    assert!(stage["host_bytes"].as_u64().unwrap() > 0);
    assert_eq!(stage["gpu"]["buckets_bytes"], 2 * 2 * 1_000_000);
    assert!(text(&line).contains("2 (config)"));
    // Flags override the file.
    let report = json(&format!(
        "{line} --offload none --micro-batch 5 --grad-accum 1"
    ));
    assert_eq!(
        (&report["micro_batch"], &report["stages"][2]["host_bytes"]),
        (&Value::from(5), &Value::from(0))
    );
    usage_error(&format!(
        "--params 1e9 --gpus 4 --config {}",
        folder.path().join("none").display()
    ))
    .shows(&["none"]);
}

#[test]
fn tiers_are_counted() {
    let of = |report: &Value, stage: usize, path: &str| {
        let value = report
            .pointer(&format!("/stages/{stage}/{path}"))
            .unwrap_or(&Value::Null);
        value.as_f64().unwrap_or_else(|| panic!("{path}: {report}"))
    };

    let line = "--model gpt2-124m --gpus 2 --seq-len 128 --activation-checkpointing";
    let cpu = json(&format!("{line} --offload cpu --offload-activations"));
    let elems = 124_439_808.0;
    let near = |got: f64, expected: f64| {
        assert!(
            (got / expected - 1.0).abs() < 1e-4,
            "{got}, expected {expected}"
        )
    };

    for stage in 0..4 {
        let own = if stage == 0 { elems } else { elems / 2.0 };
        near(of(&cpu, stage, "host/optimizer_bytes"), 12.0 * own);
        near(of(&cpu, stage, "host/grads_bytes"), 2.0 * own);
        near(of(&cpu, stage, "host/copies_bytes"), 2.0 * own);
        // Inputs of 12 blocks and of the head; three are on the GPU.
        assert_eq!(
            of(&cpu, stage, "host/activations_bytes"),
            (10 * 128 * 768 * 2) as f64
        );
        assert_eq!(
            (
                of(&cpu, stage, "gpu/optimizer_bytes"),
                of(&cpu, stage, "gpu/grads_bytes")
            ),
            (0.0, 0.0)
        );
        assert_eq!(of(&cpu, stage, "nvme_bytes"), 0.0);
        assert!(of(&cpu, stage, "gpu/staging_bytes") > 0.0);
        assert_eq!(cpu["stages"][stage]["wear"], Value::Null);
    }

    let folder = "--offload nvme:/d --offload-params nvme:/d";
    let nvme = json(&format!("{line} {folder}"));
    near(of(&nvme, 3, "nvme/optimizer_bytes"), 6.0 * elems);
    near(of(&nvme, 3, "nvme/params_bytes"), elems);
    assert_eq!(
        of(&nvme, 2, "nvme/params_bytes"),
        0.0,
        "only stage 3 shards parameters"
    );

    assert_eq!(
        (
            of(&nvme, 3, "host/params_bytes"),
            of(&nvme, 3, "host/copies_bytes")
        ),
        (0.0, 0.0)
    );

    // 1 Mi elements of 12 bytes, four times.
    assert!(of(&nvme, 3, "host/staging_bytes") > ((4 * 12) << 20) as f64);
    assert!(of(&nvme, 3, "process_bytes") < of(&cpu, 3, "process_bytes"));
    assert_eq!(nvme["offload"]["params"], "nvme:/d");
    // Moments are decoded where they are updated, without memory for them.
    let moments = json(&format!(
        "{line} --offload cpu --offload-activations --moments bf16"
    ));
    assert_eq!(of(&moments, 2, "host/workspace_bytes"), 0.0);
    let fewer = of(&cpu, 2, "host_bytes") - of(&moments, 2, "host_bytes");
    assert_eq!(fewer, of(&cpu, 2, "host/optimizer_bytes") / 3.0);
    // The parameters of stage 3 alone: the host updates them.
    let params = json(&format!("{line} --offload-params cpu"));
    assert!(
        of(&params, 3, "host/optimizer_bytes") > 0.0
            && of(&params, 2, "host/optimizer_bytes") == 0.0
    );
}

/// 6 or 8 FLOPs a parameter and token; ait of ZeRO-Infinity is tokens / 4 for 32 bytes of optimizer
/// state.
#[test]
fn hiding_bandwidth_is_the_formula() {
    let transfers = |line: &str, stage: usize, tier: &str| {
        let report = json(line);
        let all = report["stages"][stage]["transfers"]
            .as_array()
            .unwrap()
            .clone();
        let found = all.into_iter().find(|t| t["tier"] == tier).unwrap();
        let of = |key: &str| found[key].as_f64().unwrap();
        let keys = [
            "read_bytes_per_param",
            "written_bytes_per_param",
            "flops_per_byte",
            "half_efficiency_bytes_per_s",
        ];
        let mut figures: Vec<f64> = keys.into_iter().map(of).collect();
        figures.push(of("hiding_bytes_per_s"));
        let wear = &report["stages"][stage]["wear"];
        (
            figures,
            [&wear["written_bytes_per_day"], &wear["rated_days"]]
                .map(|x| x.as_f64().unwrap_or(0.0)),
        )
    };

    let near = |got: &[f64], expected: &[f64]| {
        let close = got
            .iter()
            .zip(expected)
            .all(|(a, b)| (a / b - 1.0).abs() < 1e-3);
        assert!(
            close && got.len() == expected.len(),
            "{got:?}, expected {expected:?}"
        );
    };

    let line = "--params 1e9 --gpus 1 --micro-batch 8 --seq-len 1024 --activation-checkpointing";
    let tokens = 8192.0;
    // 24 bytes of state a parameter; 8 FLOPs by 24 bytes. The update's window is a forward, 2 of 8
    // FLOPs.
    let ait = 8.0 * tokens / 24.0;
    let (nvme, wear) = transfers(
        &format!("{line} --offload nvme:/d --peak-tflops 100 --drive-gb-per-s 1000"),
        1,
        "nvme",
    );
    near(&nvme, &[12.0, 12.0, ait, 1e14 / ait, 4e14 / ait]);
    let a_day = 12e9 / (8.0 * 1e9 * tokens / 1e14) * 86_400.0;
    near(&wear, &[a_day, 600e12 / a_day]);
    let (link, _) = transfers(&format!("{line} --offload nvme:/d"), 1, "gpu");
    near(&link[..2], &[2.0, 2.0]);
    let small = "--offload nvme:/d --masters remainder --moments bf16 --drive-tbw 1200 --drive-gb-per-s 1000";
    let (nvme, wear) = transfers(&format!("{line} {small}"), 1, "nvme");
    near(&nvme[..2], &[6.0, 6.0]);
    near(&wear[1..], &[1200e12 / wear[0]]);
    // 32 bytes a parameter would be the paper's tokens / 4.
    let (fp32, _) = transfers(
        "--params 1e9 --gpus 1 --seq-len 1024 --dtype fp32 --offload nvme:/d",
        1,
        "nvme",
    );
    near(&fp32[..3], &[8.0, 8.0, 6.0 * 1024.0 / 16.0]);
    // Parameters are read in forward and backward, the last block once, and written once;
    // remainders need them for the update, too. Gradients are written and read by each micro-batch.
    // The first block stays gathered from one micro-batch to the next.
    let layers = 17.0;
    let gathers = 2.0 - 1.0 / layers;
    let (nvme, _) = transfers(
        &format!("{line} --offload nvme:/d --offload-params nvme:/d"),
        3,
        "nvme",
    );
    near(&nvme[..2], &[12.0 + 2.0 * gathers + 2.0, 14.0 + 2.0]);
    let all = "--offload nvme:/d --offload-params nvme:/d --masters remainder";
    let (nvme, _) = transfers(&format!("{line} {all} --grad-accum 3"), 3, "nvme");

    near(
        &nvme[..2],
        &[
            10.0 + 2.0 + 2.0 * (3.0 * gathers - 2.0 / layers) + 3.0 * 4.0,
            12.0 + 3.0 * 4.0,
        ],
    );

    text(&format!("{line} --offload nvme:/d")).shows(&[
        "at 70 TFLOP/s (assumed: --peak-tflops)",
        "12.0 + 12.0",
        "a life of 600 TB (assumed: --drive-tbw)",
    ]);

    assert!(!text(line).contains("TFLOP"));
}

/// A buffer of a block on a GPU begins at a multiple of this.
const GPU_ALIGN_BYTES: u64 = 256;

/// GELU's output is recomputed where the GPU's memory is too small otherwise, with 1 GiB for the
/// context, or as requested.
#[test]
fn gelu_is_recomputed_where_it_must() {
    let line = "--model gpt2-1.5b --gpus 1 --micro-batch 8";
    let planned = |more: &str| {
        let report = json(&format!("{line} {more}"));
        let stage = &report["stages"][0];
        (
            stage["recompute_gelu"].as_bool().unwrap(),
            stage["gpu"]["total_bytes"].as_u64().unwrap(),
        )
    };

    let (kept, most) = planned("");
    let (again, least) = planned("--recompute-gelu");
    assert_eq!(
        (kept, again, most - least),
        (false, true, 48 * (8192 * 6400 * 2 + GPU_ALIGN_BYTES))
    );
    let with = |gpu_memory: u64| planned(&format!("--gpu-memory {}MiB", gpu_memory >> 20));
    assert_eq!(with(most + (1025 << 20)), (false, most));
    assert_eq!(with(most + (1023 << 20)), (true, least));
    assert!(!planned("--gpu-memory 8GB --recompute-gelu=false").0);
    assert!(
        !planned("--gpu-memory 8GB --activation-checkpointing").0,
        "it has no effect"
    );
    text(&format!("{line} --gpu-memory 44GB")).shows(&["yes, --recompute-gelu"]);
    // A shape that is assumed: 17 layers of width 4 x 2176.
    let [kept, again] = ["false", "true"].map(|value| {
        let report = json(&format!("--params 1e9 --gpus 1 --recompute-gelu={value}"));
        report["stages"][0]["gpu"]["activations_bytes"]
            .as_u64()
            .unwrap()
    });

    assert_eq!(kept - again, 17 * 1024 * 4 * 2176 * 2);
}

#[test]
fn text_and_json_are_printed() {
    run(&args("--model nano --gpus 2")).unwrap();
    run(&args("--model nano --gpus 2 --json")).unwrap();
}
