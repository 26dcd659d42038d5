//! `run.json`: everything that decides the numbers of a run. Each checkpoint contains it, and
//! `--resume` takes it up.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use zero_ckpt::Reader;
use zero_comm::PrefetchOptions;
use zero_data::DataPosition;
use zero_optim::OptimizerConfig;
use zero_trainer::param_groups::GroupSettings;
use zero_trainer::{OffloadSettings, ReplicaChecks, Settings};

use super::args::{DeviceChoice, MeshArgs, TrainArgs};
use super::muon::MuonArgs;
use super::outputs::OutputPaths;
use super::quantise::QuantiseArgs;
use super::samples::SampleRecord;
use super::validation::ValidationRecord;
use crate::error::CliError;
use crate::flags::DTypeFlag;

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
    #[serde(flatten)]
    pub(crate) activations: ActivationRecord,
    pub(crate) communication: CommunicationRecord,
    /// Groups of ranks.
    #[serde(default, skip_serializing_if = "MeshArgs::is_default")]
    pub(crate) mesh: MeshArgs,
    /// Muon.
    #[serde(default, skip_serializing_if = "MuonArgs::is_default")]
    pub(crate) muon: MuonArgs,
    /// Quantised communication.
    #[serde(default, skip_serializing_if = "QuantiseArgs::is_default")]
    pub(crate) quantise: QuantiseArgs,
    /// The offload. Only 16-bit moments change the numbers.
    #[serde(default, skip_serializing_if = "OffloadSettings::is_default")]
    pub(crate) offload: OffloadSettings,
    /// The device that was requested.
    pub(crate) device: DeviceChoice,
    /// The name of the GPU; `None` on the host.
    pub(crate) gpu: Option<String>,
    #[serde(flatten)]
    pub(crate) saving: SavingRecord,
    /// The absolute path of the folder of checkpoints, on one machine: a copy of the folder is not
    /// that folder. `None`: none is saved, or an older version wrote the record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) checkpoint_dir: Option<String>,
    #[serde(flatten)]
    pub(crate) outputs: OutputPaths,
    /// Evaluations on other data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) validation: Option<ValidationRecord>,
    /// Continuations of a text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) samples: Option<SampleRecord>,
    /// The settings that the configuration file gave as `"auto"`, and their values.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) auto: BTreeMap<String, Value>,
}

/// The settings of a run with what its times also depend on, as the first line of `--metrics` has
/// them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct TimedRecord {
    #[serde(flatten)]
    pub(crate) record: RunRecord,
    /// Threads of each rank on the host.
    pub(crate) threads: usize,
    /// Consecutive ranks of a machine; `None`: not known.
    pub(crate) node_ranks: Option<usize>,
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
    /// The checksum of the frozen weights of a folder, in hexadecimal, if adapters are trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) base_checksum: Option<String>,
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
    /// The epochs that decide the last step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) epochs: Option<f64>,
    /// Rows by epochs; `None` for a stream of tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rows: Option<RowsRecord>,
    /// Where steps of the run's size begin in the data.
    #[serde(default, skip_serializing_if = "DataPosition::is_start")]
    pub(crate) place: DataPosition,
}

/// Rows by epochs, as `run.json` stores them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RowsRecord {
    /// Whether several examples share a row.
    pub(super) packed: bool,
    /// Rows of an epoch.
    pub(crate) count: u64,
    /// Trained tokens of an epoch.
    pub(super) trained: u64,
    /// The token that ends examples.
    pub(super) end_token: Option<u32>,
    /// The absolute path of the folder with the chat template.
    pub(super) folder: Option<String>,
    /// The time for chat templates with a date, in seconds.
    pub(super) now: i64,
}

/// The batch of a run in `run.json`.
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

impl BatchRecord {
    /// Sequences of all ranks in a step.
    pub(crate) fn rows_of_step(&self) -> u64 {
        self.step_tokens / (self.seq_len as u64).max(1)
    }
}

/// The activations that a run recomputes in backward, in `run.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ActivationRecord {
    pub(crate) activation_checkpointing: bool,
    /// Whether a GPU recomputes GELU's output in backward, which changes low bits in 16-bit types.
    #[serde(default)]
    pub(crate) recompute_gelu: bool,
    /// Whether the ranks of tensor parallelism divide the inputs of blocks.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) partition_activations: bool,
    /// Whether the ranks of tensor parallelism divide the tokens between their products.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) sequence_parallel: bool,
}

/// The settings of communication in `run.json`. A limit that is `None` does not apply.
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

    /// Sets what was recorded.
    pub(crate) fn apply(&self, settings: &mut Settings) {
        settings.reduce_every_micro_batch = self.reduce_every_micro_batch;
        settings.bucket_capacity_elems = self.bucket_elems;
        settings.overlap = self.overlap;
        settings.prefetch = self.prefetch();
        if !self.overlap {
            settings.prefetch.ahead = 0;
        }
        settings.optimizer.sub_group_elems = self.sub_group_elems.unwrap_or(usize::MAX);
    }

    pub(crate) fn prefetch(&self) -> PrefetchOptions {
        let limit = |n: Option<usize>| n.unwrap_or(usize::MAX);
        // Without overlap it was 0; a flag may enable overlap again.
        let ahead = if self.overlap {
            limit(self.gather_ahead)
        } else {
            1
        };
        PrefetchOptions::default()
            .ahead(ahead)
            .ahead_elems(limit(self.gather_ahead_elems))
            .max_live_elems(limit(self.max_live_elems))
            .persistence_threshold_elems(self.persistence_threshold_elems)
    }
}

/// The settings of checkpoints in `run.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavingRecord {
    /// Interval of checkpoints in steps; 0 saves only at the end.
    pub(crate) checkpoint_every: u64,
    pub(crate) keep_last: Option<usize>,
    /// The flag `--check-replicas`: the interval in steps, or 0 for no comparison; by default
    /// before each checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) check_replicas: Option<u64>,
}

impl SavingRecord {
    pub(crate) fn of(settings: &TrainArgs) -> Self {
        Self {
            checkpoint_every: settings.checkpoint_every.unwrap_or(0),
            keep_last: settings.keep_last,
            check_replicas: settings.check_replicas,
        }
    }

    pub(crate) fn replica_checks(&self) -> ReplicaChecks {
        match self.check_replicas {
            None => ReplicaChecks::AtSaves,
            Some(0) => ReplicaChecks::Never,
            Some(steps) => ReplicaChecks::Every(steps),
        }
    }
}

/// Returns the id of a new run.
pub(crate) fn new_run_id() -> String {
    // The standard library seeds each state from the system's random numbers.
    format!("{:016x}", RandomState::new().hash_one(std::process::id()))
}

impl RunRecord {
    /// The ids of this run and of those that it resumed.
    pub(crate) fn runs(&self) -> Vec<&str> {
        std::iter::once(&self.run)
            .chain(&self.resumed_runs)
            .map(String::as_str)
            .collect()
    }

    /// The settings in a checkpoint; `None` if an older version saved it.
    ///
    /// # Errors
    /// They cannot be read.
    pub(crate) fn of(checkpoint: &Reader) -> Result<Option<Self>, CliError> {
        let document = checkpoint.document(RUN_JSON).map_err(CliError::usage)?;
        document.map(Self::parse).transpose().map_err(|error| {
            let path = checkpoint.path().display();
            usage!("{path}: invalid {RUN_JSON}: {error}")
        })
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
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

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
    fn another_format_is_refused() {
        let error = RunRecord::parse(json!({"format": 2})).unwrap_err();
        assert_eq!(
            error,
            "format 2 is not supported; this program reads format 1"
        );
        assert!(RunRecord::parse(json!({})).unwrap_err().contains("format"));
    }
}
