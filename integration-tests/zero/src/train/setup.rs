//! A run that is ready to start. Everything is checked before a rank starts.

use std::sync::Arc;

use zero_alloc::device::Device;
use zero_ckpt::Reader;
use zero_optim::RankSettings;
use zero_shard::Layout;
use zero_trainer::{RunOptions, Settings};

use super::csv_file::CsvLines;
use super::exchange::StartExchange;
use super::launched::host_threads;
use super::metrics_file::MetricsLines;
use super::parts::{self, Gpu, RunParts};
use super::resume::Resumed;
use super::room::{self, Saves};
use super::{auto_stage, checks, event_files, line_file, report_folder, save_folder};
use crate::error::CliError;
use crate::memory::{self, RunMemory};
use crate::paths::absolute;
use crate::settings::args::TrainArgs;
use crate::settings::collectives::Route;
use crate::settings::mesh::Shares;
use crate::settings::outputs::{Output, OutputPaths};
use crate::settings::record::{RUN_JSON, RunRecord};
use crate::settings::samples::Samples;
use crate::settings::sources::RunSources;
use crate::workload::{ModelWorkload, Weights};
use zero_config::DsConfig;

/// The settings of a run that is ready to start.
pub(crate) struct RunSetup {
    pub(crate) ranks: usize,
    /// `None` on the host.
    pub(crate) device: Option<Gpu>,
    pub(crate) settings: Settings,
    pub(crate) workload: ModelWorkload,
    pub(crate) options: RunOptions,
    pub(crate) layout: Layout,
    pub(crate) model_name: String,
    /// The content of `run.json`.
    pub(crate) record: RunRecord,
    /// The settings that must be equal on all ranks.
    pub(crate) agreed: RankSettings,
    /// The route of collectives over all ranks.
    pub(crate) route: Route,
    /// The completed steps at the start.
    pub(crate) first_step: u64,
    /// The checkpoint that the run resumes.
    checkpoint: Option<Arc<Reader>>,
    pub(crate) outputs: OutputPaths,
    /// Turns samples into text.
    pub(crate) samples: Option<Samples>,
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
        checks::monitors(file.as_ref())?;
        let mut args = args.clone();
        if let Some(file) = &file {
            args.outputs = args.outputs.with_file(file);
        }
        let args = &args;
        let from = RunSources {
            args,
            file: file.as_ref(),
            recorded: resumed.and_then(|resumed| resumed.record.as_ref()),
            epoch_steps: None,
            saved: resumed.map(Resumed::saved),
        };
        let auto_stage = auto_stage::choose(&from, ranks, device.as_ref())?;
        let with_stage = auto_stage.as_ref().map(|auto| TrainArgs {
            stage: Some(auto.stage),
            ..args.clone()
        });
        let from = RunSources {
            args: with_stage.as_ref().unwrap_or(args),
            ..from
        };

        let run = from.conditions(ranks, from.stage()?, device.is_some());

        let shares = Shares::new(&from.sources(), ranks)?;
        let cuts = shares.tensor > 1;
        let mut notices = parts::first_notices(from.file, resumed, run.stage, cuts);
        notices.extend(auto_stage.map(|auto| auto.why));
        let parts = RunParts::new(from, resumed, run, device, &mut notices)?;
        let record = parts.record()?;
        let agreed = parts.agreed(&record)?;
        let changes = resumed.map(|resumed| resumed.differences(&record));
        notices.extend(changes.unwrap_or_default());
        let mut setup = Self::of(parts, record, agreed, notices);
        let notice = memory::offload_notice(&setup.memory(), setup.device.is_some());
        setup.notices.extend(notice);
        setup.check_outputs()?;

        Ok(setup)
    }

    fn of(
        parts: RunParts<'_>,
        record: RunRecord,
        agreed: RankSettings,
        notices: Vec<String>,
    ) -> Self {
        let RunParts { from, run, .. } = parts;
        let args = from.args;
        let seed = from.seed();
        let in_file = from.file.is_some_and(|file| file.wall_clock_breakdown);
        let breakdown = args.breakdown || in_file;
        let (run_id, resumed_runs) = parts.ids;

        let options = RunOptions {
            steps: from.steps(),
            micro_batch: parts.options.micro_batch,
            seq_len: parts.options.seq_len,
            seed,
            checkpoint: parts
                .saves_to
                .map(|folder| (folder, parts.saving.checkpoint_every)),
            keep_last: parts.saving.keep_last,
            check_replicas: parts.saving.replica_checks(),
            validation: parts.validation.map(|(options, _)| options),
            samples: parts
                .samples
                .as_ref()
                .map(|samples| samples.options.clone()),
            resume: args.resume.clone(),
            cancel: Arc::default(),
            signal: Arc::default(),
            run_id,
            resumed_runs,
            documents: [(RUN_JSON.to_owned(), record.document())].into(),
            model_files: parts.model_files,
            breakdown,
            log_memory: breakdown || args.outputs.report.is_some(),
        };

        let workload = ModelWorkload {
            options: parts.options,
            config: parts.model.config,
            weights: match parts.model.folder {
                Some(folder) => Weights::Folder(Box::new(folder)),
                None => {
                    Weights::Initial(parts.resumed.and_then(Resumed::base_seed).unwrap_or(seed))
                }
            },
            adapters: parts.model.adapters,
            adapter_seed: seed,
            data: parts.data.training,
            threads: host_threads(args, run.ranks),
        };

        Self {
            ranks: run.ranks,
            device: parts.device,
            settings: parts.settings,
            workload,
            options,
            layout: parts.model.layout,
            model_name: parts.model.name,
            record,
            agreed,
            route: parts.route,
            first_step: parts.resumed.map_or(0, Resumed::step),
            checkpoint: parts.resumed.map(Resumed::reader),
            outputs: args.outputs.clone(),
            samples: parts.samples,
            notices,
        }
    }

    /// The parts of the run that decide the memory of a rank.
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
        let setup = Self::agree_on_route(setup, start)?;
        let setup = start.agree(setup, |setup| setup.agreed.clone())?;
        if let (Weights::Folder(folder), None) = (&setup.workload.weights, &setup.options.resume) {
            start.agree_on_weights(folder)?;
        }
        Ok(setup)
    }

    /// Sets the route of collectives on which all ranks agree. A rank without a setup takes part.
    fn agree_on_route<D: Device>(
        setup: Result<Self, CliError>,
        start: &StartExchange<'_, D>,
    ) -> Result<Result<Self, CliError>, CliError> {
        let own = setup
            .as_ref()
            .map_or(Route::UNKNOWN, |setup| setup.route.code());
        let codes = start.exchange_u64(own)?;
        Ok(setup.and_then(|mut setup| {
            setup.route = setup.route.agreed(&codes)?;
            let two_level = setup.route.two_level;
            setup.settings.mesh.two_level = two_level;
            setup.record.mesh.two_level = two_level;
            setup.document_record();
            Ok(setup)
        }))
    }

    /// Saves the record as it is now in each checkpoint.
    fn document_record(&mut self) {
        let document = self.record.document();
        self.options.documents.insert(RUN_JSON.to_owned(), document);
    }

    /// Reserves the folder of checkpoints that no flag names; see [`save_folder::reserve`].
    pub(crate) fn reserve_folder(&mut self) -> Result<(), CliError> {
        let Some((folder, _)) = &mut self.options.checkpoint else {
            return Ok(());
        };
        save_folder::reserve(folder, &mut self.notices)?;
        self.record.checkpoint_dir = Some(absolute(folder));
        self.document_record();
        Ok(())
    }

    /// Checks that the run may write to the folder of checkpoints and to its outputs.
    fn check_outputs(&mut self) -> Result<(), CliError> {
        if let Some((dir, _)) = &self.options.checkpoint {
            save_folder::check(dir, &self.options.store())?;
            let states = self.settings.state_kinds(self.settings.names_muon()).len();
            let model = &self.workload.config;
            let saves = Saves::of(&self.options, self.first_step, model, states);
            self.notices.extend(room::check(dir, &saves)?);
        }
        for output in Output::ALL {
            let Some(path) = self.outputs.path(output) else {
                continue;
            };
            let (options, first) = (&self.options, self.first_step);
            let notices = match output {
                Output::Metrics => line_file::check::<MetricsLines>(path, options, first)?,
                Output::Csv => line_file::check::<CsvLines>(path, options, first)?,
                Output::Tensorboard => event_files::check(path, options, first)?,
                Output::Report => {
                    let note = report_folder::check(path, options, first)?;
                    note.into_iter().collect()
                }
            };
            self.notices.extend(notices);
        }
        Ok(())
    }

    /// Lets other runs remove the checkpoint that this one has loaded.
    pub(crate) fn release_checkpoint(&self) {
        if let Some(checkpoint) = &self.checkpoint {
            checkpoint.release();
        }
    }

    /// Whether to record a timeline: always on the host, where it costs nothing, and on a GPU for a
    /// report or a breakdown.
    pub(crate) fn is_recorded(&self) -> bool {
        self.device.is_none() || self.outputs.report.is_some() || self.options.breakdown
    }
}
