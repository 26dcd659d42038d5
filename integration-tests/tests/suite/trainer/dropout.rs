//! Dropout: masks depend on the seed, the step and the row of the global batch, not on who computes
//! the row, how often, or where.

use integration_tests::{GPT2, LLAMA, Oracle};
use zero_models::ModelConfig;
use zero_models::ops::activation::Activation;
use zero_trainer::{Batch, BatchRows};

use super::documents::Tiny;
use super::identical::all_same_with;
use super::support::{Case, Outcome};

fn run(case: &Case) -> Outcome {
    let mut workload = case.tiny();
    workload.config = workload.config.with_dropout(0.2);
    case.run(&workload)
}

fn case(oracle: Oracle, stage: u64, ranks: usize, micro_batch: usize, grad_accum: usize) -> Case {
    Case {
        oracle,
        ranks,
        stage,
        micro_batch,
        grad_accum,
        reduce_every_micro_batch: true,
        steps: 2,
        ..Case::default()
    }
}

#[test]
fn all_stages_have_the_same_bits() {
    for oracle in [GPT2, LLAMA] {
        let at = |stage| {
            case(oracle, stage, 2, 2, 2).with(|case| case.activation_checkpointing = stage == 3)
        };
        all_same_with((0..4).map(at), run);
    }
}

#[test]
fn rows_keep_their_masks_on_other_ranks() {
    for oracle in [GPT2, LLAMA] {
        let reference = run(&case(oracle, 0, 1, 8, 1));
        let plain = case(oracle, 0, 1, 8, 1).run_tiny();
        assert!((reference.steps[0].loss - plain.steps[0].loss).abs() > 1e-4);
        for (ranks, micro_batch, grad_accum) in [(4, 2, 1), (2, 2, 2), (1, 2, 4)] {
            let other = run(&case(oracle, 3, ranks, micro_batch, grad_accum));
            for (a, b) in reference.steps.iter().zip(&other.steps) {
                let error = (a.loss - b.loss).abs() / a.loss;
                assert!(error < 2e-6, "{ranks} ranks: {error:e}");
            }
        }
    }
}

#[test]
fn resumed_run_has_the_same_bits() {
    let whole = case(GPT2, 3, 2, 2, 1).with(|case| case.steps = 4);
    let first = run(&case(GPT2, 3, 2, 2, 1));
    let rest = run(&whole.with(|case| case.resume = Some(first.dir.path().to_owned())));
    let whole = run(&whole);
    assert_eq!(whole.curve(), [first.curve(), rest.curve()].concat());
    assert!(whole.state() == rest.state());
}

/// Two rows of 12 tokens, in the middle of a run.
fn batch(vocab: usize) -> Batch {
    let tokens = |by: usize| {
        (0..24)
            .map(|i| ((i * by + 5) % vocab) as u32)
            .collect::<Vec<_>>()
    };
    let mut batch = Batch::plain(tokens(7), tokens(11));
    batch.rows = Some(BatchRows {
        seed: 3,
        step: 9,
        first: 4,
    });
    batch
}

/// The gradient's part in a unit is its own direction's slope.
#[test]
fn gradients_are_finite_differences() {
    let with = |activation| {
        let mut tiny = Tiny::new(GPT2);
        if let ModelConfig::Gpt2(config) = &mut tiny.config {
            config.activation = activation;
            config.scale_attn_by_inverse_layer_idx = true;
        }
        tiny
    };
    let tinies = [
        with(Activation::Gelu),
        with(Activation::Silu),
        Tiny::new(LLAMA),
    ];
    for mut tiny in tinies {
        tiny.config = tiny.config.with_dropout(0.3);
        let batch = batch(tiny.config.vocab_size());
        let (_, gradient) = tiny.gradients(&batch, 12);
        let start = tiny.params.clone();
        let mut from = 0;
        for unit in 0..start.len() {
            let part = &gradient[from..from + start[unit].len()];
            from += part.len();
            let norm = part.iter().map(|g| g * g).sum::<f32>().sqrt();
            let mut loss_at = |step: f32| {
                let moved = start[unit].iter().zip(part);
                tiny.params[unit] = moved.map(|(p, g)| p + step * g / norm).collect();
                tiny.gradients(&batch, 12).0
            };
            let step = 1e-2;
            let slope = (loss_at(step) - loss_at(-step)) / f64::from(2.0 * step);
            let error = (slope / f64::from(norm) - 1.0).abs();
            assert!(error < 1e-2, "unit {unit}: {slope} for {norm}");
            tiny.params[unit].clone_from(&start[unit]);
        }
    }
}

#[test]
fn batches_outside_training_are_whole() {
    let mut tiny = Tiny::new(GPT2);
    let mut batch = batch(tiny.config.vocab_size());
    batch.rows = None;
    let plain = tiny.gradients(&batch, 12);
    tiny.config = tiny.config.with_dropout(0.3);
    assert!(tiny.gradients(&batch, 12) == plain);
}
