//! Models whose blocks the caller runs: a Llama of candle_nn's parts with a backward, and the Mamba
//! block of candle-transformers.

use std::collections::HashMap;

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{
    Embedding, Linear, Module, RmsNorm, VarBuilder, VarMap, embedding, linear_no_bias, rms_norm,
};
use candle_transformers::models::mamba::{self, MambaBlock};

use crate::common::{Numbers, SEQ, VOCAB, cross_entropy};

const DIM: usize = 32;
const HEADS: usize = 4;
const HEAD_DIM: usize = DIM / HEADS;
const HIDDEN: usize = 48;

#[derive(Clone, Copy)]
pub(crate) enum Parts {
    Llama,
    Mamba,
}

enum Layer {
    Llama(Box<LlamaLayer>),
    Mamba(Box<MambaLayer>),
}

struct LlamaLayer {
    norms: [RmsNorm; 2],
    /// Query, key, value, output.
    attention: [Linear; 4],
    /// Gate, up, down.
    mlp: [Linear; 3],
    cos: Tensor,
    sin: Tensor,
    /// 0 where a token attends, else a large negative number, `[SEQ, SEQ]`.
    mask: Tensor,
}

impl LlamaLayer {
    fn load(vars: &VarBuilder<'_>) -> Result<Self> {
        let linear = |ins, outs, name| linear_no_bias(ins, outs, vars.pp(name));
        let angle = |at: usize, pair: usize| {
            at as f32 / 10_000f32.powf(2.0 * pair as f32 / HEAD_DIM as f32)
        };
        let pairs = HEAD_DIM / 2;
        let angles = (0..SEQ).flat_map(|at| (0..pairs).map(move |pair| angle(at, pair)));
        let angles = Tensor::from_iter(angles, &Device::Cpu)?.reshape((SEQ, pairs))?;
        let hidden = |at: usize, other: usize| if other > at { -1e9f32 } else { 0.0 };
        let mask = (0..SEQ).flat_map(|at| (0..SEQ).map(move |other| hidden(at, other)));

        Ok(Self {
            norms: [
                rms_norm(DIM, 1e-5, vars.pp("norm_1"))?,
                rms_norm(DIM, 1e-5, vars.pp("norm_2"))?,
            ],
            attention: [
                linear(DIM, DIM, "query")?,
                linear(DIM, DIM, "key")?,
                linear(DIM, DIM, "value")?,
                linear(DIM, DIM, "output")?,
            ],
            mlp: [
                linear(DIM, HIDDEN, "gate")?,
                linear(DIM, HIDDEN, "up")?,
                linear(HIDDEN, DIM, "down")?,
            ],
            cos: angles.cos()?,
            sin: angles.sin()?,
            mask: Tensor::from_iter(mask, &Device::Cpu)?.reshape((SEQ, SEQ))?,
        })
    }

    /// `x` and the result are `[rows, SEQ, DIM]`.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [query, key, value, output] = &self.attention;
        let normed = self.norms[0].forward_diff(x)?;
        let heads = |linear: &Linear| {
            let all = normed.apply(linear)?.reshape(((), SEQ, HEADS, HEAD_DIM))?;
            all.transpose(1, 2)?.contiguous()
        };
        let rotated = |x: &Tensor| candle_nn::rotary_emb::rope_slow(x, &self.cos, &self.sin);

        let keys = rotated(&heads(key)?)?.t()?.contiguous()?;
        let scores = (rotated(&heads(query)?)?.matmul(&keys)? / (HEAD_DIM as f64).sqrt())?;
        let weights = candle_nn::ops::softmax(&scores.broadcast_add(&self.mask)?, D::Minus1)?;
        let mixed = weights.matmul(&heads(value)?)?.transpose(1, 2)?;
        let x = (x + mixed.reshape(((), SEQ, DIM))?.apply(output)?)?;

        let [gate, up, down] = &self.mlp;
        let normed = self.norms[1].forward_diff(&x)?;
        let gated = (normed.apply(gate)?.silu()? * normed.apply(up)?)?;
        x + gated.apply(down)?
    }
}

struct MambaLayer {
    norm: RmsNorm,
    /// Unmodified. candle-transformers' own block around it has a norm without a backward.
    block: MambaBlock,
    config: mamba::Config,
}

impl MambaLayer {
    fn load(vars: &VarBuilder<'_>) -> Result<Self> {
        let config = mamba::Config {
            d_model: DIM,
            n_layer: 1,
            vocab_size: VOCAB,
            pad_vocab_size_multiple: 1,
        };
        Ok(Self {
            norm: rms_norm(DIM, 1e-5, vars.pp("norm"))?,
            block: MambaBlock::new(0, &config, vars.pp("mixer"))?,
            config,
        })
    }

    /// `x` and the result are `[rows, SEQ, DIM]`. The block takes one token of one row at a time.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let normed = self.norm.forward_diff(x)?;
        let row = |row: usize| {
            let mut state = mamba::State::new(1, &self.config, DType::F32, &Device::Cpu)?;
            let mut outputs = Vec::new();
            for at in 0..SEQ {
                let token = normed.narrow(0, row, 1)?.narrow(1, at, 1)?.squeeze(1)?;
                outputs.push(self.block.forward(&token, &mut state)?);
                state.pos += 1;
            }
            Tensor::stack(&outputs, 1)
        };
        let rows = (0..x.dim(0)?).map(row).collect::<Result<Vec<_>>>()?;
        x + Tensor::cat(&rows, 0)?
    }
}

/// A language model in blocks.
pub(crate) struct Lm {
    tokens: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
}

/// A block of a model: a function of the output of the block before.
pub(crate) type Block<'a> = Box<dyn Fn(&Tensor) -> Result<Tensor> + 'a>;

impl Lm {
    pub(crate) fn load(parts: Parts, layers: usize, vars: &VarBuilder<'_>) -> Result<Self> {
        let layer = |layer: usize| {
            let vars = vars.pp("layers").pp(layer);
            Ok(match parts {
                Parts::Llama => Layer::Llama(Box::new(LlamaLayer::load(&vars)?)),
                Parts::Mamba => Layer::Mamba(Box::new(MambaLayer::load(&vars)?)),
            })
        };
        Ok(Self {
            tokens: embedding(VOCAB, DIM, vars.pp("tokens"))?,
            layers: (0..layers).map(layer).collect::<Result<_>>()?,
            norm: rms_norm(DIM, 1e-5, vars.pp("head.norm"))?,
            head: linear_no_bias(DIM, VOCAB, vars.pp("head.linear"))?,
        })
    }

    /// The blocks, from tokens to the loss, with the names of their units.
    pub(crate) fn blocks<'a>(&'a self, targets: &'a Tensor) -> Vec<(String, Block<'a>)> {
        let tokens: Block<'_> = Box::new(|x| self.tokens.forward(x));
        let mut blocks = vec![("tokens".to_owned(), tokens)];
        for (index, layer) in self.layers.iter().enumerate() {
            let block: Block<'_> = match layer {
                Layer::Llama(layer) => Box::new(|x| layer.forward(x)),
                Layer::Mamba(layer) => Box::new(|x| layer.forward(x)),
            };
            blocks.push((format!("layers.{index}"), block));
        }
        let head = |x: &Tensor| {
            let logits = self.norm.forward_diff(x)?.apply(&self.head)?;
            cross_entropy(&logits, targets)
        };
        blocks.push(("head".to_owned(), Box::new(head)));
        blocks
    }

    /// The loss of candle's own forward.
    pub(crate) fn loss(&self, (tokens, targets): &(Tensor, Tensor)) -> Result<Tensor> {
        let blocks = self.blocks(targets);
        let first = Ok(tokens.clone());
        blocks.iter().fold(first, |x, (_, block)| block(&x?))
    }
}

/// The unit of a parameter: a layer, the embedding, or the head.
pub(crate) fn unit_of(name: &str) -> &str {
    match name.starts_with("layers.") {
        true => candle_zero::unit_of_block(name),
        false => name.split('.').next().unwrap_or(name),
    }
}

/// Initial weights, the same at each call.
pub(crate) fn weights(parts: Parts, layers: usize) -> Result<HashMap<String, Tensor>> {
    let vars = VarMap::new();
    let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    Lm::load(parts, layers, &builder)?;
    let data = vars.data().lock().unwrap();
    let mut names: Vec<_> = data.keys().cloned().collect();
    names.sort();

    let mut numbers = Numbers(1);
    let weight = |name: String| {
        let dims = data[&name].dims().to_vec();
        let (mean, scale) = match dims[..] {
            [_] if name.contains("norm") => (1.0, 0.0),
            [_] => (0.0, 0.1),
            [_, 1, ins] | [_, ins, ..] => (0.0, (1.0 / ins as f32).sqrt()),
            [] => (0.0, 1.0),
        };
        let elems = dims.iter().product();
        let values = (0..elems).map(|_| mean + scale * numbers.signed());
        let values = Tensor::from_vec(values.collect(), dims, &Device::Cpu)?;
        Ok((name, values))
    };
    names.into_iter().map(weight).collect()
}
