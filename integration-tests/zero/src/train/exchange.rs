//! The agreement of ranks in separate processes, which read their settings from their own command
//! lines and files.
//!
//! ```text
//! connect
//! agree_on_start    the program, and whether to resume: they decide which collectives follow
//! resume            rank 0 chooses the checkpoint
//! agree_on_setup    the settings of run.json and the data; or the error of a rank that cannot start
//!                   the weights of a model's folder
//! train
//! ```
//!
//! Paths, the id of the run, its outputs, threads and limits may differ.
//!
//! Why: two ranks with other learning rates, seeds, data or weights train without an error, since
//! collectives compare counts and types only, and at stages 2 and 3 a checkpoint has shards of
//! both. The weights of a model's folder are hashed only where ranks read different files, each
//! rank of a machine a part; machines that share a network folder read it once each.

use std::time::Duration;

use crc_fast::CrcAlgorithm;
use serde_json::Value;
use zero_alloc::Pool;
use zero_alloc::device::Device;
use zero_comm::Communicator;
use zero_optim::{AgreementError, RankSettings, agree};
use zero_shard::Layout;

use crate::settings::args::TrainArgs;
use crate::settings::record::{PROGRAM, RunRecord};
use super::resume;
use super::setup::RunSetup;
use crate::error::CliError;
use crate::workload::Weights;
use zero_models::hf::HfFolder;
use zero_trainer::{Home, RankExchange, Settings};

/// The parts of `run.json` that are not compared: they belong to one machine, identify the run, or
/// follow from others.
const NOT_COMPARED: &[&str] = &[
    "run",
    "resumed_runs",
    "model.name",
    "model.weights",
    "data.path",
    "data.default",
    "validation.data",
    "device",
    "gpu",
    "checkpoint_dir",
    "metrics",
    "report",
    "auto",
];

/// The settings of a run in the order in which they are compared, with their flags. A name covers
/// all below it, unless a longer one is listed too. A setting that others are derived from comes
/// before them.
const ORDER: &[(&str, &str)] = &[
    ("program", ""),
    ("format", ""),
    ("batch.ranks", "--ranks"),
    ("stage", "--stage"),
    ("dtype", "--dtype"),
    ("model", "--model"),
    ("layout", "--model or --ranks"),
    ("seed", "--seed"),
    ("steps", "--steps"),
    ("batch.micro_batch", "--micro-batch"),
    ("batch.grad_accum", "--grad-accum"),
    ("batch.seq_len", "--seq-len"),
    ("batch", ""),
    ("activation_checkpointing", "--activation-checkpointing"),
    ("recompute_gelu", "--recompute-gelu"),
    ("offload.optimizer", "--offload"),
    ("offload.params", "--offload-params"),
    ("offload.activations", "--offload-activations"),
    ("offload.format.remainder", "--masters"),
    ("offload.format.bf16_moments", "--moments"),
    ("offload", ""),
    ("validation.split", "--val-split"),
    ("data.order", "--data"),
    ("data.tokenizer", "--tokenizer"),
    ("data.tokens", "--data"),
    ("data", "--data"),
    ("validation.fingerprint", "--val-data"),
    ("validation.eval_every", "--eval-every"),
    ("validation.eval_tokens", "--eval-tokens"),
    ("validation", "--val-data"),
    ("param_groups", "param_groups of --config, or --no-decay-1d"),
    ("optimizer.lr", "--lr"),
    ("optimizer.hyper.beta1", "--betas"),
    ("optimizer.hyper.beta2", "--betas"),
    ("optimizer.hyper.eps", "--eps"),
    ("optimizer.hyper.weight_decay", "--weight-decay"),
    (
        "optimizer.schedule",
        "--schedule, --warmup-steps, --min-lr or --decay-steps",
    ),
    ("optimizer.max_grad_norm", "--clip"),
    ("optimizer.loss_scaling", "fp16 of --config"),
    ("optimizer", "optimizer of --config"),
    ("communication.sums_locally", "--reduce-every-micro-batch"),
    ("communication.bucket_elems", "--bucket-elems"),
    ("communication.overlap", "--no-overlap"),
    ("communication.cuda_graph", "--cuda-graph"),
    ("communication", "zero_optimization of --config"),
    ("checkpoint", "--checkpoint or --no-checkpoint"),
    ("checkpoint_every", "--checkpoint-every"),
    ("keep_last", "--keep-last"),
    ("check_replicas", "--check-replicas"),
];

/// The settings of a run besides its record.
pub(crate) struct Unrecorded<'a> {
    pub(crate) settings: &'a Settings,
    pub(crate) layout: &'a Layout,
    /// Whether rows are consecutive tokens, as those of a file of tokens.
    pub(crate) in_order: bool,
    /// The checksum of the tokenizer's files, if a tokenizer made the tokens.
    pub(crate) tokenizer: Option<u64>,
    /// Whether a folder has the initial weights.
    pub(crate) loads_weights: bool,
    /// The setting for GPUs, if it is one; by default the memory of each decides.
    pub(crate) recompute_gelu: Option<bool>,
    /// Whether the run saves checkpoints.
    pub(crate) saves: bool,
}

/// The settings that must be equal on all ranks.
pub(crate) fn settings(record: &RunRecord, unrecorded: &Unrecorded<'_>) -> RankSettings {
    let Unrecorded {
        settings, layout, ..
    } = unrecorded;
    let mut document = record.document();
    let checksum = |sum: u64| Value::String(format!("{sum:016x}"));
    document["data"]["order"] = Value::from(if unrecorded.in_order {
        "consecutive"
    } else {
        "random"
    });
    document["data"]["tokenizer"] = unrecorded.tokenizer.map_or(Value::Null, checksum);
    document["model"]["source"] = Value::from(if unrecorded.loads_weights {
        "a folder"
    } else {
        "initial weights"
    });
    let units = format!("{:?}", layout.units());
    document["layout"] = checksum(crc_fast::checksum(
        CrcAlgorithm::Crc64Nvme,
        units.as_bytes(),
    ));
    document["checkpoint"] = Value::Bool(unrecorded.saves);

    // The settings that act, in place of those that were requested.
    document["recompute_gelu"] = unrecorded.recompute_gelu.map_or(Value::Null, Value::Bool);
    document["communication"]["reduce_every_micro_batch"] = Value::Null;
    document["communication"]["sums_locally"] = Value::Bool(settings.sums_locally());
    if settings.stage.shards_params() {
        document["check_replicas"] = Value::Null;
    }
    // The record leaves out the default. Folders are those of one machine.
    document["offload"] = serde_json::to_value(&record.offload).unwrap_or_default();
    document["offload"]["optimizer"] = Value::from(tier(&record.offload.optimizer));
    document["offload"]["params"] = Value::from(tier(&record.offload.params));

    let mut leaves = Vec::new();
    flatten("", &document, &mut leaves);
    leaves.sort_by_key(|(name, _)| place(name));
    leaves
        .into_iter()
        .map(|(name, value)| (label(&name), value))
        .collect()
}

/// A place of offloaded state, without its folder.
fn tier(home: &Home) -> &'static str {
    match home {
        Home::Device => "none",
        Home::Host => "cpu",
        Home::Nvme(_) => "nvme",
    }
}

/// Appends the numbers, strings, flags and lists below `path` that are compared. What is not set
/// has no entry.
fn flatten(path: &str, value: &Value, leaves: &mut Vec<(String, String)>) {
    if NOT_COMPARED.contains(&path) {
        return;
    }
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                let below = if path.is_empty() {
                    key.clone()
                } else {
                    format!("{path}.{key}")
                };
                flatten(&below, value, leaves);
            }
        }
        Value::Null => {}
        Value::String(text) => leaves.push((path.to_owned(), text.clone())),
        other => leaves.push((path.to_owned(), other.to_string())),
    }
}

/// The position in [`ORDER`] of the longest name that covers `name`; the end if no name does.
fn place(name: &str) -> usize {
    let covers = |listed: &str| {
        name.strip_prefix(listed)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    let listed = ORDER
        .iter()
        .enumerate()
        .filter(|(_, (listed, _))| covers(listed));
    listed
        .max_by_key(|(_, (listed, _))| listed.len())
        .map_or(ORDER.len(), |(place, _)| place)
}

/// The flag of a setting and its name in `run.json`.
fn label(name: &str) -> String {
    match ORDER.get(place(name)) {
        Some((_, flag)) if !flag.is_empty() => format!("{flag} ({name})"),
        _ => name.to_owned(),
    }
}

/// The messages between ranks before a run.
pub(crate) struct StartExchange<'a, D: Device> {
    comm: &'a dyn Communicator<D>,
    pool: Pool<D>,
    stream: D::Stream,
    limit: Duration,
}

impl<'a, D: Device> StartExchange<'a, D> {
    /// Each collective of `comm` has a limit of `time_limit_s` seconds.
    pub(crate) fn new(
        comm: &'a dyn Communicator<D>,
        device: D,
        time_limit_s: u64,
    ) -> Result<Self, CliError> {
        let stream = device.create_stream("start").map_err(CliError::failure)?;
        // Longer than that of a collective, whose error names the missing rank.
        let limit = Duration::from_secs(time_limit_s).saturating_mul(2);
        Ok(Self {
            comm,
            pool: Pool::new(device, usize::MAX),
            stream,
            limit,
        })
    }

    /// This rank.
    pub(crate) fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// The exchange of the opening of a checkpoint.
    pub(crate) fn messages(&self) -> RankExchange<'_, D> {
        RankExchange::new(self.comm, &self.pool, &self.stream, self.limit)
    }

    /// Checks that all ranks run this program, and that all resume or none does. `own` is the error
    /// of a rank that cannot start.
    pub(crate) fn agree_on_start(
        &self,
        args: &TrainArgs,
        own: Result<(), CliError>,
    ) -> Result<(), CliError> {
        let mut settings = RankSettings::new();
        settings.push("program", PROGRAM);
        settings.push(
            "--resume",
            if args.resume.is_some() {
                "given"
            } else {
                "not given"
            },
        );
        settings.push("--resume-exact", args.resume_exact);
        settings.push("a checkpoint chosen by a launcher", resume::is_selected());
        self.agree(own, |()| settings)
    }

    /// Passes the failure of a rank to all ranks.
    pub(crate) fn agree_on_success<T>(&self, own: Result<T, CliError>) -> Result<T, CliError> {
        self.agree(own, |_| RankSettings::new())
    }

    /// Checks that the settings, the data and the weights of all ranks are equal.
    pub(crate) fn agree_on_setup(
        &self,
        setup: Result<RunSetup, CliError>,
    ) -> Result<RunSetup, CliError> {
        let setup = self.agree(setup, |setup| setup.agreed.clone())?;
        if let (Weights::Folder(folder), None) = (&setup.workload.weights, &setup.options.resume) {
            self.agree_on_weights(folder)?;
        }
        Ok(setup)
    }

    /// Compares the weights of the ranks' folders. Ranks that read the same files share the work.
    fn agree_on_weights(&self, folder: &HfFolder) -> Result<(), CliError> {
        let identities = self.exchange_u64(folder.identity())?;
        let same = |rank: &usize| identities[*rank] == identities[self.rank()];
        let sharers: Vec<usize> = (0..identities.len()).filter(same).collect();
        if sharers.len() == identities.len() {
            return Ok(());
        }
        let part = sharers
            .iter()
            .position(|rank| *rank == self.rank())
            .unwrap_or(0);
        let own = folder.checksum(part, sharers.len());

        let parts = self.exchange_u64(*own.as_ref().unwrap_or(&0))?;
        let checksum = sharers
            .iter()
            .fold(0_u64, |sum, rank| sum.wrapping_add(parts[*rank]));
        self.agree(own.map(drop).map_err(CliError::usage), |()| {
            [(
                "--model (checksum of the weights)",
                format!("{checksum:016x}"),
            )]
            .into_iter()
            .collect()
        })
    }

    /// The number that each rank sends.
    fn exchange_u64(&self, own: u64) -> Result<Vec<u64>, CliError> {
        let messages = self
            .messages()
            .exchange(&own.to_le_bytes())
            .map_err(CliError::failure)?;
        let number =
            |message: &Vec<u8>| Some(u64::from_le_bytes(message.as_slice().try_into().ok()?));
        let numbers: Option<Vec<u64>> = messages.iter().map(number).collect();
        numbers.ok_or_else(|| {
            CliError::Failure(
                "a rank sent a message of another kind while the run started".to_owned(),
            )
        })
    }

    /// Returns `own` if all ranks succeeded with equal settings; otherwise the error of the lowest
    /// rank that failed, or the first setting that differs.
    fn agree<T>(
        &self,
        own: Result<T, CliError>,
        settings: impl FnOnce(&T) -> RankSettings,
    ) -> Result<T, CliError> {
        if self.comm.world_size() == 1 {
            return own;
        }
        let messages = self.messages();
        let exchange = |message: &[u8]| messages.exchange(message);
        let agreed = match &own {
            Ok(own) => agree(self.rank(), Ok(&settings(own)), exchange),
            Err(error) => agree(self.rank(), Err(error), exchange),
        };
        match (agreed, own) {
            (Ok(()), own) => own,
            (Err(AgreementError::Failed { rank, .. }), Err(own)) if rank == self.rank() => Err(own),
            // All ranks print it: a launcher may end the others as soon as one has ended.
            (Err(error @ (AgreementError::Failed { .. } | AgreementError::Differs { .. })), _) => {
                Err(CliError::usage(error))
            }
            (Err(error), _) => Err(CliError::failure(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longest_name_decides_the_place() {
        assert_eq!(label("optimizer.lr"), "--lr (optimizer.lr)");
        assert_eq!(
            label("optimizer.hyper.decoupled"),
            "optimizer of --config (optimizer.hyper.decoupled)"
        );
        assert_eq!(label("data.fingerprint"), "--data (data.fingerprint)");
        assert_eq!(
            label("checkpoint"),
            "--checkpoint or --no-checkpoint (checkpoint)"
        );
        assert_eq!(
            label("a setting of a later version"),
            "a setting of a later version"
        );
        // A setting precedes those that are derived from it.
        assert!(place("model.config.n_embd") < place("layout"));
        assert!(place("batch.micro_batch") < place("batch.step_tokens"));
        assert!(
            place("validation.split") < place("data.tokens")
                && place("data.tokens") < place("data.fingerprint")
        );
        assert!(place("checkpoint_every") > place("checkpoint"));
    }
}
