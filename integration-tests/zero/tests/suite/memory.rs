//! The memory of the process beside what it reports, and its behaviour under limits.

use std::path::Path;
use std::process::{Command, Output};

use zero_models::ModelConfig;
use zero_models::gpt2::config::GptConfig;

use crate::support::{Files, Runs, data, json, on_disk, write_weights};

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

    write_weights(folder, &config, |_, _| ());
}

/// A run of two steps.
fn run() -> String {
    let tokens = data("tokens.u16.bin");
    format!(
        "train --model . --data {tokens} --ranks 2 --threads 1 --steps 2 --seq-len 16 --micro-batch 1"
    )
}

/// The reported peak of all ranks, and the peak of the process.
fn peaks(folder: &Path, flags: &str) -> (u64, u64) {
    let _earlier = std::fs::remove_dir_all(folder.join("report"));
    folder.zero(&format!("{} --report report {flags}", run()));
    of_report(folder)
}

fn of_report(folder: &Path) -> (u64, u64) {
    let summary = json(&folder.join("report/summary.json"));
    let steps = summary["steps"].as_array().unwrap().iter();
    let peak = steps
        .map(|step| step["memory"]["peak_bytes"].as_u64().unwrap())
        .max()
        .unwrap();

    (2 * peak, summary["process_peak_bytes"].as_u64().unwrap())
}

/// Bytes that a process holds beside those its ranks report, in a run of a small model: pages of
/// the program, more of them if it is not optimised, and its buffers.
fn program_bytes(folder: &Path) -> u64 {
    folder.write("small.txt", "a small text. ".repeat(500));
    let run = "train --model nano --data small.txt --ranks 2 --threads 1 --steps 2 --seq-len 16 --micro-batch 1 \
        --no-checkpoint --report report";
    folder.zero(run);
    let (reported, held) = of_report(folder);
    held - reported
}

#[test]
fn process_holds_what_ranks_report() {
    let folder = &on_disk();
    write_model(folder);
    let program = program_bytes(folder);
    let no_save = "--no-checkpoint";
    let both = [no_save, "--checkpoint saved"];
    for (stage, dtype, saving) in [
        ("0", "fp32", &both[..]),
        ("0", "bf16", &both[..1]),
        ("3", "fp32", &both[..1]),
        ("3", "bf16", &both[..]),
    ] {
        for saves in saving {
            let run = format!("--stage {stage} --dtype {dtype} {saves}");
            let (reported, held) = peaks(folder, &run);
            // The program, its libraries and the buffers of matrix products are not the ranks'.
            let most = reported + reported / 10 + program;
            assert!(
                (reported * 9 / 10..most).contains(&held),
                "{run}: {held} bytes held, {reported} reported"
            );
            let _none = std::fs::remove_dir_all(folder.join("saved"));
        }
    }
}

/// The plan of one process is its peak, but for the program, its libraries and the buffers of
/// matrix products.
#[test]
fn process_holds_what_is_planned() {
    let folder = &on_disk();
    write_model(folder);
    std::fs::create_dir(folder.join("scratch")).unwrap();
    let program = program_bytes(folder);
    for (stage, offload) in [
        (2, ""),
        (2, "--offload cpu --moments bf16"),
        (0, "--offload nvme:scratch"),
        (
            3,
            "--offload nvme:scratch --masters remainder --moments bf16",
        ),
        (3, "--offload nvme:scratch --offload-params nvme:scratch"),
    ] {
        let plan = folder.json(&format!(
            "plan --model . --gpus 2 --json --dtype bf16 --seq-len 16 --micro-batch 1 {offload}"
        ));
        let planned = plan["stages"][stage]["process_bytes"].as_u64().unwrap();
        let saves = format!("--stage {stage} --dtype bf16 --checkpoint saved {offload}");
        let (_, held) = peaks(folder, &saves);
        assert!(
            held < planned + planned / 10 + program,
            "{stage} {offload}: {held} held, {planned} planned"
        );
        let _none = std::fs::remove_dir_all(folder.join("saved"));
    }
}

/// A run that does not fit into the limit fits with its state on NVMe.
#[test]
fn memory_limit_is_kept_with_nvme() {
    let folder = &on_disk();
    write_model(folder);
    std::fs::create_dir(folder.join("scratch")).unwrap();
    let limit = "--stage 3 --dtype bf16 --no-checkpoint --memory-limit 320MiB";
    folder.fails(
        &format!("{} {limit}", run()),
        2,
        &["the limit of --memory-limit has 320.00 MiB free; try --offload nvme:DIR"],
    );
    let nvme = "--offload nvme:scratch --offload-params nvme:scratch";
    let (_, held) = peaks(folder, &format!("{limit} {nvme}"));
    assert!(held < (320 + 40) << 20, "{held}");
}

/// Runs the small model within `limit` bytes of the resource that `flag` names. Rayon's global pool
/// would start more threads than any of the limits allows.
fn limited(folder: &Path, flag: &str, limit: u64, more: &str) -> Output {
    let run = folder.tiny_command(&format!("--steps 2 --no-checkpoint {more}"));
    let mut command = Command::new("prlimit");
    command.arg(format!("--{flag}={limit}"));
    command.arg(run.get_program()).args(run.get_args());
    command
        .current_dir(folder)
        .env("RAYON_NUM_THREADS", "60000");
    command.output().unwrap()
}

#[test]
fn limited_addresses_end_in_success_or_an_error() {
    let folder = &on_disk();
    for (flag, name) in [("as", "ulimit -v"), ("data", "ulimit -d")] {
        let mut fits = false;
        // A debug build has 51 MB of code and data: with less, the system's loader fails or crashes.
        for mib in [72, 96, 128, 192, 256, 384, 512, 800, 2048, 16 << 10] {
            let output = limited(folder, flag, mib << 20, "--threads 1");
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
