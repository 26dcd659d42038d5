//! The queue of what a thread deletes in the staging directory.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::CkptError;
use crate::format::staged_name::{EntryKind, SaveId};
use crate::job::Job;

/// Entries of the staging directory to delete, shared with the thread that deletes them.
#[derive(Clone, Default)]
pub(crate) struct Removals(Arc<Mutex<Queue>>);

#[derive(Default)]
struct Queue {
    names: BTreeSet<String>,
    /// Whether a thread deletes. Set and cleared under the lock under which names are added and
    /// found to be empty, so that every name has a thread.
    running: bool,
    /// The thread, until it has been waited for.
    job: Option<Job<()>>,
    /// Failures, and other notices of the next save.
    notices: Vec<String>,
}

impl Removals {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn notice(&self, notice: String) {
        self.lock().notices.push(notice);
    }

    /// Removes and returns the notices.
    pub(crate) fn take_notices(&self) -> Vec<String> {
        std::mem::take(&mut self.lock().notices)
    }

    /// The thread that deletes, unless it has been waited for.
    pub(crate) fn take_job(&self) -> Option<Job<()>> {
        self.lock().job.take()
    }

    /// Puts back the thread, which still runs.
    pub(crate) fn put_back(&self, job: Job<()>) {
        self.lock().job = Some(job);
    }

    /// Adds names to the queue; returns whether the caller must start a thread, which then counts
    /// as running.
    pub(super) fn add(&self, names: Vec<String>) -> bool {
        let mut queue = self.lock();
        queue.names.extend(names);
        !std::mem::replace(&mut queue.running, true)
    }

    /// Deletes the entries in the queue, and calls `done` after each round, until no name is left.
    pub(super) fn run(&self, remove: impl Fn(&str) -> Result<(), CkptError>, done: impl Fn()) {
        loop {
            let names = std::mem::take(&mut self.lock().names);
            for name in in_order(names) {
                if let Err(error) = remove(&name)
                    && !error.is_missing()
                {
                    self.notice(error.to_string());
                }
            }
            done();

            let mut queue = self.lock();
            if queue.names.is_empty() {
                queue.running = false;
                return;
            }
        }
    }
}

/// The order of the removals: descriptions first. A save that is removed in part has none then, so
/// that it is not taken for a damaged one, and the next opening removes the rest.
fn in_order(names: BTreeSet<String>) -> Vec<String> {
    let is_description =
        |name: &String| matches!(SaveId::parse(name), Some((_, EntryKind::Description)));
    let (mut first, others): (Vec<_>, Vec<_>) = names.into_iter().partition(is_description);
    first.extend(others);
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_are_removed_first() {
        let names = [
            "step-00000030.rank-00000.00000000.0123456789abcdef.7",
            "step-00000030.ready.00000000.0123456789abcdef.7",
            "step-00000030.save.00000000.0123456789abcdef.7",
        ];
        let removals = Removals::default();
        assert!(removals.add(names.map(String::from).into()));
        let removed = Mutex::new(Vec::new());

        removals.run(
            |name| {
                removed.lock().unwrap().push(name.to_owned());
                Ok(())
            },
            || (),
        );

        let [file, ready, description] = names;
        assert_eq!(*removed.lock().unwrap(), [description, file, ready]);
    }
}
