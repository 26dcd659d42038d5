//! The files that a save and a resume of 1,024 ranks open, and the bytes that they read, write and
//! exchange. Only counts are compared, no times. `ZERO_RANKS` sets another number of ranks; with
//! `--nocapture` the figures are printed.
//!
//! Counts are those of the process, so this program has few tests, one at a time.
#![cfg(not(miri))]

#[allow(dead_code)]
#[path = "suite/common.rs"]
mod common;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use common::{STATES, World, bits, loaded, meta, read, run, saved, value, with_shard};
use zero_ckpt::testing::{IoCounts, io_counts};
use zero_ckpt::{
    CkptError, Exchange, ExportOptions, MANIFEST_NAME, MESSAGE_BYTES, RECORD_BYTES, Reader,
    SingleRank, Store, StoreOptions, assemble, resolve,
};
use zero_shard::{Layout, ParamSpec, TensorCut, TensorPart, UnitSpec};

fn one_at_a_time() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

fn layout(ranks: u64) -> Layout {
    let p = |name: &str, shape: &[u64]| ParamSpec::new(name, shape);
    let units = [
        UnitSpec::new("embedding", [p("wte", &[64, 40])]),
        UnitSpec::new("block", [p("w", &[40, 120]), p("b", &[120])]),
        UnitSpec::new("head", [p("head", &[3001])]),
    ];
    Layout::new(&units, ranks, 4).unwrap()
}

/// Runs `work` and returns what it accessed.
fn counted<T>(work: impl FnOnce() -> T) -> (T, IoCounts) {
    let before = io_counts();
    let result = work();
    (result, io_counts() - before)
}

/// All ranks save `step`; returns the most bytes that rank 0 and another rank received.
fn save(stores: &[Store], layout: &Layout, step: u64) -> (u64, u64) {
    let world = World::new(layout.world_size());
    let save = |store: &Store| {
        let mut exchange = world.rank(store.rank());
        with_shard(layout, store.rank(), step, |shard| {
            store.save(&meta(step), shard, &mut exchange).unwrap()
        });
        exchange.received_bytes
    };

    std::thread::scope(|scope| {
        let small = |store| {
            let save = &save;
            std::thread::Builder::new()
                .stack_size(1 << 19)
                .spawn_scoped(scope, move || save(store))
                .unwrap()
        };
        let ranks: Vec<_> = stores.iter().map(small).collect();
        let received: Vec<u64> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        (
            received[0],
            received[1..].iter().copied().max().unwrap_or(0),
        )
    })
}

/// The broadcasts of rank 0, which the other ranks receive one after another.
#[derive(Clone, Default)]
struct Recorded {
    sent: Vec<Vec<u8>>,
    received: Option<usize>,
}

impl Exchange for Recorded {
    type Error = String;

    fn gather(&mut self, _: &[u8]) -> Result<Vec<u8>, String> {
        Err("an open gathers nothing".into())
    }

    fn broadcast(&mut self, message: &mut [u8], root: u64) -> Result<(), String> {
        assert_eq!(root, 0);
        match &mut self.received {
            None => self.sent.push(message.to_vec()),
            Some(next) => {
                message.copy_from_slice(&self.sent[*next]);
                *next += 1;
            }
        }
        Ok(())
    }
}

/// The files that hold elements of `rank` in `to`.
fn files_of(reader: &Reader, to: &Layout, rank: u64) -> BTreeSet<usize> {
    let overlaps = |piece: &zero_ckpt::UnitRange| {
        let unit = &to.units()[piece.0 as usize];
        let shard = unit.shard(rank);
        // The units have no padding before their end, so flat positions are element numbers.
        piece.1.max(shard.start) < piece.2.min(shard.end)
    };
    let files = reader.manifest().files.iter().enumerate();
    files
        .filter(|(_, file)| file.pieces.iter().any(overlaps))
        .map(|(index, _)| index)
        .collect()
}

fn ranks() -> u64 {
    std::env::var("ZERO_RANKS")
        .ok()
        .and_then(|ranks| ranks.parse().ok())
        .unwrap_or(1024)
}

#[test]
fn ranks_open_only_what_they_read() {
    let _one = one_at_a_time();
    let memory = Path::new("/dev/shm");
    let dir = tempfile::tempdir_in(if memory.is_dir() {
        memory
    } else {
        Path::new("/tmp")
    })
    .unwrap();
    let from = layout(ranks());
    let to = layout(ranks() * 5 / 8);
    let n = from.world_size();
    let options = || StoreOptions::default().keep_last(2);
    let (stores, creating) = counted(|| {
        (0..n)
            .map(|rank| Store::create(dir.path(), rank, options()).unwrap())
            .collect::<Vec<_>>()
    });

    let mut saves = Vec::new();
    for step in 1..=3 {
        let (received, accessed) = counted(|| save(&stores, &from, step));
        // A rank that writes for longer than 500 ms, as on a busy machine, costs one more round.
        let rounds = received.1 / MESSAGE_BYTES as u64;
        let of_round = (
            n * RECORD_BYTES as u64 + MESSAGE_BYTES as u64,
            MESSAGE_BYTES as u64,
        );
        assert_eq!(received, (rounds * of_round.0, rounds * of_round.1));
        assert!(rounds >= 1);
        saves.push(accessed);
    }

    println!("{n} ranks open the store: {} opens", creating.opens);
    println!(
        "a save: {:?}; rank 0 receives {} bytes, another rank {MESSAGE_BYTES}",
        saves[2],
        n * 64 + 4096
    );
    // A rank creates its file, and rank 0 opens it once; neither grows with the number of earlier
    // checkpoints.
    assert!(
        creating.opens <= 4 * n + 10 && saves.iter().all(|save| save.opens <= 2 * n + 20),
        "{creating:?} {saves:?}"
    );
    drop(stores);

    // Rank 0 verifies every byte.
    let mut exchange = Recorded::default();
    let find = || Ok::<_, CkptError>(resolve(dir.path())?.reader);
    let (reader, checking) =
        counted(|| Reader::open_on_ranks(dir.path(), 0, &mut exchange, find).unwrap());
    let manifest_bytes = std::fs::metadata(reader.path().join(MANIFEST_NAME))
        .unwrap()
        .len();
    let state_bytes: u64 = reader.manifest().files.iter().map(|file| file.bytes).sum();
    println!(
        "{n} files of {state_bytes} bytes in all, a manifest of {manifest_bytes}; rank 0 checks all: {checking:?}"
    );
    assert!(checking.opens <= 3 * n + 20, "{checking:?}");
    assert!(
        checking.read_bytes <= state_bytes + 3 * 2 * manifest_bytes,
        "{checking:?}"
    );
    assert!(
        exchange
            .sent
            .iter()
            .all(|message| message.len() == MESSAGE_BYTES)
    );

    // Every rank of another world size loads its shard.
    let mut total = IoCounts::default();
    let mut most = 0;
    for rank in 0..to.world_size() {
        let load = || {
            let mut received = Recorded {
                received: Some(0),
                ..exchange.clone()
            };
            let reader = match rank {
                0 => Reader::open_selected(dir.path(), &reader.selection()).unwrap(),
                rank => Reader::open_on_ranks(dir.path(), rank, &mut received, find).unwrap(),
            };
            let states = STATES.map(|state| read(&reader, &to, state, rank).unwrap());
            (reader, states)
        };
        let ((reader, states), accessed) = counted(load);
        for (state, values) in STATES.iter().zip(&states) {
            assert_eq!(
                bits(values),
                loaded(zero_ckpt::StateDtype::F32.into(), &to, rank, state, 3),
                "rank {rank}, {state}"
            );
        }
        let files = files_of(&reader, &to, rank);
        // Two directories and the manifest; then each file that the rank reads, once.
        assert_eq!(
            accessed.opens,
            3 + files.len() as u64,
            "rank {rank}: {accessed:?}"
        );
        let file_bytes: u64 = files
            .iter()
            .map(|file| reader.manifest().files[*file].bytes)
            .sum();
        // Small files: the whole state is one block, which is read once for each state.
        let states = STATES.len() as u64;
        assert!(
            accessed.read_bytes <= manifest_bytes + states * file_bytes,
            "rank {rank}: {accessed:?}"
        );
        most = most.max(accessed.opens);
        total.opens += accessed.opens;
        total.read_bytes += accessed.read_bytes;
    }

    let m = to.world_size();
    println!(
        "{m} ranks resume: {} opens, at most {most} a rank; {} bytes read",
        total.opens, total.read_bytes
    );
    // Shards of a unit overlap at most n + m - 1 times.
    let units = to.units().len() as u64;
    assert!(total.opens <= 3 * m + units * (n + m - 1), "{total:?}");
}

/// A slice of the columns of a matrix, a few elements of every row, is read in chunks that cover
/// it, and no block twice.
#[test]
fn column_slice_reads_the_matrix_once() {
    let _one = one_at_a_time();
    let dir = tempfile::tempdir().unwrap();
    let unit = UnitSpec::new("u", [ParamSpec::new("w", [512, 3 * 512])]);
    let saved = Layout::new(std::slice::from_ref(&unit), 1, 1).unwrap();
    let stores = [Store::create(dir.path(), 0, StoreOptions::default()).unwrap()];
    save(&stores, &saved, 1);
    let reader = Reader::open(dir.path()).unwrap();
    let mut warm = [0.0];
    reader.read_param("master", "w", 0..1, &mut warm).unwrap();

    let cut = TensorCut::Dim { dim: 1, blocks: 3 };
    let part = TensorPart::new(1, 4).unwrap();
    let local = Layout::new(&[part.unit(&unit, |_| cut).unwrap()], 1, 1).unwrap();
    let view = reader.view_of_part(&local, part, |_| cut).unwrap();
    let mut slice = vec![0.0; local.shard_elems() as usize];
    let (read, accessed) = counted(|| view.read_storage("master", 0, &mut slice));
    read.unwrap();
    assert_eq!(slice[0].to_bits(), value(1, "master", "w", 128).to_bits());
    let matrix_bytes = 512 * 3 * 512 * 4;
    println!("a quarter of the columns of {matrix_bytes} bytes: {accessed:?}");
    // The last block may hold a part of the next state, and a read ends at a page.
    assert!(
        accessed.read_bytes <= matrix_bytes + 256 * 1024 + 4096,
        "{accessed:?}"
    );
    assert!(accessed.opens <= 1, "{accessed:?}");
}

#[test]
fn export_syncs_its_directories() {
    let _one = one_at_a_time();
    let dir = tempfile::tempdir().unwrap();
    let layout = layout(1);
    let stores = [Store::create(dir.path().join("store"), 0, StoreOptions::default()).unwrap()];
    save(&stores, &layout, 1);
    let reader = Reader::open(dir.path().join("store")).unwrap();
    // A new directory: itself and the one that it is in. An existing one: before and after
    // config.json is moved into it.
    std::fs::create_dir(dir.path().join("old")).unwrap();
    for out in ["new", "old"] {
        let (exported, accessed) =
            counted(|| reader.export(dir.path().join(out), &ExportOptions::default()));
        exported.unwrap();
        assert_eq!(accessed.dir_syncs, 2, "{out}");
    }
}

/// Files that were copied from another machine may still be in memory only.
#[test]
fn assembled_files_are_synced() {
    let _one = one_at_a_time();
    let dir = tempfile::tempdir().unwrap();
    let layout = layout(1);
    let save = |name: &str| {
        let store = Store::create(dir.path(), 0, run(name)).unwrap();
        with_shard(&layout, 0, 7, |shard| {
            store.save(&meta(7), shard, &mut SingleRank)
        })
    };
    save("a").unwrap();
    // Refused, because the checkpoint of this step is of another run; its file stays staged.
    save("b").unwrap_err();
    let (assembled, counts) = counted(|| assemble(dir.path().join("new"), &[dir.path()]));
    assert_eq!(
        (assembled.unwrap().checkpoint.step, counts.file_syncs),
        (7, 1)
    );

    // The files may be terabytes on another file system: a refusal comes before the first.
    let other = Layout::new(&[UnitSpec::new("u", [ParamSpec::new("w", [3])])], 1, 1).unwrap();
    saved(&dir.path().join("other"), &other, 1, 1, &run("b"));
    let (refused, counts) = counted(|| assemble(dir.path().join("other"), &[dir.path()]));
    let refused = refused.unwrap_err();
    assert!(
        matches!(refused, CkptError::AnotherModel { .. }),
        "{refused}"
    );
    assert_eq!(counts.file_syncs, 0);
}
