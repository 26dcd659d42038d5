//! The agreement of ranks in separate processes, which read their settings from their own command lines and files.
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

use std::path::Path;
use std::time::Duration;

use crc_fast::{CrcAlgorithm, Digest};
use serde_json::Value;
use zero_alloc::Pool;
use zero_alloc::device::Device;
use zero_comm::Communicator;
use zero_optim::{AgreementError, RankSettings, agree};
use zero_shard::Layout;

use super::args::TrainArgs;
use super::record::{PROGRAM, RunRecord};
use super::run_setup::RunSetup;
use crate::cli::CliError;
use crate::hf::HfFolder;
use crate::trainer::RankExchange;
use crate::workload::Weights;

/// The parts of `run.json` that may differ between ranks: files of one machine, and what other settings decide.
const OF_ONE_RANK: [&str; 12] = [
    "run",
    "resumed_runs",
    "model.name",
    "model.weights",
    "data.path",
    "data.default",
    "validation.data",
    "device",
    "gpu",
    "metrics",
    "report",
    "auto",
];

/// The settings of a run in the order in which they are compared, with their flags. A name stands for all below it, unless a
/// longer one is listed too. A setting that others are derived from comes before them.
const ORDER: [(&str, &str); 47] = [
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
    ("optimizer.schedule", "--schedule, --warmup-steps, --min-lr or --decay-steps"),
    ("optimizer.max_grad_norm", "--clip"),
    ("optimizer", ""),
    ("communication.reduce_every_micro_batch", "--reduce-every-micro-batch"),
    ("communication.bucket_elems", "--bucket-elems"),
    ("communication.overlap", "--no-overlap"),
    ("communication", ""),
    ("checkpoint", "--checkpoint or --no-checkpoint"),
    ("checkpoint_every", "--checkpoint-every"),
    ("keep_last", "--keep-last"),
    ("check_replicas", "--check-replicas"),
];

/// What decides the numbers and the collectives of a run besides its record.
pub(super) struct Unrecorded {
    /// Whether rows are consecutive tokens, as those of a file of tokens.
    pub(super) in_order: bool,
    /// The checksum of the tokenizer's files, if a tokenizer made the tokens.
    pub(super) tokenizer: Option<u64>,
    /// The checksum of the sharding of all units.
    pub(super) layout: u64,
    /// Whether the weights are those of a folder.
    pub(super) loads_weights: bool,
    /// The flag `--recompute-gelu`; by default the memory of each GPU decides.
    pub(super) recompute_gelu: Option<bool>,
    /// Whether the run saves checkpoints.
    pub(super) saves: bool,
}

/// The settings that must be equal on all ranks.
pub(super) fn settings(record: &RunRecord, unrecorded: &Unrecorded) -> RankSettings {
    let mut document = record.document();
    let checksum = |sum: u64| Value::String(format!("{sum:016x}"));
    document["data"]["order"] = Value::from(if unrecorded.in_order { "consecutive" } else { "random" });
    document["data"]["tokenizer"] = unrecorded.tokenizer.map_or(Value::Null, checksum);
    document["model"]["source"] = Value::from(if unrecorded.loads_weights { "a folder" } else { "initial weights" });
    document["layout"] = checksum(unrecorded.layout);
    document["recompute_gelu"] = unrecorded.recompute_gelu.map_or(Value::Null, Value::Bool);
    document["checkpoint"] = Value::Bool(unrecorded.saves);
    let homes = [("optimizer", &record.offload.optimizer), ("params", &record.offload.params)];
    for (name, home) in homes {
        // Without the folder, which is one of the machine.
        let home = home.to_string();
        document["offload"][name] = Value::from(home.split(':').next());
    }

    let mut leaves = Vec::new();
    flatten("", &document, &mut leaves);
    leaves.sort_by_key(|(name, _)| place(name));
    leaves.into_iter().map(|(name, value)| (label(&name), value)).collect()
}

/// Appends the numbers, strings, flags and lists below `path`, without those of one rank.
fn flatten(path: &str, value: &Value, leaves: &mut Vec<(String, String)>) {
    if OF_ONE_RANK.contains(&path) {
        return;
    }
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                let below = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                flatten(&below, value, leaves);
            }
        }
        Value::Null => leaves.push((path.to_owned(), "not set".to_owned())),
        Value::String(text) => leaves.push((path.to_owned(), text.clone())),
        other => leaves.push((path.to_owned(), other.to_string())),
    }
}

/// The position in [`ORDER`] of the longest name that stands for `name`; behind all if there is none.
fn place(name: &str) -> usize {
    let covers =
        |listed: &str| name.strip_prefix(listed).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    let listed = ORDER.iter().enumerate().filter(|(_, (listed, _))| covers(listed));
    listed.max_by_key(|(_, (listed, _))| listed.len()).map_or(ORDER.len(), |(place, _)| place)
}

/// The flag of a setting and its name in `run.json`.
fn label(name: &str) -> String {
    match ORDER.get(place(name)) {
        Some((_, flag)) if !flag.is_empty() => format!("{flag} ({name})"),
        _ => name.to_owned(),
    }
}

/// The messages between ranks before a run.
pub(super) struct StartExchange<'a, D: Device> {
    comm: &'a dyn Communicator<D>,
    pool: Pool<D>,
    stream: D::Stream,
    limit: Duration,
}

impl<'a, D: Device> StartExchange<'a, D> {
    /// Each collective of `comm` has a limit of `time_limit_s` seconds.
    pub(super) fn new(comm: &'a dyn Communicator<D>, device: D, time_limit_s: u64) -> Result<Self, CliError> {
        let stream = device.create_stream("start").map_err(CliError::failure)?;
        // Longer than that of a collective, whose error names the missing rank.
        let limit = Duration::from_secs(time_limit_s).saturating_mul(2);
        Ok(Self { comm, pool: Pool::new(device, usize::MAX), stream, limit })
    }

    /// This rank.
    pub(super) fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// The exchange of the opening of a checkpoint.
    pub(super) fn messages(&self) -> RankExchange<'_, D> {
        RankExchange::new(self.comm, &self.pool, &self.stream, self.limit)
    }

    /// Ends the other ranks.
    pub(super) fn abort(&self, reason: &str) {
        self.comm.abort(reason);
    }

    /// Checks that all ranks run this program, and that all resume or none does. `own` is the error of a rank that cannot
    /// start.
    pub(super) fn agree_on_start(&self, args: &TrainArgs, own: Result<(), CliError>) -> Result<(), CliError> {
        let mut settings = RankSettings::new();
        settings.push("program", PROGRAM);
        settings.push("--resume", if args.resume.is_some() { "given" } else { "not given" });
        settings.push("--resume-exact", args.resume_exact);
        self.agree(own.map(|()| settings)).map(drop)
    }

    /// Checks that the settings, the data and the weights of all ranks are equal.
    pub(super) fn agree_on_setup(&self, setup: Result<RunSetup, CliError>) -> Result<RunSetup, CliError> {
        let (setup, agreed) = match setup {
            Ok(setup) => (Ok(()), Some(setup)),
            Err(error) => (Err(error), None),
        };
        let settings = agreed.as_ref().map(|setup| setup.agreed.clone()).unwrap_or_default();
        self.agree(setup.map(|()| settings))?;
        // A rank without a setup has failed above.
        let setup = agreed.ok_or_else(|| CliError::Failure("internal error: a setup is missing".to_owned()))?;
        if let Weights::Folder(folder) = &setup.workload.weights {
            self.agree_on_weights(folder)?;
        }
        Ok(setup)
    }

    /// Compares the weights of the ranks' folders. Ranks that read the same files share the work.
    fn agree_on_weights(&self, folder: &HfFolder) -> Result<(), CliError> {
        let identities = self.words(folder.identity())?;
        let same = |rank: &usize| identities[*rank] == identities[self.rank()];
        let sharers: Vec<usize> = (0..identities.len()).filter(same).collect();
        if sharers.len() == identities.len() {
            return Ok(());
        }
        let part = sharers.iter().position(|rank| *rank == self.rank()).unwrap_or(0);
        let own = folder.checksum(part, sharers.len());

        let parts = self.words(*own.as_ref().unwrap_or(&0))?;
        let checksum = sharers.iter().fold(0, |sum, rank| sum ^ parts[*rank]);
        let mut settings = RankSettings::new();
        settings.push("--model (checksum of the weights)", format_args!("{checksum:016x}"));
        self.agree(own.map(|_| settings).map_err(CliError::usage))
    }

    /// The word of each rank.
    fn words(&self, own: u64) -> Result<Vec<u64>, CliError> {
        let messages = self.messages().exchange(&own.to_le_bytes()).map_err(CliError::failure)?;
        let word = |message: &Vec<u8>| message.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        let words: Option<Vec<u64>> = messages.iter().map(word).collect();
        words.ok_or_else(|| {
            CliError::Failure("a rank sent a message of another kind while the run started".to_owned())
        })
    }

    /// Returns the error of the lowest rank that has one, or of the first setting that differs.
    fn agree(&self, settings: Result<RankSettings, CliError>) -> Result<(), CliError> {
        if self.comm.world_size() == 1 {
            return settings.map(drop);
        }
        let messages = self.messages();
        let exchange = |message: &[u8]| messages.exchange(message);
        let agreed = match &settings {
            Ok(settings) => agree(Ok(settings), exchange),
            Err(error) => agree(Err(error), exchange),
        };
        match (agreed, settings) {
            (Ok(()), settings) => settings.map(drop),
            (Err(AgreementError::Failed { rank, .. }), Err(own)) if rank == self.rank() => Err(own),
            (Err(error @ (AgreementError::Failed { .. } | AgreementError::Differs { .. })), _) => {
                Err(CliError::usage(error))
            }
            (Err(error), _) => Err(CliError::failure(error)),
        }
    }
}

/// The checksum of a layout.
pub(super) fn layout_checksum(layout: &Layout) -> u64 {
    crc_fast::checksum(CrcAlgorithm::Crc64Nvme, format!("{:?}", layout.units()).as_bytes())
}

/// The names of a tokenizer's files in a folder.
const TOKENIZER_FILES: [&str; 5] = ["tokenizer.json", "vocab.json", "merges.txt", "encoder.json", "vocab.bpe"];

/// The checksum of the tokenizer's files: those of the folder `path`, or the file `path`, and its folder's if it is one of
/// several.
pub(super) fn tokenizer_checksum(path: &Path) -> Result<u64, CliError> {
    let is_alone = path.is_file() && !TOKENIZER_FILES[1..].iter().any(|name| path.ends_with(name));
    let dir = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
    let files = match is_alone {
        true => vec![path.to_owned()],
        false => TOKENIZER_FILES.map(|name| dir.join(name)).into_iter().filter(|file| file.is_file()).collect(),
    };

    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
    for file in files {
        let bytes = std::fs::read(&file)
            .map_err(|error| CliError::Usage(format!("{}: failed to read the tokenizer: {error}", file.display())))?;
        digest.update(&(bytes.len() as u64).to_le_bytes());
        digest.update(&bytes);
    }
    Ok(digest.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longest_name_decides_the_place() {
        assert_eq!(label("optimizer.lr"), "--lr (optimizer.lr)");
        assert_eq!(label("optimizer.hyper.decoupled"), "optimizer.hyper.decoupled");
        assert_eq!(label("data.fingerprint"), "--data (data.fingerprint)");
        assert_eq!(label("checkpoint"), "--checkpoint or --no-checkpoint (checkpoint)");
        assert_eq!(label("a setting of a later version"), "a setting of a later version");
        // What others are derived from comes first.
        assert!(place("model.config.n_embd") < place("layout"));
        assert!(place("batch.micro_batch") < place("batch.step_tokens"));
        assert!(place("validation.split") < place("data.tokens") && place("data.tokens") < place("data.fingerprint"));
        assert!(place("checkpoint_every") > place("checkpoint"));
    }

    #[test]
    fn tokenizer_is_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        write("vocab.json", "{}");
        write("merges.txt", "a b");
        let checksum = |name: &str| tokenizer_checksum(&dir.path().join(name)).unwrap();
        let folder = checksum("");
        assert_eq!(
            [checksum("vocab.json"), checksum("merges.txt")],
            [folder; 2],
            "half of a tokenizer means both files"
        );
        write("merges.txt", "a c");
        assert_ne!(checksum(""), folder);
        write("alone.json", "{}");
        assert_ne!(checksum("alone.json"), checksum(""));
    }
}
