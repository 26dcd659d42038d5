//! What can be wrong with a layout.

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
}

impl std::fmt::Display for ShardError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoRanks => write!(f, "a layout needs at least one rank"),
            Self::ZeroAlignment => write!(f, "an alignment of 0 elements; use 1 for none"),
            Self::DuplicateName { name } => write!(f, "the name {name:?} is used twice"),
            Self::TooLarge { what } => write!(f, "{what}: the size does not fit 64 bits"),
        }
    }
}

impl std::error::Error for ShardError {}
