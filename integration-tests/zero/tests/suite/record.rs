//! `run.json` and `--resume`: a run continues with its settings, and what differs is printed.

use std::path::Path;

use serde_json::Value;

use crate::support::{
    Files, Folder, Printed, Runs, checkpoints, data, fails, json, lines, on_disk, succeeds, temp,
};

/// Settings that are not the defaults.
const SETTINGS: &str = "--lr 3e-3 --seq-len 24 --clip 0.5 --weight-decay 0.2 --micro-batch 3 --grad-accum 2 \
    --warmup-steps 4 --seed 11 --dropout 0.25 --dtype bf16 --ranks 2";

/// A folder with a text of 8 KiB and a copy of the tiny model.
fn inputs() -> Folder {
    inputs_in(temp())
}

fn inputs_in(dir: Folder) -> Folder {
    let text: String = (0..1024)
        .map(|i| format!("{:07}\n", i * i % 9973))
        .collect();
    dir.write("text.txt", text);
    let model = dir.join("model");
    std::fs::create_dir(&model).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(data(&format!("model/{file}")), model.join(file)).unwrap();
    }
    dir
}

/// Trains on the inputs with [`SETTINGS`].
fn train(dir: &Path, more: &str) -> String {
    train_with(dir, &format!("{SETTINGS} {more}"))
}

fn train_with(dir: &Path, flags: &str) -> String {
    dir.zero(&format!("train --model model --data text.txt {flags}"))
}

fn resume(dir: &Path, more: &str) -> String {
    dir.zero(&format!("train --resume {more}"))
}

/// The losses and gradient norms of a metrics file.
fn curve(dir: &Path, file: &str) -> Vec<[Value; 4]> {
    let figures = |step: &Value| ["step", "loss", "grad_norm", "lr"].map(|key| step[key].clone());
    lines(&dir.join(file)).iter().map(figures).collect()
}

/// The numbers of steps.
fn steps(of: &[Value]) -> Vec<u64> {
    of.iter()
        .map(|step| step["step"].as_u64().unwrap())
        .collect()
}

fn weights(dir: &Path, checkpoint: &str) -> Vec<u8> {
    let out = format!("exported-{checkpoint}");
    dir.zero(&format!("ckpt export {checkpoint} {out}"));
    std::fs::read(dir.join(out).join("model.safetensors")).unwrap()
}

/// The `run.json` of a step.
fn record(dir: &Path, checkpoint: &str, step: u64) -> Value {
    json(&dir.join(format!("{checkpoint}/step-{step:08}/run.json")))
}

fn differences(out: &str) -> Vec<&str> {
    out.lines()
        .filter_map(|line| line.strip_prefix("note: differs from the checkpoint: "))
        .collect()
}

/// Resumes a run, which prints these differences.
fn differing(dir: &Path, flags: &str, expected: &[&str]) -> String {
    let out = resume(dir, flags);
    assert_eq!(differences(&out), expected, "{flags}: {out}");
    out
}

/// Neither the model's folder nor any flag but the new last step is needed.
#[test]
fn resume_needs_no_flag() {
    for stage in ["0", "3"] {
        let dir = &inputs();
        let at = format!("--stage {stage}");
        train(
            dir,
            &format!("{at} --steps 6 --metrics whole --checkpoint a"),
        );
        train(
            dir,
            &format!("{at} --steps 3 --metrics first --checkpoint b"),
        );
        std::fs::remove_dir_all(dir.join("model")).unwrap();
        differing(dir, "b --steps 6 --metrics rest", &["steps 3 -> 6"]);
        assert_eq!(
            curve(dir, "whole"),
            [curve(dir, "first"), curve(dir, "rest")].concat(),
            "stage {stage}"
        );
        assert!(
            weights(dir, "a") == weights(dir, "b"),
            "stage {stage}: final weights"
        );
        let (whole, mut rest) = (record(dir, "a", 6), record(dir, "b", 6));
        for key in ["run", "checkpoint_dir", "metrics"] {
            assert_ne!(whole[key], rest[key]);
            rest[key] = whole[key].clone();
        }
        assert_eq!(whole, rest);
    }
}

/// Neither `--metrics` nor `--report` is repeated, and the report is that of the whole run.
#[test]
fn resume_continues_metrics_and_report() {
    let dir = &temp();
    std::fs::create_dir(dir.join("elsewhere")).unwrap();
    dir.tiny("--checkpoint c --metrics m --report r");
    let out = differing(&dir.join("elsewhere"), "../c --steps 5", &["steps 3 -> 5"]);

    for (name, path) in [("metrics", "m"), ("report", "r")] {
        let line = format!(
            "\n{name}: {}\n",
            dir.join(path).canonicalize().unwrap().display()
        );
        assert!(out.contains(&line), "{line} is not in: {out}");
    }

    let written = |name: &str| steps(&lines(&dir.join(name)));
    let drawn = |name: &str| {
        let summary = json(&dir.join(name));
        steps(summary["steps"].as_array().unwrap())
    };
    assert_eq!(written("m"), [1, 2, 3, 4, 5]);
    assert_eq!(drawn("r/summary.json"), [1, 2, 3, 4, 5]);

    // A flag wins, and a run that saves elsewhere is a new one, which leaves the files of this one
    // alone.
    resume(dir, "c --steps 6 --checkpoint d").shows(&["note: no metrics: ", "note: no report: "]);
    assert_eq!(written("m"), [1, 2, 3, 4, 5]);
    resume(dir, "c --steps 6 --metrics n --report s");
    assert_eq!(written("n"), [6]);
    assert_eq!(drawn("s/summary.json"), [6]);
}

/// Asserts that a note for each output names the reason why the run does not go on with it.
fn assert_no_outputs(out: &str, reason: &str) {
    for what in ["metrics", "report"] {
        let start = format!("note: no {what}: ");
        let line = out.lines().find(|line| line.starts_with(&start));
        let line = line.unwrap_or_default();
        let end = format!("pass --{what}");
        assert!(line.contains(reason) && line.ends_with(&end), "{out}");
    }
}

/// A run that resumes a copy of the folder continues from an earlier step with the same id.
#[test]
fn resumed_copy_leaves_files_of_the_original() {
    let dir = &temp();
    let outputs = "--checkpoint-every 2 --metrics m --report r --checkpoint o --steps 4";
    dir.tiny(outputs);

    let copied = std::process::Command::new("cp")
        .args(["-r", "o", "copy"])
        .current_dir(dir)
        .status();
    assert!(copied.unwrap().success());

    std::fs::remove_dir_all(dir.join("copy/step-00000004")).unwrap();
    let read = || ["m", "r/summary.json", "r/run.json"].map(|name| dir.bytes(name));
    let before = read();
    let out = resume(dir, "copy/step-00000002 --steps 3 --lr 0.5");
    assert_no_outputs(&out, "was copied or moved");
    assert!(read() == before);

    // In its own folder, from an earlier step: what was there moves.
    resume(dir, "o/step-00000002 --steps 3").shows(&[
        "m: 2 lines after step 2 to be moved to ",
        "r: figures of steps after 2 to be moved to ",
    ]);
    let moved = |name: &str| dir.bytes(name);
    let lines = |bytes: &[u8]| bytes.iter().filter(|byte| **byte == b'\n').count();
    assert_eq!(lines(&moved("m")), 3);
    assert!(before[0].ends_with(&moved("m.after-step-2")));
    assert_eq!(lines(&moved("m.after-step-2")), 2);
    assert_eq!(moved("r/summary.json.after-step-2"), before[1]);
}

/// Another process holds the lock; the run goes on without metrics.
#[test]
fn locked_metrics_of_a_record_are_optional() {
    let dir = &temp();
    dir.tiny("--checkpoint c --metrics m");
    let before = dir.bytes("m");
    let file = std::fs::File::open(dir.join("m")).unwrap();
    file.lock().unwrap();
    let output = dir.output("train --resume c --steps 4");
    succeeds(&output);
    let notes = String::from_utf8_lossy(&output.stderr);
    notes.shows(&["note: no metrics: --metrics ", "another run is writing"]);
    assert_eq!(dir.bytes("m"), before);
}

/// A record may be from elsewhere: its paths are used only where the run itself has written.
#[test]
fn foreign_files_of_a_record_are_kept() {
    let dir = &temp();
    dir.tiny("--checkpoint c --metrics m --report r");
    dir.write("m", "notes\n");
    dir.write("r/run.json", "{\"run\": \"another\"}");
    dir.write("r/summary.txt", "mine");
    let out = resume(dir, "c --steps 4 --metrics /dev/null");
    out.shows(&["note: no report: "]);
    out.omits(&["note: no metrics: "]);

    // A folder with the run's id, made by another: a link in it would lead elsewhere.
    dir.tiny("--checkpoint d --metrics n --report s");
    dir.write("n", "notes\n");
    std::fs::remove_file(dir.join("s/loss.svg")).unwrap();
    std::os::unix::fs::symlink("../n", dir.join("s/loss.svg")).unwrap();
    let out = resume(dir, "d --steps 4");

    assert_no_outputs(&out, "");
    for name in ["m", "n"] {
        assert_eq!(dir.bytes(name), b"notes\n");
    }
    assert_eq!(dir.bytes("r/summary.txt"), b"mine");
}

/// A rank of another launcher reads the device before the ranks connect. Without a writer, opening
/// a pipe waits without end.
#[test]
fn resume_does_not_wait_for_a_pipe() {
    let dir = &temp();
    std::fs::create_dir_all(dir.join("step-00000001")).unwrap();
    for pipe in ["latest", "step-00000001/run.json"] {
        let made = std::process::Command::new("mkfifo")
            .arg(dir.join(pipe))
            .status();
        assert!(made.unwrap().success());
        let mut rank = std::process::Command::new("timeout");
        rank.arg("60").arg(crate::place::zero().get_program());
        rank.args(["train", "--resume"]).arg(dir.as_os_str());
        let launcher = [
            ("RANK", "0"),
            ("WORLD_SIZE", "2"),
            ("LOCAL_RANK", "0"),
            ("LOCAL_WORLD_SIZE", "1"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "1"),
        ];
        rank.envs(launcher).env_remove("OMPI_COMM_WORLD_SIZE");
        fails(&rank.output().unwrap(), 2, &["on several machines"]);
        std::fs::remove_file(dir.join(pipe)).unwrap();
        dir.write("latest", "step-00000001 0123456789abcdef\n");
    }
}

/// A run, those that resume it one after the other, and what each prints that differs from the one
/// before.
struct Resumes<'a> {
    first: &'a str,
    resumed: &'a [(&'a str, &'a [&'a str])],
}

/// A setting that no flag and no key repeats is that of the record, and a change is printed.
#[test]
fn changed_settings_are_printed() {
    let memory = "--bucket-elems 4096 --no-overlap --activation-checkpointing";
    let shared = "--seq-len 32 --micro-batch 1 --ranks 4 --steps 1";
    let cases = [
        Resumes {
            first: &format!("{SETTINGS} --steps 2"),
            resumed: &[
                (
                    "--lr 0.01 --seed 5 --ranks 3 --stage 1 --steps 4 --clip 0",
                    &[
                        "batch.ranks 2 -> 3",
                        "batch.step_tokens 288 -> 432",
                        "optimizer.lr 0.003 -> 0.01",
                        "optimizer.max_grad_norm 0.5 -> 0.0",
                        "seed 11 -> 5",
                        "stage 3 -> 1",
                        "steps 2 -> 4",
                    ],
                ),
                // Whatever dropout the folder has.
                ("--model model --steps 5", &["steps 4 -> 5"]),
                (
                    "--steps 6 --dropout 0",
                    &[
                        "model.config.attn_pdrop 0.25 -> 0.0",
                        "model.config.embd_pdrop 0.25 -> 0.0",
                        "model.config.resid_pdrop 0.25 -> 0.0",
                        "steps 5 -> 6",
                    ],
                ),
                // A configuration overrides what it sets and nothing else.
                (
                    "--config ds.json --steps 7",
                    &[
                        "batch.micro_batch 3 -> 1",
                        "batch.step_tokens 432 -> 144",
                        "optimizer.lr 0.01 -> 0.02",
                        "steps 6 -> 7",
                    ],
                ),
                // One line each.
                (
                    "--steps 9 --schedule cosine --dtype fp16",
                    &[
                        "dtype bf16 -> fp16",
                        "optimizer.loss_scaling 1 -> dynamic from 2^16, at least 1, doubled after 1000 good steps, \
                         halved after 2 overflows",
                        "optimizer.schedule linear warm-up over 4 steps, then constant -> linear warm-up over 4 steps, \
                         then cosine decay to 0 over 5 steps, until step 9",
                        "steps 7 -> 9",
                    ],
                ),
            ],
        },
        Resumes {
            first: &format!("{SETTINGS} {memory} --steps 1"),
            resumed: &[
                // The same flags once more, which need not be.
                (&format!("{SETTINGS} {memory} --steps 2"), &["steps 1 -> 2"]),
                ("--steps 2", &[]),
                (
                    "--steps 2 --no-overlap=false --activation-checkpointing=false",
                    &[
                        "activation_checkpointing true -> false",
                        "communication.gather_ahead 0 -> 1",
                        "communication.overlap false -> true",
                    ],
                ),
                (
                    "--steps 2 --bucket-elems 8192",
                    &["communication.bucket_elems 4096 -> 8192"],
                ),
            ],
        },
        // The settings of a configuration file, too.
        Resumes {
            first: "--config sub_groups.json --seq-len 24 --ranks 2 --steps 1",
            resumed: &[
                ("--steps 2", &["steps 1 -> 2"]),
                (
                    "--config ds.json --steps 2",
                    &[
                        "batch.micro_batch 4 -> 1",
                        "batch.step_tokens 192 -> 48",
                        "optimizer.hyper.weight_decay 0.01 -> 0.2",
                        "optimizer.lr 0.001 -> 0.02",
                    ],
                ),
            ],
        },
        // Other ranks share sequences or, if they do not divide them, none.
        Resumes {
            first: &format!("{shared} --ulysses 2"),
            resumed: &[
                ("--steps 2", &["steps 1 -> 2"]),
                (
                    "--steps 3 --ulysses 4",
                    &[
                        "batch.step_tokens 64 -> 32",
                        "mesh.ulysses 2 -> 4",
                        "steps 2 -> 3",
                    ],
                ),
                (
                    "--steps 4 --ranks 3",
                    &[
                        "batch.ranks 4 -> 3",
                        "batch.step_tokens 32 -> 96",
                        "mesh.ulysses 4 -> none",
                        "steps 3 -> 4",
                    ],
                ),
            ],
        },
        // A run chooses the route of its collectives for its machines.
        Resumes {
            first: &format!("{shared} --ranks-per-node 2"),
            resumed: &[
                ("--steps 2", &["mesh.two_level 2 -> none", "steps 1 -> 2"]),
                (
                    "--steps 3 --ranks-per-node 2 --collectives flat",
                    &["steps 2 -> 3"],
                ),
            ],
        },
    ];

    let dir = &inputs();
    for (name, text) in [
        (
            "ds.json",
            r#"{"train_micro_batch_size_per_gpu": 1, "gradient_clipping": "auto",
                "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.2}}}"#,
        ),
        (
            "sub_groups.json",
            r#"{"zero_optimization": {"stage": 2, "sub_group_size": 100000}}"#,
        ),
    ] {
        dir.write(name, text);
    }

    for (number, Resumes { first, resumed }) in cases.iter().enumerate() {
        let folder = format!("c{number}");
        train_with(dir, &format!("{first} --checkpoint {folder}"));
        for (flags, expected) in *resumed {
            let out = resume(dir, &format!("{folder} {flags}"));
            assert_eq!(differences(&out), *expected, "{first}, then {flags}: {out}");
        }
    }
    let sub_groups = record(dir, "c2", 2);
    assert_eq!(sub_groups["communication"]["sub_group_elems"], 100_000);
}

/// The opening of a run has a line for groups that share sequences, and for the route.
#[test]
fn opening_shows_groups_and_routes() {
    let dir = &inputs();
    let sizes = "--seq-len 32 --micro-batch 1 --steps 1 --no-checkpoint";
    for (flags, expected) in [
        (
            "--ranks 4 --ulysses 2",
            "sequences: each is shared by 2 ranks",
        ),
        (
            "--ranks 4 --ranks-per-node 2",
            "collectives: in two levels, within 2 machines of 2 ranks and between them",
        ),
        (
            "--ranks 4 --ranks-per-node 2 --collectives flat",
            "collectives: in one ring over all ranks (--collectives flat: requested)",
        ),
    ] {
        train_with(dir, &format!("{sizes} {flags}")).shows(&[expected]);
    }
    // On one machine there is one ring.
    train_with(dir, &format!("{sizes} --ranks 4")).omits(&["collectives:"]);
}

/// A resumed run cuts parameters as before, over other ranks, or not at all; the checkpoints have whole
/// parameters for all that read them.
#[test]
fn ranks_of_parts_may_change() {
    let dir = &inputs();
    let cut = "--tensor-parallel 2 --activation-checkpointing --partition-activations";
    let sizes = "--seq-len 32 --micro-batch 1 --ranks 4 --steps 1 --checkpoint c";
    train_with(dir, &format!("{sizes} {cut}")).shows(&["parameters: each is cut over 2 ranks"]);

    differing(dir, "c --steps 2", &["steps 1 -> 2"]);
    let out = resume(dir, "c --steps 3 --tensor-parallel 4");
    let expected = [
        "batch.step_tokens 64 -> 32",
        "mesh.tensor_parallel 2 -> 4",
        "steps 2 -> 3",
    ];
    assert_eq!(differences(&out), expected, "{out}");

    dir.zero("ckpt verify c").shows(&["step-00000003"]);
    dir.zero("ckpt inspect c").shows(&["cut over"]);
    dir.zero("ckpt export c whole");
    let written = |from: &str| dir.zero(&format!("generate --prompt 12 --tokens 8 {from}"));
    assert_eq!(written("--model whole"), written("--checkpoint c"));

    let out = resume(dir, "c --steps 4 --ranks 3");
    out.shows(&["each has whole parameters"]);
    let difference = "mesh.tensor_parallel 4 -> none";
    assert!(differences(&out).contains(&difference), "{out}");
}

#[test]
fn dropout_is_a_probability() {
    let dir = &temp();
    for dropout in ["1", "-0.1", "NaN", "half"] {
        dir.misuses(
            &format!("train --dropout={dropout}"),
            "at least 0 and below 1",
        );
    }
}

/// `--no-decay-1d` is a group of all tensors of one dimension; a resumed run keeps it, and prints a
/// change.
#[test]
fn no_decay_of_vectors() {
    let dir = &inputs();
    let groups = r#"{"param_groups": [{"max_dims": 1, "weight_decay": 0.0}], "zero_optimization": {"stage": 3},
        "gradient_clipping": 0.5}"#;
    dir.write("groups.json", groups);

    let out = train(dir, "--steps 3 --metrics flag --checkpoint a --no-decay-1d");

    out.shows(&["parameter groups: dims <= 1: weight decay 0"]);
    train(
        dir,
        "--steps 3 --metrics file --checkpoint b --config groups.json",
    );

    train(dir, "--steps 3 --metrics none --checkpoint c");
    assert_eq!(curve(dir, "flag"), curve(dir, "file"));
    let by_flag = weights(dir, "a");
    assert!(by_flag == weights(dir, "b") && by_flag != weights(dir, "c"));
    assert_eq!(
        record(dir, "a", 3)["param_groups"],
        serde_json::json!({"no_decay_1d": true})
    );
    assert_eq!(record(dir, "c", 3).get("param_groups"), None);

    differing(dir, "a --steps 4", &["steps 3 -> 4"]);
    differing(
        dir,
        "a --steps 5 --no-decay-1d=false",
        &[
            "param_groups dims <= 1: weight decay 0 -> none",
            "steps 4 -> 5",
        ],
    );

    dir.write("bad.json", r#"{"param_groups": [{"name": "x"}]}"#);
    dir.fails(
        "train --data text.txt --config bad.json --no-checkpoint",
        2,
        &["param_groups: unknown field `name`"],
    );
}

#[test]
fn another_model_is_refused() {
    let dir = &inputs();
    train(dir, "--steps 1 --checkpoint a");
    let with = |model: &str| dir.output(&format!("train --resume a --steps 2 --model {model}"));
    fails(
        &with("nano"),
        2,
        &[
            "--model nano",
            "another model",
            "/model",
            "n_embd 64 -> 128",
        ],
    );

    succeeds(&with("model"));
    // All shapes are the same.
    let path = dir.join("model/config.json");
    let config = std::fs::read_to_string(&path).unwrap();
    let other = config.replace("\"n_head\": 4", "\"n_head\": 2");
    std::fs::write(path, other).unwrap();
    fails(&with("model"), 2, &["another model", "n_head 4 -> 2"]);
}

#[test]
fn missing_data_is_an_error() {
    let dir = &inputs();
    train(dir, "--steps 1 --checkpoint a");
    std::fs::rename(dir.join("text.txt"), dir.join("moved.txt")).unwrap();
    dir.fails(
        "train --resume a --steps 2",
        2,
        &["text.txt", "does not exist", "--data"],
    );
    let out = resume(dir, "a --steps 2 --data moved.txt");
    let [path, _steps] = differences(&out)[..] else {
        panic!("{out}")
    };
    assert!(
        path.starts_with("data.path ") && path.ends_with("/moved.txt"),
        "{path}"
    );
    // The same path with another content.
    dir.write("moved.txt", "x".repeat(8192));
    resume(dir, "a --steps 3").shows(&["note: the data differs from the checkpoint's"]);
}

/// An interrupted run continues to its last step, with the interval of its checkpoints.
#[test]
fn last_step_and_checkpoints_are_taken_up() {
    let dir = &inputs();
    train(
        dir,
        "--steps 6 --checkpoint a --checkpoint-every 2 --keep-last 2",
    );

    std::fs::remove_dir_all(dir.join("a/step-00000006")).unwrap();
    resume(dir, "a");
    assert_eq!(checkpoints(&dir.join("a")), [4, 6]);
    resume(dir, "a").shows(&["nothing to do: the checkpoint is at step 6"]);
}

#[test]
fn run_id_follows_the_folder() {
    let dir = &inputs();
    train(dir, "--steps 1 --checkpoint a");
    let first = record(dir, "a", 1);
    resume(dir, "a --steps 2");
    let same = record(dir, "a", 2);
    for key in ["run", "resumed_runs"] {
        assert_eq!(same[key], first[key]);
    }
    resume(dir, "a --steps 3 --checkpoint b");
    let other = record(dir, "b", 3);
    assert_ne!(other["run"], first["run"]);
    assert_eq!(other["resumed_runs"], serde_json::json!([first["run"]]));
    assert_eq!(other["model"], first["model"]);
    // One checkpoint of a folder.
    resume(dir, "a/step-00000001 --steps 2 --checkpoint ./a");
    assert_eq!(record(dir, "a", 2)["run"], first["run"]);
}

#[test]
fn opening_shows_all_settings() {
    let dir = &inputs();
    let out = train(dir, "--steps 2 --checkpoint a --report report");

    out.shows(&[
        "parameters in bf16, ZeRO stage 3, 2 ranks x ",
        ", seed 11, weights from /",
        "data: text.txt: ",
        "step: 2 ranks x 2 micro-batches x 3 rows x 24 tokens = 288 tokens\n",
        "steps: 1 to 2: 0.070 epochs of the data\n",
        "optimizer: AdamW, betas 0.9 and 0.999, eps 1e-8, weight decay 0.2\n",
        "learning rate: 0.003, linear warm-up over 4 steps, then constant\n",
        "clip: gradient norm 0.5\n",
        "loss scale: 1\n",
        "checkpoints: a, at the end\n",
    ]);

    let report = json(&dir.join("report/run.json"));
    assert_eq!(report, record(dir, "a", 2));
    out.shows(&[&format!("run: {}, ", report["run"].as_str().unwrap())]);
}

/// The places of state do not decide the numbers, and flags override them.
#[test]
fn offload_is_taken_up() {
    let dir = &inputs_in(on_disk());
    for folder in ["one", "two"] {
        std::fs::create_dir(dir.join(folder)).unwrap();
    }
    let path = |folder: &str| {
        let folder = dir.join(folder).canonicalize().unwrap();
        format!("nvme:{}", folder.display())
    };

    train(dir, "--steps 3 --metrics plain --checkpoint p");
    assert_eq!(record(dir, "p", 3).get("offload"), None);

    let out = train(
        dir,
        "--offload nvme:one --offload-params nvme:one --steps 2 --metrics first --checkpoint a",
    );
    let one = path("one");
    let line = format!(
        "offload: optimizer state in {one} (masters fp32, moments fp32), parameters in {one}\n"
    );
    out.shows(&[&line]);
    let record_of_2 = record(dir, "a", 2);
    for part in ["optimizer", "params"] {
        assert_eq!(record_of_2["offload"][part], *one);
    }
    assert_eq!(record_of_2["communication"]["sub_group_elems"], 1 << 20);

    differing(dir, "a --steps 3 --metrics rest", &["steps 2 -> 3"]);
    assert_eq!(
        curve(dir, "plain"),
        [curve(dir, "first"), curve(dir, "rest")].concat()
    );
    assert!(weights(dir, "p") == weights(dir, "a"), "final weights");
    let out = resume(dir, "a --steps 4 --offload nvme:two");
    let expected = [
        format!("offload.optimizer {one} -> {}", path("two")),
        "steps 3 -> 4".to_owned(),
    ];
    assert_eq!(differences(&out), expected, "{out}");
    // Stage 2 has no parameters to offload.
    let out = resume(dir, "a --steps 5 --stage 2 --offload none");
    let expected = [
        format!("offload.optimizer {} -> none", path("two")),
        format!("offload.params {one} -> none"),
        "stage 3 -> 2".to_owned(),
        "steps 4 -> 5".to_owned(),
    ];
    assert_eq!(differences(&out), expected, "{out}");
    assert_eq!(record(dir, "a", 5).get("offload"), None);
    std::fs::remove_dir(dir.join("two")).unwrap();

    dir.fails(
        "train --resume a/step-00000004 --steps 5 --checkpoint b",
        2,
        &[
            "scratch files in /",
            "/two",
            "no folder of yours on this machine: pass --offload nvme:DIR",
        ],
    );
}

#[test]
fn missing_tokenizer_is_an_error() {
    let dir = &inputs();
    let vocabulary: Vec<String> = (0..256).map(|id| format!("\"{id:07}\": {id}")).collect();
    let tokenizer = format!(
        r#"{{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": {{"type": "Whitespace"}}, "post_processor": null, "decoder": null,
            "model": {{"type": "WordLevel", "unk_token": "0000000", "vocab": {{{}}}}}}}"#,
        vocabulary.join(", ")
    );
    dir.write("tokenizer.json", tokenizer);

    train(dir, "--tokenizer tokenizer.json --steps 1 --checkpoint a");

    differing(dir, "a --steps 2", &["steps 1 -> 2"]).shows(&["tokenizer.json"]);
    std::fs::rename(dir.join("tokenizer.json"), dir.join("moved.json")).unwrap();
    // The one that is kept beside the checkpoints.
    std::fs::remove_dir_all(dir.join("a/model-files")).unwrap();
    dir.fails(
        "train --resume a --steps 3",
        2,
        &["tokenizer.json", "does not exist", "--tokenizer"],
    );
    resume(dir, "a --steps 3 --tokenizer moved.json").omits(&["the data differs"]);
}

/// A checkpoint without `run.json`, as another program may write it: what its manifest has is taken
/// up.
#[test]
fn checkpoint_without_record_is_resumed() {
    let dir = &inputs();
    train(dir, "--stage 1 --steps 1 --checkpoint a");
    let step = dir.join("a/step-00000001");
    std::fs::remove_file(step.join("run.json")).unwrap();
    let file = json(&step.join("manifest.json"));
    let mut manifest = file["manifest"].clone();
    for key in ["run", "documents"] {
        manifest.as_object_mut().unwrap().remove(key).unwrap();
    }
    let text = manifest.to_string();
    let crc = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, text.as_bytes());
    let text = format!(
        r#"{{"format": "zero-ckpt", "version": 2, "crc64": "{crc:016x}", "manifest": {text}}}"#
    );
    step.write("manifest.json", text);
    resume(dir, "a --data text.txt --steps 2").shows(&[
        "has no run.json",
        "in bf16, ZeRO stage 1, ",
        ", seed 11, ",
    ]);
    assert_eq!(record(dir, "a", 2)["resumed_runs"], serde_json::json!([""]));
}

#[test]
fn damaged_record_is_refused() {
    let dir = &inputs();
    train(dir, "--steps 1 --checkpoint a");
    let path = dir.join("a/step-00000001/run.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("\"format\": 1", "\"format\": 2")).unwrap();
    // Its checksum is in the manifest.
    dir.fails("train --resume a/step-00000001 --steps 2", 1, &["run.json"]);
}
