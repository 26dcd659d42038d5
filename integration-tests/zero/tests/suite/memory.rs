//! The memory of the process beside what it reports, and its behaviour under limits.

use std::path::Path;
use std::process::{Command, Output};

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::Value;
use zero_models::ModelConfig;
use zero_models::gpt2::config::GptConfig;

use crate::place;
use crate::support::words;

/// A model whose state is large beside the program, and small enough for a test; all weights are
/// zero.
fn write_model(folder: &Path) {
    let config = ModelConfig::from(GptConfig {
        n_layer: 5,
        n_embd: 512,
        n_head: 8,
        n_inner: 2048,
        vocab_size: 4096,
        ..GptConfig::preset("nano").unwrap()
    });

    std::fs::write(folder.join("config.json"), config.to_hf_json("float32")).unwrap();
    let params: Vec<_> = config
        .units()
        .into_iter()
        .flat_map(|unit| unit.params)
        .collect();
    let largest = params
        .iter()
        .map(|param| param.shape.iter().product::<u64>())
        .max()
        .unwrap() as usize;
    let zeros = vec![0; 4 * largest];

    let views = params.iter().map(|param| {
        let shape: Vec<usize> = param.shape.iter().map(|n| *n as usize).collect();
        let bytes = 4 * shape.iter().product::<usize>();
        (
            &param.name,
            TensorView::new(Dtype::F32, shape, &zeros[..bytes]).unwrap(),
        )
    });

    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
}

/// The reported peak of all ranks, and the peak of the process.
fn peaks(folder: &Path, more: &[&str]) -> (u64, u64) {
    let tokens = place::data("tokens.u16.bin");
    let _earlier = std::fs::remove_dir_all(folder.join("report"));
    let run = words("train --model . --ranks 2 --threads 1 --steps 2 --seq-len 16");

    let output = place::zero()
        .args(run)
        .args(["--micro-batch", "1", "--report", "report", "--data"])
        .arg(tokens)
        .args(more)
        .current_dir(folder)
        .output()
        .unwrap();

    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let summary = summary(folder);
    let steps = summary["steps"].as_array().unwrap().iter();
    let peak = steps
        .map(|step| step["memory"]["peak_bytes"].as_u64().unwrap())
        .max()
        .unwrap();

    (2 * peak, summary["process_peak_bytes"].as_u64().unwrap())
}

fn summary(folder: &Path) -> Value {
    let text = std::fs::read_to_string(folder.join("report/summary.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// The most that a process held of a run whose model is small: the pages of the program, which are
/// more if it is not optimised, and its buffers.
fn program_bytes(folder: &Path) -> u64 {
    std::fs::write(folder.join("small.txt"), "a small text. ".repeat(500)).unwrap();
    let run = "train --model nano --data small.txt --ranks 2 --threads 1 --steps 2 --seq-len 16 --micro-batch 1 \
        --no-checkpoint --report report";
    let output = place::zero()
        .args(words(run))
        .current_dir(folder)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );

    summary(folder)["process_peak_bytes"].as_u64().unwrap()
}

#[test]
fn process_holds_what_ranks_report() {
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path());
    let no_save = &["--no-checkpoint"][..];
    let both = [no_save, &["--checkpoint", "saved"]];
    for (stage, dtype, saving) in [
        ("0", "fp32", &both[..]),
        ("0", "bf16", &both[..1]),
        ("3", "fp32", &both[..1]),
        ("3", "bf16", &both[..]),
    ] {
        for &saves in saving {
            let run = [&["--stage", stage, "--dtype", dtype], saves].concat();
            let (reported, held) = peaks(folder.path(), &run);
            // The program, its libraries and the buffers of matrix products are not the ranks'.
            let most = reported + reported / 10 + (40 << 20);
            assert!(
                (reported * 9 / 10..most).contains(&held),
                "{run:?}: {held} bytes held, {reported} reported"
            );
            let _none = std::fs::remove_dir_all(folder.path().join("saved"));
        }
    }
}

/// The plan of one process is its peak, but for the program, its libraries and the buffers of
/// matrix products.
#[test]
fn process_holds_what_is_planned() {
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path());
    std::fs::create_dir(folder.path().join("scratch")).unwrap();
    let program = program_bytes(folder.path());
    let nvme = ["--offload", "nvme:scratch"];
    let runs: [(&str, Vec<&str>); 5] = [
        ("2", vec![]),
        ("2", vec!["--offload", "cpu", "--moments", "bf16"]),
        ("0", nvme.to_vec()),
        (
            "3",
            [&nvme[..], &["--masters", "remainder", "--moments", "bf16"]].concat(),
        ),
        (
            "3",
            [&nvme[..], &["--offload-params", "nvme:scratch"]].concat(),
        ),
    ];

    for (stage, offload) in runs {
        let shape = [
            &["--dtype", "bf16", "--seq-len", "16", "--micro-batch", "1"],
            &offload[..],
        ]
        .concat();
        let plan = ["plan", "--model", ".", "--gpus", "2", "--json"];
        let output = place::zero()
            .args(plan)
            .args(&shape)
            .current_dir(folder.path())
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let planned = &report["stages"][stage.parse::<usize>().unwrap()];
        let planned = planned["process_bytes"].as_u64().unwrap();
        let saves = ["--stage", stage, "--dtype", "bf16", "--checkpoint", "saved"];
        let (_, held) = peaks(folder.path(), &[&saves, &offload[..]].concat());
        assert!(
            held < planned + planned / 10 + program,
            "{stage} {offload:?}: {held} held, {planned} planned"
        );
        let _none = std::fs::remove_dir_all(folder.path().join("saved"));
    }
}

/// A run that does not fit into the limit fits with its state on NVMe.
#[test]
fn memory_limit_is_kept_with_nvme() {
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path());
    std::fs::create_dir(folder.path().join("scratch")).unwrap();
    let limit = words("--stage 3 --dtype bf16 --no-checkpoint --memory-limit 320MiB");

    let tokens = place::data("tokens.u16.bin");
    let run = words("train --model . --ranks 2 --threads 1 --steps 1 --seq-len 16 --data");

    let refused = place::zero()
        .args(run)
        .arg(tokens)
        .args(&limit)
        .current_dir(folder.path())
        .output()
        .unwrap();

    let text = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{text}");
    assert!(
        text.contains("the limit of --memory-limit has 320.00 MiB free; try --offload nvme:DIR"),
        "{text}"
    );
    let nvme = [
        "--offload",
        "nvme:scratch",
        "--offload-params",
        "nvme:scratch",
    ];
    let (_, held) = peaks(folder.path(), &[&limit[..], &nvme[..]].concat());
    assert!(held < (320 + 40) << 20, "{held}");
}

/// Runs the small model within `limit` bytes of the resource that `flag` names. Rayon's global pool
/// would start more threads than any of the limits allows.
fn limited(folder: &Path, flag: &str, limit: u64, more: &[&str]) -> Output {
    let (model, tokens) = (place::data("model"), place::data("tokens.u16.bin"));
    let zero = place::zero();
    let mut command = Command::new("prlimit");
    command
        .arg(format!("--{flag}={limit}"))
        .arg(zero.get_program())
        .arg("train")
        .arg("--model")
        .arg(model);
    command
        .arg("--data")
        .arg(tokens)
        .args(["--seq-len", "32", "--micro-batch", "1", "--steps", "2"])
        .args(more);
    command
        .current_dir(folder)
        .env("RAYON_NUM_THREADS", "60000")
        .output()
        .unwrap()
}

#[test]
fn limited_addresses_end_in_success_or_an_error() {
    let folder = tempfile::tempdir().unwrap();
    for (flag, name) in [("as", "ulimit -v"), ("data", "ulimit -d")] {
        let mut fits = false;
        // A debug build has 51 MB of code and data: with less, the system's loader fails or crashes.
        for mib in [72, 96, 128, 192, 256, 384, 512, 800, 2048, 16 << 10] {
            let run = ["--ranks", "2", "--threads", "1", "--no-checkpoint"];
            let output = limited(folder.path(), flag, mib << 20, &run);
            let text = String::from_utf8_lossy(&output.stderr);
            match output.status.code() {
                Some(0) => fits = true,
                Some(2) => {
                    assert!(
                        !fits && text.contains(name) && text.contains("--ranks"),
                        "{flag} {mib} MiB: {text}"
                    )
                }
                // The limit is too low for the libraries of a build with MPI.
                Some(127) => assert!(
                    mib <= 128 && !fits && text.contains("error while loading shared libraries"),
                    "{flag} {mib} MiB: {text}"
                ),
                // The limit is too low to read the arguments and the data.
                Some(1) => assert!(
                    mib <= 72 && text.starts_with("error: failed to"),
                    "{flag} {mib} MiB: {text}"
                ),
                code => panic!("{flag} {mib} MiB: {code:?}: {text}"),
            }
        }
        assert!(fits, "{flag}: two small ranks need more than 16 GiB");
    }
}
