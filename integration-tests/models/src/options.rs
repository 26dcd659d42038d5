//! The sizes and choices of a model on a device, which its architecture does not set.

use zero_alloc::device::DType;
use zero_shard::LayoutOptions;
use zero_trainer::ModelError;

/// Maximum number of tokens of a micro-batch, so that no buffer size of a valid model overflows 64
/// bits.
const MAX_TOKENS: usize = 1 << 31;

/// Options of a model on a device.
#[derive(Clone, Debug)]
pub struct ModelOptions {
    /// Sequences of a micro-batch.
    pub micro_batch: usize,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Ranks that share each sequence, S: each has `seq_len` / S tokens of it, and a part of
    /// attention's heads. 1: each rank has its own sequences.
    pub sequence_ranks: usize,
    /// Ranks of tensor parallelism, M: each has a part of the parameters, of attention's heads and of
    /// the vocabulary. 1: each rank has all.
    pub tensor_ranks: usize,
    /// Whether each rank of tensor parallelism keeps 1/M of the inputs of checkpointed blocks (ZeRO-R's
    /// Pa); needs `activation_checkpointing`.
    pub partition_activations: bool,
    /// Whether each rank of tensor parallelism has 1/M of the tokens between its products: of the residual
    /// stream, of norms and of dropout (sequence parallelism, arXiv 2205.05198).
    pub sequence_parallel: bool,
    /// Type of the parameters.
    pub dtype: DType,
    /// Whether only the input of each block is kept, and the rest is recomputed in backward.
    pub activation_checkpointing: bool,
    /// Whether a GPU keeps those inputs in pinned host memory; needs `activation_checkpointing`. On
    /// the host it changes nothing, because the device's memory is the host's.
    pub offload_activations: bool,
    /// Whether matrix products on a GPU choose their algorithm by time, with choices kept in the
    /// user's folder: see [`Timing`](crate::cuda::matmul::Timing). Otherwise they use the library's
    /// first choice.
    pub matmul_timing: bool,
    /// Whether a GPU computes GELU's output again in backward, in place of `micro_batch` x
    /// `seq_len` x `n_inner` elements a block. In 16-bit types the gradient of the MLP's second
    /// matrix then has other low bits, because cuBLASLt's first output comes from an fp32 input and
    /// the second from the rounded one. With `activation_checkpointing` it changes nothing, and on
    /// the host neither.
    pub recompute_gelu: bool,
    /// Where parameters are in the flat parameter of their unit.
    pub layout: LayoutOptions,
}

/// Bytes of a model on a GPU, as it requests them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuBytes {
    /// Activations and their gradients on the device.
    pub activations: u64,
    /// The batch, the loss and the workspace of matrix products on the device.
    pub workspace: u64,
    /// Inputs of blocks in pinned host memory.
    pub host: u64,
}

impl ModelOptions {
    /// Options of a model on one rank that keeps all activations on the device, and whose matrix
    /// products use the library's first choice.
    pub fn new(micro_batch: usize, seq_len: usize, dtype: DType) -> Self {
        Self {
            micro_batch,
            seq_len,
            sequence_ranks: 1,
            tensor_ranks: 1,
            partition_activations: false,
            sequence_parallel: false,
            dtype,
            activation_checkpointing: false,
            offload_activations: false,
            matmul_timing: false,
            recompute_gelu: false,
            layout: LayoutOptions::default(),
        }
    }

    /// Checks the batch for a model of `positions` positions and these heads of queries and keys.
    ///
    /// # Errors
    /// Batch sizes outside the model's limits.
    pub(crate) fn validate(&self, positions: usize, heads: [usize; 2]) -> Result<(), ModelError> {
        if self.seq_len == 0 || self.seq_len > positions || self.micro_batch == 0 {
            return Err(ModelError::from(format!(
                "micro-batch {} x sequence {}: the model supports 1 to {positions} positions and needs at least one sequence",
                self.micro_batch, self.seq_len
            )));
        }

        if self
            .micro_batch
            .checked_mul(self.seq_len)
            .is_none_or(|tokens| tokens > MAX_TOKENS)
        {
            return Err(ModelError::from(format!(
                "micro-batch {} x sequence {}: a micro-batch can have at most {MAX_TOKENS} tokens",
                self.micro_batch, self.seq_len
            )));
        }

        self.check_sequence_ranks(heads)?;

        if self.partition_activations && (!self.activation_checkpointing || self.tensor_ranks < 2) {
            return Err(ModelError::from(
                "partitioned activations are the inputs of checkpointed blocks, in parts on the ranks of tensor parallelism: set activation checkpointing and tensor parallelism, too",
            ));
        }

        if self.sequence_parallel {
            self.check_sequence_parallel()?;
        }

        if self.offload_activations && !self.activation_checkpointing {
            return Err(ModelError::from(
                "offloaded activations are the inputs of checkpointed blocks: set activation checkpointing, too",
            ));
        }

        Ok(())
    }

    /// Checks that the ranks of a sequence can share its tokens and the heads.
    fn check_sequence_ranks(&self, [heads, kv_heads]: [usize; 2]) -> Result<(), ModelError> {
        let ranks = self.sequence_ranks;
        let refuse = |what: String| {
            Err(ModelError::from(format!(
                "{ranks} ranks cannot share a sequence (--ulysses {ranks}): {what}"
            )))
        };
        if ranks == 0 {
            return refuse("use 1 or more".to_owned());
        }
        if !self.seq_len.is_multiple_of(ranks) {
            let seq = self.seq_len;
            return refuse(format!(
                "they do not divide its {seq} tokens; use a sequence length that is a multiple of {ranks}"
            ));
        }
        if !heads.is_multiple_of(ranks) {
            return refuse(format!(
                "they do not divide the model's {heads} attention heads; use a divisor of {heads}"
            ));
        }
        if !kv_heads.is_multiple_of(ranks) && !ranks.is_multiple_of(kv_heads) {
            return refuse(format!(
                "the model has {kv_heads} heads of keys and values; use a divisor or a multiple of {kv_heads}"
            ));
        }
        Ok(())
    }

    /// Checks that the ranks of tensor parallelism can divide the tokens.
    fn check_sequence_parallel(&self) -> Result<(), ModelError> {
        let ranks = self.tensor_ranks;
        let tokens = self.tokens();
        if ranks < 2 {
            return Err(ModelError::from(
                "sequence parallelism divides tokens between the ranks of tensor parallelism (--sequence-parallel): set tensor parallelism, too",
            ));
        }
        if self.partition_activations {
            return Err(ModelError::from(
                "sequence parallelism keeps 1/M of the inputs of blocks, as partitioned activations do (--sequence-parallel, --partition-activations): set one of the two",
            ));
        }
        if !tokens.is_multiple_of(ranks) {
            return Err(ModelError::from(format!(
                "sequence parallelism (--sequence-parallel): {ranks} ranks of tensor parallelism do not divide the {tokens} tokens of a micro-batch; use a micro-batch or a sequence length that is a multiple of {ranks}"
            )));
        }
        Ok(())
    }

    /// Rows of the residual stream that this rank has.
    pub(crate) fn rows(&self) -> usize {
        match self.sequence_parallel {
            true => self.tokens() / self.tensor_ranks,
            false => self.tokens(),
        }
    }

    /// Tokens of a micro-batch that this rank computes.
    pub(crate) fn tokens(&self) -> usize {
        self.micro_batch * (self.seq_len / self.sequence_ranks)
    }
}
