//! Four ranks save in the background; two ranks load, each its half.
//!
//! `cargo run -p zero-ckpt --example four_to_two`

use std::error::Error;
use std::path::Path;
use std::sync::{Arc, Barrier, Mutex};

use zero_ckpt::{BackgroundStore, Reader, SaveMeta, ShardData, StateDtype, StateSpec, Store, StoreOptions};
use zero_shard::{Layout, ParamSpec, UnitSpec};

/// An all-gather between threads, in place of a communicator.
struct Gather {
    frames: Mutex<Vec<Vec<u8>>>,
    barrier: Barrier,
}

impl Gather {
    fn all(&self, rank: usize, frame: &[u8]) -> Result<Vec<Vec<u8>>, String> {
        let lost = |_| "a rank has panicked".to_string();
        self.frames.lock().map_err(lost)?[rank] = frame.to_vec();
        self.barrier.wait();
        let all = self.frames.lock().map_err(|_| "a rank has panicked")?.clone();
        self.barrier.wait();
        Ok(all)
    }
}

fn units() -> Vec<UnitSpec> {
    (0..3).map(|i| UnitSpec::new(format!("h.{i}"), [ParamSpec::new(format!("h.{i}.w"), [100, 33])])).collect()
}

fn rank_saves(dir: &Path, rank: u64, gather: &Gather) -> Result<String, Box<dyn Error + Send + Sync>> {
    let layout = Arc::new(Layout::new(&units(), 4, 64)?);
    let store = Store::create(dir, rank, StoreOptions { keep_last: Some(2), ..StoreOptions::default() })?;
    let states = vec![StateSpec { name: "master".into(), dtype: StateDtype::F32 }];
    let mut store = BackgroundStore::new(store, Arc::clone(&layout), states, 1)?;

    let mut master = vec![rank as f32; layout.shard_elems() as usize];
    let mut shard = ShardData::new(&layout, rank)?;
    shard.storage_f32("master", &master)?;
    let trainer = serde_json::json!({ "seed": 1, "tokens_seen": 4096 });
    store
        .begin_copy(SaveMeta { step: 10, stage: 3, dtype: "bf16".into(), trainer, ..SaveMeta::default() }, &shard)?;
    master.fill(-1.0); // training continues; the snapshot holds step 10
    Ok(store.complete(|frame| gather.all(rank as usize, frame))?.name)
}

fn main() -> Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir()?;
    let gather = Gather { frames: Mutex::new(vec![Vec::new(); 4]), barrier: Barrier::new(4) };
    std::thread::scope(|scope| {
        let (dir, gather) = (dir.path(), &gather);
        let ranks: Vec<_> = (0..4).map(|rank| scope.spawn(move || rank_saves(dir, rank, gather))).collect();
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
        println!("rank {rank} of 2 holds {} elements, from {} to {}", mine.len(), mine[0], mine[mine.len() - 1]);
    }
    println!("every byte as saved: {}", reader.verify().problems.is_empty());
    Ok(())
}
