//! The parts of a run: model, data, settings, outputs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use zero_ckpt::ModelFiles;
use zero_data::DataPosition;
use zero_models::ModelOptions;
use zero_models::hf::companions;
use zero_optim::RankSettings;
use zero_shard::ZeroStage;
use zero_trainer::{Settings, ValidationOptions};

use super::choices::{ChosenData, ChosenModel};
use super::launched::node_ranks;
use super::resume::Resumed;
use super::save_folder;
use crate::error::CliError;
use crate::flags::check_seq_len;
use crate::model_files;
use crate::paths::absolute;
use crate::plan;
use crate::settings::agreement::{self, Unrecorded};
use crate::settings::args::{MeshArgs, TrainArgs};
use crate::settings::batch;
use crate::settings::collectives::{self, Route};
use crate::settings::epochs::{self, Course};
use crate::settings::mesh::{Shares, check_tensor_flags};
use crate::settings::muon::MuonArgs;
use crate::settings::offload::resolve_folders;
use crate::settings::quantise::QuantiseArgs;
use crate::settings::record::{
    ActivationRecord, BatchRecord, CommunicationRecord, FORMAT, PROGRAM, RunRecord, SavingRecord,
    new_run_id,
};
use crate::settings::resolve::{raise_live_limit, recorded_dtype, settings, trim_bucket};
use crate::settings::samples::{self, Samples};
use crate::settings::sources::{Conditions, RunSources, Sources};
use crate::settings::validation::{self, BatchRows, ValidationRecord};
use crate::settings::{autos, unused_keys};
use zero_config::{Batch, DsConfig};

/// The GPU of a rank.
#[derive(Clone, Debug)]
pub(crate) struct Gpu {
    pub(crate) name: String,
    pub(crate) memory_bytes: u64,
}

/// The parts of a run, before they are recorded.
pub(crate) struct RunParts<'a> {
    pub(crate) from: RunSources<'a>,
    pub(crate) resumed: Option<&'a Resumed>,
    pub(crate) run: Conditions,
    pub(crate) device: Option<Gpu>,
    pub(crate) model: ChosenModel,
    pub(crate) data: ChosenData,
    /// The epochs that decide the last step.
    epochs: Option<f64>,
    /// Where its steps begin in the data.
    place: DataPosition,
    pub(crate) settings: Settings,
    /// The route of collectives over all ranks.
    pub(crate) route: Route,
    pub(crate) sizes: Sizes,
    pub(crate) options: ModelOptions,
    pub(crate) saving: SavingRecord,
    pub(crate) saves_to: Option<PathBuf>,
    pub(crate) validation: Option<(ValidationOptions, ValidationRecord)>,
    pub(crate) samples: Option<Samples>,
    /// Files to keep beside the checkpoints.
    pub(crate) model_files: Option<ModelFiles>,
    /// The id of the run, and of those that it resumes.
    pub(crate) ids: (String, Vec<String>),
}

impl<'a> RunParts<'a> {
    /// Opens the model and the data, and chooses all settings.
    ///
    /// # Errors
    /// Flags, files or folders that the run cannot use.
    pub(crate) fn new(
        from: RunSources<'a>,
        resumed: Option<&'a Resumed>,
        run: Conditions,
        device: Option<Gpu>,
        notices: &mut Vec<String>,
    ) -> Result<Self, CliError> {
        let args = from.args;
        let ranks = run.ranks;
        let all = from.sources().all;
        let shares = Shares::new(&from.sources(), ranks)?;
        let batches = ranks / shares.ranks_of_batch();
        let mut model = ChosenModel::find(args, resumed, ranks, shares.tensor, notices)?;
        let sizes = Sizes::new(&from, &model, batches)?;
        let kept = resumed.and_then(|resumed| resumed.kept.as_deref());
        let mut data = ChosenData::open(&from, &model, kept, sizes.seq_len, notices)?;
        sizes.check_data(&all, &model, &data)?;
        let rows_of_step = sizes.batch.train_batch_size;
        let course = Course::new(&from, &data.training, rows_of_step, sizes.seq_len);
        data.training.begin_at(course.from);
        let epochs = epochs::steps(&from, &data.training, &course)?;
        let from = RunSources {
            epoch_steps: epochs.map(|(_, steps)| steps),
            ..from
        };
        notices.extend(course.notice(from.steps()));
        // Blocks align the layout, on which the sizes of buckets depend.
        let unaligned = run_settings(&from, resumed, &model, &run, &mut Vec::new())?;
        model.lay_out(unaligned.layout_options())?;
        let mut settings = run_settings(&from, resumed, &model, &run, notices)?;
        settings.grad_accum_steps = sizes.grad_accum();
        let requested = args.mesh.collectives.unwrap_or_default();
        let route = collectives::route(requested, &settings.mesh, ranks, settings.node_ranks)?;
        settings.mesh.two_level = route.two_level;
        notices.extend(idle_flags(&from, &run, &settings));
        let mut options = model_options(&from, &model, &sizes, &settings, run.on_gpus)?;

        options.recompute_gelu = recomputes_gelu(
            &from,
            &model,
            &options,
            &settings,
            ranks,
            device.as_ref(),
            notices,
        );

        let saves_to = checkpoint_folder(args, notices)?;
        let rows = sizes.rows(batches);
        let validation = validation::options(&all, data.held_out.clone(), rows, from.steps())?;
        let samples = samples(&all, resumed, &model, &data)?;
        let model_files = match saves_to {
            Some(_) => Some(files_to_keep(resumed, &model, &data)?),
            None => None,
        };
        let ids = match resumed {
            Some(resumed) => resumed.run_ids(saves_to.as_deref()),
            None => (new_run_id(), Vec::new()),
        };

        Ok(Self {
            saving: SavingRecord::of(&all),
            from,
            resumed,
            run,
            device,
            model,
            data,
            epochs: epochs.map(|(epochs, _)| epochs),
            place: course.from,
            settings,
            route,
            sizes,
            options,
            saves_to,
            validation,
            samples,
            model_files,
            ids,
        })
    }

    /// The content of `run.json`.
    pub(crate) fn record(&self) -> Result<RunRecord, CliError> {
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
            data: self.data.record(self.epochs, self.place),
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
                partition_activations: self.options.partition_activations,
                sequence_parallel: self.options.sequence_parallel,
            },
            communication: CommunicationRecord::of(&self.settings),
            mesh: MeshArgs::of(&self.settings.mesh),
            muon: MuonArgs::of(&self.settings),
            quantise: QuantiseArgs::of(&self.settings),
            offload: self.settings.offload.clone(),
            device: args.device,
            gpu: self.device.as_ref().map(|gpu| gpu.name.clone()),
            saving: self.saving.clone(),
            checkpoint_dir: self.saves_to.as_deref().map(absolute),
            outputs: args.outputs.absolute(),
            validation,
            samples: self.samples.as_ref().map(|samples| samples.record.clone()),
            auto: BTreeMap::new(),
        };

        if let Some(file) = self.from.file {
            let hidden = self.model.config.hidden() as u64;
            record.auto = autos::values(file, &record, hidden).into_iter().collect();
        }

        Ok(record)
    }

    /// The settings that must be equal on all ranks.
    pub(crate) fn agreed(&self, record: &RunRecord) -> Result<RankSettings, CliError> {
        let recompute_gelu = self.from.sources().all.recompute_gelu;
        let recompute_gelu = recompute_gelu.filter(|_| self.run.on_gpus);
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
}

/// The files of the model that the run keeps beside its checkpoints.
fn files_to_keep(
    resumed: Option<&Resumed>,
    model: &ChosenModel,
    data: &ChosenData,
) -> Result<ModelFiles, CliError> {
    let folder = model.folder.as_ref();
    let companions = match folder {
        Some(folder) => folder.companions().map(Path::to_owned),
        None => resumed.and_then(Resumed::companions),
    };
    let tokenizer = data.tokenizer(folder)?;
    model_files::to_keep(companions.as_deref(), tokenizer.as_deref())
}

/// The samples of the run, with the end tokens of the folder that its weights came from.
fn samples(
    args: &TrainArgs,
    resumed: Option<&Resumed>,
    model: &ChosenModel,
    data: &ChosenData,
) -> Result<Option<Samples>, CliError> {
    let folder = model.folder.as_ref();
    let tokenizer = data.tokenizer(folder)?;
    let ends = match (folder, resumed.and_then(Resumed::companions)) {
        (Some(folder), _) => folder.end_tokens(),
        (None, Some(dir)) => companions::end_tokens_in(&dir),
        (None, None) => Ok(Vec::new()),
    };
    let ends = ends.map_err(CliError::usage)?;
    samples::options(args, tokenizer, model.config.vocab_size(), ends)
}

/// Notes about the configuration file and the checkpoint.
pub(crate) fn first_notices(
    file: Option<&DsConfig>,
    resumed: Option<&Resumed>,
    stage: ZeroStage,
    cuts: bool,
) -> Vec<String> {
    let mut notices = Vec::new();
    if let Some(file) = file {
        notices.extend(file.warnings.iter().cloned());
        notices.extend(unused_keys::notices(file, stage, cuts));
    }
    if let Some(resumed) = resumed {
        notices.extend(resumed.notices.iter().cloned());
    }
    notices
}

/// Notes about flags without effect.
fn idle_flags(from: &RunSources<'_>, run: &Conditions, settings: &Settings) -> Vec<String> {
    let Sources {
        flags, recorded, ..
    } = from.sources();
    let no_gpu = (!run.on_gpus).then_some("this run uses no GPU");
    // Those that the recorded run did not have.
    let compares = flags.check_replicas.is_some_and(|steps| steps > 0)
        && flags.check_replicas != recorded.check_replicas;
    let no_replicas = match (run.ranks, run.stage.shards_params()) {
        (1, _) => Some("this run has one rank"),
        (_, true) => Some("at stage 3 without groups each rank holds other parameters"),
        _ => None,
    };
    let recomputed = run
        .checkpointing
        .then_some("checkpointed blocks are recomputed whole");

    let reasons = [
        (
            compares && settings.mesh.shard_group.is_none(),
            "--check-replicas",
            no_replicas,
        ),
        (flags.share_gpus, "--share-gpus", no_gpu),
        (flags.no_matmul_timing, "--no-matmul-timing", no_gpu),
        (
            flags.recompute_gelu == Some(true),
            "--recompute-gelu",
            no_gpu.or(recomputed),
        ),
    ];
    let given = reasons.into_iter().filter(|(is_given, ..)| *is_given);
    given
        .filter_map(|(_, flag, why)| Some(format!("{flag} has no effect: {}", why?)))
        .collect()
}

/// The trainer's settings, but for the micro-batches of a step.
pub(super) fn run_settings(
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
    settings.node_ranks = node_ranks(from.args, run.ranks, settings.mesh.shard_group)?;
    trim_bucket(&mut settings, from.args, &model.layout, run)?;
    raise_live_limit(&mut settings, &model.layout, &model.config, notices);
    Ok(settings)
}

/// The sizes of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    batch: Batch,
    /// Tokens of a sequence.
    seq_len: usize,
}

impl Sizes {
    /// With `batches` ranks that have different sequences.
    pub(super) fn new(
        from: &RunSources<'_>,
        model: &ChosenModel,
        batches: usize,
    ) -> Result<Self, CliError> {
        let config = &model.config;
        let settings = from.sources();
        let keys = from.file.map(|file| file.batch).unwrap_or_default();
        let batch = batch::resolve(&settings, keys, batches)?;
        let seq_len = settings.all.seq_len;
        let seq_len = seq_len.unwrap_or_else(|| batch::default_seq_len(config.max_positions()));
        check_seq_len(seq_len as u64, Some(config))?;
        Ok(Self { batch, seq_len })
    }

    /// Micro-batches per step.
    pub(super) fn grad_accum(&self) -> usize {
        self.batch.grad_accum as usize
    }

    fn check_data(
        &self,
        args: &TrainArgs,
        model: &ChosenModel,
        data: &ChosenData,
    ) -> Result<(), CliError> {
        validation::check_data(
            args,
            &data.training,
            data.held_out.as_ref(),
            model.config.vocab_size(),
            self.seq_len,
        )
    }

    fn rows(&self, batches: usize) -> BatchRows {
        BatchRows {
            step: self.batch.train_batch_size,
            micro_batch: self.batch.micro_batch.saturating_mul(batches as u64),
            seq_len: self.seq_len,
        }
    }
}

/// The options of the model, but for `recompute_gelu`.
pub(super) fn model_options(
    from: &RunSources<'_>,
    model: &ChosenModel,
    sizes: &Sizes,
    settings: &Settings,
    on_gpus: bool,
) -> Result<ModelOptions, CliError> {
    let all = from.sources().all;
    let tensor_ranks = settings.mesh.tensor_ranks.unwrap_or(1);
    let flags = [from.args.partition_activations, from.args.sequence_parallel];
    check_tensor_flags(
        &settings.mesh,
        flags.map(|flag| flag == Some(true)),
        "ranks",
    )?;
    // A recorded setting ends with tensor parallelism, and a key of the file does nothing without
    // it, as in DeepSpeed.
    let with_tensor = |setting: Option<bool>| tensor_ranks > 1 && setting.unwrap_or(false);
    let options = ModelOptions {
        micro_batch: sizes.batch.micro_batch as usize,
        seq_len: sizes.seq_len,
        sequence_ranks: settings.mesh.sequence_ranks(),
        tensor_ranks,
        partition_activations: with_tensor(all.partition_activations),
        sequence_parallel: with_tensor(all.sequence_parallel),
        dtype: settings.dtype,
        activation_checkpointing: from.checkpoints_activations(),
        offload_activations: settings.offload.activations,
        matmul_timing: !from.args.no_matmul_timing,
        recompute_gelu: false,
        layout: settings.layout_options(),
    };
    model.config.check(&options).map_err(CliError::usage)?;
    if on_gpus {
        model.config.check_on_gpu().map_err(CliError::usage)?;
    }
    Ok(options)
}

/// Whether the run recomputes GELU's output in backward: only on a GPU, and by default only where
/// its memory is too small otherwise.
fn recomputes_gelu(
    from: &RunSources<'_>,
    model: &ChosenModel,
    options: &ModelOptions,
    settings: &Settings,
    ranks: usize,
    device: Option<&Gpu>,
    notices: &mut Vec<String>,
) -> bool {
    let Some(gpu) = device else { return false };
    if let Some(recompute) = from.sources().all.recompute_gelu {
        return recompute && !options.activation_checkpointing;
    }
    let request =
        plan::PlanRequest::of_run(&model.config, options, settings, ranks, gpu.memory_bytes);
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
