//! `run.json`: everything that decides the numbers of a run. Each checkpoint contains it, and
//! `--resume` takes it up.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::OpenOptions;
use std::hash::{BuildHasher, RandomState};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use zero_comm::PrefetchOptions;
use zero_optim::OptimizerConfig;

use super::args::DeviceChoice;
use super::opening::loss_scale;
use super::validation::ValidationRecord;
use crate::flags::DTypeFlag;
use zero_trainer::param_groups::GroupSettings;
use zero_trainer::{OffloadSettings, Settings};

/// The name of the document.
pub(crate) const RUN_JSON: &str = "run.json";
/// The version of the format; other versions are refused.
pub(crate) const FORMAT: u32 = 1;
/// The program that writes the record.
pub(crate) const PROGRAM: &str = concat!("zero ", env!("CARGO_PKG_VERSION"));

/// The settings of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RunRecord {
    /// The version of this format.
    pub(crate) format: u32,
    /// The id of the run: 16 lower-case hexadecimal digits.
    pub(crate) run: String,
    /// The ids of the runs that this one resumed, oldest first.
    pub(crate) resumed_runs: Vec<String>,
    /// Name and version of the program.
    pub(crate) program: String,
    pub(crate) model: ModelRecord,
    pub(crate) data: DataRecord,
    /// Hyperparameters, learning rate, schedule, clipping and loss scaling.
    pub(crate) optimizer: OptimizerConfig,
    /// Rules of tensors that differ from the optimizer's.
    #[serde(default, skip_serializing_if = "GroupSettings::is_default")]
    pub(crate) param_groups: GroupSettings,
    pub(crate) dtype: DTypeFlag,
    pub(crate) batch: BatchRecord,
    /// The seed of the initial weights and of the order of text data.
    pub(crate) seed: u64,
    /// The last step.
    pub(crate) steps: u64,
    /// The ZeRO stage.
    pub(crate) stage: u64,
    pub(crate) activation_checkpointing: bool,
    /// Whether a GPU recomputes GELU's output in backward, which changes low bits in 16-bit types.
    #[serde(default)]
    pub(crate) recompute_gelu: bool,
    pub(crate) communication: CommunicationRecord,
    /// The offload. Only 16-bit moments change the numbers.
    #[serde(default, skip_serializing_if = "OffloadSettings::is_default")]
    pub(crate) offload: OffloadSettings,
    /// The device that was requested.
    pub(crate) device: DeviceChoice,
    /// The name of the GPU; `None` on the host.
    pub(crate) gpu: Option<String>,
    /// Interval of checkpoints in steps; 0 saves only at the end.
    pub(crate) checkpoint_every: u64,
    pub(crate) keep_last: Option<usize>,
    /// The flag `--check-replicas`: the interval in steps, or 0 for no comparison; by default
    /// before each checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) check_replicas: Option<u64>,
    /// The absolute path of the folder of checkpoints, on one machine: a copy of the folder is not
    /// that folder. `None`: none is saved, or an older version wrote the record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) checkpoint_dir: Option<String>,
    /// The absolute path of the metrics file, which is a file of one machine.
    pub(crate) metrics: Option<String>,
    /// The absolute path of the folder of the report, on one machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) report: Option<String>,
    /// Evaluations on other data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) validation: Option<ValidationRecord>,
    /// The settings that the configuration file gave as `"auto"`, and their values.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) auto: BTreeMap<String, Value>,
}

/// The model of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ModelRecord {
    /// The preset, or the absolute path of the Hugging Face folder.
    pub(crate) name: String,
    /// The model's `config.json`.
    pub(crate) config: Value,
    /// The number of parameters.
    pub(crate) parameters: u64,
    /// The source of the weights of step 0.
    pub(crate) weights: String,
}

/// The training data of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct DataRecord {
    /// The absolute path of the file or folder.
    pub(crate) path: String,
    /// Whether the folder was the default: the texts in the current folder.
    pub(crate) default: bool,
    /// The absolute path of the tokenizer of text; `None` for bytes and for token files.
    pub(crate) tokenizer: Option<String>,
    /// The CRC-64 of all tokens, in hexadecimal.
    pub(crate) fingerprint: String,
    pub(crate) tokens: u64,
}

/// The batch of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BatchRecord {
    pub(crate) ranks: usize,
    /// Sequences per micro-batch and rank.
    pub(crate) micro_batch: u64,
    /// Micro-batches per step.
    pub(crate) grad_accum: u64,
    /// Tokens per sequence.
    pub(crate) seq_len: usize,
    /// Tokens of all ranks in a step.
    pub(crate) step_tokens: u64,
}

/// How a run communicates, and its sizes of launches. All but `reduce_every_micro_batch` change
/// time and memory, not the numbers. A limit that is `None` does not apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CommunicationRecord {
    /// Whether stages 0 and 1 reduced gradients after every micro-batch, as all runs without this
    /// field did.
    #[serde(default = "always")]
    pub(crate) reduce_every_micro_batch: bool,
    /// Elements of a gradient bucket.
    pub(crate) bucket_elems: usize,
    /// Whether communication overlaps with compute.
    pub(crate) overlap: bool,
    /// Stage 3: how many uses ahead units are gathered.
    pub(crate) gather_ahead: Option<usize>,
    pub(crate) gather_ahead_elems: Option<usize>,
    pub(crate) max_live_elems: Option<usize>,
    pub(crate) persistence_threshold_elems: usize,
    /// Elements of one launch of the optimizer.
    #[serde(default)]
    pub(crate) sub_group_elems: Option<usize>,
    /// Whether steps are recorded into CUDA graphs.
    #[serde(default)]
    pub(crate) cuda_graph: bool,
}

fn always() -> bool {
    true
}

impl CommunicationRecord {
    pub(crate) fn of(settings: &Settings) -> Self {
        let limit = |n: usize| (n != usize::MAX).then_some(n);
        let prefetch = &settings.prefetch;
        Self {
            reduce_every_micro_batch: settings.reduce_every_micro_batch,
            bucket_elems: settings.bucket_capacity_elems,
            overlap: settings.overlap,
            gather_ahead: limit(prefetch.ahead),
            gather_ahead_elems: limit(prefetch.ahead_elems),
            max_live_elems: limit(prefetch.max_live_elems),
            persistence_threshold_elems: prefetch.persistence_threshold_elems,
            sub_group_elems: limit(settings.optimizer.sub_group_elems),
            cuda_graph: settings.graphs,
        }
    }

    pub(crate) fn prefetch(&self) -> PrefetchOptions {
        let limit = |n: Option<usize>| n.unwrap_or(usize::MAX);
        PrefetchOptions::default()
            // Without overlap it was 0; a flag may enable overlap again.
            .ahead(if self.overlap {
                limit(self.gather_ahead)
            } else {
                1
            })
            .ahead_elems(limit(self.gather_ahead_elems))
            .max_live_elems(limit(self.max_live_elems))
            .persistence_threshold_elems(self.persistence_threshold_elems)
    }
}

/// Returns the id of a new run.
pub(crate) fn new_run_id() -> String {
    // The standard library seeds each state from the system's random numbers.
    format!("{:016x}", RandomState::new().hash_one(std::process::id()))
}

/// Maximum length of a file that [`read_small`] reads.
const SMALL_FILE_BYTES: u64 = 4 << 20;

/// Reads a small file whose content nobody has verified; `None` if it is missing, long or no
/// regular file. Never waits for the writer of a pipe.
pub(crate) fn read_small(path: &Path) -> Option<Vec<u8>> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .ok()?;
    let metadata = file.metadata().ok()?;
    if !metadata.is_file() || metadata.len() > SMALL_FILE_BYTES {
        return None;
    }
    let mut bytes = Vec::new();
    let read = file
        .take(SMALL_FILE_BYTES + 1)
        .read_to_end(&mut bytes)
        .ok()?;
    (read as u64 <= SMALL_FILE_BYTES).then_some(bytes)
}

impl RunRecord {
    /// The ids of this run and of those that it resumed.
    pub(crate) fn runs(&self) -> Vec<&str> {
        std::iter::once(&self.run)
            .chain(&self.resumed_runs)
            .map(String::as_str)
            .collect()
    }

    /// Parses the document of a checkpoint.
    pub(crate) fn parse(document: Value) -> Result<Self, String> {
        match document["format"].as_u64() {
            Some(format) if format != u64::from(FORMAT) => Err(format!(
                "format {format} is not supported; this program reads format {FORMAT}"
            )),
            _ => serde_json::from_value(document).map_err(|e| e.to_string()),
        }
    }

    /// The document for a checkpoint.
    pub(crate) fn document(&self) -> Value {
        // Numbers, strings and flags: serializing does not fail.
        serde_json::to_value(self).unwrap_or_default()
    }

    /// The settings that differ in `now`, each as `name old -> new`.
    pub(crate) fn differences(&self, now: &Self) -> Vec<String> {
        // Model and data are checked separately, and the others identify the run.
        const NO_SETTINGS: [&str; 10] = [
            "format",
            "run",
            "resumed_runs",
            "model",
            "data.fingerprint",
            "data.default",
            "checkpoint_dir",
            "metrics",
            "report",
            "auto",
        ];
        let mut out = Vec::new();
        let (mut was, mut is) = (self.document(), now.document());
        // One line each, in the words of the block of settings.
        let texts = |record: &Self| {
            let optimizer = &record.optimizer;
            [
                ("schedule", optimizer.schedule.to_string()),
                ("loss_scaling", loss_scale(&optimizer.loss_scaling)),
            ]
        };
        for ((key, old), (_, new)) in texts(self)
            .into_iter()
            .zip(texts(now))
            .filter(|(old, new)| old != new)
        {
            (was["optimizer"][key], is["optimizer"][key]) =
                (Value::String(old), Value::String(new));
        }
        if self.param_groups != now.param_groups {
            let text = |record: &Self| Value::String(record.param_groups.to_string());
            (was["param_groups"], is["param_groups"]) = (text(self), text(now));
        }
        // The default is not written.
        for (document, offload) in [(&mut was, &self.offload), (&mut is, &now.offload)] {
            document["offload"] = serde_json::to_value(offload).unwrap_or_default();
        }
        compare("", &was, &is, &NO_SETTINGS, &mut out);
        out
    }
}

/// The keys of either object.
fn keys(a: &Value, b: &Value) -> BTreeSet<String> {
    [a, b]
        .into_iter()
        .filter_map(Value::as_object)
        .flat_map(|object| object.keys().cloned())
        .collect()
}

/// Appends the differing numbers, strings and flags below `path`, except those of `skipped`, as
/// `name old -> new`.
pub(crate) fn compare(
    path: &str,
    was: &Value,
    now: &Value,
    skipped: &[&str],
    out: &mut Vec<String>,
) {
    if skipped.contains(&path) {
        return;
    }
    if was.is_object() || now.is_object() {
        let parent = if path.is_empty() {
            String::new()
        } else {
            format!("{path}.")
        };
        for key in keys(was, now) {
            compare(
                &format!("{parent}{key}"),
                &was[&key],
                &now[&key],
                skipped,
                out,
            );
        }
    } else if was != now {
        let text = |value: &Value| match value {
            Value::Null => "none".to_owned(),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        out.push(format!("{path} {} -> {}", text(was), text(now)));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn run_ids_are_distinct_hex_digits() {
        let ids: BTreeSet<String> = (0..100).map(|_| new_run_id()).collect();
        assert_eq!(ids.len(), 100);
        assert!(
            ids.iter()
                .all(|id| id.len() == 16
                    && id.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')))
        );
    }

    #[test]
    fn differences_name_each_setting() {
        let differences = |was: Value, now: Value| {
            let mut out = Vec::new();
            compare("", &was, &now, &["e"], &mut out);
            out
        };
        assert!(differences(json!({"a": {"b": 1e-3}}), json!({"a": {"b": 0.001}})).is_empty());
        assert_eq!(
            differences(
                json!({"a": {"b": 1}, "c": "d", "e": {"f": 1}}),
                json!({"a": {"b": 2}, "c": "e"})
            ),
            ["a.b 1 -> 2", "c d -> e"]
        );
        let constant = json!({"type": "Constant"});
        let warmup = json!({"type": "LinearWarmup", "params": {"warmup_steps": 10}});
        assert_eq!(
            differences(constant, warmup),
            [
                "params.warmup_steps none -> 10",
                "type Constant -> LinearWarmup"
            ]
        );
    }

    /// A pipe has no writer, so opening it would wait without end.
    #[test]
    fn only_small_regular_files_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("file"), "text").unwrap();
        assert_eq!(read_small(&path("file")).unwrap(), b"text");
        assert!(
            std::process::Command::new("mkfifo")
                .arg(path("pipe"))
                .status()
                .unwrap()
                .success()
        );
        std::fs::File::create(path("long"))
            .unwrap()
            .set_len(SMALL_FILE_BYTES + 1)
            .unwrap();
        for name in ["missing", "pipe", "long", ".", "/dev/zero"] {
            assert!(read_small(&path(name)).is_none(), "{name}");
        }
    }

    #[test]
    fn another_format_is_refused() {
        let error = RunRecord::parse(json!({"format": 2})).unwrap_err();
        assert_eq!(
            error,
            "format 2 is not supported; this program reads format 1"
        );
        assert!(RunRecord::parse(json!({})).unwrap_err().contains("format"));
    }
}
