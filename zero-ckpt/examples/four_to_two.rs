//! Four ranks save in the background; two ranks load, each its half.
//!
//! `cargo run -p zero-ckpt --example four_to_two`

use std::error::Error;
use std::path::Path;
use std::sync::{Arc, Barrier, Mutex};

use zero_ckpt::{
    BackgroundStore, Exchange, Reader, SaveMeta, ShardData, StateDtype, StateSpec, Store,
    StoreOptions,
};
use zero_shard::{Layout, ParamSpec, UnitSpec, ZeroStage};

/// The memory that the ranks share, in place of a communicator.
struct Shared {
    parts: Mutex<Vec<Vec<u8>>>,
    barrier: Barrier,
}

/// One rank's access to it.
struct Threads<'a>(&'a Shared, u64);

impl Threads<'_> {
    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, String> {
        let Self(shared, rank) = self;
        let lost = |_| "a rank has panicked".to_string();
        shared.parts.lock().map_err(lost)?[*rank as usize] = bytes.to_vec();
        shared.barrier.wait();
        let all = shared
            .parts
            .lock()
            .map_err(|_| "a rank has panicked")?
            .clone();
        shared.barrier.wait();
        Ok(all)
    }
}

impl Exchange for Threads<'_> {
    type Error = String;

    fn gather(&mut self, record: &[u8]) -> Result<Vec<u8>, String> {
        Ok(self.all_gather(record)?.concat())
    }

    fn broadcast(&mut self, message: &mut [u8], root: u64) -> Result<(), String> {
        message.copy_from_slice(&self.all_gather(message)?[root as usize]);
        Ok(())
    }
}

fn units() -> Vec<UnitSpec> {
    (0..3)
        .map(|i| {
            UnitSpec::new(
                format!("h.{i}"),
                [ParamSpec::new(format!("h.{i}.w"), [100, 33])],
            )
        })
        .collect()
}

fn rank_saves(
    dir: &Path,
    rank: u64,
    shared: &Shared,
) -> Result<String, Box<dyn Error + Send + Sync>> {
    let layout = Arc::new(Layout::new(&units(), 4, 64)?);
    let store = Store::create(dir, rank, StoreOptions::default().keep_last(2))?;
    let states = vec![StateSpec::new("master", StateDtype::F32)];

    let mut store = BackgroundStore::new(store, Arc::clone(&layout), states, 1)?;

    let mut master = vec![rank as f32; layout.shard_elems() as usize];
    let mut shard = ShardData::new(&layout, rank)?;
    shard.storage_f32("master", &master)?;
    let trainer = serde_json::json!({ "seed": 1, "tokens_seen": 4096 });
    store.begin_copy(
        SaveMeta::default()
            .step(10)
            .stage(ZeroStage::Three)
            .dtype(StateDtype::BF16)
            .trainer(trainer),
        &shard,
    )?;

    master.fill(-1.0); // training continues; the snapshot holds step 10
    Ok(store.complete(&mut Threads(shared, rank))?.name)
}

fn main() -> Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir()?;
    let shared = Shared {
        parts: Mutex::new(vec![Vec::new(); 4]),
        barrier: Barrier::new(4),
    };

    std::thread::scope(|scope| {
        let dir = dir.path();
        let shared = &shared;
        let ranks: Vec<_> = (0..4)
            .map(|rank| scope.spawn(move || rank_saves(dir, rank, shared)))
            .collect();
        for (rank, saved) in ranks.into_iter().enumerate() {
            match saved.join() {
                Ok(saved) => println!("rank {rank}: {saved:?}"),
                Err(_) => println!("rank {rank} panicked"),
            }
        }
    });

    let two = Layout::new(&units(), 2, 16)?;
    let reader = Reader::open(dir.path())?;
    println!("\n{}", reader.describe());
    for rank in 0..2 {
        let mut mine = vec![0.0; two.shard_elems() as usize];
        reader.view(&two)?.read_storage("master", rank, &mut mine)?;
        println!(
            "rank {rank} of 2 holds {} elements, from {} to {}",
            mine.len(),
            mine[0],
            mine[mine.len() - 1]
        );
    }

    println!(
        "every byte as saved: {}",
        reader.verify().problems.is_empty()
    );
    Ok(())
}
