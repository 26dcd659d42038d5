//! Flipped bytes, truncated and missing files, malicious manifests: an error that names the file,
//! never a panic, a wrong value, or access outside the directory.

use std::path::{Path, PathBuf};

use crate::common::{assert_holds, each_flip, flip, layout, read, two_checkpoints};
use zero_ckpt::{CkptError, MANIFEST_NAME, Manifest, Reader, UnitRange};

fn newest(dir: &Path) -> PathBuf {
    dir.join("step-00000002")
}

fn shard(dir: &Path) -> PathBuf {
    newest(dir).join("shard-00001-of-00002.safetensors")
}

#[test]
fn flipped_bytes_of_shard_files_are_found() {
    let dir = two_checkpoints(&layout(2, 4));
    let path = shard(dir.path());
    let good = std::fs::read(&path).unwrap();
    let reader = Reader::open(dir.path()).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let put = |at: usize, byte: u8| {
        std::os::unix::fs::FileExt::write_all_at(&file, &[byte], at as u64).unwrap()
    };

    // Every byte, but only every 61st byte of the header's padding.
    for at in (0..good.len()).filter(|&i| good[i] != b' ' || i % 61 == 0) {
        put(at, good[at] ^ (1 << (at % 8)));
        // A reader checks the front of a file once, so each byte needs a new reader.
        let found = Reader::open(newest(dir.path())).unwrap().verify();
        assert_eq!(found.problems.len(), 1, "byte {at}");
        match &found.problems[0] {
            CkptError::Corrupt {
                path: named, range, ..
            } => {
                assert!(
                    *named == path && range.contains(&(at as u64)),
                    "byte {at}: {:?}",
                    found.problems
                );
            }
            other => panic!("byte {at}: {other}"),
        }
        put(at, good[at]);
    }

    assert!(reader.verify().problems.is_empty());
}

#[test]
fn flipped_byte_fails_only_reads_of_its_block() {
    let dir = two_checkpoints(&layout(2, 4));
    let path = shard(dir.path());
    flip(&path, -1);
    let layout = layout(2, 4);
    let reader = Reader::open(dir.path()).unwrap();
    // Rank 0 reads only its own file.
    read(&reader, &layout, "master", 0).unwrap();
    let error = read(&reader, &layout, "second_moment", 1).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("shard-00001-of-00002.safetensors: damaged: bytes"),
        "{error}"
    );
    // The previous checkpoint is intact.
    assert_holds(
        &Reader::open(dir.path().join("step-00000001")).unwrap(),
        &layout,
        1,
    );
}

#[test]
fn flipped_bytes_of_manifests_are_found() {
    let dir = two_checkpoints(&layout(2, 4));
    let path = newest(dir.path()).join(MANIFEST_NAME);
    let good = std::fs::read(&path).unwrap();
    // All except the final newline, which may become other white space.
    each_flip(&path, good.len() - 1, |at| {
        assert!(Reader::open(newest(dir.path())).is_err(), "byte {at}");
        let before = Reader::open(dir.path()).unwrap();
        assert_eq!(before.manifest().step, 1, "byte {at}");
        assert!(
            before.notices()[0].contains("step-00000002"),
            "{:?}",
            before.notices()
        );
    });
}

#[test]
fn damaged_latest_is_skipped_with_a_notice() {
    let dir = two_checkpoints(&layout(2, 4));
    let path = dir.path().join("latest");
    let good = std::fs::read(&path).unwrap();
    each_flip(&path, usize::MAX, |at| {
        let reader = Reader::open(dir.path()).unwrap();
        assert_eq!(reader.manifest().step, 2, "byte {at}");
        assert!(
            reader.notices()[0].contains("latest"),
            "byte {at}: {:?}",
            reader.notices()
        );
    });

    std::fs::remove_file(&path).unwrap();
    assert_eq!(Reader::open(dir.path()).unwrap().manifest().step, 2);
    // Links are not followed.
    std::fs::write(dir.path().join("elsewhere"), &good).unwrap();
    std::os::unix::fs::symlink("elsewhere", &path).unwrap();
    let reader = Reader::open(dir.path()).unwrap();
    assert!(
        reader.notices()[0].contains("is a symbolic link"),
        "{:?}",
        reader.notices()
    );
}

#[test]
fn truncated_or_missing_file_is_named() {
    let dir = two_checkpoints(&layout(2, 4));
    let path = shard(dir.path());
    let good = std::fs::read(&path).unwrap();
    for len in [0, 7, 8, 4095, 4096, good.len() - 1, good.len() + 1] {
        let mut bad = good.clone();
        bad.resize(len, 0);
        std::fs::write(&path, bad).unwrap();
        let error = Reader::open(newest(dir.path())).err().unwrap();
        assert!(
            matches!(error, CkptError::WrongLength { .. }),
            "{len}: {error}"
        );
        let before = Reader::open(dir.path()).unwrap();
        assert_holds(&before, &layout(3, 1), 1);
        assert!(
            before.notices()[0].contains(&format!("{len} bytes long")),
            "{:?}",
            before.notices()
        );
    }

    std::fs::remove_file(&path).unwrap();
    let before = Reader::open(dir.path()).unwrap();
    assert_eq!(before.manifest().step, 1);
    assert!(
        before.notices()[0].contains("shard-00001-of-00002.safetensors: No such file"),
        "{:?}",
        before.notices()
    );
    std::fs::remove_dir_all(dir.path().join("step-00000001")).unwrap();
    let none = Reader::open(dir.path()).err().unwrap();
    assert!(matches!(none, CkptError::NoCheckpoint { .. }));
    assert!(none.to_string().contains("No such file"), "{none}");
}

#[test]
fn file_truncated_while_open_is_an_error() {
    let dir = two_checkpoints(&layout(2, 4));
    let reader = Reader::open(dir.path()).unwrap();
    let layout = layout(2, 4);
    read(&reader, &layout, "master", 1).unwrap();
    std::fs::File::options()
        .write(true)
        .open(shard(dir.path()))
        .unwrap()
        .set_len(5000)
        .unwrap();
    let error = read(&reader, &layout, "master", 1);
    assert!(
        matches!(error, Err(CkptError::WrongLength { .. })),
        "{error:?}"
    );
}

/// A change to a manifest, and a part of its error.
type Change = (fn(&mut Manifest), &'static str);

#[test]
fn malicious_manifest_is_rejected() {
    let dir = two_checkpoints(&layout(2, 4));
    let path = newest(dir.path()).join(MANIFEST_NAME);
    let (good, _) = Manifest::decode(&std::fs::read(&path).unwrap(), &path).unwrap();
    let changes: [Change; 19] = [
        (
            |m| m.files[0].name = "../../../etc/passwd".into(),
            "is not plain",
        ),
        (|m| m.files[0].name = "/etc/passwd".into(), "is not plain"),
        (|m| m.files[0].name = ".hidden".into(), "is not plain"),
        (|m| m.files[0].name = MANIFEST_NAME.into(), "is not plain"),
        (|m| m.files[1].name = m.files[0].name.clone(), "twice"),
        (|m| m.files[0].bytes = u64::MAX, "do not match its pieces"),
        (|m| m.files[0].bytes = 0, "do not match its pieces"),
        (|m| m.files[0].pieces[0].2 = u64::MAX, "are in two files"),
        (
            |m| m.files[0].pieces[0] = UnitRange(u64::MAX, 0, 1),
            "which does not exist",
        ),
        (
            |m| m.files[0].pieces[0].1 = 1,
            "elements 0 to 1 of unit \"embedding\" are in no file",
        ),
        (|m| m.files.truncate(1), "are in no file"),
        (|m| m.layout.world_size = 0, "at least one rank"),
        (|m| m.layout.world_size = u64::MAX, "64 bits"),
        (|m| m.layout.align_elems = 0, "alignment"),
        (
            |m| m.model.units[0].params[0].shape = vec![u64::MAX, u64::MAX],
            "64 bits",
        ),
        (|m| m.model.units[0].params[1].name = "wte".into(), "wte"),
        (|m| m.states.clear(), "no states"),
        (|m| m.states[1].name = "master".into(), "twice"),
        (|m| m.stage = 4, "stage 4"),
    ];

    for (i, (change, expected)) in changes.into_iter().enumerate() {
        let mut bad = good.clone();
        change(&mut bad);
        std::fs::write(&path, bad.encode().unwrap()).unwrap();
        let error = Reader::open(newest(dir.path())).err().unwrap().to_string();
        assert!(error.contains(expected), "change {i}: {error}");
    }

    // A manifest that misstates a file's content opens; reading finds it.
    let mut wrong = good.clone();
    wrong.states[2].name = "third_moment".into();
    std::fs::write(&path, wrong.encode().unwrap()).unwrap();
    let found = Reader::open(newest(dir.path())).unwrap().verify();
    assert!(
        found.problems[0].to_string().contains("second_moment"),
        "{:?}",
        found.problems
    );
    let mut wrong = good;
    wrong.files[0].front_crc64 = 0;
    std::fs::write(&path, wrong.encode().unwrap()).unwrap();
    let found = Reader::open(newest(dir.path())).unwrap().verify();
    assert!(
        matches!(found.problems[..], [CkptError::Corrupt { .. }]),
        "{:?}",
        found.problems
    );
}

/// Also version 1, of which this manifest has all members.
#[test]
fn other_versions_are_rejected() {
    for found in [1, 3] {
        let dir = two_checkpoints(&layout(2, 4));
        let path = newest(dir.path()).join(MANIFEST_NAME);
        let text = std::fs::read_to_string(&path).unwrap();
        let changed = text.replacen("\"version\":2", &format!("\"version\":{found}"), 1);
        std::fs::write(&path, changed).unwrap();

        let error = Reader::open(newest(dir.path())).err().unwrap();

        let expected = format!(
            "{}: format version {found}; this program reads version 2",
            path.display()
        );
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn links_in_a_checkpoint_are_not_followed() {
    let dir = two_checkpoints(&layout(2, 4));
    let outside = dir.path().join("outside.safetensors");
    std::fs::rename(shard(dir.path()), &outside).unwrap();
    std::os::unix::fs::symlink(&outside, shard(dir.path())).unwrap();
    let error = Reader::open(newest(dir.path())).err().unwrap();
    assert!(matches!(error, CkptError::UnsafeName { .. }), "{error}");
    // A checkpoint directory that is a link, named by `latest`.
    std::fs::rename(newest(dir.path()), dir.path().join("moved")).unwrap();
    std::os::unix::fs::symlink("moved", newest(dir.path())).unwrap();
    let before = Reader::open(dir.path()).unwrap();
    assert_eq!(before.manifest().step, 1);
    assert!(!before.notices().is_empty());
}
