//! Preferences and algorithms. An algorithm records the alignments and workspace that it was chosen for; products
//! that use it are checked against them.

use crate::product::Description;

/// Bytes of workspace that every algorithm here requires.
pub(crate) const WORKSPACE_BYTES: usize = 1 << 10;
/// Required alignment of a workspace, in bytes.
const WORKSPACE_ALIGNMENT: usize = 256;
/// The reduction schemes that round partial sums to the type of the result: in place, and out of place.
const ROUNDING_SCHEMES: u32 = 1 | 4;
/// If all matrices have at least this alignment, in bytes, another algorithm is chosen.
const WELL_ALIGNED: u32 = 64;
const MARK: u64 = 0x7374_616e_642d_696e;

/// `cublasLtMatmulPreference_t`, with the library's defaults.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Preference {
    pub(crate) workspace_bytes: u64,
    pub(crate) reductions: u32,
    /// Alignments of a, b, c and d, in bytes.
    pub(crate) alignments: [u32; 4],
}

impl Default for Preference {
    fn default() -> Self {
        Self { workspace_bytes: 0, reductions: 7, alignments: [256; 4] }
    }
}

/// `cublasLtMatmulAlgo_t`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Algorithm {
    mark: u64,
    /// Alignments of a, b, c, d, the bias and the auxiliary array, in bytes.
    alignments: [u64; 6],
    /// A [`Sums`].
    sums: u64,
}

/// The order and rounding of a product's sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sums {
    /// All terms in one part.
    Whole,
    /// Two parts. Used for well-aligned matrices, so that tests see that another algorithm has other bits.
    InParts,
    /// Two parts, each rounded to the type of the result. Used where the preferences allow it.
    InRoundedParts,
}

impl Algorithm {
    /// The algorithm for a product; `None` if the preferences exclude it.
    pub(crate) fn choose(preference: &Preference, what: &Description) -> Option<Self> {
        let [a, b, c, d] = preference.alignments.map(u64::from);
        // As in the library: the greatest power of two that divides the address, at most 256.
        let divides = |address: u64| 1 << address.trailing_zeros().min(8);
        let sums = match preference.reductions & ROUNDING_SCHEMES {
            0 if preference.alignments.iter().all(|&bytes| bytes >= WELL_ALIGNED) => Sums::InParts,
            0 => Sums::Whole,
            _ => Sums::InRoundedParts,
        };
        (preference.workspace_bytes >= WORKSPACE_BYTES as u64).then_some(Self {
            mark: MARK,
            alignments: [a, b, c, d, divides(what.bias), divides(what.aux)],
            sums: sums as u64,
        })
    }

    /// The order and rounding of its sums.
    pub(crate) fn sums(&self) -> Sums {
        [Sums::Whole, Sums::InParts, Sums::InRoundedParts][self.sums.min(2) as usize]
    }

    /// Whether the addresses and the workspace meet the algorithm's requirements.
    pub(crate) fn takes(&self, at: [u64; 4], what: &Description, workspace: (usize, usize)) -> bool {
        let [a, b, c, d] = at;
        let aligned = |(at, alignment): (u64, u64)| at.is_multiple_of(alignment);
        self.mark == MARK
            && [a, b, c, d, what.bias, what.aux].into_iter().zip(self.alignments).all(aligned)
            && workspace.0.is_multiple_of(WORKSPACE_ALIGNMENT)
            && workspace.1 >= WORKSPACE_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::product::NOTHING;

    #[test]
    fn products_must_match_their_algorithm() {
        let what = Description { transposed: [false; 2], epilogue: NOTHING, bias: 0x40, aux: 0, aux_stride: 0 };
        let all = Preference { workspace_bytes: 1 << 20, ..Preference::default() };
        assert!(Algorithm::choose(&Preference::default(), &what).is_none(), "no workspace");
        let algorithm = Algorithm::choose(&all, &what).unwrap();
        assert_eq!(algorithm.sums(), Sums::InRoundedParts);
        let fp32 = Preference { reductions: 2, ..all };
        assert_eq!(Algorithm::choose(&fp32, &what).unwrap().sums(), Sums::InParts);
        let narrow = Preference { alignments: [256, 32, 256, 256], ..fp32 };
        assert_eq!(Algorithm::choose(&narrow, &what).unwrap().sums(), Sums::Whole);
        let (at, workspace) = ([0x100; 4], (0x200, 1 << 10));
        assert!(algorithm.takes(at, &what, workspace));
        assert!(!algorithm.takes([0x100, 0x110, 0x100, 0x100], &what, workspace), "b");
        assert!(!algorithm.takes(at, &Description { bias: 0x20, ..what }, workspace), "the bias");
        assert!(!algorithm.takes(at, &what, (0x210, 1 << 10)) && !algorithm.takes(at, &what, (0x200, 1)));
        assert!(!Algorithm::default().takes(at, &what, workspace), "none was chosen");
    }
}
