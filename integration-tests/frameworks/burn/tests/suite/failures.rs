//! Misuse is an error that names the parameter, the block or the setting.

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::Tensor;
use burn_zero::{Chain, ZeroBurn, unit_of_block};
use zero_comm::threads::ThreadsComm;
use zero_shard::ZeroStage;

use crate::common::{Batch, Constant, Model, Place, Result, builder, on_ranks};

/// Runs `work` on two ranks. Returns their errors.
fn errors(work: impl Fn(ThreadsComm, Place) -> Result<()> + Sync) -> Vec<String> {
    let ranks = on_ranks(2, work).into_iter();
    ranks
        .map(|rank| rank.expect_err("an error").to_string())
        .collect()
}

fn assert_all_contain(errors: &[String], parts: &[&str]) {
    for error in errors {
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
}

#[test]
fn missing_gradient_is_named() {
    let errors = errors(|comm, place| {
        let builder = builder(comm, ZeroStage::Two)?;
        let mut run = ZeroBurn::new(Model::new(1), builder, unit_of_block)?;
        let batch = Batch::of_rank(0, place);
        run.step(|model| model.hidden(&batch).mean()).map(drop)
    });
    assert_all_contain(&errors, &["no gradient", "head.weight", "head.bias"]);
}

#[test]
fn kept_parameter_is_an_error() {
    for stage in [ZeroStage::One, ZeroStage::Three] {
        let errors = errors(|comm, place| {
            let chain = Model::new(1).into_blocks();
            let mut run = ZeroBurn::chain(chain, builder(comm, stage)?)?;
            let batch = Batch::of_rank(0, place);
            let kept = std::cell::RefCell::new(Vec::new());
            let result = run.step_chain(
                |first| {
                    kept.borrow_mut().push(first.weight.val());
                    first.forward(batch.input())
                },
                |layer, hidden| layer.forward(hidden, None, None),
                |last, hidden| last.forward(hidden).mean(),
            );
            result.map(drop)
        });
        assert_all_contain(&errors, &["still in use", "first"]);
    }
}

#[test]
fn model_without_blocks_is_refused_at_stage_3() {
    let errors = errors(|comm, place| {
        let builder = builder(comm, ZeroStage::Three)?;
        let mut run = ZeroBurn::new(Model::new(1), builder, unit_of_block)?;
        let batch = Batch::of_rank(0, place);
        run.step(|model| model.loss(&batch)).map(drop)
    });
    assert_all_contain(&errors, &["Chain"]);
}

/// A layer with dropout.
#[derive(Module, Debug)]
struct Random {
    linear: Linear,
    dropout: Dropout,
}

#[test]
fn random_block_is_refused_at_stage_3() {
    let errors = errors(|comm, place| {
        let blocks = Model::new(0).into_blocks();
        let layer = Random {
            linear: LinearConfig::new(32, 32).init(&blocks.first.devices()[0]),
            dropout: DropoutConfig::new(0.5).init(),
        };
        let layer = layer.map(&mut Constant);
        let chain = Chain {
            first: blocks.first,
            layers: vec![layer],
            last: blocks.last,
        };
        let mut run = ZeroBurn::chain(chain, builder(comm, ZeroStage::Three)?)?;
        let batch = Batch::of_rank(0, place);
        let result = run.step_chain(
            |first| first.forward(batch.input()),
            |layer, hidden: Tensor<3>| layer.dropout.forward(layer.linear.forward(hidden)),
            |last, hidden| last.forward(hidden).mean(),
        );
        result.map(drop)
    });
    assert_all_contain(&errors, &["layers.0", "dropout"]);
}

#[test]
fn other_initial_values_are_refused() {
    let errors = errors(|comm, place| {
        let mut model = Model::new(1);
        if place.0 == 1 {
            model = model.map(&mut Constant);
        }
        ZeroBurn::new(model, builder(comm, ZeroStage::Zero)?, unit_of_block).map(drop)
    });
    assert_all_contain(
        &errors,
        &[
            "rank 1 has other settings",
            "initial values of input.weight",
        ],
    );
}
