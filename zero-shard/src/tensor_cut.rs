//! Tensor parallelism: the division of parameters among the tensor-parallel ranks.
//!
//! A model is divided in two steps. Tensor parallelism first gives each of its `M` ranks a
//! **part** of every parameter: all of a replicated one, a slice along one dimension of a cut one.
//! The units of a part are then laid out over the data-parallel ranks by a
//! [`Layout`](crate::Layout), as those of any model.
//!
//! ```text
//! [2, 12], cut along dimension 1 in 3 blocks, over 2 ranks (GPT-2's c_attn: q, k, v):
//!   whole      q q q q k k k k v v v v        rank 0   q q k k v v      rank 1   q q k k v v
//!              0 1 2 3 4 5 6 7 8 9 . .                 0 1 4 5 8 9               2 3 6 7 . .
//! [5, c], cut along dimension 0 in 1 block, over 2 ranks:
//!   rank 0     rows 0 1 2                     rank 1   rows 3 4 and a row of padding
//! ```

use std::ops::Range;

use crate::checked::{product, sum};
use crate::{ParamSpec, ShardError, UnitSpec};

/// The division of a parameter among tensor-parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case", deny_unknown_fields)
)]
pub enum TensorCut {
    /// Every rank has all of it.
    Replicated,
    /// Each rank has a slice of each block of one dimension.
    Dim {
        /// The dimension, by position in the shape.
        dim: usize,
        /// Equal blocks along the dimension, each of which is cut separately; at least 1. A single
        /// block that the ranks do not divide is padded at its end.
        blocks: u64,
    },
}

/// Contiguous elements of the part of a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TensorRun {
    /// Their range in the part, row-major.
    pub in_part: Range<u64>,
    /// Their range in the whole parameter; `None` if they are padding.
    pub in_whole: Option<Range<u64>>,
}

/// Contiguous elements of a whole parameter that one rank has.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TensorPiece {
    /// The tensor-parallel rank; rank 0 if all ranks have them.
    pub rank: u64,
    /// Their range in the rank's part, row-major.
    pub in_part: Range<u64>,
    /// Their range in the whole parameter.
    pub in_whole: Range<u64>,
}

/// One tensor-parallel rank's part of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorPart {
    rank: u64,
    ranks: u64,
}

impl TensorPart {
    /// The part of `rank` of `ranks` tensor-parallel ranks.
    ///
    /// # Errors
    /// `rank` is not below `ranks`.
    pub fn new(rank: u64, ranks: u64) -> Result<Self, ShardError> {
        if rank >= ranks {
            return Err(ShardError::UnknownRank {
                rank,
                world_size: ranks,
            });
        }
        Ok(Self { rank, ranks })
    }

    /// The part of `rank` where consecutive ranks have the `ranks` parts.
    pub(crate) const fn of_consecutive(rank: u64, ranks: u64) -> Self {
        let rank = rank % ranks;
        Self { rank, ranks }
    }

    /// The whole model: the only part of one rank.
    pub fn whole() -> Self {
        Self { rank: 0, ranks: 1 }
    }

    /// The tensor-parallel rank.
    pub fn rank(&self) -> u64 {
        self.rank
    }

    /// Number of tensor-parallel ranks.
    pub fn ranks(&self) -> u64 {
        self.ranks
    }

    /// The part of `unit`, with the names of the whole parameters: the cut parameters first, then
    /// the replicated ones, each in the order of the unit. With one rank, the unit itself.
    ///
    /// # Errors
    /// As [`TensorPart::shape`].
    pub fn unit(
        &self,
        unit: &UnitSpec,
        cut_of: impl Fn(&ParamSpec) -> TensorCut,
    ) -> Result<UnitSpec, ShardError> {
        let mut cut_params = Vec::with_capacity(unit.params.len());
        let mut replicated = Vec::new();
        for param in &unit.params {
            let cut = cut_of(param);
            let local = ParamSpec::new(param.name.as_str(), self.shape(param, cut)?);
            match cut {
                TensorCut::Replicated if self.ranks > 1 => replicated.push(local),
                _ => cut_params.push(local),
            }
        }
        cut_params.append(&mut replicated);
        Ok(UnitSpec::new(unit.name.as_str(), cut_params))
    }

    /// Elements of the part of `unit` that no other rank has, with their padding: the first ones.
    /// The others are replicated. With one rank, all elements of the unit.
    ///
    /// # Errors
    /// As [`TensorPart::shape`].
    pub fn cut_elems(
        &self,
        unit: &UnitSpec,
        cut_of: impl Fn(&ParamSpec) -> TensorCut,
    ) -> Result<u64, ShardError> {
        let mut total = 0;
        for param in &unit.params {
            let cut = cut_of(param);
            let divided = Blocks::new(param, cut, self.ranks)?;
            if cut != TensorCut::Replicated || self.ranks == 1 {
                total = sum(&unit.name, &[total, divided.part_elems()])?;
            }
        }
        Ok(total)
    }

    /// The shape of the part of `param`: the same for all ranks, with padding.
    ///
    /// # Errors
    /// The parameter has no such dimension or 0 blocks, its blocks cannot be divided by the ranks,
    /// a rank would have padding only, or the size overflows 64 bits.
    pub fn shape(&self, param: &ParamSpec, cut: TensorCut) -> Result<Vec<u64>, ShardError> {
        let divided = Blocks::new(param, cut, self.ranks)?;
        let mut shape = param.shape.clone();
        if let TensorCut::Dim { dim, .. } = cut {
            shape[dim] = divided.part_extent;
        }
        Ok(shape)
    }

    /// Splits `range`, elements of the part of the whole parameter `param`, into runs that are
    /// contiguous in the whole parameter or padding, ascending and without gaps. No run is empty;
    /// no two neighbours could be one run.
    ///
    /// # Errors
    /// As [`TensorPart::shape`], or the range is reversed or ends past the part.
    pub fn runs(
        &self,
        param: &ParamSpec,
        cut: TensorCut,
        range: Range<u64>,
    ) -> Result<impl Iterator<Item = TensorRun> + use<>, ShardError> {
        let divided = Blocks::new(param, cut, self.ranks)?;
        check_range("the part of a parameter", &range, divided.part_elems())?;

        let rank = if cut == TensorCut::Replicated {
            0
        } else {
            self.rank
        };
        let mut at = range.start;
        Ok(std::iter::from_fn(move || {
            // The range is not empty here, so a slice has elements.
            (at < range.end).then(|| {
                let run = divided.run_at(rank, at, range.end);
                at = run.in_part.end;
                run
            })
        }))
    }
}

/// Splits `range`, elements of the whole parameter `param`, into pieces that are contiguous in the
/// part of one of `ranks` tensor-parallel ranks, ascending and without gaps. The inverse of
/// [`TensorPart::runs`].
///
/// # Errors
/// As [`TensorPart::shape`], or the range is reversed or ends past the parameter.
pub fn tensor_pieces(
    param: &ParamSpec,
    cut: TensorCut,
    ranks: u64,
    range: Range<u64>,
) -> Result<impl Iterator<Item = TensorPiece> + use<>, ShardError> {
    let divided = Blocks::new(param, cut, ranks)?;
    check_range("a parameter", &range, divided.blocks * divided.block_elems)?;
    let mut at = range.start;
    Ok(std::iter::from_fn(move || {
        // The range is not empty here, so blocks and slices have elements.
        (at < range.end).then(|| {
            let piece = divided.piece_at(at, range.end);
            at = piece.in_whole.end;
            piece
        })
    }))
}

fn check_range(what: &'static str, range: &Range<u64>, len_elems: u64) -> Result<(), ShardError> {
    if range.start > range.end || range.end > len_elems {
        return Err(ShardError::RangeOutside {
            what,
            range: range.clone(),
            len_elems,
        });
    }
    Ok(())
}

/// A parameter as a sequence of equal blocks, each of which is cut in one slice for each rank. The
/// blocks of all indices before the cut dimension follow one another, in the whole parameter and in
/// each part.
#[derive(Clone, Copy)]
struct Blocks {
    /// Blocks in the parameter.
    blocks: u64,
    /// Elements of a block of the whole parameter.
    block_elems: u64,
    /// Elements of a slice, with padding.
    slice_elems: u64,
    /// Extent of the cut dimension in a part.
    part_extent: u64,
}

impl Blocks {
    /// Checks that `ranks` can divide the parameter. No product of the result overflows.
    fn new(param: &ParamSpec, cut: TensorCut, ranks: u64) -> Result<Self, ShardError> {
        let numel = param.numel_elems()?;
        let TensorCut::Dim { dim, blocks } = cut else {
            return Ok(Self::undivided(numel, 0));
        };
        let &extent = param.shape.get(dim).ok_or_else(|| ShardError::UnknownDim {
            param: param.name.clone(),
            dim,
            dims: param.shape.len(),
        })?;

        let uneven = || ShardError::UnevenCut {
            param: param.name.clone(),
            dim,
            extent,
            blocks,
            ranks,
        };
        let slices = blocks.checked_mul(ranks).ok_or_else(uneven)?;
        if blocks == 0 || (blocks > 1 && !extent.is_multiple_of(slices)) {
            return Err(uneven());
        }
        if ranks == 1 {
            return Ok(Self::undivided(numel, extent));
        }

        let slice = extent.div_ceil(slices);
        let last = slice.saturating_mul(ranks - 1);
        if blocks == 1 && last >= extent {
            return Err(ShardError::EmptyPart {
                param: param.name.clone(),
                dim,
                extent,
                ranks,
            });
        }

        let part_extent = slice * blocks;
        if numel == 0 {
            return Ok(Self::undivided(0, part_extent));
        }

        // The products of the shape's extents are at most `numel`, so none overflows.
        let outer = product(&param.name, &param.shape[..dim])?;
        let inner = product(&param.name, &param.shape[dim + 1..])?;
        // With the padding they may.
        product(&param.name, &[outer, part_extent, ranks, inner])?;
        Ok(Self {
            blocks: outer * blocks,
            block_elems: extent / blocks * inner,
            slice_elems: slice * inner,
            part_extent,
        })
    }

    /// A parameter of which each rank has all elements.
    fn undivided(numel_elems: u64, part_extent: u64) -> Self {
        Self {
            blocks: 1,
            block_elems: numel_elems,
            slice_elems: numel_elems,
            part_extent,
        }
    }

    fn part_elems(&self) -> u64 {
        self.blocks * self.slice_elems
    }

    /// The run that starts at element `at` of the part of `rank`, up to element `end`.
    fn run_at(&self, rank: u64, at: u64, end: u64) -> TensorRun {
        let block = at / self.slice_elems;
        let slice_start = block * self.slice_elems;
        let in_block = rank * self.slice_elems;
        let real_end = slice_start + self.slice_elems.min(self.block_elems - in_block);

        if at >= real_end {
            return TensorRun {
                in_part: at..end.min(slice_start + self.slice_elems),
                in_whole: None,
            };
        }
        let run_end = end.min(real_end);
        let start = block * self.block_elems + in_block + (at - slice_start);
        TensorRun {
            in_part: at..run_end,
            in_whole: Some(start..start + (run_end - at)),
        }
    }

    /// The piece that starts at element `at` of the whole parameter, up to element `end`.
    fn piece_at(&self, at: u64, end: u64) -> TensorPiece {
        let block = at / self.block_elems;
        let in_block = at % self.block_elems;
        let rank = in_block / self.slice_elems;
        let slice_end = (rank + 1) * self.slice_elems;
        let piece_end = end.min(block * self.block_elems + slice_end.min(self.block_elems));
        let start = block * self.slice_elems + in_block % self.slice_elems;
        TensorPiece {
            rank,
            in_part: start..start + (piece_end - at),
            in_whole: at..piece_end,
        }
    }
}
