//! The places of frozen units in blocks, and what of them is not in blocks.

use std::ops::Range;

use zero_optim::ParamKind;
use zero_shard::{BlockFormat, Layout, ParamPlacement, UnitLayout, WireFormat};

use crate::param_groups::{KindOf, ModelGroups};

/// Whether a parameter of a frozen unit is in blocks.
fn holds(kind_of: KindOf, param: &ParamPlacement) -> bool {
    let is_matrix = kind_of(&param.name) == ParamKind::Linear;
    is_matrix && BlockFormat::holds(param.numel_elems)
}

/// For each unit that is frozen and in blocks, their format and the elements that are not in
/// blocks.
pub(crate) fn in_blocks(
    format: BlockFormat,
    kind_of: KindOf,
    groups: &ModelGroups,
    layout: &Layout,
) -> Vec<Option<(WireFormat, u64)>> {
    let of_unit = |(unit, placed): (usize, &UnitLayout)| {
        let has_matrix = placed.params.iter().any(|param| holds(kind_of, param));
        let plain = plain_ranges(kind_of, placed).into_iter();
        let plain = plain.map(|range| range.end - range.start).sum();
        (has_matrix && groups.is_frozen(unit)).then_some((format.wire(), plain))
    };
    layout.units().iter().enumerate().map(of_unit).collect()
}

/// The ranges of the flat parameter of such a unit that are not in blocks, with the padding between
/// and behind them.
pub(crate) fn plain_ranges(kind_of: KindOf, placed: &UnitLayout) -> Vec<Range<u64>> {
    let mut plain: Vec<Range<u64>> = Vec::new();
    let others = placed.params.iter().filter(|param| !holds(kind_of, param));
    for range in others.map(ParamPlacement::range) {
        match plain.last_mut().filter(|last| last.end == range.start) {
            Some(last) => last.end = range.end,
            None => plain.push(range),
        }
    }
    plain
}
