//! From the sources of a run's settings to the trainer's.

use std::time::Duration;

use zero_alloc::device::DType;
use zero_models::ModelConfig;
use zero_shard::{Layout, ZeroStage};
use zero_trainer::{OffloadSettings, Settings};

use super::activations::ACTIVATION_CHECKPOINTING;
use super::args::TrainArgs;
use super::communication::{self, CUDA_GRAPH};
use super::mesh::{self, Shares};
use super::offload::{self, Offloaded};
use super::optimizer;
use super::record::RunRecord;
use super::row::{Conditions, Row, Saved, Setting, Sources};
use super::stage_choice::StageChoice;
use crate::config::{DsConfig, ZeroOptimization};
use crate::error::CliError;
use crate::flags::DTypeFlag;

/// By default 3, or DeepSpeed's default 0 with a configuration file. Auto is resolved before.
const STAGE: Setting<u64, RunRecord> = Setting {
    of_flags: |args| args.stage.and_then(StageChoice::number),
    of_zero: |zero| Some(zero.stage.into()),
    of_run: |run| Some(run.stage),
    ..Setting::new(
        Row::new("stage", "--stage").key("zero_optimization.stage"),
        || 3,
    )
};

const DTYPE: Setting<DType, RunRecord> = Setting {
    of_flags: |args| args.dtype.map(DType::from),
    of_file: |file| file.dtype,
    of_run: |run| Some(run.dtype.into()),
    ..Setting::new(Row::new("dtype", "--dtype"), || DType::F32)
};

/// A resumed run has the seed of its checkpoint.
const SEED: Setting<u64, RunRecord> = Setting {
    of_flags: |args| args.seed,
    ..Setting::new(Row::new("seed", "--seed"), || 0)
};

/// The default ends within a minute on two slow cores.
const STEPS: Setting<u64, RunRecord> = Setting {
    of_flags: |args| args.steps,
    of_run: |run| Some(run.steps),
    ..Setting::new(Row::new("steps", "--steps"), || 400)
};

/// The kind of a run, before the settings of any topic. A setting that others are derived from comes
/// before them.
pub(crate) const ROWS: &[Row] = &[
    Row::new("program", ""),
    Row::new("format", "").not_reported(),
    Row::new("batch.ranks", "--ranks"),
    STAGE.row,
    DTYPE.row,
    Row::new("model", "--model"),
    // How weights are drawn no longer matters to a run that resumes.
    Row::new("model.config.initializer_range", "--model").not_reported(),
    Row::new("layout", "--model or --ranks"),
    SEED.row,
    STEPS.row,
];

/// The sources of a run's settings, and what its checkpoint has apart from `run.json`.
#[derive(Clone, Copy)]
pub(crate) struct RunSources<'a> {
    pub(crate) args: &'a TrainArgs,
    pub(crate) file: Option<&'a DsConfig>,
    pub(crate) recorded: Option<&'a RunRecord>,
    /// The last step, if epochs decide it.
    pub(crate) epoch_steps: Option<u64>,
    /// The checkpoint that the run resumes.
    pub(crate) saved: Option<Saved>,
}

impl<'a> RunSources<'a> {
    /// The configuration file, if its block `zero_optimization` counts.
    fn file_with_block(&self) -> Option<&'a DsConfig> {
        self.file
            .filter(|file| file.has_stage || self.saved.is_none())
    }

    /// The sources without `zero_optimization`, whose sizes depend on the model.
    pub(crate) fn without_sizes(&self) -> Sources<'a, RunRecord> {
        self.with_sizes(None)
    }

    fn with_sizes(&self, zero: Option<&'a ZeroOptimization>) -> Sources<'a, RunRecord> {
        Sources {
            args: self.args,
            file: self.file,
            zero,
            recorded: self.recorded,
        }
    }

    /// Whether the run chooses its stage: a resumed one keeps its stage.
    pub(crate) fn has_auto_stage(&self) -> bool {
        let in_file = || {
            self.file
                .is_some_and(|file| file.is_auto("zero_optimization.stage"))
        };
        let is_auto = match self.args.stage {
            Some(flag) => flag == StageChoice::Auto,
            None => in_file(),
        };
        is_auto && self.saved.is_none()
    }

    /// The ZeRO stage.
    ///
    /// # Errors
    /// A number other than 0 to 3.
    pub(crate) fn stage(&self) -> Result<ZeroStage, CliError> {
        let from = self.with_sizes(self.file_with_block().map(|file| &file.zero));
        let stage = match (from.given(&STAGE), self.saved) {
            (Some(given), _) => given,
            (None, Some(saved)) => from.recorded(&STAGE).unwrap_or(saved.stage),
            (None, None) => from.value(&STAGE),
        };
        ZeroStage::from_number(stage)
            .ok_or_else(|| CliError::Usage(format!("--stage {stage}: expected 0, 1, 2, 3 or auto")))
    }

    /// The type of parameters of the run that is resumed.
    fn earlier_dtype(&self) -> Option<DType> {
        let recorded = self.without_sizes().recorded(&DTYPE);
        recorded.or(self.saved.and_then(|saved| saved.dtype))
    }

    fn dtype(&self) -> DType {
        let given = self.without_sizes().given(&DTYPE);
        given.or(self.earlier_dtype()).unwrap_or_else(DTYPE.default)
    }

    pub(crate) fn seed(&self) -> u64 {
        self.without_sizes().value(&SEED)
    }

    pub(crate) fn steps(&self) -> u64 {
        let steps = self.epoch_steps;
        steps.unwrap_or_else(|| self.without_sizes().value(&STEPS))
    }

    /// Whether the run recomputes activations in backward.
    pub(crate) fn checkpoints_activations(&self) -> bool {
        self.without_sizes()
            .part(|run| &run.activations)
            .value(&ACTIVATION_CHECKPOINTING)
    }
}

/// The numbers of the run that the settings depend on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunShape {
    pub(crate) ranks: usize,
    /// Elements of the largest unit, with padding.
    pub(crate) largest_unit: u64,
    /// Whether the ranks are on GPUs.
    pub(crate) on_gpus: bool,
    /// The hidden size of the model.
    pub(crate) hidden: u64,
}

/// The trainer's settings of a run, and notes for the user. `"auto"` in the file has the value that
/// accelerate and the Hugging Face Trainer give it.
///
/// # Errors
/// A flag or a key that the run cannot follow.
pub(crate) fn settings(
    sources: &RunSources<'_>,
    shape: RunShape,
    notices: &mut Vec<String>,
) -> Result<Settings, CliError> {
    let args = sources.args;
    let stage = sources.stage()?;
    let dtype = sources.dtype();
    note_other_types(sources.file, dtype, notices);
    let zero = sources
        .file_with_block()
        .map(|file| sized_block(file, shape, stage));
    let from = sources.with_sizes(zero.as_ref());

    let offloaded = Offloaded {
        stage,
        dtype,
        checkpointing: sources.checkpoints_activations(),
    };

    let recorded = sources.recorded.map(|run| &run.offload);
    let offload = offload::settings(
        &args.offload,
        sources.file_with_block(),
        recorded.unwrap_or(&OffloadSettings::default()),
        offloaded,
        notices,
    )?;

    let from_optimizer = from.part(|run| &run.optimizer);
    let from_communication = from.part(|run| &run.communication);
    let scaling = optimizer::loss_scaling(&from_optimizer, dtype, sources.earlier_dtype());
    let rules = optimizer::rules(&from_optimizer, scaling, sources.steps(), notices)?;
    let sub_group = communication::sub_group_elems(&from_communication, &offload, notices);
    let rules = rules.sub_group_elems(sub_group);
    optimizer::check(&rules, args)?;

    let shares = Shares::new(&from.part(|run| &run.mesh), shape.ranks)?;
    let run = Conditions {
        ranks: shape.ranks,
        stage,
        on_gpus: shape.on_gpus,
        checkpointing: offloaded.checkpointing,
        offloads: offload.is_any(),
        shares_batches: shares.ranks_of_batch() > 1,
    };

    let mut settings = Settings {
        mesh: mesh::settings(&from.part(|run| &run.mesh), &run, notices)?,
        optimizer: rules,
        groups: optimizer::groups(&from.part(|run| &run.param_groups)),
        offload,
        limit: Duration::from_secs(args.time_limit),
        ..Settings::new(stage, dtype, zero_models::param_kind)
    };

    communication::apply(
        &from_communication,
        &run,
        shape.largest_unit,
        &mut settings,
        notices,
    )?;

    match CUDA_GRAPH.refusal(&run).filter(|_| settings.graphs) {
        Some(refusal) => Err(CliError::Usage(refusal)),
        None => Ok(settings),
    }
}

/// `zero_optimization` with the sizes for this model and the default of this stage.
fn sized_block(file: &DsConfig, shape: RunShape, stage: ZeroStage) -> ZeroOptimization {
    let mut zero = file.zero_for(shape.hidden);
    // A bucket holds gradients of at most one unit, so DeepSpeed's default of 5e8 elements is
    // reduced.
    zero.reduce_bucket_elems = zero
        .reduce_bucket_elems
        .min(shape.largest_unit)
        .max(shape.ranks as u64);
    zero.overlap_comm = Some(zero.overlaps_at(stage.number()));
    zero
}

/// Notes the keys that request another type for gradients than `dtype`.
fn note_other_types(file: Option<&DsConfig>, dtype: DType, notices: &mut Vec<String>) {
    let requested = file.map(|file| &file.requested_types[..]);
    for (key, requested) in requested.unwrap_or_default() {
        if *requested != dtype {
            notices.push(format!(
                "{key} {requested} is ignored: it is {dtype}, the type of the parameters"
            ));
        }
    }
}

/// Limits the default bucket of a GPU to the largest unit that is trained.
///
/// # Errors
/// The rules of the tensors do not fit the model.
pub(crate) fn trim_bucket(
    settings: &mut Settings,
    args: &TrainArgs,
    layout: &Layout,
    run: &Conditions,
) -> Result<(), CliError> {
    let groups = settings.resolve_groups(layout).map_err(CliError::usage)?;
    if !run.on_gpus || args.bucket_elems.is_some() {
        return Ok(());
    }
    let mut largest = 0;
    for (unit, layout) in layout.units().iter().enumerate() {
        if !groups.is_frozen(unit) {
            largest = largest.max(layout.padded_elems as usize);
        }
    }
    settings.bucket_capacity_elems = settings.bucket_capacity_elems.min(largest).max(run.ranks);
    Ok(())
}

/// Raises a limit of live parameters that is too low for one pass of the model, and notes it.
pub(crate) fn raise_live_limit(
    settings: &mut Settings,
    layout: &Layout,
    config: &ModelConfig,
    notices: &mut Vec<String>,
) {
    let mut least = 0;
    for pass in config.passes() {
        let units = pass
            .forward_reads
            .iter()
            .filter_map(|unit| layout.units().get(*unit));
        let elems = units.map(|unit| unit.padded_elems as usize).sum();
        least = least.max(elems);
    }

    let limit = &mut settings.prefetch.max_live_elems;
    if !settings.stage.shards_params() || *limit >= least {
        return;
    }
    notices.push(format!(
        "stage3_max_live_parameters {limit} is less than one pass of the model reads; using {least}"
    ));
    *limit = least;
}

/// The type of parameters for `run.json`.
///
/// # Errors
/// No flag has this type.
pub(crate) fn recorded_dtype(dtype: DType) -> Result<DTypeFlag, CliError> {
    DTypeFlag::from_name(dtype.name())
        .ok_or_else(|| CliError::Usage(format!("--dtype {dtype}: not a type of parameters")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sub_group_elems(text: &str) -> usize {
        let args = TrainArgs::default();
        let file = DsConfig::parse(text).unwrap();
        let sources = RunSources {
            args: &args,
            file: Some(&file),
            recorded: None,
            epoch_steps: None,
            saved: None,
        };
        let shape = RunShape {
            ranks: 2,
            largest_unit: 1000,
            on_gpus: false,
            hidden: 8,
        };
        let settings = settings(&sources, shape, &mut Vec::new()).unwrap();
        settings.optimizer.sub_group_elems
    }

    #[test]
    fn offload_cuts_sub_groups() {
        let with = |keys: &str| {
            format!(
                r#"{{"zero_optimization": {{"stage": 2, "offload_optimizer": {{"device": "cpu"}}{keys}}}}}"#
            )
        };
        assert_eq!(sub_group_elems(&with("")), 1 << 20);
        assert_eq!(
            sub_group_elems(&with(r#", "sub_group_size": 1e9"#)),
            1_000_000_000
        );
        assert_eq!(
            sub_group_elems(r#"{"zero_optimization": {"stage": 2}}"#),
            usize::MAX
        );
    }
}
