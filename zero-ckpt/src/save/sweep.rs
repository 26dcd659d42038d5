//! Removal of old checkpoints and of superseded staged files, after the outcome of a save is sent.
//!
//! Checkpoints to remove are chosen and hidden by renames at once. The files are deleted on a
//! thread, because that can take minutes, in which the other ranks would wait for rank 0. One
//! thread deletes at a time: while it runs, later saves add their names to its queue.
//!
//! Never removed: checkpoints that another process reads, checkpoints and staged files of other
//! runs, staged files of later steps, those of saves of this process that are still in flight, and
//! names that this crate does not write.

use std::sync::Arc;

use super::records::Publication;
use super::replace;
use super::shared::SHARED;
use super::store::SavePoint;
use crate::Store;
use crate::format::names::{backup_of, random};
use crate::format::staged_name::{SaveId, run_checksum};
use crate::io::dir::Dir;
use crate::job::Job;
use crate::messages::shorten;

/// Failures to report at most.
const MAX_NOTICES: usize = 3;

impl Store {
    /// Removes the superseded checkpoint, this run's checkpoints beyond the last `keep_last` except
    /// `best` and the one just published, the one that this save replaced, and staged files that
    /// this save supersedes.
    pub(crate) fn prune(&self, publication: &Publication) {
        self.at(SavePoint::Pruning);
        let mut published = self.published();
        let due = self.due(publication, &published);
        let mut hidden = Vec::new();

        for name in due {
            // A checkpoint that is being read is removed after a later save. A reader that comes
            // after this finds the directory locked or moved.
            let directory = self.dir.open_dir(&name);
            if directory.as_ref().is_ok_and(Dir::is_held) {
                continue;
            }
            // Hides it by one rename, so that no reader opens it partly removed.
            let old = format!("{name}.old.{}", random());
            match self.dir.rename(&name, &self.staging, &old) {
                Ok(()) => {
                    published.retain(|entry| entry.name != name);
                    hidden.push(old);
                }
                Err(error) => self.removals.notice(error.to_string()),
            }
        }

        hidden.extend(replace::resolve_backups(&self.dir, &self.staging));
        let leftovers = self.staging.names().unwrap_or_default();
        hidden.extend(
            leftovers
                .into_iter()
                .filter(|name| self.is_superseded(name, publication)),
        );
        self.remove_staged(hidden);
    }

    /// Deletes entries of the staging directory on a thread; starts one if none runs.
    pub(crate) fn remove_staged(&self, names: Vec<String>) {
        if !self.removals.add(names) {
            return;
        }
        let removals = self.removals.clone();
        let staging = Arc::clone(&self.staging);
        let progress = Arc::clone(&self.progress);
        let observer = self.observer.clone();
        let job = Job::start(move || {
            let remove = |name: &str| staging.remove(name, &progress);
            removals.run(remove, || {
                if let Some(observer) = &observer {
                    observer(SavePoint::Pruned);
                }
            });
        });
        self.removals.put_back(job);
    }

    /// The checkpoints to remove.
    fn due(
        &self,
        publication: &Publication,
        published: &[crate::load::catalog::Entry],
    ) -> Vec<String> {
        let Publication {
            checkpoint,
            superseded,
            ..
        } = publication;

        let own: Vec<_> = published
            .iter()
            .filter(|entry| self.options.owns(entry.run.as_deref()))
            .collect();
        let excess = self
            .options
            .keep_last
            .map_or(0, |keep| own.len().saturating_sub(keep.max(1)));
        let is_due = |(index, name): &(usize, &String)| {
            *index < excess || superseded.as_ref() == Some(*name)
        };
        let kept =
            |name: &String| *name == checkpoint.name || checkpoint.best.as_ref() == Some(name);
        let names = own.iter().map(|entry| &entry.name).enumerate();

        names
            .filter(is_due)
            .map(|(_, name)| name.clone())
            .filter(|name| !kept(name))
            .collect()
    }

    /// Whether an entry of the staging directory is of no use after this publication.
    fn is_superseded(&self, name: &str, publication: &Publication) -> bool {
        let is_temporary = ["latest.", "best.", "probe.", SHARED].iter().any(|prefix| {
            let random = name.strip_prefix(prefix);
            random.is_some_and(|digits| {
                digits.len() == 16 && digits.bytes().all(|b| b.is_ascii_hexdigit())
            })
        });
        if is_temporary || backup_of(name).is_some() {
            return true;
        }
        let Some((save, _)) = SaveId::parse(name) else {
            return false;
        };
        // Later saves of this process may be in flight.
        let is_done = publication
            .numbers
            .get(&save.session)
            .is_none_or(|number| save.number <= *number);
        save.step <= publication.checkpoint.step && is_done && self.owns_checksum(save.run)
    }

    /// Whether [`SaveId::run`](crate::format::staged_name::SaveId::run) is of this run or of one
    /// that it resumed.
    pub(crate) fn owns_checksum(&self, run: u32) -> bool {
        let resumed = self
            .options
            .resumed_runs
            .iter()
            .map(|run| run_checksum(Some(run)));
        resumed.chain([self.run_checksum()]).any(|own| own == run)
    }

    /// Waits until removed checkpoints are deleted, while that makes progress, and returns the
    /// notices since the last save. A thread that makes no progress is waited for once: the next
    /// call does not wait for it again.
    pub fn finish_removals(&self) -> Vec<String> {
        let job = self.removals.take_job();
        if let Some(job) = job {
            let ended = job.wait_while_progressing(self.stall_limit(), || self.progress());
            let failure = if ended {
                job.take().err().map(|error| error.to_string())
            } else {
                Some(self.hung_removals())
            };
            failure
                .into_iter()
                .for_each(|failure| self.removals.notice(failure));
        }
        if let Some(moved) = self.dir.moved().filter(|_| self.rank() == 0) {
            self.removals.notice(moved.to_string());
        }
        self.take_notices()
    }

    fn hung_removals(&self) -> String {
        let folder = self.staging.path().display();
        let seconds = self.stall_limit().as_secs_f64();
        format!(
            "deleting old checkpoints in {folder} makes no progress for {seconds} s: its file system does not answer; a later \
             save into this directory deletes what is left"
        )
    }

    /// Removes and returns the notices since the last save: failures of removals, staged saves that
    /// were found when the directory was opened, and a directory that was moved.
    pub fn take_notices(&self) -> Vec<String> {
        let mut notices = self.removals.take_notices();
        notices
            .iter_mut()
            .for_each(|notice| *notice = shorten(notice));
        notices.truncate(MAX_NOTICES);
        notices
    }
}
