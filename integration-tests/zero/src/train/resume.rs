//! The checkpoint that `--resume` names, and the settings of its run.
//!
//! One process finds the checkpoint, for which it reads every byte; the others open the same one.
//! Under this program's launcher that process is the launcher, which passes the checkpoint to its
//! ranks in [`SELECTED_VARIABLE`]. Under another launcher it is rank 0, which broadcasts the
//! checkpoint once the ranks are connected.
//!
//! Loading verifies again what each rank reads, so a resume reads a checkpoint twice. If the newest
//! checkpoint is damaged, the one before it is taken. While rank 0 verifies it sends a message
//! twice a second, so that no wait of the others ends.

use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use zero_alloc::device::{DType, Device};
use zero_ckpt::files::{self, SMALL_FILE_BYTES};
use zero_ckpt::{CkptError, ModelSpec, Reader, Resolved, Selection, has_checkpoints, resolve};
use zero_optim::RankSettings;
use zero_shard::Layout;

use super::csv_file::CsvLines;
use super::exchange::StartExchange;
use super::metrics_file::MetricsLines;
use super::{event_files, line_file, report_folder};
use crate::error::CliError;
use crate::flags::DTypeFlag;
use crate::model_files::recorded_folder;
use crate::paths::absolute;
use crate::settings::args::{DeviceChoice, TrainArgs};
use crate::settings::changes;
use crate::settings::outputs::Output;
use crate::settings::record::{PROGRAM, RUN_JSON, RunRecord, new_run_id};
use crate::settings::sources::Saved;
use zero_models::ModelConfig;
use zero_models::hf::{HfFolder, kept_files};
use zero_models::lora::LoraConfig;
use zero_trainer::{Home, OffloadSettings, TrainerState};

/// The environment variable in which the launcher passes the checkpoint to its ranks, as JSON.
const SELECTED_VARIABLE: &str = "ZERO_SELECTED_CHECKPOINT";
/// Maximum number of notes about damaged checkpoints; an environment variable is short.
const MAX_NOTICES: usize = 20;

/// The content of [`SELECTED_VARIABLE`].
#[derive(Debug, Serialize, Deserialize)]
struct Selected {
    selection: Selection,
    notices: Vec<String>,
}

impl Selected {
    /// The checkpoint that the launcher of this process has found.
    fn from_env() -> Option<Self> {
        serde_json::from_str(&std::env::var(SELECTED_VARIABLE).ok()?).ok()
    }
}

/// An open checkpoint to resume from.
pub(crate) struct Resumed {
    /// Until it is released, no other run removes the checkpoint.
    reader: Arc<Reader>,
    /// The folder of the checkpoint.
    store_dir: PathBuf,
    state: TrainerState,
    /// The settings of the run that saved it; `None` for a checkpoint of an older version.
    pub(crate) record: Option<RunRecord>,
    /// The model; `None` if the checkpoint has no `config.json`.
    pub(crate) config: Option<ModelConfig>,
    /// The folder with the files of the model that are kept beside the checkpoint.
    pub(crate) kept: Option<PathBuf>,
    /// Notes for the user, one line each.
    pub(crate) notices: Vec<String>,
}

impl Resumed {
    /// Opens the checkpoint of `--resume`, if the flag is given: the one that the launcher of this
    /// process has found, or the newest whole one.
    ///
    /// # Errors
    /// No checkpoint of this trainer is there, or its `run.json` is invalid.
    pub(crate) fn open(args: &TrainArgs) -> Result<Option<Self>, CliError> {
        let Some(dir) = &args.resume else {
            return Ok(None);
        };
        let (reader, notices) = match Selected::from_env() {
            Some(Selected { selection, notices }) => (
                Reader::open_selected(dir, &selection).map_err(CliError::usage)?,
                notices,
            ),
            None => find(dir, args.resume_exact)?,
        };
        Self::new(reader, notices).map(Some)
    }

    /// Opens the checkpoint of `--resume` on all ranks; rank 0 finds it. The error of a rank
    /// reaches all of them.
    ///
    /// # Errors
    /// As [`Resumed::open`]; or a failed exchange.
    pub(crate) fn open_on_ranks<D: Device>(
        args: &TrainArgs,
        start: &StartExchange<'_, D>,
    ) -> Result<Option<Self>, CliError> {
        let Some(dir) = &args.resume else {
            return Ok(None);
        };
        let mut notices = Vec::new();
        let find = || {
            let found = find(dir, args.resume_exact).map_err(NotOpened::Here)?;
            notices = found.1;
            Ok(found.0)
        };
        let opened = Reader::open_on_ranks(dir, start.rank() as u64, &mut start.messages(), find);
        let opened = opened.map_err(|error| match error {
            NotOpened::Here(error) => error,
            NotOpened::Checkpoint(error) => CliError::usage(error),
        });
        start
            .agree_on_success(opened.and_then(|reader| Self::new(reader, notices)))
            .map(Some)
    }

    fn new(reader: Reader, mut notices: Vec<String>) -> Result<Self, CliError> {
        let store_dir = reader.store_dir().map_err(CliError::usage)?;
        let path = reader.path().to_owned();
        let state = TrainerState::of(&reader).map_err(CliError::usage)?;
        let record = RunRecord::of(&reader)?;
        let config = Some(&reader.manifest().model_config).filter(|config| !config.is_null());
        let config = config
            .map(|config| ModelConfig::from_hf_json(&config.to_string()))
            .transpose();
        let config = config
            .map_err(|e| {
                let path = path.display();
                usage!("{path}: invalid model configuration: {e}")
            })?
            .map(|(config, _)| config);

        let (kept, missing) = kept_files(&reader).map_err(CliError::usage)?;
        notices.extend(missing);
        if record.is_none() {
            notices.push(format!(
                "{} has no {RUN_JSON} (a framework or an older version saved it): settings that no flag gives have their defaults",
                path.display()
            ));
        }

        Ok(Self {
            store_dir,
            reader: Arc::new(reader),
            state,
            record,
            config,
            kept,
            notices,
        })
    }

    /// The folder with the files of the model: the kept one or, of a run of an older version, the
    /// folder that it started from.
    pub(crate) fn companions(&self) -> Option<PathBuf> {
        let recorded = || recorded_folder(self.record.as_ref()?);
        self.kept.clone().or_else(recorded)
    }

    /// The environment variable with which ranks open this checkpoint.
    pub(crate) fn variable(&self) -> (String, String) {
        let notices = self.notices.iter().take(MAX_NOTICES).cloned().collect();
        let selected = Selected {
            selection: self.reader.selection(),
            notices,
        };
        // Strings and a number: serializing does not fail.
        (
            SELECTED_VARIABLE.to_owned(),
            serde_json::to_string(&selected).unwrap_or_default(),
        )
    }

    /// The path of the checkpoint.
    pub(crate) fn path(&self) -> &Path {
        self.reader.path()
    }

    /// The checkpoint, to be released once it is loaded.
    pub(crate) fn reader(&self) -> Arc<Reader> {
        Arc::clone(&self.reader)
    }

    /// The completed steps.
    pub(crate) fn step(&self) -> u64 {
        self.state.step
    }

    /// The name and shape of the model.
    pub(crate) fn model(&self) -> Option<(String, ModelConfig)> {
        let name = self.record.as_ref().map_or_else(
            || self.path().display().to_string(),
            |r| r.model.name.clone(),
        );
        Some((name, self.config.clone()?))
    }

    /// The adapters of the run, if it trains some.
    pub(crate) fn lora(&self) -> Option<LoraConfig> {
        self.config.as_ref()?.lora().cloned()
    }

    /// The folder of the frozen weights, which the checkpoint does not have; `None` if it has all
    /// weights, or if they are drawn.
    pub(crate) fn base_folder(&self) -> Option<Result<HfFolder, CliError>> {
        self.lora()?;
        let model = &self.record.as_ref()?.model;
        model.base_checksum.as_ref()?;
        let opened = HfFolder::open(Path::new(&model.weights));
        Some(opened.map_err(|error| {
            let path = self.path().display();
            usage!("{path} has adapters of a base that cannot be opened ({error}): pass its folder with --model")
        }))
    }

    /// The seed of the frozen weights, if they are drawn.
    pub(crate) fn base_seed(&self) -> Option<u64> {
        self.lora()?;
        let weights = &self.record.as_ref()?.model.weights;
        weights.strip_prefix("seed ")?.parse().ok()
    }

    /// Checks that the frozen weights are those of the checkpoint's run.
    pub(crate) fn check_base(&self, name: &str, checksum: Option<&str>) -> Result<(), CliError> {
        let recorded = self.record.as_ref().map(|record| &record.model);
        let was = recorded.and_then(|model| model.base_checksum.as_deref());
        if self.lora().is_none() || was == checksum {
            return Ok(());
        }
        let of = |checksum: Option<&str>| match checksum {
            Some(checksum) => format!("checksum {checksum}"),
            None => "drawn weights".to_owned(),
        };
        Err(usage!(
            "--model {name}: the adapters of {} were trained on another base ({}; this one has {}): pass the folder {}",
            self.path().display(),
            of(was),
            of(checksum),
            recorded.map_or("of that base", |model| &model.weights),
        ))
    }

    /// The id of the run that resumes and saves to `dir`, and the ids of the runs that it resumes.
    /// A run that saves to the folder of the checkpoint keeps its id.
    pub(crate) fn run_ids(&self, dir: Option<&Path>) -> (String, Vec<String>) {
        // An empty id means the checkpoints of older versions.
        let Some(record) = &self.record else {
            return (new_run_id(), vec![String::new()]);
        };
        let mut resumed_runs = record.resumed_runs.clone();
        if is_same(dir, &self.store_dir) {
            return (record.run.clone(), resumed_runs);
        }
        resumed_runs.push(record.run.clone());
        (new_run_id(), resumed_runs)
    }

    /// `now` with the recorded path of the tokenizer, if it is the kept copy that the run reads.
    fn with_recorded_tokenizer(&self, now: &RunRecord) -> RunRecord {
        let mut compared = now.clone();
        if let (Some(kept), Some(record)) = (&self.kept, &self.record)
            && let Some(tokenizer) = &now.data.tokenizer
            && Path::new(tokenizer).starts_with(absolute(kept))
        {
            compared.data.tokenizer.clone_from(&record.data.tokenizer);
        }
        compared
    }

    /// Notes about the settings of `now` that differ from those of the run that saved the
    /// checkpoint.
    pub(crate) fn differences(&self, now: &RunRecord) -> Vec<String> {
        let mut notices = Vec::new();
        let was = &self.reader.manifest().dtype;
        if DTypeFlag::from_name(was) != Some(now.dtype) {
            let now = DType::from(now.dtype);
            notices.push(format!(
                "the checkpoint was trained in {was} and this run in {now}: the loss scale is reset"
            ));
        }

        let data = self.state.data_fingerprint;
        if data.is_some_and(|data| format!("{data:016x}") != now.data.fingerprint) {
            notices.push(
                "the data differs from the checkpoint's: the loss curve will differ".to_owned(),
            );
        }

        let compared = self.with_recorded_tokenizer(now);
        let changed = self
            .record
            .as_ref()
            .map(|record| changes::between(record, &compared))
            .unwrap_or_default();
        notices.extend(
            changed
                .into_iter()
                .map(|change| format!("differs from the checkpoint: {change}")),
        );

        for output in Output::ALL {
            let recorded = self.record.as_ref();
            let Some(old) = recorded.and_then(|record| record.outputs.path(output)) else {
                continue;
            };
            if now.outputs.path(output).is_none() {
                let (what, flag) = output.name();
                let old = old.display();
                let why = self.check_output(output, &now.run).err();
                let why = why.unwrap_or_else(|| "it was in use".to_owned());
                notices.push(format!(
                    "no {what}: the resumed run wrote {old}, but {why}; pass {flag}"
                ));
            }
        }

        notices
    }

    /// The flags of a run that resumes: `args`, and the recorded places and ranks that no
    /// configuration file overrides.
    pub(crate) fn fill(&self, args: &TrainArgs) -> TrainArgs {
        let record = self.record.as_ref();
        let mut filled = args.clone();
        filled.resume = Some(self.path().to_owned());
        filled
            .checkpoint
            .get_or_insert_with(|| self.store_dir.clone());
        filled.seed.get_or_insert(self.state.seed);
        // No other run saves there, and this one removes the checkpoint once it is old.
        if is_same(filled.checkpoint.as_deref(), &self.store_dir) {
            self.reader.release();
        }
        let Some(record) = record else { return filled };
        filled.recorded_ranks = Some(record.batch.ranks);
        self.fill_outputs(record, &mut filled);
        // A run that used a GPU may continue on a machine without one.
        if args.device == DeviceChoice::Auto && record.device == DeviceChoice::Cpu {
            filled.device = DeviceChoice::Cpu;
        }
        filled
    }

    /// Sets the outputs that the run goes on writing, where no flag names them.
    fn fill_outputs(&self, record: &RunRecord, args: &mut TrainArgs) {
        let folder = args.checkpoint.as_deref().filter(|_| !args.no_checkpoint);
        let run = self.run_ids(folder).0;
        for output in Output::ALL {
            let Some(path) = record.outputs.path(output) else {
                continue;
            };
            if args.outputs.path(output).is_none() && self.check_output(output, &run).is_ok() {
                args.outputs.continue_recorded(output, path);
            }
        }
    }

    /// Checks that `run` may go on writing an output that the record names.
    ///
    /// Why so strict: the paths are those of one machine and the checkpoint may be from elsewhere,
    /// such as a copy of the folder, in which another run continues from the same step. So only the
    /// run itself, in its own folder, continues its files.
    ///
    /// # Errors
    /// The reason.
    fn check_output(&self, output: Output, run: &str) -> Result<(), String> {
        let Some(record) = &self.record else {
            return Ok(());
        };
        let Some(path) = record.outputs.path(output) else {
            return Ok(());
        };
        if run != record.run {
            return Err("this is a new run".to_owned());
        }
        let identity = |dir: &Path| {
            dir.metadata()
                .ok()
                .map(|metadata| (metadata.dev(), metadata.ino()))
        };

        let recorded = record
            .checkpoint_dir
            .as_deref()
            .ok_or("the checkpoint does not record its folder")?;
        let saved_to = identity(Path::new(recorded));

        if saved_to.is_none() || saved_to != identity(&self.store_dir) {
            return Err(format!(
                "it saved to {recorded}, so this folder of checkpoints was copied or moved"
            ));
        }

        let runs = record.runs();
        match output {
            Output::Metrics => line_file::check_recorded::<MetricsLines>(path, &runs),
            Output::Csv => line_file::check_recorded::<CsvLines>(path, &runs),
            Output::Tensorboard => event_files::check_recorded(path, &runs),
            Output::Report => report_folder::check_recorded(path, &runs),
        }
    }

    /// Checks the folders of scratch files that the record has and no flag names. A scratch file
    /// has no name and changes nothing in its folder, but the folder may be that of another machine
    /// or user.
    ///
    /// # Errors
    /// Exit code 2: the folder does not exist, or is neither this user's nor for the temporary
    /// files of all users.
    pub(crate) fn check_scratch(
        &self,
        args: &TrainArgs,
        offload: &OffloadSettings,
    ) -> Result<(), CliError> {
        let Some(record) = &self.record else {
            return Ok(());
        };
        let flags = &args.offload;
        let recorded = &record.offload;

        let homes = [
            (
                "--offload",
                flags.offload.is_some(),
                &recorded.optimizer,
                &offload.optimizer,
            ),
            (
                "--offload-params",
                flags.offload_params.is_some(),
                &recorded.params,
                &offload.params,
            ),
        ];

        for (flag, is_named, recorded, now) in homes {
            let Home::Nvme(dir) = recorded else { continue };
            let user = rustix::process::geteuid().as_raw();
            let is_usable = || {
                dir.metadata()
                    .is_ok_and(|m| m.is_dir() && is_for_user(m.uid(), m.mode(), user))
            };
            if !is_named && recorded == now && !is_usable() {
                return Err(usage!(
                    "the resumed run had scratch files in {}, which is no folder of yours on this machine: pass \
                     {flag} nvme:DIR, or {flag} none",
                    dir.display()
                ));
            }
        }

        Ok(())
    }

    /// The stage and the type of parameters of the checkpoint.
    pub(crate) fn saved(&self) -> Saved {
        let manifest = self.reader.manifest();
        Saved {
            step: self.state.step,
            stage: manifest.stage.into(),
            dtype: DTypeFlag::from_name(&manifest.dtype).map(DType::from),
        }
    }

    /// Checks that the checkpoint is of the model `config`, which `name` names.
    pub(crate) fn check_model(
        &self,
        name: &str,
        config: &ModelConfig,
        layout: &Layout,
    ) -> Result<(), CliError> {
        let mut differences = Vec::new();
        if let Some(own) = &self.config {
            let json = |config: &ModelConfig| {
                serde_json::from_str(&config.to_hf_json("float32")).unwrap_or_default()
            };
            // How weights were drawn no longer matters, and dropout may change.
            let config = config
                .clone()
                .with_initializer_range(own.initializer_range())
                .with_dropout_of(own);
            let (own, config): (serde_json::Value, _) = (json(own), json(&config));
            // They matter to generation only, and older versions recorded others.
            let skips = |key: &str| ["bos_token_id", "eos_token_id"].contains(&key);
            differences = changes::differences(&own, &config, &skips);
        }

        if differences.is_empty() {
            let mut whole = ModelSpec::from(layout);
            if config.lora().is_some() {
                whole.units.truncate(config.adapter_units());
            }
            differences.extend(self.reader.model().difference(&whole));
        }

        if differences.is_empty() {
            return Ok(());
        }
        let (path, own) = (
            self.path().display(),
            self.record.as_ref().map_or("", |r| r.model.name.as_str()),
        );
        let differences = differences.join(", ");
        let of = if own.is_empty() {
            String::new()
        } else {
            format!(" {own}")
        };

        Err(usage!(
            "--model {name}: {path} is a checkpoint of another model{of} ({differences}); remove --model"
        ))
    }
}

/// Whether a run saves to `folder`.
fn is_same(saves_to: Option<&Path>, folder: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    saves_to.is_some_and(|dir| real(dir) == real(folder))
}

/// Whether a folder of `owner` and with the bits `mode` is the user's, or for the temporary files
/// of all users, as /tmp is.
fn is_for_user(owner: u32, mode: u32, user: u32) -> bool {
    /// Everyone may add files, and remove only their own.
    const TEMPORARY: u32 = libc::S_ISVTX | libc::S_IWOTH;
    owner == user || mode & TEMPORARY == TEMPORARY
}

/// Why a rank could not open the checkpoint.
enum NotOpened {
    /// Rank 0 found none.
    Here(CliError),
    Checkpoint(CkptError),
}

impl fmt::Display for NotOpened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Here(error) => error.fmt(f),
            Self::Checkpoint(error) => error.fmt(f),
        }
    }
}

impl From<CkptError> for NotOpened {
    fn from(error: CkptError) -> Self {
        Self::Checkpoint(error)
    }
}

/// Whether a launcher has found the checkpoint for this process.
pub(crate) fn is_selected() -> bool {
    Selected::from_env().is_some()
}

/// The program and whether it resumes, which decide the collectives before a run.
pub(crate) fn start_settings(args: &TrainArgs) -> RankSettings {
    let resume = if args.resume.is_some() {
        "given"
    } else {
        "not given"
    };
    let mut settings = RankSettings::new();
    settings.push("program", PROGRAM);
    settings.push("--resume", resume);
    settings.push("--resume-exact", args.resume_exact);
    settings.push("a checkpoint chosen by a launcher", is_selected());
    settings
}

/// Whether another process finds the checkpoint of `--resume` for this one: rank 0 of the `ranks`
/// processes that another launcher has started.
pub(crate) fn is_deferred(args: &TrainArgs, ranks: usize) -> bool {
    args.resume.is_some() && ranks > 1 && !is_selected()
}

/// The device that the run of `--resume` recorded, from its newest checkpoint. Reads one small file
/// and verifies nothing: the ranks need the device to connect, after which rank 0 verifies the
/// checkpoint.
pub(crate) fn recorded_device(args: &TrainArgs) -> Option<DeviceChoice> {
    let dir = args
        .resume
        .as_ref()
        .filter(|_| args.device == DeviceChoice::Auto)?;
    let read = |path: &Path| files::read_text(path, SMALL_FILE_BYTES).ok();
    let latest = read(&dir.join("latest"));
    let latest = latest
        .as_deref()
        .and_then(|line| line.split(' ').next())
        .filter(|name| !name.contains('/'));
    let checkpoint = latest.map_or_else(|| dir.clone(), |name| dir.join(name));
    let document = serde_json::from_str(&read(&checkpoint.join(RUN_JSON))?).ok()?;
    RunRecord::parse(document).ok().map(|record| record.device)
}

/// Finds the checkpoint `path`, or the newest whole one in it, and verifies every byte; returns it
/// with notes.
fn find(path: &Path, exact: bool) -> Result<(Reader, Vec<String>), CliError> {
    let Resolved {
        reader,
        passed_over,
        staged,
        ..
    } = resolve(path).map_err(|e| {
        // A damaged checkpoint that --resume names.
        let folder = path
            .parent()
            .filter(|folder| has_checkpoints(folder).unwrap_or(false));
        let hint = folder.map(|f| {
            format!(
                "; --resume {} takes the newest whole checkpoint",
                f.display()
            )
        });
        let message = format!("{e}{}", hint.unwrap_or_default());
        if matches!(e, CkptError::Corrupt { .. }) {
            CliError::Failure(message)
        } else {
            CliError::Usage(message)
        }
    })?;

    if let Some((name, reason)) = passed_over.first().filter(|_| exact) {
        return Err(usage!(
            "--resume-exact: the newest checkpoint {name} is not whole: {reason}"
        ));
    }

    let notice =
        |(name, reason)| format!("{name} is passed over, because it is not whole: {reason}");
    Ok((
        reader,
        passed_over.into_iter().map(notice).chain(staged).collect(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_scratch_folders_are_the_users() {
        assert!(is_for_user(7, 0o40_700, 7));
        assert!(is_for_user(0, 0o41_777, 7), "/tmp");
        assert!(!is_for_user(0, 0o40_755, 7));
        assert!(
            !is_for_user(8, 0o40_777, 7),
            "its owner may replace what is there"
        );
    }
}
