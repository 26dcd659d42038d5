//! Ranks that share sequences: the numbers of fewer ranks with whole sequences, and bytes by the
//! formulas.
//!
//! Bits differ from those of whole sequences where a sum over tokens is split between ranks: the
//! loss, the gradients of weights, and the gradients of copied heads of keys. In fp32 these are sums
//! in another order, so losses agree within 1e-6, relative. Stages, and switches that do not change
//! the order of a sum, have the same bits at one mesh.
//!
//! Adam divides a gradient by its size. That turns gradients that are 0 but for rounding, as those
//! of the bias of GPT-2's keys, into steps of arbitrary sign. With the epsilon of [`linear`] updates
//! are proportional to gradients, so that weights can be compared.

use std::sync::Arc;

use integration_tests::{GPT2, LLAMA, Oracle, data};
use proptest::prelude::*;
use zero::workload::{ModelWorkload, Weights};
use zero_alloc::device::DType;
use zero_alloc::host::HostDevice;
use zero_data::{DataSource, Dataset};
use zero_models::gpt2::config::GptConfig;
use zero_models::llama::config::{Family, LlamaConfig};
use zero_models::{ModelConfig, ModelOptions};
use zero_optim::OptimizerConfig;
use zero_shard::Sharding;
use zero_trainer::{
    CommBytes, Home, IGNORED, MeshSettings, NextToken, SampleOptions, StepMetrics,
    ValidationOptions, Workload, run_on_threads,
};

use super::identical::{all_same, cases};
use super::support::{Altered, Case, Outcome, groups_of, homes, shared};
use super::toy::Toy;

/// Adam whose updates are about `lr / epsilon` times the mean gradient.
pub(super) fn linear() -> OptimizerConfig {
    let mut optimizer = OptimizerConfig::default().lr(0.1);
    optimizer.hyper.eps = 1.0;
    optimizer
}

/// Two steps of micro-batches of 2 rows.
fn case(oracle: Oracle, ranks: usize) -> Case {
    Case {
        oracle,
        ranks,
        steps: 2,
        micro_batch: 2,
        reduce_every_micro_batch: true,
        optimizer: linear(),
        ..Case::default()
    }
}

fn floats(bits: &[u32]) -> Vec<f32> {
    bits.iter().map(|&bits| f32::from_bits(bits)).collect()
}

fn norm(x: &[f32]) -> f64 {
    x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt()
}

/// Asserts that losses and weights differ by at most `limit`, relative, and mean gradients by ten
/// times that. Their terms cancel, down to 0 in the bias of keys, so each may differ by `limit` of
/// the largest too, and each of the two updates by as much.
pub(super) fn close(got: &Outcome, want: &Outcome, limit: f64, what: &str) {
    assert_eq!(got.steps.len(), want.steps.len(), "{what}");
    for (got, want) in got.steps.iter().zip(&want.steps) {
        let loss = got.loss;
        let expected = want.loss;
        let error = (loss - expected).abs() / expected;
        assert!(
            error <= limit,
            "{what}, step {}: loss {loss} for {expected}",
            got.step
        );
    }

    let got = got.state();
    let want = want.state();
    assert_eq!(got.len(), want.len(), "{what}");
    let moments = want.iter().filter(|(name, _)| name.starts_with("first"));
    let largest = moments.map(|(_, bits)| norm(&floats(bits)));
    let largest = largest.fold(0.0, f64::max);
    for (name, bits) in &want {
        let expected = floats(bits);
        let most = match name.split_once('/').unwrap().0 {
            "master" => limit * (norm(&expected) + 2.0 * largest),
            "first_moment" | "momentum" => limit * (10.0 * norm(&expected) + largest),
            _ => continue,
        };
        let pairs = floats(&got[name]).into_iter().zip(expected);
        let error = norm(&pairs.map(|(a, b)| a - b).collect::<Vec<_>>());
        assert!(
            error <= most,
            "{what}: {name} differs by {error:e}, not {most:e}"
        );
    }
}

/// Asserts that every stage of a case has the same bits, and the numbers of `whole`.
pub(super) fn stages_agree(base: &Case, whole: &Outcome) {
    let stages = (0..4).map(|stage| base.with(|case| case.stage = stage));
    close(&all_same(stages), whole, 1e-6, &format!("{base:?}"));
}

/// Every stage of a mesh, and whole sequences.
fn stages_of(oracle: Oracle, ranks: usize, share: usize) {
    let whole = case(oracle, ranks / share).with(|case| case.stage = 2);
    let base = case(oracle, ranks).with(|case| case.mesh = shared(share));
    stages_agree(&base, &whole.run_tiny());
}

#[test]
fn gpt2_at_every_stage() {
    for (ranks, share) in [(2, 2), (4, 2), (8, 4)] {
        stages_of(GPT2, ranks, share);
    }
}

/// Eight heads over two of keys: each rank of two has one of them, and two ranks of four share one.
#[test]
fn llama_at_every_stage() {
    for (ranks, share) in [(2, 2), (4, 4), (8, 2), (8, 8)] {
        stages_of(LLAMA, ranks, share);
    }
}

/// Switches that keep the order of each sum keep the bits.
#[test]
fn switches_keep_the_bits() {
    for oracle in [GPT2, LLAMA] {
        let base = Case {
            grad_accum: 2,
            mesh: shared(2),
            ..case(oracle, 4)
        };
        let whole = Case {
            mesh: MeshSettings::default(),
            ranks: 2,
            ..base.clone()
        };
        let checkpointing = base.with(|case| case.activation_checkpointing = true);
        let serial = base.with(|case| case.overlap = false);
        let offloading = base.with(|case| case.offload = homes(Home::Host, Home::Host));
        let reference = all_same([base, checkpointing, serial, offloading]);
        close(&reference, &whole.run_tiny(), 1e-6, "accumulating");
    }
}

/// 16-bit parameters: the forward has the bits of whole sequences, gradients are rounded after a
/// part of their sum.
#[test]
fn bf16_agrees() {
    let base = case(LLAMA, 4).with(|case| case.dtype = DType::Bf16);
    let shares = base.with(|case| case.mesh = shared(2)).run_tiny();
    let whole = Case { ranks: 2, ..base }.run_tiny();
    close(&shares, &whole, 3e-3, "bf16");
}

/// Groups of ranks over which states are sharded, within and across those that share sequences.
#[test]
fn with_shard_groups() {
    let whole = case(LLAMA, 2).run_tiny();
    for (group, sharding) in [
        (2, Sharding::Hybrid),
        (1, Sharding::Replicated),
        (2, Sharding::Secondary),
    ] {
        let case = Case {
            mesh: MeshSettings {
                sequence_ranks: Some(2),
                ..groups_of(group, sharding)
            },
            ..case(LLAMA, 4)
        };
        close(&case.run_tiny(), &whole, 1e-6, &format!("{case:?}"));
    }
}

/// Rows of several documents, of which some end at the borders of the ranks' tokens, with targets
/// that are not trained.
pub(super) fn packed(inner: &dyn Workload<HostDevice>) -> Altered<'_> {
    Altered::batches(inner, |at, batch| {
        batch.starts.resize(batch.inputs.len(), 0);
        let rows = batch.starts.chunks_exact_mut(at.seq_len);
        for (row, starts) in rows.enumerate() {
            let mut start = 0;
            for (token, place) in starts.iter_mut().enumerate() {
                // Documents of 1 to 11 tokens, and one at the middle of the row.
                if token == at.seq_len / 2 || token - start > (3 * token + row) % 11 {
                    start = token;
                }
                *place = start as u32;
            }
        }
        let targets = batch.targets.iter_mut().enumerate();
        for (_, target) in targets.filter(|(i, _)| i % 5 == 3) {
            *target = IGNORED;
        }
    })
}

/// A random model and mesh.
#[derive(Clone, Debug)]
struct Shape {
    config: ModelConfig,
    share: usize,
    groups: usize,
    seq: usize,
    stage: u64,
    grad_accum: usize,
    checkpointing: bool,
    documents: bool,
}

fn gpt2() -> impl Strategy<Value = (ModelConfig, usize)> {
    let sizes = (0u32..3, 1usize..3, 1usize..5, 1usize..3);
    sizes.prop_map(|(share, heads, d, layers)| {
        let share = 1 << share;
        let heads = heads * share;
        let config = GptConfig {
            vocab_size: 256,
            n_positions: 32,
            tied_head: d % 2 == 0,
            ..GptConfig::gpt2(heads * d, layers, heads)
        };
        (config.into(), share)
    })
}

fn llama() -> impl Strategy<Value = (ModelConfig, usize)> {
    let sizes = (0u32..3, 0u32..3, 1usize..3, 1usize..4, 1usize..3);
    let variant = (
        prop_oneof![Just(None), (1usize..20).prop_map(Some)],
        any::<bool>(),
        any::<bool>(),
    );
    (sizes, variant).prop_map(
        |((share, kv, group, half, layers), (window, norms, biases))| {
            let share = 1 << share;
            let kv_heads = 1 << kv;
            let heads = group * kv_heads.max(share);
            let config = LlamaConfig {
                family: if norms {
                    Family::Qwen3
                } else {
                    Family::Mistral
                },
                vocab_size: 256,
                max_positions: 32,
                hidden: 8,
                layers,
                heads,
                kv_heads,
                head_dim: 2 * half,
                intermediate: 12,
                qkv_bias: biases,
                output_bias: biases,
                window,
                windowed: window.map_or_else(Vec::new, |_| vec![true; layers]),
                tied_head: norms,
                ..LlamaConfig::llama2()
            };
            (config.into(), share)
        },
    )
}

fn shapes() -> impl Strategy<Value = Shape> {
    let model = prop_oneof![gpt2(), llama()];
    let dropout = prop_oneof![Just(0.0f32), 0.05f32..0.4];
    let mesh = (1usize..3, 1usize..5, 0u64..4, 1usize..3);
    let switches = (any::<bool>(), any::<bool>());
    (model, dropout, mesh, switches).prop_map(|((config, share), dropout, mesh, switches)| {
        let (groups, tokens, stage, grad_accum) = mesh;
        let (checkpointing, documents) = switches;
        Shape {
            config: config.with_dropout(dropout).with_initializer_range(0.2),
            share,
            groups,
            seq: share * tokens,
            stage,
            grad_accum,
            checkpointing,
            documents,
        }
    })
}

impl Shape {
    /// The run on `ranks` ranks for each group, which share its sequences.
    fn run(&self, ranks: usize) -> (Case, ModelOptions, Outcome) {
        let case = Case {
            oracle: Oracle {
                seq: self.seq,
                ..GPT2
            },
            ranks: self.groups * ranks,
            stage: self.stage,
            grad_accum: self.grad_accum,
            activation_checkpointing: self.checkpointing,
            mesh: shared(ranks),
            // A second step would start from other weights, to whose last bits some of these models
            // are sensitive.
            steps: 1,
            ..case(GPT2, 1)
        };
        let workload = ModelWorkload {
            config: self.config.clone(),
            weights: Weights::Initial(3),
            ..case.tiny()
        };
        let options = workload.options.clone();
        let outcome = match self.documents {
            true => case.run(&packed(&workload)),
            false => case.run(&workload),
        };
        (case, options, outcome)
    }
}

/// Compares the bytes that ranks exchange in a step, and those of their activations, with the
/// model's formulas.
fn exchanged_and_held_are_the_formulas(
    config: &ModelConfig,
    case: &Case,
    options: &ModelOptions,
    outcome: &Outcome,
) {
    let elems = config.sequence_elems(options) * case.grad_accum as u64;
    for summary in &outcome.summaries {
        let last = summary.last.as_ref().unwrap();
        let CommBytes { all_to_all, .. } = last.comm_bytes;
        // Activations on the host are in fp32.
        assert_eq!(all_to_all, 4 * elems, "{case:?}: all-to-all");
        let held = last.memory.activations_bytes;
        let planned = config.activations_bytes(options);
        assert_eq!(held, planned, "{case:?}: activations");
    }
}

proptest! {
    #![proptest_config(cases(6))]

    /// Any sizes, windows, documents and dropout have the numbers of whole sequences. The largest
    /// difference of 1200 cases (`ZERO_PROPTEST_FACTOR=200`) was a twentieth of what is allowed.
    #[test]
    fn models_of_any_size(shape in shapes()) {
        let (_, _, whole) = shape.run(1);
        let (case, options, outcome) = shape.run(shape.share);
        close(&outcome, &whole, 1e-6, &format!("{shape:?}"));
        exchanged_and_held_are_the_formulas(&shape.config, &case, &options, &outcome);
    }
}

/// Documents, a window and dropout at once.
#[test]
fn documents_windows_and_dropout() {
    for (oracle, share) in [(GPT2, 4), (LLAMA, 2)] {
        let run = |ranks: usize, mesh| {
            let case = case(oracle, ranks).with(|case| case.mesh = mesh);
            let mut workload = case.tiny();
            if let ModelConfig::Llama(config) = &mut workload.config {
                config.family = Family::Mistral;
                config.window = Some(9);
                config.windowed = vec![true; config.layers];
            }
            workload.config = workload.config.with_dropout(0.2);
            case.run(&packed(&workload))
        };
        let whole = run(1, MeshSettings::default());
        let plain = case(oracle, 1).run_tiny();
        assert!((whole.steps[0].loss - plain.steps[0].loss).abs() > 1e-4);
        close(
            &run(share, shared(share)),
            &whole,
            1e-6,
            &format!("{oracle:?}"),
        );
    }
}

#[test]
fn bytes_exchanged_and_held() {
    for (oracle, ranks, share) in [(GPT2, 4, 2), (LLAMA, 2, 2), (LLAMA, 4, 4)] {
        for activation_checkpointing in [false, true] {
            let case = Case {
                activation_checkpointing,
                grad_accum: 2,
                mesh: shared(share),
                ..case(oracle, ranks)
            };
            let workload = case.tiny();
            let outcome = case.run(&workload);
            let ModelWorkload {
                config, options, ..
            } = &workload;
            exchanged_and_held_are_the_formulas(config, &case, options, &outcome);

            let whole = ModelOptions {
                sequence_ranks: 1,
                ..options.clone()
            };
            assert!(config.activations_bytes(options) < config.activations_bytes(&whole));
            assert_eq!(config.sequence_elems(&whole), 0);
        }
    }

    // By hand: 3 blocks, 2 rows of 32 tokens of 64 elements, of which a rank of two has half. It
    // sends the other rank half of queries, keys, values and of what the heads attend to, forward and
    // backward.
    let case = case(GPT2, 2).with(|case| case.mesh = shared(2));
    let bytes = case.run_tiny().steps[1].comm_bytes;
    assert_eq!(bytes.all_to_all, 4 * 3 * 2 * (2 * 16 * (192 + 64) / 2));
    assert!(bytes.total() >= bytes.all_to_all);
}

#[test]
fn refusals_say_what_to_change() {
    let refused =
        |oracle: Oracle, ranks: usize, share: usize, edit: &dyn Fn(&mut ModelWorkload)| {
            let case = case(oracle, ranks).with(|case| case.mesh = shared(share));
            let mut workload = case.tiny();
            edit(&mut workload);
            case.refusal_of(&workload)
        };
    let unchanged = |_: &mut ModelWorkload| {};

    let error = refused(GPT2, 3, 3, &unchanged);
    assert!(
        error.contains(
            "they do not divide its 32 tokens; use a sequence length that is a multiple of 3"
        ),
        "{error}"
    );
    let error = refused(GPT2, 8, 8, &unchanged);
    assert!(error.contains("4 attention heads"), "{error}");
    let error = refused(LLAMA, 2, 2, &|workload| {
        if let ModelConfig::Llama(config) = &mut workload.config {
            config.heads = 6;
            config.kv_heads = 3;
        }
    });
    assert!(error.contains("3 heads of keys and values"), "{error}");
    let error = refused(GPT2, 4, 3, &unchanged);
    assert!(error.contains("divides the 4 ranks"), "{error}");
    let toy = Toy::new(&[vec![40], vec![7]], false);
    let case = case(GPT2, 2).with(|case| case.mesh = shared(2));
    let error = case.refusal_of(&toy);
    assert!(error.contains("computes whole sequences"), "{error}");
    let error = refused(GPT2, 2, 2, &|workload| workload.options.sequence_ranks = 1);
    assert!(error.contains("ModelOptions::sequence_ranks"), "{error}");
}

/// Asserts that five windows, of which the last round has fewer than ranks, have the loss of `whole`.
pub(super) fn validation_agrees(case: &Case, whole: &Case) {
    let data: Arc<Dataset> =
        Arc::new(Dataset::open(&DataSource::at(data("tokens.u16.bin"))).unwrap());
    let [got, want] = [case, whole].map(|case| {
        let case = Case {
            steps: 1,
            validation: Some(ValidationOptions {
                data: Arc::clone(&data) as _,
                every: 1,
                windows: 5,
            }),
            ..case.clone()
        };
        case.run_tiny().steps[0].validation.unwrap()
    });
    let error = (got.loss - want.loss).abs() / want.loss;
    assert!(error < 1e-6, "{got:?} for {want:?}");
    assert_eq!((got.tokens, want.tokens), (5 * 32, 5 * 32));
}

#[test]
fn validation_is_that_of_whole_sequences() {
    for oracle in [GPT2, LLAMA] {
        let shares = case(oracle, 4).with(|case| case.mesh = shared(2));
        validation_agrees(&shares, &case(oracle, 2));
    }
}

/// The token of the largest logit.
#[derive(Debug)]
struct Largest;

impl NextToken for Largest {
    fn choose(&self, logits: &[f32], _index: u64) -> Option<u32> {
        let most = logits.iter().copied().fold(f32::MIN, f32::max);
        logits.iter().position(|x| *x == most).map(|at| at as u32)
    }
}

/// The text of `tokens` tokens after the first step.
pub(super) fn sample(case: &Case, tokens: usize) -> Vec<u32> {
    let case = case.with(|case| case.steps = 1);
    let mut options = case.options(None);
    options.samples = Some(SampleOptions {
        every: 1,
        prompt: vec![9, 80, 7, 30],
        tokens,
        next: Arc::new(Largest),
    });
    let mut sample = None;
    let mut observe = |metrics: &StepMetrics| {
        sample = metrics.sample.clone();
        Ok(())
    };
    let settings = case.settings();
    run_on_threads(
        case.ranks,
        1,
        &settings,
        &case.tiny(),
        &options,
        &mut observe,
    )
    .unwrap();
    sample.unwrap()
}

/// A text of which the last token passes from rank to rank.
#[test]
fn samples_are_those_of_whole_sequences() {
    for (oracle, share) in [(GPT2, 2), (LLAMA, 4)] {
        let whole = sample(&case(oracle, 1), 40);
        assert_eq!(whole.len(), 40);
        let shares = case(oracle, share).with(|case| case.mesh = shared(share));
        assert_eq!(sample(&shares, 40), whole, "{oracle:?}");
    }
}
