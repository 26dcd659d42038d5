//! `zero tune --data`, the block `autotuning` and `--stage auto`. No test depends on which
//! configuration is faster.

use std::fs;
use std::path::Path;
use std::process::Child;

use crate::support::{
    Files, HOST, Printed, Runs, count_lines, fails, is_running, json, lines, signal, started,
    succeeds, temp, wait_until,
};

/// Writes a text, and the figures of the machine into the folder of results `out`.
fn prepare(dir: &Path, out: &str) {
    let text = "a text that is long enough to draw a few rows from\n".repeat(20);
    dir.write("text", text);
    fs::create_dir(dir.join(out)).unwrap();
    fs::write(dir.join(out).join("machine.toml"), HOST).unwrap();
}

const TUNE: &str = "tune --model nano --data text --device cpu --seq-len 16 --batch-tokens 64 \
                    --trials 2 --trial-steps 4 --out out";

#[test]
fn trials_are_measured_once() {
    let dir = &temp();
    prepare(dir, "out");
    let out = dir.join("out");
    let trials = out.join("trials.jsonl");
    let finished = || count_lines(&trials);

    let mut first = started(dir.command(TUNE));
    wait_until("no trial ends", || finished() > 0);
    first.kill().unwrap();
    first.wait().unwrap();
    let kept = finished();
    let text = fs::read_to_string(&trials).unwrap();
    fs::write(&trials, text.clone() + &text[..text.len() / 3]).unwrap();

    let report = dir.json(&format!("{TUNE} --json"));
    assert_eq!(report["machine"], "a host");
    assert_eq!(report["ranks"], 2);
    assert_eq!(report["counted_steps"], 1);
    let choices = report["trials"].as_array().unwrap();
    assert_eq!(choices.len(), 2);
    let mut earlier = 0;
    for (choice, rank) in choices.iter().zip(1..) {
        assert_eq!(choice["rank"], rank);
        let [simulated, measured, error] = ["simulated_ms", "measured_ms", "error_percent"]
            .map(|key| choice[key].as_f64().unwrap());
        assert!(
            (100.0 * (simulated / measured - 1.0) - error).abs() < 1e-6,
            "{choice}"
        );
        let speed = choice["tokens_per_s"].as_f64().unwrap();
        assert!((speed * measured / 1e3 - 64.0).abs() < 1e-6, "{choice}");
        assert!(choice["peak_bytes"].as_u64().unwrap() > 0);
        earlier += usize::from(choice["earlier"] == true);
        let metrics = out.join(format!("{}.jsonl", choice["trial"]));
        assert_eq!(lines(&metrics).len(), 4);
    }
    assert_eq!(earlier, kept);
    let mean = report["mean_error_percent"].as_f64().unwrap();
    assert!(mean <= report["worst_error_percent"].as_f64().unwrap().abs());

    // All are known now.
    let shown = dir.zero(TUNE);
    shown.shows(&["; 2 by an earlier tune", "the simulation was off by"]);
    assert_eq!(lines(&trials).len(), 2);
    let best = shown.lines().last().unwrap();
    let best = best.strip_prefix("best: zero ").unwrap();
    dir.zero(&format!("{best} --steps 1 --no-checkpoint"));

    // Another number of steps is another trial.
    let longer = TUNE.replace("--trial-steps 4", "--trial-steps 5");
    dir.zero(&longer);
    assert_eq!(lines(&trials).len(), 4);
}

/// The processes that this one has started.
#[cfg(target_os = "linux")]
fn children(process: &Child) -> Vec<u32> {
    let id = process.id();
    let list = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
    list.split_whitespace()
        .map(|id| id.parse().unwrap())
        .collect()
}

#[cfg(target_os = "linux")]
#[test]
fn interruption_ends_the_trial() {
    for (name, code) in [("-INT", Some(130)), ("-KILL", None)] {
        let dir = &temp();
        prepare(dir, "out");
        let line = TUNE.replace("--trial-steps 4", "--trial-steps 100000");
        let mut tune = started(dir.command(&line));
        let metrics = dir.join("out/1.jsonl");
        wait_until("no step", || {
            metrics.metadata().is_ok_and(|metadata| metadata.len() > 0)
        });
        let [trial] = children(&tune)[..] else {
            panic!("not one trial: {:?}", children(&tune));
        };
        signal(&tune, name);
        assert_eq!(tune.wait().unwrap().code(), code);
        wait_until("the trial outlives the tune", || !is_running(trial));
        assert_eq!(lines(&dir.join("out/trials.jsonl")).len(), 0);
    }
}

#[test]
fn only_failures_fail() {
    let dir = &temp();
    prepare(dir, "out");
    // Found by the trials.
    dir.write("tokenizer", "{}");
    let line = format!("{TUNE} --tokenizer tokenizer");
    dir.fails(
        &line,
        1,
        &[
            "no configuration could be measured: 2 trials failed, the first: failed: ",
            "out/N.log",
        ],
    );
    let trials = lines(&dir.join("out/trials.jsonl"));
    assert!(
        trials.iter().all(|trial| trial["result"] == "failed"),
        "{trials:?}"
    );

    for (line, parts) in [
        (
            TUNE.replace("--data text", "--data missing"),
            "--data missing",
        ),
        (TUNE.replace("--data text", ""), "--data"),
        (TUNE.replace("--out out", "--out ."), "the folder has"),
        (
            TUNE.replace("--trial-steps 4", "--trial-steps 3"),
            "at least 4",
        ),
        (format!("{TUNE} --hardware h100-80g:2x1"), "on the host"),
        (
            format!("{TUNE} --hardware out/machine.toml:2x2"),
            "one node",
        ),
        (
            format!("{TUNE} --hardware out/machine.toml:2x1 --ranks 1"),
            "--ranks",
        ),
        ("tune --model nano".to_owned(), "--hardware"),
    ] {
        dir.misuses(&line, parts);
    }
}

const DS: &str = r#"{ // as of DeepSpeed
    "train_batch_size": 8, "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "sub_group_size": 1e6},
    "autotuning": {"enabled": true, "fast": true, "tuner_num_trials": 2, "start_profile_step": 2,
        "end_profile_step": 3, "results_dir": "results"}
}"#;

const TRAIN: &str =
    "train --config ds.json --data text --model nano --seq-len 16 --threads 1 --device cpu";

#[test]
fn autotuning_block_tunes() {
    let dir = &temp();
    prepare(dir, "results");
    dir.write("ds.json", DS);
    let output = dir.output(TRAIN);
    let warnings = String::from_utf8_lossy(&output.stderr).into_owned();
    warnings.shows(&["autotuning.fast is ignored"]);
    let shown = succeeds(&output);
    shown.shows(&["best: results/ds_config_optimal.json"]);
    assert!(!dir.join("checkpoints").exists());

    let optimal = json(&dir.join("results/ds_config_optimal.json"));
    assert_eq!(optimal["train_batch_size"], 8);
    assert_eq!(optimal["gradient_clipping"], 0.5);
    assert_eq!(optimal["zero_optimization"]["sub_group_size"], 1_000_000);
    assert!(optimal.get("autotuning").is_none());
    let trials = lines(&dir.join("results/trials.jsonl"));
    assert_eq!(trials.len(), 2);
    assert!(
        trials.iter().all(|trial| trial["result"] == "measured"),
        "{trials:?}"
    );

    let line = shown.lines().last().unwrap();
    let line = line.strip_prefix("train with it: zero ").unwrap();
    dir.zero(&format!("{line} --steps 1 --no-checkpoint"))
        .shows(&["= 128 tokens"]);

    // The memory of each trial is a result.
    let small = format!("{TRAIN} --memory-limit 4MiB");
    dir.fails(
        &small,
        1,
        &["2 trials failed, the first: ", "out of memory: "],
    );
    for (flag, part) in [("--stage 2", "--stage"), ("--resume x", "--resume")] {
        dir.fails(
            &format!("{TRAIN} {flag}"),
            2,
            &["autotuning: ", part, "autotuning.enabled"],
        );
    }

    let off = DS.replace("\"enabled\": true", "\"enabled\": false");
    dir.write("ds.json", off);
    let line = format!("{TRAIN} --ranks 2 --steps 1 --no-checkpoint");
    dir.zero(&line).shows(&["ZeRO stage 3"]);
}

#[test]
fn auto_stage_fits_the_memory() {
    let dir = &temp();
    prepare(dir, "out");
    let train = "train --model nano --data text --device cpu --seq-len 16 --micro-batch 1 --ranks 2 --threads 1";
    let run = |more: &str| dir.output(&format!("{train} {more}"));
    let auto = |more: &str| run(&format!("--stage auto --no-checkpoint --steps 1 {more}"));
    // The two optimizer states that stage 0 holds do not fit, their shards do.
    succeeds(&auto("--memory-limit 56MiB"))
        .shows(&["note: --stage auto is stage 2: ", "too large: 0, 1"]);
    fails(
        &auto("--memory-limit 20MiB"),
        2,
        &["--stage auto: no stage fits", "--offload cpu"],
    );
    // Other flags need stage 3.
    succeeds(&auto("--offload-params cpu"))
        .shows(&["--stage auto is stage 3: no other stage fits"]);

    let text = r#"{"zero_optimization": {"stage": "auto"}}"#;
    dir.write("ds.json", text);
    let flags = "--config ds.json --grad-accum 2 --steps 1 --checkpoint saved";
    let shown = succeeds(&run(flags));
    let recorded = |step| {
        let record = json(&dir.join(format!("saved/step-{step:08}/run.json")));
        record["stage"].as_u64().unwrap()
    };
    let chosen = recorded(1);
    shown.shows(&[
        &format!("zero_optimization.stage = {chosen}"),
        &format!("note: zero_optimization.stage \"auto\" is stage {chosen}: "),
    ]);

    // A resumed run keeps its stage.
    for (step, stage) in [(2, "auto"), (3, "3"), (4, "auto")] {
        let out = dir.zero(&format!(
            "train --resume saved --steps {step} --stage {stage}"
        ));
        out.omits(&["--stage auto"]);
    }
    assert_eq!([recorded(2), recorded(3), recorded(4)], [chosen, 3, 3]);
    dir.misuses("train --stage some", "expected 0, 1, 2, 3 or auto");
}
