//! `run.json`: everything that decides the numbers of a run. Each checkpoint contains it, and
//! `--resume` takes it up.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use zero_ckpt::Reader;
use zero_data::Place;
use zero_optim::OptimizerConfig;
use zero_trainer::OffloadSettings;
use zero_trainer::param_groups::GroupSettings;

use super::activations::ActivationRecord;
use super::args::{DeviceChoice, Output};
use super::batch::BatchRecord;
use super::communication::CommunicationRecord;
use super::mesh::MeshRecord;
use super::row::Row;
use super::samples::SampleRecord;
use super::saving::SavingRecord;
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
    #[serde(default, skip_serializing_if = "MeshRecord::is_default")]
    pub(crate) mesh: MeshRecord,
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
    /// The absolute path of the metrics file, which is a file of one machine.
    pub(crate) metrics: Option<String>,
    /// The absolute path of the table of steps, on one machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) csv: Option<String>,
    /// The absolute path of the folder of TensorBoard's event files, on one machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tensorboard: Option<String>,
    /// The absolute path of the folder of the report, on one machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) report: Option<String>,
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
    #[serde(default, skip_serializing_if = "Place::is_start")]
    pub(crate) place: Place,
}

/// The training data.
pub(crate) const DATA: &[Row] = &[
    Row::new("data.order", "--data"),
    Row::new("data.tokenizer", "--tokenizer"),
    Row::new("data.tokens", "--data"),
    Row::new("data", "--data"),
    Row::new("data.fingerprint", "--data").not_reported(),
];

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

/// What identifies a run or belongs to one machine.
pub(crate) const IDENTITY: &[Row] = &[
    Row::new("run", "").not_compared().not_reported(),
    Row::new("resumed_runs", "").not_compared().not_reported(),
    Row::new("model.name", "").not_compared().not_reported(),
    Row::new("model.weights", "").not_compared().not_reported(),
    Row::new("data.path", "").not_compared(),
    Row::new("data.default", "").not_compared().not_reported(),
    Row::new("validation.data", "").not_compared(),
    Row::new("device", "").not_compared(),
    Row::new("gpu", "").not_compared(),
    Row::new("checkpoint_dir", "").not_compared().not_reported(),
    Row::new("metrics", "").not_compared().not_reported(),
    Row::new("csv", "").not_compared().not_reported(),
    Row::new("tensorboard", "").not_compared().not_reported(),
    Row::new("report", "").not_compared().not_reported(),
    Row::new("auto", "").not_compared().not_reported(),
];

/// Returns the id of a new run.
pub(crate) fn new_run_id() -> String {
    // The standard library seeds each state from the system's random numbers.
    format!("{:016x}", RandomState::new().hash_one(std::process::id()))
}

impl RunRecord {
    /// The path of an output.
    pub(crate) fn output(&self, output: Output) -> Option<&str> {
        let path = match output {
            Output::Metrics => &self.metrics,
            Output::Csv => &self.csv,
            Output::Tensorboard => &self.tensorboard,
            Output::Report => &self.report,
        };
        path.as_deref()
    }

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
            CliError::Usage(format!("{path}: invalid {RUN_JSON}: {error}"))
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
