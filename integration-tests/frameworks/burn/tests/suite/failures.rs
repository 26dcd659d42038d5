//! Misuse is an error that names the parameter, the block or the setting.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::Tensor;
use burn_zero::{Chain, ZeroBurn, unit_of_block};
use zero_alloc::host::HostDevice;
use zero_comm::Solo;
use zero_comm::threads::ThreadsComm;
use zero_optim::framework::{Rank, Zero};
use zero_shard::ZeroStage;

use crate::common::{Batch, Blocks, Constant, Model, Place, Result, builder, on_ranks};

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
            let kept = RefCell::new(Vec::new());
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

/// The elements of a parameter's tensor.
fn elements(kept: &Tensor<2>) -> Vec<f32> {
    let values = kept.clone().inner().into_data().try_into_vec();
    values.expect("fp32")
}

/// How the first backward ends: its tensor is kept, and the error or the panic ignored.
#[derive(Clone, Copy, Debug)]
enum First {
    Returns,
    Panics,
}

const FIRST: [First; 2] = [First::Returns, First::Panics];

/// Ignores the failure of a backward that keeps a tensor, and goes on: the step has failed, and
/// nothing writes to the tensor.
fn check_kept<M: Module>(
    run: &mut ZeroBurn<M>,
    mut backward: impl FnMut(&mut burn_zero::TrainStep<'_, M>, Option<First>) -> Result<()>,
    kept: &RefCell<Vec<Tensor<2>>>,
    how: First,
) -> Result<()> {
    let mut step = run.begin()?;
    let first = catch_unwind(AssertUnwindSafe(|| backward(&mut step, Some(how))));
    assert!(!matches!(first, Ok(Ok(()))), "{how:?}");
    let before: Vec<_> = kept.borrow().iter().map(elements).collect();
    assert!(!before.is_empty());

    let _second = backward(&mut step, None);
    let ended = step.end().map(drop);
    ended.expect_err("the step has failed");
    let error = run.begin().map(drop).expect_err("the run has failed");
    run.resume("nowhere").expect_err("the run has failed");
    let after: Vec<_> = kept.borrow().iter().map(elements).collect();
    assert_eq!(before, after, "{how:?}");
    Err(error)
}

#[test]
fn kept_parameter_is_not_written() {
    for stage in [ZeroStage::Zero, ZeroStage::One, ZeroStage::Two] {
        for how in FIRST {
            let errors = errors(|comm, place| {
                let mut run = ZeroBurn::new(Model::new(1), builder(comm, stage)?, unit_of_block)?;
                let batch = Batch::of_rank(0, place);
                let kept = RefCell::new(Vec::new());
                let backward = |step: &mut burn_zero::TrainStep<'_, Model>, first| {
                    step.backward(|model| {
                        if let Some(how) = first {
                            kept.borrow_mut().push(model.head.weight.val());
                            assert!(!matches!(how, First::Panics), "on purpose");
                        }
                        model.loss(&batch)
                    })
                };
                check_kept(&mut run, backward, &kept, how)
            });
            // The reason is the tensor, or that its rank dropped the step.
            assert_all_contain(&errors, &["an earlier step did not end"]);
        }
    }
}

#[test]
fn kept_parameter_of_a_block_is_not_written() {
    for stage in ZeroStage::ALL {
        for how in FIRST {
            let errors = errors(|comm, place| {
                let chain = Model::new(1).into_blocks();
                let mut run = ZeroBurn::chain(chain, builder(comm, stage)?)?;
                let batch = Batch::of_rank(0, place);
                let kept = RefCell::new(Vec::new());
                let backward = |step: &mut burn_zero::TrainStep<'_, Blocks>, first| {
                    step.backward_chain(
                        |block| {
                            if let Some(how) = first {
                                kept.borrow_mut().push(block.weight.val());
                                assert!(!matches!(how, First::Panics), "on purpose");
                            }
                            block.forward(batch.input())
                        },
                        |layer, hidden| layer.forward(hidden, None, None),
                        |last, hidden| last.forward(hidden).mean(),
                    )
                };
                check_kept(&mut run, backward, &kept, how)
            });
            assert_all_contain(&errors, &["an earlier step did not end"]);
        }
    }
}

/// The run's own error would name a method that this crate does not have.
#[test]
fn backward_after_a_failed_one_is_named() {
    let errors = errors(|comm, place| {
        let chain = Model::new(1).into_blocks();
        let mut run = ZeroBurn::chain(chain, builder(comm, ZeroStage::Three)?)?;
        let batch = Batch::of_rank(0, place);
        let mut step = run.begin()?;
        let calls = RefCell::new(0);
        let mut backward = || {
            step.backward_chain(
                |first| first.forward(batch.input()),
                |layer, hidden| {
                    // The second call is in backward, when the last block has passed gradients on.
                    *calls.borrow_mut() += 1;
                    assert!(*calls.borrow() != 2, "on purpose");
                    layer.forward(hidden, None, None)
                },
                |last, hidden| last.forward(hidden).mean(),
            )
        };
        catch_unwind(AssertUnwindSafe(&mut backward)).expect_err("a panic");
        backward()
    });
    assert_all_contain(&errors, &["last.weight", "an earlier backward"]);
}

/// Safe code can exchange the runs below two models.
#[test]
fn run_of_another_model_is_refused() {
    let errors = errors(|comm, _| {
        let mut run = ZeroBurn::new(
            Model::new(1),
            builder(comm, ZeroStage::Zero)?,
            unit_of_block,
        )?;
        let device = burn::tensor::Device::flex().autodiff();
        let other = Other {
            input: LinearConfig::new(7, 32).init(&device),
        };
        let rank = Rank::on_host(Solo::new(HostDevice::new()))?;
        let builder = Zero::builder(rank).stage(ZeroStage::Zero);
        let mut other = ZeroBurn::new(other, builder, unit_of_block)?;
        std::mem::swap(run.zero(), other.zero());
        let input = Tensor::<2>::ones([1, 7], &device);
        let outcome = other.step(|model| model.input.forward(input).mean());
        outcome.map(drop)
    });
    assert_all_contain(
        &errors,
        &["input.weight has the shape [5, 32]", "another model"],
    );
}

/// A model whose parameter has a name of [`Model`]'s, and another shape.
#[derive(Module, Debug)]
struct Other {
    input: Linear,
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
