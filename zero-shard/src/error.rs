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
    /// Elements that no source holds.
    Hole {
        /// The parameter.
        param: String,
        /// The first range of it that is missing.
        in_param: Range<u64>,
    },
    /// Elements that two sources hold, where each must have one.
    SourcesOverlap {
        /// The parameter.
        param: String,
        /// The first range of it that is held twice.
        in_param: Range<u64>,
        /// The two places.
        places: [u64; 2],
    },
    /// One range of a target's storage that is asked to hold two things.
    TargetsOverlap {
        /// The place.
        place: u64,
        /// The range of its storage.
        in_storage: Range<u64>,
    },
    /// A parameter that has another shape on the other side.
    ShapeMismatch {
        /// The parameter.
        param: String,
        /// Its shape where the elements go.
        expected: Vec<u64>,
        /// Its shape where they come from.
        got: Vec<u64>,
    },
    /// A world that groups of this size do not divide.
    NotDivisible {
        /// Ranks in the world.
        world_size: u64,
        /// Ranks in a group.
        group_size: u64,
    },
    /// A placement that the stage cannot have: what is not sharded does not leave the device.
    NotSharded {
        /// What was to be placed elsewhere.
        what: &'static str,
        /// The least stage that shards it.
        needs_stage: u8,
        /// The stage asked for.
        stage: u8,
    },
    /// A parameter of the source that the target has no place for.
    Unwanted {
        /// The parameter.
        param: String,
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
            Self::Hole { param, in_param } => {
                write!(f, "no source holds elements {}..{} of {param:?}", in_param.start, in_param.end)
            }
            Self::SourcesOverlap { param, in_param, places: [a, b] } => {
                write!(f, "{a} and {b} both hold elements {}..{} of {param:?}", in_param.start, in_param.end)
            }
            Self::TargetsOverlap { place, in_storage } => {
                write!(f, "{place} is to hold two things at {}..{}", in_storage.start, in_storage.end)
            }
            Self::ShapeMismatch { param, expected, got } => {
                write!(f, "{param:?} has shape {expected:?} in the target and {got:?} in the source")
            }
            Self::NotDivisible { world_size, group_size } => {
                write!(f, "{world_size} ranks cannot be divided into groups of {group_size}")
            }
            Self::NotSharded { what, needs_stage, stage } => {
                write!(f, "{what} can leave the device from stage {needs_stage} on, not at stage {stage}")
            }
            Self::Unwanted { param } => write!(f, "the target has no parameter {param:?}, which the source holds"),
        }
    }
}

impl std::error::Error for ShardError {}
