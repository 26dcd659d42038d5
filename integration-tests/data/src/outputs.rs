//! Recognises what runs write, by content: checkpoints, exported models, metrics and reports and
//! logs. They are no text to train on, and with them the data of the current folder would differ
//! from one run to the next.

use std::fs;
use std::io::Read;
use std::path::Path;

use serde_json::Value;
use zero_ckpt::MODEL_FILES_FOLDER;
use zero_ckpt::files::{self, SMALL_FILE_BYTES};

/// The first bytes of a manifest contain its format's name.
const MANIFEST_PROBE_BYTES: u64 = 256;
/// The first lines of a log, after notes, name the model.
const LOG_LINES: usize = 40;

/// The folder of staged files and the lock, beside the checkpoints of a run.
const STAGING: &str = ".staging";
const LOCK: &str = ".lock";

/// Whether a folder is a checkpoint, a folder of checkpoints, that of the files kept beside some,
/// or a Hugging Face model.
pub(super) fn is_output_folder(dir: &Path) -> bool {
    is_checkpoint(dir) || holds_checkpoints(dir) || holds_kept_files(dir) || is_model(dir)
}

/// Whether a folder is `model-files`, whose folders are named by checksums.
fn holds_kept_files(dir: &Path) -> bool {
    let is_id = |name: &[u8]| name.len() == 16 && name.iter().all(u8::is_ascii_hexdigit);
    let folders = || {
        let entries = fs::read_dir(dir).ok()?;
        Some(entries.filter_map(|entry| Some(entry.ok()?.file_name())))
    };
    dir.file_name()
        .is_some_and(|name| name == MODEL_FILES_FOLDER)
        && folders().is_some_and(|mut names| names.any(|name| is_id(name.as_encoded_bytes())))
}

fn holds_checkpoints(dir: &Path) -> bool {
    dir.join(STAGING).is_dir() && dir.join(LOCK).is_file()
}

/// Whether the lock or the staged files of a run that saves to the folder of `path`.
pub(super) fn is_of_saves(path: &Path) -> bool {
    let is_named = |name: &str| path.file_name().is_some_and(|own| own == name);
    (is_named(STAGING) || is_named(LOCK)) && path.parent().is_some_and(holds_checkpoints)
}

fn is_checkpoint(dir: &Path) -> bool {
    let Ok((file, _)) = files::open(&dir.join("manifest.json")) else {
        return false;
    };
    let mut start = Vec::new();
    let read = file.take(MANIFEST_PROBE_BYTES).read_to_end(&mut start);
    read.is_ok() && String::from_utf8_lossy(&start).contains("\"zero-ckpt\"")
}

fn is_model(dir: &Path) -> bool {
    let weights = [
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
    ];
    dir.join("config.json").is_file() && weights.iter().any(|name| dir.join(name).is_file())
}

/// Whether a file of this content is one that runs write.
pub(super) fn is_output_file(path: &Path, text: &str) -> bool {
    names_checkpoint(text) || is_metrics(text) || is_log(text) || is_in_report(path)
}

/// `latest` of a folder of checkpoints: a checkpoint's name and a checksum.
fn names_checkpoint(text: &str) -> bool {
    let mut words = text.split_whitespace();
    let (name, checksum) = (
        words.next().unwrap_or_default(),
        words.next().unwrap_or_default(),
    );
    let is_hex = checksum.len() == 16 && checksum.bytes().all(|b| b.is_ascii_hexdigit());
    name.starts_with("step-") && is_hex && words.next().is_none()
}

/// `--metrics`: one JSON object a step.
fn is_metrics(text: &str) -> bool {
    let first = text.lines().next().filter(|line| line.starts_with('{'));
    let Some(Ok(first)) = first.map(serde_json::from_str::<Value>) else {
        return false;
    };
    ["step", "loss", "step_ms", "comm_bytes"]
        .iter()
        .all(|key| first.get(key).is_some())
}

/// The output of `zero train` in a file: the block of settings or, on standard error, the progress.
fn is_log(text: &str) -> bool {
    let is_step = |line: &str| {
        line.starts_with("step ") && line.contains(": loss ") && line.contains(" tokens/s")
    };
    text.lines().next().is_some_and(is_step) || text.lines().take(LOG_LINES).any(is_model_line)
}

/// Whether a line is as `nano: 858,880 parameters in fp32, ZeRO stage 3, 4 ranks x 1 thread`.
fn is_model_line(line: &str) -> bool {
    let Some((model, rest)) = line.split_once(" parameters in ") else {
        return false;
    };
    let Some((dtype, rest)) = rest.split_once(", ZeRO stage ") else {
        return false;
    };
    let count = model.rsplit_once(": ").map_or("", |(_, count)| count);
    let is_count = !count.is_empty()
        && count
            .bytes()
            .all(|byte| byte.is_ascii_digit() || byte == b',');
    is_count && ["fp32", "bf16", "fp16"].contains(&dtype) && rest.contains(" rank")
}

/// `--report`: files beside its `summary.json`.
fn is_in_report(path: &Path) -> bool {
    let name = path
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    let is_reports = ["summary.txt", "summary.json", "run.json", "trace.json"].contains(&name)
        || name.ends_with(".svg");
    let summary = || {
        let path = path.with_file_name("summary.json");
        let summary = files::read(&path, SMALL_FILE_BYTES).ok()?;
        serde_json::from_slice::<Value>(&summary).ok()
    };
    is_reports
        && summary().is_some_and(|summary| {
            ["unigram_loss", "memory_by_rank", "steps"]
                .iter()
                .all(|key| summary.get(key).is_some())
        })
}
