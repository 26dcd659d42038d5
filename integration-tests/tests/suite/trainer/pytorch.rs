//! 30 steps against PyTorch: loss, gradient norm and final parameters, at every stage and world
//! size.

use std::collections::HashMap;

use serde_json::Value;
use zero_kernels::AdamHyper;
use zero_optim::OptimizerConfig;

use super::support::{Case, relative_error, tensors};
use integration_tests::data;

fn matches_pytorch(ranks: usize, micro_batch: usize) {
    let expected: Value =
        serde_json::from_str(&std::fs::read_to_string(data("expected.json")).unwrap()).unwrap();
    let expected = expected["steps"].as_array().unwrap();
    let last: HashMap<_, _> = tensors("params_last.safetensors").into_iter().collect();
    let optimizer = OptimizerConfig::default()
        .hyper(AdamHyper {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.1,
            decoupled: true,
            bias_correction: true,
        })
        .lr(1e-3)
        .max_grad_norm(1.0);

    for stage in 0..4 {
        let case = Case {
            ranks,
            stage,
            micro_batch,
            steps: 30,
            grad_accum: 2,
            optimizer: optimizer.clone(),
            ..Case::default()
        };
        let outcome = case.run_tiny();
        assert_eq!(outcome.steps.len(), expected.len());
        for (got, want) in outcome.steps.iter().zip(expected) {
            let loss = want["loss"].as_f64().unwrap();
            let norm = want["grad_norm"].as_f64().unwrap();
            let loss_error = (got.loss - loss).abs() / loss;
            let norm_error = (got.grad_norm.unwrap() - norm).abs() / norm;
            assert!(
                loss_error < 1e-6,
                "stage {stage}, step {}: loss differs by {loss_error:e}",
                got.step
            );
            assert!(
                norm_error < 1e-5,
                "stage {stage}, step {}: norm differs by {norm_error:e}",
                got.step
            );
        }
        let state = outcome.state();
        for (name, want) in &last {
            let got: Vec<f32> = state[&format!("master/{name}")]
                .iter()
                .map(|b| f32::from_bits(*b))
                .collect();
            let error = relative_error(&got, want);
            // The keys' third of this bias shifts all scores of a query equally, so its exact
            // gradient is 0, and Adam makes steps of full size from rounding errors, here and in
            // PyTorch.
            let tolerance = if name.ends_with("c_attn.bias") {
                1e-3
            } else {
                1e-5
            };
            assert!(
                error < tolerance,
                "stage {stage}: {name} differs by {error:e}"
            );
        }
        assert_eq!(state.len(), 3 * last.len(), "no parameter more");
    }
}

#[test]
fn one_rank() {
    matches_pytorch(1, 4);
}

#[test]
fn two_ranks() {
    matches_pytorch(2, 2);
}

#[test]
fn four_ranks() {
    matches_pytorch(4, 1);
}
