//! Muon for the matrices of blocks, beside a plain loop over the whole batch.

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData};
use burn_zero::with_muon;
use zero_kernels::Muon;
use zero_shard::ZeroStage;

use crate::common::{
    Batch, Form, MUON_LR_SCALE, Model, Run, builder, on_ranks, unsharded, unsharded_with_muon,
};

const STEPS: usize = 12;

fn rule() -> (Muon, f64) {
    (Muon::default(), MUON_LR_SCALE)
}

/// Those of the encoder, by their paths in a model and in a chain.
fn is_hidden(path: &str) -> bool {
    path.starts_with("encoder.") || path.starts_with("layers.")
}

/// A matrix, `[inputs, outputs]`, after a step of Muon with its default settings; the average is
/// the first of `moments`. Products are burn's, in fp32.
pub(crate) fn updated<const D: usize>(
    weights: Tensor<D>,
    gradient: Vec<f32>,
    moments: &mut [[f32; 2]],
    lr: f64,
) -> Tensor<D> {
    let Muon {
        momentum,
        weight_decay,
        ns_steps,
        ..
    } = Muon::default();
    let device = weights.device();
    let shape = weights.dims();
    let [inputs, outputs] = [shape[0], shape[1]];

    let nesterov = gradient
        .iter()
        .zip(moments)
        .map(|(&gradient, [average, _])| {
            let gradient = f64::from(gradient);
            let new = momentum * f64::from(*average) + (1.0 - momentum) * gradient;
            *average = new as f32;
            ((1.0 - momentum) * gradient + momentum * new) as f32
        });
    let data = TensorData::new(nesterov.collect::<Vec<f32>>(), [inputs, outputs]);
    let mut update = Tensor::<2>::from_data(data, &Device::flex());
    if inputs > outputs {
        update = update.transpose();
    }
    let norm = update.clone().square().sum().sqrt().into_scalar::<f32>();
    update = update / norm;
    for _ in 0..ns_steps {
        let gram = update.clone().matmul(update.clone().transpose());
        let square = gram.clone().matmul(gram.clone());
        let factor = gram * -4.7750 + square * 2.0315;
        update = update.clone() * 3.4445 + factor.matmul(update);
    }
    if inputs > outputs {
        update = update.transpose();
    }

    let ratio = (outputs as f64 / inputs as f64).max(1.0).sqrt();
    let decayed = weights.inner() * (1.0 - lr * weight_decay);
    let new = decayed - update.reshape(shape) * (lr * ratio);
    Tensor::from_data(new.into_data(), &device).require_grad()
}

#[test]
fn losses_are_those_of_a_plain_loop() {
    let expected = unsharded_with_muon(2, STEPS, is_hidden);
    let with_adamw = unsharded(2, STEPS);
    assert!(expected[STEPS - 1] < 0.9 * expected[0], "{expected:?}");
    assert_ne!(expected, with_adamw);

    for (form, stage) in [
        (Form::Model, ZeroStage::Zero),
        (Form::Model, ZeroStage::Two),
        (Form::Chain, ZeroStage::Three),
    ] {
        let ranks = on_ranks(2, |comm, place| {
            let model = Model::new(2);
            let builder = builder(comm, stage)?;
            let builder = match form {
                Form::Model => with_muon(builder, &model, rule(), is_hidden)?,
                Form::Chain => with_muon(builder, &model.clone().into_blocks(), rule(), is_hidden)?,
            };
            let mut run = Run::new(form, model, builder)?;
            let losses = (0..STEPS).map(|step| Ok(run.step(&Batch::of_rank(step, place))?.loss()));
            losses.collect::<Result<Vec<f64>, _>>()
        });
        for losses in ranks {
            let losses = losses.unwrap();
            let errors = losses.iter().zip(&expected);
            let errors = errors.map(|(got, expected)| ((got - expected) / expected).abs());
            let error = errors.fold(0.0, f64::max);
            println!("{form:?}, stage {}: {error:.2e}", stage.number());
            assert!(error <= 1e-6, "{form:?}, {stage:?}: {error:e}");
        }
    }
}

#[derive(Module, Debug)]
struct Words {
    words: Embedding,
    hidden: Linear,
}

#[test]
fn embedding_is_refused_by_name() {
    let device = Device::flex().autodiff();
    let model = Words {
        words: EmbeddingConfig::new(7, 4).init(&device),
        hidden: LinearConfig::new(4, 4).init(&device),
    };
    let refused = |is_hidden: fn(&str) -> bool| {
        let ranks = on_ranks(1, |comm, _| {
            let builder = builder(comm, ZeroStage::Three)?;
            with_muon(builder, &model, rule(), is_hidden).map(drop)
        });
        ranks.into_iter().next().unwrap().unwrap_err().to_string()
    };
    let error = refused(|_| true);
    assert!(error.contains("words.weight is an embedding"), "{error}");
    let error = refused(|path| path.starts_with("layers."));
    assert!(error.contains("accepts no parameter"), "{error}");
    let error = refused(|path| path == "hidden.bias");
    assert!(error.contains("accepts no parameter"), "{error}");
}
