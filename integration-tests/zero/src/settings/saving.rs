//! Settings of checkpoints.

use serde::{Deserialize, Serialize};
use zero_trainer::ReplicaChecks;

use super::row::{Row, Setting, Sources};

/// The settings of checkpoints in `run.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavingRecord {
    /// Interval of checkpoints in steps; 0 saves only at the end.
    pub(crate) checkpoint_every: u64,
    pub(crate) keep_last: Option<usize>,
    /// The flag `--check-replicas`: the interval in steps, or 0 for no comparison; by default
    /// before each checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) check_replicas: Option<u64>,
}

const CHECKPOINT_EVERY: Setting<u64, SavingRecord> = Setting {
    of_flags: |args| args.checkpoint_every,
    of_run: |run| Some(run.checkpoint_every),
    ..Setting::new(Row::new("checkpoint_every", "--checkpoint-every"), || 0)
};

const KEEP_LAST: Setting<Option<usize>, SavingRecord> = Setting {
    of_flags: |args| args.keep_last.map(Some),
    of_run: |run| Some(run.keep_last),
    ..Setting::new(Row::new("keep_last", "--keep-last"), || None)
};

/// By default [`ReplicaChecks::AtSaves`].
pub(crate) const CHECK_REPLICAS: Setting<Option<u64>, SavingRecord> = Setting {
    of_flags: |args| args.check_replicas.map(Some),
    of_run: |run| Some(run.check_replicas),
    idle: |run| match (run.ranks, run.stage.shards_params()) {
        (1, _) => Some("this run has one rank"),
        (_, true) => Some("at stage 3 without groups each rank holds other parameters"),
        _ => None,
    },
    ..Setting::new(Row::new("check_replicas", "--check-replicas"), || None)
};

pub(crate) const ROWS: &[Row] = &[
    Row::new("checkpoint", "--checkpoint or --no-checkpoint"),
    CHECKPOINT_EVERY.row,
    KEEP_LAST.row,
    CHECK_REPLICAS.row,
];

impl SavingRecord {
    pub(crate) fn of(from: &Sources<'_, Self>) -> Self {
        Self {
            checkpoint_every: from.value(&CHECKPOINT_EVERY),
            keep_last: from.value(&KEEP_LAST),
            check_replicas: from.value(&CHECK_REPLICAS),
        }
    }

    pub(crate) fn replica_checks(&self) -> ReplicaChecks {
        match self.check_replicas {
            None => ReplicaChecks::AtSaves,
            Some(0) => ReplicaChecks::Never,
            Some(steps) => ReplicaChecks::Every(steps),
        }
    }
}

/// Whether a flag requests comparisons that the recorded run did not have.
pub(crate) fn requests_replica_checks(from: &Sources<'_, SavingRecord>) -> bool {
    let recorded = from.recorded(&CHECK_REPLICAS).flatten();
    let steps = from.args.check_replicas;
    steps.is_some_and(|steps| steps > 0) && steps != recorded
}
