//! The names in the staging directory, which say whose each entry is.
//!
//! ```text
//! step-00000030.rank-00002.<run>.<session>.<number>   the staged file of a rank
//! step-00000030.save.<run>.<session>.<number>         rank 0's description of the save; see `description`
//! step-00000030.ready.<run>.<session>.<number>/       the checkpoint before it gets its final name
//! step-00000030.old.<random>/                         a removed checkpoint, whose files are deleted next
//! ```
//!
//! `run` is a checksum of the run's name, `session` a random number of the opened store, which
//! [`Store::create_on_ranks`](crate::Store::create_on_ranks) makes equal on all ranks, and `number`
//! counts the saves of a session. Names decide alone what a later publication may remove, so that
//! nothing is opened for it.

use crate::format::blocks::checksum;
use crate::format::names::{step_name, step_of};

/// One save of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SaveId {
    /// Checksum of the run's name.
    pub(crate) run: u32,
    pub(crate) session: u64,
    pub(crate) number: u32,
}

/// The checksum of a run's name in [`SaveId::run`].
pub(crate) fn run_checksum(run: Option<&str>) -> u32 {
    checksum(run.unwrap_or_default().as_bytes()) as u32
}

/// The kind of an entry of the staging directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The staged file of a rank.
    File(u64),
    Description,
    Ready,
}

/// An entry of the staging directory that belongs to a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StagedName {
    pub(crate) step: u64,
    pub(crate) kind: Kind,
    pub(crate) save: SaveId,
}

impl StagedName {
    pub(crate) fn parse(name: &str) -> Option<Self> {
        let parts: Vec<&str> = name.split('.').collect();
        let [step, kind, run, session, number] = parts[..] else {
            return None;
        };
        let kind = match kind {
            "save" => Kind::Description,
            "ready" => Kind::Ready,
            rank => Kind::File(rank.strip_prefix("rank-")?.parse().ok()?),
        };

        let run = u32::from_str_radix(run, 16).ok()?;
        let session = u64::from_str_radix(session, 16).ok()?;
        let save = SaveId {
            run,
            session,
            number: number.parse().ok()?,
        };

        let parsed = Self {
            step: step_of(step)?,
            kind,
            save,
        };

        (parsed.to_string() == name).then_some(parsed)
    }
}

impl std::fmt::Display for StagedName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let SaveId {
            run,
            session,
            number,
        } = self.save;
        write!(f, "{}.", step_name(self.step))?;
        match self.kind {
            Kind::File(rank) => write!(f, "rank-{rank:05}")?,
            Kind::Description => write!(f, "save")?,
            Kind::Ready => write!(f, "ready")?,
        }
        write!(f, ".{run:08x}.{session:016x}.{number}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for kind in [
            Kind::File(0),
            Kind::File(123_456),
            Kind::Description,
            Kind::Ready,
        ] {
            let save = SaveId {
                run: run_checksum(Some("a")),
                session: u64::MAX,
                number: 7,
            };
            let name = StagedName {
                step: 30,
                kind,
                save,
            };
            assert_eq!(StagedName::parse(&name.to_string()), Some(name));
        }

        for other in [
            "step-00000030",
            "step-00000030.old.0123456789abcdef",
            "step-00000030.rank-00000.0123456789abcdef",
            "step-00000030.rank-0.00000000.0123456789abcdef.7",
            "step-30.save.00000000.0123456789abcdef.7",
            "step-00000030.mine.00000000.0123456789abcdef.7",
        ] {
            assert_eq!(StagedName::parse(other), None, "{other}");
        }
    }
}
