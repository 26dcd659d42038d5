//! The groups of ranks over which states are sharded, and those that share sequences. They change
//! the order in which gradients are summed, so the numbers within rounding.

use serde::{Deserialize, Serialize};
use zero_shard::{Sharding, ZeroStage};
use zero_trainer::MeshSettings;

use super::args::{Collectives, OptimizerRanks};
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
    /// Ranks that share a sequence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ulysses: Option<usize>,
    /// Ranks that have a part of each parameter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tensor_parallel: Option<usize>,
    /// Data ranks of a machine, if collectives run in two levels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) two_level: Option<usize>,
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

const ULYSSES: Setting<usize, MeshRecord> = Setting {
    of_flags: |args| args.mesh.ulysses,
    of_file: |file| file.sequence_ranks.map(|ranks| ranks as usize),
    of_run: |run| run.ulysses,
    ..Setting::new(
        Row::new("mesh.ulysses", "--ulysses").key("sequence_parallel_size"),
        || 1,
    )
};

const TENSOR_PARALLEL: Setting<usize, MeshRecord> = Setting {
    of_flags: |args| args.mesh.tensor_parallel,
    of_file: |file| file.tensor_ranks.map(|ranks| ranks as usize),
    of_run: |run| run.tensor_parallel,
    ..Setting::new(
        Row::new("mesh.tensor_parallel", "--tensor-parallel").key("tensor_parallel.autotp_size"),
        || 1,
    )
};

/// Ranks agree on the route by themselves, since launchers may report other machines to each.
pub(crate) const COLLECTIVES: Setting<Collectives, MeshRecord> = Setting {
    of_flags: |args| args.mesh.collectives,
    ..Setting::new(
        Row::new("mesh.two_level", "--collectives").not_compared(),
        Collectives::default,
    )
};

pub(crate) const ROWS: &[Row] = &[
    SHARD_GROUP.row,
    SHARD_OPTIMIZER.row,
    HPZ.row,
    ULYSSES.row,
    TENSOR_PARALLEL.row,
    COLLECTIVES.row,
];

/// The ranks that share micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shares {
    /// Ranks that have a part of each parameter.
    pub(crate) tensor: usize,
    /// Ranks that share each sequence.
    pub(crate) sequence: usize,
}

impl Shares {
    /// Of a resumed run those that divide this one's ranks.
    ///
    /// # Errors
    /// A number that does not divide the ranks.
    pub(crate) fn new(from: &Sources<'_, MeshRecord>, ranks: usize) -> Result<Self, CliError> {
        let tensor = dividing(from, &TENSOR_PARALLEL, ranks, "ranks")?;
        let sequence = match tensor {
            1 => dividing(from, &ULYSSES, ranks, "ranks")?,
            _ => dividing(
                from,
                &ULYSSES,
                ranks / tensor,
                "ranks with the same parameters",
            )?,
        };
        Ok(Self { tensor, sequence })
    }

    /// Ranks with the same micro-batches.
    pub(crate) fn ranks_of_batch(self) -> usize {
        self.tensor * self.sequence
    }

    fn apply(self, mesh: MeshSettings) -> MeshSettings {
        let several = |ranks: usize| Some(ranks).filter(|ranks| *ranks > 1);
        MeshSettings {
            tensor_ranks: several(self.tensor),
            sequence_ranks: several(self.sequence),
            ..mesh
        }
    }
}

/// A setting that divides `ranks`.
fn dividing(
    from: &Sources<'_, MeshRecord>,
    setting: &Setting<usize, MeshRecord>,
    ranks: usize,
    what: &str,
) -> Result<usize, CliError> {
    let fits = |share: &usize| *share > 0 && ranks.is_multiple_of(*share);
    let name = match (setting.of_flags)(from.args) {
        Some(_) => setting.row.flag,
        None => setting.row.key,
    };
    match from.given(setting) {
        Some(given) if !fits(&given) => Err(CliError::Usage(format!(
            "{name} {given}: expected a number that divides the {ranks} {what}"
        ))),
        Some(given) => Ok(given),
        None => Ok(from.recorded(setting).filter(fits).unwrap_or(1)),
    }
}

impl MeshRecord {
    /// The record of settings.
    pub(crate) fn of(mesh: &MeshSettings) -> Self {
        let group = mesh.shard_group;
        let shares = Self {
            ulysses: mesh.sequence_ranks,
            tensor_parallel: mesh.tensor_ranks,
            two_level: mesh.two_level,
            ..Self::default()
        };
        match mesh.sharding {
            Sharding::Secondary => Self {
                hpz: group,
                ..shares
            },
            sharding => Self {
                shard_group: group,
                shard_optimizer: (group.is_some() && sharding == Sharding::Hybrid)
                    .then_some(OptimizerRanks::World),
                ..shares
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

    /// The ranks that share each sequence; `None` if each has its own.
    pub(crate) fn describe_sequences(&self) -> Option<String> {
        let share = self.ulysses?;
        Some(format!(
            "each is shared by {share} ranks, which divide its tokens and the heads of attention (Ulysses)"
        ))
    }

    /// The ranks that have a part of each parameter; `None` if each has all.
    pub(crate) fn describe_parts(&self) -> Option<String> {
        let ranks = self.tensor_parallel?;
        Some(format!(
            "each is cut over {ranks} ranks, with the heads of attention and the vocabulary (tensor parallelism)"
        ))
    }

    /// The settings of the record.
    pub(crate) fn settings(self) -> Result<MeshSettings, CliError> {
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
            sequence_ranks: self.ulysses,
            tensor_ranks: self.tensor_parallel,
            // Each run chooses it for its machines.
            two_level: None,
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
    let shares = Shares::new(from, run.ranks)?;
    let of_settings = [
        (
            &ULYSSES,
            shares.sequence,
            "shares each sequence between",
            "each has its own sequences",
        ),
        (
            &TENSOR_PARALLEL,
            shares.tensor,
            "cuts each parameter over",
            "each has whole parameters",
        ),
    ];
    for (setting, share, what, now) in of_settings {
        if let Some(recorded) = from.recorded(setting)
            && from.given(setting).is_none()
            && recorded != share
        {
            notices.push(format!(
                "the recorded run {what} {recorded} ranks, which do not divide the {} ranks of this one: {now}",
                run.ranks
            ));
        }
    }
    let of_data = Conditions {
        ranks: run.ranks / shares.tensor,
        ..*run
    };
    Ok(shares.apply(groups(from, &of_data, notices)?))
}

/// The groups over which states are sharded.
fn groups(
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
        ..MeshRecord::default()
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
    let shares = Shares::new(from, ranks as usize)?;
    let data_ranks = ranks / shares.tensor as u64;
    match refusal(&mesh, data_ranks, ZeroStage::Three) {
        Some(why) => Err(CliError::Usage(why)),
        None => Ok(shares.apply(of_groups(mesh, data_ranks as usize))),
    }
}

/// The groups at a stage of a plan: those that have nothing to share there are none.
pub(crate) fn at_stage(mesh: MeshSettings, stage: ZeroStage) -> MeshSettings {
    match (mesh.sharding, stage) {
        (_, ZeroStage::Zero) | (Sharding::Secondary, ZeroStage::One | ZeroStage::Two) => {
            MeshSettings {
                shard_group: None,
                sharding: Sharding::Flat,
                ..mesh
            }
        }
        _ => MeshSettings {
            two_level: mesh.two_level.filter(|_| mesh.shard_group.is_none()),
            ..mesh
        },
    }
}

/// The groups, without one that has all ranks.
fn of_groups(mesh: MeshSettings, ranks: usize) -> MeshSettings {
    match mesh.shard_group {
        Some(group) if group < ranks => mesh,
        _ => MeshSettings::default(),
    }
}

/// The flag that sets the groups.
pub(crate) fn group_flag(mesh: &MeshSettings) -> &'static str {
    match mesh.sharding {
        Sharding::Secondary => HPZ.row.flag,
        _ => SHARD_GROUP.row.flag,
    }
}

/// Why groups do not fit.
fn refusal(mesh: &MeshSettings, ranks: u64, stage: ZeroStage) -> Option<String> {
    let group = mesh.shard_group? as u64;
    let flag = group_flag(mesh);
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
            shares_batches: false,
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
            ..MeshRecord::default()
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
    fn ranks_that_share_sequences() {
        let of = |args: &TrainArgs, file, recorded: Option<usize>, ranks| {
            let recorded = recorded.map(|ulysses| MeshRecord {
                ulysses: Some(ulysses),
                shard_group: Some(2),
                ..MeshRecord::default()
            });
            let of_run = mesh(args, file, recorded, &run(ranks, ZeroStage::Three));
            of_run.map(|(mesh, notices)| (mesh.sequence_ranks(), notices))
        };
        let share = |share| {
            let mut args = TrainArgs::default();
            args.mesh.ulysses = Some(share);
            args
        };
        let no_flag = TrainArgs::default();
        let file = r#"{"sequence_parallel_size": 2}"#;
        assert_eq!(of(&share(4), "{}", None, 8).unwrap(), (4, vec![]));
        assert_eq!(of(&no_flag, file, None, 8).unwrap(), (2, vec![]));
        assert_eq!(of(&share(1), file, Some(4), 8).unwrap(), (1, vec![]));
        assert_eq!(of(&no_flag, "{}", Some(4), 8).unwrap(), (4, vec![]));
        let (alone, notices) = of(&no_flag, "{}", Some(4), 6).unwrap();
        assert_eq!(alone, 1);
        assert!(notices[0].contains("between 4 ranks"), "{notices:?}");
        for wrong in [0, 3] {
            let error = of(&share(wrong), "{}", None, 8).unwrap_err();
            assert_eq!(
                error,
                format!("--ulysses {wrong}: expected a number that divides the 8 ranks")
            );
        }
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
