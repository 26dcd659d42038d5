//! Saving in the background: the snapshot is of its step, failures surface on all ranks, buffers bound the saves.
#![cfg(not(miri))]

mod common;

use std::sync::Arc;
use std::sync::mpsc::channel;

use common::{STATES, World, assert_holds, layout, meta, storage};
use zero_ckpt::{BackgroundStore, CkptError, Reader, ShardData, StateDtype, StateSpec, Store, StoreOptions};
use zero_shard::Layout;

fn specs() -> Vec<StateSpec> {
    STATES.map(|name| StateSpec { name: name.into(), dtype: StateDtype::F32 }).to_vec()
}

fn open(dir: &std::path::Path, layout: &Layout, rank: u64, buffers: usize) -> BackgroundStore {
    let store = Store::create(dir, rank, StoreOptions::default()).unwrap();
    BackgroundStore::new(store, Arc::new(layout.clone()), specs(), buffers).unwrap()
}

fn begin(store: &mut BackgroundStore, layout: &Layout, rank: u64, step: u64) -> Result<(), CkptError> {
    let mut states = STATES.map(|s| storage(layout, rank, s, step));
    let mut shard = ShardData::new(layout, rank).unwrap();
    for (state, values) in STATES.iter().zip(&states) {
        shard.storage_f32(state, values).unwrap();
    }
    let begun = store.begin_copy(meta(step), &shard);
    // Training goes on and overwrites the state at once.
    states.iter_mut().for_each(|s| s.fill(-1.0));
    begun
}

#[test]
fn a_snapshot_holds_the_values_of_its_step() {
    let dir = tempfile::tempdir().unwrap();
    let (layout, world) = (layout(3, 4), World::new(3));
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let (layout, world, dir) = (&layout, &world, dir.path());
            scope.spawn(move || {
                let mut store = open(dir, layout, rank, 2);
                assert!(!store.ready());
                begin(&mut store, layout, rank, 10).unwrap();
                begin(&mut store, layout, rank, 11).unwrap();
                assert!(matches!(begin(&mut store, layout, rank, 12), Err(CkptError::InFlight { limit: 2 })));
                assert_eq!(store.complete(|f| world.all_gather(rank, f)).unwrap().step, 10);
                begin(&mut store, layout, rank, 12).unwrap();
                assert_eq!(store.complete(|f| world.all_gather(rank, f)).unwrap().step, 11);
                while !store.ready() {
                    std::thread::yield_now();
                }
                assert_eq!(store.complete(|f| world.all_gather(rank, f)).unwrap().step, 12);
                let none = store.complete(|f| world.all_gather(rank, f));
                assert!(matches!(none, Err(CkptError::NothingInFlight)));
            });
        }
    });
    for step in 10..=12 {
        let reader = Reader::open(dir.path().join(format!("step-{step:08}"))).unwrap();
        assert!(reader.verify().problems.is_empty());
        assert_holds(&reader, &layout, step);
    }
    assert_eq!(Reader::open(dir.path()).unwrap().manifest().step, 12);
}

#[test]
fn steps_go_on_between_the_exchanges_and_wait_for_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (layout, world) = (layout(3, 4), World::new(3));
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let (layout, world, dir) = (&layout, &world, dir.path());
            scope.spawn(move || {
                let mut store = open(dir, layout, rank, 2);
                let (mut published, mut begun) = (Vec::new(), 0);
                for step in 0.. {
                    if step % 3 == 0 && begun < 4 && store.in_flight() < 2 {
                        begun += 1;
                        begin(&mut store, layout, rank, begun).unwrap();
                    }
                    // What every step exchanges anyway has a bit for this.
                    let ready = world.all_gather(rank, &[u8::from(store.ready())]).unwrap();
                    if ready.iter().all(|bit| bit[0] == 1) {
                        published.extend(store.advance(|f| world.all_gather(rank, f)).unwrap().map(|p| p.step));
                    }
                    if published.len() == 4 {
                        break;
                    }
                }
                assert_eq!(published, [1, 2, 3, 4]);
                assert_eq!(store.in_flight(), 0);
            });
        }
    });
    assert_holds(&Reader::open(dir.path()).unwrap(), &layout, 4);
}

#[test]
fn a_failure_on_one_rank_surfaces_on_all_and_the_next_save_works() {
    let dir = tempfile::tempdir().unwrap();
    let (layout, world) = (layout(2, 1), World::new(2));
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (layout, world, dir) = (&layout, &world, dir.path());
            scope.spawn(move || {
                let mut store = open(dir, layout, rank, 1);
                // The copy fails on rank 1.
                match rank {
                    0 => begin(&mut store, layout, rank, 1).unwrap(),
                    _ => store.begin(meta(1), |_| Err("the device is lost".into())).unwrap(),
                }
                let error = store.complete(|f| world.all_gather(rank, f)).unwrap_err().to_string();
                assert_eq!(error, "rank 1: the snapshot failed: the device is lost");
                // The wait behind it fails on rank 0.
                match rank {
                    0 => store.begin(meta(2), |_| Ok(Box::new(|| Err("event failed".into())))).unwrap(),
                    _ => begin(&mut store, layout, rank, 2).unwrap(),
                }
                let error = store.complete(|f| world.all_gather(rank, f)).unwrap_err().to_string();
                assert_eq!(error, "rank 0: the snapshot failed: event failed");
                begin(&mut store, layout, rank, 3).unwrap();
                assert_eq!(store.complete(|f| world.all_gather(rank, f)).unwrap().step, 3);
            });
        }
    });
    assert_holds(&Reader::open(dir.path()).unwrap(), &layout, 3);
    assert_eq!(std::fs::read_dir(dir.path().join(".staging")).unwrap().count(), 0);
}

#[test]
fn the_fence_is_waited_for_before_the_bytes_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let layout = layout(1, 1);
    let mut store = open(dir.path(), &layout, 0, 1);
    let (open_gate, gate) = channel::<()>();
    let fill = |slots: Vec<zero_ckpt::Slot<'_>>| {
        for slot in slots {
            let unit = &layout.units()[slot.unit];
            let first = unit.shard(0).start + slot.in_shard.start;
            for (i, bytes) in slot.bytes.chunks_exact_mut(4).enumerate() {
                let elem = first + i as u64;
                let param = unit.params.iter().find(|p| p.range().contains(&elem)).unwrap();
                let value = common::value(4, &slot.state.name, &param.name, elem - param.offset_elems);
                bytes.copy_from_slice(&value.to_le_bytes());
            }
        }
        let fence: zero_ckpt::Fence = Box::new(move || gate.recv().map_err(|e| e.to_string()));
        Ok(fence)
    };
    store.begin(meta(1), fill).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert!(!store.ready(), "written before the fence was passed");
    open_gate.send(()).unwrap();
    store.complete(|f| Ok::<_, String>(vec![f.to_vec()])).unwrap();
    assert_holds(&Reader::open(dir.path()).unwrap(), &layout, 4);
}

#[test]
fn a_panic_of_the_writer_is_an_error_and_no_hang() {
    let dir = tempfile::tempdir().unwrap();
    let layout = layout(1, 1);
    let mut store = open(dir.path(), &layout, 0, 1);
    store.begin(meta(1), |_| Ok(Box::new(|| std::panic::resume_unwind(Box::new("boom"))))).unwrap();
    let alone = |f: &[u8]| Ok::<_, String>(vec![f.to_vec()]);
    assert!(store.complete(alone).unwrap_err().to_string().contains("writer has ended"));
    store.begin(meta(2), |_| Ok(Box::new(|| Ok(())))).unwrap();
    assert!(store.complete(alone).unwrap_err().to_string().contains("writer has ended"));
}

#[test]
fn a_store_that_is_dropped_leaves_nothing_staged() {
    let dir = tempfile::tempdir().unwrap();
    let layout = layout(1, 1);
    let mut store = open(dir.path(), &layout, 0, 2);
    begin(&mut store, &layout, 0, 1).unwrap();
    begin(&mut store, &layout, 0, 2).unwrap();
    drop(store);
    assert_eq!(std::fs::read_dir(dir.path().join(".staging")).unwrap().count(), 0);
    assert!(matches!(Reader::open(dir.path()), Err(CkptError::NoCheckpoint { .. })));
}

#[test]
fn too_small_a_buffer_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let layout = layout(1, 1);
    let need = zero_ckpt::staging_bytes(&layout, 0, &specs()).unwrap() as usize;
    let store = Store::create(dir.path(), 0, StoreOptions::default()).unwrap();
    let memory = vec![zero_ckpt::Pages::new(need - 1)];
    let refused = BackgroundStore::with_memory(store, Arc::new(layout), specs(), memory).err().unwrap();
    assert!(refused.to_string().contains("staging buffer"), "{refused}");
}
