//! Reshard plans, applied to storages in which all elements differ.

use std::collections::HashMap;

use crate::support::{cases, huge_units, laid_out, small_units};
use proptest::prelude::*;
use zero_shard::{
    Extent, Layout, LayoutOptions, Move, ParamSpec, ShardError, Sources, Tie, UnitSpec, reshard,
    reshard_rank,
};

const PADDING: u64 = u64::MAX;

/// All shard storages; an element's value encodes its parameter's name and its offset there.
fn storages(layout: &Layout) -> Vec<Vec<u64>> {
    let mut storages =
        vec![vec![PADDING; layout.shard_elems() as usize]; layout.world_size() as usize];
    for (rank, storage) in storages.iter_mut().enumerate() {
        for piece in layout.rank_pieces(rank as u64).unwrap() {
            let name = &layout.param(piece.id).unwrap().name;
            let mark = name
                .bytes()
                .fold(7u64, |h, b| h.wrapping_mul(31).wrapping_add(u64::from(b)))
                << 20;
            for (at, i) in piece.in_storage.zip(piece.in_param) {
                storage[at as usize] = mark + i;
            }
        }
    }
    storages
}

/// Runs the moves; panics if an element of `to` is written twice.
fn apply(moves: &[Move], from: &[Vec<u64>], to: &Layout) -> Vec<Vec<u64>> {
    let mut storages = vec![vec![PADDING; to.shard_elems() as usize]; to.world_size() as usize];
    for m in moves {
        assert_eq!(m.from_range.end - m.from_range.start, m.elems());
        for (a, b) in m.from_range.clone().zip(m.to_range.clone()) {
            let slot = &mut storages[m.to as usize][b as usize];
            assert_eq!(*slot, PADDING, "written twice: {m:?}");
            *slot = from[m.from as usize][a as usize];
        }
    }
    storages
}

/// The same parameters in other units: in the order of `keys`, cut into `count` units.
fn regrouped(units: &[UnitSpec], keys: &[u64], count: usize) -> Vec<UnitSpec> {
    let mut params: Vec<_> = units
        .iter()
        .flat_map(|u| u.params.clone())
        .zip(keys.iter().cycle())
        .collect();
    params.sort_by_key(|(_, key)| **key);
    let mut cut: Vec<_> = (0..count)
        .map(|i| UnitSpec::new(format!("other.{i}"), []))
        .collect();
    for (i, (param, _)) in params.into_iter().enumerate() {
        cut[i * 7 % count].params.push(param);
    }
    cut
}

/// Options of a layout: number of ranks, alignment of shards and of parameters.
fn shape() -> impl Strategy<Value = (u64, u64, u64)> {
    (1u64..9, 1u64..7, 1u64..5)
}

proptest! {
    #![proptest_config(cases(200))]

    /// Resharding to any other layout, with any units in any order, and back is the identity.
    #[test]
    fn there_and_back_is_the_identity(
        units in small_units(), a in shape(), b in shape(), keys in prop::collection::vec(any::<u64>(), 1..9), count in 1usize..5,
    ) {
        let from = laid_out(&units, a.0, a.1, a.2);
        let to = laid_out(&regrouped(&units, &keys, count), b.0, b.1, b.2);
        let there = reshard(&from, &to).unwrap();
        let back = reshard(&to, &from).unwrap();
        let start = storages(&from);
        let middle = apply(&there, &start, &to);
        prop_assert_eq!(&middle, &storages(&to));
        prop_assert_eq!(apply(&back, &middle, &from), start);
        // Each element is moved exactly once.
        prop_assert_eq!(there.iter().map(Move::elems).sum::<u64>(), from.numel_elems());
        // A rank's plan is its part of the whole plan.
        let each: Vec<Move> = (0..to.world_size()).flat_map(|r| reshard_rank(&from, &to, r).unwrap()).collect();
        prop_assert_eq!(each, there);
    }

    /// Resharding through a third layout equals resharding directly.
    #[test]
    fn plans_compose(units in small_units(), a in shape(), b in shape(), c in shape()) {
        let [a, b, c] = [a, b, c].map(|s| laid_out(&units, s.0, s.1, s.2));
        let start = storages(&a);
        let through = apply(&reshard(&b, &c).unwrap(), &apply(&reshard(&a, &b).unwrap(), &start, &b), &c);
        prop_assert_eq!(through, apply(&reshard(&a, &c).unwrap(), &start, &c));
    }

    /// Sources of shuffled and cut extents have the same plan as layouts.
    #[test]
    fn sources_plan_as_layouts_do(units in small_units(), a in shape(), b in shape(), seed in any::<u64>()) {
        let from = laid_out(&units, a.0, a.1, a.2);
        let to = laid_out(&units, b.0, b.1, b.2);
        let mut extents: Vec<Extent> = (0..a.0).flat_map(|r| from.shard_extents(r).unwrap()).collect();
        let len = extents.len().max(1);
        let by = (seed as usize % len).min(extents.len());
        extents.rotate_left(by);
        let cut: Vec<Extent> = extents.iter().flat_map(|e| {
            let half = e.elems.start + (e.elems.end - e.elems.start) / 2;
            let second = Extent::new(half..e.elems.end, e.place, e.offset_elems + half - e.elems.start);
            [second, Extent::new(e.elems.start..half, e.place, e.offset_elems)]
        }).collect();
        let sources = Sources::new(&to, cut.clone()).unwrap();
        prop_assert_eq!(sources.check_complete(), Ok(()));
        let wanted = (0..b.0).flat_map(|r| to.shard_extents(r).unwrap());
        let moves = sources.plan(wanted).unwrap();
        prop_assert_eq!(apply(&moves, &storages(&from), &to), storages(&to));
        // If several extents hold an element, one of them is its source.
        let twice = Sources::first_of(&to, cut.iter().chain(&extents).cloned()).unwrap();
        prop_assert!(twice.extents().windows(2).all(|p| p[0].elems.end <= p[1].elems.start));
        let moves = twice.plan((0..b.0).flat_map(|r| to.shard_extents(r).unwrap())).unwrap();
        prop_assert_eq!(apply(&moves, &storages(&from), &to), storages(&to));
    }

    /// The first extent in the list is the source of each element, as in a plain map.
    #[test]
    fn the_first_source_is_taken(parts in prop::collection::vec((0u64..40, 0u64..40, 0u64..5), 0..12)) {
        let layout = laid_out(&[UnitSpec::new("u", [ParamSpec::new("p", [40])])], 3, 1, 1);
        let extents: Vec<Extent> =
            parts.iter().map(|&(a, b, place)| Extent::new(a.min(b)..a.max(b), place, 100 * a.min(b))).collect();
        let mut plain = HashMap::new();
        for e in &extents {
            for (i, elem) in e.elems.clone().enumerate() {
                plain.entry(elem).or_insert((e.place, e.offset_elems + i as u64));
            }
        }
        let sources = Sources::first_of(&layout, extents).unwrap();
        let mut got = HashMap::new();
        for e in sources.extents() {
            for (i, elem) in e.elems.clone().enumerate() {
                prop_assert!(got.insert(elem, (e.place, e.offset_elems + i as u64)).is_none());
            }
        }
        prop_assert_eq!(&got, &plain);
        prop_assert_eq!(sources.check_complete().is_ok(), plain.len() == 40);
        prop_assert_eq!(sources.plan(layout.whole_extents(0)).is_ok(), plain.len() == 40);
    }

    /// For 10^13 elements and tens of thousands of ranks, one rank's plan can be computed without
    /// the others'. It fills all that the rank owns, and copies only from ranks that own it.
    #[test]
    fn huge_plans_are_made_a_rank_at_a_time(
        units in huge_units(), n in 1u64..=65_536, m in 16_384u64..=65_536, rank in any::<u64>(), align in 1u64..600,
    ) {
        let from = laid_out(&units, n, align, 1);
        let to = laid_out(&units, m, 128, 8);
        let rank = rank % m;
        let moves = reshard_rank(&from, &to, rank).unwrap();
        let owned: u64 = to.rank_pieces(rank).unwrap().map(|p| p.in_param.end - p.in_param.start).sum();
        prop_assert_eq!(moves.iter().map(Move::elems).sum::<u64>(), owned);
        for m in moves {
            let first = (from.global_at(m.from, m.from_range.start), from.global_at(m.from, m.from_range.end - 1));
            let last = (to.global_at(m.to, m.to_range.start), to.global_at(m.to, m.to_range.end - 1));
            prop_assert!(first.0.is_some());
            prop_assert_eq!(first, last);
        }
    }
}

fn model(name: &str, shape: &[u64]) -> Vec<UnitSpec> {
    vec![UnitSpec::new(
        "u",
        [ParamSpec::new("first", [4]), ParamSpec::new(name, shape)],
    )]
}

#[test]
fn neighbouring_pieces_are_one_move() {
    let layout = Layout::new(&model("p", &[8]), 1, 1).unwrap();
    assert_eq!(
        reshard(&layout, &layout).unwrap(),
        [Move {
            from: 0,
            from_range: 0..12,
            to: 0,
            to_range: 0..12
        }]
    );
}

#[test]
fn a_hole_is_named() {
    let to = Layout::new(&model("p", &[2, 3]), 2, 1).unwrap();
    let from = Layout::new(&model("q", &[2, 3]), 2, 1).unwrap();
    let hole = |in_param| ShardError::Hole {
        param: "p".into(),
        in_param,
    };
    assert_eq!(reshard(&from, &to), Err(hole(0..6)));
    let all = [
        to.extent("first", 0..4, 9, 0).unwrap(),
        to.extent("p", 0..2, 9, 4).unwrap(),
    ];
    let sources = Sources::new(&to, all.clone()).unwrap();
    assert_eq!(sources.check_complete(), Err(hole(2..6)));
    assert_eq!(sources.plan(to.shard_extents(1).unwrap()), Err(hole(2..6)));
    assert_eq!(sources.plan(to.whole_extents(1)), Err(hole(2..6)));
    // Elements that are not requested may be missing.
    assert_eq!(
        sources
            .plan([to.extent("first", 1..3, 5, 0).unwrap()])
            .unwrap()
            .len(),
        1
    );
    let more = all.into_iter().chain([to.extent("p", 3..6, 9, 7).unwrap()]);
    let sources = Sources::new(&to, more).unwrap();
    assert_eq!(sources.check_complete(), Err(hole(2..3)));
    assert_eq!(sources.plan(to.whole_extents(1)), Err(hole(2..3)));
    let none = Sources::new(&to, []).unwrap();
    assert_eq!(
        none.check_complete(),
        Err(ShardError::Hole {
            param: "first".into(),
            in_param: 0..4
        })
    );
}

#[test]
fn other_shapes_and_parameters_are_errors() {
    let to = Layout::new(&model("p", &[2, 3]), 2, 1).unwrap();
    let turned = Layout::new(&model("p", &[3, 2]), 2, 1).unwrap();
    let mismatch = ShardError::ShapeMismatch {
        param: "p".into(),
        expected: vec![2, 3],
        got: vec![3, 2],
    };
    assert_eq!(reshard(&turned, &to), Err(mismatch));
    let mut more = model("p", &[2, 3]);
    more.push(UnitSpec::new("v", [ParamSpec::new("extra", [1])]));
    let more = Layout::new(&more, 2, 1).unwrap();
    assert_eq!(
        reshard(&more, &to),
        Err(ShardError::Unwanted {
            param: "extra".into()
        })
    );
    assert_eq!(
        reshard_rank(&to, &to, 2),
        Err(ShardError::UnknownRank {
            rank: 2,
            world_size: 2
        })
    );
    assert_eq!(
        to.extent("x", 0..1, 0, 0),
        Err(ShardError::UnknownParam { name: "x".into() })
    );
    assert!(matches!(
        to.extent("p", 0..7, 0, 0),
        Err(ShardError::RangeOutside { len_elems: 6, .. })
    ));
}

#[test]
fn overlaps_and_ranges_outside_are_errors() {
    let to = Layout::new(&model("p", &[6]), 2, 1).unwrap();
    let twice = [Extent::new(0..6, 3, 0), Extent::new(5..10, 8, 0)];
    let overlap = ShardError::SourcesOverlap {
        param: "p".into(),
        in_param: 1..2,
        places: [3, 8],
    };
    assert_eq!(Sources::new(&to, twice.clone()).unwrap_err(), overlap);
    assert!(Sources::first_of(&to, twice).is_ok());
    let outside = |e: ShardError| {
        assert!(
            matches!(e, ShardError::RangeOutside { len_elems: 10, .. }),
            "{e}"
        )
    };
    outside(Sources::new(&to, [Extent::new(0..11, 0, 0)]).unwrap_err());
    outside(Sources::first_of(&to, [Extent::new(0..11, 0, 0)]).unwrap_err());
    let end = Extent::new(0..2, 7, u64::MAX - 1);
    assert_eq!(
        Sources::new(&to, [end]).unwrap_err(),
        ShardError::TooLarge {
            what: "an offset of place 7".into()
        }
    );
    let sources = Sources::new(&to, [Extent::new(0..10, 0, 0)]).unwrap();
    outside(sources.plan([Extent::new(9..11, 0, 0)]).unwrap_err());
    let collide = sources
        .plan([Extent::new(0..4, 1, 0), Extent::new(4..8, 1, 3)])
        .unwrap_err();
    assert_eq!(
        collide,
        ShardError::TargetsOverlap {
            place: 1,
            in_storage: 3..4
        }
    );
    // The same elements may go to two places.
    assert_eq!(
        sources
            .plan([Extent::new(0..4, 1, 0), Extent::new(0..4, 2, 0)])
            .unwrap()
            .len(),
        2
    );
}

#[test]
fn a_tied_name_finds_the_elements_of_the_other() {
    let tied = |head: &str| {
        let options = LayoutOptions::default().ties(vec![Tie::new("u", head, "p")]);
        Layout::with_options(&model("p", &[6]), 2, options).unwrap()
    };
    let named_head = Layout::new(&model("head", &[6]), 3, 1).unwrap();
    let moves = reshard(&tied("head"), &named_head).unwrap();
    assert_eq!(moves.iter().map(Move::elems).sum::<u64>(), 10);
    assert_eq!(
        tied("head").extent("head", 1..2, 0, 0),
        tied("head").extent("p", 1..2, 0, 0)
    );
}
