//! The staged saves that earlier runs have left in a directory.
//!
//! A save is complete if its description and the files of all ranks are there: `assemble` makes a
//! checkpoint of it, so it stays. Opening the directory on all ranks removes the incomplete ones of
//! its own run and of the runs that it resumed, because their bytes may be what the next save
//! lacks. Those of other runs stay and are named.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use super::description::Description;
use super::meta::shard_name;
use super::records::StagedFile;
use crate::format::names::{STAGING, backup_of, step_name};
use crate::format::staged_name::{Kind, SaveId, StagedName};
use crate::io::dir::Dir;
use crate::{CkptError, Store};

/// The staged saves of a directory: files of saves that failed or that are still in progress.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StagedSaves {
    /// The staging directory.
    pub path: PathBuf,
    /// The number of saves.
    pub saves: usize,
    /// The bytes of their files.
    pub bytes: u64,
}

impl fmt::Display for StagedSaves {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.text("that no checkpoint holds"))
    }
}

impl StagedSaves {
    fn none(staging: &Dir) -> Self {
        Self {
            path: staging.path().to_owned(),
            saves: 0,
            bytes: 0,
        }
    }

    fn add(&mut self, save: &StagedSave, staging: &Dir) {
        self.saves += 1;
        self.bytes += save.bytes(staging);
    }

    fn text(&self, which: &str) -> String {
        let plural = if self.saves == 1 { "" } else { "s" };
        format!(
            "{} staged save{plural} {which}, {}, in {}",
            self.saves,
            Size(self.bytes),
            self.path.display()
        )
    }
}

/// Counts the staged saves of the directory of checkpoints `path`, which publications have not
/// used. Reads names and lengths only. A run that saves there now has such files too.
///
/// # Errors
/// The directory cannot be opened or listed.
pub fn staged_saves(path: impl AsRef<Path>) -> Result<StagedSaves, CkptError> {
    let dir = Dir::open(path.as_ref())?;
    if !dir.has(STAGING) {
        return Ok(StagedSaves {
            path: dir.path().join(STAGING),
            saves: 0,
            bytes: 0,
        });
    }
    let staging = dir.open_dir(STAGING)?;
    let mut found = StagedSaves::none(&staging);
    for save in Leftovers::find(&staging)?.saves.values() {
        found.add(save, &staging);
    }
    Ok(found)
}

/// Bytes in a unit that a person reads.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const GIB: f64 = (1u64 << 30) as f64;
        const MIB: f64 = (1u64 << 20) as f64;
        match self.0 as f64 {
            bytes if bytes >= GIB => write!(f, "{:.1} GiB", bytes / GIB),
            bytes if bytes >= MIB => write!(f, "{:.1} MiB", bytes / MIB),
            _ => write!(f, "{} bytes", self.0),
        }
    }
}

/// The entries of a staging directory by save.
struct Leftovers {
    saves: BTreeMap<(u64, SaveId), StagedSave>,
    /// Removed checkpoints whose deletion did not end.
    removed: Vec<String>,
}

#[derive(Default)]
struct StagedSave {
    names: Vec<String>,
    ranks: BTreeSet<u64>,
    description: Option<String>,
    /// The directory into which rank 0 moves the files.
    ready: Option<String>,
}

impl Leftovers {
    fn find(staging: &Dir) -> Result<Self, CkptError> {
        let mut saves: BTreeMap<(u64, SaveId), StagedSave> = BTreeMap::new();
        let mut removed = Vec::new();
        for name in staging.names()? {
            let Some(StagedName { step, kind, save }) = StagedName::parse(&name) else {
                removed.extend(backup_of(&name).is_some().then_some(name));
                continue;
            };
            let entry = saves.entry((step, save)).or_default();
            match kind {
                Kind::File(rank) => drop(entry.ranks.insert(rank)),
                Kind::Description => entry.description = Some(name.clone()),
                Kind::Ready => entry.ready = Some(name.clone()),
            }
            entry.names.push(name);
        }
        Ok(Self { saves, removed })
    }
}

impl StagedSave {
    /// Whether a file is known to be missing. Not if a directory or the description cannot be read.
    fn is_incomplete(&self, staging: &Dir, step: u64) -> bool {
        let ready = match self.ready.as_deref().map(|name| staging.open_dir(name)) {
            Some(Err(_)) => return false,
            Some(Ok(ready)) => Some(ready),
            None => None,
        };
        let Some(description) = &self.description else {
            return true;
        };
        let Ok(description) = Description::read(staging, description, step) else {
            return false;
        };

        // Not the checkpoint that the save has replaced by an exchange.
        let own = ready.filter(|ready| !description.is_replaced(ready));
        let is_moved = |name: &str| own.as_ref().is_some_and(|ready| ready.has(name));
        let ranks = description.manifest.layout.world_size;
        (0..ranks).any(|rank| !self.ranks.contains(&rank) && !is_moved(&shard_name(rank, ranks)))
    }

    fn bytes(&self, staging: &Dir) -> u64 {
        self.names.iter().map(|name| staging.bytes_of(name)).sum()
    }
}

impl Store {
    /// Removes the incomplete saves of this run and of those that it resumed, on a thread, and adds
    /// notices of the others. Call it on rank 0 once all ranks see this directory, and before any
    /// save.
    pub(crate) fn remove_incomplete_saves(&self) {
        let found = match Leftovers::find(&self.staging) {
            Ok(found) => found,
            Err(error) => return self.removals.notice(error.to_string()),
        };

        let mut due = found.removed;
        let mut complete = StagedSaves::none(&self.staging);
        let mut steps = BTreeSet::new();
        let mut others = StagedSaves::none(&self.staging);

        for ((step, save), leftover) in found.saves {
            self.progress.fetch_add(1, Ordering::Relaxed);
            if !self.owns_checksum(save.run) {
                others.add(&leftover, &self.staging);
            } else if leftover.is_incomplete(&self.staging, step) {
                due.extend(leftover.names);
            } else {
                complete.add(&leftover, &self.staging);
                steps.insert(step_name(step));
            }
        }

        if let Some(last) = steps.last() {
            self.removals.notice(format!(
                "{}, the last of {last}; `zero ckpt assemble` makes a checkpoint of them, and the next save of this or a later \
                 step removes them",
                complete.text("of this run that failed")
            ));
        }

        if others.saves > 0 {
            let text = others.text("of other runs");
            self.removals.notice(format!(
                "{text}; delete them if those runs will not be resumed"
            ));
        }

        // Without a lock, a file may be of a run that saves here now.
        if due.is_empty() || !self.is_locked() {
            return;
        }
        // One of them may be the checkpoint that another has replaced, right before a crash: the
        // other's name must outlast a power failure first.
        match self.dir.sync().and_then(|()| self.staging.sync()) {
            Ok(()) => self.remove_staged(due),
            Err(error) => self.removals.notice(error.to_string()),
        }
    }

    /// Removes the files of this rank of a save that can never be whole.
    pub(crate) fn discard(&self, file: &StagedFile) {
        let description = StagedName {
            step: file.step,
            kind: Kind::Description,
            save: file.save,
        };
        if self.rank() == 0 {
            let _ = self.staging.remove_file(&description.to_string());
        }
        let _ = self.staging.remove_file(&file.file);
    }
}
