//! Muon for the matrices of blocks, beside a plain loop over the whole batch.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{AdamW, Optimizer, VarBuilder, VarMap};
use candle_zero::{ShardedVars, ZeroAdamW, ZeroConfig, ZeroMuon};
use zero_alloc::host::HostDevice;
use zero_comm::Solo;
use zero_kernels::Muon;
use zero_optim::Matrix;
use zero_shard::ZeroStage;

use crate::common::{self, ADAMW, Kind, ROWS, batch, config, largest_error};
use crate::models::{Lm, Parts, weights};
use crate::{blocks, blocks::config_in_blocks};

const STEPS: usize = 12;
const LR_SCALE: f64 = 5.0;

fn is_hidden(name: &str) -> bool {
    name.contains("layers.")
}

/// Queries, keys and values of ModernBERT are one parameter.
fn split(name: &str, whole: Matrix) -> Vec<Matrix> {
    match name.ends_with("Wqkv.weight") {
        true => whole.split(&[whole.outputs() / 3; 3]),
        false => vec![whole],
    }
}

fn muon() -> Option<ZeroMuon> {
    Some(ZeroMuon {
        lr_scale: LR_SCALE,
        split,
        ..ZeroMuon::new(is_hidden)
    })
}

/// The orthogonalised `update` of a matrix, `[outputs, inputs]`, in candle's products.
fn orthogonalised(update: &Tensor, steps: u32) -> Result<Tensor> {
    let (outputs, inputs) = update.dims2()?;
    let mut x = match outputs > inputs {
        true => update.t()?,
        false => update.clone(),
    };
    let norm = x.sqr()?.sum_all()?.to_scalar::<f32>()?.sqrt();
    x = (x / f64::from(norm.max(1e-7)))?;
    for _ in 0..steps {
        let gram = x.matmul(&x.t()?)?;
        let factor = ((&gram * -4.7750)? + (gram.matmul(&gram)? * 2.0315)?)?;
        x = ((&x * 3.4445)? + factor.matmul(&x)?)?;
    }
    if outputs > inputs {
        x = x.t()?;
    }
    x * (outputs as f64 / inputs as f64).max(1.0).sqrt()
}

/// A step of Muon with its default settings.
fn update(name: &str, var: &Var, average: &mut Tensor, gradient: &Tensor) -> Result<()> {
    let Muon {
        momentum,
        weight_decay,
        ns_steps,
        ..
    } = Muon::default();
    let lr = LR_SCALE * ADAMW.lr;
    *average = ((&*average * momentum)? + (gradient * (1.0 - momentum))?)?;
    let nesterov = ((gradient * (1.0 - momentum))? + (&*average * momentum)?)?;

    let (outputs, inputs) = var.dims2()?;
    let parts = split(name, Matrix::linear(outputs, inputs)).into_iter();
    let parts = parts.map(|part| {
        let rows = nesterov.narrow(0, part.first / inputs, part.rows)?;
        orthogonalised(&rows, ns_steps)
    });
    let direction = Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0)?;
    let decayed = (var.as_tensor() * (1.0 - lr * weight_decay))?;
    var.set(&(decayed - (direction * lr)?)?)
}

/// Losses of a training without ZeRO: candle's AdamW, and Muon for the matrices of layers.
fn alone(vars: &VarMap, mut loss: impl FnMut(usize) -> Result<Tensor>) -> Result<Vec<f64>> {
    let all = vars.data().lock().unwrap().clone().into_iter();
    let (hidden, others): (HashMap<String, Var>, HashMap<String, Var>) =
        all.partition(|(name, var)| var.rank() == 2 && is_hidden(name));
    let mut adamw = AdamW::new(others.into_values().collect(), ADAMW)?;
    let mut averages = HashMap::new();
    for (name, var) in &hidden {
        averages.insert(name, var.zeros_like()?);
    }

    let mut losses = Vec::new();
    for step in 0..STEPS {
        let loss = loss(step)?;
        losses.push(f64::from(loss.to_scalar::<f32>()?));
        let gradients = loss.backward()?;
        for (name, average) in &mut averages {
            let var = &hidden[*name];
            update(name, var, average, gradients.get(var).unwrap())?;
        }
        adamw.step(&gradients)?;
    }
    Ok(losses)
}

fn check(stage: ZeroStage, losses: &[f64], expected: &[f64]) {
    assert!(expected[STEPS - 1] < 0.97 * expected[0], "{expected:?}");
    let error = largest_error(losses, expected);
    println!("stage {}: largest relative error {error:e}", stage.number());
    assert_eq!(losses.len(), STEPS);
    assert!(error <= 1e-6, "stage {}: {error:e}", stage.number());
}

#[test]
fn llama_in_blocks() {
    let model = (Parts::Llama, 2);
    let mut vars = VarMap::new();
    let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let plain = Lm::load(model.0, model.1, &builder).unwrap();
    vars.set(weights(model.0, model.1).unwrap().iter()).unwrap();
    let expected = alone(&vars, |step| plain.loss(&batch(step, 0..ROWS)?)).unwrap();

    for stage in [ZeroStage::Zero, ZeroStage::Three] {
        let config = ZeroConfig {
            muon: muon(),
            ..config_in_blocks(stage)
        };
        for losses in blocks::on_ranks(2, model, &config, |mut rank| rank.losses(0..STEPS)) {
            check(stage, &losses, &expected);
        }
    }
}

/// Queries, keys and values are orthogonalised apart, though they are one parameter.
#[test]
fn fused_matrices_of_modern_bert() {
    let kind = Kind::ModernBert { layers: 2 };
    let mut vars = VarMap::new();
    let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let mut plain = kind.load(builder).unwrap();
    vars.set(kind.weights().unwrap().iter()).unwrap();
    let expected = alone(&vars, |step| plain.loss(&batch(step, 0..ROWS)?)).unwrap();

    let stage = ZeroStage::Two;
    let config = ZeroConfig {
        muon: muon(),
        ..config(stage)
    };
    let ranks = common::on_ranks(
        kind,
        &config,
        |_| true,
        |mut rank| {
            let losses = (0..STEPS).map(|step| {
                let loss = rank.loss(step)?;
                Ok(rank.zero.backward_step(&loss)?.loss())
            });
            losses.collect::<Result<Vec<f64>>>()
        },
    );
    for losses in ranks {
        check(stage, &losses.unwrap(), &expected);
    }
}

#[test]
fn embedding_is_refused_by_name() {
    let refused = |is_hidden: fn(&str) -> bool| {
        let vars = ShardedVars::new(weights(Parts::Llama, 1).unwrap(), |_| true);
        Lm::load(Parts::Llama, 1, &vars.var_builder(&Device::Cpu)).unwrap();
        let config = ZeroConfig {
            muon: Some(ZeroMuon::new(is_hidden)),
            ..config_in_blocks(ZeroStage::Three)
        };
        let comm = Arc::new(Solo::new(HostDevice::new()));
        ZeroAdamW::new(comm, &vars, config).unwrap_err().to_string()
    };
    let error = refused(|_| true);
    assert!(error.contains("tokens.weight is an embedding"), "{error}");
    let error = refused(|name| name.contains("norm"));
    assert!(error.contains("accepts no parameter"), "{error}");
}
