//! Staged files: how long ranks wait for them, what a failed save leaves, and the checkpoint that
//! is assembled of it.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tempfile::TempDir;
use zero_ckpt::testing::SavePoint;
use zero_ckpt::{CkptError, Exchange, Reader, SaveMeta, Store, StoreOptions, assemble};
use zero_shard::Layout;

use crate::common::{
    NONE, assert_holds, fails, kept, layout, meta, on_ranks, open, run, save_until, staged,
    wait_until, with_shard,
};

/// All ranks save `step`; rank 0 panics at `stop`.
pub(crate) fn save(
    dir: &Path,
    layout: &Layout,
    step: u64,
    options: &StoreOptions,
    stop: Option<SavePoint>,
) -> Vec<String> {
    save_until(stop, dir, layout, (&document_meta(step), step), options)
}

pub(crate) fn document_meta(step: u64) -> SaveMeta {
    meta(step)
        .documents([("run.json".to_owned(), serde_json::json!({"lr": 0.1}))].into())
        .best(Some(step))
}

fn assert_equal(a: &Path, b: &Path) {
    let a = Reader::open(a).unwrap();
    let b = Reader::open(b).unwrap();
    assert_eq!(a.manifest(), b.manifest());
    let files = a.manifest().files.iter().map(|file| &file.name);
    for name in files.chain(a.manifest().documents.iter().map(|document| &document.name)) {
        assert!(
            fs::read(a.path().join(name)).unwrap() == fs::read(b.path().join(name)).unwrap(),
            "{name}"
        );
    }
    assert!(a.verify().problems.is_empty() && b.verify().problems.is_empty());
}

#[test]
fn assembled_checkpoint_is_the_published_one() {
    let layout = layout(3, 4);
    let published = tempfile::tempdir().unwrap();
    assert!(save(published.path(), &layout, 7, &run("a"), None).is_empty());
    for stop in [
        SavePoint::DirCreated,
        SavePoint::FilesMoved,
        SavePoint::ManifestSynced,
    ] {
        let dir = tempfile::tempdir().unwrap();
        let errors = save(dir.path(), &layout, 7, &run("a"), Some(stop));
        assert_eq!(errors.len(), 3, "{stop:?}");
        for error in &errors {
            assert!(kept(error).is_some_and(Path::exists), "{stop:?}: {error}");
        }
        fails(Reader::open(dir.path()), &["zero_ckpt::assemble"]);
        let before = staged(dir.path());
        let assembled = assemble(dir.path(), &NONE).unwrap();
        assert_eq!(
            (assembled.checkpoint.step, assembled.passed_over.len()),
            (7, 0)
        );
        assert_equal(dir.path(), published.path());
        assert_eq!(Reader::open_best(dir.path()).unwrap().manifest().step, 7);
        assert_eq!(staged(dir.path()), before, "nothing is removed");
        fails(
            assemble(dir.path(), &NONE),
            &["has step-00000007, of the same or a later step; name a new folder first"],
        );
        // The next save of the run removes what the checkpoint supersedes.
        assert!(save(dir.path(), &layout, 8, &run("a"), None).is_empty());
        assert_eq!(staged(dir.path()), [""; 0], "{stop:?}");
    }
}

/// The folders of two machines: rank 0's has the description and its file, the other one the files
/// of ranks 1 and 2.
pub(crate) fn two_machines(step: u64) -> (TempDir, PathBuf, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let a = dir.path().join("a");
    let b = dir.path().join("b");
    save(
        &a,
        &layout(3, 4),
        step,
        &run("a"),
        Some(SavePoint::DirCreated),
    );

    fs::create_dir_all(b.join(".staging")).unwrap();
    for name in staged(&a) {
        if name.contains(".rank-00001") || name.contains(".rank-00002") {
            fs::rename(
                a.join(".staging").join(&name),
                b.join(".staging").join(&name),
            )
            .unwrap();
        }
    }

    (dir, a, b)
}

#[test]
fn folders_of_machines_are_assembled_together() {
    let (dir, a, b) = two_machines(7);
    fails(
        assemble(&a, &NONE),
        &["the files of 2 of 3 ranks are missing: 1, 2"],
    );
    fails(
        assemble(&b, &NONE),
        &["description, which rank 0 writes beside its file, is missing"],
    );
    assert_eq!(
        assemble(dir.path().join("nothing"), &NONE)
            .unwrap_err()
            .to_string(),
        "no staged save can be assembled; there are no staged files"
    );

    // Into a new folder, of folders or of their .staging, one of them given twice.
    let out = dir.path().join("out");
    assemble(&out, &[&a, &b.join(".staging"), &b]).unwrap();
    assert_holds(&Reader::open(&out).unwrap(), &layout(2, 1), 7);
    // Into the first one.
    assemble(&a, &[&b]).unwrap();
    assert_equal(&a, &out);
}

#[test]
fn different_saves_are_not_mixed() {
    let (_dir, a, b) = two_machines(7);
    let (_other_dir, other_a, other_b) = two_machines(7);
    fails(
        assemble(&a, &[&other_b]),
        &["the files of 2 of 3 ranks are missing"],
    );
    fails(
        assemble(&a, &[&b, &other_a, &other_b]),
        &["several saves are complete, and which one was staged last is not known"],
    );
    // A renamed file of another step is not taken for one of this save.
    let (_later_dir, _, later_b) = two_machines(8);
    let own = staged(&b);

    for (own, later) in own.iter().zip(staged(&later_b)) {
        fs::copy(
            later_b.join(".staging").join(later),
            b.join(".staging").join(own),
        )
        .unwrap();
    }

    let renamed = assemble(&a, &[&b]).unwrap_err().to_string();
    assert_eq!(
        renamed
            .matches("its header is not that of the save")
            .count(),
        2,
        "{renamed}"
    );
}

#[test]
fn damaged_staged_file_is_named() {
    let (_dir, a, b) = two_machines(7);
    let path = b.join(".staging").join(&staged(&b)[0]);
    let good = fs::read(&path).unwrap();
    for at in [0, 20, 4096 - 8, good.len() - 1] {
        let mut bad = good.clone();
        bad[at] ^= 1;
        fs::write(&path, bad).unwrap();
        let error = assemble(&a, &[&b]).unwrap_err().to_string();
        assert!(
            error.contains(".rank-00001.") && !error.contains(".rank-00002."),
            "byte {at}: {error}"
        );
    }

    fs::write(&path, &good[1..]).unwrap();
    assert!(
        assemble(&a, &[&b])
            .unwrap_err()
            .to_string()
            .contains("bytes long")
    );
    // A whole copy elsewhere is taken in its place.
    let copy = b.join(staged(&b)[0].as_str());
    fs::write(copy, good).unwrap();
    assemble(&a, &[&b]).unwrap();
}

/// The open of one rank fails, or it sees another folder: all ranks return one error that names it.
#[test]
fn all_ranks_learn_that_the_folder_is_not_shared() {
    for ranks in [2, 3] {
        let dir = tempfile::tempdir().unwrap();
        let last = ranks - 1;
        let errors = |path: &(dyn Fn(u64) -> PathBuf + Sync)| {
            let opened = on_ranks(ranks, |rank, world| {
                let options = StoreOptions::default();
                Store::create_on_ranks(path(rank), rank, options, &mut world.rank(rank), |_| Ok(()))
                    .map(drop)
            });
            opened
                .into_iter()
                .map(|opened| opened.unwrap_err())
                .collect::<Vec<_>>()
        };
        let folder = |rank| dir.path().join(if rank == last { "b" } else { "a" });
        for error in errors(&folder) {
            let text = error.to_string();
            assert!(
                matches!(error, CkptError::NotShared { rank, .. } if rank == last),
                "{text}"
            );
            let a = dir.path().join("a");
            let b = dir.path().join("b");
            let folders = format!(
                "folder {} is not the folder {} of rank 0",
                b.display(),
                a.display()
            );
            assert!(
                text.starts_with(&format!("rank {last}: its checkpoint {folders}")),
                "{text}"
            );
        }
        fs::write(dir.path().join("file"), "").unwrap();
        for broken in [0, last] {
            let folder = |rank| dir.path().join(if rank == broken { "file" } else { "a" });
            let errors = errors(&folder);
            let text = errors[1].to_string();
            assert!(
                text.starts_with(&format!("rank {broken}: cannot create")),
                "{text}"
            );
            assert!(
                errors
                    .iter()
                    .all(|error| error.to_string().contains("cannot create")),
                "{errors:?}"
            );
        }
        assert!(staged(&dir.path().join("a")).is_empty());
    }
}

/// An exchange that counts its calls on all ranks.
struct Counted<'a, E>(E, &'a AtomicUsize);

impl<E: Exchange> Exchange for Counted<'_, E> {
    type Error = E::Error;

    fn gather(&mut self, record: &[u8]) -> Result<Vec<u8>, E::Error> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.gather(record)
    }

    fn broadcast(&mut self, message: &mut [u8], root: u64) -> Result<(), E::Error> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.broadcast(message, root)
    }
}

/// Rank 1 writes, and rank 0 publishes, only once more messages are exchanged: ranks that wait for
/// each other exchange. Rank 0 deletes only once the others have the outcome.
#[test]
fn waiting_ranks_exchange_messages() {
    let dir = tempfile::tempdir().unwrap();
    let layout = layout(3, 4);
    let calls = AtomicUsize::new(0);
    let done = AtomicUsize::new(0);
    let (calls, done): (&'static AtomicUsize, &'static AtomicUsize) =
        (Box::leak(calls.into()), Box::leak(done.into()));

    on_ranks(3, |rank, world| {
        let store = open(dir.path(), rank, &run("a"), world).observe(move |at| {
            let more = calls.load(Ordering::Relaxed) + 7;
            match (at, rank) {
                (SavePoint::FileCreated, 1) | (SavePoint::ManifestSynced, 0) => {
                    let what = format!("no messages at {at:?}");
                    wait_until(&what, || calls.load(Ordering::Relaxed) >= more);
                }
                (SavePoint::Pruning, 0) => {
                    let what = "deletes before the others continue";
                    wait_until(what, || done.load(Ordering::Relaxed) == 2);
                }
                _ => {}
            }
        });
        let mut exchange = Counted(world.rank(rank), calls);
        with_shard(&layout, rank, 7, |shard| {
            store.save(&meta(7), shard, &mut exchange).unwrap()
        });
        done.fetch_add(1, Ordering::Relaxed);
    });

    assert_holds(&Reader::open(dir.path()).unwrap(), &layout, 7);
}

/// A rank whose disk does not answer, here its observer, is named by all ranks; its file is kept
/// once it is written.
#[test]
fn rank_without_progress_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let layout = layout(3, 4);
    let failed: &'static AtomicUsize = Box::leak(AtomicUsize::new(0).into());
    let errors = on_ranks(3, |rank, world| {
        let options = run("a").stall_limit(Duration::from_millis(200));
        let folder = dir.path().join("ckpt");
        let path = folder.clone();
        let store = open(&folder, rank, &options, world).observe(move |at| {
            if (at, rank) == (SavePoint::FileCreated, 1) {
                // The others have staged, so that none of them can be slow; then they have the
                // error.
                wait_until("no error", || {
                    failed.load(Ordering::Relaxed) == 2 && path.exists()
                });
            }
        });
        if rank == 1 {
            // Three files and the description of the two other ranks.
            wait_until("not staged", || staged(&folder).len() == 3);
        }
        let saved = with_shard(&layout, rank, 7, |shard| {
            store.save(&meta(7), shard, &mut world.rank(rank))
        });
        let error = saved.unwrap_err().to_string();
        failed.fetch_add(1, Ordering::Relaxed);
        error
    });

    for error in errors {
        assert!(
            error.starts_with("rank 1: has written nothing for step 7 for 0.2 s"),
            "{error}"
        );
        assert!(error.contains("is kept: "), "{error}");
    }

    assert_eq!(
        assemble(dir.path().join("ckpt"), &NONE)
            .unwrap()
            .checkpoint
            .step,
        7
    );
}
