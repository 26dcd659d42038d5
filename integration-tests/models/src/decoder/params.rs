//! The places of parameters in the flat parameters of units, and the inputs of a pass on the host.

use std::ops::Range;

use half::{bf16, f16};
use rayon::prelude::*;
use zero_alloc::device::{AnySlice, Cause, DType, DeviceError, Element};
use zero_kernels::{Float, host};
use zero_shard::{BlockFormat, Layout, ParamPlacement, ParamSpec, TensorCut, UnitLayout, UnitSpec};
use zero_trainer::{Batch, ModelError};

use super::block_params::BlockParams;
use super::config::DecoderConfig;
use crate::ModelOptions;
use crate::ops::bf16::Bf16Products;
use crate::ops::dropout::Draws;
use crate::ops::linear::Weight;
use crate::ops::rows_per_thread;
use crate::tensor::TensorRank;

/// The kinds of passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PassKind {
    Embedding,
    Block,
    Head,
}

/// The range of each parameter in the flat parameter of its unit; empty for those that the family
/// does not have.
pub(crate) struct ParamRanges {
    pub(crate) tokens: Range<usize>,
    pub(crate) positions: Range<usize>,
    pub(crate) block: BlockParams<Range<usize>>,
    /// The gain and the bias of the last norm.
    pub(crate) norm: [Range<usize>; 2],
    /// The matrix of an untied head.
    pub(crate) head: Range<usize>,
    /// Those of the linear layers of a block, in the order of [`DecoderConfig::linears`].
    pub(crate) adapters: [Vec<AdapterRanges>; 4],
}

/// The adapter of a module in the unit of its block's adapters.
pub(crate) struct AdapterRanges {
    pub(crate) a: Range<usize>,
    pub(crate) b: Range<usize>,
    /// The outputs of the linear layer that are the module's.
    pub(crate) outputs: Range<usize>,
    /// The number of the module in its block.
    pub(crate) place: u32,
    /// Places of A and B in a block's partial sums over the ranks of tensor parallelism; empty
    /// where each rank has the gradient itself.
    pub(crate) partial: [Range<usize>; 2],
}

impl AdapterRanges {
    /// The first of the rank's inputs among all of the module: of a second matrix the rank has
    /// some.
    pub(crate) fn first_input(&self, r: usize, tensor: TensorRank) -> usize {
        match self.partial[1].is_empty() {
            true => 0,
            false => tensor.rank * self.a.len() / r,
        }
    }
}

impl ParamRanges {
    /// The parameters of a pass that are not matrices, in the first unit that it reads: norms
    /// and biases.
    pub(crate) fn vectors(&self, kind: PassKind) -> Vec<Range<usize>> {
        let of = &self.block;
        match kind {
            PassKind::Embedding => Vec::new(),
            PassKind::Block => {
                let norms = [&of.norm1, &of.norm2].into_iter().flatten();
                let biases = [&of.qkv, &of.output, &of.up, &of.down].map(|[_, bias]| bias);
                norms.chain(biases).chain([&of.qk_norm]).cloned().collect()
            }
            PassKind::Head => self.norm.to_vec(),
        }
    }

    /// Those of a rank's `units`.
    ///
    /// # Errors
    /// Parameters that a pass reads as one are apart.
    pub(crate) fn new(
        config: &DecoderConfig,
        units: &[UnitSpec],
        options: &ModelOptions,
    ) -> Result<Self, ModelError> {
        let layout = Layout::with_options(units, 1, options.layout.clone())?;
        let (adapted, units) = layout.units().split_at(config.adapter_units());
        let mut end = 0;
        let adapters = config
            .cut(options.tensor_ranks)
            .adapters(0)
            .map(|adapters| {
                let ranges = adapters.into_iter().map(|adapter| {
                    let partial = [&adapter.a, &adapter.b].map(|param| {
                        let start = end;
                        if options.tensor_ranks > 1
                            && config.cut_of(&param.name) == TensorCut::Replicated
                        {
                            end += param.shape.iter().product::<u64>() as usize;
                        }
                        start..end
                    });
                    AdapterRanges {
                        outputs: adapter.outputs,
                        place: adapter.place,
                        a: range_of(adapted.first(), &[adapter.a]),
                        b: range_of(adapted.first(), &[adapter.b]),
                        partial,
                    }
                });
                ranges.collect()
            });
        let mut embeddings = config.embedding_params().into_iter();
        let [tokens, positions] = [(); 2].map(|()| embeddings.next());
        let [first, block, last] = [units.first(), units.get(1), units.last()];
        let norm = config.norm_params(config.names.norm);
        let block_params = config.block_params(0);
        let mut neighbours = Ok(());
        let block = block_params.map(|params| {
            if let Err(apart) = check_neighbours(block, &params) {
                neighbours = Err(apart);
            }
            range_of(block, &params)
        });
        neighbours?;
        Ok(Self {
            tokens: range_of(first, tokens.as_slice()),
            positions: range_of(first, positions.as_slice()),
            block,
            norm: norm.map(|params| range_of(last, &params)),
            head: range_of(last, config.head_matrix().as_slice()),
            adapters,
        })
    }
}

/// The elements of neighbouring parameters in their unit.
fn range_of(unit: Option<&UnitLayout>, params: &[ParamSpec]) -> Range<usize> {
    let mut found: Option<Range<usize>> = None;
    for placed in placed(unit, params) {
        let Range { start, end } = placed.range();
        let start = found.map_or(start as usize, |found| found.start);
        found = Some(start..end as usize);
    }
    found.unwrap_or_default()
}

/// The places of these parameters in their unit.
fn placed<'a>(
    unit: Option<&'a UnitLayout>,
    params: &'a [ParamSpec],
) -> impl Iterator<Item = &'a ParamPlacement> {
    let all = unit.into_iter().flat_map(|unit| &unit.params);
    all.filter(|placed| params.iter().any(|other| other.name == placed.name))
}

/// Checks that the layout has no gap between parameters that a pass reads as one.
fn check_neighbours(unit: Option<&UnitLayout>, params: &[ParamSpec]) -> Result<(), ModelError> {
    let mut end = None;
    for placed in placed(unit, params) {
        let start = placed.range().start;
        if end.is_some_and(|end| end != start) {
            return Err(ModelError::from(format!(
                "{} and the parameter before it are one matrix here, and have to be multiples of {} elements for state in \
                 blocks: choose other sizes, or --moments fp32",
                placed.name,
                BlockFormat::ALIGN_ELEMS
            )));
        }
        end = Some(placed.range().end);
    }
    Ok(())
}

/// Takes ranges of `flat` that do not overlap, in any order: cut units begin with what is cut.
pub(crate) fn split_ranges<'a>(flat: &'a mut [f32]) -> impl FnMut(Range<usize>) -> &'a mut [f32] {
    // The parts that are left, with their places.
    let mut left = vec![(0, flat)];
    move |range| {
        if range.is_empty() {
            return Default::default();
        }
        let is_in =
            |(at, part): &(usize, &mut [f32])| *at <= range.start && range.end <= at + part.len();
        // Without such a part the splits below panic.
        let found = left.iter().position(is_in).unwrap_or_default();
        let (at, part) = left.swap_remove(found);
        let (before, part) = part.split_at_mut(range.start - at);
        let (part, after) = part.split_at_mut(range.len());
        left.extend([(at, before), (range.end, after)]);
        part
    }
}

/// The flat parameter of a unit.
#[derive(Clone, Copy)]
pub(crate) enum FlatUnit<'a> {
    F32(&'a [f32]),
    /// For products in bf16. `vectors` has [`ParamRanges::vectors`] in fp32, at their places.
    Bf16 {
        elems: &'a [bf16],
        vectors: &'a [f32],
        products: Bf16Products,
    },
}

impl<'a> FlatUnit<'a> {
    /// A matrix.
    pub(crate) fn matrix(self, range: Range<usize>) -> Weight<'a> {
        match self {
            Self::F32(elems) => Weight::F32(&elems[range]),
            Self::Bf16 {
                elems, products, ..
            } => Weight::Bf16(&elems[range], products),
        }
    }

    /// A parameter of [`ParamRanges::vectors`].
    pub(crate) fn vector(self, range: Range<usize>) -> &'a [f32] {
        match self {
            Self::F32(elems) => &elems[range],
            Self::Bf16 { vectors, .. } => &vectors[range],
        }
    }
}

/// The flat parameters of a pass, of the units that it reads, and its inputs.
pub(crate) struct Flat<'a> {
    pub(crate) ranges: &'a ParamRanges,
    pub(crate) flats: Vec<FlatUnit<'a>>,
    /// The block of the pass, from 0.
    pub(crate) layer: usize,
    /// The architecture's constants.
    pub(crate) table: &'a [f32],
    /// The rank's tokens.
    pub(crate) batch: &'a Batch,
    /// The tokens of all ranks that share the sequences.
    pub(crate) whole: &'a Batch,
    /// Empty if nothing is dropped.
    pub(crate) draws: &'a Draws,
}

impl<'a> Flat<'a> {
    /// The head's matrix `[vocab, c]`, of `elems` elements, behind which may be padding of tensor
    /// parallelism; if tied, the embedding's.
    pub(crate) fn head_weight(&self, elems: usize) -> Weight<'a> {
        let (unit, first) = match self.flats[..] {
            [_, embedding, ..] => (embedding, self.ranges.tokens.start),
            [head] => (head, self.ranges.head.start),
            [] => return Weight::F32(&[]),
        };
        unit.matrix(first..first + elems)
    }
}

/// Writes `slice` to `out` in fp32, on all threads.
pub(crate) fn upcast(slice: AnySlice, out: &mut [f32]) -> Result<(), DeviceError> {
    fn from<T: Element + Float>(slice: AnySlice, out: &mut [f32]) -> Result<(), DeviceError> {
        // SAFETY: the model has checked that it is host memory apart from `out` and the gradients;
        // its maker promised ordered accesses.
        let src = unsafe { slice.typed::<T>()?.as_host() };
        let n = rows_per_thread(out.len());
        let parts = (out.par_chunks_mut(n), src.par_chunks(n)).into_par_iter();
        parts
            .try_for_each(|(out, src)| host::cast(src, out, 1.0))
            .map_err(|e| DeviceError::Operation {
                stream: String::new(),
                op: "upcast".to_owned(),
                cause: Cause::new(e),
            })
    }
    match slice.dtype() {
        DType::Bf16 => from::<bf16>(slice, out),
        _ => from::<f16>(slice, out),
    }
}
