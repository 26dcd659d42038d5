//! The work of a training step, counted by the stand-ins for the libraries of a GPU machine:
//! launches, copies, matrix products and collectives, with their bytes. Large models run in the
//! stand-ins' dry mode. On a GPU these tests are skipped.

#[path = "common/place.rs"]
mod place;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Stdio;

use integration_tests::{Files, Folder};
use serde_json::Value;
use zero_alloc::cuda::CudaDevice;

/// Calls, loaded bytes, stored bytes, and operations, by kind and name.
type Counts = BTreeMap<(String, String), [u64; 4]>;

/// Whether the device is not the stand-in, which alone counts.
fn skipped() -> bool {
    let name = CudaDevice::open(0).unwrap().name().to_owned();
    let skipped = !name.contains("stand-in");
    if skipped {
        println!("skipped: {name} does not count its work");
    }
    skipped
}

/// Rank 0's counts of a run, and the metrics of its last step.
fn train(dir: &Path, dry: bool, ranks: &str, args: &[&str]) -> (Counts, Value) {
    let mut command = place::zero();
    command.args([
        "train",
        "--device",
        "cuda",
        "--dtype",
        "bf16",
        "--no-checkpoint",
        "--no-matmul-timing",
    ]);

    command
        .args(["--metrics", "metrics", "--ranks", ranks])
        .args(args)
        .current_dir(dir)
        .stdin(Stdio::null());
    command
        .env("ZERO_STANDIN_DEVICES", ranks)
        .env("ZERO_STANDIN_COUNTS", "counts");
    if dry {
        command.env("ZERO_STANDIN_DRY", "1");
    }
    for old in ["metrics", "counts"] {
        let _absent = std::fs::remove_file(dir.join(old));
    }
    let output = command.output().unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(
        output.status.success(),
        "{args:?}: {}\n{out}{err}",
        output.status
    );
    let metrics = dir.text("metrics");

    (
        parse(dir),
        serde_json::from_str(metrics.lines().last().unwrap()).unwrap(),
    )
}

fn parse(dir: &Path) -> Counts {
    let text = dir.text("counts");
    let row = |line: &str| {
        let [kind, name, numbers @ ..] = &line.split(',').collect::<Vec<_>>()[..] else {
            panic!("{line}")
        };
        let numbers: Vec<u64> = numbers.iter().map(|n| n.parse().unwrap()).collect();
        (
            ((*kind).to_owned(), (*name).to_owned()),
            numbers.try_into().unwrap(),
        )
    };
    text.lines().skip(1).map(row).collect()
}

/// The third step's counts of GPT-2 124M in the dry mode, and its metrics.
fn step_of_124m(stage: &str, ranks: &str, batch: &str) -> (Counts, Value) {
    let dir = &Folder::on_disk();
    let tokens: Vec<u8> = (0..400_000u32)
        .flat_map(|i| ((i * 7919 % 50_257) as u16).to_le_bytes())
        .collect();
    dir.write("tokens.bin", tokens);

    let sizes = [
        "--model",
        "gpt2-124m",
        "--data",
        "tokens.bin",
        "--seq-len",
        "1024",
        "--micro-batch",
        batch,
    ];

    third_step(dir, ranks, &[&sizes[..], &["--stage", stage]].concat())
}

/// The third step's counts in the dry mode, and its metrics.
fn third_step(dir: &Path, ranks: &str, args: &[&str]) -> (Counts, Value) {
    let run = |steps| train(dir, true, ranks, &[args, &["--steps", steps]].concat());
    let ((two, _), (mut three, metrics)) = (run("2"), run("3"));
    // The number of events depends on what has completed.
    three.retain(|(kind, _), _| kind != "event");
    for (key, row) in &mut three {
        let old = two.get(key).copied().unwrap_or_default();
        *row = std::array::from_fn(|i| row[i] - old[i]);
    }

    three.retain(|_, row| row[0] > 0);
    (three, metrics)
}

/// The sum of all rows of `kind` whose names start with `name`.
fn sum(counts: &Counts, kind: &str, name: &str) -> [u64; 4] {
    let rows = counts
        .iter()
        .filter(|((of, n), _)| of == kind && n.starts_with(name));
    rows.fold([0; 4], |sum, (_, row)| {
        std::array::from_fn(|i| sum[i] + row[i])
    })
}

/// Parameters of GPT-2 124M, and its units: two embeddings with the head, 12 blocks, the last layer
/// norm.
const PARAMS: u64 = 124_439_808;
const UNITS: u64 = 14;

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_dry_run_counts_the_work_of_a_full_run() {
    if skipped() {
        return;
    }
    let model = place::data("model");
    let tokens = place::data("tokens.u16.bin");
    let [model, tokens] = [&model, &tokens].map(|path| path.to_str().unwrap());

    let sizes = [
        "--model",
        model,
        "--data",
        tokens,
        "--seq-len",
        "32",
        "--micro-batch",
        "2",
        "--steps",
        "3",
    ];

    for (ranks, stage) in [("1", "0"), ("1", "3"), ("2", "1"), ("2", "2"), ("2", "3")] {
        let dir = &Folder::on_disk();
        let args = [&sizes[..], &["--stage", stage]].concat();
        let [full, dry] = [false, true].map(|dry| {
            let mut counts = train(dir, dry, ranks, &args).0;
            // The number of events depends on what has completed.
            counts.retain(|(kind, _), _| kind != "event");
            counts
        });
        assert!(
            sum(&full, "product", "")[0] > 0 && sum(&full, "kernel", "")[1] > 0,
            "{full:?}"
        );
        for (key, row) in &full {
            let (row, dry) = (
                &mut row.clone(),
                &mut dry.get(key).copied().unwrap_or_default(),
            );
            if key.1.starts_with("embedding_tokens") {
                // Its bytes depend on the tokens; the dry mode takes those of the first batch.
                row[1..].fill(0);
                dry[1..].fill(0);
            }
            assert_eq!(dry, row, "{ranks} ranks, stage {stage}: {key:?}");
        }
        assert_eq!(full.len(), dry.len(), "{ranks} ranks, stage {stage}");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_step_of_one_rank_has_few_launches() {
    if skipped() {
        return;
    }
    for stage in ["0", "1", "2", "3"] {
        let (step, _) = step_of_124m(stage, "1", "32");
        assert_eq!(sum(&step, "collective", "")[0], 0, "stage {stage}");
        // Four a block forward, and twice as many backward; three for each part of the logits.
        let products = sum(&step, "product", "");
        let of_head = products[0] - 12 * 12;
        assert!(
            of_head > 0 && of_head.is_multiple_of(3),
            "stage {stage}: {of_head}"
        );
        // A forward and two backward products of each weight, at two operations a term; the
        // vocabulary is padded.
        let weights = 12 * 12 * 768 * 768 + 768 * 50_304;
        assert_eq!(
            products[3],
            3 * 2 * 32 * 1024 * weights,
            "stage {stage}: operations"
        );
        let launches = sum(&step, "kernel", "")[0];
        assert!(
            launches <= MOST_LAUNCHES,
            "stage {stage}: {launches} launches: {step:#?}"
        );
        let kernels = sum(&step, "kernel", "");
        let moved = (kernels[1] + kernels[2]) / 1_000_000_000;
        assert!(
            moved <= MOST_GB,
            "stage {stage}: {moved} GB of kernels: {step:#?}"
        );
        // The step's outcome. Nothing waits for the host to run a function.
        assert_eq!(sum(&step, "copy", "device to host")[0], 1, "stage {stage}");
        assert_eq!(sum(&step, "host function", "")[0], 0, "stage {stage}");
        // One rank reduces its gradients where they are; stage 3 gathers units by copies.
        assert_eq!(
            sum(&step, "copy", "device to device")[0] > 0,
            stage == "3",
            "stage {stage}"
        );
    }
}

/// Kernel launches of the step above, and the bytes that they move.
const MOST_LAUNCHES: u64 = 164;
/// Launches of a rank among several, which sums 14 units with an Adam each.
const MOST_LAUNCHES_OF_RANKS: u64 = 173;
const MOST_GB: u64 = 45;

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_ranks_send_each_unit_once() {
    if skipped() {
        return;
    }
    // Gathers: the updated parameters, at stage 3 all units in forward and all but the last again
    // in backward; and the statistics of the step.
    let mut at_stage_2 = Vec::new();

    for (stage, ranks, reduced, gathered, psis) in [
        ("1", "4", UNITS, UNITS + 1, 2),
        ("2", "4", UNITS, UNITS + 1, 2),
        ("3", "4", UNITS, 2 * UNITS, 3),
        ("2", "2", UNITS, UNITS + 1, 2),
    ] {
        let (step, metrics) = step_of_124m(stage, ranks, "8");
        // Blocks write into their buckets. Of the two other units one launch packs the shards of
        // all ranks.
        assert_eq!(
            sum(&step, "kernel", "pack_")[0],
            2,
            "stage {stage}, {ranks} ranks: {step:#?}"
        );
        let launches = sum(&step, "kernel", "")[0];
        assert!(
            launches <= MOST_LAUNCHES_OF_RANKS,
            "stage {stage}, {ranks} ranks: {launches} launches: {step:#?}"
        );
        at_stage_2.extend((stage == "2").then_some(launches));
        let (scatter, gather) = (
            sum(&step, "collective", "ncclReduceScatter"),
            sum(&step, "collective", "ncclAllGather"),
        );
        assert_eq!(scatter[0], reduced, "stage {stage}: reduce-scatters");
        assert_eq!(gather[0], gathered, "stage {stage}: all-gathers");
        assert_eq!(
            sum(&step, "collective", "")[0],
            reduced + gathered,
            "stage {stage}"
        );
        let sent = &metrics["comm_bytes"];
        assert_eq!(
            scatter[1],
            sent["reduce_scatter"].as_u64().unwrap(),
            "stage {stage}"
        );
        // Without the gather of statistics.
        assert!(
            gather[1] - sent["all_gather"].as_u64().unwrap() < 4096,
            "stage {stage}"
        );
        // Of each pass over the parameters a rank sends the shards of the others; padding is below
        // 1%.
        let ranks: u64 = ranks.parse().unwrap();
        let law = psis * 2 * PARAMS * (ranks - 1) / ranks;
        let sent = scatter[1] + gather[1];
        assert!(
            sent.abs_diff(law) < law / 100,
            "stage {stage}: {sent} bytes, and not {law}"
        );
    }

    assert_eq!(
        at_stage_2[0], at_stage_2[1],
        "launches of four ranks and of two"
    );
}

/// Four parts of the parameters: a quarter of the products, and sums of activations only.
#[test]
#[ignore = "needs a CUDA device"]
fn cuda_parts_sum_two_activations_a_block() {
    if skipped() {
        return;
    }
    let dir = &Folder::on_disk();
    let model = place::data("model").display().to_string();
    let tokens = place::data("tokens.u16.bin").display().to_string();
    let run = "--stage 2 --tensor-parallel 4 --micro-batch 2 --seq-len 32 --data";
    let run: Vec<&str> = run
        .split(' ')
        .chain([&*tokens, "--model", &model])
        .collect();
    let step = |more: &[&str]| third_step(dir, "4", &[&run[..], more].concat());

    // Three blocks of width 64.
    let (step_of_parts, metrics) = step(&[]);
    let row = 2 * 32 * 64 * 2;
    // Two in each forward and backward of a block, one of the embedding, one of the head.
    let sums = sum(&step_of_parts, "collective", "ncclAllReduce");
    assert_eq!(sums[0], 4 * 3 + 2, "{step_of_parts:#?}");
    let sent = &metrics["comm_bytes"];
    assert_eq!(sent["all_reduce"], (4 * 3 + 2) * row * 2 * 3 / 4);
    assert_eq!(sums[1], sent["all_reduce"].as_u64().unwrap());
    assert_eq!(sum(&step_of_parts, "collective", "ncclReduceScatter")[0], 0);
    let weights = 12 * 3 * 64 * 64 + 64 * 256;
    let products = sum(&step_of_parts, "product", "")[3];
    assert_eq!(products, 3 * 2 * 2 * 32 * weights / 4);

    // Backward sums the residual stream behind attention again. Of four rows it gathers all but two.
    let partitions = ["--activation-checkpointing", "--partition-activations"];
    let (checkpointed, _) = step(&partitions[..1]);
    let (partitioned, _) = step(&partitions);
    for step in [&checkpointed, &partitioned] {
        assert_eq!(sum(step, "collective", "ncclAllReduce")[0], 5 * 3 + 2);
    }
    let gathers = |step: &Counts| sum(step, "collective", "ncclAllGather");
    let [before, after] = [&checkpointed, &partitioned].map(gathers);
    assert_eq!(after[0] - before[0], 2);
    assert_eq!(after[1] - before[1], 2 * row * 3 / 4);

    // With sequence parallelism each sum is a reduce-scatter, and a gather is before each first product
    // and, in backward, also of each gradient of a second one; one each of the embedding and the head.
    let (divided, metrics) = step(&["--sequence-parallel"]);
    assert_eq!(
        sum(&divided, "collective", "ncclReduceScatter")[0],
        4 * 3 + 2
    );
    let gathered = gathers(&divided)[1] - gathers(&step_of_parts)[1];
    assert_eq!(gathered, (6 * 3 + 2) * row * 3 / 4);
    assert_eq!(gathers(&divided)[0] - gathers(&step_of_parts)[0], 6 * 3 + 2);
    // Partial sums of the norms: one all-reduce a block and one of the head, in fp32.
    let sums = sum(&divided, "collective", "ncclAllReduce");
    assert_eq!(sums[0], 3 + 1);
    let norms = (6 * 3 + 2) * 64 * 4;
    assert_eq!(metrics["comm_bytes"]["all_reduce"], norms * 2 * 3 / 4);
    // A rank computes the same products, adds residuals twice a block, and finishes the sums of two
    // norms a block and one of the head.
    assert_eq!(sum(&divided, "product", "")[3], products);
    let launches = |step: &Counts| sum(step, "kernel", "")[0];
    assert_eq!(
        launches(&divided) - launches(&step_of_parts),
        2 * 3 + 2 * 3 + 1
    );
}
