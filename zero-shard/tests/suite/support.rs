//! Random models and layouts, small and extreme.
#![allow(dead_code)] // each test file uses a part

use proptest::prelude::*;
use zero_shard::{Layout, LayoutOptions, ParamSpec, UnitSpec};

/// The configuration of a property with `n` cases: fewer under Miri, which is a hundred times
/// slower; `ZERO_PROPTEST_FACTOR` times as many if that is set.
pub(crate) fn cases(n: u32) -> ProptestConfig {
    let factor = std::env::var("ZERO_PROPTEST_FACTOR")
        .ok()
        .and_then(|f| f.parse().ok())
        .unwrap_or(1);
    let cases = if cfg!(miri) {
        2
    } else {
        n.saturating_mul(factor)
    };
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

/// Up to four units of up to five parameters of up to three dimensions; empty ones and scalars
/// included.
pub(crate) fn small_units() -> impl Strategy<Value = Vec<UnitSpec>> {
    let shape = prop::collection::vec(0u64..6, 0..4);
    prop::collection::vec(prop::collection::vec(shape, 0..6), 0..5).prop_map(named)
}

/// Units of a few parameters, up to 10^13 elements together.
pub(crate) fn huge_units() -> impl Strategy<Value = Vec<UnitSpec>> {
    let shape = prop_oneof![
        (1u64..1_000_000, 1u64..500_000).prop_map(|(rows, cols)| vec![rows, cols]),
        (0u64..10).prop_map(|n| vec![n]),
        Just(vec![1_000_000, 500_000]),
    ];
    prop::collection::vec(prop::collection::vec(shape, 0..5), 1..5).prop_map(named)
}

fn named(shapes: Vec<Vec<Vec<u64>>>) -> Vec<UnitSpec> {
    let unit = |(u, params): (usize, Vec<Vec<u64>>)| {
        let params = params.into_iter().enumerate();
        UnitSpec::new(
            format!("unit.{u}"),
            params
                .map(|(p, s)| ParamSpec::new(format!("unit.{u}.p{p}"), s))
                .collect::<Vec<_>>(),
        )
    };
    shapes.into_iter().enumerate().map(unit).collect()
}

/// Lays out the units with these alignments.
pub(crate) fn laid_out(
    units: &[UnitSpec],
    world_size: u64,
    shard_align: u64,
    param_align: u64,
) -> Layout {
    let options = LayoutOptions::default()
        .shard_align_elems(shard_align)
        .param_align_elems(param_align);
    Layout::with_options(units, world_size, options).expect("a layout that fits")
}

/// Small layouts over small worlds.
pub(crate) fn small_layout() -> impl Strategy<Value = Layout> {
    let small = (small_units(), 1u64..10, 1u64..9, 1u64..6, 0u64..12);
    small.prop_map(|(units, ranks, shard_align, param_align, packed_below)| {
        let options = LayoutOptions::default()
            .shard_align_elems(shard_align)
            .param_align_elems(param_align)
            .packed_below_elems(packed_below);
        Layout::with_options(&units, ranks, options).expect("a layout that fits")
    })
}

/// Up to 10^13 elements over up to 65,536 ranks.
pub(crate) fn huge_layout() -> impl Strategy<Value = Layout> {
    let ranks = prop_oneof![1u64..=65_536, Just(65_536), Just(65_521)];
    let align = prop_oneof![Just(1u64), Just(128), 1u64..5_000];
    (
        huge_units(),
        ranks,
        align,
        prop_oneof![Just(1u64), Just(8), 1u64..600],
    )
        .prop_map(|(u, n, a, p)| laid_out(&u, n, a, p))
}
