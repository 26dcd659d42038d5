//! The settings of a run: flags override the configuration file, which overrides the defaults. Everything is checked
//! before a rank starts.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use zero_alloc::device::DType;
use zero_ckpt::{ModelSpec, Reader};
use zero_comm::PrefetchOptions;
use zero_kernels::AdamHyper;
use zero_optim::{DynamicScaling, LossScaling, LrSchedule, OptimizerConfig};
use zero_shard::{Layout, ZeroStage};

use super::args::TrainArgs;
use super::{checks, unused_keys};
use crate::cli::CliError;
use crate::cli::flags::{check_seq_len, find_model};
use crate::config::DsConfig;
use crate::data::{DataSource, Dataset};
use crate::hf::HfFolder;
use crate::model::Pass;
use crate::model::config::GptConfig;
use crate::model::gpt2::{Gpt2Options, passes};
use crate::trainer::{AT_STAGE_3, RunOptions, SHARD_ALIGN_ELEMS, Settings, TrainerState};
use crate::workload::{GptWorkload, Weights};

/// Default elements of a gradient bucket for all models: 2 MiB in fp32.
const BUCKET_ELEMS: usize = 1 << 19;

/// The settings of a run that is ready to start.
pub(super) struct RunSetup {
    pub(super) ranks: usize,
    /// The name of the GPU; `None` on the host.
    pub(super) device: Option<String>,
    pub(super) settings: Settings,
    pub(super) workload: GptWorkload,
    pub(super) options: RunOptions,
    pub(super) layout: Layout,
    pub(super) model_name: String,
    pub(super) metrics: Option<PathBuf>,
    pub(super) report: Option<PathBuf>,
    /// Notes for the user, one line each.
    pub(super) notices: Vec<String>,
}

impl RunSetup {
    /// Builds and checks the settings for `ranks` ranks, on the GPU named `device` or on the host.
    pub(super) fn new(args: &TrainArgs, ranks: usize, device: Option<String>) -> Result<Self, CliError> {
        checks::numbers(args, ranks)?;
        let file = args.config.as_deref().map(DsConfig::open).transpose().map_err(CliError::usage)?;
        let file = file.as_ref();
        checks::offload(args, file, device.is_some())?;
        let mut notices: Vec<String> = file.map(|f| f.warnings.clone()).unwrap_or_default();
        notices.extend(file.map(unused_keys::notices).unwrap_or_default());
        let model_name = args.model.clone().unwrap_or_else(|| "nano".to_owned());
        let (config, folder) = find_model(&model_name, &mut notices)?;
        let tokenizer = folder.as_ref().and_then(HfFolder::tokenizer);
        let weights = folder.map_or(Weights::Initial(args.seed), |folder| Weights::Folder(Box::new(folder)));
        let data = Dataset::open(&DataSource { path: args.data.clone(), tokenizer }).map_err(CliError::usage)?;
        let layout = Layout::new(&config.units(), ranks as u64, SHARD_ALIGN_ELEMS).map_err(CliError::usage)?;
        let largest_unit = layout.units().iter().map(|u| u.padded_elems).max().unwrap_or(0);
        let mut settings = settings(args, file, ranks, largest_unit)?;
        check_graphs(&settings, device.is_some())?;
        notices.extend(raise_live_limit(&mut settings, &layout, &config));
        let batch = file.map(|f| f.batch).unwrap_or_default();
        let flags = [args.micro_batch, args.grad_accum].map(|n| n.map(|n| n as u64));
        let batch = batch.resolve(ranks as u64, flags[0], flags[1], 4).map_err(CliError::usage)?;
        checks::accumulation(batch.grad_accum)?;
        let seq_len = args.seq_len.unwrap_or(config.n_positions.min(128));
        check_seq_len(seq_len as u64, Some(config.n_positions as u64))?;
        data.validate(config.vocab_size, seq_len).map_err(CliError::usage)?;
        let checkpointing = file.is_some_and(|f| f.activation_checkpointing.is_some());
        let model_options = Gpt2Options {
            micro_batch: batch.micro_batch as usize,
            seq_len,
            dtype: settings.dtype,
            activation_checkpointing: args.activation_checkpointing || checkpointing,
        };
        model_options.validate(&config).map_err(CliError::usage)?;
        let settings = Settings { grad_accum_steps: batch.grad_accum as usize, ..settings };

        if let Some(dir) = &args.resume {
            notices.extend(check_resume(dir, &layout, &data, args.seed, settings.dtype)?);
        }
        // Without --data and --model the run is a demonstration, and its checkpoint is input for the other commands.
        let demonstration = (args.data.is_none() && args.model.is_none()).then(|| PathBuf::from("checkpoints"));
        let checkpoint = args.checkpoint.clone().or_else(|| args.resume.clone()).or(demonstration);
        if checkpoint.is_none() && (args.checkpoint_every > 0 || args.keep_last.is_some()) {
            return Err(CliError::Usage("--checkpoint-every and --keep-last require --checkpoint DIR".into()));
        }
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        Ok(Self {
            ranks,
            device,
            options: RunOptions {
                steps: args.steps.unwrap_or(1000),
                micro_batch: batch.micro_batch as usize,
                seq_len,
                seed: args.seed,
                checkpoint: checkpoint.map(|dir| (dir, args.checkpoint_every)),
                keep_last: args.keep_last,
                resume: args.resume.clone(),
                cancel: Arc::default(),
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
            metrics: args.metrics.clone(),
            report: args.report.clone(),
            notices,
        })
    }

    /// Whether to record a timeline: always on the host, where it costs nothing, and on a GPU for a report.
    pub(super) fn is_recorded(&self) -> bool {
        self.device.is_none() || self.report.is_some()
    }
}

/// Raises a limit of live parameters that is too low for one pass of the model, and returns a note about it.
fn raise_live_limit(settings: &mut Settings, layout: &Layout, config: &GptConfig) -> Option<String> {
    let elems = |unit: &usize| layout.units().get(*unit).map_or(0, |u| u.padded_elems as usize);
    let pass = |pass: &Pass| pass.forward_reads.iter().map(elems).sum::<usize>();
    let least = passes(config).iter().map(pass).max().unwrap_or(0);
    let limit = &mut settings.prefetch.max_live_elems;
    if !settings.stage.shards_params() || *limit >= least {
        return None;
    }
    let notice =
        format!("stage3_max_live_parameters {limit} is less than one pass of the model reads; using {least}");
    *limit = least;
    Some(notice)
}

fn settings(
    args: &TrainArgs,
    file: Option<&DsConfig>,
    ranks: usize,
    largest_unit: u64,
) -> Result<Settings, CliError> {
    let stage = args.stage.or(file.map(|f| u64::from(f.zero.stage))).unwrap_or(3);
    let stage = ZeroStage::from_number(stage)
        .ok_or_else(|| CliError::Usage(format!("--stage {stage}: expected 0, 1, 2 or 3")))?;
    let dtype = args.dtype.map_or(file.map_or(DType::F32, |f| f.dtype), DType::from);
    let loss_scaling = match file {
        Some(f) if f.dtype == dtype => f.loss_scaling.clone(),
        _ if dtype == DType::F16 => LossScaling::Dynamic(DynamicScaling::default()),
        _ => LossScaling::NONE,
    };
    let optimizer = file.and_then(|f| f.optimizer.as_ref());
    let pytorch = AdamHyper { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, decoupled: true };
    let mut hyper = optimizer.map_or(pytorch, |o| o.hyper);
    if let Some(decay) = args.weight_decay {
        hyper.weight_decay = decay;
    }
    let schedule = match args.warmup_steps {
        Some(0) => LrSchedule::Constant,
        Some(warmup_steps) => LrSchedule::LinearWarmup { warmup_steps },
        None => file.and_then(|f| f.schedule.clone()).unwrap_or_default(),
    };
    let rules = OptimizerConfig {
        hyper,
        lr: args.lr.or(optimizer.map(|o| o.lr)).unwrap_or(1e-3),
        schedule,
        max_grad_norm: args.clip.or(file.map(|f| f.gradient_clipping)).unwrap_or(0.0),
        loss_scaling,
    };
    rules.check().map_err(CliError::usage)?;
    // A bucket holds gradients of at most one unit, so DeepSpeed's default of 5e8 elements is reduced.
    let from_file = file.map(|f| f.zero.reduce_bucket_elems.min(largest_unit).max(ranks as u64) as usize);
    let bucket = args.bucket_elems.or(from_file).unwrap_or(BUCKET_ELEMS);
    if bucket < ranks {
        return Err(CliError::Usage(format!(
            "--bucket-elems {bucket}: expected at least one element for each of {ranks} ranks"
        )));
    }
    let overlap = !args.no_overlap && file.is_none_or(|f| f.zero.overlap_comm);
    let prefetch = PrefetchOptions {
        ahead: usize::from(overlap && file.is_none_or(|f| f.zero.prefetch_bucket_elems > 0)),
        max_live_elems: file.map_or(usize::MAX, |f| f.zero.max_live_elems as usize),
        persistence_threshold_elems: file.map_or(0, |f| f.zero.persistence_threshold_elems as usize),
    };
    let limit = Duration::from_secs(args.time_limit);
    Ok(Settings {
        stage,
        dtype,
        grad_accum_steps: 1,
        bucket_capacity_elems: bucket,
        overlap,
        prefetch,
        optimizer: rules,
        graphs: args.cuda_graph,
        limit,
    })
}

/// Rejects `--cuda-graph` for steps that cannot be recorded.
fn check_graphs(settings: &Settings, on_cuda: bool) -> Result<(), CliError> {
    match settings.stage {
        _ if !settings.graphs => Ok(()),
        _ if !on_cuda => Err(CliError::Usage("--cuda-graph requires --device cuda".to_owned())),
        ZeroStage::Three => Err(CliError::Usage(format!("--cuda-graph: {AT_STAGE_3}"))),
        _ => Ok(()),
    }
}

/// Checks that the checkpoint is of this model; returns notes about other differences.
fn check_resume(
    dir: &Path,
    layout: &Layout,
    data: &Dataset,
    seed: u64,
    dtype: DType,
) -> Result<Vec<String>, CliError> {
    let reader = Reader::open(dir).map_err(CliError::usage)?;
    if let Some(difference) = reader.manifest().model.difference(&ModelSpec::from(layout)) {
        let path = reader.path().display();
        return Err(CliError::Usage(format!(
            "--resume {path}: the checkpoint belongs to another model: {difference}"
        )));
    }
    let mut notices = reader.notices().to_vec();
    let state = TrainerState::of(&reader).map_err(CliError::usage)?;
    let was = &reader.manifest().dtype;
    if was != dtype.name() {
        notices.push(format!("the checkpoint was trained in {was} and this run in {dtype}: the loss scale is reset"));
    }
    if state.data_fingerprint != data.fingerprint() {
        notices.push("the data differs from the checkpoint's: the loss curve will differ".to_owned());
    }
    if state.seed != seed {
        notices.push(format!(
            "--seed {seed} differs from the checkpoint's seed {}: the order of the data will differ",
            state.seed
        ));
    }
    Ok(notices)
}
