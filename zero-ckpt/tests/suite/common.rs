//! A model, its state, and ranks as threads.

use std::fmt::Display;
use std::path::Path;
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use proptest::prelude::ProptestConfig;
use zero_ckpt::testing::SavePoint;
use zero_ckpt::{
    CkptError, Exchange, PublishedCheckpoint, Reader, SaveMeta, ShardData, SingleRank, StagedFile,
    StateDtype, StateEncoding, StateSpec, Store, StoreOptions,
};
use zero_shard::{BlockFormat, Layout, LayoutOptions, ParamSpec, UnitSpec, ZeroStage};

/// Configuration of a property with `n` cases, times `ZERO_PROPTEST_FACTOR` if that is set.
pub(crate) fn cases(n: u32) -> ProptestConfig {
    let factor = std::env::var("ZERO_PROPTEST_FACTOR")
        .ok()
        .and_then(|f| f.parse().ok())
        .unwrap_or(1);
    ProptestConfig {
        cases: n.saturating_mul(factor),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

pub(crate) const STATES: [&str; 3] = ["master", "first_moment", "second_moment"];

/// A small model with odd sizes, an empty parameter, an empty unit, a scalar, and a unit smaller
/// than the world size.
pub(crate) fn units() -> Vec<UnitSpec> {
    let p = |name: &str, shape: &[u64]| ParamSpec::new(name, shape);
    vec![
        UnitSpec::new("embedding", [p("wte", &[31, 7]), p("wpe", &[5, 7])]),
        UnitSpec::new(
            "h.0",
            [
                p("h.0.w", &[7, 21]),
                p("h.0.empty", &[0, 3]),
                p("h.0.b", &[21]),
            ],
        ),
        UnitSpec::new("nothing", []),
        UnitSpec::new("h.1", [p("h.1.w", &[7, 21]), p("h.1.b", &[21])]),
        UnitSpec::new("head", [p("temperature", &[]), p("ln", &[2])]),
    ]
}

pub(crate) fn layout(world_size: u64, align_elems: u64) -> Layout {
    Layout::new(&units(), world_size, align_elems).unwrap()
}

/// The value of element `elem` of parameter `param`: any bits, NaN payloads and signed zeros
/// included.
pub(crate) fn value(seed: u64, state: &str, param: &str, elem: u64) -> f32 {
    let mut h = seed ^ 0x9e37_79b9_7f4a_7c15;
    for b in state.bytes().chain(param.bytes()).chain(elem.to_le_bytes()) {
        h = (h ^ u64::from(b))
            .wrapping_mul(0x0100_0000_01b3)
            .rotate_left(23);
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

/// The bits of the shard storage of a rank, with zeros in the padding, as loaded from a checkpoint
/// with this encoding.
pub(crate) fn loaded(
    encoding: StateEncoding,
    layout: &Layout,
    rank: u64,
    state: &str,
    seed: u64,
) -> Vec<u32> {
    let mut out = vec![0; layout.shard_elems() as usize];
    for unit in layout.units() {
        let shard = unit.shard(rank);
        let first = unit.shard_range().start;
        for param in &unit.params {
            let elems = 0..param.numel_elems;
            let values = elems.map(|elem| value(seed, state, &param.name, elem));
            let mut values: Vec<f32> = values.collect();
            as_stored(encoding, &mut values);
            for elem in shard.start.max(param.range().start)..shard.end.min(param.range().end) {
                let value = values[(elem - param.offset_elems) as usize];
                out[(first + elem - shard.start) as usize] = value.to_bits();
            }
        }
    }
    out
}

/// Replaces the values of a whole parameter by those that are loaded after a save with this
/// encoding.
pub(crate) fn as_stored(encoding: StateEncoding, values: &mut [f32]) {
    match encoding {
        StateEncoding::Blocks {
            format,
            plain_below,
            multiple_of,
        } if values.len() as u64 >= plain_below
            && (values.len() as u64).is_multiple_of(multiple_of) =>
        {
            let mut blocks = vec![0; format.bytes(values.len())];
            format.encode(values, &mut blocks);
            format.decode(&blocks, values);
        }
        StateEncoding::Elements(StateDtype::BF16) => values
            .iter_mut()
            .for_each(|value| *value = half::bf16::from_f32(*value).to_f32()),
        _ => {}
    }
}

/// A layout of whole blocks of [`moment_encoding`].
pub(crate) fn layout_in_blocks(world_size: u64) -> Layout {
    let options = LayoutOptions::default()
        .shard_align_elems(64)
        .param_align_elems(64);
    Layout::with_options(&units(), world_size, options).unwrap()
}

/// The encoding of the second moment in a layout: blocks, where shards have whole ones.
fn moment_encoding(layout: &Layout) -> StateEncoding {
    match layout.options().param_align_elems {
        64 => StateEncoding::Blocks {
            format: BlockFormat::Nf4,
            plain_below: 100,
            multiple_of: 1,
        },
        _ => StateDtype::F32.into(),
    }
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Ranks that are threads.
pub(crate) struct World {
    bytes: Mutex<Vec<u8>>,
    barrier: Barrier,
}

impl World {
    pub(crate) fn new(ranks: u64) -> Self {
        Self {
            bytes: Mutex::default(),
            barrier: Barrier::new(ranks as usize),
        }
    }

    pub(crate) fn rank(&self, rank: u64) -> ThreadRank<'_> {
        ThreadRank {
            world: self,
            rank,
            received_bytes: 0,
        }
    }
}

/// The exchange of one rank of a [`World`].
pub(crate) struct ThreadRank<'a> {
    world: &'a World,
    rank: u64,
    /// Bytes received so far.
    #[allow(dead_code, reason = "not every test program reads it")]
    pub(crate) received_bytes: u64,
}

impl ThreadRank<'_> {
    /// The concatenation of the ranks' `bytes` on all ranks.
    #[allow(dead_code, reason = "not every test program calls it")]
    pub(crate) fn all_gather(&self, bytes: &[u8]) -> Vec<u8> {
        self.put(bytes);
        let all = self.world.bytes.lock().unwrap().clone();
        self.end();
        all
    }

    /// Writes this rank's part of the shared bytes; returns when all ranks have.
    fn put(&self, bytes: &[u8]) {
        let at = self.rank as usize * bytes.len();
        let mut all = self.world.bytes.lock().unwrap();
        let len = all.len().max(at + bytes.len());
        all.resize(len, 0);
        all[at..at + bytes.len()].copy_from_slice(bytes);
        drop(all);
        self.world.barrier.wait();
    }

    /// Waits until all ranks have read the shared bytes, and removes them.
    fn end(&self) {
        if self.world.barrier.wait().is_leader() {
            self.world.bytes.lock().unwrap().clear();
        }
        self.world.barrier.wait();
    }
}

impl Exchange for ThreadRank<'_> {
    type Error = String;

    fn gather(&mut self, record: &[u8]) -> Result<Vec<u8>, String> {
        assert_eq!(record.len(), zero_ckpt::RECORD_BYTES);
        self.put(record);
        let all = if self.rank == 0 {
            self.world.bytes.lock().unwrap().clone()
        } else {
            Vec::new()
        };
        self.received_bytes += all.len() as u64;
        self.end();
        Ok(all)
    }

    fn broadcast(&mut self, message: &mut [u8], root: u64) -> Result<(), String> {
        assert_eq!(message.len(), zero_ckpt::MESSAGE_BYTES);
        if self.rank == root {
            *self.world.bytes.lock().unwrap() = message.to_vec();
        }
        self.world.barrier.wait();
        message.copy_from_slice(&self.world.bytes.lock().unwrap());
        self.received_bytes += message.len() as u64;
        self.end();
        Ok(())
    }
}

pub(crate) fn meta(step: u64) -> SaveMeta {
    SaveMeta::default()
        .step(step)
        .stage(ZeroStage::Three)
        .trainer(serde_json::json!({"seed": 7, "tokens": step * 1000, "loss_scale": 65536.0}))
        .model_config(serde_json::json!({"model_type": "gpt2"}))
}

/// Every rank of `layout` saves the state of `seed` as `step`; returns the result of each rank.
pub(crate) fn save(
    dir: &Path,
    layout: &Layout,
    step: u64,
    seed: u64,
    options: &StoreOptions,
) -> Vec<Result<PublishedCheckpoint, CkptError>> {
    let stores: Vec<_> = (0..layout.world_size())
        .map(|rank| Store::create(dir, rank, options.clone()).unwrap())
        .collect();
    save_with(&stores, layout, step, seed)
}

/// [`save`], which succeeds.
pub(crate) fn saved(dir: &Path, layout: &Layout, step: u64, seed: u64, options: &StoreOptions) {
    let outcomes = save(dir, layout, step, seed, options);
    outcomes.into_iter().for_each(|saved| drop(saved.unwrap()));
}

/// The only rank saves the state of seed `meta.step`.
pub(crate) fn save_alone(
    dir: &Path,
    meta: &SaveMeta,
    options: &StoreOptions,
) -> Result<PublishedCheckpoint, CkptError> {
    let store = Store::create(dir, 0, options.clone())?;
    with_shard(&layout(1, 1), 0, meta.step, |shard| {
        store.save(meta, shard, &mut SingleRank)
    })
}

/// A directory with steps 1 and 2 of seeds 1 and 2.
pub(crate) fn two_checkpoints(layout: &Layout) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for step in [1, 2] {
        saved(dir.path(), layout, step, step, &StoreOptions::default());
    }
    dir
}

/// [`save`] with open stores.
pub(crate) fn save_with(
    stores: &[Store],
    layout: &Layout,
    step: u64,
    seed: u64,
) -> Vec<Result<PublishedCheckpoint, CkptError>> {
    on_ranks(layout.world_size(), |rank, world| {
        let store = &stores[rank as usize];
        with_shard(layout, rank, seed, |shard| {
            store.save(&meta(step), shard, &mut world.rank(rank))
        })
    })
}

/// Runs `work` on a thread for each rank.
pub(crate) fn on_ranks<T: Send>(ranks: u64, work: impl Fn(u64, &World) -> T + Sync) -> Vec<T> {
    let world = World::new(ranks);
    std::thread::scope(|scope| {
        let world = &world;
        let work = &work;
        let ranks: Vec<_> = (0..ranks)
            .map(|rank| scope.spawn(move || work(rank, world)))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Calls `work` with the state of `seed` of a rank.
pub(crate) fn with_shard<T>(
    layout: &Layout,
    rank: u64,
    seed: u64,
    work: impl FnOnce(&ShardData<'_>) -> T,
) -> T {
    let states = STATES.map(|state| storage(layout, rank, state, seed));
    let mut shard = ShardData::new(layout, rank).unwrap();
    let [master, first, second] = &states;
    shard.storage_f32(STATES[0], master).unwrap();
    shard.storage_f32(STATES[1], first).unwrap();
    let encoding = moment_encoding(layout);
    shard.storage_as(STATES[2], encoding, second).unwrap();
    work(&shard)
}

/// Stages a rank's state of seed `step`.
pub(crate) fn stage(store: &Store, layout: &Layout, step: u64) -> Result<StagedFile, CkptError> {
    with_shard(layout, store.rank(), step, |shard| store.stage(step, shard))
}

/// The store of a rank, which all ranks open.
pub(crate) fn open(dir: &Path, rank: u64, options: &StoreOptions, world: &World) -> Store {
    Store::create_on_ranks(
        dir,
        rank,
        options.clone(),
        &mut world.rank(rank),
        |_| Ok(()),
    )
    .unwrap()
}

/// All ranks save the state of `seed`; rank 0 panics at `stop`. Returns the errors.
pub(crate) fn save_until(
    stop: Option<SavePoint>,
    dir: &Path,
    layout: &Layout,
    state: (&SaveMeta, u64),
    options: &StoreOptions,
) -> Vec<String> {
    save_observed(dir, layout, state, options, move |at| {
        if Some(at) == stop {
            std::panic::resume_unwind(Box::new("stopped on purpose"));
        }
    })
}

/// All ranks save the state of `seed`; `observe` is called at the points of rank 0. Returns the
/// errors.
pub(crate) fn save_observed(
    dir: &Path,
    layout: &Layout,
    (meta, seed): (&SaveMeta, u64),
    options: &StoreOptions,
    observe: impl Fn(SavePoint) + Clone + Send + Sync + 'static,
) -> Vec<String> {
    let outcomes = on_ranks(layout.world_size(), |rank, world| {
        let observe = observe.clone();
        let store = open(dir, rank, options, world).observe(move |at| {
            if rank == 0 {
                observe(at);
            }
        });
        with_shard(layout, rank, seed, |shard| {
            store.save(meta, shard, &mut world.rank(rank))
        })
    });
    outcomes
        .into_iter()
        .filter_map(|outcome| outcome.err())
        .map(|error| error.to_string())
        .collect()
}

/// Asserts that the text of `error` has all `parts`.
#[track_caller]
pub(crate) fn says(error: impl Display, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "no {part:?} in: {text}");
    }
}

/// Asserts that `result` is an error whose text has all `parts`.
#[track_caller]
pub(crate) fn fails<T, E: Display>(result: Result<T, E>, parts: &[&str]) {
    match result {
        Ok(_) => panic!("no error, expected one with {parts:?}"),
        Err(error) => says(error, parts),
    }
}

pub(crate) const NONE: [&Path; 0] = [];

pub(crate) fn run(name: &str) -> StoreOptions {
    StoreOptions::default().run(name)
}

/// The sorted names in the staging directory.
pub(crate) fn staged(dir: &Path) -> Vec<String> {
    let names = std::fs::read_dir(dir.join(".staging"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

/// The path in an error that names what is kept.
pub(crate) fn kept(error: &str) -> Option<&Path> {
    let rest = error.split("is kept: ").nth(1)?;
    rest.split(';').next().map(Path::new)
}

/// A hang is a wait beyond this; no wait of a test comes near it.
pub(crate) const LONG: Duration = Duration::from_secs(120);

#[track_caller]
pub(crate) fn wait_until(what: &str, mut ends: impl FnMut() -> bool) {
    let start = Instant::now();
    while !ends() {
        assert!(start.elapsed() < LONG, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Inverts a bit of byte `at` of a file; a negative number counts from the end.
pub(crate) fn flip(path: &Path, at: isize) {
    let mut bytes = std::fs::read(path).unwrap();
    let at = at.rem_euclid(bytes.len() as isize);
    bytes[at as usize] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

/// Calls `check` for each of the first `bytes` bytes of a file, in which a bit of it is inverted.
pub(crate) fn each_flip(path: &Path, bytes: usize, check: impl Fn(usize)) {
    let good = std::fs::read(path).unwrap();
    for at in 0..bytes.min(good.len()) {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        std::fs::write(path, &bad).unwrap();
        check(at);
    }
    std::fs::write(path, good).unwrap();
}

/// fp32 states.
pub(crate) fn specs() -> Vec<StateSpec> {
    STATES
        .map(|name| StateSpec::new(name, StateDtype::F32))
        .to_vec()
}

/// Reads the shard storage of a rank.
pub(crate) fn read(
    reader: &Reader,
    layout: &Layout,
    state: &str,
    rank: u64,
) -> Result<Vec<f32>, CkptError> {
    let mut out = vec![f32::NAN; layout.shard_elems() as usize];
    let read = reader.view(layout)?.read_storage(state, rank, &mut out);
    read.map(|()| out)
}

/// Asserts that `reader` holds exactly the state of `seed` on all ranks of `layout`.
pub(crate) fn assert_holds(reader: &Reader, layout: &Layout, seed: u64) {
    for rank in 0..layout.world_size() {
        for state in STATES {
            let got = read(reader, layout, state, rank).unwrap();
            let mut specs = reader.manifest().states.iter();
            let encoding = specs.find(|spec| spec.name == state).unwrap().encoding;
            assert_eq!(
                bits(&got),
                loaded(encoding, layout, rank, state, seed),
                "rank {rank}, {state}"
            );
        }
    }
}
