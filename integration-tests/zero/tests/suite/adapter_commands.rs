//! `zero train --lora` as a user runs it, and what the other commands make of its checkpoints.

use std::fs;
use std::path::Path;

use integration_tests::{LLAMA, QWEN2, bytes_below};
use serde_json::{Value, json};

use crate::support::{
    Files, Runs, checkpoints, data, json as read, losses, on_disk, started, succeeds, temp,
    wait_for,
};

const ALL: &str = "--lora r=4,alpha=12,targets=c_attn,mlp.c_proj --lr 1e-2";

/// A copy of the oracle's model in `dir`.
fn copy_model(dir: &Path, to: &str) {
    let to = dir.join(to);
    fs::create_dir(&to).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(data(&format!("model/{name}")), to.join(name)).unwrap();
    }
}

fn tokens(dir: &Path, from: &str) -> Value {
    let line = format!("generate --json --prompt 'To be' --tokens 20 {from}");
    dir.json(&line)["tokens"].take()
}

/// The checkpoint, the exported folder and the merged model write the same text.
#[test]
fn exports_and_checkpoint_write_the_same() {
    writes_the_same("");
}

#[test]
fn exports_of_parts_write_the_same() {
    writes_the_same("--tensor-parallel 2");
}

fn writes_the_same(flags: &str) {
    let dir = &temp();
    dir.tiny(&format!("{ALL} --steps 5 --checkpoint saves {flags}"));
    dir.zero("ckpt export saves peft");
    dir.zero("ckpt export --merge saves merged");
    let base = data("model");
    let of_checkpoint = tokens(dir, "--checkpoint saves");
    assert_eq!(
        of_checkpoint,
        tokens(dir, &format!("--model {base} --lora peft"))
    );
    assert_eq!(of_checkpoint, tokens(dir, "--model merged"));
    assert_ne!(of_checkpoint, tokens(dir, &format!("--model {base}")));
    assert!(
        dir.zero("ckpt verify saves")
            .contains("all checksums match")
    );

    let config = read(&dir.join("peft/adapter_config.json"));
    assert_eq!(config["target_modules"], json!(["c_attn", "mlp.c_proj"]));
    assert_eq!(
        [&config["r"], &config["lora_alpha"]],
        [&json!(4), &json!(12)]
    );
    assert_eq!(config["fan_in_fan_out"], true);
    let merged = read(&dir.join("merged/config.json"));
    assert_eq!(merged["zero_lora"], Value::Null);
    assert_eq!(merged["model_type"], "gpt2");

    // The folder is where another run starts.
    let resumed = "--lora peft --steps 2 --lr 1e-2 --checkpoint more";
    dir.tiny(resumed);
    dir.zero("ckpt export more again");
    let size = |folder: &str| {
        dir.bytes(&format!("{folder}/adapter_model.safetensors"))
            .len()
    };
    assert_eq!(size("peft"), size("again"));
}

/// At most a tenth is neither adapters nor their state: masters and two moments in fp32.
#[test]
fn checkpoint_has_no_base() {
    let dir = &temp();
    let run = "train --model nano --lora r=64,targets=c_attn,c_proj,c_fc --steps 1 --ranks 2";
    dir.zero(&format!(
        "{run} --data {} --checkpoint saves",
        data("tokens.u16.bin")
    ));
    // 4 blocks of width 128, with 128 to 384, 128 to 128, 128 to 512 and back.
    let adapters = 4 * 64 * ((128 + 384) + (128 + 128) + 2 * (128 + 512));
    let files = bytes_below(&dir.join("saves"));
    assert!(
        files >= 12 * adapters && 10 * files <= 11 * 12 * adapters,
        "{files}"
    );
}

#[test]
fn killed_run_resumes_with_the_same_losses() {
    let dir = &on_disk();
    let flags = format!("{ALL} --steps 60 --lora r=4,dropout=0.1 --checkpoint-every 5");
    dir.tiny(&format!("{flags} --checkpoint whole --metrics whole.jsonl"));
    let command = dir.tiny_command(&format!("{flags} --checkpoint saves --metrics part.jsonl"));
    let mut run = started(command);
    let saves = dir.join("saves");
    wait_for(&mut run, || !checkpoints(&saves).is_empty());
    run.kill().unwrap(); // SIGKILL
    run.wait().unwrap();
    dir.zero("train --resume saves");
    assert_eq!(
        losses(&dir.join("part.jsonl")),
        losses(&dir.join("whole.jsonl"))
    );
}

#[test]
fn another_base_is_refused() {
    let dir = &temp();
    copy_model(dir, "base");
    dir.tiny("--model base --lora r=2 --steps 2 --checkpoint saves");
    let other = LLAMA.data("model").display().to_string();
    let resume = "train --resume saves --steps 4";
    dir.fails(&format!("{resume} --model {other}"), 2, &["another model"]);
    dir.fails(
        &format!("{resume} --lora r=2"),
        2,
        &["--lora with --resume: the run has its adapters"],
    );

    // The same shape with other weights: a whole run's.
    dir.tiny("--steps 1 --checkpoint whole");
    dir.zero("ckpt export whole other");
    let parts = &["--model other", "trained on another base (checksum", "base"];
    dir.fails(&format!("{resume} --model other"), 2, parts);
    dir.fails(
        "ckpt export --merge --base other saves out",
        2,
        &["trained on another base"],
    );
    dir.fails(
        "train --resume whole --steps 4 --lora r=2",
        2,
        &["the run has no adapters"],
    );

    fs::rename(dir.join("base"), dir.join("moved")).unwrap();
    dir.fails(
        resume,
        2,
        &["cannot be opened", "pass its folder with --model"],
    );
    dir.fails(
        "ckpt export --merge saves out",
        2,
        &["pass its folder with --base"],
    );
    dir.zero(&format!("{resume} --model moved"));
    dir.zero("ckpt export --merge saves out");
}

/// The base of a preset is drawn, by the run's first seed.
#[test]
fn drawn_base_resumes() {
    let dir = &temp();
    let run = "train --model nano --lora r=2 --seq-len 16 --micro-batch 1 --ranks 1 --lr 1e-2";
    let run = format!("{run} --data {} --seed 5", data("tokens.u16.bin"));
    dir.zero(&format!(
        "{run} --steps 6 --checkpoint whole --metrics whole.jsonl"
    ));
    dir.zero(&format!(
        "{run} --steps 3 --checkpoint part --metrics part.jsonl"
    ));
    dir.zero("train --resume part --steps 6");
    let [part, whole] = ["part.jsonl", "whole.jsonl"].map(|name| losses(&dir.join(name)));
    assert_eq!(part, whole);
    dir.fails(
        "ckpt export --merge part out",
        2,
        &["a base that was drawn"],
    );
}

#[test]
fn what_is_not_built_is_refused() {
    let dir = &temp();
    dir.refuses_all(&[
        ("--lora r=0", &["--lora: LoRA: r is 0"]),
        (
            "--lora r=4,targets=q_proj",
            &["\"q_proj\" is no linear layer", "attn.c_attn"],
        ),
        ("--lora nowhere", &["--lora nowhere", "adapter_config.json"]),
    ]);
    dir.misuses("train --lora r=4,beta=2", "expected r=R,alpha=X");
    dir.tiny("--lora r=2 --steps 1 --checkpoint saves");
    dir.fails("train --model saves", 2, &["adapters only", "--merge"]);
    dir.tiny("--steps 1 --checkpoint whole");
    dir.fails(
        "ckpt export --merge whole out",
        2,
        &["--merge: ", "has no adapters"],
    );

    // Keys of PEFT with more than that.
    let folder = QWEN2.data("lora");
    let model = QWEN2.data("model").display().to_string();
    fs::create_dir(dir.join("lora")).unwrap();
    let tensors = folder.join("adapter_model.safetensors");
    fs::copy(tensors, dir.join("lora/adapter_model.safetensors")).unwrap();
    let original = read(&folder.join("adapter_config.json"));
    let line = format!(
        "train --model {model} --lora lora --data {} --steps 1",
        data("tokens.u16.bin")
    );
    for (key, value, why) in [
        ("use_dora", json!(true), "\"use_dora\" is true"),
        ("bias", json!("all"), "\"bias\" is \"all\""),
        ("modules_to_save", json!(["lm_head"]), "\"modules_to_save\""),
        ("rank_pattern", json!({"q_proj": 2}), "\"rank_pattern\""),
        ("alpha_pattern", json!({"q_proj": 2}), "\"alpha_pattern\""),
        ("layers_to_transform", json!([1]), "\"layers_to_transform\""),
        (
            "init_lora_weights",
            json!("pissa"),
            "\"init_lora_weights\" is \"pissa\"",
        ),
        ("peft_type", json!("IA3"), "\"peft_type\" is \"IA3\""),
        ("a_later_key", json!(3), "\"a_later_key\" is 3"),
        ("target_modules", json!("q_.*"), "a list of names"),
        (
            "target_modules",
            json!(["q_proj", "v_proj"]),
            "is no adapter of the modules",
        ),
        (
            "target_modules",
            json!(["q_proj", "v_proj", "down_proj", "o_proj"]),
            "is missing",
        ),
        ("r", json!(3), "has shape"),
        ("r", json!("4"), "whole numbers"),
    ] {
        let mut config = original.clone();
        config[key] = value;
        dir.write("lora/adapter_config.json", config.to_string());
        dir.fails(&line, 2, &["lora", why]);
    }
}

/// The memory of adapters on a model that no card holds whole: 8 cards of 24 GB and Llama 2 70B.
#[test]
fn plan_has_the_memory_of_adapters() {
    let dir = &temp();
    let plan = "plan --json --model llama2-70b --gpus 8 --gpu-memory 24GB --seq-len 1024 \
                --activation-checkpointing";
    let stage = |flags: &str| dir.json(&format!("{plan} {flags}"))["stages"][3].take();
    let bytes = |stage: &Value, what: &str| stage["gpu"][what].as_u64().unwrap();
    let whole = stage("");
    let adapted = stage("--lora r=16");
    let quantised = stage("--lora r=16 --quantize-frozen nf4");
    // 80 blocks with adapters of q (8192 -> 8192) and v (8192 -> 1024), of 16 bits and of 12 bytes of
    // state each.
    let adapters: u64 = 80 * 16 * (8192 + 8192 + 8192 + 1024);
    let base: u64 = 68_976_648_192;
    assert_eq!(bytes(&whole, "params_bytes"), 2 * base / 8);
    assert_eq!(bytes(&adapted, "params_bytes"), 2 * (base + adapters) / 8);
    assert_eq!(bytes(&adapted, "grads_bytes"), 2 * adapters / 8);
    assert_eq!(bytes(&adapted, "optimizer_bytes"), 12 * adapters / 8);
    let quarter = bytes(&quantised, "params_bytes") as f64 / (2 * base / 8) as f64;
    assert!((0.26..0.30).contains(&quarter), "{quarter}");
    assert_eq!(
        [&whole["fits"], &quantised["fits"]],
        [&json!(false), &json!(true)]
    );
    dir.fails("plan --params 7B --gpus 8 --lora r=16", 2, &["--model"]);
    assert!(succeeds(&dir.output(&plan.replace("--json", "--lora r=16"))).len() > 100);

    // Of q (512 -> 512 of 8 heads) and v half of the outputs: B is cut, A is not.
    let cut = dir.json("plan --json --model nano --gpus 2 --tensor-parallel 2 --lora r=4");
    let whole = dir.json("plan --json --model nano --gpus 1 --lora r=4");
    let of = |plan: &Value| {
        plan["stages"][0]["gpu"]["optimizer_bytes"]
            .as_u64()
            .unwrap()
    };
    assert!((of(&whole) / 2 + 1..of(&whole)).contains(&of(&cut)));
}
