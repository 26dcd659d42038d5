//! Rows of several documents, and targets that are not trained: the loss is the mean over the
//! trained tokens of a step, whoever holds them.

use std::time::Duration;

use proptest::prelude::*;
use zero_alloc::Pool;
use zero_alloc::device::{DType, Device, DeviceId, DeviceSlice, Stream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_models::ops::Threads;
use zero_models::{HostModel, ModelConfig, ModelOptions};
use zero_shard::UnitSpec;
use zero_trainer::{
    Batch, BatchAt, Grad, IGNORED, InitialWeights, Model, ModelError, ModelRanks, Pass, Workload,
};

use super::identical::same;
use super::support::{Case, relative_error};
use integration_tests::{GPT2, LLAMA, Oracle, QWEN2};

const LIMIT: Duration = Duration::from_secs(60);

/// A slice of a vector that outlives all uses in the test.
fn slice<T>(data: &mut [T]) -> DeviceSlice<T> {
    // SAFETY: the vectors live until their stream is drained.
    unsafe { DeviceSlice::from_raw_parts(data.as_mut_ptr(), data.len(), DeviceId::HOST) }
}

/// An oracle's model with its weights, on the host.
pub(super) struct Tiny {
    pub(super) config: ModelConfig,
    pub(super) params: Vec<Vec<f32>>,
    pool: Pool<HostDevice>,
    stream: HostStream,
}

impl Tiny {
    pub(super) fn new(oracle: Oracle) -> Self {
        let text = std::fs::read_to_string(oracle.data("model/config.json")).unwrap();
        let (config, _) = ModelConfig::from_hf_json(&text).unwrap();
        let tensors = oracle.tensors("model/model.safetensors");
        let values = |name: &str| {
            let found = tensors.iter().find(|(found, _)| found == name);
            found.unwrap().1.clone()
        };
        let flat = |unit: &UnitSpec| unit.params.iter().flat_map(|p| values(&p.name)).collect();

        let device = HostDevice::new();
        let stream = device.create_stream("compute").unwrap();
        Self {
            params: config.units().iter().map(flat).collect(),
            config,
            pool: Pool::new(device, usize::MAX),
            stream,
        }
    }

    fn model(&self, rows: usize, seq: usize) -> Box<dyn HostModel> {
        let options = ModelOptions {
            micro_batch: rows,
            seq_len: seq,
            sequence_ranks: 1,
            tensor_ranks: 1,
            partition_activations: false,
            sequence_parallel: false,
            dtype: DType::F32,
            activation_checkpointing: false,
            offload_activations: false,
            matmul_timing: false,
            recompute_gelu: false,
        };
        let threads = Threads::new(1).unwrap();
        let model = self
            .config
            .on_host(options, &self.pool, &self.stream, threads);
        model.unwrap()
    }

    /// The loss and the gradients of a batch of rows of `seq` tokens.
    pub(super) fn gradients(&mut self, batch: &Batch, seq: usize) -> (f64, Vec<f32>) {
        let mut model = self.model(batch.inputs.len() / seq, seq);
        let mut grads: Vec<Vec<f32>> = self.params.iter().map(|p| vec![0.0; p.len()]).collect();
        let params: Vec<_> = self.params.iter_mut().map(|p| slice(p).erase()).collect();
        let slices: Vec<_> = grads.iter_mut().map(|g| Grad::Add(slice(g))).collect();
        let mut scale = [1.0];
        // SAFETY: used on the stream of the passes, below.
        let loss = unsafe { model.loss() };
        let device = self.pool.device();
        device.fill_zero(&self.stream, loss.erase()).unwrap();

        model.set_batch(&self.stream, batch).unwrap();
        let passes = self.config.passes();
        for (i, pass) in passes.iter().enumerate() {
            let reads: Vec<_> = pass.forward_reads.iter().map(|&u| params[u]).collect();
            model.forward(&self.stream, i, &reads).unwrap();
        }
        for (i, pass) in passes.iter().enumerate().rev() {
            let reads: Vec<_> = pass.backward_reads.iter().map(|&u| params[u]).collect();
            let adds: Vec<_> = pass.grads.iter().map(|&u| slices[u]).collect();
            let scale = slice(&mut scale);
            model
                .backward(&self.stream, i, &reads, &adds, scale)
                .unwrap();
        }

        let mut sum = [0; 8];
        device
            .download(&self.stream, loss.erase(), &mut sum, LIMIT)
            .unwrap();
        self.stream.synchronize(LIMIT).unwrap();
        (f64::from_le_bytes(sum), grads.concat())
    }
}

/// A row of documents of these lengths, and each of them in a row of its own. Every third target is
/// not trained.
fn packed_and_apart(lengths: &[usize], vocab: usize, seed: u64) -> (Batch, Batch, usize) {
    let tokens: usize = lengths.iter().sum();
    let longest = lengths.iter().copied().max().unwrap_or_default();
    let token = |i: usize| ((seed >> 3).wrapping_add(i as u64 * 7919) % vocab as u64) as u32;
    let target = |i: usize| {
        if i % 3 == 2 {
            IGNORED
        } else {
            token(3 * i + 1)
        }
    };

    let mut packed = Batch::plain(
        (0..tokens).map(token).collect::<Vec<_>>(),
        (0..tokens).map(target).collect::<Vec<_>>(),
    );
    let mut apart = Batch::plain(
        vec![0; lengths.len() * longest],
        vec![IGNORED; lengths.len() * longest],
    );
    for (row, &len) in lengths.iter().enumerate() {
        let start = packed.starts.len();
        packed.starts.extend(vec![start as u32; len]);
        let own = row * longest..row * longest + len;
        apart.inputs[own.clone()].copy_from_slice(&packed.inputs[start..start + len]);
        apart.targets[own].copy_from_slice(&packed.targets[start..start + len]);
    }
    packed.divisor = packed.trained(tokens) as f64;
    apart.divisor = packed.divisor;
    (packed, apart, longest)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn packed_documents_do_not_see_each_other(
        lengths in prop::collection::vec(1usize..9, 1..5),
        model in 0usize..3,
        seed in any::<u64>(),
    ) {
        let mut tiny = Tiny::new([GPT2, LLAMA, QWEN2][model]);
        let vocab = tiny.config.vocab_size();
        let (packed, apart, longest) = packed_and_apart(&lengths, vocab, seed);
        let seq = packed.inputs.len();
        let got = tiny.gradients(&packed, seq);
        let want = tiny.gradients(&apart, longest);
        prop_assert!((got.0 - want.0).abs() < 1e-6 * want.0.max(1.0), "{} and {}", got.0, want.0);
        let error = relative_error(&got.1, &want.1);
        prop_assert!(error < 1e-5, "gradients differ by {error:e}");
    }
}

#[test]
fn wrong_documents_are_refused() {
    let tiny = Tiny::new(LLAMA);
    let mut model = tiny.model(1, 4);
    let mut set = |starts: Vec<u32>| {
        let mut batch = Batch::zeros(4);
        batch.starts = starts;
        model
            .set_batch(&tiny.stream, &batch)
            .map_err(|e| e.to_string())
    };
    set(vec![0, 0, 2, 2]).unwrap();
    assert!(
        set(vec![0; 3])
            .unwrap_err()
            .contains("3 starts of documents")
    );
    let error = set(vec![0, 0, 3, 3]).unwrap_err();
    assert!(
        error.contains("token 2 of row 0 begins at token 3"),
        "{error}"
    );
}

/// A kernel would read another row than those of the embedding.
#[test]
fn tokens_outside_of_the_vocabulary_are_refused() {
    let tiny = Tiny::new(LLAMA);
    let mut model = tiny.model(1, 4);
    let vocab = tiny.config.vocab_size() as u32;
    let mut set = |input: u32, target: u32| {
        let batch = Batch::plain([0, 1, input, 0], [0, 1, 0, target]);
        let set = model.set_batch(&tiny.stream, &batch);
        set.map_err(|error| error.to_string())
    };
    set(vocab - 1, vocab - 1).unwrap();
    set(0, IGNORED).unwrap();
    for token in [vocab, IGNORED] {
        let error = set(token, 0).unwrap_err();
        assert!(
            error.contains(&format!("input 2 of the batch is token {token}")),
            "{error}"
        );
    }
    let error = set(0, vocab).unwrap_err();
    assert!(
        error.contains(&format!("target 3 of the batch is token {vocab}")),
        "{error}"
    );
}

/// A workload of which only some targets are trained, unevenly over the rows of a step.
struct Masked<'a>(&'a dyn Workload<HostDevice>);

impl Masked<'_> {
    /// Whether a token of a row of a step's global batch is trained.
    fn trains(row: u64, token: usize) -> bool {
        !(token as u64 * 5 + row * 3).is_multiple_of(2 + row % 4)
    }
}

impl Workload<HostDevice> for Masked<'_> {
    fn units(&self) -> Vec<UnitSpec> {
        self.0.units()
    }

    fn passes(&self) -> Vec<Pass> {
        self.0.passes()
    }

    fn model(
        &self,
        pool: &Pool<HostDevice>,
        compute: &HostStream,
        ranks: &ModelRanks<HostDevice>,
    ) -> Result<Box<dyn Model<HostDevice>>, ModelError> {
        self.0.model(pool, compute, ranks)
    }

    fn weights(&self) -> Result<Box<InitialWeights<'_>>, ModelError> {
        self.0.weights()
    }

    fn batch(&self, at: BatchAt, batch: &mut Batch) -> Result<(), ModelError> {
        self.0.batch(at, batch)?;
        let of_micro = at.micro_batch as u64 * at.world_size;
        let micros = at.grad_accum * at.world_size;
        let trained = (0..of_micro * at.grad_accum)
            .flat_map(|row| (0..at.seq_len).map(move |token| (row, token)))
            .filter(|&(row, token)| Self::trains(row, token));
        batch.divisor = trained.count() as f64 / micros as f64;

        let first = at.micro_batch_index * of_micro + at.rank * at.micro_batch as u64;
        for (i, target) in batch.targets.iter_mut().enumerate() {
            let row = first + (i / at.seq_len) as u64;
            if !Self::trains(row, i % at.seq_len) {
                *target = IGNORED;
            }
        }
        Ok(())
    }
}

#[test]
fn loss_is_the_mean_over_the_trained_tokens_of_a_step() {
    for oracle in [GPT2, LLAMA] {
        let case = |stage, ranks, micro_batch, grad_accum| Case {
            oracle,
            ranks,
            stage,
            micro_batch,
            grad_accum,
            reduce_every_micro_batch: true,
            steps: 3,
            ..Case::default()
        };
        let run = |case: Case| case.run(&Masked(&case.tiny()));
        let whole = run(case(0, 1, 8, 1));
        let reference = run(case(0, 2, 2, 2));
        for (a, b) in whole.steps.iter().zip(&reference.steps) {
            assert!(
                (a.loss - b.loss).abs() < 2e-6 * a.loss,
                "{} and {}",
                a.loss,
                b.loss
            );
            let [a, b] = [a, b].map(|step| step.grad_norm.unwrap());
            assert!((a - b).abs() < 1e-5 * a, "{a} and {b}");
        }
        for stage in 1..4 {
            same(
                &reference,
                &run(case(stage, 2, 2, 2)),
                &format!("stage {stage}"),
            );
        }
    }
}
