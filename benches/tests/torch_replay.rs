//! The recorded traces through the C functions of zero-alloc-torch.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// The bound of reserved over peak live bytes.
const GOAL: f64 = 1.03;

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_replay_stays_within_the_bound() {
    let program = env!("CARGO_BIN_EXE_torch_replay");
    if !Path::new(program).exists() {
        println!("SKIPPED: {program} is not on this machine");
        return;
    }
    let traces = ["gpt2-124m-fixed", "gpt2-350m-varlen", "fsdp2-350m-varlen"];
    let paths = traces.map(|name| format!("{}/traces/{name}.csv.gz", env!("CARGO_MANIFEST_DIR")));
    let output = Command::new(program)
        .args(["--repeats", "1"])
        .args(paths)
        // The stand-in's memory is only addresses then.
        .env("ZERO_STANDIN_DRY", "1")
        // Delays before 170,000 events would take minutes.
        .env_remove("ZERO_STANDIN_DELAY_SEED")
        .output()
        .expect("started");
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    print!("{text}");

    for name in traces {
        let outcome = text
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok())
            .find(|outcome| outcome["trace"] == name)
            .expect("an outcome");
        for interface in ["c_on_default_stream", "c_on_other_stream", "rust"] {
            let ratio = outcome[interface]["ratio"].as_f64().expect("a number");
            assert!(
                (1.0..=GOAL).contains(&ratio),
                "{name}, {interface}: {ratio}"
            );
        }
    }
}
