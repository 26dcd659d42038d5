//! Tensor parallelism: the numbers of the run without it, and bytes by the formulas.

use integration_tests::{GPT2, LLAMA, Oracle, QWEN2};
use proptest::prelude::*;
use zero_alloc::device::DType;
use zero_optim::{DynamicScaling, LossScaling, OptimizerConfig};
use zero_shard::Sharding;
use zero_trainer::param_groups::{GroupSettings, ParamGroup};
use zero_trainer::{Home, MeshSettings, OffloadSettings};

use super::identical::{cases, same};
use super::mesh::close;
use super::support::{Case, Outcome};

/// `case` with tensor parallelism over `ranks` ranks, and as many data ranks as it has.
fn cut(case: &Case, ranks: usize) -> Case {
    Case {
        ranks: case.ranks * ranks,
        mesh: MeshSettings {
            tensor_ranks: Some(ranks),
            ..case.mesh
        },
        ..case.clone()
    }
}

/// Losses and norms are within `limit` of the run without tensor parallelism, and so is the state,
/// relative to the largest element of each tensor. All stages have the same bits.
fn agrees(base: &Case, ranks: usize, limit: f64) {
    let flat = Case {
        stage: 2,
        ..base.clone()
    }
    .run_tiny();
    let mut first: Option<Outcome> = None;
    for (stage, overlap, home) in [
        (0, true, Home::Device),
        (1, true, Home::Device),
        (2, true, Home::Device),
        (3, true, Home::Device),
        (3, false, Home::Device),
        (3, true, Home::Host),
    ] {
        let case = Case {
            stage,
            overlap,
            offload: OffloadSettings {
                optimizer: home.clone(),
                params: home,
                ..OffloadSettings::default()
            },
            ..cut(base, ranks)
        };
        let outcome = case.run_tiny();
        close(&outcome, &flat, limit, &format!("{case:?}"));
        match &first {
            Some(first) => same(first, &outcome, &format!("{case:?}")),
            None => first = Some(outcome),
        }
    }
}

fn base(oracle: Oracle, ranks: usize) -> Case {
    Case {
        oracle,
        ranks,
        reduce_every_micro_batch: true,
        ..Case::default()
    }
}

#[test]
fn gpt2_in_two_parts() {
    agrees(&base(GPT2, 2), 2, 1e-6);
}

#[test]
fn llama_in_two_parts() {
    agrees(&base(LLAMA, 1), 2, 1e-6);
}
