//! The groups of ranks over which states are sharded, and those that share sequences. They change
//! the order in which gradients are summed, so the numbers within rounding.

use zero_shard::{Sharding, ZeroStage};
use zero_trainer::MeshSettings;

use super::args::{MeshArgs, OptimizerRanks};
use super::sources::{Conditions, Sources};
use crate::error::CliError;

/// A number of ranks that share micro-batches.
struct Share {
    flag: &'static str,
    key: &'static str,
    of: fn(&MeshArgs) -> Option<usize>,
}

const ULYSSES: Share = Share {
    flag: "--ulysses",
    key: "sequence_parallel_size",
    of: |mesh| mesh.ulysses,
};

const TENSOR_PARALLEL: Share = Share {
    flag: "--tensor-parallel",
    key: "tensor_parallel.autotp_size",
    of: |mesh| mesh.tensor_parallel,
};

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
    pub(crate) fn new(from: &Sources, ranks: usize) -> Result<Self, CliError> {
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

/// A share that divides `ranks`.
fn dividing(from: &Sources, share: &Share, ranks: usize, what: &str) -> Result<usize, CliError> {
    let fits = |share: &usize| *share > 0 && ranks.is_multiple_of(*share);
    let name = match (share.of)(&from.flags.mesh) {
        Some(_) => share.flag,
        None => share.key,
    };
    match (share.of)(&from.given.mesh) {
        Some(given) if !fits(&given) => Err(usage!(
            "{name} {given}: expected a number that divides the {ranks} {what}"
        )),
        Some(given) => Ok(given),
        None => Ok((share.of)(&from.recorded.mesh).filter(fits).unwrap_or(1)),
    }
}

impl MeshArgs {
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
                return Err(usage!(
                    "--shard-group and --hpz exclude each other: hpZ shards gradients and optimizer \
                     state over all ranks; use --shard-group K --shard-optimizer world to shard \
                     gradients over groups, too"
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
    from: &Sources,
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
        if let Some(recorded) = (setting.of)(&from.recorded.mesh)
            && (setting.of)(&from.given.mesh).is_none()
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
    from: &Sources,
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

    let recorded = from.recorded.mesh.settings()?;
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
fn given(from: &Sources) -> Option<MeshArgs> {
    let given = MeshArgs {
        shard_group: from.given.mesh.shard_group,
        shard_optimizer: from.given.mesh.shard_optimizer,
        hpz: from.given.mesh.hpz,
        ..MeshArgs::default()
    };
    (!given.is_default()).then_some(given)
}

/// The groups of the plan of a run on `ranks` GPUs, for each stage that they fit.
///
/// # Errors
/// The size of a group does not divide the number of ranks.
pub(crate) fn planned(from: &Sources, ranks: u64) -> Result<MeshSettings, CliError> {
    let mesh = given(from).unwrap_or_default().settings()?;
    let shares = Shares::new(from, ranks as usize)?;
    let data_ranks = ranks / shares.tensor as u64;
    match refusal(&mesh, data_ranks, ZeroStage::Three) {
        Some(why) => Err(CliError::Usage(why)),
        None => Ok(shares.apply(of_groups(mesh, data_ranks as usize))),
    }
}

/// Refuses `--partition-activations` and `--sequence-parallel` without tensor parallelism.
///
/// # Errors
/// One of them is given.
pub(crate) fn check_tensor_flags(
    mesh: &MeshSettings,
    [partitions, divides_tokens]: [bool; 2],
    ranks: &str,
) -> Result<(), CliError> {
    let flag = match (mesh.tensor_ranks, partitions, divides_tokens) {
        (None, true, _) => "--partition-activations divides activations",
        (None, false, true) => "--sequence-parallel divides tokens",
        _ => return Ok(()),
    };
    Err(usage!(
        "{flag} among the {ranks} of tensor parallelism: use --tensor-parallel M, too"
    ))
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
        Sharding::Secondary => "--hpz",
        _ => "--shard-group",
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
    use crate::settings::args::parsed;
    use crate::settings::sources::of_file;
    use ZeroStage::{One, Three, Two, Zero};
    use zero_config::DsConfig;

    /// The groups of a run with these flags, which resumes one that had those of `recorded`, and its
    /// notes.
    fn mesh(
        flags: &str,
        file: &str,
        recorded: &str,
        (ranks, stage): (usize, ZeroStage),
    ) -> Result<(MeshSettings, Vec<String>), String> {
        let file = DsConfig::parse(file).unwrap();
        let file = of_file(&file, Some(&file.zero));
        let from = Sources::new(&parsed(flags), &file, parsed(recorded));
        let run = Conditions {
            ranks,
            stage,
            on_gpus: false,
            checkpointing: false,
            offloads: false,
            shares_batches: false,
        };
        let mut notices = Vec::new();
        let mesh = settings(&from, &run, &mut notices).map_err(|error| error.to_string())?;
        assert_eq!(MeshArgs::of(&mesh).settings().unwrap(), mesh);
        Ok((mesh, notices))
    }

    #[test]
    fn each_source() {
        use Sharding::{Flat, Hybrid, Replicated, Secondary};
        let hpz = r#"{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}"#;
        let mics = r#"{"zero_optimization": {"stage": 3, "mics_shard_size": 2}}"#;
        let off = r#"{"zero_optimization": {"mics_shard_size": -1, "zero_hpz_partition_size": 1}}"#;
        let world = "--shard-group 4 --shard-optimizer world";
        let all = "--shard-group 8 --shard-optimizer world";
        for (flags, file, recorded, stage, expected) in [
            (world, "{}", "", One, (Some(4), Hybrid)),
            (all, "{}", "", One, (None, Flat)),
            ("", hpz, "", Three, (Some(2), Secondary)),
            ("", mics, "", Three, (Some(2), Replicated)),
            ("", off, "", Three, (None, Flat)),
            ("", "{}", world, One, (Some(4), Hybrid)),
            // A flag takes the place of all that was recorded.
            ("--hpz 2", "{}", world, Three, (Some(2), Secondary)),
        ] {
            let (mesh, notices) = mesh(flags, file, recorded, (8, stage)).unwrap();
            assert_eq!(
                (mesh.shard_group, mesh.sharding),
                expected,
                "{flags} {file}"
            );
            assert!(notices.is_empty(), "{notices:?}");
        }
    }

    #[test]
    fn ranks_that_share_sequences() {
        let file = r#"{"sequence_parallel_size": 2}"#;
        let recorded = "--ulysses 4 --shard-group 2";
        for (flags, file, recorded, ranks, expected) in [
            ("--ulysses 4", "{}", "", 8, 4),
            ("", file, "", 8, 2),
            ("--ulysses 1", file, recorded, 8, 1),
            ("", "{}", recorded, 8, 4),
            ("", "{}", recorded, 6, 1),
        ] {
            let (mesh, notices) = mesh(flags, file, recorded, (ranks, Three)).unwrap();
            assert_eq!(mesh.sequence_ranks(), expected, "{flags} {file}");
            let is_noted = notices.iter().any(|note| note.contains("between 4 ranks"));
            assert_eq!(is_noted, ranks == 6, "{notices:?}");
        }
    }

    #[test]
    fn groups_that_do_not_fit() {
        let number = "expected a number that divides the 8 ranks";
        for (flags, stage, expected) in [
            ("--ulysses 0", Three, &*format!("--ulysses 0: {number}")),
            ("--ulysses 3", Three, &format!("--ulysses 3: {number}")),
            (
                "--shard-group 3",
                Three,
                &format!("--shard-group 3: {number}"),
            ),
            ("--shard-group 0", Three, "--shard-group 0:"),
            ("--shard-group 4", Zero, "stage 0 shards nothing"),
            ("--hpz 4", Two, "use --stage 3"),
            ("--shard-group 4 --hpz 4", Three, "exclude each other"),
        ] {
            let error = mesh(flags, "{}", "", (8, stage)).unwrap_err();
            assert!(error.contains(expected), "{flags}: {error}");
        }

        // A resumed run goes on without them.
        let (mesh, notices) = mesh("", "{}", "--shard-group 4", (6, Three)).unwrap();
        assert_eq!(mesh, MeshSettings::default());
        assert!(notices[0].contains("--shard-group 4"), "{notices:?}");
    }
}
