//! The files that a save leaves: those of a failed one, old checkpoints that are deleted slowly, a
//! checkpoint whose save failed after it was published, a folder that was moved.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use zero_ckpt::testing::SavePoint;
use zero_ckpt::{
    CkptError, Exchange, PublishedCheckpoint, Reader, SingleRank, Store, assemble, resolve,
};

use crate::common::{
    NONE, assert_holds, fails, layout, meta, on_ranks, open, run, save_until, says, stage, staged,
};

type Saved = Result<PublishedCheckpoint, CkptError>;

/// The only rank saves `step`; no message is exchanged, so that no limit ends the save.
fn publish(store: &Store, step: u64) -> Saved {
    let layout = layout(1, 4);
    store.publish(&meta(step), &layout, vec![stage(store, &layout, step)])
}

/// A save that one rank could not stage can never be whole: no rank keeps a file of it.
#[test]
fn failed_staging_leaves_no_files() {
    for broken in [0, 1] {
        let dir = tempfile::tempdir().unwrap();
        let layout = layout(3, 4);
        on_ranks(3, |rank, world| {
            let store = open(dir.path(), rank, &run("a"), world);
            let work = || match rank == broken {
                true => Err(CkptError::Snapshot {
                    message: "no space".into(),
                }),
                false => stage(&store, &layout, 7),
            };
            let saved = store.save_with(&meta(7), &layout, work, &mut world.rank(rank));
            let expected = format!("rank {broken}: the snapshot failed: no space");
            assert_eq!(saved.unwrap_err().to_string(), expected);
        });
        assert_eq!(staged(dir.path()), [""; 0], "rank {broken}");
    }
}

/// While the first removals run, later ones wait for them, and one thread does all.
#[test]
fn one_thread_removes_old_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let passes = Arc::new(AtomicUsize::new(0));
    let (enter, entered) = channel();
    let (go, gone) = channel::<()>();
    let gone = std::sync::Mutex::new(gone);
    let store = Store::create(dir.path(), 0, run("a").keep_last(1)).unwrap();
    let counted = Arc::clone(&passes);
    let store = store.observe(move |at| {
        if at == SavePoint::Pruned && counted.fetch_add(1, Ordering::Relaxed) == 0 {
            enter.send(()).unwrap();
            let _ = gone.lock().unwrap().recv();
        }
    });

    publish(&store, 1).unwrap();
    entered.recv().unwrap();
    for step in 2..8 {
        publish(&store, step).unwrap();
    }
    go.send(()).unwrap();
    assert_eq!(store.finish_removals(), [""; 0]);
    assert_eq!(passes.load(Ordering::Relaxed), 2);
    assert_eq!(staged(dir.path()), [""; 0]);
}

/// A checkpoint that is being read is removed by a save after that.
#[test]
fn checkpoint_that_is_read_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path(), 0, run("a").keep_last(1)).unwrap();
    let exists = |step: u64| dir.path().join(format!("step-{step:08}")).exists();
    publish(&store, 1).unwrap();
    let readers = [Reader::open(dir.path()), Reader::open(dir.path())].map(Result::unwrap);
    publish(&store, 2).unwrap();
    assert!(exists(1) && exists(2));
    let [first, second] = readers;
    assert!(first.verify().problems.is_empty());
    first.release();
    publish(&store, 3).unwrap();
    assert!(exists(1) && !exists(2), "the second reader holds it");
    drop(second);
    publish(&store, 4).unwrap();
    assert!(!exists(1) && exists(4));
    assert_eq!(store.finish_removals(), [""; 0]);
}

/// A reader without a hold, as on a file system without locks: the error says what happened.
#[test]
fn read_of_a_removed_checkpoint_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path(), 0, run("a").keep_last(1)).unwrap();
    publish(&store, 1).unwrap();
    let reader = Reader::open(dir.path()).unwrap();
    reader.release();
    publish(&store, 2).unwrap();
    assert_eq!(store.finish_removals(), [""; 0]);
    let error = reader.verify().problems.remove(0).to_string();
    says(
        &error,
        &["step-00000001 was removed while it was read", "read again"],
    );
}

/// A pointer to a checkpoint that somebody deleted is no removal, and ends no search.
#[test]
fn deleted_checkpoint_of_a_pointer_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path(), 0, run("a")).unwrap();
    publish(&store, 1).unwrap();
    publish(&store, 2).unwrap();
    fs::remove_dir_all(dir.path().join("step-00000002")).unwrap();
    let reader = Reader::open(dir.path()).unwrap();
    assert_eq!(reader.manifest().step, 1);
    assert!(
        reader.notices()[0].contains("cannot open"),
        "{:?}",
        reader.notices()
    );
    fs::copy(dir.path().join("latest"), dir.path().join("best")).unwrap();
    fails(Reader::open_best(dir.path()).map(|_| ()), &["cannot open"]);
}

/// Staged files are those of a failed save only if no run saves there.
#[test]
fn staged_files_of_a_living_run_are_no_hint() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path(), 0, run("a")).unwrap();
    let name = "step-00000030.rank-00000.00000000.0123456789abcdef.7";
    fs::write(dir.path().join(".staging").join(name), "x").unwrap();
    let error = || resolve(dir.path()).map(|_| ()).unwrap_err().to_string();
    assert!(!error().contains("assemble"), "{}", error());
    drop(store);
    assert!(error().contains("assemble"), "{}", error());
}

/// Removals that never end are waited for once, whatever their number.
#[test]
fn hung_removals_are_waited_for_once() {
    let dir = tempfile::tempdir().unwrap();
    let (go, gone) = channel::<()>();
    let gone = std::sync::Mutex::new(gone);
    let options = run("a").keep_last(1).stall_limit(Duration::from_millis(20));
    let store = Store::create(dir.path(), 0, options).unwrap();
    let store = store.observe(move |at| {
        if at == SavePoint::Pruned {
            let _ = gone.lock().unwrap().recv();
        }
    });

    for step in 1..4 {
        publish(&store, step).unwrap();
    }
    let notices = store.finish_removals();
    let folder = dir.path().join(".staging").display().to_string();
    assert_eq!(notices.len(), 1, "{notices:?}");
    assert!(
        notices[0].contains(&folder) && notices[0].contains("0.02 s"),
        "{notices:?}"
    );
    assert_eq!(
        store.finish_removals(),
        [""; 0],
        "another wait would report it again"
    );
    drop(go);
}

/// A crash right after the exchange of the new checkpoint and the old one of its step: the name of
/// the save holds the old one, which nobody needs.
#[test]
fn opening_removes_the_replaced_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path();
    let save = |stop| save_until(stop, dir, &layout(2, 4), (&meta(5), 5), &run("a"));
    assert!(save(None).is_empty());
    assert_eq!(save(Some(SavePoint::ManifestSynced)).len(), 2);
    let names = staged(dir);
    let ready = names.iter().find(|name| name.contains(".ready.")).unwrap();
    let ready = dir.join(".staging").join(ready);
    let published = dir.join("step-00000005");
    fs::rename(&published, root.path().join("old")).unwrap();
    fs::rename(&ready, &published).unwrap();
    fs::rename(root.path().join("old"), &ready).unwrap();

    let notices = on_ranks(2, |rank, world| {
        open(dir, rank, &run("a"), world).finish_removals()
    });

    assert_eq!(notices[0], [""; 0]);
    assert_eq!(staged(dir), [""; 0]);
    assert_eq!(Reader::open(dir).unwrap().manifest().sequence, 2);
}

/// A checkpoint of another run that was moved here while this run saves is not replaced.
#[test]
fn later_checkpoint_of_another_run_is_kept() {
    let root = tempfile::tempdir().unwrap();
    let own = root.path().join("own");
    let other = root.path().join("other");
    let store = Store::create(&own, 0, run("a")).unwrap();
    publish(&Store::create(&other, 0, run("b")).unwrap(), 7).unwrap();
    let kept = own.join("step-00000007");
    fs::rename(other.join("step-00000007"), &kept).unwrap();

    let error = publish(&store, 7).unwrap_err();

    assert!(
        matches!(&error, CkptError::AnotherRun { run: Some(run), .. } if run == "b"),
        "{error}"
    );
    let reader = Reader::open(&kept).unwrap();
    assert_eq!(reader.manifest().run.as_deref(), Some("b"));
    // Nor is that of a program of another version.
    let manifest = kept.join("manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(
        &manifest,
        text.replacen("\"version\":2", "\"version\":3", 1),
    )
    .unwrap();
    let error = publish(&store, 7).unwrap_err();
    assert!(
        matches!(error, CkptError::UnsupportedVersion { found: 3, .. }),
        "{error}"
    );
    // Without a manifest it is no checkpoint of anyone.
    fs::remove_file(manifest).unwrap();
    publish(&store, 7).unwrap();
}

/// A rank whose file system does not answer, here its check, ends the opening on all ranks,
/// including itself.
#[test]
fn hung_opening_ends_on_all_ranks() {
    for hung in [0, 1] {
        let dir = tempfile::tempdir().unwrap();
        let (answer, wait) = channel::<()>();
        let wait = std::sync::Mutex::new(Some(wait));
        let errors = on_ranks(2, |rank, world| {
            let wait = (rank == hung).then(|| wait.lock().unwrap().take());
            // On a busy machine the other rank takes time, too.
            let options = run("a").stall_limit(Duration::from_secs(3));
            let check = move |_: &Store| {
                // Ends when the test does.
                let _ = wait.flatten().map(|wait| wait.recv());
                Ok(())
            };
            let exchange = &mut world.rank(rank);
            let opened = Store::create_on_ranks(dir.path(), rank, options, exchange, check);
            opened
                .err()
                .map_or_else(String::new, |error| error.to_string())
        });
        let expected = format!("rank {hung}: has waited for its checkpoint folder for 3");
        for error in errors {
            assert!(error.starts_with(&expected), "{error}");
        }
        drop(answer);
    }
}

#[test]
fn failure_after_publication_names_the_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path(), 0, run("a").keep_last(1)).unwrap();
    // A directory, which no file can replace.
    fs::create_dir(dir.path().join("latest")).unwrap();
    fails(
        publish(&store, 1),
        &["step-00000001 is published, but `latest` could not be updated: "],
    );
    assert_eq!(resolve(dir.path()).unwrap().reader.manifest().step, 1);
    fs::remove_dir(dir.path().join("latest")).unwrap();
    assert_eq!(publish(&store, 2).unwrap().sequence, 2);
    assert!(
        !dir.path().join("step-00000001").exists(),
        "keep_last counts the first one"
    );
}

#[test]
fn moved_folder_is_reported() {
    let root = tempfile::tempdir().unwrap();
    let dir: PathBuf = root.path().join("ckpt");
    let moved = root.path().join("moved");
    let in_time: &'static AtomicBool = Box::leak(AtomicBool::new(false).into());
    let store = Store::create(&dir, 0, run("a")).unwrap();
    let from = dir.clone();
    let to = moved.clone();
    let store = store.observe(move |at| {
        if at == SavePoint::ManifestSynced && in_time.load(Ordering::Relaxed) {
            fs::rename(&from, &to).unwrap();
        }
    });

    let names_both =
        |text: &str| text.contains(dir.to_str().unwrap()) && text.contains(moved.to_str().unwrap());

    // Moved, and another folder in its place.
    fs::rename(&dir, &moved).unwrap();
    fs::create_dir(&dir).unwrap();
    let error = publish(&store, 1).unwrap_err().to_string();
    assert!(names_both(&error) && error.contains("was moved"), "{error}");
    fs::remove_dir(&dir).unwrap();
    assert!(names_both(&publish(&store, 1).unwrap_err().to_string()));
    assert!(
        store
            .finish_removals()
            .iter()
            .any(|notice| names_both(notice))
    );

    // Moved back, and then moved while a checkpoint is published.
    fs::rename(&moved, &dir).unwrap();
    in_time.store(true, Ordering::Relaxed);
    let published = publish(&store, 2).unwrap();
    assert!(
        published.notices.iter().any(|notice| names_both(notice)),
        "{:?}",
        published.notices
    );
    assert_holds(&Reader::open(&moved).unwrap(), &layout(1, 4), 2);
}

#[test]
fn failed_exchange_is_named_once() {
    struct Unplugged;
    impl Exchange for Unplugged {
        type Error = String;
        fn gather(&mut self, record: &[u8]) -> Result<Vec<u8>, String> {
            Ok(record.to_vec())
        }
        fn broadcast(&mut self, message: &mut [u8], _: u64) -> Result<(), String> {
            // A slow machine may send pending messages first.
            if message.starts_with(b"{\"done") {
                Err("unplugged".into())
            } else {
                Ok(())
            }
        }
    }

    let dir = tempfile::tempdir().unwrap();
    let layout = layout(1, 4);
    let store = Store::create(dir.path(), 0, run("a")).unwrap();
    let saved = store.save_with(
        &meta(1),
        &layout,
        || stage(&store, &layout, 1),
        &mut Unplugged,
    );
    let error = saved.unwrap_err().to_string();

    assert_eq!(
        error
            .matches("the exchange between the ranks failed")
            .count(),
        1,
        "{error}"
    );

    says(
        &error,
        &["unplugged; step-00000001 is published all the same"],
    );
}

/// A rank whose staging panics, or fails after its file is staged, numbers the save as the others
/// do. Otherwise the names of later files do not match.
#[test]
fn failed_stage_keeps_numbers_equal() {
    for panics in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let layout = layout(2, 4);
        on_ranks(2, |rank, world| {
            let store = open(dir.path(), rank, &run("a"), world).observe(move |at| {
                if rank == 0 && at == SavePoint::DirCreated {
                    std::panic::resume_unwind(Box::new("stopped on purpose"));
                }
            });
            let fails = || match (rank, panics) {
                (0, _) => stage(&store, &layout, 1),
                (_, true) => std::panic::resume_unwind(Box::new("boom")),
                (_, false) => stage(&store, &layout, 1).and_then(|_| {
                    Err(CkptError::Snapshot {
                        message: "after staging".into(),
                    })
                }),
            };
            let exchange = &mut world.rank(rank);
            let failed = store.save_with(&meta(1), &layout, fails, exchange);
            assert!(failed.is_err());
            let kept = store.save_with(&meta(2), &layout, || stage(&store, &layout, 2), exchange);
            assert!(matches!(kept, Err(CkptError::Kept { .. })));
        });
        let assembled = assemble(dir.path(), &NONE).map_err(|error| error.to_string());
        assert_eq!(
            assembled.map(|assembled| assembled.checkpoint.step),
            Ok(2),
            "panics: {panics}"
        );
    }
}

#[test]
fn long_run_name_is_refused_at_opening() {
    let dir = tempfile::tempdir().unwrap();
    for rank in 0..2 {
        let error = Store::create(dir.path(), rank, run(&"x".repeat(5000)))
            .err()
            .map(|error| error.to_string());
        assert!(
            error
                .as_ref()
                .is_some_and(|error| error.contains("run") && error.contains("200")),
            "{error:?}"
        );
    }
    let longest = run(&"x".repeat(200));
    drop(Store::create_on_ranks(dir.path(), 0, longest, &mut SingleRank, |_| Ok(())).unwrap());
}
