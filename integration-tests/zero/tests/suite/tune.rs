//! `zero tune --data`, the block `autotuning` and `--stage auto`. No test depends on which
//! configuration is faster.

use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};

use serde_json::Value;

use crate::place;
use crate::support::{HOST, fails, lines, signal, succeeds, temp, wait_until, zero};

/// Writes a text, and the figures of the machine into the folder of results `out`.
fn prepare(dir: &Path, out: &str) {
    let text = "a text that is long enough to draw a few rows from\n".repeat(20);
    fs::write(dir.join("text"), text).unwrap();
    fs::create_dir(dir.join(out)).unwrap();
    fs::write(dir.join(out).join("machine.toml"), HOST).unwrap();
}

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

fn start(dir: &Path, line: &str) -> Child {
    let mut command = place::zero();
    command.args(words(line)).current_dir(dir);
    command
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

const TUNE: &str = "tune --model nano --data text --device cpu --seq-len 16 --batch-tokens 64 \
                    --trials 2 --trial-steps 4 --out out";

#[test]
fn trials_are_measured_once() {
    let dir = temp();
    prepare(dir.path(), "out");
    let out = dir.path().join("out");
    let trials = out.join("trials.jsonl");
    let finished = || fs::read_to_string(&trials).map_or(0, |text| text.lines().count());

    let mut first = start(dir.path(), TUNE);
    wait_until("no trial ends", || finished() > 0);
    first.kill().unwrap();
    first.wait().unwrap();
    let kept = finished();
    let text = fs::read_to_string(&trials).unwrap();
    fs::write(&trials, text.clone() + &text[..text.len() / 3]).unwrap();

    let output = zero(dir.path(), &words(&format!("{TUNE} --json")));
    let report: Value = serde_json::from_str(&succeeds(&output)).unwrap();
    assert_eq!(report["machine"], "a host");
    assert_eq!(
        (&report["ranks"], &report["counted_steps"]),
        (&2.into(), &1.into())
    );
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
    let shown = succeeds(&zero(dir.path(), &words(TUNE)));
    assert!(shown.contains("; 2 by an earlier tune"), "{shown}");
    assert!(shown.contains("the simulation was off by"), "{shown}");
    assert_eq!(lines(&trials).len(), 2);
    let best = shown.lines().last().unwrap();
    let best = best.strip_prefix("best: zero ").unwrap();
    succeeds(&zero(
        dir.path(),
        &words(&format!("{best} --steps 1 --no-checkpoint")),
    ));

    // Another number of steps is another trial.
    let longer = TUNE.replace("--trial-steps 4", "--trial-steps 5");
    succeeds(&zero(dir.path(), &words(&longer)));
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
fn is_running(id: u32) -> bool {
    fs::read_to_string(format!("/proc/{id}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

#[cfg(target_os = "linux")]
#[test]
fn interruption_ends_the_trial() {
    for (name, code) in [("-INT", Some(130)), ("-KILL", None)] {
        let dir = temp();
        prepare(dir.path(), "out");
        let line = TUNE.replace("--trial-steps 4", "--trial-steps 100000");
        let mut tune = start(dir.path(), &line);
        let metrics = dir.path().join("out/1.jsonl");
        wait_until("no step", || {
            metrics.metadata().is_ok_and(|metadata| metadata.len() > 0)
        });
        let [trial] = children(&tune)[..] else {
            panic!("not one trial: {:?}", children(&tune));
        };
        signal(&tune, name);
        assert_eq!(tune.wait().unwrap().code(), code);
        wait_until("the trial outlives the tune", || !is_running(trial));
        assert_eq!(lines(&dir.path().join("out/trials.jsonl")).len(), 0);
    }
}

#[test]
fn only_failures_fail() {
    let dir = temp();
    prepare(dir.path(), "out");
    // Found by the trials.
    fs::write(dir.path().join("tokenizer"), "{}").unwrap();
    let line = format!("{TUNE} --tokenizer tokenizer");
    let output = zero(dir.path(), &words(&line));
    fails(
        &output,
        1,
        &[
            "no configuration could be measured: 2 trials failed, the first: failed: ",
            "out/N.log",
        ],
    );
    let trials = lines(&dir.path().join("out/trials.jsonl"));
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
        let output = zero(dir.path(), &words(&line));
        assert_eq!(output.status.code(), Some(2), "{line}");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(error.contains(parts), "{line}: {error}");
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
    let dir = temp();
    prepare(dir.path(), "results");
    fs::write(dir.path().join("ds.json"), DS).unwrap();
    let output = zero(dir.path(), &words(TRAIN));
    let warnings = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        warnings.contains("autotuning.fast is ignored"),
        "{warnings}"
    );
    let shown = succeeds(&output);
    assert!(
        shown.contains("best: results/ds_config_optimal.json"),
        "{shown}"
    );
    assert!(!dir.path().join("checkpoints").exists());

    let optimal = dir.path().join("results/ds_config_optimal.json");
    let optimal: Value = serde_json::from_slice(&fs::read(optimal).unwrap()).unwrap();
    assert_eq!(optimal["train_batch_size"], 8);
    assert_eq!(optimal["gradient_clipping"], 0.5);
    assert_eq!(optimal["zero_optimization"]["sub_group_size"], 1_000_000);
    assert!(optimal.get("autotuning").is_none());
    let trials = lines(&dir.path().join("results/trials.jsonl"));
    assert_eq!(trials.len(), 2);
    assert!(
        trials.iter().all(|trial| trial["result"] == "measured"),
        "{trials:?}"
    );

    let line = shown.lines().last().unwrap();
    let line = line.strip_prefix("train with it: zero ").unwrap();
    let trained = zero(
        dir.path(),
        &words(&format!("{line} --steps 1 --no-checkpoint")),
    );
    assert!(succeeds(&trained).contains("= 128 tokens"));

    // The memory of each trial is a result.
    let small = format!("{TRAIN} --memory-limit 4MiB");
    let output = zero(dir.path(), &words(&small));
    fails(
        &output,
        1,
        &["2 trials failed, the first: ", "out of memory: "],
    );
    for (flag, part) in [("--stage 2", "--stage"), ("--resume x", "--resume")] {
        let output = zero(dir.path(), &words(&format!("{TRAIN} {flag}")));
        fails(&output, 2, &["autotuning: ", part, "autotuning.enabled"]);
    }

    let off = DS.replace("\"enabled\": true", "\"enabled\": false");
    fs::write(dir.path().join("ds.json"), off).unwrap();
    let line = format!("{TRAIN} --ranks 2 --steps 1 --no-checkpoint");
    assert!(succeeds(&zero(dir.path(), &words(&line))).contains("ZeRO stage 3"));
}

#[test]
fn auto_stage_fits_the_memory() {
    let dir = temp();
    prepare(dir.path(), "out");
    let train = "train --model nano --data text --device cpu --seq-len 16 --micro-batch 1 --ranks 2 --threads 1";
    let run = |more: &str| zero(dir.path(), &words(&format!("{train} {more}")));
    // The two optimizer states that stage 0 holds do not fit, their shards do.
    let shown = succeeds(&run(
        "--stage auto --memory-limit 56MiB --no-checkpoint --steps 1",
    ));
    assert!(shown.contains("note: --stage auto is stage 2: "), "{shown}");
    assert!(shown.contains("too large: 0, 1"), "{shown}");
    let output = run("--stage auto --memory-limit 20MiB --no-checkpoint --steps 1");
    fails(
        &output,
        2,
        &["--stage auto: no stage fits", "--offload cpu"],
    );
    // Other flags need stage 3.
    let shown = succeeds(&run(
        "--stage auto --offload-params cpu --no-checkpoint --steps 1",
    ));
    assert!(
        shown.contains("--stage auto is stage 3: no other stage fits"),
        "{shown}"
    );

    fs::write(
        dir.path().join("ds.json"),
        r#"{"zero_optimization": {"stage": "auto"}}"#,
    )
    .unwrap();
    let shown = succeeds(&run(
        "--config ds.json --grad-accum 2 --steps 1 --checkpoint saved",
    ));
    let recorded = |step| {
        let path = dir.path().join(format!("saved/step-{step:08}/run.json"));
        let record: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        record["stage"].as_u64().unwrap()
    };
    let chosen = recorded(1);
    assert!(
        shown.contains(&format!("zero_optimization.stage = {chosen}")),
        "{shown}"
    );
    let reason = format!("note: zero_optimization.stage \"auto\" is stage {chosen}: ");
    assert!(shown.contains(&reason), "{shown}");

    // A resumed run keeps its stage.
    for (step, stage) in [(2, "auto"), (3, "3"), (4, "auto")] {
        let resume = format!("train --resume saved --steps {step} --stage {stage}");
        let shown = succeeds(&zero(dir.path(), &words(&resume)));
        assert!(!shown.contains("--stage auto"), "{shown}");
    }
    assert_eq!([recorded(2), recorded(3), recorded(4)], [chosen, 3, 3]);
    let output = run("--stage some --no-checkpoint");
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("expected 0, 1, 2, 3 or auto"), "{error}");
}
