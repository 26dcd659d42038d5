//! The weights of a model, by what generation computes with them.

use zero_alloc::device::DType;
use zero_trainer::ModelError;

use super::WeightSource;
use super::matrix::Matrix;
use crate::ModelConfig;
use crate::gpt2::config::GptConfig;
use crate::llama::config::LlamaConfig;
use crate::ops::activation::Activation;
use crate::ops::transpose::transpose;
use crate::ops::{layer_norm, rms_norm};

/// All weights.
pub(super) struct Weights {
    pub(super) embedding: Matrix,
    /// The embedding of positions, if they have one.
    pub(super) positions: Option<Matrix>,
    pub(super) blocks: Vec<Block>,
    pub(super) norm: Norm,
    /// The head, unless it is the embedding.
    pub(super) head: Option<Matrix>,
}

pub(super) struct Block {
    pub(super) norm1: Norm,
    pub(super) qkv: Linear,
    /// The gains of the norms of queries and of keys `[2, d]`, if they have norms.
    pub(super) qk_gains: Vec<f32>,
    pub(super) output: Linear,
    pub(super) norm2: Norm,
    pub(super) mlp: Mlp,
}

/// A matrix and its bias, which may be empty.
pub(super) struct Linear {
    pub(super) weight: Matrix,
    pub(super) bias: Vec<f32>,
}

pub(super) enum Mlp {
    Plain {
        fc: Linear,
        projection: Linear,
        activation: Activation,
    },
    SwiGlu {
        gate_up: Linear,
        down: Linear,
    },
}

pub(super) enum Norm {
    Layer {
        gain: Vec<f32>,
        bias: Vec<f32>,
        eps: f32,
    },
    Rms {
        gain: Vec<f32>,
        eps: f32,
    },
}

impl Norm {
    /// Elements of a row.
    pub(super) fn width(&self) -> usize {
        match self {
            Self::Layer { gain, .. } | Self::Rms { gain, .. } => gain.len(),
        }
    }

    /// The norm of each row of x.
    pub(super) fn apply(&self, x: &[f32]) -> Vec<f32> {
        let mut y = vec![0.0; x.len()];
        match self {
            Self::Layer { gain, bias, eps } => {
                let mut stats = vec![0.0; 2 * x.len() / gain.len()];
                layer_norm::forward(&mut y, &mut stats, x, gain, bias, *eps);
            }
            Self::Rms { gain, eps } => {
                let mut stats = vec![0.0; x.len() / gain.len()];
                rms_norm::forward(&mut y, &mut stats, x, gain, *eps);
            }
        }
        y
    }
}

impl Linear {
    /// `x w^T + bias`.
    pub(super) fn apply(&self, x: &[f32]) -> Vec<f32> {
        let mut out = self.product(x);
        if !self.bias.is_empty() {
            for row in out.chunks_exact_mut(self.bias.len()) {
                row.iter_mut().zip(&self.bias).for_each(|(y, b)| *y += b);
            }
        }
        out
    }

    /// `x w^T`.
    pub(super) fn product(&self, x: &[f32]) -> Vec<f32> {
        let rows = x.len() / self.weight.inputs();
        let mut out = vec![0.0; rows * self.weight.outputs()];
        self.weight.product(&mut out, x);
        out
    }
}

impl Weights {
    /// Reads the weights; matrices are held in `dtype`, fp32 or bf16.
    pub(super) fn read(
        config: &ModelConfig,
        source: &WeightSource<'_>,
        dtype: DType,
    ) -> Result<Self, ModelError> {
        let reader = Reader {
            config,
            source,
            dtype,
        };
        match config {
            ModelConfig::Gpt2(config) => reader.gpt2(config),
            ModelConfig::Llama(config) => reader.llama(config),
        }
    }

    /// The matrix of the head.
    pub(super) fn head(&self) -> &Matrix {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    /// Bytes of the matrices that each token reads.
    pub(super) fn bytes_of_token(&self) -> u64 {
        let block = |block: &Block| {
            let [one, two] = match &block.mlp {
                Mlp::Plain { fc, projection, .. } => [fc, projection],
                Mlp::SwiGlu { gate_up, down } => [gate_up, down],
            };
            let linears = [&block.qkv, &block.output, one, two];
            linears.iter().map(|l| l.weight.bytes()).sum::<u64>()
        };
        self.head().bytes() + self.blocks.iter().map(block).sum::<u64>()
    }
}

/// Reads tensors by name.
struct Reader<'a> {
    config: &'a ModelConfig,
    source: &'a WeightSource<'a>,
    dtype: DType,
}

impl Reader<'_> {
    fn tensor(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let param = self.config.param(name);
        let param = param.ok_or_else(|| format!("the model has no parameter {name:?}"))?;
        let elems: u64 = param.shape.iter().product();
        let mut values = vec![0.0; elems as usize];
        (self.source)(name, 0..elems, &mut values)?;
        Ok(values)
    }

    /// The tensors one after the other.
    fn tensors(&self, names: &[String]) -> Result<Vec<f32>, ModelError> {
        let parts: Result<Vec<_>, _> = names.iter().map(|name| self.tensor(name)).collect();
        Ok(parts?.concat())
    }

    fn matrix(&self, names: &[String], inputs: usize) -> Result<Matrix, ModelError> {
        Ok(Matrix::new(self.tensors(names)?, inputs, self.dtype))
    }

    fn gpt2(&self, config: &GptConfig) -> Result<Weights, ModelError> {
        let c = config.n_embd;
        let norm = |name: String| {
            Ok::<_, ModelError>(Norm::Layer {
                gain: self.tensor(&format!("{name}.weight"))?,
                bias: self.tensor(&format!("{name}.bias"))?,
                eps: config.layer_norm_epsilon,
            })
        };
        let linear = |name: String, inputs: usize| {
            let stored = self.tensor(&format!("{name}.weight"))?;
            let mut elems = vec![0.0; stored.len()];
            transpose(&mut elems, &stored, stored.len() / inputs, inputs);
            Ok::<_, ModelError>(Linear {
                weight: Matrix::new(elems, inputs, self.dtype),
                bias: self.tensor(&format!("{name}.bias"))?,
            })
        };
        let block = |layer: usize| {
            let name = |part: &str| format!("transformer.h.{layer}.{part}");
            Ok(Block {
                norm1: norm(name("ln_1"))?,
                qkv: linear(name("attn.c_attn"), c)?,
                qk_gains: Vec::new(),
                output: linear(name("attn.c_proj"), c)?,
                norm2: norm(name("ln_2"))?,
                mlp: Mlp::Plain {
                    activation: config.activation,
                    fc: linear(name("mlp.c_fc"), c)?,
                    projection: linear(name("mlp.c_proj"), config.n_inner)?,
                },
            })
        };

        Ok(Weights {
            embedding: self.matrix(&["transformer.wte.weight".into()], c)?,
            positions: Some(self.matrix(&["transformer.wpe.weight".into()], c)?),
            blocks: (0..config.n_layer)
                .map(block)
                .collect::<Result<_, ModelError>>()?,
            norm: norm("transformer.ln_f".into())?,
            head: self.head(c)?,
        })
    }

    fn llama(&self, config: &LlamaConfig) -> Result<Weights, ModelError> {
        let c = config.hidden;
        let norm = |name: String| {
            Ok::<_, ModelError>(Norm::Rms {
                gain: self.tensor(&format!("{name}.weight"))?,
                eps: config.rms_norm_eps,
            })
        };
        let linear = |names: &[String], inputs: usize, bias: bool| {
            let of = |kind: &str| -> Vec<_> {
                names.iter().map(|name| format!("{name}.{kind}")).collect()
            };
            Ok::<_, ModelError>(Linear {
                weight: self.matrix(&of("weight"), inputs)?,
                bias: match bias {
                    true => self.tensors(&of("bias"))?,
                    false => Vec::new(),
                },
            })
        };
        let block = |layer: usize| {
            let name = |part: &str| format!("model.layers.{layer}.{part}");
            let qkv = ["q_proj", "k_proj", "v_proj"].map(|p| name(&format!("self_attn.{p}")));
            let gains = ["q_norm", "k_norm"].map(|p| name(&format!("self_attn.{p}.weight")));
            let gate_up = ["gate_proj", "up_proj"].map(|p| name(&format!("mlp.{p}")));
            let output = [name("self_attn.o_proj")];
            let down = [name("mlp.down_proj")];
            Ok(Block {
                norm1: norm(name("input_layernorm"))?,
                qkv: linear(&qkv, c, config.qkv_bias)?,
                qk_gains: match config.has_qk_norm() {
                    true => self.tensors(&gains)?,
                    false => Vec::new(),
                },
                output: linear(&output, config.q_width(), config.output_bias)?,
                norm2: norm(name("post_attention_layernorm"))?,
                mlp: Mlp::SwiGlu {
                    gate_up: linear(&gate_up, c, config.mlp_bias)?,
                    down: linear(&down, config.intermediate, config.mlp_bias)?,
                },
            })
        };

        Ok(Weights {
            embedding: self.matrix(&["model.embed_tokens.weight".into()], c)?,
            positions: None,
            blocks: (0..config.layers)
                .map(block)
                .collect::<Result<_, ModelError>>()?,
            norm: norm("model.norm".into())?,
            head: self.head(c)?,
        })
    }

    fn head(&self, inputs: usize) -> Result<Option<Matrix>, ModelError> {
        if self.config.tied_head() {
            return Ok(None);
        }
        Ok(Some(self.matrix(&["lm_head.weight".into()], inputs)?))
    }
}
