//! Runs that meet in one directory, their documents, and the choice of the checkpoint to resume
//! from.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;
use tempfile::TempDir;
use zero_ckpt::{
    CkptError, MANIFEST_NAME, Reader, Store, StoreOptions, count_checkpoints, has_checkpoints,
    resolve,
};

use crate::common::{each_flip, fails, flip, meta, run, save_alone};

fn saved(steps: &[u64], options: &StoreOptions) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    steps
        .iter()
        .for_each(|step| drop(save_alone(dir.path(), &meta(*step), options).unwrap()));
    dir
}

fn steps(dir: &Path) -> Vec<u64> {
    let names = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut steps: Vec<u64> = names
        .filter_map(|n| n.strip_prefix("step-")?.parse().ok())
        .collect();
    steps.sort_unstable();
    steps
}

fn at(dir: &TempDir, step: u64, file: &str) -> PathBuf {
    dir.path().join(format!("step-{step:08}")).join(file)
}

const SHARD: &str = "shard-00000-of-00001.safetensors";

#[test]
fn another_runs_checkpoints_are_kept() {
    let dir = saved(&[5, 10], &run("a"));
    let other = run("b").keep_last(1);
    let by_store = Store::create(dir.path(), 0, other.clone())
        .unwrap()
        .check_runs();

    for refused in [other.check_runs(dir.path()), by_store] {
        let error = refused.unwrap_err();
        assert!(
            matches!(&error, CkptError::AnotherRun { run: Some(run), .. } if run == "a"),
            "{error}"
        );
        assert!(
            error
                .to_string()
                .contains("step-00000010: a checkpoint of another run (a)"),
            "{error}"
        );
    }

    // A program that ignores the check still neither removes nor replaces them.
    for step in [15, 20] {
        save_alone(dir.path(), &meta(step), &other).unwrap();
    }
    assert_eq!(steps(dir.path()), [5, 10, 20]);
    let replaced = save_alone(dir.path(), &meta(10), &other).unwrap_err();
    let CkptError::Kept { error, .. } = &replaced else {
        panic!("{replaced}")
    };
    assert!(matches!(**error, CkptError::AnotherRun { .. }), "{error}");

    assert_eq!(
        Reader::open(at(&dir, 10, ""))
            .unwrap()
            .manifest()
            .run
            .as_deref(),
        Some("a")
    );

    let heir = other.run("c").resumed_runs(vec!["a".into(), "b".into()]);
    heir.check_runs(dir.path()).unwrap();
    save_alone(dir.path(), &meta(10), &heir).unwrap();
    assert_eq!(steps(dir.path()), [10]);
}

#[test]
fn checkpoints_without_run_are_another_runs() {
    let dir = saved(&[1], &StoreOptions::default());
    StoreOptions::default().check_runs(dir.path()).unwrap();
    let error = run("a").check_runs(dir.path()).unwrap_err();
    assert!(
        matches!(error, CkptError::AnotherRun { run: None, .. }),
        "{error}"
    );
    let resumed = run("a").resumed_runs(vec![String::new()]);
    resumed.check_runs(dir.path()).unwrap();
}

#[test]
fn unreadable_checkpoints_are_not_overwritten() {
    let dir = saved(&[1, 2], &run("a"));
    fs::write(at(&dir, 2, MANIFEST_NAME), "").unwrap();
    // Beside a readable one it belongs to the same run.
    run("a").check_runs(dir.path()).unwrap();
    fs::write(at(&dir, 1, MANIFEST_NAME), "").unwrap();
    for name in ["a", "b"] {
        let error = run(name).check_runs(dir.path()).unwrap_err();
        assert!(
            matches!(error, CkptError::AnotherRun { run: None, .. }),
            "{error}"
        );
    }
    assert!(has_checkpoints(dir.path()).unwrap());
}

#[test]
fn checkpoint_is_not_a_store() {
    let dir = saved(&[1, 2], &run("a"));
    assert_eq!(count_checkpoints(dir.path()).unwrap(), 2);
    fails(
        run("a").check_runs(at(&dir, 1, "")),
        &["expected a directory of checkpoints, got a checkpoint"],
    );
    run("a").check_runs(dir.path().join("new")).unwrap();
    assert!(!dir.path().join("new").exists() && !has_checkpoints(dir.path().join("new")).unwrap());
}

#[test]
fn best_is_named_and_never_pruned() {
    let dir = tempfile::tempdir().unwrap();
    let options = run("a").keep_last(2);
    let save = |step, best, superseded| {
        save_alone(
            dir.path(),
            &meta(step).best(best).superseded(superseded),
            &options,
        )
        .unwrap();
        steps(dir.path())
    };

    let best = || Reader::open_best(dir.path()).map(|reader| reader.manifest().step);
    save(1, None, None);
    assert!(best().is_err());
    for step in 2..=5 {
        save(step, Some(2), None);
    }
    assert_eq!(
        (save(6, Some(2), None), best().unwrap()),
        (vec![2, 5, 6], 2)
    );
    assert_eq!(
        (save(7, Some(7), Some(2)), best().unwrap()),
        (vec![6, 7], 7)
    );
    // The best step is in another directory, or is not known.
    assert_eq!((save(8, Some(99), None), best().unwrap()), (vec![7, 8], 7));
    assert_eq!((save(9, None, None), best().unwrap()), (vec![7, 8, 9], 7));
}

#[test]
fn superseded_step_is_not_the_saved_one() {
    let dir = saved(&[1], &run("a"));
    save_alone(dir.path(), &meta(2).superseded(Some(2)), &run("a")).unwrap();
    assert_eq!(
        (
            steps(dir.path()),
            Reader::open(dir.path()).unwrap().manifest().step
        ),
        (vec![1, 2], 2)
    );
}

#[test]
fn documents_are_stored_and_verified() {
    let dir = tempfile::tempdir().unwrap();
    let record = json!({"model": "nano", "lr": 0.1});
    let other = json!([1, null]);
    let documents = [
        ("run.json".to_owned(), record.clone()),
        ("other.json".to_owned(), other.clone()),
    ];
    save_alone(dir.path(), &meta(1).documents(documents.into()), &run("a")).unwrap();
    let reader = Reader::open(dir.path()).unwrap();
    assert_eq!(reader.document("run.json").unwrap(), Some(record));
    assert_eq!(reader.document("other.json").unwrap(), Some(other));
    assert_eq!(reader.document("none.json").unwrap(), None);
    assert_eq!(reader.verify().good_files, 3);

    let path = at(&dir, 1, "run.json");
    let good = fs::read(&path).unwrap();
    each_flip(&path, usize::MAX, |i| {
        assert!(
            matches!(reader.document("run.json"), Err(CkptError::Corrupt { .. })),
            "byte {i}"
        );
        assert!(
            matches!(reader.verify().problems[..], [CkptError::Corrupt { .. }]),
            "byte {i}"
        );
    });

    fs::write(&path, &good[1..]).unwrap();
    assert!(matches!(
        reader.document("run.json"),
        Err(CkptError::WrongLength { .. })
    ));
    assert!(matches!(
        Reader::open(at(&dir, 1, "")),
        Err(CkptError::WrongLength { .. })
    ));
    fs::remove_file(&path).unwrap();
    fails(Reader::open(at(&dir, 1, "")), &["run.json: No such file"]);
}

#[test]
fn bad_document_and_run_names_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    for name in [MANIFEST_NAME, SHARD, "../x", ".hidden", ""] {
        let meta = meta(1).documents([(name.to_owned(), json!(1))].into());
        fails(save_alone(dir.path(), &meta, &run("a")), &["document name"]);
    }
    fails(
        Store::create(dir.path(), 0, run("a b")),
        &["a plain name", "\"a b\""],
    );
    assert!(!has_checkpoints(dir.path()).unwrap());
}

/// A change to a checkpoint, and a part of its description.
type Damage = (fn(&TempDir, u64), &'static str);

const DAMAGES: [Damage; 6] = [
    (
        |dir, step| flip(&at(dir, step, SHARD), -9),
        "damaged: bytes",
    ),
    (
        |dir, step| fs::write(at(dir, step, SHARD), "short").unwrap(),
        "5 bytes long",
    ),
    (
        |dir, step| fs::remove_file(at(dir, step, SHARD)).unwrap(),
        "No such file",
    ),
    (
        |dir, step| flip(&at(dir, step, MANIFEST_NAME), -9),
        "invalid manifest",
    ),
    (
        |dir, step| fs::write(at(dir, step, MANIFEST_NAME), "").unwrap(),
        "invalid manifest",
    ),
    (
        |dir, step| fs::remove_file(at(dir, step, MANIFEST_NAME)).unwrap(),
        "No such file",
    ),
];

#[test]
fn newest_whole_checkpoint_is_resolved() {
    for (damage, reason) in DAMAGES {
        let dir = saved(&[1, 2, 3, 4], &run("a"));
        damage(&dir, 2);
        // Damage to older ones is not looked for.
        let found = resolve(dir.path()).unwrap();
        assert_eq!(
            (found.reader.manifest().step, found.passed_over.len()),
            (4, 0),
            "{reason}"
        );
        assert_eq!(found.store_dir, dir.path());

        damage(&dir, 4);
        damage(&dir, 3);
        let found = resolve(dir.path()).unwrap();
        assert_eq!(found.reader.manifest().step, 1, "{reason}");
        let mut names: Vec<&str> = found
            .passed_over
            .iter()
            .map(|(name, _)| name.as_str())
            .collect();
        names.sort_unstable();
        assert_eq!(names, ["step-00000002", "step-00000003", "step-00000004"]);
        assert!(
            found
                .passed_over
                .iter()
                .all(|(_, why)| why.contains(reason)),
            "{:?}",
            found.passed_over
        );
        fails(resolve(at(&dir, 4, "")), &[reason]);

        damage(&dir, 1);
        let error = resolve(dir.path()).err().unwrap();
        let CkptError::NoCheckpoint { reasons, .. } = error else {
            panic!("{error}")
        };
        assert_eq!(reasons.len(), 4, "{reasons:?}");
    }
}

#[test]
fn order_is_that_of_saves() {
    // A run that went back to step 10 and saved step 20 after step 40.
    let dir = saved(&[10, 30, 40, 20], &run("a"));
    assert_eq!(resolve(dir.path()).unwrap().reader.manifest().step, 20);
    flip(&at(&dir, 20, SHARD), -9);
    assert_eq!(resolve(dir.path()).unwrap().reader.manifest().step, 40);
    fs::remove_file(dir.path().join("latest")).unwrap();
    assert_eq!(resolve(dir.path()).unwrap().reader.manifest().step, 40);
}

#[test]
fn named_checkpoint_keeps_its_directory() {
    let dir = saved(&[1, 2], &run("a"));
    for path in [
        at(&dir, 1, ""),
        at(&dir, 1, "."),
        at(&dir, 1, "").join("../step-00000001"),
    ] {
        let found = resolve(&path).unwrap();
        assert_eq!(found.reader.manifest().step, 1);
        assert_eq!(
            found.store_dir.canonicalize().unwrap(),
            dir.path().canonicalize().unwrap(),
            "{}",
            path.display()
        );
    }
    assert!(resolve(dir.path().join("step-00000003")).is_err());
}

#[test]
fn manifest_without_run_and_documents_is_read() {
    let dir = saved(&[1], &StoreOptions::default());
    let text = fs::read_to_string(at(&dir, 1, MANIFEST_NAME)).unwrap();
    assert!(!text.contains("\"run\"") && !text.contains("\"documents\""));

    let reader = resolve(dir.path()).unwrap().reader;

    assert_eq!(reader.manifest().run, None);
    assert_eq!(reader.manifest().documents, []);
}
