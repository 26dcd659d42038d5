//! The fixtures that the tests of the program share.

use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

pub(crate) use integration_tests::{Files, Folder, Printed};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::Value;
use zero_models::ModelConfig;

use crate::place;

pub(crate) fn data(name: &str) -> String {
    place::data(name).display().to_string()
}

/// The words of a command line; one in quotes may have spaces.
pub(crate) fn words(line: &str) -> Vec<&str> {
    let mut words = Vec::new();
    for (i, part) in line.split('\'').enumerate() {
        match i % 2 {
            0 => words.extend(part.split_whitespace()),
            _ => words.push(part),
        }
    }
    words
}

/// The arguments of a small run, replaced or extended by the flags in `more`.
fn tiny<'a>(model: &'a str, tokens: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["train", "--model", model, "--data", tokens];
    args.extend(words("--seq-len 32 --micro-batch 1 --ranks 2 --steps 3"));
    let mut more = more.iter().peekable();
    while let Some(flag) = more.next() {
        let value = more.next_if(|word| !word.starts_with("--"));
        match (args.iter().position(|arg| arg == flag), value) {
            (Some(at), Some(value)) => args[at + 1] = value,
            (_, value) => {
                args.push(flag);
                args.extend(value);
            }
        }
    }
    args
}

/// A small file system in memory, mounted until it is dropped.
pub(crate) struct Disk(PathBuf);

impl Disk {
    /// `None` without the rights to mount one.
    pub(crate) fn mount(at: PathBuf, size: &str) -> Option<Self> {
        fs::create_dir(&at).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]);
        let mounted = mount.arg(&at).status();
        if mounted.is_ok_and(|status| status.success()) {
            return Some(Self(at));
        }
        eprintln!("SKIPPED: mounting a tmpfs needs root");
        None
    }
}

impl Deref for Disk {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg(&self.0).status();
        let is_unmounted = unmounted.is_ok_and(|status| status.success());
        assert!(is_unmounted || std::thread::panicking());
    }
}

/// `zero` in a folder, with the words of a command line.
pub(crate) trait Runs {
    fn command(&self, line: &str) -> Command;

    fn output(&self, line: &str) -> Output {
        self.command(line).output().unwrap()
    }

    /// A small run with these flags.
    fn tiny_command(&self, flags: &str) -> Command;

    /// A small run for a shell.
    fn tiny_line(&self, flags: &str) -> String {
        let command = self.tiny_command(flags);
        let program = std::iter::once(command.get_program());
        let words = program.chain(command.get_args());
        let words: Vec<String> = words.map(|word| format!("'{}'", word.display())).collect();
        words.join(" ")
    }

    fn start(&self, flags: &str) -> Child {
        started(self.tiny_command(flags))
    }

    /// The standard output of a command that succeeds.
    fn zero(&self, line: &str) -> String {
        succeeds(&self.output(line))
    }

    /// The JSON that a command prints.
    fn json(&self, line: &str) -> Value {
        serde_json::from_str(&self.zero(line)).unwrap()
    }

    /// Asserts that a command fails, as [`fails`].
    fn fails(&self, line: &str, code: i32, parts: &[&str]) {
        fails(&self.output(line), code, parts);
    }

    fn tiny_output(&self, flags: &str) -> Output {
        self.tiny_command(flags).output().unwrap()
    }

    /// The standard output of a small run that succeeds.
    fn tiny(&self, flags: &str) -> String {
        succeeds(&self.tiny_output(flags))
    }

    /// Asserts that the parser of arguments refuses a command, with this part of its error.
    fn misuses(&self, line: &str, part: &str) {
        let output = self.output(line);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{line}: {error}");
        error.shows(&[part]);
    }

    /// Asserts that small runs with these flags are refused, with the parts of an error.
    fn refuses_all(&self, cases: &[(&str, &[&str])]) {
        for (flags, parts) in cases {
            self.refuses(flags, parts);
        }
    }

    /// Asserts that a small run is refused, with the parts of an error.
    fn refuses(&self, flags: &str, parts: &[&str]) {
        fails(&self.tiny_output(flags), 2, parts);
    }
}

impl Runs for Path {
    fn command(&self, line: &str) -> Command {
        let mut command = place::zero();
        command.args(words(line)).current_dir(self);
        command
    }

    fn tiny_command(&self, flags: &str) -> Command {
        let model = data("model");
        let tokens = data("tokens.u16.bin");
        let mut command = place::zero();
        command.args(tiny(&model, &tokens, &words(flags)));
        command.current_dir(self);
        command
    }
}

/// Starts a command that prints nothing.
pub(crate) fn started(mut command: Command) -> Child {
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap()
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
    text.shows(parts);
}

pub(crate) fn succeeds(output: &Output) -> String {
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert_eq!(output.status.code(), Some(0), "{err}");
    out.into_owned()
}

/// A folder in memory, where there is one.
pub(crate) fn temp() -> Folder {
    Folder::in_memory()
}

/// A folder on a disk, as `nvme:DIR` is; for direct I/O and syncs, and for large files.
pub(crate) fn on_disk() -> Folder {
    Folder::on_disk()
}

/// The value of a JSON file.
pub(crate) fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// The steps of the checkpoints in `dir`.
pub(crate) fn checkpoints(dir: &Path) -> Vec<u64> {
    let entries = fs::read_dir(dir).into_iter().flatten();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut steps: Vec<u64> = names
        .filter_map(|name| name.strip_prefix("step-")?.parse().ok())
        .collect();
    steps.sort_unstable();
    steps
}

/// The lines of a file, which may not exist.
pub(crate) fn count_lines(path: &Path) -> usize {
    fs::read_to_string(path).map_or(0, |text| text.lines().count())
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

/// Writes a model folder with initial weights.
pub(crate) fn write_model(folder: &Path, config: &ModelConfig) {
    write_weights(folder, config, |name, values| {
        let elems = 0..values.len() as u64;
        config.fill_initial(0, name, elems, values).unwrap();
    });
}

/// Writes a model folder with weights that `fill` sets, by name, and zeros elsewhere.
pub(crate) fn write_weights(folder: &Path, config: &ModelConfig, fill: impl Fn(&str, &mut [f32])) {
    fs::write(folder.join("config.json"), config.to_hf_json("float32")).unwrap();
    let params = config.units().into_iter().flat_map(|unit| unit.params);
    let tensors = params.map(|param| {
        let mut values = vec![0.0f32; param.shape.iter().product::<u64>() as usize];
        fill(&param.name, &mut values);
        let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
        let shape: Vec<usize> = param.shape.iter().map(|n| *n as usize).collect();
        (param.name, shape, bytes)
    });

    let tensors: Vec<_> = tensors.collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap();
        (name, view)
    });
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

/// Whether a process runs; a zombie has ended, but its parent has yet to collect its status.
pub(crate) fn is_running(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

/// Waits for what a run does before it ends. The run decides how long that takes.
pub(crate) fn wait_for(run: &mut Child, mut is_done: impl FnMut() -> bool) {
    while !is_done() {
        assert!(run.try_wait().unwrap().is_none(), "the run ended");
        std::thread::sleep(Duration::from_millis(5));
    }
}

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
