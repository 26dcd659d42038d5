//! The traffic of tensor parallelism, and the models that it can cut.

use zero_shard::{ParamSpec, TensorCut, UnitSpec};
use zero_trainer::ModelError;

use crate::ModelConfig;
use crate::config::{ConfigError, check_divides};
use crate::decoder::{gpu, part_rows};
use crate::ops::cross_entropy::STATISTICS;
use crate::options::ModelOptions;
use crate::tensor::TensorRank;

/// Elements that a rank of tensor parallelism sends to the others for one micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TensorElems {
    /// Of activations, in all-reduces.
    pub all_reduce: u64,
    /// Of gradients in fp32 that are sums over the ranks, in all-reduces.
    pub partial_sums: u64,
    /// Of activations, in reduce-scatters: with sequence parallelism.
    pub reduce_scatter: u64,
    /// Of activations, in all-gathers: with sequence parallelism, or the inputs of blocks if they
    /// are partitioned.
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
struct RowTransfers {
    sums: u64,
    gathers: u64,
}

impl RowTransfers {
    /// Those of a model of `layers` blocks. `trains_embedding`: its gradient is computed.
    ///
    /// A block has two sums in its forward and two in its backward; embedding and head have one
    /// each. With sequence parallelism the input of each first matrix is gathered, and in backward
    /// again (on the host only if it is not there from the repeated forward), as is the gradient of
    /// each second matrix's output, and that of the embedding's output. A repeated forward needs no
    /// sum of the block's output.
    fn of(options: &ModelOptions, layers: u64, on_gpu: bool, trains_embedding: bool) -> Self {
        let repeats = u64::from(options.activation_checkpointing);
        let has_inputs = options.activation_checkpointing && !on_gpu;
        let of_embedding = u64::from(trains_embedding);
        let [again, inputs] = [2 * repeats, if has_inputs { 0 } else { 2 }];
        Self {
            sums: (4 + repeats) * layers + 1 + of_embedding,
            gathers: match options.sequence_parallel {
                true => (2 + again + inputs + 2) * layers + 1 + of_embedding,
                false => 0,
            },
        }
    }
}

impl ModelConfig {
    /// The elements that a rank of tensor parallelism sends for one micro-batch, of a model on the
    /// host or on a GPU. Exact if the ranks divide the elements of a block's input. The options
    /// must be valid for the configuration.
    pub fn tensor_elems(&self, options: &ModelOptions, on_gpu: bool) -> TensorElems {
        let ranks = options.tensor_ranks as u64;
        let tokens = options.tokens() as u64;
        let row = tokens * self.hidden() as u64;
        let layers = self.layers() as u64;
        let config = self.decoder();
        let trains_base = config.lora.is_none();
        let RowTransfers { sums, gathers } = RowTransfers::of(options, layers, on_gpu, trains_base);
        let of_block = match on_gpu {
            true => gpu::partial_elems(&config, options),
            false => config.partial_elems(options),
        };
        let of_head = match options.sequence_parallel && trains_base {
            true => config.norm.params() * config.width,
            false => 0,
        };
        let partial = of_block as u64 * layers + of_head as u64;
        let whole = match on_gpu && options.offload_activations {
            true => gpu::RING as u64,
            false => part_rows::RING as u64,
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

    /// The part of each unit on one of `ranks` ranks of tensor parallelism: of the same sizes on
    /// all.
    ///
    /// # Errors
    /// As [`Self::check_tensor_ranks`].
    pub fn units_of_part(&self, ranks: usize) -> Result<Vec<UnitSpec>, ModelError> {
        self.check_tensor_ranks(ranks)?;
        TensorRank { rank: 0, ranks }.units(&self.decoder())
    }

    /// How tensor parallelism cuts a parameter.
    pub fn tensor_cut(&self, param: &ParamSpec) -> TensorCut {
        self.decoder().cut_of(&param.name)
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
    use super::*;

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
