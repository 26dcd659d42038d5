//! Rows of several documents, and targets that are not trained: the loss is the mean over the
//! trained tokens of a step, whoever holds them.

use integration_tests::{GPT2, LLAMA, Oracle, QWEN2};
use proptest::prelude::*;
use zero_alloc::device::DType;
use zero_alloc::host::HostDevice;
use zero_models::lora::LoraConfig;
use zero_models::{ModelConfig, ModelOptions};
use zero_shard::UnitSpec;
use zero_trainer::{Batch, BatchAt, IGNORED};

use super::identical::all_same_with;
use super::support::{Altered, Case, relative_error};
use crate::arrays::Arrays;
use crate::steps::{OnHost, config_of, weights_of};

/// An oracle's model with its weights, on the host.
pub(super) struct Tiny {
    pub(super) config: ModelConfig,
    pub(super) params: Vec<Vec<f32>>,
}

impl Tiny {
    pub(super) fn new(oracle: Oracle) -> Self {
        Self {
            config: config_of(oracle),
            params: weights_of(oracle),
        }
    }

    /// The model with adapters that change its outputs, on all linear layers of its blocks.
    fn adapted(mut self, targets: &[&str]) -> Self {
        let lora = LoraConfig {
            r: 2,
            alpha: 4.0,
            dropout: 0.0,
            rslora: false,
            targets: targets.iter().map(|target| (*target).to_owned()).collect(),
        };
        self.config = self.config.with_lora(Some(lora)).unwrap();
        let units = self.config.units();
        let adapters = &units[..units.len() - self.params.len()];
        let value = |i: u64| ((i * 37) % 23) as f32 / 230.0 - 0.04;
        let flat = |unit: &UnitSpec| {
            let elems = unit.params.iter().map(|p| p.shape.iter().product::<u64>());
            (0..elems.sum()).map(value).collect()
        };
        let params: Vec<Vec<f32>> = adapters.iter().map(flat).collect();
        self.params.splice(..0, params);
        self
    }

    fn on<'a>(&self, arrays: &'a Arrays<HostDevice>, rows: usize, seq: usize) -> OnHost<'a> {
        let options = ModelOptions::new(rows, seq, DType::F32);
        OnHost::new(arrays, &self.config, options, &self.params, 1)
    }

    /// The loss and the gradients of a batch of rows of `seq` tokens.
    pub(super) fn gradients(&self, batch: &Batch, seq: usize) -> (f64, Vec<f32>) {
        let arrays = Arrays::on(HostDevice::new());
        let mut model = self.on(&arrays, batch.inputs.len() / seq, seq);
        let (loss, gradients) = model.step(std::slice::from_ref(batch));
        (loss, gradients.concat())
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
    #![proptest_config(super::identical::cases(16))]

    #[test]
    fn packed_documents_do_not_see_each_other(
        lengths in prop::collection::vec(1usize..9, 1..5),
        model in 0usize..3,
        adapted in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let (oracle, targets) = [
            (GPT2, &["c_attn", "c_proj", "c_fc"][..]),
            (LLAMA, &["q_proj", "v_proj", "o_proj", "down_proj"]),
            (QWEN2, &["k_proj", "gate_proj", "up_proj"]),
        ][model];
        let tiny = Tiny::new(oracle);
        let tiny = if adapted { tiny.adapted(targets) } else { tiny };
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
    let arrays = Arrays::on(HostDevice::new());
    let mut model = tiny.on(&arrays, 1, 4);
    let mut set = |starts: Vec<u32>| {
        let mut batch = Batch::zeros(4);
        batch.starts = starts;
        model.set_batch(&batch).map_err(|e| e.to_string())
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
    let arrays = Arrays::on(HostDevice::new());
    let mut model = tiny.on(&arrays, 1, 4);
    let vocab = tiny.config.vocab_size() as u32;
    let mut set = |input: u32, target: u32| {
        let batch = Batch::plain([0, 1, input, 0], [0, 1, 0, target]);
        model.set_batch(&batch).map_err(|e| e.to_string())
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

/// Whether a token of a row of a step's global batch is trained.
fn trains(row: u64, token: usize) -> bool {
    !(token as u64 * 5 + row * 3).is_multiple_of(2 + row % 4)
}

/// Trains only some targets, unevenly over the rows of a step.
fn mask(at: BatchAt, batch: &mut Batch) {
    let of_micro = at.micro_batch as u64 * at.world_size;
    let micros = at.grad_accum * at.world_size;
    let trained = (0..of_micro * at.grad_accum)
        .flat_map(|row| (0..at.seq_len).map(move |token| (row, token)))
        .filter(|&(row, token)| trains(row, token));
    batch.divisor = trained.count() as f64 / micros as f64;

    let first = at.micro_batch_index * of_micro + at.rank * at.micro_batch as u64;
    for (i, target) in batch.targets.iter_mut().enumerate() {
        let row = first + (i / at.seq_len) as u64;
        if !trains(row, i % at.seq_len) {
            *target = IGNORED;
        }
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
        let run = |case: &Case| case.run(&Altered::batches(&case.tiny(), mask));
        let whole = run(&case(0, 1, 8, 1));
        let reference = all_same_with((0..4).map(|stage| case(stage, 2, 2, 2)), run);
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
    }
}
