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

use crate::format::file_layout::checksum;
use crate::format::names::{step_name, step_of};

/// One save of one run, in the order of steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SaveId {
    pub(crate) step: u64,
    /// Checksum of the run's name.
    pub(crate) run: u32,
    pub(crate) session: u64,
    pub(crate) number: u32,
}

/// The checksum of a run's name in [`SaveId::run`].
pub(crate) fn run_checksum(run: Option<&str>) -> u32 {
    checksum(run.unwrap_or_default().as_bytes()) as u32
}

/// The kind of an entry of a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EntryKind {
    /// The staged file of a rank.
    File(u64),
    Description,
    Ready,
}

impl SaveId {
    /// The name of this save's entry of `kind`.
    pub(crate) fn name(self, kind: EntryKind) -> String {
        match kind {
            EntryKind::File(rank) => self.with(format_args!("rank-{rank:05}")),
            EntryKind::Description => self.with(format_args!("save")),
            EntryKind::Ready => self.with(format_args!("ready")),
        }
    }

    fn with(self, kind: std::fmt::Arguments<'_>) -> String {
        let Self {
            step,
            run,
            session,
            number,
        } = self;
        format!(
            "{}.{kind}.{run:08x}.{session:016x}.{number}",
            step_name(step)
        )
    }

    /// Parses the name of an entry.
    pub(crate) fn parse(name: &str) -> Option<(Self, EntryKind)> {
        let parts: Vec<&str> = name.split('.').collect();
        let [step, kind, run, session, number] = parts[..] else {
            return None;
        };
        let kind = match kind {
            "save" => EntryKind::Description,
            "ready" => EntryKind::Ready,
            rank => EntryKind::File(rank.strip_prefix("rank-")?.parse().ok()?),
        };

        let id = Self {
            step: step_of(step)?,
            run: u32::from_str_radix(run, 16).ok()?,
            session: u64::from_str_radix(session, 16).ok()?,
            number: number.parse().ok()?,
        };
        (id.name(kind) == name).then_some((id, kind))
    }
}

/// The name of a save for a user: its step and the ends of its files' names.
impl std::fmt::Display for SaveId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.with(format_args!("*")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        let id = SaveId {
            step: 30,
            run: run_checksum(Some("a")),
            session: u64::MAX,
            number: 7,
        };
        for kind in [
            EntryKind::File(0),
            EntryKind::File(123_456),
            EntryKind::Description,
            EntryKind::Ready,
        ] {
            assert_eq!(SaveId::parse(&id.name(kind)), Some((id, kind)));
        }

        for other in [
            "step-00000030",
            "step-00000030.old.0123456789abcdef",
            "step-00000030.rank-00000.0123456789abcdef",
            "step-00000030.rank-0.00000000.0123456789abcdef.7",
            "step-30.save.00000000.0123456789abcdef.7",
            "step-00000030.mine.00000000.0123456789abcdef.7",
        ] {
            assert_eq!(SaveId::parse(other), None, "{other}");
        }
    }
}
