//! What can be wrong with a layout, a plan or a formula: one variant a cause, with its numbers.

use std::ops::Range;

/// Why a layout, a plan or a formula could not be made.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShardError {
    /// A world of no ranks.
    NoRanks,
    /// An alignment of 0 elements.
    ZeroAlignment,
    /// Two parameters of one name.
    DuplicateName {
        /// The name.
        name: String,
    },
    /// A size that 64 bits do not hold.
    TooLarge {
        /// What was too large.
        what: String,
    },
    /// A rank that the world does not have.
    UnknownRank {
        /// The rank asked for.
        rank: u64,
        /// Ranks in the world.
        world_size: u64,
    },
    /// A unit index past the last unit.
    UnknownUnit {
        /// The index asked for.
        unit: usize,
        /// How many units there are.
        units: usize,
    },
    /// A unit that is named and does not exist.
    UnknownUnitName {
        /// The name.
        name: String,
    },
    /// A parameter that is named and does not exist.
    UnknownParam {
        /// The name.
        name: String,
    },
    /// A range that is reversed or ends past what it indexes.
    RangeOutside {
        /// What was indexed.
        what: &'static str,
        /// The range asked for.
        range: Range<u64>,
        /// How many elements there are.
        len_elems: u64,
    },
}

impl std::fmt::Display for ShardError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoRanks => write!(f, "a layout needs at least one rank"),
            Self::ZeroAlignment => write!(f, "an alignment of 0 elements; use 1 for none"),
            Self::DuplicateName { name } => write!(f, "the name {name:?} is used twice"),
            Self::TooLarge { what } => write!(f, "{what}: the size does not fit 64 bits"),
            Self::UnknownRank { rank, world_size } => write!(f, "rank {rank} in a world of {world_size}"),
            Self::UnknownUnit { unit, units } => write!(f, "unit {unit} of {units}"),
            Self::UnknownUnitName { name } => write!(f, "no unit is named {name:?}"),
            Self::UnknownParam { name } => write!(f, "no parameter is named {name:?}"),
            Self::RangeOutside { what, range, len_elems } => {
                write!(f, "range {}..{} of {what}, which has {len_elems} elements", range.start, range.end)
            }
        }
    }
}

impl std::error::Error for ShardError {}
