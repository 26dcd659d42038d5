//! The settings of a run: flags override the configuration file, which overrides the defaults.
//! Everything is checked before a rank starts.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use zero_optim::RankSettings;
use zero_shard::Layout;

use super::exchange::{self, Unrecorded};
use crate::settings::args::TrainArgs;
use crate::settings::record::{
    BatchRecord, CommunicationRecord, DataRecord, FORMAT, ModelRecord, PROGRAM, RUN_JSON,
    RunRecord, new_run_id,
};
use super::resume::Resumed;
use super::settings::{
    RunShape, check_graphs, checkpoints_activations, raise_live_limit, resolved_autos, settings,
    stage,
};
use crate::settings::validation::Rows;
use super::{checks, memory_check, metrics_file, observer, save_folder, unused_keys, validation};
use crate::flags::{check_seq_len, find_model};
use crate::settings::offload::resolve_folders;
use crate::error::CliError;
use crate::flags::DTypeFlag;
use crate::plan;
use crate::config::DsConfig;
use crate::data::{DataSource, FolderFiles, is_token_file, tokenizer_checksum};
use crate::workload::{GptWorkload, Weights};
use zero_models::gpt2::Gpt2Options;
use zero_models::hf::HfFolder;
use zero_trainer::{ReplicaChecks, RunOptions, SHARD_ALIGN_ELEMS, Settings};

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
    pub(crate) fn new(
        args: &TrainArgs,
        resumed: Option<&Resumed>,
        ranks: usize,
        device: Option<Gpu>,
    ) -> Result<Self, CliError> {
        checks::numbers(args, ranks)?;
        let file = args
            .config
            .as_deref()
            .map(DsConfig::open)
            .transpose()
            .map_err(CliError::usage)?;
        let file = file.as_ref();
        let recorded = resumed.and_then(|resumed| resumed.record.as_ref());
        let mut notices: Vec<String> = file.map(|f| f.warnings.clone()).unwrap_or_default();
        let base = resumed
            .map(|resumed| resumed.base(ranks))
            .unwrap_or_default();
        let stage = stage(args, file, &base)?;
        notices.extend(
            file.map(|file| unused_keys::notices(file, stage))
                .unwrap_or_default(),
        );
        notices.extend(
            resumed
                .map(|resumed| resumed.notices.clone())
                .unwrap_or_default(),
        );
        let seed = args.seed.unwrap_or(0);
        let (model_name, config, folder) =
            match (&args.model, resumed.and_then(|resumed| resumed.model())) {
                (None, Some((name, config))) => (name, config, None),
                (model, _) => {
                    let name = model.clone().unwrap_or_else(|| "nano".to_owned());
                    let (config, folder) = find_model(&name, &mut notices)?;
                    (name, config, folder)
                }
            };
        let layout = Layout::new(&config.units(), ranks as u64, SHARD_ALIGN_ELEMS)
            .map_err(CliError::usage)?;
        if let Some(resumed) = resumed {
            resumed.check_model(&model_name, &config, &layout)?;
        }
        let is_own_flag = args.check_replicas != recorded.and_then(|record| record.check_replicas);
        if args.check_replicas.is_some_and(|steps| steps > 0) && is_own_flag {
            let why = match (ranks, stage.shards_params()) {
                (1, _) => Some("this run has one rank"),
                (_, true) => Some("at stage 3 each rank holds other parameters"),
                _ => None,
            };
            notices.extend(why.map(|why| format!("--check-replicas has no effect: {why}")));
        }
        if args.share_gpus && device.is_none() {
            notices.push("--share-gpus has no effect: this run uses no GPU".to_owned());
        }
        if args.no_matmul_timing && device.is_none() {
            notices.push("--no-matmul-timing has no effect: this run uses no GPU".to_owned());
        }
        let source = data_source(args, recorded, folder.as_ref())?;
        let (data, held_out) = validation::open(args, &source)?;
        notices.extend(validation::notices(&data, held_out.as_ref()));
        let initial = match (recorded, &folder) {
            (Some(recorded), _) => recorded.model.weights.clone(),
            (None, Some(folder)) => absolute(folder.path()),
            (None, None) => format!("seed {seed}"),
        };
        let weights = folder.map_or(Weights::Initial(seed), |folder| {
            Weights::Folder(Box::new(folder))
        });
        let largest_unit = layout
            .units()
            .iter()
            .map(|u| u.padded_elems)
            .max()
            .unwrap_or(0);
        let steps = args.steps.unwrap_or(1000);
        let shape = RunShape {
            ranks,
            largest_unit,
            on_gpus: device.is_some(),
            hidden: config.n_embd as u64,
            steps,
        };
        let (mut settings, notes) = settings(args, file, &base, shape)?;
        notices.extend(notes);
        // A run that recorded graphs may continue on the host.
        settings.graphs &= device.is_some() || args.cuda_graph.is_some();
        check_graphs(&settings, device.is_some())?;
        resumed.map_or(Ok(()), |resumed| {
            resumed.check_scratch(args, &settings.offload)
        })?;
        resolve_folders(&mut settings.offload)?;
        let groups = settings.resolve_groups(&layout).map_err(CliError::usage)?;
        if device.is_some() && args.bucket_elems.is_none() {
            let trained = layout
                .units()
                .iter()
                .enumerate()
                .filter(|(unit, _)| !groups.is_frozen(*unit));
            let largest = trained
                .map(|(_, unit)| unit.padded_elems as usize)
                .max()
                .unwrap_or(0);
            settings.bucket_capacity_elems = settings.bucket_capacity_elems.min(largest).max(ranks);
        }
        notices.extend(raise_live_limit(&mut settings, &layout, &config));
        let batch = resumed.map_or_else(
            || file.map(|f| f.batch).unwrap_or_default(),
            |resumed| resumed.batch(file),
        );
        let flags = [args.micro_batch, args.grad_accum].map(|n| n.map(|n| n as u64));
        let batch = batch
            .resolve(ranks as u64, flags[0], flags[1], base.micro_batch)
            .map_err(CliError::usage)?;
        checks::accumulation(batch.grad_accum)?;
        let seq_len = args.seq_len.unwrap_or(config.n_positions.min(128));
        check_seq_len(seq_len as u64, Some(config.n_positions as u64))?;
        validation::check_data(args, &data, held_out.as_ref(), config.vocab_size, seq_len)?;
        let mut model_options = Gpt2Options {
            micro_batch: batch.micro_batch as usize,
            seq_len,
            dtype: settings.dtype,
            activation_checkpointing: checkpoints_activations(args, file, &base),
            offload_activations: settings.offload.activations,
            matmul_timing: !args.no_matmul_timing,
            recompute_gelu: false,
        };
        model_options.validate(&config).map_err(CliError::usage)?;
        let settings = Settings {
            grad_accum_steps: batch.grad_accum as usize,
            ..settings
        };
        model_options.recompute_gelu = match (&device, args.recompute_gelu.or(base.recompute_gelu))
        {
            (None, _) => false,
            (Some(_), Some(recompute)) => recompute && !model_options.activation_checkpointing,
            (Some(gpu), None) => {
                let request = plan::Request::of_run(
                    &config,
                    &model_options,
                    &settings,
                    ranks,
                    gpu.memory_bytes,
                );
                plan::evaluate(&request, settings.stage).map(|plan| plan.recompute_gelu).unwrap_or_else(|error| {
                    notices
                        .push(format!("GELU's output is kept, since this run's memory cannot be planned: {error}"));
                    false
                })
            }
        };
        if args.recompute_gelu == Some(true) && !model_options.recompute_gelu {
            let why = if device.is_none() {
                "this run uses no GPU"
            } else {
                "checkpointed blocks are recomputed whole"
            };
            notices.push(format!("--recompute-gelu has no effect: {why}"));
        }

        let checkpoint = match &args.checkpoint {
            _ if args.no_checkpoint => None,
            Some(dir) => Some(dir.clone()),
            None => Some(save_folder::default(&mut notices)?),
        };
        let checkpoint_every = args.checkpoint_every.unwrap_or(0);
        let micro_batch = batch.micro_batch.saturating_mul(ranks as u64);
        let rows = Rows {
            step: batch.train_batch_size,
            micro_batch,
            seq_len,
        };
        let (validation, validation_record) =
            validation::options(args, held_out, rows, steps)?.unzip();
        let (run, resumed_runs) = match resumed {
            Some(resumed) => resumed.run_ids(checkpoint.as_deref()),
            None => (new_run_id(), Vec::new()),
        };
        let dtype = DTypeFlag::from_name(settings.dtype.name()).ok_or_else(|| {
            CliError::Usage(format!(
                "--dtype {}: not a type of parameters",
                settings.dtype
            ))
        })?;
        let record = RunRecord {
            format: FORMAT,
            run: run.clone(),
            resumed_runs: resumed_runs.clone(),
            program: PROGRAM.to_owned(),
            model: ModelRecord {
                name: if Path::new(&model_name).is_dir() {
                    absolute(Path::new(&model_name))
                } else {
                    model_name.clone()
                },
                // Valid JSON by construction.
                config: serde_json::from_str(&config.to_hf_json("float32")).unwrap_or_default(),
                parameters: config.parameter_count(),
                weights: initial,
            },
            data: DataRecord {
                path: absolute(source.path.as_deref().unwrap_or(Path::new("."))),
                default: source.path.is_none() || source.files == FolderFiles::AsDefault,
                tokenizer: source.tokenizer.as_deref().map(absolute),
                fingerprint: format!("{:016x}", data.fingerprint()),
                tokens: data.len_tokens(),
            },
            optimizer: settings.optimizer.clone(),
            param_groups: settings.groups.clone(),
            dtype,
            batch: BatchRecord {
                ranks,
                micro_batch: batch.micro_batch,
                grad_accum: batch.grad_accum,
                seq_len,
                step_tokens: batch.train_batch_size.saturating_mul(seq_len as u64),
            },
            seed,
            steps,
            stage: settings.stage.number().into(),
            activation_checkpointing: model_options.activation_checkpointing,
            recompute_gelu: model_options.recompute_gelu,
            communication: CommunicationRecord::of(&settings),
            offload: settings.offload.clone(),
            device: args.device,
            gpu: device.as_ref().map(|gpu| gpu.name.clone()),
            checkpoint_every,
            keep_last: args.keep_last,
            check_replicas: args.check_replicas,
            checkpoint_dir: checkpoint.as_deref().map(absolute),
            metrics: args.metrics.as_deref().map(absolute),
            report: args.report.as_deref().map(absolute),
            validation: validation_record,
            auto: file
                .map(|f| resolved_autos(f, &settings, &batch, shape))
                .unwrap_or_default()
                .into_iter()
                .collect(),
        };
        let in_order = source
            .path
            .as_deref()
            .is_some_and(|path| path.is_file() && is_token_file(path));
        let tokenizer = source.tokenizer.as_deref().filter(|_| !in_order);
        let unrecorded = Unrecorded {
            settings: &settings,
            layout: &layout,
            in_order,
            tokenizer: tokenizer
                .map(tokenizer_checksum)
                .transpose()
                .map_err(CliError::usage)?,
            loads_weights: resumed.is_none() && matches!(weights, Weights::Folder(_)),
            recompute_gelu: device
                .as_ref()
                .and_then(|_| args.recompute_gelu.or(base.recompute_gelu)),
            saves: checkpoint.is_some(),
        };
        let agreed = agreement::settings(&record, &unrecorded);
        notices.extend(
            resumed
                .map(|resumed| resumed.differences(&record))
                .unwrap_or_default(),
        );
        let breakdown = args.breakdown || file.is_some_and(|file| file.wall_clock_breakdown);
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        let mut setup = Self {
            ranks,
            device,
            options: RunOptions {
                steps,
                micro_batch: batch.micro_batch as usize,
                seq_len,
                seed,
                checkpoint: checkpoint.map(|dir| (dir, checkpoint_every)),
                keep_last: args.keep_last,
                check_replicas: match args.check_replicas {
                    None => ReplicaChecks::AtSaves,
                    Some(0) => ReplicaChecks::Never,
                    Some(steps) => ReplicaChecks::Every(steps),
                },
                validation,
                resume: args.resume.clone(),
                cancel: Arc::default(),
                run_id: run,
                resumed_runs,
                documents: [(RUN_JSON.to_owned(), record.document())].into(),
                breakdown,
                log_memory: breakdown || args.report.is_some(),
            },
            workload: GptWorkload {
                options: model_options,
                config,
                weights,
                data,
                threads: args.threads.unwrap_or_else(|| (cores / ranks).max(1)),
            },
            settings,
            layout,
            model_name,
            record,
            agreed,
            first_step: resumed.map_or(0, Resumed::step),
            metrics: args.metrics.clone(),
            recorded_metrics: args.recorded_metrics,
            report: args.report.clone(),
            notices,
        };
        setup.notices.extend(memory_check::offload_notice(&setup));
        setup.check_outputs()?;
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
            observer::check_report(dir, checkpoints, &self.options.runs())?;
        }
        Ok(())
    }

    /// Whether to record a timeline: always on the host, where it costs nothing, and on a GPU for a
    /// report or a breakdown.
    pub(crate) fn is_recorded(&self) -> bool {
        self.device.is_none() || self.report.is_some() || self.options.breakdown
    }
}

/// The data of the run: that of the flag, of the resumed run, or the text in the current folder.
fn data_source(
    args: &TrainArgs,
    recorded: Option<&RunRecord>,
    folder: Option<&HfFolder>,
) -> Result<DataSource, CliError> {
    let is_tokens = args
        .data
        .as_ref()
        .is_some_and(|path| path.is_file() && is_token_file(path))
        && args
            .val_data
            .as_ref()
            .is_none_or(|path| is_token_file(path));
    if let Some(tokenizer) = args.tokenizer.as_ref().filter(|_| is_tokens) {
        return Err(CliError::Usage(format!(
            "--tokenizer {}: --data is a file of tokens, which needs none; remove --tokenizer",
            tokenizer.display()
        )));
    }
    for (flag, path) in [("--data", &args.data), ("--tokenizer", &args.tokenizer)] {
        if let Some(path) = path.as_ref().filter(|path| !path.exists()) {
            return Err(CliError::Usage(format!(
                "{flag} {}: no such file or folder",
                path.display()
            )));
        }
    }
    let tokenizer = args
        .tokenizer
        .clone()
        .or_else(|| folder.and_then(HfFolder::tokenizer));
    let Some(recorded) = recorded.map(|record| &record.data) else {
        return Ok(DataSource {
            path: args.data.clone(),
            tokenizer,
            files: FolderFiles::All,
        });
    };
    let path = match &args.data {
        Some(path) => Some(path.clone()),
        None if recorded.default && recorded.path == absolute(Path::new(".")) => None,
        None if Path::new(&recorded.path).exists() => Some(PathBuf::from(&recorded.path)),
        None => {
            return Err(CliError::Usage(format!(
                "{}: the data of the resumed run does not exist; pass its new path with --data",
                recorded.path
            )));
        }
    };
    let tokenizer = match (tokenizer, &recorded.tokenizer) {
        (None, Some(recorded)) if !path.as_deref().is_some_and(is_token_file) => {
            if !Path::new(recorded).exists() {
                return Err(CliError::Usage(format!(
                    "{recorded}: the tokenizer of the resumed run does not exist; pass its new path with --tokenizer"
                )));
            }
            Some(PathBuf::from(recorded))
        }
        (tokenizer, _) => tokenizer,
    };
    let is_default = recorded.default && args.data.is_none();
    let files = if is_default {
        FolderFiles::AsDefault
    } else {
        FolderFiles::All
    };
    Ok(DataSource {
        path,
        tokenizer,
        files,
    })
}

/// The absolute path, for a record that is read in another current folder.
pub(crate) fn absolute(path: &Path) -> String {
    let absolute = path.canonicalize().or_else(|_| std::path::absolute(path));
    absolute.as_deref().unwrap_or(path).display().to_string()
}
