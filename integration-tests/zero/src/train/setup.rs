//! A run that is ready to start. Everything is checked before a rank starts.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::PathBuf;
use std::sync::Arc;

use zero_alloc::device::Device;
use zero_models::gpt2::Gpt2Options;
use zero_optim::RankSettings;
use zero_shard::{Layout, ZeroStage};
use zero_trainer::{RunOptions, Settings, ValidationOptions};

use super::choices::{ChosenData, ChosenModel};
use super::exchange::StartExchange;
use super::resume::Resumed;
use super::{checks, metrics_file, report_folder, save_folder};
use crate::config::{Batch, DsConfig};
use crate::error::CliError;
use crate::files::absolute;
use crate::flags::check_seq_len;
use crate::memory::{self, RunMemory};
use crate::plan;
use crate::settings::activations::{
    ActivationRecord, NO_MATMUL_TIMING, RECOMPUTE_GELU, SHARE_GPUS,
};
use crate::settings::agreement::{self, Unrecorded};
use crate::settings::args::TrainArgs;
use crate::settings::batch::{self, BatchRecord};
use crate::settings::communication::CommunicationRecord;
use crate::settings::offload::resolve_folders;
use crate::settings::record::{FORMAT, PROGRAM, RUN_JSON, RunRecord, new_run_id};
use crate::settings::resolve::{
    RunSources, raise_live_limit, recorded_dtype, settings, trim_bucket,
};
use crate::settings::row::Conditions;
use crate::settings::saving::{CHECK_REPLICAS, SavingRecord, requests_replica_checks};
use crate::settings::validation::{self, Rows, ValidationRecord};
use crate::settings::{autos, unused_keys};
use crate::workload::{GptWorkload, Weights};

/// The GPU of a rank.
#[derive(Clone, Debug)]
pub(crate) struct Gpu {
    pub(crate) name: String,
    pub(crate) memory_bytes: u64,
}

/// The settings of a run that is ready to start.
pub(crate) struct RunSetup {
    pub(crate) ranks: usize,
    /// `None` on the host.
    pub(crate) device: Option<Gpu>,
    pub(crate) settings: Settings,
    pub(crate) workload: GptWorkload,
    pub(crate) options: RunOptions,
    pub(crate) layout: Layout,
    pub(crate) model_name: String,
    /// The content of `run.json`.
    pub(crate) record: RunRecord,
    /// The settings that must be equal on all ranks.
    pub(crate) agreed: RankSettings,
    /// The completed steps at the start.
    pub(crate) first_step: u64,
    pub(crate) metrics: Option<PathBuf>,
    /// Whether `metrics` is that of the resumed run, and no flag's.
    pub(crate) recorded_metrics: bool,
    pub(crate) report: Option<PathBuf>,
    /// Notes for the user, one line each.
    pub(crate) notices: Vec<String>,
}

impl RunSetup {
    /// Builds and checks the settings for `ranks` ranks, on the GPU `device` or on the host. Where
    /// neither a flag nor the configuration file gives a setting, it is that of the run that saved
    /// `resumed`, or the default.
    ///
    /// # Errors
    /// Flags, files or folders that the run cannot use.
    pub(crate) fn new(
        args: &TrainArgs,
        resumed: Option<&Resumed>,
        ranks: usize,
        device: Option<Gpu>,
    ) -> Result<Self, CliError> {
        checks::numbers(args, ranks)?;
        let file = args.config.as_deref().map(DsConfig::open);
        let file = file.transpose().map_err(CliError::usage)?;
        let from = RunSources {
            args,
            file: file.as_ref(),
            recorded: resumed.and_then(|resumed| resumed.record.as_ref()),
            saved: resumed.map(Resumed::saved),
        };
        let run = Conditions {
            ranks,
            stage: from.stage()?,
            on_gpus: device.is_some(),
            checkpointing: from.checkpoints_activations(),
            offloads: false,
        };

        let mut notices = first_notices(from.file, resumed, run.stage);
        let model = ChosenModel::find(args, resumed, ranks, &mut notices)?;
        notices.extend(idle_flags(&from, &run));
        let data = ChosenData::open(args, from.recorded, model.folder.as_ref(), &mut notices)?;
        let mut settings = run_settings(&from, resumed, &model, &run, &mut notices)?;
        let sizes = Sizes::new(&from, &model, &data, ranks)?;
        settings.grad_accum_steps = sizes.batch.grad_accum as usize;
        let mut options = model_options(&from, &model, &sizes, &settings)?;
        options.recompute_gelu = recomputes_gelu(
            &from,
            &model,
            &options,
            &settings,
            ranks,
            device.as_ref(),
            &mut notices,
        );
        if args.recompute_gelu == Some(true) {
            notices.extend(RECOMPUTE_GELU.idle_notice(&run));
        }

        let saves_to = checkpoint_folder(args, &mut notices)?;
        let rows = sizes.rows(ranks);
        let validation = validation::options(args, data.held_out.clone(), rows, from.steps())?;
        let ids = match resumed {
            Some(resumed) => resumed.run_ids(saves_to.as_deref()),
            None => (new_run_id(), Vec::new()),
        };
        let parts = Parts {
            saving: SavingRecord::of(&from.without_sizes().part(|run| &run.saving)),
            from,
            resumed,
            run,
            device,
            model,
            data,
            settings,
            sizes,
            options,
            saves_to,
            validation,
            ids,
        };
        let record = parts.record()?;
        let agreed = parts.agreed(&record)?;
        let changes = resumed.map(|resumed| resumed.differences(&record));
        notices.extend(changes.unwrap_or_default());
        let mut setup = parts.setup(record, agreed, notices);
        let notice = memory::offload_notice(&setup.memory(), setup.device.is_some());
        setup.notices.extend(notice);
        setup.check_outputs()?;
        Ok(setup)
    }

    /// What decides the memory of a rank.
    pub(crate) fn memory(&self) -> RunMemory<'_> {
        RunMemory {
            settings: &self.settings,
            layout: &self.layout,
            workload: &self.workload,
            saves: self.options.checkpoint.is_some(),
        }
    }

    /// Checks that the settings, the data and the weights of all ranks are equal.
    ///
    /// # Errors
    /// The error of a rank, or the first setting that differs.
    pub(crate) fn agree<D: Device>(
        setup: Result<Self, CliError>,
        start: &StartExchange<'_, D>,
    ) -> Result<Self, CliError> {
        let setup = start.agree(setup, |setup| setup.agreed.clone())?;
        if let (Weights::Folder(folder), None) = (&setup.workload.weights, &setup.options.resume) {
            start.agree_on_weights(folder)?;
        }
        Ok(setup)
    }

    /// Reserves the folder of checkpoints that no flag names; see [`save_folder::reserve`].
    pub(crate) fn reserve_folder(&mut self) -> Result<(), CliError> {
        let Some((folder, _)) = &mut self.options.checkpoint else {
            return Ok(());
        };
        save_folder::reserve(folder, &mut self.notices)?;
        self.record.checkpoint_dir = Some(absolute(folder));
        self.options
            .documents
            .insert(RUN_JSON.to_owned(), self.record.document());
        Ok(())
    }

    /// Checks that the run may write to the folders of checkpoints and of the report, and to the
    /// metrics file.
    fn check_outputs(&mut self) -> Result<(), CliError> {
        if let Some((dir, _)) = &self.options.checkpoint {
            save_folder::check(dir, &self.options.store())?;
        }
        if let Some(path) = &self.metrics {
            self.notices
                .extend(metrics_file::check(path, &self.options, self.first_step)?);
        }
        if let Some(dir) = &self.report {
            let checkpoints = self
                .options
                .checkpoint
                .as_ref()
                .map(|(dir, _)| dir.as_path());
            report_folder::check(dir, checkpoints, &self.options.runs())?;
        }
        Ok(())
    }

    /// Whether to record a timeline: always on the host, where it costs nothing, and on a GPU for a
    /// report or a breakdown.
    pub(crate) fn is_recorded(&self) -> bool {
        self.device.is_none() || self.report.is_some() || self.options.breakdown
    }
}

/// Notes about the configuration file and the checkpoint.
fn first_notices(
    file: Option<&DsConfig>,
    resumed: Option<&Resumed>,
    stage: ZeroStage,
) -> Vec<String> {
    let mut notices = Vec::new();
    if let Some(file) = file {
        notices.extend(file.warnings.iter().cloned());
        notices.extend(unused_keys::notices(file, stage));
    }
    if let Some(resumed) = resumed {
        notices.extend(resumed.notices.iter().cloned());
    }
    notices
}

/// Notes about flags without effect.
fn idle_flags(from: &RunSources<'_>, run: &Conditions) -> Vec<String> {
    let from_saving = from.without_sizes().part(|run| &run.saving);
    let flags = [
        (
            requests_replica_checks(&from_saving),
            CHECK_REPLICAS.idle_notice(run),
        ),
        (from.args.share_gpus, SHARE_GPUS.idle_notice(run)),
        (
            from.args.no_matmul_timing,
            NO_MATMUL_TIMING.idle_notice(run),
        ),
    ];
    let given = flags.into_iter().filter(|(is_given, _)| *is_given);
    given.filter_map(|(_, notice)| notice).collect()
}

/// The trainer's settings, but for the micro-batches of a step.
fn run_settings(
    from: &RunSources<'_>,
    resumed: Option<&Resumed>,
    model: &ChosenModel,
    run: &Conditions,
    notices: &mut Vec<String>,
) -> Result<Settings, CliError> {
    let mut settings = settings(from, model.shape(run), notices)?;
    if let Some(resumed) = resumed {
        resumed.check_scratch(from.args, &settings.offload)?;
    }
    resolve_folders(&mut settings.offload)?;
    trim_bucket(&mut settings, from.args, &model.layout, run)?;
    raise_live_limit(&mut settings, &model.layout, &model.config, notices);
    Ok(settings)
}

/// The sizes of a step.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    batch: Batch,
    /// Tokens of a sequence.
    seq_len: usize,
}

impl Sizes {
    fn new(
        from: &RunSources<'_>,
        model: &ChosenModel,
        data: &ChosenData,
        ranks: usize,
    ) -> Result<Self, CliError> {
        let config = &model.config;
        let from_batch = from.without_sizes().part(|run| &run.batch);
        let batch = batch::resolve(&from_batch, ranks)?;
        let seq_len = batch::seq_len(&from_batch, config.n_positions);
        check_seq_len(seq_len as u64, Some(config.n_positions as u64))?;
        validation::check_data(
            from.args,
            &data.training,
            data.held_out.as_ref(),
            config.vocab_size,
            seq_len,
        )?;
        Ok(Self { batch, seq_len })
    }

    fn rows(&self, ranks: usize) -> Rows {
        Rows {
            step: self.batch.train_batch_size,
            micro_batch: self.batch.micro_batch.saturating_mul(ranks as u64),
            seq_len: self.seq_len,
        }
    }
}

/// The options of the model, but for `recompute_gelu`.
fn model_options(
    from: &RunSources<'_>,
    model: &ChosenModel,
    sizes: &Sizes,
    settings: &Settings,
) -> Result<Gpt2Options, CliError> {
    let options = Gpt2Options {
        micro_batch: sizes.batch.micro_batch as usize,
        seq_len: sizes.seq_len,
        dtype: settings.dtype,
        activation_checkpointing: from.checkpoints_activations(),
        offload_activations: settings.offload.activations,
        matmul_timing: !from.args.no_matmul_timing,
        recompute_gelu: false,
    };
    options.validate(&model.config).map_err(CliError::usage)?;
    Ok(options)
}

/// The setting of `--recompute-gelu`, if the run or the one that it resumes has it. A run on the
/// host has none.
fn recompute_gelu_setting(from: &RunSources<'_>) -> Option<bool> {
    let mut from_activations = from.without_sizes().part(|run| &run.activations);
    if from.recorded.is_some_and(|run| run.gpu.is_none()) {
        from_activations.recorded = None;
    }
    from_activations.value(&RECOMPUTE_GELU)
}

/// Whether the run recomputes GELU's output in backward: only on a GPU, and by default only where
/// its memory is too small otherwise.
fn recomputes_gelu(
    from: &RunSources<'_>,
    model: &ChosenModel,
    options: &Gpt2Options,
    settings: &Settings,
    ranks: usize,
    device: Option<&Gpu>,
    notices: &mut Vec<String>,
) -> bool {
    let Some(gpu) = device else { return false };
    if let Some(recompute) = recompute_gelu_setting(from) {
        return recompute && !options.activation_checkpointing;
    }
    let request = plan::Request::of_run(&model.config, options, settings, ranks, gpu.memory_bytes);
    match plan::evaluate(&request, settings.stage) {
        Ok(plan) => plan.recompute_gelu,
        Err(error) => {
            notices.push(format!(
                "GELU's output is kept, since this run's memory cannot be planned: {error}"
            ));
            false
        }
    }
}

/// The folder of checkpoints, unless the run saves none.
fn checkpoint_folder(
    args: &TrainArgs,
    notices: &mut Vec<String>,
) -> Result<Option<PathBuf>, CliError> {
    if args.no_checkpoint {
        return Ok(None);
    }
    let folder = args.checkpoint.clone();
    Ok(Some(match folder {
        Some(folder) => folder,
        None => save_folder::default(notices)?,
    }))
}

/// What a run consists of, before it is recorded.
struct Parts<'a> {
    from: RunSources<'a>,
    resumed: Option<&'a Resumed>,
    run: Conditions,
    device: Option<Gpu>,
    model: ChosenModel,
    data: ChosenData,
    settings: Settings,
    sizes: Sizes,
    options: Gpt2Options,
    saving: SavingRecord,
    saves_to: Option<PathBuf>,
    validation: Option<(ValidationOptions, ValidationRecord)>,
    /// The id of the run, and of those that it resumes.
    ids: (String, Vec<String>),
}

impl Parts<'_> {
    /// The content of `run.json`.
    fn record(&self) -> Result<RunRecord, CliError> {
        let args = self.from.args;
        let Sizes { batch, seq_len } = self.sizes;
        let (run, resumed_runs) = self.ids.clone();
        let validation = self.validation.as_ref().map(|(_, record)| record.clone());
        let mut record = RunRecord {
            format: FORMAT,
            run,
            resumed_runs,
            program: PROGRAM.to_owned(),
            model: self.model.record(self.from.recorded, self.from.seed()),
            data: self.data.record(),
            optimizer: self.settings.optimizer.clone(),
            param_groups: self.settings.groups.clone(),
            dtype: recorded_dtype(self.settings.dtype)?,
            batch: BatchRecord {
                ranks: self.run.ranks,
                micro_batch: batch.micro_batch,
                grad_accum: batch.grad_accum,
                seq_len,
                step_tokens: batch.train_batch_size.saturating_mul(seq_len as u64),
            },
            seed: self.from.seed(),
            steps: self.from.steps(),
            stage: self.settings.stage.number().into(),
            activations: ActivationRecord {
                activation_checkpointing: self.options.activation_checkpointing,
                recompute_gelu: self.options.recompute_gelu,
            },
            communication: CommunicationRecord::of(&self.settings),
            offload: self.settings.offload.clone(),
            device: args.device,
            gpu: self.device.as_ref().map(|gpu| gpu.name.clone()),
            saving: self.saving.clone(),
            checkpoint_dir: self.saves_to.as_deref().map(absolute),
            metrics: args.metrics.as_deref().map(absolute),
            report: args.report.as_deref().map(absolute),
            validation,
            auto: BTreeMap::new(),
        };
        if let Some(file) = self.from.file {
            let hidden = self.model.config.n_embd as u64;
            record.auto = autos::values(file, &record, hidden).into_iter().collect();
        }
        Ok(record)
    }

    /// The settings that must be equal on all ranks.
    fn agreed(&self, record: &RunRecord) -> Result<RankSettings, CliError> {
        let recompute_gelu = recompute_gelu_setting(&self.from).filter(|_| self.run.on_gpus);
        let unrecorded = Unrecorded {
            settings: &self.settings,
            layout: &self.model.layout,
            in_order: self.data.in_order(),
            tokenizer: self.data.tokenizer_checksum()?,
            loads_weights: self.resumed.is_none() && self.model.folder.is_some(),
            recompute_gelu,
            saves: self.saves_to.is_some(),
        };
        Ok(agreement::settings(record, &unrecorded))
    }

    fn setup(self, record: RunRecord, agreed: RankSettings, notices: Vec<String>) -> RunSetup {
        let Self { from, run, .. } = self;
        let args = from.args;
        let seed = from.seed();
        let asks_for_breakdown = from.file.is_some_and(|file| file.wall_clock_breakdown);
        let breakdown = args.breakdown || asks_for_breakdown;
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        let (run_id, resumed_runs) = self.ids;
        let options = RunOptions {
            steps: from.steps(),
            micro_batch: self.options.micro_batch,
            seq_len: self.options.seq_len,
            seed,
            checkpoint: self
                .saves_to
                .map(|folder| (folder, self.saving.checkpoint_every)),
            keep_last: self.saving.keep_last,
            check_replicas: self.saving.replica_checks(),
            validation: self.validation.map(|(options, _)| options),
            resume: args.resume.clone(),
            cancel: Arc::default(),
            run_id,
            resumed_runs,
            documents: [(RUN_JSON.to_owned(), record.document())].into(),
            breakdown,
            log_memory: breakdown || args.report.is_some(),
        };
        let workload = GptWorkload {
            options: self.options,
            config: self.model.config,
            weights: match self.model.folder {
                Some(folder) => Weights::Folder(Box::new(folder)),
                None => Weights::Initial(seed),
            },
            data: self.data.training,
            threads: args.threads.unwrap_or_else(|| (cores / run.ranks).max(1)),
        };
        RunSetup {
            ranks: run.ranks,
            device: self.device,
            settings: self.settings,
            workload,
            options,
            layout: self.model.layout,
            model_name: self.model.name,
            record,
            agreed,
            first_step: self.resumed.map_or(0, Resumed::step),
            metrics: args.metrics.clone(),
            recorded_metrics: args.recorded_metrics,
            report: args.report.clone(),
            notices,
        }
    }
}
