//! Settings of communication, and sizes of launches. All but `--reduce-every-micro-batch` change
//! time and memory, not the numbers.

use serde::{Deserialize, Serialize};
use zero_comm::PrefetchOptions;
use zero_shard::ZeroStage;
use zero_trainer::{AT_STAGE_3, OffloadSettings, Settings};

use super::offload::{self, MIN_SUB_GROUP_ELEMS};
use super::row::{Conditions, Row, Setting, Sources};
use crate::error::CliError;

/// Default elements of a gradient bucket on the host: 2 MiB in fp32. On GPUs a bucket has room for
/// the largest unit.
pub(crate) const BUCKET_ELEMS: usize = 1 << 19;

/// The settings of communication in `run.json`. A limit that is `None` does not apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CommunicationRecord {
    /// Whether stages 0 and 1 reduced gradients after every micro-batch, as all runs without this
    /// field did.
    #[serde(default = "always")]
    pub(crate) reduce_every_micro_batch: bool,
    /// Elements of a gradient bucket.
    pub(crate) bucket_elems: usize,
    /// Whether communication overlaps with compute.
    pub(crate) overlap: bool,
    /// Stage 3: how many uses ahead units are gathered.
    pub(crate) gather_ahead: Option<usize>,
    pub(crate) gather_ahead_elems: Option<usize>,
    pub(crate) max_live_elems: Option<usize>,
    pub(crate) persistence_threshold_elems: usize,
    /// Elements of one launch of the optimizer.
    #[serde(default)]
    pub(crate) sub_group_elems: Option<usize>,
    /// Whether steps are recorded into CUDA graphs.
    #[serde(default)]
    pub(crate) cuda_graph: bool,
}

fn always() -> bool {
    true
}

const REDUCE_EVERY_MICRO_BATCH: Setting<bool, CommunicationRecord> = Setting {
    of_flags: |args| args.reduce_every_micro_batch,
    of_run: |run| Some(run.reduce_every_micro_batch),
    // Ranks compare what the setting does; see `agreement`.
    ..Setting::new(
        Row::new("communication.sums_locally", "--reduce-every-micro-batch"),
        || false,
    )
};

/// By default [`BUCKET_ELEMS`], on GPUs the largest trained unit.
const BUCKET: Setting<Option<usize>, CommunicationRecord> = Setting {
    of_flags: |args| args.bucket_elems.map(Some),
    of_zero: |zero| Some(Some(zero.reduce_bucket_elems as usize)),
    of_run: |run| Some(Some(run.bucket_elems)),
    ..Setting::new(
        Row::new("communication.bucket_elems", "--bucket-elems")
            .key("zero_optimization.reduce_bucket_size"),
        || None,
    )
};

const OVERLAP: Setting<bool, CommunicationRecord> = Setting {
    of_flags: |args| args.no_overlap.map(|no_overlap| !no_overlap),
    of_zero: |zero| zero.overlap_comm,
    of_run: |run| Some(run.overlap),
    ..Setting::new(Row::new("communication.overlap", "--no-overlap"), || true)
};

/// A run without overlap gathers nothing ahead; see [`apply`].
const PREFETCH: Setting<PrefetchOptions, CommunicationRecord> = Setting {
    of_zero: |zero| {
        let ahead = if zero.prefetch_bucket_elems == 0 {
            0
        } else {
            usize::MAX
        };
        let prefetch = PrefetchOptions::default()
            .ahead(ahead)
            .ahead_elems(zero.prefetch_bucket_elems as usize)
            .max_live_elems(zero.max_live_elems as usize)
            .persistence_threshold_elems(zero.persistence_threshold_elems as usize);
        Some(prefetch)
    },
    of_run: |run| Some(run.prefetch()),
    ..Setting::new(ALL.row, PrefetchOptions::default)
};

/// Most elements of one launch of the optimizer.
const SUB_GROUP: Setting<usize, CommunicationRecord> = Setting {
    of_zero: |zero| {
        let elems = zero
            .sub_group_elems
            .map(|elems| elems.max(MIN_SUB_GROUP_ELEMS));
        Some(elems.map_or(usize::MAX, |elems| elems as usize))
    },
    of_run: |run| Some(run.sub_group_elems.unwrap_or(usize::MAX)),
    ..Setting::new(ALL.row, || usize::MAX)
};

pub(crate) const CUDA_GRAPH: Setting<bool, CommunicationRecord> = Setting {
    of_flags: |args| args.cuda_graph,
    of_run: |run| Some(run.cuda_graph),
    refused: |run| {
        match run.stage {
        _ if !run.on_gpus => Some(" requires --device cuda".to_owned()),
        ZeroStage::Three => Some(format!(": {AT_STAGE_3}")),
        _ if run.offloads => Some(
            ": steps with offload wait for the host and cannot be recorded; use --offload none, or \
             --cuda-graph=false"
                .to_owned(),
        ),
        _ if run.shares_batches => Some(
            ": steps whose ranks share micro-batches (--ulysses, --tensor-parallel) are not recorded; \
             use 1 of both, or --cuda-graph=false"
                .to_owned(),
        ),
        _ => None,
    }
    },
    ..Setting::new(Row::new("communication.cuda_graph", "--cuda-graph"), || {
        false
    })
};

/// The settings that only a configuration file has.
const ALL: Setting<(), CommunicationRecord> = Setting::new(
    Row::new("communication", "zero_optimization of --config"),
    || (),
);

pub(crate) const ROWS: &[Row] = &[
    REDUCE_EVERY_MICRO_BATCH.row,
    BUCKET.row,
    OVERLAP.row,
    CUDA_GRAPH.row,
    ALL.row,
];

impl CommunicationRecord {
    pub(crate) fn of(settings: &Settings) -> Self {
        let limit = |n: usize| (n != usize::MAX).then_some(n);
        let prefetch = &settings.prefetch;
        Self {
            reduce_every_micro_batch: settings.reduce_every_micro_batch,
            bucket_elems: settings.bucket_capacity_elems,
            overlap: settings.overlap,
            gather_ahead: limit(prefetch.ahead),
            gather_ahead_elems: limit(prefetch.ahead_elems),
            max_live_elems: limit(prefetch.max_live_elems),
            persistence_threshold_elems: prefetch.persistence_threshold_elems,
            sub_group_elems: limit(settings.optimizer.sub_group_elems),
            cuda_graph: settings.graphs,
        }
    }

    fn prefetch(&self) -> PrefetchOptions {
        let limit = |n: Option<usize>| n.unwrap_or(usize::MAX);
        // Without overlap it was 0; a flag may enable overlap again.
        let ahead = if self.overlap {
            limit(self.gather_ahead)
        } else {
            1
        };
        PrefetchOptions::default()
            .ahead(ahead)
            .ahead_elems(limit(self.gather_ahead_elems))
            .max_live_elems(limit(self.max_live_elems))
            .persistence_threshold_elems(self.persistence_threshold_elems)
    }
}

/// Sets the settings of communication of a run whose largest unit has `largest_unit` elements with
/// padding.
///
/// # Errors
/// A bucket with less than an element for each rank.
pub(crate) fn apply(
    from: &Sources<'_, CommunicationRecord>,
    run: &Conditions,
    largest_unit: u64,
    settings: &mut Settings,
    notices: &mut Vec<String>,
) -> Result<(), CliError> {
    settings.bucket_capacity_elems = bucket_elems(from, run, largest_unit, notices)?;
    settings.reduce_every_micro_batch = from.value(&REDUCE_EVERY_MICRO_BATCH);
    settings.overlap = from.value(&OVERLAP);
    settings.prefetch = from.value(&PREFETCH);
    if !settings.overlap {
        settings.prefetch.ahead = 0;
    }

    // A run that recorded graphs may continue where steps cannot be recorded.
    settings.graphs = match from.given(&CUDA_GRAPH) {
        Some(graphs) => graphs,
        None => from.value(&CUDA_GRAPH) && (CUDA_GRAPH.refused)(run).is_none(),
    };
    Ok(())
}

/// The elements of a gradient bucket.
fn bucket_elems(
    from: &Sources<'_, CommunicationRecord>,
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

    let given = from.given(&BUCKET).flatten();
    let any_recorded = from
        .recorded(&BUCKET)
        .flatten()
        .map(|elems| elems.max(ranks));
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
        return Err(CliError::Usage(format!(
            "--bucket-elems {bucket}: expected at least one element for each of {ranks} ranks"
        )));
    }

    Ok(bucket)
}

/// The elements of one launch of the optimizer.
pub(crate) fn sub_group_elems(
    from: &Sources<'_, CommunicationRecord>,
    offload: &OffloadSettings,
    notices: &mut Vec<String>,
) -> usize {
    if let Some(elems) = from
        .zero
        .and_then(|zero| zero.sub_group_elems)
        .filter(|elems| *elems < MIN_SUB_GROUP_ELEMS)
    {
        notices.push(format!(
            "zero_optimization.sub_group_size {elems} is too small for one launch; using {MIN_SUB_GROUP_ELEMS}"
        ));
    }
    offload::sub_group_elems(from.value(&SUB_GROUP), offload)
}

#[cfg(test)]
mod tests {
    use zero_alloc::device::DType;

    use super::*;
    use crate::config::ZeroOptimization;
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

    fn applied(
        args: &TrainArgs,
        zero: Option<&ZeroOptimization>,
        recorded: Option<&CommunicationRecord>,
        run: Conditions,
    ) -> Settings {
        let from = Sources {
            args,
            file: None,
            zero,
            recorded,
        };
        let mut settings = Settings::new(run.stage, DType::F32, zero_models::param_kind);
        apply(&from, &run, LARGEST_UNIT, &mut settings, &mut Vec::new()).unwrap();
        settings
    }

    fn recorded() -> CommunicationRecord {
        let kind_of = zero_models::param_kind;
        CommunicationRecord::of(&Settings::new(ZeroStage::Two, DType::F32, kind_of))
    }

    #[test]
    fn graphs_and_offload_exclude_each_other() {
        let offloads = Conditions {
            offloads: true,
            shares_batches: false,
            ..RUN
        };

        let refusal = CUDA_GRAPH.refusal(&offloads).unwrap();
        assert!(
            refusal.starts_with("--cuda-graph: steps with offload"),
            "{refusal}"
        );
        assert!(CUDA_GRAPH.refusal(&RUN).is_none());

        let flag = TrainArgs {
            cuda_graph: Some(true),
            ..TrainArgs::default()
        };

        assert!(applied(&flag, None, None, offloads).graphs, "is refused");

        // A resumed run that recorded graphs records none.
        let no_flags = TrainArgs::default();
        let resumed = CommunicationRecord {
            cuda_graph: true,
            ..recorded()
        };

        assert!(!applied(&no_flags, None, Some(&resumed), offloads).graphs);
        assert!(applied(&no_flags, None, Some(&resumed), RUN).graphs);
    }

    #[test]
    fn bucket_of_gpus_has_room_for_the_largest_unit() {
        let no_flags = TrainArgs::default();
        let flag = TrainArgs {
            bucket_elems: Some(500),
            ..TrainArgs::default()
        };

        let file = ZeroOptimization {
            reduce_bucket_elems: 700,
            ..ZeroOptimization::default()
        };

        let of_host = CommunicationRecord {
            bucket_elems: BUCKET_ELEMS,
            ..recorded()
        };

        let other = CommunicationRecord {
            bucket_elems: 600,
            ..recorded()
        };

        let elems = |on_gpus, args, file, recorded| {
            let run = Conditions { on_gpus, ..RUN };
            applied(args, file, recorded, run).bucket_capacity_elems
        };

        for recorded in [None, Some(&of_host)] {
            assert_eq!(elems(true, &no_flags, None, recorded), 1000);
            assert_eq!(elems(false, &no_flags, None, recorded), BUCKET_ELEMS);
        }

        for on_gpus in [true, false] {
            assert_eq!(elems(on_gpus, &no_flags, None, Some(&other)), 600);
            assert_eq!(elems(on_gpus, &no_flags, Some(&file), None), 700);
            assert_eq!(elems(on_gpus, &flag, Some(&file), Some(&other)), 500);
        }
    }
}
