//! The inputs of a pass on CUDA: kernels, stream, parameters, batch and ranks.

use std::ops::Range;

use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::{AnySlice, DeviceSlice};
use zero_trainer::Grad;

use super::sequence_group::SequenceGroup;
use super::slices::{HeadSlices, ScratchSlices};
use crate::cuda::attention::Masks;
use crate::cuda::cross_entropy::stride_elems;
use crate::cuda::dropout::Dropout;
use crate::cuda::embedding::TokenLists;
use crate::cuda::matmul::{Matmul, Product};
use crate::cuda::norm::Norm;
use crate::cuda::rope::Angles;
use crate::cuda::{OpError, OpKernels, SumOut};
use crate::decoder::config::DecoderConfig;
use crate::decoder::params::ParamRanges;
use crate::decoder::sequence_part::{Exchanges, SequencePart};
use crate::decoder::tensor_group::TensorGroup;
use crate::ops::Span;
use crate::ops::sequence::HeadExchange;
use crate::tensor::TensorRank;

/// The inputs of the operations of a pass.
#[derive(Clone, Copy)]
pub(crate) struct PassContext<'a> {
    pub(crate) ops: &'a Ops,
    pub(crate) stream: &'a CudaStream,
    pub(crate) s: &'a ScratchSlices,
    pub(crate) p: Flat<'a>,
    /// The block of the pass, from 0.
    pub(crate) layer: usize,
    pub(crate) lists: TokenLists,
    /// The starts of documents of this rank's tokens.
    pub(crate) documents: Option<DeviceSlice<u32>>,
    /// Those of all tokens of the sequences.
    pub(super) whole_documents: Option<DeviceSlice<u32>>,
    /// The keys of dropout, unless the batch drops nothing.
    pub(crate) keys: Option<DeviceSlice<u32>>,
    pub(crate) table: DeviceSlice<f32>,
    /// The ranks that have the other parts of the parameters.
    pub(crate) tensor: Option<&'a TensorGroup<CudaDevice>>,
    pub(super) part: SequencePart,
    pub(super) exchanges: &'a Exchanges,
    /// `None` if the rank has all tokens of its sequences.
    pub(super) group: Option<&'a SequenceGroup>,
}

impl PassContext<'_> {
    /// Whether this rank adds what is the same on all ranks to sums over them.
    pub(crate) fn is_first(&self) -> bool {
        self.tensor_rank().is_first()
    }

    /// This rank of tensor parallelism.
    pub(super) fn tensor_rank(&self) -> TensorRank {
        self.tensor.map_or(TensorRank::ALONE, |tensor| tensor.rank)
    }

    /// Sums `values` over the ranks of tensor parallelism, in place.
    pub(crate) fn sum(&self, values: AnySlice) -> Result<(), OpError> {
        match self.tensor {
            Some(tensor) => Ok(tensor.sum(self.stream, values)?),
            None => Ok(()),
        }
    }

    /// A norm with these parameters, gain and bias.
    pub(super) fn norm(&self, config: &DecoderConfig, [gain, bias]: [AnySlice; 2]) -> Norm {
        Norm {
            kind: config.norm,
            gain,
            bias,
            eps: config.eps,
        }
    }

    /// The last norm, in a pass of the head.
    pub(super) fn last_norm(&self, config: &DecoderConfig) -> Norm {
        let params = self.p.params[0];
        self.norm(
            config,
            self.p.ranges.norm.clone().map(|range| params.slice(range)),
        )
    }

    /// The head's norm of the own rows.
    pub(super) fn own_head(&self, head: &HeadSlices) -> HeadSlices {
        HeadSlices {
            out: self.own(head.out),
            stats: head.stats,
        }
    }

    /// This rank's tokens of each sequence.
    pub(crate) fn span(&self) -> Span {
        self.part.span(self.exchanges.qkv.seq)
    }

    /// The dropout of the operation `site` with this probability, over this rank's tokens.
    pub(crate) fn dropout(&self, probability: f32, site: u32) -> Option<Dropout> {
        let dropout = Dropout::new(self.keys?, probability, site)?;
        Some(dropout.from_line(self.span().first))
    }

    /// The masks of attention.
    pub(crate) fn masks(&self, probability: f32, site: u32) -> Masks {
        let HeadExchange { heads, seq, .. } = self.exchanges.qkv;
        let before = self.tensor_rank().rank * heads * seq;
        let first = before + self.part.first_line(heads, seq);
        let dropout = self
            .keys
            .and_then(|keys| Dropout::new(keys, probability, site));
        Masks {
            starts: self.whole_documents,
            dropout: dropout.map(|dropout| dropout.from_line(first)),
        }
    }

    /// The angles of the positions of this rank's tokens.
    pub(crate) fn angles(&self) -> Angles {
        Angles {
            table: self.table,
            starts: self.documents,
            span: self.span(),
        }
    }

    /// The angles of the positions of all tokens.
    pub(super) fn angles_of_sequences(&self) -> Angles {
        Angles {
            table: self.table,
            starts: self.whole_documents,
            span: Span::whole(self.exchanges.qkv.seq),
        }
    }
}

/// Kernels and libraries of the passes.
pub(crate) struct Ops {
    pub(crate) kernels: OpKernels,
    pub(crate) matmul: Matmul,
    pub(super) device: CudaDevice,
}

impl From<Grad> for SumOut {
    fn from(grad: Grad) -> Self {
        match grad {
            Grad::Add(sums) => Self::Add(sums),
            Grad::Write(grad) => Self::Write(grad),
        }
    }
}

/// A product whose result is a gradient.
pub(super) fn onto_grad(product: Product, grad: Grad) -> Product {
    match grad {
        Grad::Add(_) => product.onto_out(),
        Grad::Write(_) => product,
    }
}

/// The flat parameters of a pass, and its flat gradients, of the units that it reads.
#[derive(Clone, Copy)]
pub(crate) struct Flat<'a> {
    pub(super) ranges: &'a ParamRanges,
    pub(super) params: &'a [AnySlice],
    pub(super) grads: &'a [Grad],
}

impl Flat<'_> {
    /// The unit and range of the head's matrix `[vocab, c]`; if tied, the embedding's. If the flat
    /// parameter is long enough, the range is extended to `stride_elems(vocab)` rows, because
    /// products of round sizes are faster. The logits of the added rows are ignored and their
    /// gradient is 0. For GPT-2's 50257 tokens these are 47 rows of the position embedding.
    pub(super) fn head_matrix(&self, vocab: usize, c: usize) -> (usize, Range<usize>) {
        let (read, all) = match self.params.len() {
            1 => (0, &self.ranges.head),
            _ => (1, &self.ranges.tokens),
        };
        // Behind the rows of the vocabulary may be padding of tensor parallelism.
        let own = all.start..all.start + vocab * c;
        let round = own.start..own.start + stride_elems(vocab) * c;
        (
            read,
            if round.end <= self.params[read].len() {
                round
            } else {
                own
            },
        )
    }
}
