//! Losses equal those of one AdamW over the whole batch.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, Tensor};
use burn_zero::{ZeroBurn, unit_of_block};
use zero_alloc::device::DType as ZeroDType;
use zero_optim::GroupRules;
use zero_shard::ZeroStage;

use crate::common::{
    Batch, Form, INPUT_ELEMS, Model, RANKS, Run, STEPS, backward_chain, bits, builder, on_ranks,
    step_chain, unsharded,
};

fn largest_error(got: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(got.len(), expected.len());
    let errors = got.iter().zip(expected);
    errors
        .map(|(got, expected)| ((got - expected) / expected).abs())
        .fold(0.0, f64::max)
}

#[test]
fn losses_are_those_without_zero() {
    let expected = unsharded(3, STEPS);
    assert!(expected[STEPS - 1] < 0.7 * expected[0], "{expected:?}");

    let runs = [
        (Form::Model, ZeroStage::Zero),
        (Form::Model, ZeroStage::One),
        (Form::Model, ZeroStage::Two),
        (Form::Chain, ZeroStage::Two),
        (Form::Chain, ZeroStage::Three),
    ];
    for (form, stage) in runs {
        let ranks = on_ranks(RANKS, |comm, place| {
            let template = Model::new(3);
            let mut run = Run::new(form, template.clone(), builder(comm, stage)?)?;
            let mut losses = Vec::new();
            for step in 0..STEPS {
                losses.push(run.step(&Batch::of_rank(step, place))?.loss());
            }
            Ok((losses, bits(&run.model(template)?)))
        });
        let ranks: Vec<_> = ranks.into_iter().map(Result::unwrap).collect();

        let error = largest_error(&ranks[0].0, &expected);
        println!("{form:?}, stage {}: {error:.2e}", stage.number());
        assert!(ranks.iter().all(|rank| *rank == ranks[0]), "ranks differ");
        assert!(error <= 1e-6, "{form:?}, {stage:?}: {error:e}");
    }
}

#[test]
fn micro_batches_equal_one_batch() {
    let losses = |micro_batches: usize| {
        let ranks = on_ranks(2, |comm, (rank, ranks)| {
            let builder = builder(comm, ZeroStage::Two)?.micro_batches(micro_batches);
            let mut run = ZeroBurn::chain(Model::new(1).into_blocks(), builder)?;
            let mut losses = Vec::new();
            for number in 0..3 {
                let mut step = run.begin()?;
                for micro in 0..micro_batches {
                    let place = (rank * micro_batches + micro, ranks * micro_batches);
                    backward_chain(&mut step, &Batch::of_rank(number, place))?;
                }
                losses.push(step.end()?.loss());
            }
            Ok(losses)
        });
        ranks.into_iter().map(Result::unwrap).next().unwrap()
    };
    let error = largest_error(&losses(2), &losses(1));
    assert!(error <= 1e-6, "{error:e}");
}

/// Parameters and gradients in bf16, with fp32 masters in the shards.
#[test]
fn bf16_learns() {
    let ranks = on_ranks(2, |comm, place| {
        let builder = builder(comm, ZeroStage::Three)?.dtype(ZeroDType::Bf16);
        let mut run = ZeroBurn::chain(Model::new(1).into_blocks(), builder)?;
        let mut losses = Vec::new();
        for step in 0..20 {
            let batch = Batch::of_rank(step, place).cast(DType::BF16);
            losses.push(step_chain(&mut run, &batch)?.loss());
        }
        Ok(losses)
    });
    let losses = ranks.into_iter().map(Result::unwrap).next().unwrap();
    for (got, expected) in losses.iter().zip(unsharded(1, 20)) {
        assert!((got - expected).abs() <= 0.02 * expected, "{losses:?}");
    }
}

#[test]
fn frozen_block_stays() {
    let runs = [
        (Form::Model, ZeroStage::Two),
        (Form::Chain, ZeroStage::Two),
        (Form::Chain, ZeroStage::Three),
    ];
    for (form, stage) in runs {
        let ranks = on_ranks(2, |comm, place| {
            let frozen = GroupRules::default().trainable(false);
            let builder = builder(comm, stage)?.groups([GroupRules::default(), frozen], |name| {
                usize::from(name.starts_with("input") || name.starts_with("first"))
            });
            let model = Model::new(1).with_frozen_input();
            let mut run = Run::new(form, model.clone(), builder)?;
            run.step(&Batch::of_rank(0, place))?;
            Ok((bits(&model), bits(&run.model(model)?)))
        });
        let (before, after) = ranks.into_iter().map(Result::unwrap).next().unwrap();
        let frozen = INPUT_ELEMS;
        assert!(before[..frozen] == after[..frozen], "{form:?}, {stage:?}");
        assert!(before[frozen..] != after[frozen..], "{form:?}, {stage:?}");
    }
}

/// A module that changes a statistic in forward, as burn's `BatchNorm` does.
#[derive(Module, Debug)]
struct WithStatistic {
    linear: Linear,
    running_mean: Param<Tensor<1>>,
}

/// The statistic is no parameter of the run, and keeps its value.
#[test]
fn running_statistics_stay_in_the_model() {
    let device = Device::flex().autodiff();
    let model = WithStatistic {
        linear: LinearConfig::new(2, 1).init(&device),
        running_mean: Param::from_tensor(Tensor::full([2], 0.5, &device)).no_grad(),
    };
    let ranks = on_ranks(2, |comm, _| {
        let mut run = ZeroBurn::new(model.clone(), builder(comm, ZeroStage::Two)?, unit_of_block)?;
        let loss = |model: &WithStatistic| {
            let input =
                Tensor::<2>::ones([3, 2], &Device::flex()) - model.running_mean.val().unsqueeze();
            model.linear.forward(input).square().mean()
        };
        run.step(loss)?;
        let names: Vec<String> = run
            .zero()
            .layout()
            .params()
            .map(|(_, p)| p.name.clone())
            .collect();
        let mean = run.model()?.running_mean.val().into_data();
        Ok((names, mean.try_to_vec::<f32>().unwrap()))
    });
    for rank in ranks {
        let (mut names, mean) = rank.unwrap();
        names.sort();
        assert_eq!(names, ["linear.bias", "linear.weight"]);
        assert_eq!(mean, [0.5; 2]);
    }
}
