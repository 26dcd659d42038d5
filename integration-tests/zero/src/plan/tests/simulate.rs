//! Simulated steps, sweeps, timelines and tables of predictions.

use std::collections::BTreeSet;
use std::path::Path;

use clap::Parser;
use integration_tests::Printed;
use serde_json::Value;
use tempfile::TempDir;
use zero_shard::ZeroStage;
use zero_simulator::{Machine, to_text};

use super::{args, json, text, usage_error};
use crate::plan::simulate::{SimulatedOn, with_hardware};
use crate::plan::stage::fits;
use crate::plan::{Machines, PlanArgs, PlanRequest, run};
use crate::tune::{Batches, Candidate, Tried, TuneArgs, Tuned, candidates, tune};

const LINE: &str = "--model gpt2-124m --micro-batch 4 --seq-len 1024 --simulate --hardware";

fn stage(report: &Value, stage: usize) -> &Value {
    &report["stages"][stage]["simulated"]
}

#[test]
fn a_simulated_step_has_its_rates() {
    let report = json(&format!("{LINE} h100-80g:8x2 --tokens 1B"));
    assert_eq!(report["gpus"], 16);
    assert_eq!(report["nodes"], 2);
    assert_eq!(report["simulated_on"]["machine"]["name"], "h100-80g");
    let machine = &report["simulated_on"]["machine"];
    let peak_flops = machine["peak_flops"].as_f64().unwrap();
    for number in 0..4 {
        let simulated = stage(&report, number);
        let get = |key: &str| simulated[key].as_f64().unwrap();
        let step_s = get("step_ms") / 1e3;
        let tokens_per_s = 16.0 * 4.0 * 1024.0 / step_s;
        let near = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-9;
        assert!(near(get("tokens_per_s"), tokens_per_s), "{simulated}");
        assert!(near(get("tokens_per_s_gpu") * 16.0, tokens_per_s));
        assert!(near(get("tflops_gpu") * 1e12, get("mfu") * peak_flops));
        assert!(near(get("days") * 86_400.0 * tokens_per_s, 1e9));
        assert!(near(get("gpu_hours"), get("days") * 24.0 * 16.0));
        let range = [0, 1].map(|i| simulated["step_ms_range"][i].as_f64().unwrap());
        assert!(range[0] < get("step_ms") && get("step_ms") < range[1]);
        assert_eq!(simulated["extrapolated"], false);
    }
    let many = json(&format!("{LINE} h100-80g:8x32"));
    assert_eq!(stage(&many, 3)["extrapolated"], true);
    text(&format!("{LINE} h100-80g:8x32")).shows(&[
        "Simulated steps on h100-80g, not calibrated",
        "Extrapolated",
    ]);

    let without = json("--model gpt2-124m --gpus 8");
    assert!(without["stages"][0].get("simulated").is_none());
}

/// More nodes and a slower network cost time; a GPU alone sends nothing.
#[test]
fn links_cost_time() {
    let exposed = |hardware: &str, number: usize| {
        let report = json(&format!("{LINE} {hardware}"));
        stage(&report, number)["exposed_ms"].as_f64().unwrap()
    };
    let alone = json(&format!("{LINE} h100-80g:1x1"));
    for number in 0..4 {
        assert_eq!(stage(&alone, number)["network_ms"], 0.0);
        assert_eq!(stage(&alone, number)["links_ms"], 0.0);
    }
    assert!(exposed("h100-80g:8x8", 3) > exposed("h100-80g:8x1", 3));
    let of = |hardware| stage(&json(&format!("{LINE} {hardware}")), 2)["network_ms"].as_f64();
    assert!(of("a100-80g:8x4") > Some(0.0));
    assert_eq!(of("a100-80g:8x1"), Some(0.0));
}

/// Tensor parallelism divides the passes and sums their outputs; groups that do not fit a stage
/// leave it out.
#[test]
fn meshes_are_simulated() {
    let report = json(
        "--model gpt2-774m --micro-batch 4 --simulate --hardware h100-80g:4x2 --tensor-parallel 2",
    );
    let links = |report: &Value| stage(report, 3)["links_ms"].as_f64().unwrap();
    assert!(links(&report) > 0.0);
    let hpz = json(&format!("{LINE} h100-80g:4x2 --hpz 4"));
    assert!(stage(&hpz, 3)["step_ms"].as_f64().unwrap() > 0.0);
    let offload = json(&format!("{LINE} h100-80g:4x1 --offload cpu"));
    let slower = |report: &Value| stage(report, 2)["step_ms"].as_f64().unwrap();
    assert!(slower(&offload) > slower(&json(&format!("{LINE} h100-80g:4x1"))));
}

#[test]
fn wrong_simulations_are_refused() {
    for (line, said) in [
        (
            "h100-80g:8x2 --gpus 8",
            "--gpus and --hardware h100-80g:8x2 differ, which has 16",
        ),
        ("h100:8x2", "h100-80g"),
        ("h100-80g:8", "NAME:GPUSxNODES"),
        ("missing.json:8x1", "missing.json"),
        (
            "h100-80g:8x1 --efficiencies missing.json",
            "--efficiencies missing.json",
        ),
    ] {
        let error = usage_error(&format!("{LINE} {line}"));
        assert!(error.contains(said), "{line}: {error}");
    }
    text("--params 7e9 --simulate --hardware h100-80g:8x1")
        .shows(&["the shape of the model is assumed"]);
}

/// Offload to NVMe is simulated without a file, and waits for the disk.
#[test]
fn no_scratch_file_is_made() {
    let step_ms = |offload: &str| {
        let report = json(&format!("{LINE} h100-80g:4x1 {offload}"));
        let stages = report["stages"].as_array().unwrap().clone();
        stages
            .iter()
            .map(|stage| stage["simulated"]["step_ms"].as_f64().unwrap())
            .collect::<Vec<_>>()
    };
    let in_memory = step_ms("--offload cpu");
    let on_disk = step_ms("--offload nvme:/a/folder/that/is/not/there");
    for (memory, disk) in in_memory.iter().zip(&on_disk) {
        assert!(disk > memory, "{disk} {memory}");
    }
}

/// No time is better than a wrong one.
#[test]
fn unknown_costs_are_not_simulated() {
    let flags = "--activation-checkpointing --offload-activations";
    for flags in [flags, "--dtype fp32"] {
        let report = json(&format!("{LINE} h100-80g:4x1 {flags}"));
        assert!(report["stages"][3].get("simulated").is_none(), "{flags}");
    }
}

/// Of a step on 4 H100s, and of its collectives.
fn ms_of_stage_2(flags: &str) -> [f64; 2] {
    let report = json(&format!("{LINE} h100-80g:4x1 {flags}"));
    let simulated = stage(&report, 2);
    ["step_ms", "links_ms"].map(|key| simulated[key].as_f64().unwrap())
}

/// A frozen matrix has no gradient: a third of a block's products are left out, and those of
/// adapters are small. Of their exchange little is left but its latency.
#[test]
fn adapters_cost_less_than_training_all() {
    let [all, links] = ms_of_stage_2("");
    let [attention, fewer] = ms_of_stage_2("--lora r=8,targets=c_attn");
    let [every, _] = ms_of_stage_2("--lora r=8,targets=c_attn,c_proj,c_fc");
    assert!(
        0.6 * all < attention && attention < 0.8 * all,
        "{attention} {all}"
    );
    assert!(attention < every && every < 0.95 * all, "{every} {all}");
    assert!(fewer < 0.5 * links, "{fewer} {links}");
}

/// The ranks divide the matrices, whose products take longer than at the peak of the GPU; the
/// all-to-alls of shared sequences keep their sizes beside those of matrices.
#[test]
fn newton_schulz_costs_its_products() {
    let of_matrix = |short: f64, long: f64| 4.0 * short * short * long + 2.0 * short.powi(3);
    let of_block = 4.0 * of_matrix(768.0, 768.0) + 2.0 * of_matrix(768.0, 3072.0);
    let at_peak_ms = 12.0 * 5.0 * of_block / 4.0 / 989e12 * 1e3;
    for flags in ["", "--ulysses 2"] {
        let [adamw, links] = ms_of_stage_2(flags);
        let [muon, more_links] = ms_of_stage_2(&format!("{flags} --optimizer muon"));
        let more = muon - adamw;
        assert!(
            at_peak_ms < more && more < 8.0 * at_peak_ms,
            "{more} {at_peak_ms}"
        );
        // Directions and updates of 85M elements: a quarter of each, of which three quarters leave.
        let sent = 2.0 * 4.0 * 85e6 / 4.0 * 0.75;
        let at_least = sent / 450e9 * 1e3;
        let more = more_links - links;
        assert!(
            at_least < more && more < 4.0 * at_least,
            "{more} {at_least}"
        );
    }
}

/// Two GPUs that share sequences, of twice the micro-batch, compute what they compute alone, and
/// exchange what attention reads and writes.
#[test]
fn shared_sequences_cost_their_exchanges() {
    let step = |flags: &str| {
        let line = "--model gpt2-124m --seq-len 1024 --simulate --hardware h100-80g:4x1";
        let report = json(&format!("{line} {flags}"));
        let step = report["stages"][2]["simulated"].clone();
        ["step_ms", "links_ms", "tokens_per_s"].map(|key| step[key].as_f64().unwrap())
    };
    let [alone, links, speed] = step("--micro-batch 8");
    let [shared, more_links, shared_speed] = step("--micro-batch 16 --ulysses 2");
    assert!(shared > alone && shared < 1.3 * alone, "{shared} {alone}");
    // Of 12 blocks, 8 x 1,024 tokens, 2 x (768 + 768) x 2 elements of 2 bytes: half of each is sent.
    let bytes = 12.0 * 8.0 * 1024.0 * 4.0 * 1536.0 * 2.0 / 2.0;
    let at_least = bytes / (0.8 * 450e9) * 1e3;
    assert!(
        more_links > links + at_least,
        "{more_links} {links} {at_least}"
    );
    assert!((shared_speed / speed - alone / shared).abs() < 1e-9);
}

#[test]
fn timelines_and_sweeps_are_written() {
    let dir = tempfile::tempdir().unwrap();
    let [timeline, svg] = ["steps.json", "sweep.svg"].map(|name| dir.path().join(name));
    let line = format!(
        "{LINE} h100-80g:8x1 --timeline {} --sweep gpus=8..32 --sweep-svg {}",
        timeline.display(),
        svg.display()
    );
    run(&args(&line)).unwrap();
    let events: Value = serde_json::from_str(&std::fs::read_to_string(timeline).unwrap()).unwrap();
    let events = events["traceEvents"].as_array().unwrap();
    let of = |name: &str| events.iter().filter(|event| event["name"] == name).count();
    // Two steps are recorded, of 14 passes forward and backward each.
    assert_eq!(of("pass"), 2 * 2 * 14);
    assert!(of("all_gather") + of("reduce_scatter") + of("all_reduce") > 0);
    let drawn = std::fs::read_to_string(svg).unwrap();
    assert!(drawn.contains("stage 3") && drawn.contains("tokens/s"));

    for wrong in ["gpus=8", "gpus=32..8", "gpus=0..8", "nodes=1..2"] {
        let line = format!("{LINE} h100-80g:8x1 --sweep {wrong}");
        let words = ["plan"].into_iter().chain(line.split_whitespace());
        let error = super::Line::try_parse_from(words);
        let text = error.err().unwrap().to_string();
        text.shows(&["expected"]);
    }
}

fn tuned(line: &str) -> Tuned {
    let words = ["tune"].into_iter().chain(line.split_whitespace());
    tune(&TuneLine::try_parse_from(words).unwrap().args).unwrap()
}

/// Offloaded state is in the same memory on a host: what a search calls fitting, a run does.
#[test]
fn hosts_have_one_memory() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("host.toml");
    let machine = zero_simulator::Machine {
        name: "a host".to_owned(),
        memory_bytes: 3.6e9,
        cores: Some(2),
        measured: true,
        ..zero_simulator::Machine::v100_32g()
    };
    std::fs::write(&file, machine.to_text("host.toml").unwrap()).unwrap();
    let hardware = format!("--hardware {}:2x1", file.display());
    let line = format!("--model gpt2-124m --seq-len 64 {hardware}");
    let best = tuned(&line).best;
    assert!(!best.is_empty());
    for choice in best {
        assert!(choice.gpu_bytes <= 1_800_000_000, "{choice:?}");
        assert_eq!(choice.host_bytes, 0);
        // As before a run: state, activations and buckets of both ranks.
        let flags = choice
            .flags
            .iter()
            .filter(|flag| !flag.starts_with("--config"));
        let flags = flags.filter(|flag| !flag.starts_with("--stage"));
        let flags: Vec<_> = flags.cloned().collect();
        let report = json(&format!("{line} {}", flags.join(" ")));
        let stage = &report["stages"][usize::from(choice.stage)];
        assert!(
            stage["process_bytes"].as_u64().unwrap() <= 3_600_000_000,
            "{choice:?}"
        );
        assert_eq!(stage["fits"], true, "{choice:?}");
    }
}

/// A search in which nothing can be simulated says why.
#[test]
fn refusals_have_their_reason() {
    let line = "tune --model nano --hardware h100-80g:1x1 --dtype fp32";
    let error = tune(&TuneLine::try_parse_from(line.split(' ')).unwrap().args);
    let error = error.unwrap_err().to_string();
    error.shows(&["fp32"]);
}

#[derive(Parser)]
struct TuneLine {
    #[command(flatten)]
    args: TuneArgs,
}

/// The best configuration is the fastest of all that fit, fits by the plan, and has the plan's time.
#[test]
fn the_best_of_all_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let batch = "--batch-tokens 131072 --seq-len 1024";
    let best = tuned(&format!(
        "--model gpt2-124m --hardware rtx4090-24g:4x2 {batch}"
    ));
    assert_eq!(best.best.len(), 5);
    assert_eq!(best.gpus, 8);
    for choice in &best.best {
        assert!(choice.gpu_bytes <= best.gpu_memory_bytes);
        let flags: Vec<_> = choice.flags.iter().map(String::as_str).collect();
        let flags = flags.join(" ");
        let stage: usize = choice.stage.into();
        let flags = flags.replace(&format!("--stage {stage} "), "");
        let file = dir.path().join("deepspeed.json");
        std::fs::write(&file, choice.deepspeed.to_string()).unwrap();
        let flags = flags.replace("deepspeed.json", &file.display().to_string());
        let line = format!(
            "--model gpt2-124m --seq-len 1024 --simulate --hardware rtx4090-24g:4x2 {flags}"
        );
        let report = json(&line);
        let simulated = &report["stages"][stage]["simulated"];
        assert_eq!(
            simulated["step_ms"].as_f64(),
            Some(choice.step_ms),
            "{line}"
        );
        let planned = &report["stages"][stage]["gpu"]["total_bytes"];
        assert_eq!(planned.as_u64(), Some(choice.gpu_bytes), "{line}");
        // The whole batch.
        let sequences = choice.tokens_per_s * choice.step_ms / 1e3 / 1024.0;
        assert!((sequences - 128.0).abs() < 1e-6, "{sequences}");
    }
    let speeds = best.best.iter().map(|choice| choice.tokens_per_s);
    assert!(
        speeds
            .clone()
            .zip(speeds.skip(1))
            .all(|(a, b)| a * 1.003 > b)
    );

    // Every stage with three micro-batches, by hand: none is faster.
    for micro in [1, 4, 16] {
        let accum = 128 / 8 / micro;
        for checkpointing in ["", "--activation-checkpointing"] {
            let report = json(&format!(
                "--model gpt2-124m --seq-len 1024 --simulate --hardware rtx4090-24g:4x2 \
                 --micro-batch {micro} --grad-accum {accum} {checkpointing}"
            ));
            for stage in report["stages"].as_array().unwrap() {
                if stage["fits"] == true {
                    let speed = stage["simulated"]["tokens_per_s"].as_f64().unwrap();
                    assert!(speed <= best.best[0].tokens_per_s * 1.003, "{stage}");
                }
            }
        }
    }
}

/// A file of a GPU with `memory_bytes`.
fn gpu(dir: &Path, memory_bytes: f64) -> String {
    let file = dir.join("gpu.json").display().to_string();
    let machine = Machine {
        memory_bytes,
        ..Machine::preset("rtx4090-24g").unwrap()
    };
    std::fs::write(&file, to_text(&machine, &file).unwrap()).unwrap();
    file
}

/// A search on small GPUs, with all of its candidates.
struct Searched {
    base: PlanArgs,
    machines: Machines,
    groups: Vec<Batches>,
    tuned: Tuned,
    _dir: TempDir,
}

impl Searched {
    /// `cluster`: GPUs x nodes; `batch_tokens` of 64 tokens a sequence.
    fn new(cluster: &str, batch_tokens: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let hardware = format!("{}:{cluster}", gpu(dir.path(), 52e6));
        let line = format!(
            "tune --model nano --hardware {hardware} --seq-len 64 --batch-tokens {batch_tokens}"
        );
        let args = TuneLine::try_parse_from(line.split_whitespace())
            .unwrap()
            .args;
        let base = PlanArgs::of_tune("nano", &hardware, Some(64), None, None);
        let machines = Machines::new(&base).unwrap();
        Self {
            base: with_hardware(&base).unwrap(),
            groups: candidates(&machines, args.batch_tokens).unwrap(),
            tuned: tune(&args).unwrap(),
            machines,
            _dir: dir,
        }
    }

    /// The speed of a candidate that fits, without what a search shares.
    fn alone(&self, candidate: &Candidate) -> Option<f64> {
        let (_, node, _) = self.machines.sizes();
        let plan = candidate.plan(&self.base, node as usize / candidate.tensor_parallel);
        let (request, _) = PlanRequest::new(&plan).ok()?;
        let request = request.with_prefetch(candidate.prefetch_elems);
        let stage = ZeroStage::from_number(candidate.stage.into()).unwrap();
        let units = self.machines.unit_sizes(candidate.tensor_parallel);
        let on = SimulatedOn::of(&plan).unwrap().unwrap();
        let fits = fits(&request, stage).unwrap();
        fits.then(|| {
            on.stage(&request, stage, units.largest)
                .unwrap()
                .tokens_per_s
        })
    }
}

/// No candidate that fits is faster than the best, whatever the search left out.
#[test]
fn no_candidate_is_faster_than_the_best() {
    let searched = Searched::new("2x1", 1536);
    let mut fastest = 0.0_f64;
    let mut did_not_fit = 0;
    for group in &searched.groups {
        let mut run = searched.machines.run(&group.candidates[0].1).unwrap();
        for (_, candidate) in &group.candidates {
            match run.choice(candidate, 0.0).unwrap() {
                Tried::Fits(choice) => fastest = fastest.max(choice.tokens_per_s),
                Tried::DoesNotFit => did_not_fit += 1,
                Tried::Slower => unreachable!(),
            }
        }
    }
    let best = &searched.tuned.best[0];
    assert!(did_not_fit > 0);
    assert!(best.tokens_per_s >= fastest * 0.998, "{best:?}, {fastest}");
}

/// The shared schedules and memory of a search give each candidate the figures that it has alone, and
/// no step is faster than its bound.
#[test]
fn candidates_are_as_alone() {
    let searched = Searched::new("2x2", 3072);
    let mut fit = 0;
    for group in searched.groups.iter().step_by(17) {
        let mut run = searched.machines.run(&group.candidates[0].1).unwrap();
        for (bound, candidate) in &group.candidates {
            let alone = searched.alone(candidate);
            let speed = match run.choice(candidate, 0.0).unwrap() {
                Tried::Fits(choice) => Some(choice.tokens_per_s),
                _ => None,
            };
            assert_eq!(speed, alone, "{candidate:?}");
            assert!(speed.is_none_or(|speed| speed <= *bound), "{candidate:?}");
            fit += usize::from(speed.is_some());
        }
    }
    assert!(fit > 0);
}

/// Micro-batches divide the batch, and buckets, prefetch and routes vary.
#[test]
fn all_settings_vary() {
    let searched = Searched::new("2x2", 3072);
    let of = |get: fn(&Candidate) -> String| {
        let all = searched.groups.iter().flat_map(|group| &group.candidates);
        let whole = all.filter(|(_, of)| of.tensor_parallel == 1);
        whole.map(|(_, of)| get(of)).collect::<BTreeSet<_>>()
    };
    let micro_batches = of(|of| format!("{:02}", of.micro_batch));
    assert!(
        micro_batches
            .iter()
            .eq(["01", "02", "03", "04", "06", "12"])
    );
    assert_eq!(of(|of| format!("{:?}", of.collectives)).len(), 3);
    assert_eq!(of(|of| format!("{:?}", of.bucket_elems)).len(), 5);
    assert_eq!(of(|of| format!("{:?}", of.prefetch_elems)).len(), 4);
    let tokens = searched.tuned.batch_tokens;
    assert_eq!(tokens, Some(3072));
}

/// M is 2^20 where 10^6 is no whole number of sequences.
#[test]
fn tokens_have_two_readings() {
    let tokens = |line: &str| tuned(line).batch_tokens;
    let line = "--model nano --hardware h100-80g:2x1 --batch-tokens 1M --seq-len";
    assert_eq!(tokens(&format!("{line} 64")), Some(1_000_000));
    assert_eq!(tokens(&format!("{line} 256")), Some(1 << 20));
}

#[test]
fn wrong_searches_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let small = format!("--model nano --hardware {}:1x1", gpu(dir.path(), 1e6));
    for (line, said) in [
        ("--model nano --hardware abacus:8x1", "abacus"),
        (
            "--model nano --hardware h100-80g:8x1 --batch-tokens 1000",
            "--batch-tokens 1000",
        ),
        (&small, "fits in no configuration"),
    ] {
        let words = ["tune"].into_iter().chain(line.split_whitespace());
        let error = tune(&TuneLine::try_parse_from(words).unwrap().args);
        let error = error.unwrap_err().to_string();
        assert!(error.contains(said), "{line}: {error}");
    }
}

/// Rows of one machine and software, of which one has another micro-batch.
const ROWS: &str = "source,gpu,nodes,gpus,model,params,layers,width,heads,kv_heads,ffn,vocab,seq,micro_batch,global_batch,stage,act_ckpt,dtype,intra_bw,inter_bw,tok_s_gpu,mfu,mem_gib
ours,h100_80gb,1,8,small,124439808,12,768,12,12,3072,50304,1024,8,64,3,none,bf16,450,50,200000,,
ours,h100_80gb,1,8,small,124439808,12,768,12,12,3072,50304,1024,16,128,3,none,bf16,450,50,230000,,
";

fn table(dir: &Path, name: &str, text: &str) -> String {
    let path = dir.join(name);
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

#[test]
fn tables_are_predicted() {
    let dir = tempfile::tempdir().unwrap();
    let known = table(dir.path(), "a.csv", ROWS);
    let more = ROWS.replace(",8,64,", ",4,32,");
    let more = table(dir.path(), "b.csv", &more);
    let saved = dir.path().join("efficiencies.json").display().to_string();
    run(&args(&format!(
        "--calibrate {known} --predict {more} --rows rule --save-efficiencies {saved}"
    )))
    .unwrap();
    // The saved file is read, and its source named.
    let report = json(&format!("{LINE} h100-80g:8x1 --efficiencies {saved}"));
    assert_eq!(
        report["simulated_on"]["calibrated_on"],
        "2 rows of ours on h100_80gb"
    );

    let other = ROWS.replacen("ours", "theirs", 1);
    let two = table(dir.path(), "two.csv", &other);
    let empty = table(dir.path(), "empty.csv", ROWS.lines().next().unwrap());
    let unknown = table(
        dir.path(),
        "unknown.csv",
        &ROWS.replace("h100_80gb", "abacus"),
    );
    for (calibrate, said) in [
        (&two, "calibrate on rows of one machine and software"),
        (&empty, "no rows"),
        (&unknown, "abacus"),
        (&saved, "line 2"),
    ] {
        let error = run(&args(&format!("--calibrate {calibrate} --predict {more}")));
        let error = error.unwrap_err().to_string();
        error.shows(&[said]);
    }
}
