//! Errors name the cause, and reach all ranks.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, Device, Layout, Result, Shape, Tensor};
use candle_zero::{ShardedVars, ZeroAdamW};
use parking_lot::Mutex;
use zero_comm::CommOptions;
use zero_comm::threads::World;
use zero_shard::ZeroStage;

use crate::common::{Kind, config, on_ranks};

/// An optimizer over a world of one rank.
fn alone(vars: &ShardedVars) -> Result<ZeroAdamW> {
    let comm = World::new(1, CommOptions::default()).unwrap().remove(0);
    ZeroAdamW::new(Arc::new(comm), vars, config(ZeroStage::Two))
}

#[test]
fn second_optimizer_is_refused() {
    let ranks = on_ranks(
        Kind::ModernBert { layers: 1 },
        &config(ZeroStage::Two),
        |_| true,
        |mut rank| {
            let error = alone(&rank.vars)
                .expect_err("a second optimizer")
                .to_string();
            assert!(
                error.contains("tok_embeddings") && error.contains("already have a ZeroAdamW"),
                "{error}"
            );
            // The first is as before.
            let loss = rank.loss(0)?;
            rank.zero.backward_step(&loss)?;
            // And makes way for another.
            drop(rank.zero);
            alone(&rank.vars).map(drop)
        },
    );

    ranks.into_iter().for_each(|rank| rank.unwrap());
}

#[test]
fn failed_creation_makes_way_for_another() {
    for rank in on_ranks(
        Kind::ModernBert { layers: 1 },
        &config(ZeroStage::Two),
        |_| true,
        |rank| {
            drop(rank.zero);
            let comm = World::new(1, CommOptions::default()).unwrap().remove(0);
            let mut invalid = config(ZeroStage::Two);
            invalid.optimizer = invalid.optimizer.lr(-1.0);
            ZeroAdamW::new(Arc::new(comm), &rank.vars, invalid).expect_err("a negative rate");
            alone(&rank.vars).map(drop)
        },
    ) {
        rank.unwrap();
    }
}

#[test]
fn loss_of_two_optimizers_is_refused() {
    let errors = on_ranks(
        Kind::ModernBert { layers: 1 },
        &config(ZeroStage::Two),
        |_| true,
        |mut rank| {
            let kind = Kind::ModernBert { layers: 1 };
            let vars = ShardedVars::new(kind.weights()?, |_| true);
            let mut model = kind.load(vars.var_builder(&Device::Cpu))?;
            let mut other = alone(&vars)?;
            let both = (rank.loss(0)? + model.loss(&crate::common::batch(0, rank.rows())?)?)?;
            other.backward_step(&both)
        },
    );
    for error in errors {
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("a gradient of ") && error.contains("did not start"),
            "{error}"
        );
    }
}

/// An identity whose `bwd` runs another backward, on another thread.
struct Meanwhile {
    other: Tensor,
    error: Arc<Mutex<Option<String>>>,
}

impl CustomOp1 for Meanwhile {
    fn name(&self) -> &'static str {
        "meanwhile"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let CpuStorage::F32(values) = storage else {
            panic!("a loss is F32")
        };
        Ok((
            CpuStorage::F32(vec![values[layout.start_offset()]]),
            layout.shape().clone(),
        ))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let ran = std::thread::scope(|scope| scope.spawn(|| self.other.backward()).join());
        *self.error.lock() = ran.expect("no panic").err().map(|error| error.to_string());
        Ok(Some(grad.clone()))
    }
}

#[test]
fn backward_of_another_thread_is_refused() {
    let ranks = on_ranks(
        Kind::ModernBert { layers: 1 },
        &config(ZeroStage::Two),
        |_| true,
        |mut rank| {
            let error = Arc::new(Mutex::new(None));
            let meanwhile = Meanwhile {
                other: rank.loss(1)?,
                error: Arc::clone(&error),
            };
            let loss = rank.loss(0)?.apply_op1(meanwhile)?;
            rank.zero.backward_step(&loss)?;
            let error = error.lock().take();
            Ok(error.expect("the other backward is refused"))
        },
    );
    for error in ranks {
        let error = error.unwrap();
        assert!(error.contains("another thread"), "{error}");
    }
}

#[test]
fn missing_gradients_are_an_error() {
    let ranks = on_ranks(
        Kind::Llama,
        &config(ZeroStage::Two),
        |_| true,
        |mut rank| {
            let loss = rank.loss(0)?;
            rank.zero.backward_step(&loss)
        },
    );
    for rank in ranks {
        let error = rank.unwrap_err().to_string();
        assert!(
            error.contains("have no gradient") && error.contains("model.norm.weight"),
            "{error}"
        );
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
        assert!(
            rank == 2 || error.contains("rank 2"),
            "rank {rank}: {error}"
        );
        assert!(error.contains("have no gradient"), "rank {rank}: {error}");
    }
}

#[test]
fn step_without_backward_is_an_error() {
    let ranks = on_ranks(
        Kind::Llama,
        &config(ZeroStage::One),
        |name| name == "lm_head.weight",
        |mut rank| rank.zero.step(|_| Ok(())),
    );
    for rank in ranks {
        let error = rank.unwrap_err().to_string();
        assert!(
            error.contains("without a backward") || error.contains("aborted"),
            "{error}"
        );
    }
}
