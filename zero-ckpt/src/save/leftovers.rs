//! The staged saves that earlier runs have left in a directory.
//!
//! A save is complete if its description and the files of all ranks are there: `assemble` makes a
//! checkpoint of it, so it stays. Opening the directory on all ranks removes the incomplete ones of
//! its own run and of the runs that it resumed, because their bytes may be what the next save
//! lacks. Those of other runs stay and are named.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::records::StagedFile;
use super::staged::{StagedList, StagedSave};
use crate::commands::commands;
use crate::format::names::{STAGING, step_name};
use crate::format::staged_name::EntryKind;
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
    fn none(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            saves: 0,
            bytes: 0,
        }
    }

    fn add(&mut self, list: &StagedList, save: &StagedSave) {
        self.saves += 1;
        self.bytes += list.bytes(save);
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
    let mut found = StagedSaves::none(&dir.path().join(STAGING));
    if dir.has(STAGING) {
        let list = StagedList::of(Arc::new(dir.open_dir(STAGING)?))?;
        for save in list.saves.values() {
            found.add(&list, save);
        }
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

impl Store {
    /// Removes the incomplete saves of this run and of those that it resumed, on a thread, and adds
    /// notices of the others. Call it on rank 0 once all ranks see this directory, and before any
    /// save.
    pub(crate) fn remove_incomplete_saves(&self) {
        let list = match StagedList::of(Arc::clone(&self.staging)) {
            Ok(list) => list,
            Err(error) => return self.removals.notice(error.to_string()),
        };

        let mut due = list.removed.clone();
        let mut complete = StagedSaves::none(self.staging.path());
        let mut last = None;
        let mut others = StagedSaves::none(self.staging.path());

        for (id, save) in &list.saves {
            self.progress.fetch_add(1, Ordering::Relaxed);
            let is_incomplete = || {
                let described = list.described(*id, save);
                described.is_err_and(|defects| defects.is_incomplete)
            };
            if !self.owns_checksum(id.run) {
                others.add(&list, save);
            } else if is_incomplete() {
                due.extend(save.entries.iter().map(|entry| entry.name.clone()));
            } else {
                complete.add(&list, save);
                last = Some(id.step);
            }
        }

        if let Some(last) = last.map(step_name) {
            self.removals.notice(format!(
                "{}, the last of {last}; `{}` makes a checkpoint of them, and the next save of this or a later step removes them",
                complete.text("of this run that failed"),
                commands().assemble
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
        if self.rank() == 0 {
            let description = file.save.name(EntryKind::Description);
            let _ = self.staging.remove_file(&description);
        }
        let _ = self.staging.remove_file(&file.file);
    }
}
