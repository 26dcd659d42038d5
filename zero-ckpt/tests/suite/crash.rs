//! `kill -9` at every point of the save protocol: afterwards the previous checkpoint or the new one
//! loads.
//!
//! A child process (this test binary) saves, stops at a point, and is killed there.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{assert_holds, layout_in_blocks, save, save_with, saved};
use zero_ckpt::testing::SavePoint;
use zero_ckpt::{Reader, Store, StoreOptions};

const RANKS: u64 = 2;

fn options() -> StoreOptions {
    StoreOptions::default().keep_last(2)
}

/// The child process; its arguments are in the environment.
#[test]
fn child() {
    let Ok(arguments) = std::env::var("ZERO_CKPT_CHILD") else {
        return;
    };
    let args: Vec<&str> = arguments.split(' ').collect();
    let dir = Path::new(args[0]).to_path_buf();
    let seed = args[4].parse().unwrap();
    let (point, rank): (usize, u64) = (args[1].parse().unwrap(), args[2].parse().unwrap());

    let stores: Vec<_> = (0..RANKS)
        .map(|r| {
            let dir = dir.clone();
            Store::create(&dir, r, options())
                .unwrap()
                .observe(move |at| {
                    if r == rank && at == SavePoint::ALL[point] {
                        std::fs::write(dir.join("stopped"), "").unwrap();
                        std::thread::sleep(Duration::from_secs(600));
                    }
                })
        })
        .collect();

    save_with(
        &stores,
        &layout_in_blocks(RANKS),
        args[3].parse().unwrap(),
        seed,
    );
}

/// Saves `step` of `seed` in a child that is killed when `rank` reaches `point`.
fn killed(dir: &Path, point: usize, rank: u64, step: u64, seed: u64) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "crash::child", "--nocapture"])
        .env(
            "ZERO_CKPT_CHILD",
            format!("{} {point} {rank} {step} {seed}", dir.display()),
        )
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();

    let stopped = dir.join("stopped");
    let start = Instant::now();
    while !stopped.exists() {
        let ended = child.try_wait().unwrap();
        assert!(
            ended.is_none() && start.elapsed() < Duration::from_secs(60),
            "{:?}: {ended:?}",
            SavePoint::ALL[point]
        );
        std::thread::sleep(Duration::from_millis(2));
    }

    child.kill().unwrap(); // SIGKILL
    child.wait().unwrap();
    std::fs::remove_file(stopped).unwrap();
}

/// All points, with each rank that reaches them.
fn points() -> impl Iterator<Item = (usize, u64)> {
    (0..SavePoint::ALL.len()).flat_map(|point| {
        let every_rank = matches!(
            SavePoint::ALL[point],
            SavePoint::FileCreated | SavePoint::StateWritten | SavePoint::FileSynced
        );
        (0..if every_rank { RANKS } else { 1 }).map(move |rank| (point, rank))
    })
}

#[test]
fn killed_save_leaves_old_or_new() {
    for (point, rank) in points() {
        let at = SavePoint::ALL[point];
        let dir = tempfile::tempdir().unwrap();
        let layout = layout_in_blocks(RANKS);
        for step in [10, 20] {
            saved(dir.path(), &layout, step, step, &options());
        }
        killed(dir.path(), point, rank, 30, 30);

        let published = matches!(
            at,
            SavePoint::LatestMoved | SavePoint::Pruning | SavePoint::Pruned
        );
        let expected = if published { 30 } else { 20 };
        let reader = Reader::open(dir.path()).unwrap();
        assert_eq!(
            reader.manifest().step,
            expected,
            "killed at {at:?} of rank {rank}"
        );
        assert!(reader.notices().is_empty(), "{:?}", reader.notices());
        assert!(reader.verify().problems.is_empty());
        assert_holds(&reader, &layout, expected);
        if at == SavePoint::Renamed {
            // Complete, though `latest` does not name it yet.
            assert_holds(
                &Reader::open(dir.path().join("step-00000030")).unwrap(),
                &layout,
                30,
            );
        }

        // The next run saves the same step and removes all leftovers.
        let outcomes = save(dir.path(), &layout, 30, 31, &options());
        assert!(
            outcomes
                .iter()
                .all(|o| o.as_ref().is_ok_and(|p| p.notices.is_empty())),
            "{at:?}: {outcomes:?}"
        );
        assert_holds(&Reader::open(dir.path()).unwrap(), &layout, 31);
        let left: Vec<_> = std::fs::read_dir(dir.path().join(".staging"))
            .unwrap()
            .collect();
        assert!(left.is_empty(), "killed at {at:?}: {left:?}");
        let steps = std::fs::read_dir(dir.path()).unwrap();
        let steps = steps.filter(|e| {
            e.as_ref()
                .unwrap()
                .file_name()
                .to_string_lossy()
                .starts_with("step-")
        });
        assert_eq!(steps.count(), 2, "killed at {at:?}");
    }
}

/// The points at which the new checkpoint does not have its name.
fn points_before_rename() -> &'static [SavePoint] {
    let renamed = SavePoint::ALL
        .iter()
        .position(|at| *at == SavePoint::Renamed)
        .unwrap();
    &SavePoint::ALL[..renamed]
}

#[test]
fn killed_overwrite_leaves_old_or_new() {
    for (point, rank) in points() {
        let at = SavePoint::ALL[point];
        let dir = tempfile::tempdir().unwrap();
        let layout = layout_in_blocks(RANKS);
        saved(dir.path(), &layout, 10, 1, &options());
        killed(dir.path(), point, rank, 10, 2);
        let renamed = !points_before_rename().contains(&at);
        let reader = Reader::open(dir.path()).unwrap();
        assert!(reader.verify().problems.is_empty(), "killed at {at:?}");
        assert_holds(&reader, &layout, if renamed { 2 } else { 1 });
    }
}
