//! A full disk, a read-only disk, and two runs in one directory.
//!
//! The disks are small tmpfs mounts; a test that may not mount prints that it is skipped and
//! passes.

use std::path::Path;
use std::process::Command;

use crate::common::{assert_holds, fails, kept, layout, save_with, saved, stage, staged};
use zero_ckpt::{CkptError, Reader, SaveMeta, SingleRank, Store, StoreOptions};

/// A tmpfs mount, unmounted when dropped.
struct SmallDisk {
    dir: tempfile::TempDir,
}

impl SmallDisk {
    fn mount(kib: u64) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let size = format!("size={kib}k");
        let done = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "none"])
            .arg(dir.path())
            .output();
        if done.is_ok_and(|o| o.status.success()) {
            return Some(Self { dir });
        }
        eprintln!("SKIPPED: mounting a tmpfs is not permitted here");
        None
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn read_only(&self) {
        let done = Command::new("mount")
            .args(["-o", "remount,ro"])
            .arg(self.path())
            .status();
        assert!(done.unwrap().success());
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

#[test]
fn full_disk_fails_the_save_on_all_ranks() {
    let Some(disk) = SmallDisk::mount(512) else {
        return;
    };
    let dir = disk.path().join("ckpt");
    let layout = layout(2, 4);
    let stores: Vec<_> = (0..2)
        .map(|r| Store::create(&dir, r, StoreOptions::default()).unwrap())
        .collect();
    let first = save_with(&stores, &layout, 1, 1);
    assert!(first.iter().all(Result::is_ok), "{first:?}");
    // A thread removes the description of step 1.
    assert_eq!(stores[0].finish_removals(), [""; 0]);
    let filler = disk.path().join("filler");
    let mut failed = 0;
    let mut saved = 0;
    let mut unstaged = 0;

    // Each round has one more free page, so that the save runs out of space at every point.
    for leave in 0..14 {
        // Fills the disk, then frees pages.
        let mut file = std::fs::File::create(&filler).unwrap();
        while std::io::Write::write_all(&mut file, &[0; 4096]).is_ok() {}
        let len = file.metadata().unwrap().len();
        file.set_len(len / 4096 * 4096 - leave * 4096).unwrap();
        drop(file);
        let outcomes = save_with(&stores, &layout, 2, 2);
        let texts: Vec<_> = outcomes
            .iter()
            .filter_map(|o| o.as_ref().err())
            .map(|e| e.to_string())
            .collect();
        if texts.is_empty() {
            saved += 1;
            assert_holds(&Reader::open(&dir).unwrap(), &layout, 2);
            drop(stores);
            assert_eq!(staged(&dir), [""; 0]);
            break;
        }
        failed += 1;
        assert_eq!(texts.len(), 2, "both ranks know: {outcomes:?}");
        assert!(
            texts.iter().all(|t| t.contains("No space left on device")),
            "{texts:?}"
        );
        let reader = Reader::open(&dir).unwrap();
        assert!(reader.verify().problems.is_empty());
        // If only `latest` did not fit, the new checkpoint is already complete.
        let step = reader.manifest().step;
        assert_holds(&reader, &layout, step);
        if texts
            .iter()
            .all(|text| text.contains("this rank's file needs "))
        {
            unstaged += 1;
            let folder = format!("and the folder {} has ", dir.display());
            assert!(texts.iter().all(|text| text.contains(&folder)), "{texts:?}");
            assert_eq!(staged(&dir), [""; 0], "the save can never be whole");
        }
        // An error names the staged file of its rank, which stays.
        for kept in texts.iter().filter_map(|text| kept(text)) {
            assert!(kept.exists(), "{texts:?}");
        }
    }

    assert!(
        failed > 3 && saved == 1 && unstaged > 0,
        "{failed} failed, {saved} saved, {unstaged} not staged"
    );
}

#[test]
fn read_only_disk_loads_and_rejects_stores() {
    let Some(disk) = SmallDisk::mount(512) else {
        return;
    };
    let layout = layout(2, 4);
    saved(disk.path(), &layout, 1, 1, &StoreOptions::default());
    disk.read_only();
    for rank in 0..2 {
        fails(
            Store::create(disk.path(), rank, StoreOptions::default()),
            &["Read-only file system"],
        );
    }
    assert_holds(&Reader::open(disk.path()).unwrap(), &layout, 1);
}

#[test]
fn remounted_read_only_disk_fails_staging() {
    let Some(disk) = SmallDisk::mount(512) else {
        return;
    };
    let layout = layout(2, 4);
    saved(disk.path(), &layout, 1, 1, &StoreOptions::default());
    {
        // Rank 1 only: rank 0's open lock file would prevent the remount.
        let store = Store::create(disk.path(), 1, StoreOptions::default()).unwrap();
        disk.read_only();
        fails(stage(&store, &layout, 2), &["Read-only file system"]);
    }
    assert_holds(&Reader::open(disk.path()).unwrap(), &layout, 1);
}

#[test]
fn second_run_is_rejected_with_the_holder() {
    let dir = tempfile::tempdir().unwrap();
    let layout = layout(2, 4);
    let first: Vec<_> = (0..2)
        .map(|r| Store::create(dir.path(), r, StoreOptions::default()).unwrap())
        .collect();
    let error = Store::create(dir.path(), 0, StoreOptions::default())
        .err()
        .unwrap();
    assert!(matches!(error, CkptError::Busy { .. }));
    let us = format!("process {} on ", std::process::id());
    assert!(error.to_string().contains(&us), "{error}");
    // The first run is unaffected; dropping its stores unlocks the directory.
    let saves = save_with(&first, &layout, 1, 1);
    assert!(saves.iter().all(Result::is_ok), "{saves:?}");
    drop(first);
    saved(dir.path(), &layout, 2, 2, &StoreOptions::default());
    assert_holds(&Reader::open(dir.path()).unwrap(), &layout, 2);
}

#[test]
fn another_model_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    saved(dir.path(), &layout(2, 4), 1, 1, &StoreOptions::default());
    let units = [zero_shard::UnitSpec::new(
        "u",
        [zero_shard::ParamSpec::new("wte", [3u64])],
    )];
    let other = zero_shard::Layout::new(&units, 1, 1).unwrap();
    let store = Store::create(dir.path(), 0, StoreOptions::default()).unwrap();
    let early = store.check_model(&(&other).into());
    assert!(matches!(early, Err(CkptError::AnotherModel { .. })));
    let mut shard = zero_ckpt::ShardData::new(&other, 0).unwrap();
    shard.storage_f32("master", &[1.0; 3]).unwrap();
    let meta = SaveMeta::default().step(1);
    let late = store.save(&meta, &shard, &mut SingleRank);
    let Err(CkptError::Kept { error, path }) = late else {
        panic!("{late:?}")
    };
    assert!(matches!(*error, CkptError::AnotherModel { .. }), "{error}");
    assert!(path.exists());
    assert_holds(&Reader::open(dir.path()).unwrap(), &layout(3, 1), 1);
}
