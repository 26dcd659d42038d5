//! Errors name the cause, and reach all ranks.

use candle_core::{Device, Tensor};
use zero_shard::ZeroStage;

use crate::common::{Kind, config, on_ranks};

#[test]
fn missing_gradients_are_an_error() {
    let ranks = on_ranks(
        Kind::Llama,
        &config(ZeroStage::Two),
        |_| true,
        |mut rank| {
            let loss = rank.loss(0)?;
            rank.zero.backward(&loss)
        },
    );
    for rank in ranks {
        let error = rank.unwrap_err().to_string();
        assert!(error.contains("got no gradient") && error.contains("model.norm.weight"), "{error}");
        assert!(!error.contains("lm_head"), "{error}");
    }
}

#[test]
fn failure_of_one_rank_ends_all() {
    let ranks = on_ranks(
        Kind::ModernBert { layers: 1 },
        &config(ZeroStage::Two),
        |_| true,
        |mut rank| {
            let loss = match rank.rank {
                2 => Tensor::new(1f32, &Device::Cpu)?,
                _ => rank.loss(0)?,
            };
            rank.zero.backward_step(&loss)
        },
    );
    for (rank, result) in ranks.into_iter().enumerate() {
        let error = result.unwrap_err().to_string();
        assert!(rank == 2 || error.contains("rank 2"), "rank {rank}: {error}");
        assert!(error.contains("got no gradient"), "rank {rank}: {error}");
    }
}

#[test]
fn step_without_backward_is_an_error() {
    let ranks =
        on_ranks(Kind::Llama, &config(ZeroStage::One), |name| name == "lm_head.weight", |mut rank| rank.zero.step());
    for rank in ranks {
        let error = rank.unwrap_err().to_string();
        assert!(error.contains("without a complete backward") || error.contains("aborted"), "{error}");
    }
}

#[test]
fn stages_0_and_3_are_refused() {
    for stage in [ZeroStage::Zero, ZeroStage::Three] {
        for rank in on_ranks(Kind::Llama, &config(stage), |_| true, |_| Ok(())) {
            assert!(rank.unwrap_err().to_string().contains("only 1 and 2"));
        }
    }
}
