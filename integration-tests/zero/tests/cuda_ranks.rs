//! `zero train --device cuda` with several ranks: one process each, over NCCL. They share the GPU
//! of a machine that has only one.

#[path = "common/place.rs"]
mod place;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use integration_tests::{Files, Folder, Printed};
use serde_json::Value;
use zero_models::ModelConfig;

/// Two ranks on one GPU, unless later flags say otherwise.
const CUDA: [&str; 5] = ["--device", "cuda", "--share-gpus", "--ranks", "2"];

/// Timeout of a run, longer than any run takes.
const LONG: Duration = Duration::from_secs(400);

fn zero(dir: &Path, args: &[&str]) -> Command {
    let mut command = place::zero();
    command.arg("train");
    if !args.contains(&"--model") {
        command.arg("--model").arg(place::data("model"));
    }
    command.arg("--data").arg(place::data("tokens.u16.bin"));
    command.args(["--lr", "1e-3", "--clip", "1"]);

    for (flag, value) in [
        ("--micro-batch", "1"),
        ("--seq-len", "32"),
        ("--steps", "3"),
    ] {
        if !args.contains(&flag) {
            command.args([flag, value]);
        }
    }

    command
        .args(args)
        .current_dir(dir)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());

    command
}

fn finish(mut child: Child) -> Output {
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > LONG {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().unwrap()
}

fn text(output: &Output) -> String {
    let out = String::from_utf8_lossy(&output.stdout);
    let err = String::from_utf8_lossy(&output.stderr);
    format!("{}\n{out}{err}", output.status)
}

fn run(mut command: Command) -> String {
    let output = finish(command.spawn().unwrap());
    assert!(output.status.success(), "{}", text(&output));
    text(&output)
}

fn steps(dir: &Path, file: &str) -> Vec<Value> {
    let text = dir.text(file);
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// The child processes of `pid`.
fn children(pid: u32) -> Vec<u32> {
    let path = format!("/proc/{pid}/task/{pid}/children");
    std::fs::read_to_string(path)
        .unwrap_or_default()
        .split_whitespace()
        .filter_map(|p| p.parse().ok())
        .collect()
}

fn is_running(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

/// The steps of a run on the host and of the same on CUDA with the flags `on_gpu`, whose losses and
/// norms agree.
fn on_host_and_cuda(dir: &Path, args: &[&str], on_gpu: &[&str]) -> Vec<(Value, Value)> {
    within(1e-4, dir, args, on_gpu)
}

/// [`on_host_and_cuda`] with another relative limit.
fn within(limit: f64, dir: &Path, args: &[&str], on_gpu: &[&str]) -> Vec<(Value, Value)> {
    let host = [args, &["--device", "cpu", "--metrics", "host"]].concat();
    run(zero(dir, &host));
    let more = ["--device", "cuda", "--share-gpus", "--metrics", "cuda"];
    let said = run(zero(dir, &[args, &more, on_gpu].concat()));
    said.shows(&["ranks share GPUs: timings are not meaningful"]);

    let host = steps(dir, "host");
    let cuda = steps(dir, "cuda");
    assert_eq!((host.len(), cuda.len()), (3, 3));
    for (host, cuda) in host.iter().zip(&cuda) {
        for key in ["loss", "grad_norm"] {
            let on_host = host[key].as_f64().unwrap();
            let on_cuda = cuda[key].as_f64().unwrap();
            assert!(
                (on_host - on_cuda).abs() <= limit * on_host.abs(),
                "{args:?}, {key}: {on_cuda} for {on_host}"
            );
        }
    }
    host.into_iter().zip(cuda).collect()
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_ranks_follow_the_host() {
    for (stage, ranks) in [("0", "2"), ("1", "2"), ("2", "2"), ("3", "2"), ("3", "3")] {
        let dir = &Folder::on_disk();
        let args = ["--stage", stage, "--ranks", ranks];
        for (host, cuda) in on_host_and_cuda(dir, &args, &[]) {
            assert_eq!(host["comm_bytes"], cuda["comm_bytes"], "stage {stage}");
            for key in ["params_bytes", "grads_bytes", "optimizer_bytes"] {
                assert_eq!(host["memory"][key], cuda["memory"][key], "stage {stage}");
            }
        }
    }
}

/// Matrices are joined from the shards of ranks and from their parts, and orthogonalised by
/// products in bf16; the host's are in fp32.
#[test]
#[ignore = "needs a CUDA device"]
fn cuda_matrices_follow_the_host() {
    for (stage, ranks, more) in [
        ("2", "2", ""),
        ("3", "4", "--tensor-parallel 2"),
        ("3", "2", "--offload cpu"),
    ] {
        let dir = &Folder::on_disk();
        let model = place::data("model").display().to_string();
        let flags = format!("--optimizer muon --micro-batch 1 --seq-len 32 {more}");
        let flags: Vec<&str> = flags
            .split_whitespace()
            .chain(["--model", &model])
            .collect();
        let run = ["--stage", stage, "--ranks", ranks, "--muon-lr", "0.02"];
        let planned = planned(stage, ranks, &[&flags[..], &["--dtype", "fp32"]].concat());
        for (host, cuda) in within(2e-3, dir, &[&run[..], &flags].concat(), &[]) {
            assert_eq!(host["comm_bytes"], cuda["comm_bytes"], "{flags:?}");
            let bytes = |value: &Value| value.as_u64().unwrap();
            let peak = bytes(&cuda["memory"]["peak_bytes"]);
            let total = bytes(&planned["gpu"]["total_bytes"]);
            // A few scalars are not planned. With offload those of a device are; of four ranks the
            // first has less than another.
            let limit = if more.is_empty() { 256 } else { 64 << 10 };
            let distance = peak.abs_diff(total);
            assert!(distance < limit, "{flags:?}: {peak}, planned {total}");
        }
    }
}

/// The stage of a plan for a run of `ranks` GPUs at `stage` with `flags`.
fn planned(stage: &str, ranks: &str, flags: &[&str]) -> Value {
    let mut command = place::zero();
    command
        .args(["plan", "--json", "--gpus", ranks])
        .args(flags);
    let plan: Value = serde_json::from_slice(&command.output().unwrap().stdout).unwrap();
    let stage: usize = stage.parse().unwrap();
    plan["stages"][stage].clone()
}

/// Ranks that share sequences exchange tokens for heads on the compute stream. The Llama has eight
/// heads over two of keys, so that four ranks share them in pairs.
#[test]
#[ignore = "needs a CUDA device"]
fn cuda_shared_sequences_follow_the_host() {
    let model = |folder| place::data(folder).display().to_string();
    let gpt2 = model("model");
    let llama = model("../llama-gqa/model");
    let sizes = ["--dtype", "fp32", "--micro-batch", "1", "--seq-len", "32"];
    let checkpointing = "--ulysses 4 --activation-checkpointing";
    for (stage, ranks, model, flags, dropout) in [
        ("2", "2", &gpt2, "--ulysses 2", "0.1"),
        ("3", "4", &gpt2, "--ulysses 2 --grad-accum 2", "0"),
        ("3", "4", &llama, checkpointing, "0.1"),
    ] {
        let dir = &Folder::on_disk();
        let flags: Vec<&str> = flags
            .split(' ')
            .chain(sizes)
            .chain(["--model", model])
            .collect();
        let run = ["--stage", stage, "--ranks", ranks, "--dropout", dropout];
        let planned = planned(stage, ranks, &flags)["gpu"]["activations_bytes"].clone();
        for (host, cuda) in on_host_and_cuda(dir, &[&run[..], &flags].concat(), &[]) {
            assert_eq!(host["comm_bytes"], cuda["comm_bytes"], "{flags:?}");
            assert!(host["comm_bytes"]["all_to_all"].as_u64().unwrap() > 0);
            assert_eq!(cuda["memory"]["activations_bytes"], planned, "{flags:?}");
        }
    }

    // A recorded step would have the exchanges in its graph.
    let dir = &Folder::on_disk();
    let flags = "--ranks 2 --ulysses 2 --stage 2 --device cuda --share-gpus --cuda-graph";
    let flags: Vec<&str> = flags.split(' ').collect();
    let said = text(&finish(zero(dir, &flags).spawn().unwrap()));
    said.shows(&["--cuda-graph: steps whose ranks share micro-batches"]);
}

/// Ranks that have a part of each parameter sum activations on the compute stream; with partitioned
/// activations they gather the inputs of blocks, which may be on the host.
#[test]
#[ignore = "needs a CUDA device"]
fn cuda_parts_follow_the_host() {
    let model = |folder| place::data(folder).display().to_string();
    let gpt2 = model("model");
    let llama = model("../llama-gqa/model");
    let sizes = ["--dtype", "fp32", "--micro-batch", "1", "--seq-len", "32"];
    let partitions = "--activation-checkpointing --partition-activations";
    let divides = "--sequence-parallel";
    let repeats = "--sequence-parallel --activation-checkpointing";
    let folder = &Folder::on_disk();
    let qwen3 = qwen3(folder);
    for (stage, ranks, model, flags, on_gpu) in [
        ("2", "2", &gpt2, "--dropout 0.1", ""),
        ("3", "4", &llama, partitions, ""),
        ("1", "2", &gpt2, partitions, "--offload-activations"),
        ("3", "4", &llama, "--ulysses 2", ""),
        ("2", "2", &gpt2, "--sequence-parallel --dropout 0.1", ""),
        ("1", "2", &gpt2, divides, ""),
        ("3", "4", &llama, divides, ""),
        ("2", "4", &llama, "--sequence-parallel --ulysses 2", ""),
        ("3", "2", &llama, repeats, "--offload-activations"),
        ("2", "2", &qwen3, "--grad-accum 2", ""),
        ("3", "2", &qwen3, repeats, ""),
        ("1", "2", &gpt2, ADAPTERS, ""),
        ("3", "4", &qwen3, ADAPTERS_OF_PARTS, ""),
    ] {
        let dir = &Folder::on_disk();
        let cut: Vec<&str> = flags
            .split(' ')
            .chain(["--tensor-parallel", "2", "--model", model])
            .chain(sizes)
            .collect();
        let run = ["--stage", stage, "--ranks", ranks];
        let on_gpu: Vec<&str> = on_gpu.split(' ').filter(|flag| !flag.is_empty()).collect();
        let steps = on_host_and_cuda(dir, &[&run[..], &cut].concat(), &on_gpu);
        let planned: Vec<&str> = [&cut[..], &on_gpu].concat();
        let planned = planned
            .into_iter()
            .filter(|flag| !flag.starts_with("--dropout"));
        let planned: Vec<&str> = planned.filter(|flag| *flag != "0.1").collect();
        let planned = self::planned(stage, ranks, &planned);
        for (host, cuda) in steps {
            // Where both gather and sum the same.
            let repeats = flags.contains("--sequence-parallel --activation-checkpointing");
            let differs = model == &gpt2 && flags.contains("--sequence-parallel");
            if on_gpu.is_empty() && !repeats && !differs {
                assert_eq!(host["comm_bytes"], cuda["comm_bytes"], "{flags}");
            }
            let held = &cuda["memory"]["activations_bytes"];
            assert_eq!(held, &planned["gpu"]["activations_bytes"], "{flags}");
            for kind in ["all_reduce", "reduce_scatter"] {
                let most = &planned["sent"][format!("{kind}_bytes")];
                assert_eq!(&cuda["comm_bytes"][kind], most, "{kind}: {flags}");
            }
        }
    }
}

/// Adapters of first and second matrices, of which tensor parallelism cuts B or A.
const ADAPTERS: &str = "--lora r=4,dropout=0.1,targets=c_attn,mlp.c_proj --dropout 0.1";
const ADAPTERS_OF_PARTS: &str =
    "--ulysses 2 --sequence-parallel --lora r=3,dropout=0.1,targets=q_proj,o_proj,down_proj";

/// A Qwen 3 with norms of queries and keys, biases and a vocabulary of an odd number of tokens.
fn qwen3(folder: &Path) -> String {
    let json = r#"{"model_type": "qwen3", "vocab_size": 263, "hidden_size": 48, "head_dim": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "silu", "attention_bias": true,
        "tie_word_embeddings": true, "initializer_range": 0.2}"#;
    let (config, _) = ModelConfig::from_hf_json(json).unwrap();
    folder.write("config.json", config.to_hf_json("float32"));
    let params = config.units().into_iter().flat_map(|unit| unit.params);
    let tensors: Vec<_> = params
        .map(|param| {
            let elems = param.shape.iter().product::<u64>();
            let mut values = vec![0.0f32; elems as usize];
            config
                .fill_initial(0, &param.name, 0..elems, &mut values)
                .unwrap();
            let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
            let shape: Vec<usize> = param.shape.iter().map(|n| *n as usize).collect();
            (param.name, shape, bytes)
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let dtype = safetensors::Dtype::F32;
        let view = safetensors::tensor::TensorView::new(dtype, shape.clone(), bytes).unwrap();
        (name, view)
    });
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
    folder.display().to_string()
}

/// Groups of ranks: one communicator an axis.
#[test]
#[ignore = "needs a CUDA device"]
fn cuda_groups_follow_the_host() {
    let world = ["--shard-group", "2", "--shard-optimizer", "world"];
    let cases: [(&str, &[&str], &[&str]); 6] = [
        // Two levels, since there are several machines.
        ("3", &[], &[]),
        ("2", &[], &["--cuda-graph"]),
        ("3", &["--shard-group", "2"], &[]),
        ("3", &["--hpz", "2"], &[]),
        ("2", &world, &["--cuda-graph"]),
        (
            "3",
            &world,
            &["--offload", "cpu", "--offload-params", "cpu"],
        ),
    ];
    for (stage, groups, on_gpu) in cases {
        let dir = &Folder::on_disk();
        let args = [
            &["--stage", stage, "--ranks", "4", "--ranks-per-node", "2"],
            groups,
        ]
        .concat();
        for (host, cuda) in on_host_and_cuda(dir, &args, on_gpu) {
            // Offloaded parts of parameters are gathered from the replicas at each use.
            if on_gpu.contains(&"--offload-params") {
                let between = |step: &Value| step["comm_bytes"]["between"].as_u64().unwrap();
                assert!(between(&cuda) > between(&host), "{groups:?}");
            } else {
                assert_eq!(host["comm_bytes"], cuda["comm_bytes"], "{groups:?}");
            }
        }
    }
}

/// The ranks of a machine choose the algorithms of matrix products together, and later runs use the
/// same.
#[test]
#[ignore = "needs a CUDA device"]
fn cuda_ranks_keep_the_choices_of_products() {
    let dir = &Folder::on_disk();
    let choices = dir.join("choices");
    let files = || -> BTreeMap<PathBuf, String> {
        let files = std::fs::read_dir(&choices)
            .unwrap()
            .map(|file| file.unwrap().path());
        files
            .map(|path| (path.clone(), std::fs::read_to_string(path).unwrap()))
            .collect()
    };

    let train = |more: &[&str]| {
        let mut command = zero(dir, &[&CUDA[..], &["--stage", "3"], more].concat());
        command
            .env("ZERO_MATMUL_CACHE", &choices)
            .env_remove("ZERO_MATMUL_TIMING");
        run(command)
    };

    train(&["--no-matmul-timing", "--metrics", "off"]);
    assert!(!choices.exists());
    let said = train(&["--metrics", "first"]);
    said.omits(&["measured anew", "cannot be kept"]);
    let kept = files();
    assert!(
        kept.len() > 5 && kept.values().all(|text| text.contains("\nchoice ")),
        "{kept:?}"
    );
    train(&["--metrics", "second"]);
    assert_eq!(files(), kept);
    let [off, first, second] = ["off", "first", "second"].map(|file| steps(dir, file));

    for ((off, first), second) in off.iter().zip(&first).zip(&second) {
        assert_eq!(
            (&first["loss"], &first["grad_norm"]),
            (&second["loss"], &second["grad_norm"])
        );
        let [off, first] = [off, first].map(|step| step["loss"].as_f64().unwrap());
        assert!((off - first).abs() <= 1e-4 * off.abs(), "{off} and {first}");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_ranks_replay_their_steps_with_the_same_bits() {
    for stage in ["0", "1", "2"] {
        let dir = &Folder::on_disk();
        let args = ["--stage", stage, "--steps", "6"];
        // A save in progress advances during replayed steps.
        let saves = ["--checkpoint-every", "3", "--checkpoint"];
        for (folder, more) in [("a", &["plain"][..]), ("b", &["graphs", "--cuda-graph"])] {
            let outputs = [&saves[..], &[folder, "--metrics"], more].concat();
            run(zero(dir, &[&CUDA[..], &args, &outputs].concat()));
        }
        let plain = steps(dir, "plain");
        let graphs = steps(dir, "graphs");
        assert_eq!((plain.len(), graphs.len()), (6, 6));
        for (plain, graphs) in plain.iter().zip(&graphs) {
            for key in ["step", "loss", "grad_norm"] {
                assert_eq!(plain[key], graphs[key], "stage {stage}, {key}");
            }
            for key in ["reduce_scatter", "all_gather", "all_reduce"] {
                assert_eq!(
                    plain["comm_bytes"][key], graphs["comm_bytes"][key],
                    "stage {stage}, {key}"
                );
            }
        }
        // Control traffic depends on when a save advances, which depends on the disk.
        let least = |steps: &[Value]| {
            steps
                .iter()
                .filter_map(|s| s["comm_bytes"]["control"].as_u64())
                .min()
        };
        assert_eq!(least(&plain), least(&graphs), "stage {stage}");
    }
}

/// Adapters on a base in 4 bits: a run that ends and goes on has the losses of one that does not.
/// The host trains them on.
#[test]
#[ignore = "needs a CUDA device"]
fn cuda_ranks_resume_adapters() {
    let dir = &Folder::on_disk();
    let model = place::data("../llama-gqa/model").display().to_string();
    let lora = "r=4,dropout=0.1,targets=q_proj,v_proj,down_proj";
    let adapters = ["--model", &model, "--lora", lora];
    let base = ["--stage", "3", "--quantize-frozen", "nf4"];
    for (saved, metrics, count) in [("whole", "whole.jsonl", "4"), ("part", "part.jsonl", "2")] {
        let outputs = [
            "--steps",
            count,
            "--checkpoint",
            saved,
            "--metrics",
            metrics,
        ];
        run(zero(dir, &[&CUDA[..], &adapters, &base, &outputs].concat()));
    }
    let zero = |line: &str| {
        let mut command = place::zero();
        command.args(line.split(' ')).current_dir(dir);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        run(command)
    };
    zero("train --resume part --steps 4 --device cuda --share-gpus");
    let figures = |file| -> Vec<[Value; 2]> {
        let of = |step: &Value| [step["loss"].clone(), step["grad_norm"].clone()];
        steps(dir, file).iter().map(of).collect()
    };
    assert_eq!(figures("part.jsonl"), figures("whole.jsonl"));

    zero("train --resume part --steps 5 --device cpu");
    assert_eq!(figures("part.jsonl").len(), 5);
    zero("ckpt export part peft");
    assert!(dir.join("peft/adapter_model.safetensors").exists());
}

/// Starts a rank for each of `flags`, as another launcher does.
fn launched(dir: &Path, flags: &[&[&str]]) -> Vec<Output> {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port().to_string();
    drop(free);

    let start = |(rank, more): (usize, &&[&str])| {
        let args = [&["--device", "cuda", "--share-gpus"], *more].concat();
        let mut command = zero(dir, &args);
        let rank = rank.to_string();
        let ranks = flags.len().to_string();
        command
            .env("RANK", &rank)
            .env("LOCAL_RANK", &rank)
            .env("WORLD_SIZE", ranks)
            .env("MASTER_PORT", &port);
        command
            .env("MASTER_ADDR", "127.0.0.1")
            .env("NCCL_MULTI_RANK_GPU_ENABLE", "1")
            .spawn()
            .unwrap()
    };

    let ranks: Vec<Child> = flags.iter().enumerate().map(start).collect();
    ranks.into_iter().map(finish).collect()
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_ranks_of_other_settings_are_refused() {
    let same: &[&str] = &["--no-checkpoint", "--metrics", "m"];
    let other: &[&str] = &["--no-checkpoint", "--metrics", "m", "--weight-decay", "0.5"];
    for (flags, named) in [
        (&[same, other][..], "rank 1"),
        (&[other, same, same], "rank 0"),
    ] {
        let dir = &Folder::on_disk();
        for output in launched(dir, flags) {
            let said = text(&output);
            assert_eq!(output.status.code(), Some(2), "{said}");
            said.shows(&[&format!("{named} has other settings than rank")]);
            said.shows(&["--weight-decay (optimizer.hyper.weight_decay) is 0.5"]);
        }
        assert!(!dir.join("m").exists(), "a step ran");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_ranks_of_another_launcher_join_it() {
    let dir = &Folder::on_disk();
    let outputs = launched(dir, &[&[], &[]]);
    let said = [0, 1].map(|rank| text(&outputs[rank]));
    let succeeded = outputs.iter().all(|output| output.status.success());
    assert!(succeeded && said[0].contains("held by"), "{said:?}");
    assert!(outputs[1].stdout.is_empty(), "{said:?}");
}

/// Also of a replayed run, and of groups: a rank of one group ends the ranks of both, and is named
/// by its number in the world.
#[test]
#[ignore = "needs a CUDA device"]
fn cuda_killed_rank_ends_the_run() {
    for (ranks, flags) in [
        ("3", "--stage 3"),
        ("3", "--cuda-graph --stage 2"),
        ("4", "--stage 3 --shard-group 2"),
        ("4", "--stage 3 --shard-group 2 --shard-optimizer world"),
        ("4", "--stage 3 --hpz 2"),
        ("4", "--stage 2 --ranks-per-node 2"),
    ] {
        let flags: Vec<_> = flags.split(' ').collect();
        killed_rank(ranks, &flags);
    }
}

/// Kills rank 1 of `ranks`.
fn killed_rank(ranks: &str, more: &[&str]) {
    let dir = &Folder::on_disk();
    let endless = ["--ranks", ranks, "--steps", "100000", "--metrics", "m"];
    let on_gpu = ["--device", "cuda", "--share-gpus"];
    let args = [&on_gpu[..], &endless, more].concat();
    let launcher = zero(dir, &args).spawn().unwrap();
    let begun = Instant::now();
    let steps = || std::fs::read_to_string(dir.join("m")).map_or(0, |m| m.lines().count());

    while steps() < 5 {
        assert!(begun.elapsed() < LONG, "{}", text(&finish(launcher)));
        std::thread::sleep(Duration::from_millis(20));
    }

    let started: usize = ranks.parse().unwrap();
    let ranks = children(launcher.id());
    assert_eq!(ranks.len(), started);
    let kill = Command::new("kill")
        .args(["-9", &ranks[1].to_string()])
        .status();
    assert!(kill.unwrap().success());

    let (killed, done) = (Instant::now(), steps());
    let output = finish(launcher);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert_eq!(said.matches("error: ").count(), 1, "{said}");
    said.shows(&["error: rank 1 was killed by signal 9"]);
    assert!(
        killed.elapsed() < Duration::from_secs(30),
        "{:?}",
        killed.elapsed()
    );
    // A step or two were in flight; no rank continues alone until the launcher ends all.
    assert!(steps() <= done + 5, "{} steps after {done}", steps());
    assert!(!ranks.iter().any(|&pid| is_running(pid)));
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_ranks_say_what_is_wrong_once() {
    for (flags, named) in [
        ("--ranks 64", "--share-gpus"),
        ("--share-gpus --ranks 2 --seq-len 65", "--seq-len 65"),
        (
            "--ranks 1 --cuda-graph --stage 3",
            "--cuda-graph: steps of stage 3 cannot be recorded",
        ),
    ] {
        let dir = &Folder::on_disk();
        let flags: Vec<_> = flags.split(' ').collect();
        let args = [&["--device", "cuda"], &flags[..]].concat();
        let output = finish(zero(dir, &args).spawn().unwrap());
        let said = text(&output);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert_eq!(said.matches("error: ").count(), 1, "{said}");
        said.shows(&[named]);
    }
}

/// `zero plan` counts the memory of a GPU: activations and state to the byte, and the total but for
/// statistics and scalars.
#[test]
#[ignore = "needs a CUDA device"]
fn cuda_plan_is_the_memory_of_the_device() {
    let shape = "--dtype bf16 --micro-batch 1 --seq-len 16 --grad-accum 2 --bucket-elems 16384";
    let held = [
        "params_bytes",
        "grads_bytes",
        "optimizer_bytes",
        "activations_bytes",
    ];

    for more in ["--masters fp32", "--masters remainder", ADAPTERS] {
        let kept: Vec<&str> = more
            .split(' ')
            .filter(|flag| !["--dropout", "0.1"].contains(flag))
            .collect();
        let dir = &Folder::on_disk();
        let mut plan = place::zero();
        plan.args(["plan", "--gpus", "1", "--json", "--model"])
            .arg(place::data("model"))
            .args(shape.split(' '))
            .args(&kept);
        let output = plan.output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        let plan: Value = serde_json::from_slice(&output.stdout).unwrap();

        for stage in ["0", "1", "2", "3"] {
            let metrics = format!("stage {stage}");
            let fixed = ["--device", "cuda", "--ranks", "1", "--steps", "2"];
            let at = ["--stage", stage, "--metrics", &metrics];
            let sizes: Vec<&str> = shape.split(' ').chain(more.split(' ')).collect();
            run(zero(dir, &[&fixed[..], &at, &sizes].concat()));

            let memory = &steps(dir, &metrics)[1]["memory"];
            let planned = &plan["stages"][stage.parse::<usize>().unwrap()]["gpu"];
            for key in held {
                assert_eq!(memory[key], planned[key], "stage {stage} {more} {key}");
            }
            let peak = memory["peak_bytes"].as_u64().unwrap();
            let total = planned["total_bytes"].as_u64().unwrap();
            assert!(
                peak.abs_diff(total) < 64 << 10,
                "stage {stage} {more}: {peak}, planned {total}"
            );
        }
    }
}

/// The rates of the GPUs at hand, with links if there are several.
#[test]
#[ignore = "needs a CUDA device"]
fn cuda_machine_is_measured() {
    let dir = &Folder::on_disk();
    let mut command = place::zero();
    command
        .args(["measure", "--device", "cuda", "--scratch", "."])
        .current_dir(dir)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let shown = run(command);
    shown.shows(&["TFLOP/s in 16 bits"]);
    let file = dir.text("machine.toml");
    file.shows(&["measured = true"]);
    file.omits(&["cores"]);
    let mut plan = place::zero();
    plan.args("plan --model nano --simulate --json --hardware machine.toml:1x1".split(' '))
        .current_dir(dir)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let output = finish(plan.spawn().unwrap());
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    let step = &plan["stages"][2]["simulated"];
    assert!(step["step_ms"].as_f64().unwrap() > 0.0, "{plan}");
}
