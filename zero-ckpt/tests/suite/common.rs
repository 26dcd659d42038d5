//! A model, its state, and ranks as threads.

use std::path::Path;
use std::sync::{Barrier, Mutex};

use proptest::prelude::ProptestConfig;
use zero_ckpt::{CkptError, PublishedCheckpoint, Reader, SaveMeta, ShardData, Store, StoreOptions};
use zero_shard::{Layout, ParamSpec, UnitSpec};

/// Configuration of a property with `n` cases, times `ZERO_PROPTEST_FACTOR` if that is set.
pub(crate) fn cases(n: u32) -> ProptestConfig {
    let factor = std::env::var("ZERO_PROPTEST_FACTOR").ok().and_then(|f| f.parse().ok()).unwrap_or(1);
    ProptestConfig { cases: n.saturating_mul(factor), failure_persistence: None, ..ProptestConfig::default() }
}

pub(crate) const STATES: [&str; 3] = ["master", "first_moment", "second_moment"];

/// A small model with odd sizes, an empty parameter, an empty unit, a scalar, and a unit smaller than the world size.
pub(crate) fn units() -> Vec<UnitSpec> {
    let p = |name: &str, shape: &[u64]| ParamSpec::new(name, shape);
    vec![
        UnitSpec::new("embedding", [p("wte", &[31, 7]), p("wpe", &[5, 7])]),
        UnitSpec::new("h.0", [p("h.0.w", &[7, 21]), p("h.0.empty", &[0, 3]), p("h.0.b", &[21])]),
        UnitSpec::new("nothing", []),
        UnitSpec::new("h.1", [p("h.1.w", &[7, 21]), p("h.1.b", &[21])]),
        UnitSpec::new("head", [p("temperature", &[]), p("ln", &[2])]),
    ]
}

pub(crate) fn layout(world_size: u64, align_elems: u64) -> Layout {
    Layout::new(&units(), world_size, align_elems).unwrap()
}

/// The value of element `elem` of parameter `param`: any bits, NaN payloads and signed zeros included.
pub(crate) fn value(seed: u64, state: &str, param: &str, elem: u64) -> f32 {
    let mut h = seed ^ 0x9e37_79b9_7f4a_7c15;
    for b in state.bytes().chain(param.bytes()).chain(elem.to_le_bytes()) {
        h = (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
    }
    f32::from_bits((h >> 16) as u32)
}

/// The shard storage of a rank, with garbage in the padding.
pub(crate) fn storage(layout: &Layout, rank: u64, state: &str, seed: u64) -> Vec<f32> {
    let mut out = vec![f32::from_bits(0xdead_beef); layout.shard_elems() as usize];
    for unit in layout.units() {
        let shard = unit.shard(rank);
        for param in &unit.params {
            for elem in shard.start.max(param.range().start)..shard.end.min(param.range().end) {
                let at = unit.shard_range().start + elem - shard.start;
                out[at as usize] = value(seed, state, &param.name, elem - param.offset_elems);
            }
        }
    }
    out
}

/// The bits of the shard storage of a rank, with zeros in the padding, as loaded.
pub(crate) fn loaded(layout: &Layout, rank: u64, state: &str, seed: u64) -> Vec<u32> {
    let mut out = bits(&storage(layout, rank, state, seed));
    for unit in layout.units() {
        let (shard, at) = (unit.shard(rank), unit.shard_range().start);
        for elem in shard.clone() {
            if !unit.params.iter().any(|p| p.range().contains(&elem)) {
                out[(at + elem - shard.start) as usize] = 0;
            }
        }
    }
    out
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// An all-gather between threads.
pub(crate) struct World {
    frames: Mutex<Vec<Vec<u8>>>,
    barrier: Barrier,
}

impl World {
    pub(crate) fn new(ranks: u64) -> Self {
        Self { frames: Mutex::new(vec![Vec::new(); ranks as usize]), barrier: Barrier::new(ranks as usize) }
    }

    pub(crate) fn all_gather(&self, rank: u64, frame: &[u8]) -> Result<Vec<Vec<u8>>, String> {
        self.frames.lock().unwrap()[rank as usize] = frame.to_vec();
        self.barrier.wait();
        let all = self.frames.lock().unwrap().clone();
        self.barrier.wait();
        assert!(all.iter().all(|f| f.len() == frame.len()), "frames of unequal length");
        Ok(all)
    }
}

pub(crate) fn meta(step: u64) -> SaveMeta {
    SaveMeta {
        step,
        stage: 3,
        dtype: "fp32".into(),
        trainer: serde_json::json!({"seed": 7, "tokens": step * 1000, "loss_scale": 65536.0}),
        model_config: serde_json::json!({"model_type": "gpt2"}),
        ..SaveMeta::default()
    }
}

/// Every rank of `layout` saves the state of `seed` as `step`; returns the result of each rank.
pub(crate) fn save(
    dir: &Path,
    layout: &Layout,
    step: u64,
    seed: u64,
    options: &StoreOptions,
) -> Vec<Result<PublishedCheckpoint, CkptError>> {
    let stores: Vec<_> =
        (0..layout.world_size()).map(|rank| Store::create(dir, rank, options.clone()).unwrap()).collect();
    save_with(&stores, layout, step, seed)
}

/// [`save`] with open stores.
pub(crate) fn save_with(
    stores: &[Store],
    layout: &Layout,
    step: u64,
    seed: u64,
) -> Vec<Result<PublishedCheckpoint, CkptError>> {
    let world = World::new(layout.world_size());
    std::thread::scope(|scope| {
        let world = &world;
        let ranks: Vec<_> = stores
            .iter()
            .map(|store| {
                scope.spawn(move || {
                    let rank = store.rank();
                    let states = STATES.map(|s| storage(layout, rank, s, seed));
                    let mut shard = ShardData::new(layout, rank).unwrap();
                    for (state, values) in STATES.iter().zip(&states) {
                        shard.storage_f32(state, values).unwrap();
                    }
                    store.save(&meta(step), &shard, |frame| world.all_gather(rank, frame))
                })
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

/// Asserts that `reader` holds exactly the state of `seed` on all ranks of `layout`.
pub(crate) fn assert_holds(reader: &Reader, layout: &Layout, seed: u64) {
    let view = reader.view(layout).unwrap();
    for rank in 0..layout.world_size() {
        for state in STATES {
            let mut got = vec![f32::NAN; layout.shard_elems() as usize];
            view.read_storage(state, rank, &mut got).unwrap();
            assert_eq!(bits(&got), loaded(layout, rank, state, seed), "rank {rank}, {state}");
        }
    }
}
