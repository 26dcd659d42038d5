//! Which staged save `assemble` takes, and that it never mixes two.

use std::fs;
use std::path::Path;

use zero_ckpt::testing::SavePoint;
use zero_ckpt::{Reader, SaveMeta, Store, assemble, assemble_step, resolve};

use crate::common::{assert_holds, layout};
use crate::staged::{NONE, document_meta, on_ranks, run, save, save_seed, staged};

/// The fate of rank 0 at a point of the save.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// It ends without any cleanup.
    Kill,
    /// The next pointer, `latest` or `best`, cannot be written.
    Error,
}

/// Saves the state of `seed` on all ranks of `run a`, with a fault at a point of rank 0; returns
/// the errors.
fn save_with_fault(
    dir: &Path,
    (meta, seed): (&SaveMeta, u64),
    at: SavePoint,
    fault: Fault,
) -> Vec<String> {
    let layout = layout(2, 4);
    let outcomes = on_ranks(2, |rank, world| {
        let exchange = &mut world.rank(rank);
        let store = Store::create_on_ranks(dir, rank, run("a"), exchange, |_| Ok(())).unwrap();
        let pointer = dir.join(if at == SavePoint::Renamed {
            "latest"
        } else {
            "best"
        });
        let store = store.observe(move |point| match fault {
            _ if rank != 0 || point != at => {}
            Fault::Kill => std::panic::resume_unwind(Box::new("stopped on purpose")),
            Fault::Error => {
                fs::remove_file(&pointer).unwrap();
                fs::create_dir(&pointer).unwrap();
            }
        });
        save_seed(&store, &layout, (meta, seed), exchange)
    });

    outcomes
        .into_iter()
        .filter_map(|outcome| outcome.err())
        .map(|error| error.to_string())
        .collect()
}

/// A save replaces the checkpoint of its step, and fails once that has its final name: the replaced
/// files are never taken for those of the save, wherever they are then, whole or partly removed.
#[test]
fn replaced_checkpoint_is_no_staged_save() {
    for at in [SavePoint::Renamed, SavePoint::LatestMoved] {
        for fault in [Fault::Kill, Fault::Error] {
            let context = format!("{fault:?} at {at:?}");
            let dir = tempfile::tempdir().unwrap();
            assert!(save(dir.path(), &layout(2, 4), 7, &run("a"), None).is_empty());
            let other = document_meta(7)
                .documents([("run.json".to_owned(), serde_json::json!({"lr": 0.2}))].into());
            let errors = save_with_fault(dir.path(), (&other, 70), at, fault);
            assert_eq!(errors.len(), 2, "{context}");
            assert!(
                errors.iter().all(|error| !error.contains("is kept")),
                "{context}: {errors:?}"
            );
            assert_holds(&Reader::open(dir.path()).unwrap(), &layout(2, 4), 70);

            let staging = dir.path().join(".staging");
            let names = staged(dir.path());
            let description = names.iter().find(|name| name.contains(".save.")).unwrap();
            let ready = staging.join(description.replace(".save.", ".ready."));
            let refused = |moved: &str| {
                let new = tempfile::tempdir().unwrap();
                let assembled = assemble_step(new.path(), &[dir.path()], 7);
                assert!(assembled.is_err(), "{context}, {moved}: {assembled:?}");
            };
            refused("as left");
            // The name that it has between two system calls.
            if let Some(old) = names.iter().find(|name| name.contains(".old.")) {
                fs::rename(staging.join(old), &ready).unwrap();
            }
            refused("under the name of the save");
            fs::remove_file(ready.join("manifest.json")).unwrap();
            refused("without its manifest");
        }
    }
}

/// Step 8 is staged, the user continues from step 4, publishes step 6 and fails at step 7, in
/// another branch.
#[test]
fn newest_branch_is_assembled() {
    let dir = tempfile::tempdir().unwrap();
    let layout = layout(2, 4);
    let save =
        |step: u64, stop: Option<SavePoint>| save(dir.path(), &layout, step, &run("a"), stop);
    assert!(save(4, None).is_empty());
    assert_eq!(resolve(dir.path()).unwrap().staged, None);
    save(8, Some(SavePoint::DirCreated));
    let hint = resolve(dir.path()).unwrap().staged.unwrap();
    assert!(
        hint.contains("of step 8") && hint.contains("zero_ckpt::assemble"),
        "{hint}"
    );

    assert!(save(6, None).is_empty());
    assert_eq!(resolve(dir.path()).unwrap().staged, None);
    let new = tempfile::tempdir().unwrap();
    let error = assemble(new.path(), &[dir.path()]).unwrap_err().to_string();
    assert!(
        error.contains("step-00000006 was published after it was staged"),
        "{error}"
    );
    assert!(error.contains("zero_ckpt::assemble_step 8"), "{error}");

    save(7, Some(SavePoint::DirCreated));
    let hint = resolve(dir.path()).unwrap().staged.unwrap();
    assert!(hint.contains("of step 7"), "{hint}");
    let assembled = assemble(new.path(), &[dir.path()]).unwrap();
    assert_eq!(assembled.checkpoint.step, 7);
    let passed_over = &assembled.passed_over[..];
    assert!(
        matches!(passed_over, [other] if other.starts_with("step-00000008.") && other.contains("complete"))
    );

    let error = assemble_step(new.path(), &[dir.path()], 9)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("there are no staged files of step 9"),
        "{error}"
    );

    assert_eq!(
        assemble_step(new.path(), &[dir.path()], 8)
            .unwrap()
            .checkpoint
            .step,
        8
    );

    assert_holds(&Reader::open(new.path()).unwrap(), &layout, 8);
}

/// Entries that cannot be opened are a defect of the save that they name.
#[test]
fn stray_entry_does_not_stop_the_search() {
    let dir = tempfile::tempdir().unwrap();
    save(
        dir.path(),
        &layout(2, 4),
        7,
        &run("a"),
        Some(SavePoint::DirCreated),
    );
    let stray = "step-00000009.ready.252321d5.770df694368854c8.0";
    fs::write(dir.path().join(".staging").join(stray), "mine").unwrap();
    let assembled = assemble(dir.path(), &NONE).unwrap();
    assert_eq!(assembled.checkpoint.step, 7);
    assert!(
        assembled
            .passed_over
            .iter()
            .any(|defect| defect.contains(stray)),
        "{:?}",
        assembled.passed_over
    );
}

#[test]
fn steps_are_compared_as_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let layout = layout(2, 4);
    assert!(save(dir.path(), &layout, 99_999_999, &run("a"), None).is_empty());
    save(
        dir.path(),
        &layout,
        100_000_000,
        &run("a"),
        Some(SavePoint::DirCreated),
    );
    assert_eq!(
        assemble(dir.path(), &NONE).unwrap().checkpoint.step,
        100_000_000
    );
}
