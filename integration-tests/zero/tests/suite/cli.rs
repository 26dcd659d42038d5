//! The binary `zero` as a user runs it: its output, its error messages and its exit codes.

use serde_json::Value;

use crate::place;
use crate::support::{
    Disk, Files, Printed, Runs, data, fails, lines, on_disk, succeeds, temp, words,
};

/// A folder that the user names is data, all of it, and what is no text is named.
#[test]
fn named_folder_is_read_whole() {
    let dir = &temp();
    let path = |name: &str| dir.join(name);
    std::fs::create_dir(path("corpus")).unwrap();
    std::fs::write(path("corpus/large.txt"), "a line of text\n".repeat(80_000)).unwrap();
    std::fs::write(path("corpus/latin1.txt"), b"caf\xe9").unwrap();
    std::fs::write(path("corpus/.gitignore"), "large.txt\n").unwrap();

    let line = "train --data corpus --ranks 1 --steps 0 --no-checkpoint";
    dir.zero(line).shows(&[
        "data: corpus: 2 text files (1 left out), 1,200,010 bytes, read as bytes",
        "note: left out of the data: latin1.txt, 4 bytes (not UTF-8 at byte 3",
    ]);
    // A file that is missing on one machine would be other data.
    std::os::unix::fs::symlink("nowhere", path("corpus/b.txt")).unwrap();
    dir.fails(
        line,
        2,
        &["corpus/b.txt: a symbolic link to a file that does not exist"],
    );
}

#[test]
fn preset_is_suggested() {
    let dir = &temp();
    for (name, meant) in [
        ("gpt2", "gpt2-124m"),
        ("gpt2-xl", "gpt2-1.5b"),
        ("Nan", "nano"),
    ] {
        let error = format!("no model preset \"{name}\" (did you mean {meant}?); the presets are");
        dir.fails(&format!("train --model {name}"), 2, &[&error]);
    }
}

/// All presets are in the help of each flag that takes one, and on the program's page.
#[test]
fn presets_are_in_help_and_page() {
    let dir = &temp();
    let commands = ["train", "plan", "tune", "data inspect"];
    let helps = commands.map(|command| dir.zero(&format!("{command} --help")));
    let page = include_str!("../../README.md").to_owned();
    for text in helps.into_iter().chain([page]) {
        // Lines are broken anywhere in the list.
        let text: String = text.split_whitespace().collect();
        text.shows(&[&zero_models::PRESETS.join(",")]);
    }
}

#[test]
fn metrics_have_stable_keys() {
    let dir = &temp();
    let out = dir.tiny("--metrics out.jsonl --stage 2");

    let shown = "loss, tokens/s, parameters, gradients, optimizer state, reduce-scatter, formula";
    out.shows(&shown.split(", ").collect::<Vec<_>>());

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
fn wrong_flags_are_usage_errors() {
    let dir = &temp();
    dir.refuses_all(&[
        ("--ranks 0", &["--ranks 0"]),
        ("--stage 4", &["--stage 4"]),
        ("--seq-len 65", &["--seq-len 65", "64"]),
        ("--seq-len 0", &["--seq-len 0"]),
    ]);

    for flag in words("--micro-batch --grad-accum --threads --keep-last --time-limit") {
        dir.refuses(&format!("{flag} 0"), &[flag, "0", "at least 1"]);
    }

    dir.refuses_all(&[
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
        (
            "--cuda-graph --device cpu",
            &["--cuda-graph", "--device cuda"],
        ),
        ("--metrics no/such/folder.jsonl", &["no/such/folder.jsonl"]),
    ]);
    dir.misuses("train --offload moon", "expected none, cpu or nvme:DIR");
}

#[test]
fn wrong_routes_of_collectives_are_usage_errors() {
    let dir = &temp();
    dir.misuses("train --collectives tree", "auto, flat, two-level");
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
        dir.refuses(&format!("{levels} {flags}"), &parts);
    }
}

#[test]
fn zero_steps_succeed() {
    let dir = &temp();
    dir.tiny("--steps 0 --checkpoint a")
        .shows(&["nothing to do: --steps 0 is the last step\n"]);
    dir.tiny("--steps 0 --resume a")
        .shows(&["nothing to do: the checkpoint is at step 0"]);
}

#[test]
fn resume_in_another_dtype_prints_a_note() {
    let dir = &temp();
    dir.tiny("--dtype fp16 --checkpoint a");
    let out = dir.tiny("--dtype bf16 --resume a --steps 4");
    out.shows(&["note: the checkpoint was trained in fp16 and this run in bf16"]);
}

#[test]
fn offload_of_a_configuration_is_checked() {
    let dir = &temp();
    let with = |text: &str, more: &str| {
        dir.write("ds.json", text);
        dir.tiny_output(&format!("--config ds.json {more}"))
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
    out.shows(&["note: steps_per_print is ignored"]);
}

/// The same losses, and nothing is left in the folder.
#[test]
fn offload_keeps_the_losses() {
    let dir = &on_disk();
    let steps = |metrics: &str, more: &str| {
        dir.tiny(&format!("--metrics {metrics} --stage 3 {more}"));
        lines(&dir.join(metrics))
    };
    let losses =
        |steps: &[Value]| -> Vec<Value> { steps.iter().map(|step| step["loss"].clone()).collect() };

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
    dir.refuses_all(&[
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
    ]);
}

#[test]
fn closed_pipe_is_not_an_error() {
    let dir = &temp();
    let mut plan = place::zero();
    plan.args(words("plan --params 1e9 --gpus 4"));
    for mut command in [dir.tiny_command(""), plan] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        command.stdout(writer.try_clone().unwrap()).stderr(writer);
        let status = command.status().unwrap();
        assert_eq!(status.code(), Some(0), "{command:?}");
    }
}

/// A rank waits for the others of its launcher; a launcher of one process, and `--comm threads`, have
/// none.
#[test]
fn torchrun_counts_unless_ranks_are_threads() {
    let dir = &temp();
    let launched = |flags: &str, rank: &str, world_size: &str| {
        dir.tiny_command(&format!("--device cpu {flags}"))
            .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")])
            .envs([("LOCAL_RANK", rank), ("RANK", rank)])
            .env("WORLD_SIZE", world_size)
            .output()
            .unwrap()
    };

    let alone = launched("--time-limit 1", "0", "2");
    fails(&alone, 1, &["1 of 2 ranks did not join within", ": 1"]);
    succeeds(&launched("--comm auto", "0", "1"));
    succeeds(&launched("--comm threads", "1", "2"));
}

#[test]
fn bad_data_is_a_usage_error() {
    let dir = &temp();
    let write = |name: &str, bytes: &[u8]| dir.write(name, bytes);
    write("empty.bin", b"");
    write("odd.bin", b"abc");
    write("short.bin", &[0; 20]);

    write("outside.bin", &[[1, 0].repeat(50), vec![0, 1]].concat());

    dir.refuses_all(&[
        ("--data nowhere.bin", &["nowhere.bin"]),
        ("--data empty.bin", &["empty.bin"]),
        ("--data odd.bin", &["odd.bin"]),
        ("--data short.bin", &["short.bin", "10", "32"]),
        ("--data outside.bin", &["outside.bin", "256", "50"]),
    ]);
}

#[test]
fn bad_models_are_usage_errors() {
    let dir = &temp();
    let model = dir.join("model");
    std::fs::create_dir(&model).unwrap();
    let copy =
        |name: &str| std::fs::copy(data(&format!("model/{name}")), model.join(name)).unwrap();
    dir.refuses("--model model", &["config.json"]);
    copy("config.json");
    dir.refuses("--model model", &["model.safetensors"]);
    copy("model.safetensors");
    let config = model.text("config.json");
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
        model.write("config.json", config.replace(&was, &now));
        dir.refuses("--model model", parts);
    }
}

#[test]
fn bad_checkpoints_are_rejected() {
    let dir = &temp();
    dir.refuses("--resume nowhere", &["nowhere"]);
    std::fs::create_dir(dir.join("empty")).unwrap();
    dir.refuses("--resume empty", &["empty"]);
    dir.tiny("--checkpoint a");
    dir.zero(&format!("ckpt import {} imported", data("model")));

    dir.refuses(
        "--resume imported",
        &[
            "imported",
            "no training state to resume",
            "--model imported/step-00000000",
        ],
    );

    let other = "--model nano --resume a --steps 4 --seq-len 32";
    dir.refuses(other, &["another model"]);
    dir.tiny("--resume a --steps 4");
}

/// The error names the cause, and the previous checkpoints stay valid. A disk without room for all
/// checkpoints is a note before the first step, one without room for the next is an error then.
#[test]
fn full_disk_keeps_the_previous_checkpoint() {
    let dir = &temp();
    let Some(disk) = Disk::mount(dir.join("disk"), "5m") else {
        return;
    };

    let path = disk.join("ckpt").display().to_string();
    dir.tiny(&format!("--checkpoint {path}"));
    let full = dir.tiny_output(&format!("--resume {path} --steps 6 --checkpoint-every 1"));
    String::from_utf8_lossy(&full.stdout).shows(&["may add 3 checkpoints"]);
    fails(&full, 1, &["No space left", "ckpt"]);
    dir.zero(&format!("ckpt verify {path}"));
    let other = disk.join("other/ckpt").display().to_string();
    dir.refuses(
        &format!("--checkpoint {other} --metrics no-step"),
        &["a checkpoint of this run has", &other],
    );
    assert!(!dir.join("no-step").exists());
}

#[test]
fn missing_driver_is_named() {
    if zero_alloc::cuda::CudaDevice::count().is_ok() {
        // This machine has a driver.
        return;
    }

    let dir = &temp();
    dir.refuses_all(&[
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
    ]);
    dir.tiny("--device auto");
}
