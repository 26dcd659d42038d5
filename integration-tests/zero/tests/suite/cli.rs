//! The binary `zero` as a user runs it: its output, its error messages and its exit codes.

use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::place;
use crate::support::{data, fails, on_disk, run_tiny, succeeds, temp, tiny, zero};

/// A folder that the user names is data, all of it, and what is no text is named.
#[test]
fn named_folder_is_read_whole() {
    let dir = temp();
    let path = |name: &str| dir.path().join(name);
    std::fs::create_dir(path("corpus")).unwrap();
    std::fs::write(path("corpus/large.txt"), "a line of text\n".repeat(80_000)).unwrap();
    std::fs::write(path("corpus/latin1.txt"), b"caf\xe9").unwrap();
    std::fs::write(path("corpus/.gitignore"), "large.txt\n").unwrap();

    let args = [
        "train",
        "--data",
        "corpus",
        "--ranks",
        "1",
        "--steps",
        "0",
        "--no-checkpoint",
    ];

    let out = succeeds(&zero(dir.path(), &args));
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
        &zero(dir.path(), &args),
        2,
        &["corpus/b.txt: a symbolic link to a file that does not exist"],
    );
}

#[test]
fn preset_is_suggested() {
    let dir = temp();
    for (name, meant) in [
        ("gpt2", "gpt2-124m"),
        ("gpt2-xl", "gpt2-1.5b"),
        ("Nan", "nano"),
    ] {
        let error = format!("no model preset \"{name}\" (did you mean {meant}?); the presets are");
        fails(&zero(dir.path(), &["train", "--model", name]), 2, &[&error]);
    }
}

/// All presets are in the help of each flag that takes one, and on the program's page.
#[test]
fn presets_are_in_help_and_page() {
    let dir = temp();
    let helps = [
        vec!["train", "--help"],
        vec!["plan", "--help"],
        vec!["tune", "--help"],
        vec!["data", "inspect", "--help"],
    ];
    let helps = helps.map(|args| succeeds(&zero(dir.path(), &args)));
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
    let out = succeeds(&run_tiny(
        dir.path(),
        &["--metrics", "out.jsonl", "--stage", "2"],
    ));

    for word in [
        "loss",
        "tokens/s",
        "parameters",
        "gradients",
        "optimizer state",
        "reduce-scatter",
        "formula",
    ] {
        assert!(out.contains(word), "{word:?} is not in: {out}");
    }

    let text = std::fs::read_to_string(dir.path().join("out.jsonl")).unwrap();
    let steps: Vec<Value> = text
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    assert_eq!(steps.len(), 3);

    for (i, step) in steps.iter().enumerate() {
        assert_eq!(step["step"], i as u64 + 1);
        for key in [
            "loss",
            "grad_norm",
            "lr",
            "loss_scale",
            "tokens",
            "step_ms",
            "tokens_per_s",
        ] {
            assert!(step[key].is_number(), "{key}: {step}");
        }
        assert!(step["skipped"].is_boolean());
        for key in ["reduce_scatter", "all_gather", "all_reduce"] {
            assert!(step["comm_bytes"][key].is_u64(), "{key}: {step}");
        }
        for key in [
            "params",
            "grads",
            "optimizer",
            "buckets",
            "activations",
            "peak",
        ] {
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
    let losses = |file: &str| {
        let text = std::fs::read_to_string(dir.path().join(file)).unwrap();
        text.lines()
            .map(|l| serde_json::from_str::<Value>(l).unwrap()["loss"].to_string())
            .collect::<Vec<_>>()
    };

    succeeds(&run_tiny(
        dir.path(),
        &["--steps", "6", "--metrics", "whole", "--checkpoint", "a"],
    ));
    succeeds(&run_tiny(
        dir.path(),
        &["--steps", "4", "--metrics", "first", "--checkpoint", "b"],
    ));
    succeeds(&run_tiny(
        dir.path(),
        &["--steps", "6", "--metrics", "rest", "--resume", "b"],
    ));
    assert_eq!(losses("whole"), [losses("first"), losses("rest")].concat());
    for (from, to) in [("a", "whole-model"), ("b", "rest-model")] {
        succeeds(&zero(dir.path(), &["ckpt", "export", from, to]));
    }
    let weights =
        |folder: &str| std::fs::read(dir.path().join(folder).join("model.safetensors")).unwrap();
    assert!(
        weights("whole-model") == weights("rest-model"),
        "final weights"
    );
}

#[test]
fn wrong_flags_are_usage_errors() {
    let dir = temp();
    fails(&run_tiny(dir.path(), &["--ranks", "0"]), 2, &["--ranks 0"]);
    fails(&run_tiny(dir.path(), &["--stage", "4"]), 2, &["--stage 4"]);
    fails(
        &run_tiny(dir.path(), &["--seq-len", "65"]),
        2,
        &["--seq-len 65", "64"],
    );
    fails(
        &run_tiny(dir.path(), &["--seq-len", "0"]),
        2,
        &["--seq-len 0"],
    );

    for flag in [
        "--micro-batch",
        "--grad-accum",
        "--threads",
        "--keep-last",
        "--time-limit",
    ] {
        fails(
            &run_tiny(dir.path(), &[flag, "0"]),
            2,
            &[flag, "0", "at least 1"],
        );
    }

    fails(
        &run_tiny(dir.path(), &["--threads", "1000"]),
        2,
        &["--threads 1000", "2 ranks", "1024"],
    );
    // Sizes that would overflow, or that the machine cannot hold, are found before the run.
    let tokens = run_tiny(dir.path(), &["--micro-batch", "2305843009213693952"]);
    fails(
        &tokens,
        2,
        &["2305843009213693952", "at most 2147483648 tokens"],
    );
    fails(
        &run_tiny(dir.path(), &["--grad-accum", "4294967296"]),
        2,
        &["--grad-accum 4294967296", "65536"],
    );
    fails(
        &run_tiny(dir.path(), &["--micro-batch", "67108864"]),
        2,
        &["for activations", "free", "--micro-batch"],
    );
    fails(
        &run_tiny(dir.path(), &["--bucket-elems", "1099511627776"]),
        2,
        &["for buckets", "free", "--bucket-elems"],
    );
    fails(&run_tiny(dir.path(), &["--lr", "NaN"]), 2, &["lr"]);
    fails(
        &run_tiny(dir.path(), &["--clip", "inf"]),
        2,
        &["max_grad_norm"],
    );
    let moon = run_tiny(dir.path(), &["--offload", "moon"]);
    assert_eq!(moon.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&moon.stderr).contains("expected none, cpu or nvme:DIR"));
    fails(
        &run_tiny(dir.path(), &["--model", "gpt5"]),
        2,
        &["gpt5", "nano"],
    );
}

#[test]
fn wrong_routes_of_collectives_are_usage_errors() {
    let dir = temp();
    let refused = |flags: &str, parts: &[&str]| {
        let flags: Vec<&str> = flags.split(' ').collect();
        fails(&run_tiny(dir.path(), &flags), 2, parts);
    };
    let bad = run_tiny(dir.path(), &["--collectives", "tree"]);
    assert_eq!(bad.status.code(), Some(2));
    let said = String::from_utf8_lossy(&bad.stderr);
    assert!(said.contains("auto, flat, two-level"), "{said}");

    refused(
        "--ranks 4 --collectives two-level --ranks-per-node 3",
        &["--ranks-per-node 3", "divides the 4 ranks"],
    );
    refused(
        "--ranks 4 --collectives two-level --ranks-per-node 2 --shard-group 2",
        &["--collectives two-level with --shard-group 2", "remove one"],
    );
    refused(
        "--ranks 4 --collectives two-level --ranks-per-node 2 --stage 3 --hpz 2",
        &["--collectives two-level with --hpz 2", "remove one"],
    );
}

#[test]
fn zero_steps_succeed() {
    let dir = temp();
    let out = succeeds(&run_tiny(
        dir.path(),
        &["--steps", "0", "--checkpoint", "a"],
    ));
    assert!(
        out.contains("nothing to do: --steps 0 is the last step\n"),
        "{out}"
    );
    let out = succeeds(&run_tiny(dir.path(), &["--steps", "0", "--resume", "a"]));
    assert!(
        out.contains("nothing to do: the checkpoint is at step 0"),
        "{out}"
    );
}

#[test]
fn resume_in_another_dtype_prints_a_note() {
    let dir = temp();
    succeeds(&run_tiny(
        dir.path(),
        &["--dtype", "fp16", "--checkpoint", "a"],
    ));
    let out = succeeds(&run_tiny(
        dir.path(),
        &["--dtype", "bf16", "--resume", "a", "--steps", "4"],
    ));
    assert!(
        out.contains("note: the checkpoint was trained in fp16 and this run in bf16"),
        "{out}"
    );
}

#[test]
fn offload_of_a_configuration_is_checked() {
    let dir = temp();
    let with = |text: &str, more: &[&str]| {
        std::fs::write(dir.path().join("ds.json"), text).unwrap();
        run_tiny(dir.path(), &[&["--config", "ds.json"], more].concat())
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
            &with(&offload(what, "nvme"), &[]),
            2,
            &[flag, "nvme:/x", "create the folder"],
        );
        succeeds(&with(&offload(what, "cpu"), &[]));
    }

    // A flag overrides the file.
    succeeds(&with(
        &offload("offload_optimizer", "nvme"),
        &["--offload", "none"],
    ));
    fails(
        &with(
            r#"{"fp16": {"enabled": true, "initial_scale_power": 400}}"#,
            &[],
        ),
        2,
        &["initial_scale_power", "126"],
    );

    let out = succeeds(&with(
        r#"{"steps_per_print": 1, "zero_optimization": {"stage": 3}}"#,
        &[],
    ));
    assert!(out.contains("note: steps_per_print is ignored"), "{out}");
}

/// The same losses, and nothing is left in the folder.
#[test]
fn offload_keeps_the_losses() {
    let dir = on_disk();
    let run = |metrics: &str, more: &[&str]| {
        succeeds(&run_tiny(
            dir.path(),
            &[&["--metrics", metrics, "--stage", "3"], more].concat(),
        ));
        let text = std::fs::read_to_string(dir.path().join(metrics)).unwrap();
        text.lines()
            .map(|l| serde_json::from_str::<Value>(l).unwrap())
            .collect::<Vec<_>>()
    };

    let losses = |steps: &[Value]| {
        steps
            .iter()
            .map(|step| step["loss"].to_string())
            .collect::<Vec<_>>()
    };

    let plain = run("plain", &[]);
    std::fs::create_dir(dir.path().join("scratch")).unwrap();
    let kinds: [&[&str]; 3] = [
        &["--offload", "cpu"],
        &["--offload", "nvme:scratch"],
        &[
            "--offload",
            "nvme:scratch",
            "--offload-params",
            "nvme:scratch",
        ],
    ];

    for (i, kind) in kinds.into_iter().enumerate() {
        let steps = run(&format!("m{i}"), kind);
        assert_eq!(losses(&steps), losses(&plain), "{kind:?}");
        assert_eq!(
            steps[2]["nvme"]["file_bytes"].as_u64().unwrap_or(0) > 0,
            i > 0,
            "{kind:?}"
        );
    }

    assert_eq!(
        std::fs::read_dir(dir.path().join("scratch"))
            .unwrap()
            .count(),
        0
    );

    // The tiny model is in fp32 here.
    for (flags, parts) in [
        (
            &["--stage", "2", "--offload-params", "cpu"][..],
            &["--offload-params cpu", "use --stage 3"][..],
        ),
        (
            &["--offload", "nvme:none"],
            &["--offload nvme:none", "create the folder"],
        ),
        (
            &["--offload", "cpu", "--masters", "remainder"],
            &["--masters remainder", "--dtype bf16"],
        ),
        (&["--moments", "bf16"], &["--moments bf16", "--offload cpu"]),
        (
            &["--memory-limit", "1MiB"],
            &[
                "2 ranks",
                "the limit of --memory-limit has 1.00 MiB free",
                "--offload",
            ],
        ),
    ] {
        fails(&run_tiny(dir.path(), flags), 2, parts);
    }
}

/// A lower limit gathers less ahead; the losses are the same.
#[test]
fn low_live_parameter_limit_is_raised() {
    let dir = temp();
    let run = |limit: u64, metrics: &str| {
        let text = format!(
            r#"{{"zero_optimization": {{"stage": 3, "stage3_max_live_parameters": {limit}}}, "gradient_clipping": 0}}"#
        );
        std::fs::write(dir.path().join("ds.json"), text).unwrap();
        let out = succeeds(&run_tiny(
            dir.path(),
            &["--config", "ds.json", "--metrics", metrics],
        ));
        let text = std::fs::read_to_string(dir.path().join(metrics)).unwrap();
        let losses: Vec<String> = text
            .lines()
            .map(|l| serde_json::from_str::<Value>(l).unwrap()["loss"].to_string())
            .collect();
        (out, losses)
    };

    let (wide, expected) = run(1_000_000_000, "wide");
    assert!(!wide.contains("max_live_parameters"), "{wide}");
    for limit in [0, 100] {
        let (out, losses) = run(limit, &format!("narrow-{limit}"));
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
    let (model, tokens) = (data("model"), data("tokens.u16.bin"));
    let plan = vec!["plan", "--params", "1e9", "--gpus", "4"];
    for args in [tiny(&model, &tokens, &[]), plan] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = place::zero();
        let status = command
            .args(&args)
            .current_dir(dir.path())
            .stdout(writer.try_clone().unwrap())
            .stderr(writer);
        assert_eq!(status.status().unwrap().code(), Some(0), "{args:?}");
    }
}

/// Each process would train the whole run, and all would write the same files.
#[test]
fn torchrun_on_the_host_is_rejected() {
    let dir = temp();
    let run = |comm: &str, rank: &str, world_size: &str| {
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
            .current_dir(dir.path())
            .output()
            .unwrap()
    };

    fails(
        &run("auto", "1", "2"),
        2,
        &["torchrun", "rank 1 of 2", "--ranks 2", "--comm threads"],
    );
    succeeds(&run("auto", "0", "1"));
    succeeds(&run("threads", "1", "2"));
}

#[test]
fn bad_data_is_a_usage_error() {
    let dir = temp();
    let write = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
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

    fails(
        &run_tiny(dir.path(), &["--data", "nowhere.bin"]),
        2,
        &["nowhere.bin"],
    );
    fails(
        &run_tiny(dir.path(), &["--data", "empty.bin"]),
        2,
        &["empty.bin"],
    );
    fails(
        &run_tiny(dir.path(), &["--data", "odd.bin"]),
        2,
        &["odd.bin"],
    );
    fails(
        &run_tiny(dir.path(), &["--data", "short.bin"]),
        2,
        &["short.bin", "10", "32"],
    );
    fails(
        &run_tiny(dir.path(), &["--data", "outside.bin"]),
        2,
        &["outside.bin", "256", "50"],
    );
}

#[test]
fn bad_models_are_usage_errors() {
    let dir = temp();
    let model = dir.path().join("model");
    std::fs::create_dir(&model).unwrap();
    let copy =
        |name: &str| std::fs::copy(data(&format!("model/{name}")), model.join(name)).unwrap();
    fails(
        &run_tiny(dir.path(), &["--model", "model"]),
        2,
        &["config.json"],
    );
    copy("config.json");
    fails(
        &run_tiny(dir.path(), &["--model", "model"]),
        2,
        &["model.safetensors"],
    );
    copy("model.safetensors");
    let config = std::fs::read_to_string(model.join("config.json")).unwrap();
    std::fs::write(
        model.join("config.json"),
        config.replace("\"n_layer\": 3", "\"n_layer\": 1000000000"),
    )
    .unwrap();
    fails(
        &run_tiny(dir.path(), &["--model", "model"]),
        2,
        &["n_layer", "1000000000", "65536"],
    );
    // The folder's tensors are of width 64 and three layers.
    std::fs::write(
        model.join("config.json"),
        config.replace("\"n_layer\": 3", "\"n_layer\": 4"),
    )
    .unwrap();
    fails(&run_tiny(dir.path(), &["--model", "model"]), 2, &["h.3."]);
    std::fs::write(
        model.join("config.json"),
        config.replace("\"n_positions\": 64", "\"n_positions\": 128"),
    )
    .unwrap();
    fails(
        &run_tiny(dir.path(), &["--model", "model"]),
        2,
        &["wpe", "128", "64"],
    );
}

#[test]
fn bad_checkpoints_are_rejected() {
    let dir = temp();
    fails(
        &run_tiny(dir.path(), &["--resume", "nowhere"]),
        2,
        &["nowhere"],
    );
    std::fs::create_dir(dir.path().join("empty")).unwrap();
    fails(&run_tiny(dir.path(), &["--resume", "empty"]), 2, &["empty"]);
    succeeds(&run_tiny(dir.path(), &["--checkpoint", "a"]));
    succeeds(&zero(
        dir.path(),
        &["ckpt", "import", &data("model"), "imported"],
    ));

    fails(
        &run_tiny(dir.path(), &["--resume", "imported"]),
        2,
        &[
            "imported",
            "no training state to resume",
            "--model imported/step-00000000",
        ],
    );

    let other = [
        "--model",
        "nano",
        "--resume",
        "a",
        "--steps",
        "4",
        "--seq-len",
        "32",
    ];

    fails(&run_tiny(dir.path(), &other), 2, &["another model"]);
    succeeds(&run_tiny(dir.path(), &["--resume", "a", "--steps", "4"]));
}

/// The error names the cause, and the previous checkpoints stay valid. A disk without room for all
/// checkpoints is a note before the first step, one without room for the next is an error then.
#[test]
fn full_disk_keeps_the_previous_checkpoint() {
    let dir = temp();
    let disk = dir.path().join("disk");
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
    let first = run_tiny(dir.path(), &["--checkpoint", &path]);
    let second = run_tiny(
        dir.path(),
        &["--resume", &path, "--steps", "6", "--checkpoint-every", "1"],
    );
    let third = zero(dir.path(), &["ckpt", "verify", &path]);
    let other = disk.join("other/ckpt").display().to_string();
    let fourth = run_tiny(
        dir.path(),
        &["--checkpoint", &other, "--metrics", "no-step"],
    );
    let unmounted = Command::new("umount").arg(&disk).status().unwrap();
    succeeds(&first);
    let opening = String::from_utf8_lossy(&second.stdout);
    assert!(opening.contains("may add 3 checkpoints"), "{opening}");
    fails(&second, 1, &["No space left", "ckpt"]);
    succeeds(&third);
    fails(&fourth, 2, &["a checkpoint of this run has", &other]);
    assert!(!dir.path().join("no-step").exists());
    assert!(unmounted.success());
}

#[test]
fn unwritable_metrics_file_is_a_usage_error() {
    let dir = temp();
    fails(
        &run_tiny(dir.path(), &["--metrics", "no/such/folder.jsonl"]),
        2,
        &["no/such/folder.jsonl"],
    );
}

/// Ctrl-C ends all ranks after the current step, with a checkpoint.
#[test]
fn interrupt_saves_and_ends() {
    let dir = temp();
    let (model, tokens) = (data("model"), data("tokens.u16.bin"));
    let more = ["--steps", "1000000", "--metrics", "m", "--checkpoint", "c"];
    let mut run = place::zero()
        .args(tiny(&model, &tokens, &more))
        .current_dir(dir.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();

    // The run never ends by itself, and the test harness has no limit: neither wait depends on the
    // machine's speed.
    while std::fs::read_to_string(dir.path().join("m")).map_or(0, |t| t.lines().count()) < 3 {
        assert!(
            run.try_wait().unwrap().is_none(),
            "the run ended before its third step"
        );
        std::thread::sleep(Duration::from_millis(20));
    }

    assert!(
        Command::new("kill")
            .args(["-INT", &run.id().to_string()])
            .status()
            .unwrap()
            .success()
    );

    assert_eq!(run.wait().unwrap().code(), Some(130));
    let steps = std::fs::read_to_string(dir.path().join("m"))
        .unwrap()
        .lines()
        .count();
    let next = (steps + 1).to_string();
    succeeds(&run_tiny(
        dir.path(),
        &["--resume", "c", "--steps", &next, "--metrics", "m2"],
    ));

    assert_eq!(
        std::fs::read_to_string(dir.path().join("m2"))
            .unwrap()
            .lines()
            .count(),
        1
    );
}

#[test]
fn missing_driver_is_named() {
    if zero_alloc::cuda::CudaDevice::count().is_ok() {
        // This machine has a driver.
        return;
    }

    let dir = temp();
    fails(
        &run_tiny(dir.path(), &["--device", "cuda"]),
        2,
        &["--device cuda", "no driver", "libcuda.so.1"],
    );
    fails(
        &run_tiny(dir.path(), &["--comm", "nccl"]),
        2,
        &["--device cuda", "libcuda.so.1"],
    );
    fails(
        &run_tiny(dir.path(), &["--device", "cpu", "--comm", "nccl"]),
        2,
        &["--comm nccl", "--device cuda"],
    );
    fails(
        &run_tiny(dir.path(), &["--device", "cuda", "--comm", "threads"]),
        2,
        &["NCCL"],
    );
    succeeds(&run_tiny(dir.path(), &["--device", "auto"]));
}

#[test]
fn graphs_require_cuda() {
    let dir = temp();
    fails(
        &run_tiny(dir.path(), &["--cuda-graph", "--device", "cpu"]),
        2,
        &["--cuda-graph", "--device cuda"],
    );
}
