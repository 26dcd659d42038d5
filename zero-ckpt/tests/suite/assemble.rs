//! Which staged save `assemble` takes, and that it never mixes two.

use std::fs;
use std::path::Path;

use zero_ckpt::testing::SavePoint;
use zero_ckpt::{CkptError, Reader, SaveMeta, assemble, assemble_step};
use zero_shard::{Layout, ParamSpec, UnitSpec};

use crate::common::{assert_holds, layout, run, save_observed, saved, staged};
use crate::staged::{document_meta, save};

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
    let pointer = dir.join(if at == SavePoint::Renamed {
        "latest"
    } else {
        "best"
    });
    let observe = move |point| match fault {
        _ if point != at => {}
        Fault::Kill => std::panic::resume_unwind(Box::new("stopped on purpose")),
        Fault::Error => {
            fs::remove_file(&pointer).unwrap();
            fs::create_dir(&pointer).unwrap();
        }
    };
    save_observed(dir, &layout(2, 4), (meta, seed), &run("a"), observe)
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

/// The names under which files are linked for a publication that is then refused.
#[test]
fn refused_assembly_leaves_no_files() {
    let dir = tempfile::tempdir().unwrap();
    save(
        dir.path(),
        &layout(2, 4),
        7,
        &run("a"),
        Some(SavePoint::DirCreated),
    );
    let before = staged(dir.path());
    let into = tempfile::tempdir().unwrap();
    let other = Layout::new(&[UnitSpec::new("u", [ParamSpec::new("w", [3])])], 1, 1).unwrap();
    saved(into.path(), &other, 1, 1, &run("a"));

    let refused = assemble(into.path(), &[dir.path()]).unwrap_err();

    assert!(
        matches!(refused, CkptError::AnotherModel { .. }),
        "{refused}"
    );
    assert_eq!(staged(into.path()), [""; 0]);
    assert_eq!(staged(dir.path()), before);
}
