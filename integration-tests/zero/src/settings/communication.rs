//! Settings of communication, and sizes of launches. All but `--reduce-every-micro-batch` change
//! time and memory, not the numbers.

use zero_shard::ZeroStage;
use zero_trainer::{AT_STAGE_3, OffloadSettings, Settings};

use super::offload::{self, MIN_SUB_GROUP_ELEMS};
use super::sources::{Conditions, Sources};
use crate::error::CliError;
use zero_config::ZeroOptimization;

/// Default elements of a gradient bucket on the host: 2 MiB in fp32. On GPUs a bucket has room for
/// the largest unit.
pub(crate) const BUCKET_ELEMS: usize = 1 << 19;

/// Why a run cannot record steps into CUDA graphs.
pub(crate) fn graph_refusal(run: &Conditions) -> Option<String> {
    let why = match run.stage {
        _ if !run.on_gpus => " requires --device cuda".to_owned(),
        ZeroStage::Three => format!(": {AT_STAGE_3}"),
        _ if run.offloads => {
            ": steps with offload wait for the host and cannot be recorded; use --offload none, or \
             --cuda-graph=false"
                .to_owned()
        }
        _ if run.shares_batches => {
            ": steps whose ranks share micro-batches (--ulysses, --tensor-parallel) are not recorded; \
             use 1 of both, or --cuda-graph=false"
                .to_owned()
        }
        _ => return None,
    };
    Some(format!("--cuda-graph{why}"))
}

/// Sets the settings of communication of a run whose largest unit has `largest_unit` elements with
/// padding.
///
/// # Errors
/// A bucket with less than an element for each rank.
pub(crate) fn apply(
    from: &Sources,
    run: &Conditions,
    largest_unit: u64,
    settings: &mut Settings,
    notices: &mut Vec<String>,
) -> Result<(), CliError> {
    settings.bucket_capacity_elems = bucket_elems(from, run, largest_unit, notices)?;
    settings.reduce_every_micro_batch = from.all.reduce_every_micro_batch.unwrap_or(false);
    settings.overlap = !from.all.no_overlap.unwrap_or(false);
    settings.prefetch = from.all.unflagged.prefetch.unwrap_or_default();
    if !settings.overlap {
        settings.prefetch.ahead = 0;
    }

    // A run that recorded graphs may continue where steps cannot be recorded.
    settings.graphs = match from.given.cuda_graph {
        Some(graphs) => graphs,
        None => from.recorded.cuda_graph == Some(true) && graph_refusal(run).is_none(),
    };
    Ok(())
}

/// The elements of a gradient bucket.
fn bucket_elems(
    from: &Sources,
    run: &Conditions,
    largest_unit: u64,
    notices: &mut Vec<String>,
) -> Result<usize, CliError> {
    let ranks = run.ranks;
    let default = if run.on_gpus {
        (largest_unit as usize).max(ranks)
    } else {
        BUCKET_ELEMS
    };

    let given = from.given.bucket_elems;
    let any_recorded = from.recorded.bucket_elems.map(|elems| elems.max(ranks));
    // Runs on the host record its default, and so did older versions on GPUs, where it is slow.
    let recorded = any_recorded.filter(|&elems| !run.on_gpus || elems != BUCKET_ELEMS);

    if given.or(recorded).is_none() && any_recorded.is_some() && default != BUCKET_ELEMS {
        notices.push(format!(
            "the recorded run has buckets of {BUCKET_ELEMS} elements, the default of a host; on a GPU they have {default}: \
             pass --bucket-elems {BUCKET_ELEMS} to keep them"
        ));
    }

    let bucket = given.or(recorded).unwrap_or(default);
    if bucket < ranks {
        return Err(usage!(
            "--bucket-elems {bucket}: expected at least one element for each of {ranks} ranks"
        ));
    }

    Ok(bucket)
}

/// The elements of one launch of the optimizer.
pub(crate) fn sub_group_elems(
    from: &Sources,
    zero: Option<&ZeroOptimization>,
    offload: &OffloadSettings,
    notices: &mut Vec<String>,
) -> usize {
    let of_file = zero.and_then(|zero| zero.sub_group_elems);
    if let Some(elems) = of_file.filter(|elems| *elems < MIN_SUB_GROUP_ELEMS) {
        notices.push(format!(
            "zero_optimization.sub_group_size {elems} is too small for one launch; using {MIN_SUB_GROUP_ELEMS}"
        ));
    }
    let elems = from.all.unflagged.sub_group_elems.unwrap_or(usize::MAX);
    offload::sub_group_elems(elems, offload)
}

#[cfg(test)]
mod tests {
    use zero_alloc::device::DType;

    use super::*;
    use crate::settings::args::TrainArgs;

    const LARGEST_UNIT: u64 = 1000;
    const RUN: Conditions = Conditions {
        ranks: 2,
        stage: ZeroStage::Two,
        on_gpus: true,
        checkpointing: false,
        offloads: false,
        shares_batches: false,
    };

    fn applied(given: &TrainArgs, recorded: &TrainArgs, run: Conditions) -> Settings {
        let from = Sources::new(given, &TrainArgs::default(), recorded.clone());
        let mut settings = Settings::new(run.stage, DType::F32, zero_models::param_kind);
        apply(&from, &run, LARGEST_UNIT, &mut settings, &mut Vec::new()).unwrap();
        settings
    }

    #[test]
    fn graphs_and_offload_exclude_each_other() {
        let offloads = Conditions {
            offloads: true,
            ..RUN
        };
        let refusal = graph_refusal(&offloads).unwrap();
        assert!(
            refusal.starts_with("--cuda-graph: steps with offload"),
            "{refusal}"
        );
        assert!(graph_refusal(&RUN).is_none());

        let no_flags = TrainArgs::default();
        let graphs = TrainArgs {
            cuda_graph: Some(true),
            ..TrainArgs::default()
        };
        assert!(applied(&graphs, &no_flags, offloads).graphs, "is refused");

        // A resumed run that recorded graphs records none.
        assert!(!applied(&no_flags, &graphs, offloads).graphs);
        assert!(applied(&no_flags, &graphs, RUN).graphs);
    }

    #[test]
    fn bucket_of_gpus_has_room_for_the_largest_unit() {
        let bucket = |bucket_elems| TrainArgs {
            bucket_elems,
            ..TrainArgs::default()
        };
        let elems = |on_gpus, given, recorded| {
            let run = Conditions { on_gpus, ..RUN };
            applied(&bucket(given), &bucket(recorded), run).bucket_capacity_elems
        };

        for recorded in [None, Some(BUCKET_ELEMS)] {
            assert_eq!(elems(true, None, recorded), 1000);
            assert_eq!(elems(false, None, recorded), BUCKET_ELEMS);
        }
        for on_gpus in [true, false] {
            assert_eq!(elems(on_gpus, None, Some(600)), 600);
            assert_eq!(elems(on_gpus, Some(500), Some(600)), 500);
        }
    }
}
