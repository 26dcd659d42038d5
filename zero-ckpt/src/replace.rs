//! A checkpoint takes its name, which another of the same step may have.
//!
//! ```text
//! the name is free                  one rename
//! the file system can exchange      the two change places in one step: the old one is in .staging then
//! it cannot (NFS)                   the old one stands aside, as DIR/step-00000030.old.<random>; one rename
//! ```
//!
//! What stands aside is the only copy until the new one has the name, and readers find it there. [`settle`] decides
//! what becomes of it: it gets its name back where nothing has it, and goes where the checkpoint that has it is
//! whole.

use crate::catalog::{aside_name, aside_of};
use crate::dir::Dir;
use crate::{CkptError, Reader};

/// Gives `staging/from` the name `dir/name`; `stood_aside` is called where the old one stands aside.
pub(crate) fn take_name(
    staging: &Dir,
    from: &str,
    dir: &Dir,
    name: &str,
    stood_aside: impl FnOnce(),
) -> Result<(), CkptError> {
    if !dir.has(name) {
        return staging.rename(from, dir, name);
    }
    if staging.exchange(from, dir, name)? {
        return Ok(());
    }
    let aside = aside_name(name);
    let moved = dir.rename(name, dir, &aside).and_then(|()| {
        stood_aside();
        staging.rename(from, dir, name)
    });
    // Where this fails too it stays aside, for readers to find and for `settle`.
    moved.inspect_err(|_| drop(dir.rename(&aside, dir, name)))
}

/// Decides about all checkpoints that stand aside, the newest first; one that stays is the only copy, or cannot be
/// moved.
pub(crate) fn settle(dir: &Dir, staging: &Dir) {
    let sequence = |name: &str| {
        let whole = dir.open_dir(name).and_then(|d| Reader::open_one(d, Vec::new()));
        whole.ok().map(|reader| reader.manifest().sequence)
    };
    let names = dir.names().unwrap_or_default();
    let asides = names.iter().filter_map(|aside| Some((sequence(aside), aside, aside_of(aside)?)));
    let mut asides: Vec<_> = asides.collect();
    asides.sort_unstable();
    for (whole, aside, name) in asides.into_iter().rev() {
        if whole.is_some() && !dir.has(name) {
            let _ = dir.rename(aside, dir, name).and_then(|()| dir.sync());
        } else if sequence(name).is_some() {
            // First out of sight in one step, so that no reader ever finds half of it.
            let _ = dir.rename(aside, staging, aside).and_then(|()| staging.remove(aside));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::path::Path;

    use zero_shard::{Layout, ParamSpec, UnitSpec};

    use super::*;
    use crate::dir::WITHOUT_EXCHANGE;
    use crate::{Published, SAVE_POINTS, SaveMeta, SavePoint, ShardData, Store, StoreOptions};

    /// Saves `step`, all elements `value`, as the only rank; `at` is called at each point.
    fn save(
        path: &Path,
        (step, value): (u64, f32),
        at: impl Fn(SavePoint) + Send + Sync + 'static,
    ) -> Result<Published, CkptError> {
        let layout = Layout::new(&[UnitSpec::new("head", [ParamSpec::new("w", [3, 5])])], 1, 1).unwrap();
        let values = [value; 15];
        let mut shard = ShardData::new(&layout, 0).unwrap();
        shard.storage_f32("master", &values).unwrap();
        let store = Store::create(path, 0, StoreOptions { keep_last: Some(2), ..StoreOptions::default() })?;
        let meta = SaveMeta { step, dtype: "fp32".into(), ..SaveMeta::default() };
        store.observe(at).save(&meta, &shard, |frame| Ok::<_, String>(vec![frame.to_vec()]))
    }

    /// What a reader finds: the step and the value.
    fn found(path: &Path) -> (u64, f32) {
        let reader = Reader::open(path).unwrap();
        assert!(reader.notices().is_empty(), "{:?}", reader.notices());
        let mut out = [0.0; 15];
        reader.read_param("master", "w", 0..15, &mut out).unwrap();
        (reader.manifest().step, out[7])
    }

    /// What lies in the directory, hidden names apart.
    fn names(path: &Path) -> Vec<String> {
        let names = std::fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.filter(|name| !name.starts_with('.')).collect();
        names.sort();
        names
    }

    fn points() -> impl Iterator<Item = SavePoint> {
        SAVE_POINTS.into_iter().chain([SavePoint::OldAside])
    }

    #[test]
    #[cfg_attr(miri, ignore)]
    fn without_an_exchange_a_stop_anywhere_leaves_the_old_one_or_the_new_one() {
        WITHOUT_EXCHANGE.set(true);
        for stop in points() {
            let dir = tempfile::tempdir().unwrap();
            for saved in [(10, 1.0), (20, 2.0)] {
                save(dir.path(), saved, |_| ()).unwrap();
            }
            // Nothing is cleared away behind a stop: all that `save` has done by then stays as it is.
            let stopped = catch_unwind(AssertUnwindSafe(|| {
                save(dir.path(), (20, 3.0), move |at| assert_ne!(at, stop, "stopped on purpose"))
            }));
            assert!(stopped.is_err(), "{stop:?}");
            let renamed = matches!(stop, SavePoint::Renamed | SavePoint::LatestMoved | SavePoint::Pruned);
            assert_eq!(found(dir.path()), (20, if renamed { 3.0 } else { 2.0 }), "stopped at {stop:?}");

            // The next run gives the name back before it saves anything, and sweeps no only copy.
            drop(Store::create(dir.path(), 0, StoreOptions::default()).unwrap());
            assert_eq!(names(dir.path()), ["latest", "step-00000010", "step-00000020"], "stopped at {stop:?}");
            save(dir.path(), (30, 4.0), |_| ()).unwrap();
            assert_eq!(names(dir.path()), ["latest", "step-00000020", "step-00000030"], "stopped at {stop:?}");
            assert_eq!(found(dir.path()), (30, 4.0), "stopped at {stop:?}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore)]
    fn without_an_exchange_a_refused_rename_puts_the_old_one_back() {
        WITHOUT_EXCHANGE.set(true);
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().to_path_buf();
        save(&path, (20, 2.0), |_| ()).unwrap();

        // What was to take the name is gone: the old one gets it back.
        let staging = path.join(".staging");
        let refused = save(&path, (20, 3.0), move |at| {
            if at == SavePoint::OldAside {
                std::fs::remove_dir_all(&staging).unwrap();
            }
        });
        assert!(refused.is_err());
        assert_eq!((names(&path), found(&path)), (vec!["latest".into(), "step-00000020".into()], (20, 2.0)));

        // The name is taken by something that is no checkpoint: the old one stays aside, whatever else is saved and
        // swept.
        let name = path.join("step-00000020");
        let refused = save(&path, (20, 3.0), move |at| {
            if at == SavePoint::OldAside {
                std::fs::create_dir_all(name.join("in the way")).unwrap();
            }
        });
        assert!(refused.is_err());
        let reader = Reader::open(&path).unwrap();
        assert_eq!((reader.manifest().step, reader.notices().len()), (20, 1), "{:?}", reader.notices());
        save(&path, (30, 4.0), |_| ()).unwrap();
        assert_eq!(names(&path).len(), 4, "{:?}", names(&path));
        std::fs::remove_dir_all(path.join("step-00000030")).unwrap();
        std::fs::remove_file(path.join("latest")).unwrap();
        assert_eq!(Reader::open(&path).unwrap().manifest().step, 20);

        // Saved again, the step has its name and nothing stands aside.
        save(&path, (20, 5.0), |_| ()).unwrap();
        assert_eq!((names(&path), found(&path)), (vec!["latest".into(), "step-00000020".into()], (20, 5.0)));
    }
}
