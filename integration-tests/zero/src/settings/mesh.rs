//! The groups of ranks over which states are sharded. They change the order in which gradients are
//! summed, so the numbers within rounding.

use serde::{Deserialize, Serialize};
use zero_shard::{Sharding, ZeroStage};
use zero_trainer::MeshSettings;

use super::args::OptimizerRanks;
use super::row::{Conditions, Row, Setting, Sources};
use crate::error::CliError;

/// The groups in `run.json`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MeshRecord {
    /// Ranks of a group; `None`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) shard_group: Option<usize>,
    /// The ranks that share the optimizer state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) shard_optimizer: Option<OptimizerRanks>,
    /// Ranks of a group that shares the parameters only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) hpz: Option<usize>,
}

const SHARD_GROUP: Setting<Option<usize>, MeshRecord> = Setting {
    of_flags: |args| args.mesh.shard_group.map(Some),
    of_zero: |zero| zero.mics_shard_ranks.map(|ranks| Some(ranks as usize)),
    of_run: |run| Some(run.shard_group),
    ..Setting::new(
        Row::new("mesh.shard_group", "--shard-group").key("zero_optimization.mics_shard_size"),
        || None,
    )
};

const SHARD_OPTIMIZER: Setting<Option<OptimizerRanks>, MeshRecord> = Setting {
    of_flags: |args| args.mesh.shard_optimizer.map(Some),
    of_run: |run| Some(run.shard_optimizer),
    ..Setting::new(
        Row::new("mesh.shard_optimizer", "--shard-optimizer"),
        || None,
    )
};

const HPZ: Setting<Option<usize>, MeshRecord> = Setting {
    of_flags: |args| args.mesh.hpz.map(Some),
    of_zero: |zero| zero.hpz_ranks.map(|ranks| Some(ranks as usize)),
    of_run: |run| Some(run.hpz),
    ..Setting::new(
        Row::new("mesh.hpz", "--hpz").key("zero_optimization.zero_hpz_partition_size"),
        || None,
    )
};

pub(crate) const ROWS: &[Row] = &[SHARD_GROUP.row, SHARD_OPTIMIZER.row, HPZ.row];

impl MeshRecord {
    /// The record of settings.
    pub(crate) fn of(mesh: &MeshSettings) -> Self {
        let group = mesh.shard_group;
        match mesh.sharding {
            Sharding::Secondary => Self {
                hpz: group,
                ..Self::default()
            },
            sharding => Self {
                shard_group: group,
                shard_optimizer: (group.is_some() && sharding == Sharding::Hybrid)
                    .then_some(OptimizerRanks::World),
                hpz: None,
            },
        }
    }

    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// The states that the groups of `ranks` ranks share; `None` without groups.
    pub(crate) fn describe(&self, ranks: usize) -> Option<String> {
        let group = self.shard_group.or(self.hpz).filter(|group| *group > 0)?;
        let what = match (self.hpz, self.shard_optimizer) {
            (Some(_), _) => {
                "share the parameters; gradients and optimizer state are shared by all (hpZ)"
            }
            (None, Some(OptimizerRanks::World)) => {
                "share parameters and gradients; the optimizer state is shared by all (HFSDP)"
            }
            _ => "share all states (HSDP)",
        };
        Some(format!("{} of {group} ranks {what}", ranks / group))
    }

    fn settings(self) -> Result<MeshSettings, CliError> {
        let world = self.shard_optimizer == Some(OptimizerRanks::World);
        let (shard_group, sharding) = match (self.shard_group, self.hpz) {
            (Some(_), Some(_)) => {
                return Err(CliError::Usage(
                    "--shard-group and --hpz exclude each other: hpZ shards gradients and optimizer \
                     state over all ranks; use --shard-group K --shard-optimizer world to shard \
                     gradients over groups, too"
                        .to_owned(),
                ));
            }
            (None, Some(group)) => (Some(group), Sharding::Secondary),
            (Some(group), None) if world => (Some(group), Sharding::Hybrid),
            (Some(group), None) => (Some(group), Sharding::Replicated),
            // Without groups, all is sharded over all ranks.
            (None, None) => (None, Sharding::Flat),
        };
        Ok(MeshSettings {
            shard_group,
            sharding,
            ..MeshSettings::default()
        })
    }
}

/// The groups of a run. A resumed run whose number of ranks or stage does not fit its groups has
/// none.
///
/// # Errors
/// Groups that do not fit the ranks or the stage.
pub(crate) fn settings(
    from: &Sources<'_, MeshRecord>,
    run: &Conditions,
    notices: &mut Vec<String>,
) -> Result<MeshSettings, CliError> {
    let given = given(from);
    if let Some(given) = given {
        let mesh = given.settings()?;
        return match refusal(&mesh, run.ranks as u64, run.stage) {
            Some(why) => Err(CliError::Usage(why)),
            None => Ok(of_groups(mesh, run.ranks)),
        };
    }

    let recorded = from.recorded.copied().unwrap_or_default().settings()?;
    match refusal(&recorded, run.ranks as u64, run.stage) {
        None => Ok(of_groups(recorded, run.ranks)),
        Some(why) => {
            notices.push(format!(
                "the groups of ranks of the recorded run do not fit this one, which shards over all ranks: {why}"
            ));
            Ok(MeshSettings::default())
        }
    }
}

/// The groups that flags and the file set. With any, those of a recorded run do not count.
fn given(from: &Sources<'_, MeshRecord>) -> Option<MeshRecord> {
    let given = MeshRecord {
        shard_group: from.given(&SHARD_GROUP).flatten(),
        shard_optimizer: from.given(&SHARD_OPTIMIZER).flatten(),
        hpz: from.given(&HPZ).flatten(),
    };
    (!given.is_default()).then_some(given)
}

/// The groups of the plan of a run on `ranks` GPUs, for each stage that they fit.
///
/// # Errors
/// The size of a group does not divide the number of ranks.
pub(crate) fn planned(
    from: &Sources<'_, MeshRecord>,
    ranks: u64,
) -> Result<MeshSettings, CliError> {
    let mesh = given(from).unwrap_or_default().settings()?;
    match refusal(&mesh, ranks, ZeroStage::Three) {
        Some(why) => Err(CliError::Usage(why)),
        None => Ok(of_groups(mesh, ranks as usize)),
    }
}

/// The groups at a stage of a plan: those that have nothing to share there are none.
pub(crate) fn at_stage(mesh: MeshSettings, stage: ZeroStage) -> MeshSettings {
    match (mesh.sharding, stage) {
        (_, ZeroStage::Zero) | (Sharding::Secondary, ZeroStage::One | ZeroStage::Two) => {
            MeshSettings::default()
        }
        _ => mesh,
    }
}

/// The groups, without one that has all ranks.
fn of_groups(mesh: MeshSettings, ranks: usize) -> MeshSettings {
    match mesh.shard_group {
        Some(group) if group < ranks => mesh,
        _ => MeshSettings::default(),
    }
}

/// Why groups do not fit.
fn refusal(mesh: &MeshSettings, ranks: u64, stage: ZeroStage) -> Option<String> {
    let group = mesh.shard_group? as u64;
    let flag = match mesh.sharding {
        Sharding::Secondary => HPZ.row.flag,
        _ => SHARD_GROUP.row.flag,
    };
    if group == 0 || !ranks.is_multiple_of(group) {
        return Some(format!(
            "{flag} {group}: expected a number that divides the {ranks} ranks"
        ));
    }
    let of_stage = stage.number();
    match (mesh.sharding, stage) {
        (Sharding::Secondary, ZeroStage::Zero | ZeroStage::One | ZeroStage::Two) => Some(format!(
            "{flag} {group} shares parameters, which are whole on every rank at stage {of_stage}; use --stage 3"
        )),
        (_, ZeroStage::Zero) => Some(format!(
            "{flag} {group}: stage 0 shards nothing; use --stage 1, 2 or 3"
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DsConfig;
    use crate::settings::args::TrainArgs;

    fn run(ranks: usize, stage: ZeroStage) -> Conditions {
        Conditions {
            ranks,
            stage,
            on_gpus: false,
            checkpointing: false,
            offloads: false,
        }
    }

    fn mesh(
        args: &TrainArgs,
        file: &str,
        recorded: Option<MeshRecord>,
        run: &Conditions,
    ) -> Result<(MeshSettings, Vec<String>), String> {
        let file = DsConfig::parse(file).unwrap();
        let from = Sources {
            args,
            file: Some(&file),
            zero: Some(&file.zero),
            recorded: recorded.as_ref(),
        };
        let mut notices = Vec::new();
        let mesh = settings(&from, run, &mut notices).map_err(|error| error.to_string())?;
        let record = MeshRecord::of(&mesh);
        assert_eq!(record.settings().unwrap(), mesh);
        Ok((mesh, notices))
    }

    fn flags(shard_group: Option<usize>, world: bool, hpz: Option<usize>) -> TrainArgs {
        let mut args = TrainArgs::default();
        args.mesh.shard_group = shard_group;
        args.mesh.shard_optimizer = world.then_some(OptimizerRanks::World);
        args.mesh.hpz = hpz;
        args
    }

    #[test]
    fn each_source() {
        use ZeroStage::{One, Three};
        let no_flags = TrainArgs::default();
        let of = |args: &TrainArgs, file, recorded, stage| {
            let (mesh, notices) = mesh(args, file, recorded, &run(8, stage)).unwrap();
            assert_eq!(notices, Vec::<String>::new());
            (mesh.shard_group, mesh.sharding)
        };
        let groups = flags(Some(4), true, None);
        assert_eq!(of(&groups, "{}", None, One), (Some(4), Sharding::Hybrid));
        let groups = flags(Some(8), true, None);
        assert_eq!(of(&groups, "{}", None, One), (None, Sharding::Flat));

        let hpz = r#"{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}"#;
        assert_eq!(
            of(&no_flags, hpz, None, Three),
            (Some(2), Sharding::Secondary)
        );
        let mics = r#"{"zero_optimization": {"stage": 3, "mics_shard_size": 2}}"#;
        assert_eq!(
            of(&no_flags, mics, None, Three),
            (Some(2), Sharding::Replicated)
        );
        let off = r#"{"zero_optimization": {"mics_shard_size": -1, "zero_hpz_partition_size": 1}}"#;
        assert_eq!(of(&no_flags, off, None, Three), (None, Sharding::Flat));

        // A flag takes the place of all that was recorded.
        let recorded = MeshRecord {
            shard_group: Some(4),
            shard_optimizer: Some(OptimizerRanks::World),
            hpz: None,
        };
        assert_eq!(
            of(&no_flags, "{}", Some(recorded), One),
            (Some(4), Sharding::Hybrid)
        );
        let flag = flags(None, false, Some(2));
        assert_eq!(
            of(&flag, "{}", Some(recorded), Three),
            (Some(2), Sharding::Secondary)
        );
    }

    #[test]
    fn groups_that_do_not_fit() {
        use ZeroStage::{Three, Two, Zero};
        let refused = |args: &TrainArgs, run: &Conditions| mesh(args, "{}", None, run).unwrap_err();
        let error = refused(&flags(Some(3), false, None), &run(8, Three));
        assert_eq!(
            error,
            "--shard-group 3: expected a number that divides the 8 ranks"
        );
        let error = refused(&flags(Some(0), false, None), &run(8, Three));
        assert!(error.starts_with("--shard-group 0:"), "{error}");
        let error = refused(&flags(Some(4), false, None), &run(8, Zero));
        assert!(error.contains("stage 0 shards nothing"), "{error}");
        let error = refused(&flags(None, false, Some(4)), &run(8, Two));
        assert!(error.contains("use --stage 3"), "{error}");
        let error = refused(&flags(Some(4), false, Some(4)), &run(8, Three));
        assert!(error.contains("exclude each other"), "{error}");

        // A resumed run goes on without them.
        let recorded = MeshRecord {
            shard_group: Some(4),
            ..MeshRecord::default()
        };
        let (mesh, notices) =
            mesh(&TrainArgs::default(), "{}", Some(recorded), &run(6, Three)).unwrap();
        assert_eq!(mesh, MeshSettings::default());
        assert!(notices[0].contains("--shard-group 4"), "{notices:?}");
    }
}
