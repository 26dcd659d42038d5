//! Tensor parallelism: how ranks cut a model's parameters (Megatron-LM, arXiv 1909.08053).
//!
//! The first matrix of attention and of the MLP is cut by columns of its output, so that each rank
//! has whole heads; the second by its rows, so that the ranks' outputs are summed. Embedding and
//! head are cut by tokens of the vocabulary. Norms, the biases of second matrices and learned
//! positions are the same on all ranks.

use std::borrow::Cow;

use zero_alloc::device::Device;
use zero_shard::{ParamSpec, TensorCut, TensorPart, UnitSpec};
use zero_trainer::{Batch, ModelError, ModelRanks};

use crate::ModelConfig;
use crate::config::{ConfigError, check_divides};
use crate::ops::cross_entropy::{STATISTICS, VocabPart};
use crate::options::ModelOptions;

/// A rank of tensor parallelism.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TensorRank {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
}

impl TensorRank {
    /// This rank.
    ///
    /// # Errors
    /// The options are for another number of ranks.
    pub(crate) fn new<D: Device>(
        options: &ModelOptions,
        ranks: &ModelRanks<D>,
    ) -> Result<Self, ModelError> {
        let group = ranks.tensor.as_ref();
        let this = group.map_or(Self::ALONE, |comm| Self {
            rank: comm.rank(),
            ranks: comm.world_size(),
        });
        if this.ranks != options.tensor_ranks {
            return Err(ModelError::from(format!(
                "the options of the model are for tensor parallelism over {} ranks, and it runs over {}: set ModelOptions::tensor_ranks to the ranks of ModelRanks::tensor",
                options.tensor_ranks, this.ranks
            )));
        }
        Ok(this)
    }

    /// Without tensor parallelism.
    pub(crate) const ALONE: Self = Self { rank: 0, ranks: 1 };

    /// Whether it adds what is the same on all ranks to sums over them: biases, positions, losses,
    /// and the residual stream.
    pub(crate) fn is_first(self) -> bool {
        self.rank == 0
    }

    /// The tokens of this rank's part of a vocabulary.
    pub(crate) fn vocab(self, vocab: usize) -> VocabPart {
        let len = vocab.div_ceil(self.ranks);
        let first = (self.rank * len).min(vocab);
        VocabPart {
            first,
            len: len.min(vocab - first),
        }
    }

    /// The places of tokens in this rank's part of the vocabulary; [`IGNORED`] if they are in
    /// another.
    pub(crate) fn local_tokens(self, tokens: &[u32], vocab: usize) -> Vec<u32> {
        let part = self.vocab(vocab);
        tokens.iter().map(|&token| part.local(token)).collect()
    }

    /// [`local_tokens`](Self::local_tokens) of a batch.
    pub(crate) fn of_batch(self, batch: &Batch, vocab: usize) -> Cow<'_, [u32]> {
        match self.ranks {
            1 => Cow::Borrowed(&batch.inputs),
            _ => Cow::Owned(self.local_tokens(&batch.inputs, vocab)),
        }
    }

    /// This rank's part of units.
    pub(crate) fn units(self, units: Vec<UnitSpec>) -> Result<Vec<UnitSpec>, ModelError> {
        let part = TensorPart::new(self.rank as u64, self.ranks as u64)?;
        let units = units.iter().map(|unit| part.unit(unit, cut_of));
        Ok(units.collect::<Result<_, _>>()?)
    }
}

/// How a parameter of any architecture is cut.
fn cut_of(param: &ParamSpec) -> TensorCut {
    const BY_ROWS: [&str; 14] = [
        ".wte.weight",
        "embed_tokens.weight",
        "lm_head.weight",
        "attn.c_proj.weight",
        "mlp.c_proj.weight",
        ".c_fc.bias",
        ".q_proj.weight",
        ".k_proj.weight",
        ".v_proj.weight",
        ".q_proj.bias",
        ".k_proj.bias",
        ".v_proj.bias",
        ".gate_proj.weight",
        ".up_proj.weight",
    ];
    let is_any = |names: &[&str]| names.iter().any(|name| param.name.ends_with(name));
    let dim = |dim, blocks| TensorCut::Dim { dim, blocks };
    match () {
        // Queries, keys and values, each by heads.
        () if is_any(&[".c_attn.weight"]) => dim(1, 3),
        () if is_any(&[".c_attn.bias"]) => dim(0, 3),
        () if is_any(&[".c_fc.weight", ".o_proj.weight", ".down_proj.weight"]) => dim(1, 1),
        () if is_any(&BY_ROWS) || is_any(&[".gate_proj.bias", ".up_proj.bias"]) => dim(0, 1),
        () => TensorCut::Replicated,
    }
}

/// Elements that a rank of tensor parallelism sends to the others for one micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TensorElems {
    /// Of activations, in all-reduces.
    pub all_reduce: u64,
    /// Of gradients in fp32 that are sums over the ranks, in all-reduces.
    pub partial_sums: u64,
    /// Of activations, in reduce-scatters: with sequence parallelism.
    pub reduce_scatter: u64,
    /// Of activations, in all-gathers: with sequence parallelism, or the inputs of blocks if they are
    /// partitioned.
    pub all_gather: u64,
    /// Statistics of the loss in fp32, in all-gathers.
    pub statistics: u64,
}

/// The bytes of [`TensorElems`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TensorBytes {
    /// In all-reduces.
    pub all_reduce: u64,
    /// In reduce-scatters.
    pub reduce_scatter: u64,
    /// In all-gathers.
    pub all_gather: u64,
}

/// Bytes of an element in fp32.
const IN_FP32: u64 = size_of::<f32>() as u64;

impl TensorElems {
    /// The bytes, with activations of `elem_bytes` bytes.
    pub fn bytes(self, elem_bytes: u64) -> TensorBytes {
        TensorBytes {
            all_reduce: self.all_reduce * elem_bytes + self.partial_sums * IN_FP32,
            reduce_scatter: self.reduce_scatter * elem_bytes,
            all_gather: self.all_gather * elem_bytes + self.statistics * IN_FP32,
        }
    }
}

impl TensorBytes {
    /// Of all collectives.
    pub fn total(self) -> u64 {
        self.all_reduce + self.reduce_scatter + self.all_gather
    }
}

/// Sums over ranks, each of all rows of the residual stream, and gathers of them.
struct Rows {
    sums: u64,
    gathers: u64,
}

impl Rows {
    /// Those of a model of `layers` blocks.
    ///
    /// A block has two sums in its forward and two in its backward; embedding and head have one each.
    /// With sequence parallelism the input of each first matrix is gathered, and in backward again
    /// (on the host only if it is not there from the repeated forward), as is the gradient of each
    /// second matrix's output. A repeated forward needs no sum of the block's output.
    fn of(options: &ModelOptions, layers: u64, on_gpu: bool) -> Self {
        let repeats = u64::from(options.activation_checkpointing);
        let has_inputs = options.activation_checkpointing && !on_gpu;
        let [again, inputs] = [2 * repeats, if has_inputs { 0 } else { 2 }];
        Self {
            sums: (4 + repeats) * layers + 2,
            gathers: match options.sequence_parallel {
                true => (2 + again + inputs + 2) * layers + 2,
                false => 0,
            },
        }
    }
}

impl ModelConfig {
    /// The elements that a rank of tensor parallelism sends for one micro-batch, of a model on the host
    /// or on a GPU. Exact if the ranks divide the elements of a block's input. The options must be valid for
    /// the configuration.
    pub fn tensor_elems(&self, options: &ModelOptions, on_gpu: bool) -> TensorElems {
        let ranks = options.tensor_ranks as u64;
        let tokens = options.tokens() as u64;
        let row = tokens * self.hidden() as u64;
        let layers = self.layers() as u64;
        let Rows { sums, gathers } = Rows::of(options, layers, on_gpu);
        let partial = self.partial_elems(options, on_gpu) * layers + self.final_norm_elems(options);
        let whole = match on_gpu && options.offload_activations {
            true => crate::decoder::gpu::RING as u64,
            false => crate::decoder::part_rows::RING as u64,
        };
        let inputs = match options.partition_activations {
            true => (layers + 1).saturating_sub(whole),
            false => 0,
        };
        let of_rows = (ranks - 1) * row * sums / ranks;
        let (all_reduce, reduce_scatter) = match options.sequence_parallel {
            true => (0, of_rows),
            false => (2 * of_rows, 0),
        };
        TensorElems {
            all_reduce,
            partial_sums: 2 * (ranks - 1) * partial / ranks,
            reduce_scatter,
            all_gather: (ranks - 1) * row * (gathers + inputs) / ranks,
            statistics: (ranks - 1) * tokens * STATISTICS as u64,
        }
    }

    /// Gradients of a block that are sums over the ranks: of the norms of heads, and with sequence
    /// parallelism of all norms; a GPT-2 on a GPU sums those of the biases before norms with them.
    fn partial_elems(&self, options: &ModelOptions, on_gpu: bool) -> u64 {
        let elems = match self {
            Self::Gpt2(config) if on_gpu && options.sequence_parallel => {
                crate::gpt2::gpu::PARTIAL_SUMS * config.n_embd
            }
            Self::Gpt2(config) => crate::gpt2::partial_elems(config, options),
            Self::Llama(config) => crate::llama::partial_elems(config, options),
        };
        elems as u64
    }

    /// Those of the head.
    fn final_norm_elems(&self, options: &ModelOptions) -> u64 {
        let elems = match (options.sequence_parallel, self) {
            (false, _) => 0,
            (true, Self::Gpt2(config)) => 2 * config.n_embd,
            (true, Self::Llama(config)) => config.hidden,
        };
        elems as u64
    }

    /// The part of each unit on one of `ranks` ranks of tensor parallelism: of the same sizes on all.
    ///
    /// # Errors
    /// As [`Self::check_tensor_ranks`].
    pub fn units_of_part(&self, ranks: usize) -> Result<Vec<UnitSpec>, ModelError> {
        self.check_tensor_ranks(ranks)?;
        TensorRank { rank: 0, ranks }.units(self.units())
    }

    /// How tensor parallelism cuts a parameter.
    pub fn tensor_cut(&self, param: &ParamSpec) -> TensorCut {
        cut_of(param)
    }

    /// Checks that tensor parallelism over `ranks` ranks can cut the model.
    ///
    /// # Errors
    /// Heads, keys' heads or the inner width of the MLP are not divisible, or the vocabulary is too
    /// small.
    pub fn check_tensor_ranks(&self, ranks: usize) -> Result<(), ConfigError> {
        let [heads, kv_heads, inner] = match self {
            Self::Gpt2(config) => [
                ("n_head", config.n_head),
                ("n_head", config.n_head),
                ("n_inner", config.n_inner),
            ],
            Self::Llama(config) => [
                ("num_attention_heads", config.heads),
                ("num_key_value_heads", config.kv_heads),
                ("intermediate_size", config.intermediate),
            ],
        };
        if ranks == 0 {
            return Err(ConfigError::Zero("tensor parallelism"));
        }
        let divisor = ("tensor parallelism", ranks);
        check_divides(heads, divisor)?;
        check_divides(kv_heads, divisor)?;
        check_divides(inner, divisor)?;
        let vocab = self.vocab_size();
        let last = TensorRank {
            rank: ranks - 1,
            ranks,
        };
        match last.vocab(vocab).len {
            0 => Err(ConfigError::DoesNotDivide {
                what: "vocab_size",
                size: vocab,
                by: "tensor parallelism",
                divisor: ranks,
            }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use zero_trainer::IGNORED;

    use super::*;

    /// Each kind of parameter of each preset, by hand.
    #[test]
    fn parameters_are_cut_as_megatron_does() {
        let cut = |name: &str| cut_of(&ParamSpec::new(name, [1, 1]));
        let h = "transformer.h.3.";
        let l = "model.layers.3.";
        for (name, dim, blocks) in [
            (format!("{h}attn.c_attn.weight"), 1, 3),
            (format!("{h}attn.c_attn.bias"), 0, 3),
            (format!("{h}attn.c_proj.weight"), 0, 1),
            (format!("{h}mlp.c_fc.weight"), 1, 1),
            (format!("{h}mlp.c_fc.bias"), 0, 1),
            (format!("{h}mlp.c_proj.weight"), 0, 1),
            ("transformer.wte.weight".into(), 0, 1),
            ("lm_head.weight".into(), 0, 1),
            ("model.embed_tokens.weight".into(), 0, 1),
            (format!("{l}self_attn.q_proj.weight"), 0, 1),
            (format!("{l}self_attn.v_proj.bias"), 0, 1),
            (format!("{l}self_attn.o_proj.weight"), 1, 1),
            (format!("{l}mlp.gate_proj.weight"), 0, 1),
            (format!("{l}mlp.up_proj.bias"), 0, 1),
            (format!("{l}mlp.down_proj.weight"), 1, 1),
        ] {
            assert_eq!(cut(&name), TensorCut::Dim { dim, blocks }, "{name}");
        }
        for name in [
            "transformer.wpe.weight",
            "transformer.ln_f.weight",
            "transformer.h.0.attn.c_proj.bias",
            "transformer.h.0.mlp.c_proj.bias",
            "model.norm.weight",
            "model.layers.0.self_attn.o_proj.bias",
            "model.layers.0.self_attn.q_norm.weight",
            "model.layers.0.mlp.down_proj.bias",
        ] {
            assert_eq!(cut(name), TensorCut::Replicated, "{name}");
        }
    }

    #[test]
    fn vocabulary_is_covered_once() {
        for (vocab, ranks) in [(7, 1), (7, 2), (7, 3), (256, 4), (50257, 8)] {
            let parts = (0..ranks).map(|rank| TensorRank { rank, ranks }.vocab(vocab));
            let tokens: Vec<_> = parts
                .flat_map(|part| part.first..part.first + part.len)
                .collect();
            assert_eq!(tokens, (0..vocab).collect::<Vec<_>>());
        }
        let second = TensorRank { rank: 1, ranks: 2 };
        assert_eq!(
            second.local_tokens(&[0, 3, 4, 6], 7),
            [IGNORED, IGNORED, 0, 2]
        );
    }

    #[test]
    fn sizes_that_do_not_divide_are_named() {
        let config = ModelConfig::preset("smollm2-135m").unwrap();
        config.check_tensor_ranks(3).unwrap();
        let error = config.check_tensor_ranks(2).unwrap_err().to_string();
        assert!(error.contains("num_attention_heads 9"), "{error}");
        let nano = ModelConfig::preset("nano").unwrap();
        nano.check_tensor_ranks(2).unwrap();
        let error = nano.check_tensor_ranks(0).unwrap_err().to_string();
        assert!(error.contains("tensor parallelism is 0"), "{error}");
    }
}
