//! Two models of candle-transformers, their data, and training with and without ZeRO.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use candle_transformers::models::{llama2_c, modernbert};
use candle_zero::{ShardedVars, ZeroAdamW, ZeroConfig};
use zero_alloc::host::HostDevice;
use zero_comm::threads::World;
use zero_comm::{CommOptions, Communicator};
use zero_kernels::AdamHyper;
use zero_optim::OptimizerConfig;
use zero_shard::ZeroStage;

pub(crate) const RANKS: usize = 4;
pub(crate) const STEPS: usize = 50;
/// Not a multiple of the ranks, so that a unit has padding.
pub(crate) const VOCAB: usize = 61;
pub(crate) const SEQ: usize = 16;
/// Rows of all ranks together.
pub(crate) const ROWS: usize = 8;

/// Numbers that look random, from -1 to 1.
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    pub(crate) fn signed(&mut self) -> f32 {
        self.next() as f32 / (1u64 << 30) as f32 - 1.0
    }
}

/// Tokens and targets, `[rows, SEQ]`. The target of a token is another token, so there is something
/// to learn.
pub(crate) fn batch(step: usize, rows: std::ops::Range<usize>) -> Result<(Tensor, Tensor)> {
    let (mut tokens, mut targets) = (Vec::new(), Vec::new());
    for row in rows.clone() {
        let mut numbers = Numbers((step * ROWS + row) as u64);
        for _ in 0..SEQ {
            let token = (numbers.next() % VOCAB as u64) as u32;
            tokens.push(token);
            targets.push((5 * token + 3) % VOCAB as u32);
        }
    }
    let tensor = |values| Tensor::from_vec(values, (rows.len(), SEQ), &Device::Cpu);
    Ok((tensor(tokens)?, tensor(targets)?))
}

pub(crate) fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    candle_nn::loss::cross_entropy(&logits.reshape(((), VOCAB))?, &targets.flatten_all()?)
}

/// A model and its loss.
pub(crate) enum Model {
    ModernBert(Box<modernbert::ModernBertForMaskedLM>),
    Llama(Box<llama2_c::Llama>, llama2_c::Cache),
}

#[derive(Clone, Copy)]
pub(crate) enum Kind {
    ModernBert { layers: usize },
    Llama,
}

impl Kind {
    pub(crate) fn load(self, vars: VarBuilder<'_>) -> Result<Model> {
        match self {
            Self::ModernBert { layers } => {
                let config = modernbert::Config {
                    vocab_size: VOCAB,
                    hidden_size: 32,
                    num_hidden_layers: layers,
                    num_attention_heads: 4,
                    intermediate_size: 48,
                    max_position_embeddings: SEQ,
                    layer_norm_eps: 1e-5,
                    pad_token_id: 0,
                    global_attn_every_n_layers: 2,
                    global_rope_theta: 160_000.0,
                    local_attention: 8,
                    local_rope_theta: 10_000.0,
                    classifier_config: None,
                };
                Ok(Model::ModernBert(Box::new(
                    modernbert::ModernBertForMaskedLM::load(vars, &config)?,
                )))
            }
            Self::Llama => {
                let config = llama2_c::Config {
                    dim: 32,
                    hidden_dim: 48,
                    n_layers: 2,
                    n_heads: 4,
                    n_kv_heads: 2,
                    vocab_size: VOCAB,
                    seq_len: SEQ,
                    norm_eps: 1e-5,
                };
                // Its tables of angles are constants: not those of a `VarMap`, which would make
                // them variables of zeros.
                let constants = VarBuilder::from_tensors(HashMap::new(), DType::F32, &Device::Cpu);
                let cache = llama2_c::Cache::new(false, &config, constants)?;
                Ok(Model::Llama(
                    Box::new(llama2_c::Llama::load(vars, config)?),
                    cache,
                ))
            }
        }
    }

    /// The initial weights: ones for norms, zeros for biases, and numbers of the usual size for
    /// matrices.
    pub(crate) fn weights(self) -> Result<HashMap<String, Tensor>> {
        let vars = VarMap::new();
        self.load(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
        let data = vars.data().lock().unwrap();
        let mut names: Vec<_> = data.keys().cloned().collect();
        names.sort();
        let mut numbers = Numbers(1);
        let weights = names.into_iter().map(|name| {
            let tensor = data[&name].as_tensor();
            if tensor.rank() < 2 {
                return Ok((name, tensor.copy()?.detach()));
            }
            let scale = (3.0 / tensor.dim(1)? as f32).sqrt();
            let values: Vec<f32> = (0..tensor.elem_count())
                .map(|_| scale * numbers.signed())
                .collect();
            Ok((name, Tensor::from_vec(values, tensor.dims(), &Device::Cpu)?))
        });
        weights.collect()
    }
}

impl Model {
    pub(crate) fn loss(&mut self, (tokens, targets): &(Tensor, Tensor)) -> Result<Tensor> {
        let logits = match self {
            Self::ModernBert(model) => {
                model.forward(tokens, &tokens.ones_like()?.to_dtype(DType::F32)?)?
            }
            Self::Llama(model, cache) => model.forward(tokens, 0, cache)?,
        };
        cross_entropy(&logits, targets)
    }
}

pub(crate) const ADAMW: ParamsAdamW = ParamsAdamW {
    lr: 2e-3,
    beta1: 0.9,
    beta2: 0.99,
    eps: 1e-8,
    weight_decay: 0.05,
};

/// Losses and final weights of candle's own training, without ZeRO.
pub(crate) fn candle_alone(kind: Kind) -> Result<(Vec<f64>, HashMap<String, Tensor>)> {
    let mut vars = VarMap::new();
    let mut model = kind.load(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
    vars.set(kind.weights()?.iter())?;
    let mut optimizer = AdamW::new(vars.all_vars(), ADAMW)?;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let loss = model.loss(&batch(step, 0..ROWS)?)?;
        losses.push(f64::from(loss.to_scalar::<f32>()?));
        optimizer.backward_step(&loss)?;
    }
    let data = vars.data().lock().unwrap();
    Ok((
        losses,
        data.iter()
            .map(|(name, var)| (name.clone(), var.as_tensor().clone()))
            .collect(),
    ))
}

pub(crate) fn config(stage: ZeroStage) -> ZeroConfig {
    let ParamsAdamW {
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
    } = ADAMW;

    let defaults = OptimizerConfig::default();
    let hyper = AdamHyper {
        beta1,
        beta2,
        eps,
        weight_decay,
        ..defaults.hyper
    };

    ZeroConfig {
        optimizer: defaults.hyper(hyper).lr(lr),
        // Units of several buckets, and of less than one.
        bucket_elems: 4096,
        ..ZeroConfig::new(stage)
    }
}

/// One rank: its model, its parameters and their optimizer.
pub(crate) struct Rank {
    pub(crate) rank: usize,
    pub(crate) model: Model,
    pub(crate) vars: ShardedVars,
    pub(crate) zero: ZeroAdamW,
}

impl Rank {
    /// This rank's rows of a step.
    pub(crate) fn rows(&self) -> std::ops::Range<usize> {
        let rows = ROWS / RANKS;
        self.rank * rows..(self.rank + 1) * rows
    }

    pub(crate) fn loss(&mut self, step: usize) -> Result<Tensor> {
        self.model.loss(&batch(step, self.rows())?)
    }
}

/// Runs `run` on each of four ranks, and returns the results in rank order.
pub(crate) fn on_ranks<R: Send>(
    kind: Kind,
    config: &ZeroConfig,
    trains: fn(&str) -> bool,
    run: impl Fn(Rank) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    let comms = World::new(RANKS, CommOptions::default()).unwrap();
    let rank = |comm: Arc<dyn Communicator<HostDevice>>| {
        let rank = comm.rank();
        // The other ranks start from candle's random values, and must get rank 0's.
        let vars = match rank {
            0 => ShardedVars::new(kind.weights()?, trains),
            _ => {
                let (vars, weights) = (VarMap::new(), kind.weights()?);
                // Parameters that are not trained are not sent.
                kind.load(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
                vars.clone()
                    .set(weights.iter().filter(|(name, _)| !trains(name.as_str())))?;
                ShardedVars::new(vars, trains)
            }
        };
        let model = kind.load(vars.var_builder(&Device::Cpu))?;
        let zero = ZeroAdamW::new(comm, &vars, config.clone())?;
        run(Rank {
            rank,
            model,
            vars,
            zero,
        })
    };

    thread::scope(|scope| {
        let ranks: Vec<_> = comms
            .into_iter()
            .map(|comm| scope.spawn(|| rank(Arc::new(comm))))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The bits of all trained parameters, by name.
pub(crate) fn bits(vars: &ShardedVars) -> Result<Vec<(String, Vec<u32>)>> {
    vars.trained()
        .into_iter()
        .map(|(name, tensor)| {
            let values = tensor.flatten_all()?.to_vec1::<f32>()?;
            Ok((name, values.into_iter().map(f32::to_bits).collect()))
        })
        .collect()
}

/// The largest relative error.
pub(crate) fn largest_error(got: &[f64], expected: &[f64]) -> f64 {
    got.iter()
        .zip(expected)
        .map(|(got, expected)| (got - expected).abs() / expected.abs())
        .fold(0.0, f64::max)
}
