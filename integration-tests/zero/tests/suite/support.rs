//! The fixtures that the tests of the program share.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

pub(crate) use integration_tests::temporary_folder as temp;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::Value;
use tempfile::TempDir;
use zero_models::ModelConfig;

use crate::place;

pub(crate) fn data(name: &str) -> String {
    place::data(name).display().to_string()
}

/// The words of a command line.
pub(crate) fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// Runs `zero` with a command line in `dir`.
pub(crate) fn run(dir: &Path, line: &str) -> Output {
    zero(dir, &words(line))
}

/// Runs `zero` in `dir`.
pub(crate) fn zero(dir: &Path, args: &[&str]) -> Output {
    place::zero().args(args).current_dir(dir).output().unwrap()
}

/// The arguments of a small run, replaced or extended by the pairs of flag and value in `more`.
pub(crate) fn tiny<'a>(model: &'a str, tokens: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["train", "--model", model, "--data", tokens];
    args.extend(words("--seq-len 32 --micro-batch 1 --ranks 2 --steps 3"));
    for pair in more.chunks(2) {
        match args.iter().position(|a| *a == pair[0]) {
            Some(at) => args[at + 1] = pair[1],
            None => args.extend(pair),
        }
    }
    args
}

pub(crate) fn run_tiny(dir: &Path, more: &[&str]) -> Output {
    zero(dir, &tiny(&data("model"), &data("tokens.u16.bin"), more))
}

/// As [`run_tiny`], with the flags of a command line.
pub(crate) fn run_flags(dir: &Path, flags: &str) -> Output {
    run_tiny(dir, &words(flags))
}

/// Asserts that small runs with these flags are refused, with the parts of an error.
pub(crate) fn refused(dir: &Path, cases: &[(&str, &[&str])]) {
    for (flags, parts) in cases {
        fails(&run_flags(dir, flags), 2, parts);
    }
}

/// Asserts exit code `code` and one error line on standard error; the output contains all `parts`.
pub(crate) fn fails(output: &Output, code: i32, parts: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{text}");
    let last = text.lines().last().unwrap_or_default();
    assert!(last.starts_with("error: "), "{text}");
    assert!(!text.contains("panicked"), "{text}");
    assert_eq!(
        text.lines().filter(|l| l.starts_with("error: ")).count(),
        1,
        "{text}"
    );
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

pub(crate) fn succeeds(output: &Output) -> String {
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert_eq!(output.status.code(), Some(0), "{err}");
    out.into_owned()
}

/// A folder on a disk, as `nvme:DIR` is; for direct I/O and syncs, and for large files.
pub(crate) fn on_disk() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// The objects of a file of JSON lines.
pub(crate) fn lines(path: &Path) -> Vec<Value> {
    fs::read_to_string(path)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

pub(crate) fn losses(path: &Path) -> Vec<Value> {
    lines(path)
        .into_iter()
        .map(|mut line| line["loss"].take())
        .collect()
}

/// Sends a signal, such as `-TERM`.
pub(crate) fn signal(run: &Child, name: &str) {
    assert!(
        Command::new("kill")
            .args([name, &run.id().to_string()])
            .status()
            .unwrap()
            .success()
    );
}

pub(crate) fn write_model(folder: &Path, config: &ModelConfig) {
    std::fs::write(folder.join("config.json"), config.to_hf_json("float32")).unwrap();
    let tensors = config
        .units()
        .into_iter()
        .flat_map(|u| u.params)
        .map(|param| {
            let mut values = vec![0.0f32; param.shape.iter().product::<u64>() as usize];
            config
                .fill_initial(0, &param.name, 0..values.len() as u64, &mut values)
                .unwrap();
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            let shape: Vec<usize> = param.shape.iter().map(|n| *n as usize).collect();
            (param.name, shape, bytes)
        });

    let tensors: Vec<_> = tensors.collect();
    let view =
        |shape: &Vec<usize>, bytes| TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap();
    let views = tensors
        .iter()
        .map(|(name, shape, bytes)| (name, view(shape, bytes)));
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
}

/// A host of two cores, so that the tests depend on no measurement.
pub(crate) const HOST: &str = "name = 'a host'
peak_flops = 1e11
memory_bytes_per_s = 2e10
memory_bytes = 1e10
sms = 2.0
node_gpus = 2
link_bytes_per_s = 1e10
network_bytes_per_s = 1e10
host_link_bytes_per_s = 1e10
host_memory_bytes_per_s = 2e10
disk_bytes_per_s = 1e9
cores = 2
measured = true
";

/// Timeout that expires only if the program hangs.
const LIMIT: Duration = Duration::from_secs(120);

/// Polls until `is_done`, for at most [`LIMIT`].
pub(crate) fn wait_until(what: &str, mut is_done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_done() {
        assert!(begun.elapsed() < LIMIT, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
