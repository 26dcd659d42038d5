//! Loading the weights of a folder: a rank reads its shard, and holds no more of the file than the
//! shard of a unit at once. The heap of the whole process is counted, so this is the only test here.

use std::alloc::{GlobalAlloc, System};
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::thread::{self, ThreadId};

use parking_lot::Mutex;
use zero_alloc::Pool;
use zero_alloc::device::DType;
use zero_alloc::host::{HostDevice, HostStream};
use zero_models::hf::HfFolder;
use zero_models::ops::Threads;
use zero_models::{ModelConfig, ModelOptions};
use zero_shard::{Layout, UnitSpec, ZeroStage};
use zero_trainer::{
    Batch, BatchAt, InitialWeights, Model, ModelError, ModelRanks, Pass, RunOptions,
    SHARD_ALIGN_ELEMS, Settings, Workload, run_on_threads,
};

const RANKS: usize = 4;
const SEQ_LEN: usize = 8;

/// The bytes of the heap in use.
static LIVE: AtomicI64 = AtomicI64::new(0);

/// The system's allocator, counted.
struct Counted;

// SAFETY: the system's allocator; counting does not touch its memory.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: std::alloc::Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as i64, Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: std::alloc::Layout) {
        LIVE.fetch_sub(layout.size() as i64, Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static HEAP: Counted = Counted;

/// The reads of a folder by all ranks.
#[derive(Debug, Default)]
struct Reads {
    /// Elements that each rank has read.
    elems: HashMap<ThreadId, u64>,
    /// The most bytes of the heap in use at a read.
    most_heap_bytes: i64,
}

/// The model of a folder, which notes what ranks read.
struct Watched {
    folder: HfFolder,
    reads: Mutex<Reads>,
}

impl Workload<HostDevice> for Watched {
    fn units(&self) -> Vec<UnitSpec> {
        self.folder.config().units()
    }

    fn passes(&self) -> Vec<Pass> {
        self.folder.config().passes()
    }

    fn model(
        &self,
        pool: &Pool<HostDevice>,
        compute: &HostStream,
        ranks: &ModelRanks<HostDevice>,
    ) -> Result<Box<dyn Model<HostDevice>>, ModelError> {
        let options = ModelOptions::new(1, SEQ_LEN, DType::Bf16);
        let config = self.folder.config();
        Ok(config.on_host(options, pool, compute, Threads::new(1)?, ranks)?)
    }

    fn weights(&self) -> Result<Box<InitialWeights<'_>>, ModelError> {
        Ok(Box::new(|name, range, out| {
            self.folder.read(name, range, out)?;

            let mut reads = self.reads.lock();
            let rank = thread::current().id();
            *reads.elems.entry(rank).or_default() += out.len() as u64;
            reads.most_heap_bytes = reads.most_heap_bytes.max(LIVE.load(Relaxed));
            Ok(())
        }))
    }

    fn batch(&self, _at: BatchAt, batch: &mut Batch) -> Result<(), ModelError> {
        batch.inputs.fill(1);
        batch.targets.fill(2);
        Ok(())
    }
}

/// A Llama of 24 equal blocks.
fn config() -> ModelConfig {
    let json = r#"{"model_type": "llama", "vocab_size": 512, "hidden_size": 128,
        "intermediate_size": 512, "num_hidden_layers": 24, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": false}"#;
    ModelConfig::from_hf_json(json).unwrap().0
}

/// Writes the initial weights of `config` in bf16.
fn write_folder(folder: &Path, config: &ModelConfig) {
    std::fs::write(folder.join("config.json"), config.to_hf_json("bfloat16")).unwrap();
    let params = config.units().into_iter().flat_map(|unit| unit.params);
    let tensors: Vec<_> = params
        .map(|param| {
            let elems = param.shape.iter().product::<u64>();
            let mut values = vec![0.0; elems as usize];
            config
                .fill_initial(0, &param.name, 0..elems, &mut values)
                .unwrap();
            let bf16 = values.iter().map(|x| half::bf16::from_f32(*x));
            let bytes: Vec<u8> = bf16.flat_map(half::bf16::to_le_bytes).collect();
            let shape: Vec<usize> = param.shape.iter().map(|n| *n as usize).collect();
            (param.name, shape, bytes)
        })
        .collect();

    let views = tensors.iter().map(|(name, shape, bytes)| {
        let dtype = safetensors::Dtype::BF16;
        let view = safetensors::tensor::TensorView::new(dtype, shape.clone(), bytes).unwrap();
        (name, view)
    });
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
}

/// Trains one step of the folder's model, and returns what its ranks read.
fn load(folder: &Path, stage: u64) -> Reads {
    let workload = Watched {
        folder: HfFolder::open(folder).unwrap(),
        reads: Mutex::default(),
    };
    let stage = ZeroStage::from_number(stage).unwrap();
    let settings = Settings::new(stage, DType::Bf16, zero_models::param_kind);
    let options = RunOptions {
        steps: 1,
        micro_batch: 1,
        seq_len: SEQ_LEN,
        ..RunOptions::default()
    };
    run_on_threads(RANKS, 1, &settings, &workload, &options, &mut |_| Ok(())).unwrap();
    workload.reads.into_inner()
}

/// The heap has the buffers of loading; shards are in the pools.
#[test]
fn rank_holds_its_shard_and_a_part_of_a_unit_while_loading() {
    let dir = tempfile::tempdir().unwrap();
    let config = config();
    write_folder(dir.path(), &config);

    let layout = Layout::new(&config.units(), RANKS as u64, SHARD_ALIGN_ELEMS).unwrap();
    let shard: u64 = layout.units().iter().map(|unit| unit.shard_elems).sum();
    let file_bytes = 2 * config.parameter_count() as i64;

    for stage in [1, 2, 3] {
        let before = LIVE.load(Relaxed);
        let reads = load(dir.path(), stage);

        // Padding is not read.
        assert_eq!(reads.elems.len(), RANKS);
        let elems: u64 = reads.elems.values().sum();
        assert_eq!(elems, config.parameter_count(), "stage {stage}");
        let most = reads.elems.into_values().max();
        assert!(most <= Some(shard), "stage {stage}: {most:?} of {shard}");

        // One rank that held the weights, if only in bf16, would be above this.
        let heap_bytes = reads.most_heap_bytes - before;
        assert!(
            heap_bytes < file_bytes / 2,
            "stage {stage}: {heap_bytes} bytes of a file of {file_bytes}"
        );
    }
}
