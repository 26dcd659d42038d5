//! From the sources of a run's settings to the trainer's.

use std::time::Duration;

use zero_alloc::device::DType;
use zero_models::ModelConfig;
use zero_shard::{Layout, ZeroStage};
use zero_trainer::{OffloadSettings, Settings};

use super::args::TrainArgs;
use super::communication;
use super::formats_of_run;
use super::mesh::{self, Shares};
use super::offload::{self, Offloaded};
use super::optimizer;
use super::sources::{Conditions, RunSources};
use crate::error::CliError;
use crate::flags::DTypeFlag;
use zero_config::{DsConfig, ZeroOptimization};

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
    /// Elements of a head's queries.
    pub(crate) head_elems: usize,
    /// Units of adapters, if only they are trained.
    pub(crate) adapters: Option<usize>,
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
        tensor_parallel: from.all.mesh.tensor_parallel.is_some_and(|ranks| ranks > 1),
    };

    let recorded = sources.recorded.map(|run| &run.offload);
    let offload = offload::settings(
        &args.offload,
        sources.file_with_block(),
        recorded.unwrap_or(&OffloadSettings::default()),
        offloaded,
        notices,
    )?;

    let scaling = optimizer::loss_scaling(&from, dtype, sources.earlier_dtype());
    let rules = optimizer::rules(sources, &from, scaling, notices)?;
    let sub_group = communication::sub_group_elems(&from, zero.as_ref(), &offload, notices);
    let rules = rules.sub_group_elems(sub_group);
    optimizer::check(&rules, args)?;

    let shares = Shares::new(&from, shape.ranks)?;
    let run = Conditions {
        ranks: shape.ranks,
        stage,
        on_gpus: shape.on_gpus,
        checkpointing: offloaded.checkpointing,
        offloads: offload.is_any(),
        shares_batches: shares.ranks_of_batch() > 1,
    };

    let mut settings = Settings {
        mesh: mesh::settings(&from, &run, notices)?,
        muon: from
            .all
            .muon
            .settings(rules.hyper.weight_decay, Some(shape.head_elems)),
        optimizer: rules,
        groups: optimizer::groups(&from.all),
        adapters: shape.adapters,
        offload,
        limit: Duration::from_secs(args.time_limit),
        ..Settings::new(stage, dtype, zero_models::param_kind)
    };

    if let (Some(flag), false) = (args.muon.flag(), settings.names_muon()) {
        return Err(usage!(
            "{flag} is Muon's: add --optimizer muon, or \"optimizer\": \"muon\" to a group of param_groups"
        ));
    }
    communication::apply(&from, &run, shape.largest_unit, &mut settings, notices)?;
    formats_of_run::apply(&from, &mut settings)?;
    match communication::graph_refusal(&run).filter(|_| settings.graphs) {
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
    let largest = groups.largest_trained(layout) as usize;
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
    DTypeFlag::of(dtype).ok_or_else(|| usage!("--dtype {dtype}: not a type of parameters"))
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
            head_elems: 4,
            adapters: None,
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
