//! The binary `zero` as a user runs it: its output, its error messages and its exit codes.

use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::place;
use crate::support::{
    data, fails, lines, losses, on_disk, refused, run, run_flags, signal, succeeds, temp, tiny,
    words,
};

/// A folder that the user names is data, all of it, and what is no text is named.
#[test]
fn named_folder_is_read_whole() {
    let dir = temp();
    let dir = dir.path();
    let path = |name: &str| dir.join(name);
    std::fs::create_dir(path("corpus")).unwrap();
    std::fs::write(path("corpus/large.txt"), "a line of text\n".repeat(80_000)).unwrap();
    std::fs::write(path("corpus/latin1.txt"), b"caf\xe9").unwrap();
    std::fs::write(path("corpus/.gitignore"), "large.txt\n").unwrap();

    let line = "train --data corpus --ranks 1 --steps 0 --no-checkpoint";
    let out = succeeds(&run(dir, line));
    assert!(
        out.contains("data: corpus: 2 text files (1 left out), 1,200,010 bytes, read as bytes"),
        "{out}"
    );
    assert!(
        out.contains("note: left out of the data: latin1.txt, 4 bytes (not UTF-8 at byte 3"),
        "{out}"
    );
    // A file that is missing on one machine would be other data.
    std::os::unix::fs::symlink("nowhere", path("corpus/b.txt")).unwrap();
    fails(
        &run(dir, line),
        2,
        &["corpus/b.txt: a symbolic link to a file that does not exist"],
    );
}

#[test]
fn preset_is_suggested() {
    let dir = temp();
    let dir = dir.path();
    for (name, meant) in [
        ("gpt2", "gpt2-124m"),
        ("gpt2-xl", "gpt2-1.5b"),
        ("Nan", "nano"),
    ] {
        let error = format!("no model preset \"{name}\" (did you mean {meant}?); the presets are");
        fails(&run(dir, &format!("train --model {name}")), 2, &[&error]);
    }
}

/// All presets are in the help of each flag that takes one, and on the program's page.
#[test]
fn presets_are_in_help_and_page() {
    let dir = temp();
    let dir = dir.path();
    let commands = ["train", "plan", "tune", "data inspect"];
    let helps = commands.map(|command| succeeds(&run(dir, &format!("{command} --help"))));
    let page = include_str!("../../README.md").to_owned();
    for text in helps.into_iter().chain([page]) {
        // Lines are broken anywhere in the list.
        let text: String = text.split_whitespace().collect();
        assert!(text.contains(&zero_models::PRESETS.join(",")), "{text}");
    }
}

#[test]
fn metrics_have_stable_keys() {
    let dir = temp();
    let dir = dir.path();
    let out = succeeds(&run_flags(dir, "--metrics out.jsonl --stage 2"));

    let shown = "loss, tokens/s, parameters, gradients, optimizer state, reduce-scatter, formula";
    for part in shown.split(", ") {
        assert!(out.contains(part), "{part:?} is not in: {out}");
    }

    let steps = lines(&dir.join("out.jsonl"));
    assert_eq!(steps.len(), 3);

    for (i, step) in steps.iter().enumerate() {
        assert_eq!(step["step"], i as u64 + 1);
        for key in words("loss grad_norm lr loss_scale tokens step_ms tokens_per_s") {
            assert!(step[key].is_number(), "{key}: {step}");
        }
        assert!(step["skipped"].is_boolean());
        for key in ["reduce_scatter", "all_gather", "all_reduce"] {
            assert!(step["comm_bytes"][key].is_u64(), "{key}: {step}");
        }
        for key in words("params grads optimizer buckets activations peak") {
            assert!(
                step["memory"][format!("{key}_bytes")].is_u64(),
                "{key}: {step}"
            );
        }
    }
}

#[test]
fn new_process_resumes_bit_identically() {
    let dir = temp();
    let dir = dir.path();
    let losses = |file: &str| losses(&dir.join(file));
    succeeds(&run_flags(dir, "--steps 6 --metrics whole --checkpoint a"));
    succeeds(&run_flags(dir, "--steps 4 --metrics first --checkpoint b"));
    succeeds(&run_flags(dir, "--steps 6 --metrics rest --resume b"));
    assert_eq!(losses("whole"), [losses("first"), losses("rest")].concat());
    for (from, to) in [("a", "whole-model"), ("b", "rest-model")] {
        succeeds(&run(dir, &format!("ckpt export {from} {to}")));
    }
    let weights = |folder: &str| std::fs::read(dir.join(folder).join("model.safetensors")).unwrap();
    assert!(
        weights("whole-model") == weights("rest-model"),
        "final weights"
    );
}

#[test]
fn wrong_flags_are_usage_errors() {
    let dir = temp();
    let dir = dir.path();
    refused(
        dir,
        &[
            ("--ranks 0", &["--ranks 0"]),
            ("--stage 4", &["--stage 4"]),
            ("--seq-len 65", &["--seq-len 65", "64"]),
            ("--seq-len 0", &["--seq-len 0"]),
        ],
    );

    for flag in words("--micro-batch --grad-accum --threads --keep-last --time-limit") {
        fails(
            &run_flags(dir, &format!("{flag} 0")),
            2,
            &[flag, "0", "at least 1"],
        );
    }

    refused(
        dir,
        &[
            ("--threads 1000", &["--threads 1000", "2 ranks", "1024"]),
            ("--model gpt5", &["gpt5", "nano"]),
            // Sizes that would overflow, or that the machine cannot hold, are found before the run.
            (
                "--micro-batch 2305843009213693952",
                &["2305843009213693952", "at most 2147483648 tokens"],
            ),
            (
                "--grad-accum 4294967296",
                &["--grad-accum 4294967296", "65536"],
            ),
            (
                "--micro-batch 67108864",
                &["for activations", "free", "--micro-batch"],
            ),
            (
                "--bucket-elems 1099511627776",
                &["for buckets", "free", "--bucket-elems"],
            ),
            ("--lr NaN", &["lr"]),
            ("--clip inf", &["max_grad_norm"]),
        ],
    );
    let moon = run_flags(dir, "--offload moon");
    assert_eq!(moon.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&moon.stderr).contains("expected none, cpu or nvme:DIR"));
}

#[test]
fn wrong_routes_of_collectives_are_usage_errors() {
    let dir = temp();
    let dir = dir.path();
    let bad = run_flags(dir, "--collectives tree");
    assert_eq!(bad.status.code(), Some(2));
    let said = String::from_utf8_lossy(&bad.stderr);
    assert!(said.contains("auto, flat, two-level"), "{said}");

    let levels = "--ranks 4 --collectives two-level --ranks-per-node";
    for (flags, parts) in [
        ("3", ["--ranks-per-node 3", "divides the 4 ranks"]),
        (
            "2 --shard-group 2",
            ["--collectives two-level with --shard-group 2", "remove one"],
        ),
        (
            "2 --stage 3 --hpz 2",
            ["--collectives two-level with --hpz 2", "remove one"],
        ),
    ] {
        fails(&run_flags(dir, &format!("{levels} {flags}")), 2, &parts);
    }
}

#[test]
fn zero_steps_succeed() {
    let dir = temp();
    let dir = dir.path();
    let out = succeeds(&run_flags(dir, "--steps 0 --checkpoint a"));
    assert!(
        out.contains("nothing to do: --steps 0 is the last step\n"),
        "{out}"
    );
    let out = succeeds(&run_flags(dir, "--steps 0 --resume a"));
    assert!(
        out.contains("nothing to do: the checkpoint is at step 0"),
        "{out}"
    );
}

#[test]
fn resume_in_another_dtype_prints_a_note() {
    let dir = temp();
    let dir = dir.path();
    succeeds(&run_flags(dir, "--dtype fp16 --checkpoint a"));
    let out = succeeds(&run_flags(dir, "--dtype bf16 --resume a --steps 4"));
    assert!(
        out.contains("note: the checkpoint was trained in fp16 and this run in bf16"),
        "{out}"
    );
}

#[test]
fn offload_of_a_configuration_is_checked() {
    let dir = temp();
    let dir = dir.path();
    let with = |text: &str, more: &str| {
        std::fs::write(dir.join("ds.json"), text).unwrap();
        run_flags(dir, &format!("--config ds.json {more}"))
    };

    let offload = |what: &str, to: &str| {
        format!(
            r#"{{"zero_optimization": {{"stage": 3, "{what}": {{"device": "{to}", "nvme_path": "/x"}}}}}}"#
        )
    };

    for (what, flag) in [
        ("offload_optimizer", "--offload"),
        ("offload_param", "--offload-params"),
    ] {
        fails(
            &with(&offload(what, "nvme"), ""),
            2,
            &[flag, "nvme:/x", "create the folder"],
        );
        succeeds(&with(&offload(what, "cpu"), ""));
    }

    // A flag overrides the file.
    succeeds(&with(
        &offload("offload_optimizer", "nvme"),
        "--offload none",
    ));
    fails(
        &with(
            r#"{"fp16": {"enabled": true, "initial_scale_power": 400}}"#,
            "",
        ),
        2,
        &["initial_scale_power", "126"],
    );

    let out = succeeds(&with(
        r#"{"steps_per_print": 1, "zero_optimization": {"stage": 3}}"#,
        "",
    ));
    assert!(out.contains("note: steps_per_print is ignored"), "{out}");
}

/// The same losses, and nothing is left in the folder.
#[test]
fn offload_keeps_the_losses() {
    let dir = on_disk();
    let dir = dir.path();
    let steps = |metrics: &str, more: &str| {
        succeeds(&run_flags(
            dir,
            &format!("--metrics {metrics} --stage 3 {more}"),
        ));
        lines(&dir.join(metrics))
    };
    let losses = |steps: &[Value]| {
        steps
            .iter()
            .map(|step| step["loss"].clone())
            .collect::<Vec<_>>()
    };

    let plain = steps("plain", "");
    std::fs::create_dir(dir.join("scratch")).unwrap();
    let kinds = [
        "--offload cpu",
        "--offload nvme:scratch",
        "--offload nvme:scratch --offload-params nvme:scratch",
    ];
    for (i, kind) in kinds.into_iter().enumerate() {
        let steps = steps(&format!("m{i}"), kind);
        assert_eq!(losses(&steps), losses(&plain), "{kind}");
        let file_bytes = steps[2]["nvme"]["file_bytes"].as_u64().unwrap_or(0);
        assert_eq!(file_bytes > 0, i > 0, "{kind}");
    }

    assert_eq!(std::fs::read_dir(dir.join("scratch")).unwrap().count(), 0);

    // The tiny model is in fp32 here.
    refused(
        dir,
        &[
            (
                "--stage 2 --offload-params cpu",
                &["--offload-params cpu", "use --stage 3"],
            ),
            (
                "--offload nvme:none",
                &["--offload nvme:none", "create the folder"],
            ),
            (
                "--offload cpu --masters remainder",
                &["--masters remainder", "--dtype bf16"],
            ),
            ("--moments bf16", &["--moments bf16", "--offload cpu"]),
            (
                "--memory-limit 1MiB",
                &[
                    "2 ranks",
                    "the limit of --memory-limit has 1.00 MiB free",
                    "--offload",
                ],
            ),
        ],
    );
}

/// A lower limit gathers less ahead; the losses are the same.
#[test]
fn low_live_parameter_limit_is_raised() {
    let dir = temp();
    let dir = dir.path();
    let limited = |limit: u64, metrics: &str| {
        let text = format!(
            r#"{{"zero_optimization": {{"stage": 3, "stage3_max_live_parameters": {limit}}}, "gradient_clipping": 0}}"#
        );
        std::fs::write(dir.join("ds.json"), text).unwrap();
        let out = succeeds(&run_flags(
            dir,
            &format!("--config ds.json --metrics {metrics}"),
        ));
        (out, losses(&dir.join(metrics)))
    };

    let (wide, expected) = limited(1_000_000_000, "wide");
    assert!(!wide.contains("max_live_parameters"), "{wide}");
    for limit in [0, 100] {
        let (out, losses) = limited(limit, &format!("narrow-{limit}"));
        assert!(
            out.contains(&format!("stage3_max_live_parameters {limit} is less")),
            "{out}"
        );
        assert_eq!(losses, expected);
    }
}

#[test]
fn closed_pipe_is_not_an_error() {
    let dir = temp();
    let dir = dir.path();
    let (model, tokens) = (data("model"), data("tokens.u16.bin"));
    let plan = words("plan --params 1e9 --gpus 4");
    for args in [tiny(&model, &tokens, &[]), plan] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = place::zero();
        let status = command
            .args(&args)
            .current_dir(dir)
            .stdout(writer.try_clone().unwrap())
            .stderr(writer);
        assert_eq!(status.status().unwrap().code(), Some(0), "{args:?}");
    }
}

/// Each process would train the whole run, and all would write the same files.
#[test]
fn torchrun_on_the_host_is_rejected() {
    let dir = temp();
    let dir = dir.path();
    let launched = |comm: &str, rank: &str, world_size: &str| {
        let (model, tokens) = (data("model"), data("tokens.u16.bin"));
        let variables = [
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "29500"),
            ("LOCAL_RANK", rank),
            ("RANK", rank),
        ];
        place::zero()
            .args(tiny(&model, &tokens, &["--device", "cpu", "--comm", comm]))
            .envs(variables)
            .env("WORLD_SIZE", world_size)
            .current_dir(dir)
            .output()
            .unwrap()
    };

    fails(
        &launched("auto", "1", "2"),
        2,
        &["torchrun", "rank 1 of 2", "--ranks 2", "--comm threads"],
    );
    succeeds(&launched("auto", "0", "1"));
    succeeds(&launched("threads", "1", "2"));
}

#[test]
fn bad_data_is_a_usage_error() {
    let dir = temp();
    let dir = dir.path();
    let write = |name: &str, bytes: &[u8]| std::fs::write(dir.join(name), bytes).unwrap();
    write("empty.bin", b"");
    write("odd.bin", b"abc");
    write("short.bin", &[0; 20]);

    write(
        "outside.bin",
        &[[1u8, 0]; 50]
            .concat()
            .into_iter()
            .chain([0, 1])
            .collect::<Vec<_>>(),
    );

    refused(
        dir,
        &[
            ("--data nowhere.bin", &["nowhere.bin"]),
            ("--data empty.bin", &["empty.bin"]),
            ("--data odd.bin", &["odd.bin"]),
            ("--data short.bin", &["short.bin", "10", "32"]),
            ("--data outside.bin", &["outside.bin", "256", "50"]),
        ],
    );
}

#[test]
fn bad_models_are_usage_errors() {
    let dir = temp();
    let dir = dir.path();
    let model = dir.join("model");
    std::fs::create_dir(&model).unwrap();
    let copy =
        |name: &str| std::fs::copy(data(&format!("model/{name}")), model.join(name)).unwrap();
    fails(&run_flags(dir, "--model model"), 2, &["config.json"]);
    copy("config.json");
    fails(&run_flags(dir, "--model model"), 2, &["model.safetensors"]);
    copy("model.safetensors");
    let config = std::fs::read_to_string(model.join("config.json")).unwrap();
    for (key, was, now, parts) in [
        (
            "n_layer",
            3,
            1_000_000_000,
            &["n_layer", "1000000000", "65536"][..],
        ),
        // The folder's tensors are of width 64 and three layers.
        ("n_layer", 3, 4, &["h.3."]),
        ("n_positions", 64, 128, &["wpe", "128", "64"]),
    ] {
        let [was, now] = [was, now].map(|value| format!("\"{key}\": {value}"));
        std::fs::write(model.join("config.json"), config.replace(&was, &now)).unwrap();
        fails(&run_flags(dir, "--model model"), 2, parts);
    }
}

#[test]
fn bad_checkpoints_are_rejected() {
    let dir = temp();
    let dir = dir.path();
    fails(&run_flags(dir, "--resume nowhere"), 2, &["nowhere"]);
    std::fs::create_dir(dir.join("empty")).unwrap();
    fails(&run_flags(dir, "--resume empty"), 2, &["empty"]);
    succeeds(&run_flags(dir, "--checkpoint a"));
    succeeds(&run(
        dir,
        &format!("ckpt import {} imported", data("model")),
    ));

    fails(
        &run_flags(dir, "--resume imported"),
        2,
        &[
            "imported",
            "no training state to resume",
            "--model imported/step-00000000",
        ],
    );

    let other = "--model nano --resume a --steps 4 --seq-len 32";
    fails(&run_flags(dir, other), 2, &["another model"]);
    succeeds(&run_flags(dir, "--resume a --steps 4"));
}

/// The error names the cause, and the previous checkpoints stay valid. A disk without room for all
/// checkpoints is a note before the first step, one without room for the next is an error then.
#[test]
fn full_disk_keeps_the_previous_checkpoint() {
    let dir = temp();
    let dir = dir.path();
    let disk = dir.join("disk");
    std::fs::create_dir(&disk).unwrap();
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=5m", "tmpfs"])
        .arg(&disk)
        .status();

    if !mounted.is_ok_and(|status| status.success()) {
        eprintln!("SKIPPED full_disk_keeps_the_previous_checkpoint: mounting a tmpfs needs root");
        return;
    }

    let path = disk.join("ckpt").display().to_string();
    let first = run_flags(dir, &format!("--checkpoint {path}"));
    let second = format!("--resume {path} --steps 6 --checkpoint-every 1");
    let second = run_flags(dir, &second);
    let third = run(dir, &format!("ckpt verify {path}"));
    let other = disk.join("other/ckpt").display().to_string();
    let fourth = run_flags(dir, &format!("--checkpoint {other} --metrics no-step"));
    let unmounted = Command::new("umount").arg(&disk).status().unwrap();
    succeeds(&first);
    let opening = String::from_utf8_lossy(&second.stdout);
    assert!(opening.contains("may add 3 checkpoints"), "{opening}");
    fails(&second, 1, &["No space left", "ckpt"]);
    succeeds(&third);
    fails(&fourth, 2, &["a checkpoint of this run has", &other]);
    assert!(!dir.join("no-step").exists());
    assert!(unmounted.success());
}

#[test]
fn unwritable_metrics_file_is_a_usage_error() {
    let dir = temp();
    let dir = dir.path();
    fails(
        &run_flags(dir, "--metrics no/such/folder.jsonl"),
        2,
        &["no/such/folder.jsonl"],
    );
}

/// Ctrl-C ends all ranks after the current step, with a checkpoint.
#[test]
fn interrupt_saves_and_ends() {
    let dir = temp();
    let dir = dir.path();
    let (model, tokens) = (data("model"), data("tokens.u16.bin"));
    let more = ["--steps", "1000000", "--metrics", "m", "--checkpoint", "c"];
    let mut training = place::zero()
        .args(tiny(&model, &tokens, &more))
        .current_dir(dir)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();

    // The run never ends by itself, and the test harness has no limit: neither wait depends on the
    // machine's speed.
    while std::fs::read_to_string(dir.join("m")).map_or(0, |t| t.lines().count()) < 3 {
        assert!(
            training.try_wait().unwrap().is_none(),
            "the run ended before its third step"
        );
        std::thread::sleep(Duration::from_millis(20));
    }

    signal(&training, "-INT");
    assert_eq!(training.wait().unwrap().code(), Some(130));
    let next = lines(&dir.join("m")).len() + 1;
    succeeds(&run_flags(
        dir,
        &format!("--resume c --steps {next} --metrics m2"),
    ));
    assert_eq!(lines(&dir.join("m2")).len(), 1);
}

#[test]
fn missing_driver_is_named() {
    if zero_alloc::cuda::CudaDevice::count().is_ok() {
        // This machine has a driver.
        return;
    }

    let dir = temp();
    let dir = dir.path();
    refused(
        dir,
        &[
            (
                "--device cuda",
                &["--device cuda", "no driver", "libcuda.so.1"],
            ),
            ("--comm nccl", &["--device cuda", "libcuda.so.1"]),
            (
                "--device cpu --comm nccl",
                &["--comm nccl", "--device cuda"],
            ),
            ("--device cuda --comm threads", &["NCCL"]),
        ],
    );
    succeeds(&run_flags(dir, "--device auto"));
}

#[test]
fn graphs_require_cuda() {
    let dir = temp();
    let dir = dir.path();
    fails(
        &run_flags(dir, "--cuda-graph --device cpu"),
        2,
        &["--cuda-graph", "--device cuda"],
    );
}
