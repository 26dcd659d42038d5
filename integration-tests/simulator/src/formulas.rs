//! Seconds of the passes of a transformer and of the collectives of its shards.
//!
//! Each formula is a roofline of the machine's peaks times the [`Efficiencies`]. Elements have 2 bytes
//! on a GPU and 4 on a host. The forms were compared on 431 published step times
//! (`tests/published.rs`), that of the host on runs of our trainer.

use crate::{Efficiencies, Machine};

/// Seconds of a kernel beyond its work: its ramp-up and its tail.
const KERNEL_S: f64 = 4e-6;
/// Rows and columns of the tile of a product that one streaming multiprocessor computes at a time.
const TILE: f64 = 128.0;
/// Rows of scores that a host's attention computes at a time.
const HOST_ROWS: f64 = 64.0;

/// Sizes of a transformer and its sequences.
///
/// Sizes of 0 are no error: the seconds computed from them may be infinite or not a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Blocks.
    pub layers: u64,
    /// Elements of a token's hidden state.
    pub width: u64,
    /// Heads of queries.
    pub heads: u64,
    /// Heads of keys and values.
    pub kv_heads: u64,
    /// Elements between the two products of the feed-forward part.
    pub ffn: u64,
    /// Whether the feed-forward part has a gate, as Llama's, and separate output weights.
    pub gated: bool,
    /// Tokens of the vocabulary.
    pub vocab: u64,
    /// Tokens of a sequence.
    pub seq: u64,
    /// Ranks that share each sequence (DeepSpeed-Ulysses): they divide its tokens, and the heads of
    /// attention. At least 1.
    pub sequence_ranks: u64,
    /// Parameters of the whole model.
    pub params: u64,
    /// Adapters; the rest is then frozen.
    pub adapters: Option<Adapters>,
}

/// Low-rank adapters of a block's linear layers (LoRA).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adapters {
    /// Their rank.
    pub r: u64,
    /// Layers of a block that have one.
    pub modules: u64,
    /// The inputs and outputs of those layers, added.
    pub widths: u64,
}

/// Facts about the training software. They are not fitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Software {
    /// The attention kernels.
    pub attention: Attention,
    /// Whether sharded gradients are reduced in 32 bits instead of 16.
    pub wide_reduce: bool,
    /// Whether the products of the blocks are computed in 8 bits, at twice the peak.
    pub fp8: bool,
    /// Whether the backward pass of a block computes its forward pass again.
    pub recompute: bool,
}

/// Attention kernels, and the rest of a block that comes with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// One causal kernel that keeps the scores on chip (FlashAttention-2).
    Flash,
    /// Products, a softmax and dropout over all scores, which are in memory
    /// (Megatron-DeepSpeed).
    Plain,
    /// One causal kernel; biases, residuals and GELU in the products' own kernels; gradients written
    /// into the buffers that are reduced (our trainer).
    Fused,
    /// Products and softmax over the causal blocks of scores, in 32 bits (our trainer on the host).
    Host {
        /// Whether each pass first converts its parameters from 16 bits.
        upcasts: bool,
    },
}

/// Seconds of the passes of one micro-batch: `[forward, backward]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PassSeconds {
    /// The embedding.
    pub embedding: [f64; 2],
    /// One block.
    pub block: [f64; 2],
    /// The output product and the loss.
    pub head: [f64; 2],
}

/// The inputs of pass times.
#[derive(Clone, Copy, Debug)]
pub struct Costs<'a> {
    /// The GPU.
    pub machine: &'a Machine,
    /// The model.
    pub shape: &'a Shape,
    /// The software.
    pub software: &'a Software,
    /// The parts of the GPU's peaks that the software reaches.
    pub efficiencies: &'a Efficiencies,
}

/// Figures of the kernels of an [`Attention`], each `[forward, backward]`.
pub(crate) struct Kernels {
    /// Bytes of a block's elementwise operations, per token and element of the width.
    block_bytes: [f64; 2],
    /// Launches of a block.
    pub(crate) launches: [f64; 2],
    /// Bytes of the loss, per token and logit.
    loss_bytes: [f64; 2],
}

impl Attention {
    pub(crate) fn kernels(self) -> Kernels {
        match self {
            // Forward: norms 2x4, residuals 2x6, GELU 16. Backward: norms 2x10, residuals 2x6,
            // GELU 24, gradients of biases 18. Loss: cross entropy in 32 bits of 16-bit logits.
            Self::Flash => Kernels {
                block_bytes: [36.0, 74.0],
                launches: [16.0, 32.0],
                loss_bytes: [14.0, 14.0],
            },
            // Forward: norms 2x4, the addends of two products 2x2, GELU's input 8. Backward: norms
            // 2x8, gradients of biases 18, GELU's input 8. Loss: logits read and overwritten once.
            Self::Fused => Kernels {
                block_bytes: [20.0, 42.0],
                launches: [7.0, 14.0],
                loss_bytes: [4.0, 0.0],
            },
            // Forward: norms 2x8, biases of queries, keys and values 24, transposed keys 8, residuals
            // 2x8, GELU 48. Backward: norms 2x20, gradients of biases 36, GELU 48, operands of weight
            // gradients transposed 56, sums of attention's output 8. Loss: three passes over logits.
            Self::Host { .. } => Kernels {
                block_bytes: [112.0, 188.0],
                launches: [10.0, 24.0],
                loss_bytes: [0.0, 20.0],
            },
            // And masks of dropout and permutations. Loss: Megatron's, of separate kernels.
            Self::Plain => Kernels {
                block_bytes: [42.0, 84.0],
                launches: [24.0, 48.0],
                loss_bytes: [38.0, 22.0],
            },
        }
    }
}

impl Shape {
    /// Parameters outside of the blocks: `vocab width` and `seq width` of positions, or with a gate
    /// `2 vocab width`. They are one unit of the shards, the embedding's.
    pub fn embedding_params(&self) -> f64 {
        let width = self.width as f64;
        let vocab = self.vocab as f64;
        let others = if self.gated { vocab } else { self.seq as f64 };
        width * (vocab + others)
    }

    /// Tokens of a sequence that a rank has.
    pub fn rank_tokens(&self) -> u64 {
        self.seq / self.sequence_ranks.max(1)
    }

    /// Elements of one sequence that a rank exchanges with those that share it, the mean of those
    /// before attention (queries, keys and values) and behind it.
    pub(crate) fn exchange_elems(&self) -> u64 {
        let of_token = self.width as f64 + self.kv_width();
        (of_token * self.rank_tokens() as f64) as u64
    }

    /// Elements of a token's keys, and of its values.
    fn kv_width(&self) -> f64 {
        (self.width as f64 * self.kv_heads as f64 / self.heads as f64).floor()
    }

    /// Parameters of one block: an equal part of those that the embedding does not have.
    pub fn block_params(&self) -> f64 {
        (self.params as f64 - self.embedding_params()) / self.layers as f64
    }

    /// Columns and rows of the weights of a block's products: queries, keys and values in one,
    /// attention's output, and the two of the feed-forward part.
    fn weights(&self) -> [(f64, f64); 4] {
        let width = self.width as f64;
        let kv = self.kv_width();
        let ffn = self.ffn as f64;
        let ffn_in = if self.gated { 2.0 * ffn } else { ffn };
        [
            (width + 2.0 * kv, width),
            (width, width),
            (ffn_in, width),
            (width, ffn),
        ]
    }
}

impl Costs<'_> {
    /// Seconds of the passes of a micro-batch of `micro_batch` sequences. `sharded`: gradients are
    /// sharded (stages 1 to 3).
    pub fn passes(&self, micro_batch: u64, sharded: bool) -> PassSeconds {
        PassSeconds {
            embedding: self.embedding(micro_batch),
            block: self.block(micro_batch, sharded),
            head: self.head(micro_batch),
        }
    }

    /// Seconds of the embedding: 8 bytes of traffic per token and element of the width; on a host 12
    /// and 16.
    pub fn embedding(&self, micro_batch: u64) -> [f64; 2] {
        if let Attention::Host { .. } = self.software.attention {
            let elements = self.tokens(micro_batch) * self.shape.width as f64;
            let parameters = self.upcast(self.shape.embedding_params());
            return [12.0, 16.0].map(|bytes| bytes * elements / self.elementwise() + parameters);
        }
        let seconds = 8.0 * self.tokens(micro_batch) * self.shape.width as f64 / self.memory();
        match self.shape.adapters {
            Some(_) => [seconds, 0.0],
            None => [seconds, seconds],
        }
    }

    /// Seconds of a block: its products, attention and elementwise operations, and not less than
    /// the host needs to launch them.
    ///
    /// - Each forward product `(T, n, k)` has two in the backward pass, `(T, k, n)` and `(n, k, T)`.
    /// - A sharded gradient is copied into a flat buffer and divided before it is reduced (PyTorch's
    ///   FSDP): 8 bytes per parameter, 18 if the reduction has 32 bits.
    /// - Frozen parameters have no second product in the backward pass. An adapter has two products of
    ///   its rank forward, and backward the first again and four more.
    /// - The two bounds, GPU and host, are joined as `(gpu^4 + host^4)^(1/4)`. The host launches
    ///   backward kernels in half the time, because C++ launches them.
    /// - On a host a product adds to a gradient, and recomputation leaves out the last product.
    /// - Recomputation adds the forward pass; with flash attention without its last product, whose
    ///   output the backward pass does not read (PyTorch's early stop).
    pub fn block(&self, micro_batch: u64, sharded: bool) -> [f64; 2] {
        let tokens = self.tokens(micro_batch);
        let weights = self.shape.weights();
        let speedup = if self.software.fp8 { 2.0 } else { 1.0 };
        let peak = speedup * self.machine.peak_flops;
        let kernels = self.software.attention.kernels();
        let elements = tokens * self.shape.width as f64;

        let [mut forward, mut backward] = self.attention(micro_batch);
        forward += kernels.block_bytes[0] * elements / self.elementwise();
        backward += kernels.block_bytes[1] * elements / self.elementwise();
        for (n, k) in weights {
            forward += self.product(peak, [tokens, n, k], 1.0);
            backward += self.product(peak, [tokens, k, n], 1.0);
            backward += self.weight_gradient(peak, [n, k, tokens]);
        }
        if let Some(adapters) = &self.shape.adapters {
            let modules = adapters.modules as f64;
            let width = adapters.widths as f64 / (2.0 * modules);
            let r = adapters.r as f64;
            let down = self.product(peak, [tokens, r, width], modules);
            let up = self.product(peak, [tokens, width, r], modules);
            let gradient = self.product(peak, [r, width, tokens], modules);
            forward += down + up;
            backward += 2.0 * down + up + 2.0 * gradient;
        }
        let copies_grads = matches!(self.software.attention, Attention::Flash | Attention::Plain);
        if sharded && copies_grads {
            let bytes = if self.software.wide_reduce { 18.0 } else { 8.0 };
            let params: f64 = weights.iter().map(|(n, k)| n * k).sum();
            backward += bytes * params / self.memory();
        }

        if let Attention::Host { .. } = self.software.attention {
            let parameters = self.upcast(self.shape.block_params());
            forward += parameters;
            backward += parameters;
            if self.software.recompute {
                // All but the last product and its residual.
                let [.., (n, k)] = weights;
                let residual = 8.0 * elements / self.elementwise();
                backward += forward - self.product(peak, [tokens, n, k], 1.0) - residual;
            }
            return [forward, backward];
        }

        let launch_s = self.efficiencies.launch_us * 1e-6;
        let forward = smooth_max(forward, kernels.launches[0] * launch_s);
        let mut backward = smooth_max(backward, kernels.launches[1] * 0.5 * launch_s);
        if self.software.recompute {
            let [.., (n, k)] = weights;
            backward += match self.software.attention {
                Attention::Flash => forward - self.product(peak, [tokens, n, k], 1.0),
                Attention::Plain | Attention::Fused | Attention::Host { .. } => forward,
            };
        }
        [forward, backward]
    }

    /// Seconds of the output product, in 16 bits also where blocks use 8, and of the loss. On a host
    /// both are in the backward pass.
    pub fn head(&self, micro_batch: u64) -> [f64; 2] {
        let tokens = self.tokens(micro_batch);
        let vocab = self.shape.vocab as f64;
        let width = self.shape.width as f64;
        let peak = self.machine.peak_flops;
        let [forward_bytes, backward_bytes] = self.software.attention.kernels().loss_bytes;
        let logits_s = tokens * vocab / self.elementwise();

        let mut forward = self.product(peak, [tokens, vocab, width], 1.0);
        let mut backward = self.product(peak, [tokens, width, vocab], 1.0)
            + self.weight_gradient(peak, [vocab, width, tokens]);
        if let Attention::Host { .. } = self.software.attention {
            backward += forward + self.upcast(width * vocab);
            forward = 0.0;
        }
        [
            forward + forward_bytes * logits_s,
            backward + backward_bytes * logits_s,
        ]
    }

    /// Seconds of the optimizer on `elements` parameters, those of this rank's shard: 36 bytes of
    /// each. It reads a parameter, a gradient and two moments of 32 bits and writes all but the
    /// gradient; 8 bytes are for casts and for zeroing.
    pub fn optimizer(&self, elements: f64) -> f64 {
        36.0 * elements / self.memory()
    }

    /// Seconds of the sums of the passes of a micro-batch over `ranks` ranks of tensor parallelism in a
    /// node: all-reduces of each block's output, two in each forward and backward pass of a block, and
    /// one in those of the embedding and of the head. The passes wait for them.
    pub fn tensor_sums(&self, micro_batch: u64, ranks: u64) -> f64 {
        let of_block = if self.software.recompute { 6.0 } else { 4.0 };
        let sums = of_block * self.shape.layers as f64 + 4.0;
        let bytes = 2.0 * self.tokens(micro_batch) * self.shape.width as f64;
        sums * 2.0 * ring(bytes, ranks, 1, self.machine, self.efficiencies)
    }

    /// Seconds of attention between its products with weights.
    ///
    /// - Flash: `2 T (seq + 128) width` operations of the causal half; the tile on the diagonal is
    ///   computed whole. Backward 3 times: 2.5 times the operations at .83 of the rate.
    /// - Host: the same operations in blocks of 64 rows, 2.5 times as many backward, and for the
    ///   softmax 16 bytes a score forward and 32 backward.
    /// - Plain: two batched products of all scores, and per score 9 bytes forward (softmax 2+2,
    ///   dropout 2+2+1) and 11 backward (dropout 1+2+2, softmax 2+2+2).
    fn attention(&self, micro_batch: u64) -> [f64; 2] {
        let tokens = self.tokens(micro_batch);
        let seq = self.shape.seq as f64;
        let width = self.shape.width as f64;
        let heads = self.shape.heads as f64;
        let peak = self.machine.peak_flops;
        match self.software.attention {
            Attention::Flash | Attention::Fused => {
                let flops = 2.0 * tokens * (seq + TILE) * width;
                let seconds = flops / (peak * self.efficiencies.attention);
                [seconds + KERNEL_S, 3.0 * seconds + KERNEL_S]
            }
            Attention::Host { .. } => {
                let scores = tokens * 0.5 * (seq + HOST_ROWS) * heads;
                let flops = 4.0 * scores * width / heads;
                let seconds = flops / (peak * self.efficiencies.attention);
                let softmax_s = scores / self.elementwise();
                [seconds + 16.0 * softmax_s, 2.5 * seconds + 32.0 * softmax_s]
            }
            Attention::Plain => {
                let head_width = (width / heads).floor();
                let batch = micro_batch as f64 * heads / self.shape.sequence_ranks.max(1) as f64;
                let products = self.product(peak, [seq, seq, head_width], batch)
                    + self.product(peak, [seq, head_width, seq], batch);
                let scores_s = tokens * seq * heads / self.memory();
                [products + 9.0 * scores_s, 2.0 * products + 11.0 * scores_s]
            }
        }
    }

    /// Seconds of `batch` products of `[m, k]` and `[k, n]`: `sqrt(compute^2 + memory^2) + 4 us`.
    ///
    /// Compute runs at the part of the peak that the last wave of tiles and the padded edges leave; on a
    /// host at all of it, without the 4 us.
    fn product(&self, peak: f64, [m, n, k]: [f64; 3], batch: f64) -> f64 {
        let flops = 2.0 * m * n * k * batch;
        let elements = (m * k + k * n + m * n) * batch;
        let peak = peak * self.efficiencies.products;
        if let Attention::Host { .. } = self.software.attention {
            let bytes = 4.0 * elements;
            return (flops / peak + bytes / self.elementwise()).hypot(bytes / self.memory());
        }
        let tiles_m = (m / TILE).ceil();
        let tiles_n = (n / TILE).ceil();
        let tiles = tiles_m * tiles_n * batch;
        let waves = (tiles / self.machine.sms).ceil();
        let useful =
            tiles / (waves * self.machine.sms) * m / (tiles_m * TILE) * n / (tiles_n * TILE);

        let compute = flops / (peak * useful);
        compute.hypot(2.0 * elements / self.memory()) + KERNEL_S
    }

    /// Seconds of the product of a weight's gradient; 0 if it is frozen.
    fn weight_gradient(&self, peak: f64, [n, k, tokens]: [f64; 3]) -> f64 {
        match self.shape.adapters {
            Some(_) => 0.0,
            None => self.product(peak, [n, k, tokens], 1.0) + self.added(n * k),
        }
    }

    /// Seconds of the products of an orthogonalised matrix, of `flops` operations in all, which is
    /// read and written with `bytes`; a GPU has `launches`.
    pub(crate) fn orthogonalise(&self, flops: u64, bytes: u64, launches: u32) -> f64 {
        let compute = flops as f64 / (self.machine.peak_flops * self.efficiencies.products);
        let launches = match self.software.attention {
            Attention::Host { .. } => 0.0,
            _ => f64::from(launches) * KERNEL_S,
        };
        compute + bytes as f64 / self.memory() + launches
    }

    /// Seconds in which a host reads the `elements` of a gradient that a product adds to.
    fn added(&self, elements: f64) -> f64 {
        match self.software.attention {
            Attention::Host { .. } => 4.0 * elements / self.memory(),
            _ => 0.0,
        }
    }

    /// Seconds in which a host converts `parameters` from 16 bits, if it does: it reads 2 bytes of each
    /// and writes 4.
    fn upcast(&self, parameters: f64) -> f64 {
        match self.software.attention {
            Attention::Host { upcasts: true } => 6.0 * parameters / self.memory(),
            _ => 0.0,
        }
    }

    fn tokens(&self, micro_batch: u64) -> f64 {
        micro_batch as f64 * self.shape.rank_tokens() as f64
    }

    /// Bytes per second of elementwise operations: the memory's, or on a host those measured.
    fn elementwise(&self) -> f64 {
        let measured = self.machine.elementwise_bytes_per_s;
        measured.unwrap_or_else(|| self.memory())
    }

    /// Bytes per second of the memory that kernels reach.
    pub(crate) fn memory(&self) -> f64 {
        self.machine.memory_bytes_per_s * self.efficiencies.memory
    }
}

/// Seconds of a gather or a reduce-scatter of a buffer of `bytes` bytes, all shards together, by a
/// ring over `ranks` ranks on `nodes` nodes. An all-reduce takes twice as long; one rank, 0.
///
/// `8.4 us + (ranks - nodes) 3.4 us + (nodes - 1) 14 us + bytes (ranks - 1) / ranks / bandwidth`:
/// the latencies are NCCL's own constants of its ring with the Simple protocol. The bandwidth is .8
/// of the link's, and between nodes not more than .8 of the network's of all GPUs of a node.
pub fn ring(
    bytes: f64,
    ranks: u64,
    nodes: u64,
    machine: &Machine,
    efficiencies: &Efficiencies,
) -> f64 {
    if ranks <= 1 {
        return 0.0;
    }
    let nodes = nodes.clamp(1, ranks);
    let gpus_per_node = (ranks / nodes) as f64;
    let link = 0.8 * machine.link_bytes_per_s;
    let bandwidth = match nodes {
        1 => link,
        _ => {
            let network = machine.network_bytes_per_s * efficiencies.network;
            link.min(0.8 * gpus_per_node * network)
        }
    };

    let latency = 8.4e-6 + (ranks - nodes) as f64 * 3.4e-6 + (nodes - 1) as f64 * 14e-6;
    latency + bytes * (ranks - 1) as f64 / ranks as f64 / bandwidth
}

/// A smooth maximum of two bounds of a time.
fn smooth_max(gpu: f64, host: f64) -> f64 {
    (gpu.powi(4) + host.powi(4)).powf(0.25)
}

#[cfg(test)]
mod tests;
