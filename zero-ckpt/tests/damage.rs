//! Flipped bytes, cut and missing files, and manifests of bad will: an error that names the file, never a
//! panic, a wrong value, or a file outside the directory.
#![cfg(not(miri))]

mod common;

use std::path::{Path, PathBuf};

use common::{assert_holds, layout, save};
use zero_ckpt::{CkptError, Hex64, MANIFEST_NAME, Manifest, Piece, Reader, StoreOptions};

/// A directory with steps 1 and 2 of seeds 1 and 2.
fn two_checkpoints() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for step in [1, 2] {
        save(dir.path(), &layout(2, 4), step, step, &StoreOptions::default())
            .into_iter()
            .for_each(|r| drop(r.unwrap()));
    }
    dir
}

fn newest(dir: &Path) -> PathBuf {
    dir.join("step-00000002")
}

fn shard(dir: &Path) -> PathBuf {
    newest(dir).join("shard-00001-of-00002.safetensors")
}

#[test]
fn every_flipped_byte_of_a_shard_file_is_found() {
    let dir = two_checkpoints();
    let path = shard(dir.path());
    let good = std::fs::read(&path).unwrap();
    let reader = Reader::open(dir.path()).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let put = |at: usize, byte: u8| std::os::unix::fs::FileExt::write_all_at(&file, &[byte], at as u64).unwrap();
    // The spaces that pad the header are many and alike: every 61st of them, and every other byte.
    for at in (0..good.len()).filter(|&i| good[i] != b' ' || i % 61 == 0) {
        put(at, good[at] ^ (1 << (at % 8)));
        // A fresh reader: what an earlier one has checked, it does not check again.
        let found = Reader::open(newest(dir.path())).unwrap().verify();
        assert_eq!(found.problems.len(), 1, "byte {at}");
        match &found.problems[0] {
            CkptError::Corrupt { path: named, range, .. } => {
                assert!(*named == path && range.contains(&(at as u64)), "byte {at}: {:?}", found.problems);
            }
            other => panic!("byte {at}: {other}"),
        }
        put(at, good[at]);
    }
    assert!(reader.verify().problems.is_empty());
}

#[test]
fn a_flipped_byte_in_a_range_that_is_read_is_an_error_and_elsewhere_is_not() {
    let dir = two_checkpoints();
    let path = shard(dir.path());
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 0x40;
    std::fs::write(&path, bytes).unwrap();
    let (layout, reader) = (layout(2, 4), Reader::open(dir.path()).unwrap());
    let mut out = vec![0.0; layout.shard_elems() as usize];
    let view = reader.view(&layout).unwrap();
    // Rank 0 reads its own file only.
    view.read_storage("master", 0, &mut out).unwrap();
    let refused = view.read_storage("second_moment", 1, &mut out).unwrap_err();
    assert!(refused.to_string().contains("shard-00001-of-00002.safetensors: damaged: bytes"), "{refused}");
    // The checkpoint before it is there to be named.
    assert_holds(&Reader::open(dir.path().join("step-00000001")).unwrap(), &layout, 1);
}

#[test]
fn every_flipped_byte_of_a_manifest_is_found_and_the_one_before_is_loaded() {
    let dir = two_checkpoints();
    let path = newest(dir.path()).join(MANIFEST_NAME);
    let good = std::fs::read(&path).unwrap();
    // All but the newline at the end, which may become another white space.
    for at in 0..good.len() - 1 {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        std::fs::write(&path, &bad).unwrap();
        assert!(Reader::open(newest(dir.path())).is_err(), "byte {at}");
        let before = Reader::open(dir.path()).unwrap();
        assert_eq!(before.manifest().step, 1, "byte {at}");
        assert!(before.notices()[0].contains("step-00000002"), "{:?}", before.notices());
    }
}

#[test]
fn a_damaged_latest_is_passed_over_with_a_notice() {
    let dir = two_checkpoints();
    let path = dir.path().join("latest");
    let good = std::fs::read(&path).unwrap();
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        std::fs::write(&path, &bad).unwrap();
        let reader = Reader::open(dir.path()).unwrap();
        assert_eq!(reader.manifest().step, 2, "byte {at}");
        assert!(reader.notices()[0].contains("latest"), "byte {at}: {:?}", reader.notices());
    }
    std::fs::remove_file(&path).unwrap();
    assert_eq!(Reader::open(dir.path()).unwrap().manifest().step, 2);
    // A link is not followed, wherever it leads.
    std::fs::write(dir.path().join("elsewhere"), &good).unwrap();
    std::os::unix::fs::symlink("elsewhere", &path).unwrap();
    let reader = Reader::open(dir.path()).unwrap();
    assert!(reader.notices()[0].contains("is a link"), "{:?}", reader.notices());
}

#[test]
fn a_cut_or_missing_file_is_named_and_the_one_before_is_loaded() {
    let dir = two_checkpoints();
    let path = shard(dir.path());
    let good = std::fs::read(&path).unwrap();
    for len in [0, 7, 8, 4095, 4096, good.len() - 1, good.len() + 1] {
        let mut bad = good.clone();
        bad.resize(len, 0);
        std::fs::write(&path, bad).unwrap();
        let refused = Reader::open(newest(dir.path())).err().unwrap();
        assert!(matches!(refused, CkptError::WrongLength { .. }), "{len}: {refused}");
        let before = Reader::open(dir.path()).unwrap();
        assert_holds(&before, &layout(3, 1), 1);
        assert!(before.notices()[0].contains(&format!("{len} bytes long")), "{:?}", before.notices());
    }
    std::fs::remove_file(&path).unwrap();
    let before = Reader::open(dir.path()).unwrap();
    assert_eq!(before.manifest().step, 1);
    assert!(before.notices()[0].contains("shard-00001-of-00002.safetensors: No such file"), "{:?}", before.notices());
    std::fs::remove_dir_all(dir.path().join("step-00000001")).unwrap();
    let none = Reader::open(dir.path()).err().unwrap();
    assert!(matches!(none, CkptError::NoCheckpoint { .. }));
    assert!(none.to_string().contains("No such file"), "{none}");
}

#[test]
fn a_file_that_shrinks_under_the_reader_is_an_error() {
    let dir = two_checkpoints();
    let reader = Reader::open(dir.path()).unwrap();
    let layout = layout(2, 4);
    let mut out = vec![0.0; layout.shard_elems() as usize];
    reader.view(&layout).unwrap().read_storage("master", 1, &mut out).unwrap();
    std::fs::File::options().write(true).open(shard(dir.path())).unwrap().set_len(5000).unwrap();
    let refused = reader.view(&layout).unwrap().read_storage("master", 1, &mut out);
    assert!(matches!(refused, Err(CkptError::WrongLength { .. })), "{refused:?}");
}

/// A change to a manifest, and what the error says.
type Change = (fn(&mut Manifest), &'static str);

#[test]
fn a_manifest_of_bad_will_is_refused_though_its_checksum_is_right() {
    let dir = two_checkpoints();
    let path = newest(dir.path()).join(MANIFEST_NAME);
    let (good, _) = Manifest::decode(&std::fs::read(&path).unwrap(), &path).unwrap();
    let changes: [Change; 19] = [
        (|m| m.files[0].name = "../../../etc/passwd".into(), "no plain name"),
        (|m| m.files[0].name = "/etc/passwd".into(), "no plain name"),
        (|m| m.files[0].name = ".hidden".into(), "no plain name"),
        (|m| m.files[0].name = MANIFEST_NAME.into(), "no plain name"),
        (|m| m.files[1].name = m.files[0].name.clone(), "twice"),
        (|m| m.files[0].bytes = u64::MAX, "do not fit its pieces"),
        (|m| m.files[0].bytes = 0, "do not fit its pieces"),
        (|m| m.files[0].pieces[0].2 = u64::MAX, "do not fit"),
        (|m| m.files[0].pieces[0] = Piece(u64::MAX, 0, 1), "which there is not"),
        (|m| m.files[0].pieces[0].1 = 1, "elements 0 to 1 of unit \"embedding\" are in no file"),
        (|m| m.files.truncate(1), "are in no file"),
        (|m| m.layout.world_size = 0, "at least one rank"),
        (|m| m.layout.world_size = u64::MAX, "64 bits"),
        (|m| m.layout.align_elems = 0, "alignment"),
        (|m| m.model.units[0].params[0].shape = vec![u64::MAX, u64::MAX], "64 bits"),
        (|m| m.model.units[0].params[1].name = "wte".into(), "wte"),
        (|m| m.states.clear(), "no states"),
        (|m| m.states[1].name = "master".into(), "twice"),
        (|m| m.stage = 4, "stage 4"),
    ];
    for (i, (change, expected)) in changes.into_iter().enumerate() {
        let mut bad = good.clone();
        change(&mut bad);
        std::fs::write(&path, bad.encode().unwrap()).unwrap();
        let refused = Reader::open(newest(dir.path())).err().unwrap().to_string();
        assert!(refused.contains(expected), "change {i}: {refused}");
    }
    // What opens and lies about the content is found when it is read.
    let mut lies = good.clone();
    lies.states[2].name = "third_moment".into();
    lies.files.iter_mut().for_each(|f| f.front_crc64 = Hex64(f.front_crc64.0));
    std::fs::write(&path, lies.encode().unwrap()).unwrap();
    let found = Reader::open(newest(dir.path())).unwrap().verify();
    assert!(found.problems[0].to_string().contains("second_moment"), "{:?}", found.problems);
    let mut lies = good;
    lies.files[0].front_crc64 = Hex64(0);
    std::fs::write(&path, lies.encode().unwrap()).unwrap();
    let found = Reader::open(newest(dir.path())).unwrap().verify();
    assert!(matches!(found.problems[..], [CkptError::Corrupt { .. }]), "{:?}", found.problems);
}

#[test]
fn a_version_from_the_future_says_so() {
    let dir = two_checkpoints();
    let path = newest(dir.path()).join(MANIFEST_NAME);
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replacen("\"version\":1", "\"version\":2,\"news\":[]", 1)).unwrap();
    let refused = Reader::open(newest(dir.path())).err().unwrap();
    assert!(matches!(refused, CkptError::UnsupportedVersion { found: 2, supported: 1, .. }), "{refused}");
}

#[test]
fn links_in_a_checkpoint_are_not_followed() {
    let dir = two_checkpoints();
    let outside = dir.path().join("outside.safetensors");
    std::fs::rename(shard(dir.path()), &outside).unwrap();
    std::os::unix::fs::symlink(&outside, shard(dir.path())).unwrap();
    let refused = Reader::open(newest(dir.path())).err().unwrap();
    assert!(matches!(refused, CkptError::UnsafeName { .. }), "{refused}");
    // A whole checkpoint that is a link, under a name that `latest` gives.
    std::fs::rename(newest(dir.path()), dir.path().join("moved")).unwrap();
    std::os::unix::fs::symlink("moved", newest(dir.path())).unwrap();
    let before = Reader::open(dir.path()).unwrap();
    assert_eq!(before.manifest().step, 1);
    assert!(!before.notices().is_empty());
}
