//! Errors of layouts, plans and formulas: one variant per cause, with its numbers.

use std::ops::Range;

/// The reason why a layout, a plan or a formula could not be computed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum ShardError {
    /// A world without ranks.
    NoRanks,
    /// An alignment of 0 elements.
    ZeroAlignment,
    /// A name that is used twice, by parameters, ties or units.
    DuplicateName { name: String },
    /// A size that overflows 64 bits.
    TooLarge { what: String },
    /// A rank outside the world.
    UnknownRank {
        /// The requested rank.
        rank: u64,
        /// Ranks in the world.
        world_size: u64,
    },
    /// A unit index past the last unit.
    UnknownUnit {
        /// The requested index.
        unit: usize,
        /// Number of units.
        units: usize,
    },
    /// A unit name that does not exist.
    UnknownUnitName { name: String },
    /// A parameter name that does not exist.
    UnknownParam { name: String },
    /// A range that is reversed or ends past the sequence that it indexes.
    RangeOutside {
        /// The indexed sequence.
        what: &'static str,
        /// The requested range.
        range: Range<u64>,
        /// Number of elements.
        len_elems: u64,
    },
    /// Elements without a source.
    Hole {
        param: String,
        /// The first range of it that is missing.
        in_param: Range<u64>,
    },
    /// A parameter whose shapes in source and target differ.
    ShapeMismatch {
        param: String,
        /// Its shape in the target.
        expected: Vec<u64>,
        /// Its shape in the source.
        got: Vec<u64>,
    },
    /// A world size that is not a multiple of the group size.
    NotDivisible {
        /// Ranks in the world.
        world_size: u64,
        /// Ranks in a group.
        group_size: u64,
    },
    /// State placed off the device at a stage that does not shard it.
    NotSharded {
        /// The kind of state.
        what: &'static str,
        /// The lowest stage that shards it.
        needs_stage: u8,
        /// The requested stage.
        stage: u8,
    },
    /// A parameter of the source that the target lacks.
    Unwanted { param: String },
    /// A cut along a dimension that the parameter lacks.
    UnknownDim {
        param: String,
        /// The requested dimension.
        dim: usize,
        /// Number of dimensions.
        dims: usize,
    },
    /// Blocks of a dimension that the tensor-parallel ranks do not divide.
    UnevenCut {
        param: String,
        /// The cut dimension.
        dim: usize,
        /// Its extent.
        extent: u64,
        /// Equal blocks along it.
        blocks: u64,
        /// Tensor-parallel ranks.
        ranks: u64,
    },
    /// A cut of which a tensor-parallel rank would have padding only.
    EmptyPart {
        param: String,
        /// The cut dimension.
        dim: usize,
        /// Its extent.
        extent: u64,
        /// Tensor-parallel ranks.
        ranks: u64,
    },
}

impl std::fmt::Display for ShardError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoRanks => write!(f, "a layout needs at least one rank"),
            Self::ZeroAlignment => write!(f, "an alignment of 0 elements; use 1 for no alignment"),
            Self::DuplicateName { name } => write!(f, "the name {name:?} is used twice"),
            Self::TooLarge { what } => write!(f, "{what}: the size overflows 64 bits"),
            Self::UnknownRank { rank, world_size } => {
                write!(f, "no rank {rank} in a world of {world_size}")
            }
            Self::UnknownUnit { unit, units } => {
                write!(f, "no unit {unit}: there are {units} units")
            }
            Self::UnknownUnitName { name } => write!(f, "no unit is named {name:?}"),
            Self::UnknownParam { name } => write!(f, "no parameter is named {name:?}"),
            Self::RangeOutside {
                what,
                range,
                len_elems,
            } => {
                write!(
                    f,
                    "range {}..{} is outside {what} of {len_elems} elements",
                    range.start, range.end
                )
            }
            Self::Hole { param, in_param } => {
                write!(
                    f,
                    "no source holds elements {}..{} of {param:?}",
                    in_param.start, in_param.end
                )
            }
            Self::ShapeMismatch {
                param,
                expected,
                got,
            } => {
                write!(
                    f,
                    "{param:?} has shape {expected:?} in the target and {got:?} in the source"
                )
            }
            Self::NotDivisible {
                world_size,
                group_size,
            } => {
                write!(
                    f,
                    "{world_size} ranks do not divide into groups of {group_size}"
                )
            }
            Self::NotSharded {
                what,
                needs_stage,
                stage,
            } => {
                write!(
                    f,
                    "{what} can be placed off the device from stage {needs_stage} on, not at stage {stage}"
                )
            }
            Self::Unwanted { param } => write!(
                f,
                "the source holds parameter {param:?}, which the target lacks"
            ),
            Self::UnknownDim { param, dim, dims } => write!(
                f,
                "{param:?} cannot be cut along dimension {dim}: it has {dims} dimensions"
            ),
            Self::UnevenCut {
                param,
                dim,
                extent,
                blocks,
                ranks,
            } => write!(
                f,
                "{param:?} cannot be cut over {ranks} tensor-parallel ranks: extent {extent} of dimension {dim} in \
                 {blocks} blocks is not a multiple of {blocks} * {ranks}; use a number of ranks that divides each block"
            ),
            Self::EmptyPart {
                param,
                dim,
                extent,
                ranks,
            } => write!(
                f,
                "{param:?} cannot be cut over {ranks} tensor-parallel ranks: extent {extent} of dimension {dim} leaves \
                 the last of them without a row; use fewer ranks"
            ),
        }
    }
}

impl std::error::Error for ShardError {}
