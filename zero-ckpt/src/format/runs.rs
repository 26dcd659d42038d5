//! The elements of a shard without padding.
//!
//! Stored elements are numbered without padding: the parameters of a unit are contiguous, even if
//! the layout leaves gaps between them. In that numbering a shard is always one range.
//!
//! ```text
//! flat parameter   | a a a - | b b b b | b - - - |     padding: -
//! numbered         | 0 1 2   | 3 4 5 6 | 7       |     shard 1 holds 3..7
//! ```

use std::ops::Range;

use zero_shard::{ParamPlacement, UnitLayout};

/// Contiguous elements of a shard, without padding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Their numbers in the unit, without padding.
    pub(crate) elems: Range<u64>,
    /// Index of the first in the shard.
    pub(crate) at: u64,
}

impl Run {
    pub(crate) fn len(&self) -> u64 {
        self.elems.end - self.elems.start
    }

    /// Their index range in the shard.
    pub(crate) fn in_shard(&self) -> Range<u64> {
        self.at..self.at + self.len()
    }
}

/// The elements of a parameter, numbered in its unit without padding.
pub(crate) fn elems_of(unit: &UnitLayout, param: &ParamPlacement) -> Range<u64> {
    let start = param.global_offset_elems - unit.global_offset_elems;
    start..start + param.numel_elems
}

/// Returns the runs of `rank`'s shard of a unit, in order. No run is empty; padding separates any
/// two.
pub(crate) fn runs(unit: &UnitLayout, rank: u64) -> Vec<Run> {
    let shard = unit.shard(rank);
    let mut runs: Vec<Run> = Vec::new();
    // The shard is within its unit, so `params_in` does not fail.
    for part in unit.params_in(shard.clone()).into_iter().flatten() {
        let first = elems_of(unit, &unit.params[part.param]).start;
        let elems = first + part.in_param.start..first + part.in_param.end;
        let at = part.in_flat.start - shard.start;
        match runs.last_mut() {
            Some(last) if last.in_shard().end == at => last.elems.end = elems.end,
            _ => runs.push(Run { elems, at }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use zero_shard::{Layout, LayoutOptions, ParamSpec, UnitSpec};

    use super::*;

    fn layout(sizes: &[u64], ranks: u64, shard_align_elems: u64, param_align_elems: u64) -> Layout {
        let params: Vec<_> = sizes
            .iter()
            .enumerate()
            .map(|(i, n)| ParamSpec::new(format!("p{i}"), [*n]))
            .collect();
        let options = LayoutOptions::default()
            .shard_align_elems(shard_align_elems)
            .param_align_elems(param_align_elems);
        Layout::with_options(&[UnitSpec::new("u", params)], ranks, options).unwrap()
    }

    #[test]
    fn only_gaps_divide_runs() {
        let layout = layout(&[3, 0, 5], 3, 4, 4);
        let found: Vec<_> = (0..3).map(|r| runs(&layout.units()[0], r)).collect();
        assert_eq!(found[0], [Run { elems: 0..3, at: 0 }]);
        assert_eq!(found[1], [Run { elems: 3..7, at: 0 }]);
        assert_eq!(found[2], [Run { elems: 7..8, at: 0 }]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn every_element_is_in_one_run(
            sizes in prop::collection::vec(0u64..20, 0..6), ranks in 1u64..5, align in 1u64..6, param_align in 1u64..6,
        ) {
            let layout = layout(&sizes, ranks, align, param_align);
            let unit = &layout.units()[0];
            let mut next = 0;
            for rank in 0..ranks {
                for run in runs(unit, rank) {
                    prop_assert_eq!(run.elems.start, next);
                    prop_assert!(run.len() > 0);
                    for i in 0..run.len() {
                        let flat = unit.shard(rank).start + run.at + i;
                        let param = unit.params.iter().find(|p| p.range().contains(&flat)).unwrap();
                        prop_assert_eq!(elems_of(unit, param).start + flat - param.offset_elems, next + i);
                    }
                    next = run.elems.end;
                }
            }
            prop_assert_eq!(next, unit.numel_elems);
        }
    }
}
