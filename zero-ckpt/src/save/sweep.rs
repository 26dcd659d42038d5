//! Removal of old checkpoints and of superseded staged files, after the outcome of a save is sent.
//!
//! Checkpoints to remove are chosen and hidden by renames at once. The files are deleted on a thread, because that can take
//! minutes, in which the other ranks would wait for rank 0.
//!
//! Never removed: checkpoints and staged files of other runs, staged files of later steps, those of saves of this process
//! that are still in flight, and names that this crate does not write.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::agreement::Publication;
use super::job::Job;
use super::replace;
use super::shared::SHARED;
use super::staged_name::{StagedName, run_checksum};
use super::store::SavePoint;
use crate::exchange::shorten;
use crate::format::catalog::{backup_of, random};
use crate::io::dir::Dir;
use crate::{CkptError, Store};

/// Failures to report at most.
const MAX_NOTICES: usize = 3;

impl Store {
    /// Removes the superseded checkpoint, this run's checkpoints beyond the last `keep_last` except `best` and the one just
    /// published, the one that this save replaced, and staged files that this save supersedes.
    pub(crate) fn prune(&self, publication: &Publication) {
        self.at(SavePoint::Pruning);
        let mut published = self.published();
        let due = self.due(publication, &published);
        let mut hidden = Vec::new();
        for name in due {
            // Hides it by one rename, so that no reader opens it partly removed.
            let old = format!("{name}.old.{}", random());
            match self.dir.rename(&name, &self.staging, &old) {
                Ok(()) => {
                    published.retain(|entry| entry.name != name);
                    hidden.push(old);
                }
                Err(error) => self.notices().push(error.to_string()),
            }
        }
        hidden.extend(replace::resolve_backups(&self.dir, &self.staging));
        let leftovers = self.staging.names().unwrap_or_default();
        hidden.extend(leftovers.into_iter().filter(|name| self.is_superseded(name, publication)));
        hidden.sort_unstable();
        hidden.dedup();

        let sweep = Sweep { staging: Arc::clone(&self.staging), names: hidden, progress: Arc::clone(&self.progress) };
        let observer = self.observer.clone();
        self.sweeps().push(Job::start(move || {
            let notices = sweep.run();
            if let Some(observer) = observer {
                observer(SavePoint::Pruned);
            }
            notices
        }));
    }

    /// The checkpoints to remove.
    fn due(&self, publication: &Publication, published: &[crate::format::catalog::Entry]) -> Vec<String> {
        let Publication { checkpoint, superseded, .. } = publication;
        let own: Vec<_> = published.iter().filter(|entry| self.options.owns(entry.run.as_deref())).collect();
        let excess = self.options.keep_last.map_or(0, |keep| own.len().saturating_sub(keep.max(1)));
        let is_due = |(index, name): &(usize, &String)| *index < excess || superseded.as_ref() == Some(*name);
        let kept = |name: &String| *name == checkpoint.name || checkpoint.best.as_ref() == Some(name);
        let names = own.iter().map(|entry| &entry.name).enumerate();
        names.filter(is_due).map(|(_, name)| name.clone()).filter(|name| !kept(name)).collect()
    }

    /// Whether an entry of the staging directory is of no use after this publication.
    fn is_superseded(&self, name: &str, publication: &Publication) -> bool {
        let is_temporary = ["latest.", "best.", "probe.", SHARED].iter().any(|prefix| {
            let random = name.strip_prefix(prefix);
            random.is_some_and(|digits| digits.len() == 16 && digits.bytes().all(|b| b.is_ascii_hexdigit()))
        });
        if is_temporary || backup_of(name).is_some() {
            return true;
        }
        let Some(StagedName { step, save, .. }) = StagedName::parse(name) else { return false };
        // Later saves of this process may be in flight.
        let is_done = publication.numbers.get(&save.session).is_none_or(|number| save.number <= *number);
        step <= publication.checkpoint.step && is_done && self.owns_checksum(save.run)
    }

    /// Whether [`SaveId::run`](super::staged_name::SaveId::run) is of this run or of one that it resumed.
    fn owns_checksum(&self, run: u32) -> bool {
        let resumed = self.options.resumed_runs.iter().map(|run| run_checksum(Some(run)));
        resumed.chain([self.run_checksum()]).any(|own| own == run)
    }

    /// Waits until removed checkpoints are deleted, while that makes progress, and returns the failures since the last save.
    pub fn finish_removals(&self) -> Vec<String> {
        let sweeps = std::mem::take(&mut *self.sweeps());
        for sweep in &sweeps {
            sweep.wait_while_progressing(self.stall_limit(), || self.progress());
        }
        *self.sweeps() = sweeps;
        self.take_notices()
    }

    /// The failures of removals that have ended.
    pub(crate) fn take_notices(&self) -> Vec<String> {
        let mut notices = std::mem::take(&mut *self.notices());
        self.sweeps().retain(|sweep| {
            if sweep.has_ended() {
                notices.extend(sweep.take().unwrap_or_else(|error| vec![error.to_string()]));
                return false;
            }
            true
        });
        notices.iter_mut().for_each(|notice| *notice = shorten(notice));
        notices.truncate(MAX_NOTICES);
        notices
    }
}

/// Entries of the staging directory to delete.
struct Sweep {
    staging: Arc<Dir>,
    names: Vec<String>,
    progress: Arc<AtomicU64>,
}

impl Sweep {
    /// Deletes them; returns the failures.
    fn run(self) -> Vec<String> {
        let remove = |name: &String| self.staging.remove(name, &self.progress).err();
        let is_missing =
            |e: &CkptError| matches!(e, CkptError::Io { error, .. } if error.kind() == std::io::ErrorKind::NotFound);
        let failures = self.names.iter().filter_map(remove).filter(|error| !is_missing(error));
        failures.map(|error| error.to_string()).collect()
    }
}
