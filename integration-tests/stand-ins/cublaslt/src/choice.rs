//! Preferences and algorithms. An algorithm records the alignments that it was chosen for; products
//! that use it are checked against them, and against the workspace that it requires.

use crate::product::Description;
use crate::sums::Sums;

/// Required alignment of a workspace, in bytes.
const WORKSPACE_ALIGNMENT: usize = 256;
/// The reduction schemes that round partial sums to the type of the result: in place, and out of
/// place.
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
        Self {
            workspace_bytes: 0,
            reductions: 7,
            alignments: [256; 4],
        }
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

impl Algorithm {
    /// The algorithms for a product, best first; those that the preferences exclude are missing.
    pub(crate) fn candidates(preference: &Preference, what: &Description) -> Vec<Self> {
        let [a, b, c, d] = preference.alignments.map(u64::from);
        // As in the library: the greatest power of two that divides the address, at most 256.
        let divides = |address: u64| 1 << address.trailing_zeros().min(8);
        let order: &[Sums] = match preference.reductions & ROUNDING_SCHEMES {
            0 if preference
                .alignments
                .iter()
                .all(|&bytes| bytes >= WELL_ALIGNED) =>
            {
                &[Sums::InParts, Sums::Whole, Sums::InFourParts]
            }
            0 => &[Sums::Whole, Sums::InParts, Sums::InFourParts],
            _ => &[Sums::InRoundedParts],
        };

        let fits = |sums: &&Sums| preference.workspace_bytes >= sums.workspace_bytes() as u64;
        let alignments = [a, b, c, d, divides(what.bias), divides(what.aux)];
        order
            .iter()
            .filter(fits)
            .map(|&sums| Self {
                mark: MARK,
                alignments,
                sums: sums as u64,
            })
            .collect()
    }

    /// Whether this is an algorithm of this library.
    pub(crate) fn is_valid(&self) -> bool {
        self.mark == MARK && self.sums < Sums::ALL.len() as u64
    }

    /// The order and rounding of its sums. The algorithm is valid.
    pub(crate) fn sums(&self) -> Sums {
        Sums::ALL[self.sums as usize % Sums::ALL.len()]
    }

    /// The workspace that it requires, in bytes.
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.sums().workspace_bytes()
    }

    /// An attribute by its number in `cublasLtMatmulAlgoConfigAttributes_t`, as 32 bits.
    pub(crate) fn attribute(&self, number: i32) -> Option<u32> {
        let parts = self.sums().parts() as u32;
        match number {
            // Id, tile, split of the sums, reduction scheme, swizzle, custom option, stages.
            0 => Some(self.sums as u32),
            1 => Some(20),
            2 => Some(parts),
            3 => Some(if parts > 1 { 2 } else { 0 }),
            4..=6 => Some(0),
            _ => None,
        }
    }

    /// Whether the addresses and the workspace meet the algorithm's requirements.
    pub(crate) fn takes(
        &self,
        at: [u64; 4],
        what: &Description,
        workspace: (usize, usize),
    ) -> bool {
        let [a, b, c, d] = at;
        let aligned = |(at, alignment): (u64, u64)| at.is_multiple_of(alignment);
        self.is_valid()
            && [a, b, c, d, what.bias, what.aux]
                .into_iter()
                .zip(self.alignments)
                .all(aligned)
            && workspace.0.is_multiple_of(WORKSPACE_ALIGNMENT)
            && workspace.1 >= self.workspace_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::product::NOTHING;

    #[test]
    fn products_must_match_their_algorithm() {
        let what = Description {
            transposed: [false; 2],
            epilogue: NOTHING,
            bias: 0x40,
            aux: 0,
            aux_stride: 0,
        };

        let all = Preference {
            workspace_bytes: 1 << 20,
            ..Preference::default()
        };

        let sums = |preference: &Preference| {
            Algorithm::candidates(preference, &what)
                .iter()
                .map(Algorithm::sums)
                .collect::<Vec<_>>()
        };

        assert_eq!(sums(&Preference::default()), [], "no workspace");
        assert_eq!(sums(&all), [Sums::InRoundedParts]);
        let fp32 = Preference {
            reductions: 2,
            ..all
        };

        assert_eq!(sums(&fp32), [Sums::InParts, Sums::Whole, Sums::InFourParts]);
        assert_eq!(
            sums(&Preference {
                workspace_bytes: 2 << 10,
                ..fp32
            }),
            [Sums::InParts, Sums::Whole]
        );

        let narrow = Preference {
            alignments: [256, 32, 256, 256],
            ..fp32
        };

        assert_eq!(
            sums(&narrow),
            [Sums::Whole, Sums::InParts, Sums::InFourParts]
        );
        let algorithm = Algorithm::candidates(&all, &what)[0];
        let at = [0x100; 4];
        let workspace = (0x200, 2 << 10);
        assert!(algorithm.takes(at, &what, workspace));
        assert!(
            !algorithm.takes([0x100, 0x110, 0x100, 0x100], &what, workspace),
            "b"
        );
        assert!(
            !algorithm.takes(at, &Description { bias: 0x20, ..what }, workspace),
            "the bias"
        );
        assert!(
            !algorithm.takes(at, &what, (0x210, 2 << 10))
                && !algorithm.takes(at, &what, (0x200, 1))
        );
        assert!(
            !Algorithm::default().takes(at, &what, workspace),
            "none was chosen"
        );

        assert!(
            !Algorithm {
                sums: 4,
                ..algorithm
            }
            .is_valid()
        );
    }
}
