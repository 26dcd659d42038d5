//! The settings of a run: flags override the configuration file, which overrides the defaults. Everything is checked
//! before a rank starts.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use zero_alloc::device::DType;
use zero_ckpt::{ModelSpec, Reader};
use zero_shard::Layout;

use super::args::TrainArgs;
use super::settings::{Base, check_graphs, raise_live_limit, settings};
use super::{checks, unused_keys};
use crate::cli::CliError;
use crate::cli::flags::{check_seq_len, find_model};
use crate::config::DsConfig;
use crate::data::{DataSource, Dataset};
use crate::hf::HfFolder;
use crate::model::gpt2::Gpt2Options;
use crate::trainer::{RunOptions, SHARD_ALIGN_ELEMS, Settings, TrainerState};
use crate::workload::{GptWorkload, Weights};

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
        let base = Base::default();
        let mut settings = settings(args, file, &base, ranks, largest_unit)?;
        check_graphs(&settings, device.is_some())?;
        notices.extend(raise_live_limit(&mut settings, &layout, &config));
        let batch = file.map(|f| f.batch).unwrap_or_default();
        let flags = [args.micro_batch, args.grad_accum].map(|n| n.map(|n| n as u64));
        let batch = batch.resolve(ranks as u64, flags[0], flags[1], base.micro_batch).map_err(CliError::usage)?;
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
