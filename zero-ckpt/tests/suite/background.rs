//! Saving in the background: a snapshot holds its step, failures reach all ranks, buffers bound the
//! saves in flight.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;

use zero_ckpt::{
    BackgroundStore, CkptError, Fence, Reader, ShardData, SingleRank, StagingSlice, Store,
    StoreOptions, assemble,
};
use zero_shard::Layout;

use crate::common::{
    NONE, STATES, World, assert_holds, fails, layout, meta, on_ranks, specs, staged, storage, value,
};

fn open(dir: &Path, layout: &Layout, rank: u64, buffers: usize) -> BackgroundStore {
    let store = Store::create(dir, rank, StoreOptions::default()).unwrap();
    BackgroundStore::new(store, Arc::new(layout.clone()), specs(), buffers).unwrap()
}

fn begin(
    store: &mut BackgroundStore,
    layout: &Layout,
    rank: u64,
    step: u64,
) -> Result<(), CkptError> {
    let mut states = STATES.map(|s| storage(layout, rank, s, step));
    let mut shard = ShardData::new(layout, rank).unwrap();
    for (state, values) in STATES.iter().zip(&states) {
        shard.storage_f32(state, values).unwrap();
    }
    let begun = store.begin_copy(meta(step), &shard);
    // The next step overwrites the state.
    states.iter_mut().for_each(|s| s.fill(-1.0));
    begun
}

/// Runs `work` on a thread for each rank, with a background store in `dir`.
fn on_all_ranks(
    dir: &Path,
    layout: &Layout,
    buffers: usize,
    work: impl Fn(&mut BackgroundStore, u64, &World) + Sync,
) {
    on_ranks(layout.world_size(), |rank, world| {
        work(&mut open(dir, layout, rank, buffers), rank, world)
    });
}

#[test]
fn snapshot_holds_the_values_of_its_step() {
    let dir = tempfile::tempdir().unwrap();
    let layout = layout(3, 4);
    on_all_ranks(dir.path(), &layout, 2, |store, rank, world| {
        assert!(!store.ready());
        begin(store, &layout, rank, 10).unwrap();
        begin(store, &layout, rank, 11).unwrap();
        assert!(matches!(
            begin(store, &layout, rank, 12),
            Err(CkptError::InFlight { limit: 2 })
        ));
        assert_eq!(store.complete(&mut world.rank(rank)).unwrap().step, 10);
        begin(store, &layout, rank, 12).unwrap();
        assert_eq!(store.complete(&mut world.rank(rank)).unwrap().step, 11);
        while !store.ready() {
            std::thread::yield_now();
        }
        assert_eq!(store.complete(&mut world.rank(rank)).unwrap().step, 12);
        let nothing = store.complete(&mut world.rank(rank));
        assert!(matches!(nothing, Err(CkptError::NothingInFlight)));
    });

    for step in 10..=12 {
        let reader = Reader::open(dir.path().join(format!("step-{step:08}"))).unwrap();
        assert!(reader.verify().problems.is_empty());
        assert_holds(&reader, &layout, step);
    }

    assert_eq!(Reader::open(dir.path()).unwrap().manifest().step, 12);
}

#[test]
fn steps_continue_between_the_exchanges() {
    let dir = tempfile::tempdir().unwrap();
    let layout = layout(3, 4);
    on_all_ranks(dir.path(), &layout, 2, |store, rank, world| {
        let mut published = Vec::new();
        let mut begun = 0;
        for step in 0.. {
            if step % 3 == 0 && begun < 4 && store.in_flight() < 2 {
                begun += 1;
                begin(store, &layout, rank, begun).unwrap();
            }
            // A trainer adds this bit to its exchange of every step.
            let ready = world.rank(rank).all_gather(&[u8::from(store.ready())]);
            if ready.iter().all(|ready| *ready == 1) {
                published.extend(
                    store
                        .advance(&mut world.rank(rank))
                        .unwrap()
                        .map(|p| p.step),
                );
            }
            if published.len() == 4 {
                break;
            }
        }
        assert_eq!(published, [1, 2, 3, 4]);
        assert_eq!(store.in_flight(), 0);
    });

    assert_holds(&Reader::open(dir.path()).unwrap(), &layout, 4);
}

#[test]
fn failure_reaches_all_ranks_and_the_next_save_works() {
    let dir = tempfile::tempdir().unwrap();
    let layout = layout(2, 1);
    on_all_ranks(dir.path(), &layout, 1, |store, rank, world| {
        // The copy fails on rank 1.
        match rank {
            0 => begin(store, &layout, rank, 1).unwrap(),
            _ => store
                .begin(meta(1), |_| Err("the device is lost".into()))
                .unwrap(),
        }
        let error = store
            .complete(&mut world.rank(rank))
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("rank 1: the snapshot failed: the device is lost"),
            "{error}"
        );
        // The fence fails on rank 0.
        match rank {
            0 => store
                .begin(meta(2), |_| Ok(Box::new(|| Err("event failed".into()))))
                .unwrap(),
            _ => begin(store, &layout, rank, 2).unwrap(),
        }
        let error = store
            .complete(&mut world.rank(rank))
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("rank 0: the snapshot failed: event failed"),
            "{error}"
        );
        begin(store, &layout, rank, 3).unwrap();
        assert_eq!(store.complete(&mut world.rank(rank)).unwrap().step, 3);
    });

    assert_holds(&Reader::open(dir.path()).unwrap(), &layout, 3);
    assert_eq!(staged(dir.path()), [""; 0]);
}

#[test]
fn fence_precedes_the_write() {
    let dir = tempfile::tempdir().unwrap();
    let layout = layout(1, 1);
    let mut store = open(dir.path(), &layout, 0, 1);
    let (entered, at_fence) = channel::<()>();
    let (open_fence, opened) = channel::<()>();

    let fill = |slices: Vec<StagingSlice<'_>>| {
        for slice in slices {
            let unit = &layout.units()[slice.unit];
            let first = unit.shard(0).start + slice.in_shard.start;
            for (i, bytes) in slice.bytes.chunks_exact_mut(4).enumerate() {
                let elem = first + i as u64;
                let param = unit
                    .params
                    .iter()
                    .find(|p| p.range().contains(&elem))
                    .unwrap();
                let value = value(4, &slice.state.name, &param.name, elem - param.offset_elems);
                bytes.copy_from_slice(&value.to_le_bytes());
            }
        }
        let fence: Fence = Box::new(move || {
            entered.send(()).map_err(|e| e.to_string())?;
            opened.recv().map_err(|e| e.to_string())
        });
        Ok(fence)
    };

    store.begin(meta(1), fill).unwrap();
    at_fence.recv().unwrap();
    assert!(!store.ready());
    open_fence.send(()).unwrap();
    store.complete(&mut SingleRank).unwrap();
    assert_holds(&Reader::open(dir.path()).unwrap(), &layout, 4);
}

#[test]
fn panic_of_the_save_thread_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let layout = layout(1, 1);
    let mut store = open(dir.path(), &layout, 0, 1);
    store
        .begin(meta(1), |_| {
            Ok(Box::new(|| std::panic::resume_unwind(Box::new("boom"))))
        })
        .unwrap();

    assert!(
        store
            .complete(&mut SingleRank)
            .unwrap_err()
            .to_string()
            .contains("a thread that saves or opens a checkpoint has panicked")
    );

    // Copies into its buffer may still be in progress.
    store.begin(meta(2), |_| Ok(Box::new(|| Ok(())))).unwrap();
    assert!(
        store
            .complete(&mut SingleRank)
            .unwrap_err()
            .to_string()
            .contains("still in use")
    );
}

/// Copies into its buffer may still be in progress, so that it is neither used again nor freed.
#[test]
fn buffer_of_a_panicked_copy_is_not_used_again() {
    let dir = tempfile::tempdir().unwrap();
    let layout = layout(1, 1);
    let mut store = open(dir.path(), &layout, 0, 1);
    let begun = catch_unwind(AssertUnwindSafe(|| {
        store.begin(meta(1), |_| std::panic::resume_unwind(Box::new("boom")))
    }));
    assert!(begun.is_err());

    store.begin(meta(2), |_| Ok(Box::new(|| Ok(())))).unwrap();

    fails(store.complete(&mut SingleRank), &["still in use"]);
}

#[test]
fn dropped_store_keeps_staged_files() {
    let dir = tempfile::tempdir().unwrap();
    let layout = layout(1, 1);
    let mut store = open(dir.path(), &layout, 0, 2);
    begin(&mut store, &layout, 0, 1).unwrap();
    begin(&mut store, &layout, 0, 2).unwrap();
    drop(store);
    assert!(matches!(
        Reader::open(dir.path()),
        Err(CkptError::NoCheckpoint { .. })
    ));
    assert_eq!(assemble(dir.path(), &NONE).unwrap().checkpoint.step, 2);
    assert_holds(&Reader::open(dir.path()).unwrap(), &layout, 2);
}

#[test]
fn saves_of_one_step_keep_each_others_files() {
    let dir = tempfile::tempdir().unwrap();
    let layout = layout(2, 4);
    on_all_ranks(dir.path(), &layout, 2, |store, rank, world| {
        for _ in 0..2 {
            begin(store, &layout, rank, 7).unwrap();
        }
        // Both are staged on all ranks before the first is published: two files a rank, two
        // descriptions.
        while staged(dir.path()).len() < 6 {
            std::thread::yield_now();
        }
        world.rank(rank).all_gather(&[]);
        for _ in 0..2 {
            assert_eq!(store.complete(&mut world.rank(rank)).unwrap().step, 7);
        }
    });

    assert_holds(&Reader::open(dir.path()).unwrap(), &layout, 7);
    assert_eq!(staged(dir.path()), [""; 0]);
}
