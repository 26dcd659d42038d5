//! The order and rounding of a product's sums.

/// The order and rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sums {
    /// All terms in one part.
    Whole,
    /// Two parts. First for well-aligned matrices, so that tests see that another algorithm has
    /// other bits.
    InParts,
    /// Two parts, each rounded to the type of the result. Used where the preferences allow it.
    InRoundedParts,
    InFourParts,
}

impl Sums {
    pub(crate) const ALL: [Self; 4] = [
        Self::Whole,
        Self::InParts,
        Self::InRoundedParts,
        Self::InFourParts,
    ];

    /// The number of parts.
    pub(crate) fn parts(self) -> usize {
        [1, 2, 2, 4][self as usize]
    }

    /// Whether parts are rounded to the type of the result.
    pub(crate) fn rounds(self) -> bool {
        self == Self::InRoundedParts
    }

    /// The workspace that is required, in bytes.
    pub(crate) fn workspace_bytes(self) -> usize {
        self.parts() << 10
    }
}
