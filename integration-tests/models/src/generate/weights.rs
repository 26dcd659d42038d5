//! The weights of a model, as generation holds them.

use zero_alloc::device::DType;
use zero_shard::ParamSpec;
use zero_trainer::ModelError;

use super::WeightSource;
use super::matrix::Matrix;
use crate::decoder::block::{Block, Layer};
use crate::decoder::config::DecoderConfig;
use crate::ops::linear::{MatrixOrder, add_rows};
use crate::ops::norm::Norm;
use crate::ops::transpose::transpose;

/// All weights.
pub(super) struct Weights {
    pub(super) tokens: Matrix,
    /// The embedding of positions, if there is one.
    pub(super) positions: Option<Matrix>,
    blocks: Vec<BlockWeights>,
    norm: NormWeights,
    /// The head, unless it is the embedding.
    head: Option<Matrix>,
}

/// The weights of a block.
struct BlockWeights {
    norm1: NormWeights,
    qkv: Linear,
    qk_norm: Vec<f32>,
    output: Linear,
    norm2: NormWeights,
    up: Linear,
    down: Linear,
}

/// Gain and bias of a norm.
type NormWeights = [Vec<f32>; 2];

/// A matrix and its bias, which may be empty.
pub(super) struct Linear {
    weight: Matrix,
    bias: Vec<f32>,
}

impl Layer for &Linear {
    fn forward(&self, y: &mut [f32], x: &[f32]) {
        self.weight.product(y, x);
        if !self.bias.is_empty() {
            add_rows(y, &self.bias);
        }
    }

    fn product(&self, y: &mut [f32], x: &[f32]) {
        self.weight.product(y, x);
    }

    fn bias(&self) -> &[f32] {
        &self.bias
    }
}

impl Weights {
    /// Reads the weights; matrices are held in `dtype`, fp32 or bf16.
    pub(super) fn read(
        config: &DecoderConfig,
        source: &WeightSource<'_>,
        dtype: DType,
    ) -> Result<Self, ModelError> {
        let reader = Reader {
            config,
            source,
            dtype,
        };
        let c = config.width;
        let embedding = config.embedding_params();
        let mut embeddings = embedding.chunks(1).map(|params| reader.rows(params, c));
        let head = config.head_matrix();
        Ok(Self {
            tokens: embeddings.next().unwrap_or_else(|| reader.rows(&[], c))?,
            positions: embeddings.next().transpose()?,
            blocks: (0..config.layers)
                .map(|layer| reader.block(layer))
                .collect::<Result<_, _>>()?,
            norm: reader.norm(config.norm_params(config.names.norm))?,
            head: head.map(|param| reader.rows(&[param], c)).transpose()?,
        })
    }

    /// The matrix of the head.
    pub(super) fn head(&self) -> &Matrix {
        self.head.as_ref().unwrap_or(&self.tokens)
    }

    /// The last norm.
    pub(super) fn norm<'a>(&'a self, config: &DecoderConfig) -> Norm<'a> {
        norm(&self.norm, config)
    }

    /// Block `layer`.
    pub(super) fn block<'a>(
        &'a self,
        config: &'a DecoderConfig,
        layer: usize,
    ) -> Block<'a, &'a Linear> {
        let weights = &self.blocks[layer];
        Block {
            config,
            norm1: norm(&weights.norm1, config),
            qkv: &weights.qkv,
            qk_norm: &weights.qk_norm,
            output: &weights.output,
            norm2: norm(&weights.norm2, config),
            up: &weights.up,
            down: &weights.down,
        }
    }

    /// Bytes of the matrices that each token reads.
    pub(super) fn bytes_of_token(&self) -> u64 {
        let block = |block: &BlockWeights| {
            let linears = [&block.qkv, &block.output, &block.up, &block.down];
            linears.iter().map(|l| l.weight.bytes()).sum::<u64>()
        };
        self.head().bytes() + self.blocks.iter().map(block).sum::<u64>()
    }
}

fn norm<'a>([gain, bias]: &'a NormWeights, config: &DecoderConfig) -> Norm<'a> {
    Norm {
        kind: config.norm,
        gain,
        bias,
        eps: config.eps,
    }
}

/// Reads tensors of a model.
struct Reader<'a> {
    config: &'a DecoderConfig,
    source: &'a WeightSource<'a>,
    dtype: DType,
}

impl Reader<'_> {
    /// The tensors one after the other.
    fn tensors(&self, params: &[ParamSpec]) -> Result<Vec<f32>, ModelError> {
        let read = |param: &ParamSpec| {
            let elems: u64 = param.shape.iter().product();
            let mut values = vec![0.0; elems as usize];
            (self.source)(&param.name, 0..elems, &mut values)?;
            Ok(values)
        };
        let parts: Result<Vec<_>, ModelError> = params.iter().map(read).collect();
        Ok(parts?.concat())
    }

    /// A matrix of rows of `inputs` elements.
    fn rows(&self, params: &[ParamSpec], inputs: usize) -> Result<Matrix, ModelError> {
        Ok(Matrix::new(self.tensors(params)?, inputs, self.dtype))
    }

    fn norm(&self, [gain, bias]: [Vec<ParamSpec>; 2]) -> Result<NormWeights, ModelError> {
        Ok([self.tensors(&gain)?, self.tensors(&bias)?])
    }

    fn linear(
        &self,
        [weight, bias]: [Vec<ParamSpec>; 2],
        inputs: usize,
    ) -> Result<Linear, ModelError> {
        let stored = self.tensors(&weight)?;
        let elems = match self.config.order {
            MatrixOrder::InputsFirst => {
                let mut elems = vec![0.0; stored.len()];
                transpose(&mut elems, &stored, stored.len() / inputs, inputs);
                elems
            }
            MatrixOrder::OutputsFirst => stored,
        };
        Ok(Linear {
            weight: Matrix::new(elems, inputs, self.dtype),
            bias: self.tensors(&bias)?,
        })
    }

    fn block(&self, layer: usize) -> Result<BlockWeights, ModelError> {
        let config = self.config;
        let of = config.block_params(layer);
        Ok(BlockWeights {
            norm1: self.norm(of.norm1)?,
            qkv: self.linear(of.qkv, config.width)?,
            qk_norm: self.tensors(&of.qk_norm)?,
            output: self.linear(of.output, config.q_width())?,
            norm2: self.norm(of.norm2)?,
            up: self.linear(of.up, config.width)?,
            down: self.linear(of.down, config.inner)?,
        })
    }
}
