//! Reshard plans, applied to storages in which all elements differ.

use crate::support::{cases, huge_units, laid_out, small_units};
use proptest::prelude::*;
use zero_shard::{Layout, LayoutOptions, Move, ParamSpec, ShardError, Tie, UnitSpec, reshard_rank};

const PADDING: u64 = u64::MAX;

/// The plans of all ranks of `to`, in their order.
fn reshard(from: &Layout, to: &Layout) -> Result<Vec<Move>, ShardError> {
    let mut moves = Vec::new();
    for rank in 0..to.world_size() {
        moves.extend(reshard_rank(from, to, rank)?);
    }
    Ok(moves)
}

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
    }

    /// Resharding through a third layout equals resharding directly.
    #[test]
    fn plans_compose(units in small_units(), a in shape(), b in shape(), c in shape()) {
        let [a, b, c] = [a, b, c].map(|s| laid_out(&units, s.0, s.1, s.2));
        let start = storages(&a);
        let through = apply(&reshard(&b, &c).unwrap(), &apply(&reshard(&a, &b).unwrap(), &start, &b), &c);
        prop_assert_eq!(through, apply(&reshard(&a, &c).unwrap(), &start, &c));
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
}
