//! Renaming a new checkpoint into place, replacing an existing one of the same step.
//!
//! ```text
//! no checkpoint has the name        one rename
//! the file system can exchange      an atomic exchange; the old checkpoint is then .staging/step-00000030.old.<random>
//! it cannot (NFS)                   one rename to a backup, DIR/step-00000030.old.<random>; another into place
//! ```
//!
//! Until the new checkpoint has the name, the backup is the only copy of the step, and readers open
//! it. [`resolve_backups`] later restores the backup if no entry has the checkpoint's name, or
//! removes it if a complete checkpoint has that name.

use crate::format::names::{backup_name, backup_of};
use crate::io::dir::Dir;
use crate::{CkptError, Reader};

/// Renames `staging/from` to `dir/name`; calls `backed_up` after it has renamed an old checkpoint
/// to a backup.
pub(crate) fn replace(
    staging: &Dir,
    from: &str,
    dir: &Dir,
    name: &str,
    backed_up: impl FnOnce(),
) -> Result<(), CkptError> {
    if !dir.has(name) {
        return staging.rename(from, dir, name);
    }
    if staging.exchange(from, dir, name)? {
        // `from` would name the old checkpoint as the files of the new save. If this fails,
        // `assemble` still finds that its manifest is not that of the save.
        let _ = staging.rename(from, staging, &backup_name(name));
        return Ok(());
    }
    let backup = backup_name(name);
    let moved = dir.rename(name, dir, &backup).and_then(|()| {
        backed_up();
        staging.rename(from, dir, name)
    });
    // If this fails too, the backup remains for readers and for `resolve_backups`.
    moved.inspect_err(|_| drop(dir.rename(&backup, dir, name)))
}

/// Restores all backups, the newest first, or moves them into `staging`, and returns their names
/// there. Keeps a backup that is the only copy or cannot be renamed.
pub(crate) fn resolve_backups(dir: &Dir, staging: &Dir) -> Vec<String> {
    let sequence = |name: &str| {
        let complete = dir
            .open_dir(name)
            .and_then(|d| Reader::open_one(d, Vec::new()));
        complete.ok().map(|reader| reader.manifest().sequence)
    };

    let names = dir.names().unwrap_or_default();
    // Opens backups only: a directory of complete checkpoints costs nothing here.
    let backups = names
        .iter()
        .filter_map(|backup| backup_of(backup).map(|name| (sequence(backup), backup, name)));
    let mut backups: Vec<_> = backups.collect();
    backups.sort_unstable();
    let mut hidden = Vec::new();

    for (complete, backup, name) in backups.into_iter().rev() {
        if complete.is_some() && !dir.has(name) {
            let _ = dir.rename(backup, dir, name).and_then(|()| dir.sync());
        } else if sequence(name).is_some() {
            // Hides it by one rename, so that no reader opens it partly removed.
            hidden.extend(
                dir.rename(backup, staging, backup)
                    .is_ok()
                    .then(|| backup.to_owned()),
            );
        }
    }

    hidden
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::path::Path;

    use zero_shard::{Layout, ParamSpec, UnitSpec};

    use super::*;
    use crate::io::dir::WITHOUT_EXCHANGE;
    use crate::save::store::SavePoint;
    use crate::{PublishedCheckpoint, SaveMeta, ShardData, Store, StoreOptions};

    /// Saves `step`, all elements `value`, as the only rank; `at` is called at each point.
    fn save(
        path: &Path,
        (step, value): (u64, f32),
        at: impl Fn(SavePoint) + Send + Sync + 'static,
    ) -> Result<PublishedCheckpoint, CkptError> {
        let units = [UnitSpec::new("head", [ParamSpec::new("w", [3, 5])])];
        let layout = Layout::new(&units, 1, 1).unwrap();
        let values = [value; 15];
        let mut shard = ShardData::new(&layout, 0).unwrap();
        shard.storage_f32("master", &values).unwrap();

        let store = Store::create(path, 0, StoreOptions::default().keep_last(2))?.observe(at);
        // On this thread, to which `WITHOUT_EXCHANGE` applies.
        let staged = store.stage(step, &shard);
        store.publish(&SaveMeta::default().step(step), &layout, vec![staged])
    }

    /// The step and value that a reader finds.
    fn found(path: &Path) -> (u64, f32) {
        let reader = Reader::open(path).unwrap();
        assert!(reader.notices().is_empty(), "{:?}", reader.notices());
        let mut out = [0.0; 15];
        reader.read_param("master", "w", 0..15, &mut out).unwrap();
        (reader.manifest().step, out[7])
    }

    /// Names in the directory, except hidden ones.
    fn names(path: &Path) -> Vec<String> {
        let names = std::fs::read_dir(path)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.filter(|name| !name.starts_with('.')).collect();
        names.sort();
        names
    }

    /// The points of this thread.
    fn points() -> impl Iterator<Item = SavePoint> {
        SavePoint::ALL
            .into_iter()
            .filter(|at| *at != SavePoint::Pruned)
            .chain([SavePoint::BackedUp])
    }

    #[test]
    #[cfg_attr(miri, ignore)]
    fn interrupted_replacement_leaves_old_or_new() {
        WITHOUT_EXCHANGE.set(true);
        for stop in points() {
            let dir = tempfile::tempdir().unwrap();
            for saved in [(10, 1.0), (20, 2.0)] {
                save(dir.path(), saved, |_| ()).unwrap();
            }
            // The panic skips all cleanup of `save`.
            let stopped = catch_unwind(AssertUnwindSafe(|| {
                save(dir.path(), (20, 3.0), move |at| {
                    assert_ne!(at, stop, "stopped on purpose")
                })
            }));
            assert!(stopped.is_err(), "{stop:?}");
            let renamed = matches!(
                stop,
                SavePoint::Renamed | SavePoint::LatestMoved | SavePoint::Pruning
            );
            assert_eq!(
                found(dir.path()),
                (20, if renamed { 3.0 } else { 2.0 }),
                "stopped at {stop:?}"
            );

            // The next run restores the backup before it saves, and does not remove the only copy.
            drop(Store::create(dir.path(), 0, StoreOptions::default()).unwrap());
            assert_eq!(
                names(dir.path()),
                ["latest", "step-00000010", "step-00000020"],
                "stopped at {stop:?}"
            );
            save(dir.path(), (30, 4.0), |_| ()).unwrap();
            assert_eq!(
                names(dir.path()),
                ["latest", "step-00000020", "step-00000030"],
                "stopped at {stop:?}"
            );
            assert_eq!(found(dir.path()), (30, 4.0), "stopped at {stop:?}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore)]
    fn failed_replacement_restores_the_backup() {
        WITHOUT_EXCHANGE.set(true);
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().to_path_buf();
        save(&path, (20, 2.0), |_| ()).unwrap();

        // If the new checkpoint is lost, the backup is restored.
        let staging = path.join(".staging");
        let failed = save(&path, (20, 3.0), move |at| {
            if at == SavePoint::BackedUp {
                std::fs::remove_dir_all(&staging).unwrap();
            }
        });

        assert!(failed.is_err());
        assert_eq!(
            (names(&path), found(&path)),
            (vec!["latest".into(), "step-00000020".into()], (20, 2.0))
        );

        // If another directory has the checkpoint's name, later saves keep the backup.
        let name = path.join("step-00000020");
        let failed = save(&path, (20, 3.0), move |at| {
            if at == SavePoint::BackedUp {
                std::fs::create_dir_all(name.join("in the way")).unwrap();
            }
        });

        assert!(failed.is_err());
        let reader = Reader::open(&path).unwrap();
        assert_eq!(
            (reader.manifest().step, reader.notices().len()),
            (20, 1),
            "{:?}",
            reader.notices()
        );
        save(&path, (30, 4.0), |_| ()).unwrap();
        assert_eq!(names(&path).len(), 4, "{:?}", names(&path));
        std::fs::remove_dir_all(path.join("step-00000030")).unwrap();
        std::fs::remove_file(path.join("latest")).unwrap();
        assert_eq!(Reader::open(&path).unwrap().manifest().step, 20);

        // Saving the step again removes the backup.
        save(&path, (20, 5.0), |_| ()).unwrap();
        assert_eq!(
            (names(&path), found(&path)),
            (vec!["latest".into(), "step-00000020".into()], (20, 5.0))
        );
    }
}
