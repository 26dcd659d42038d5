//! Cuts of parameters among tensor-parallel ranks, against a plain loop over all indices.

use crate::support::{cases, small_units};
use proptest::prelude::*;
use zero_shard::{
    Layout, ParamSpec, ShardError, TensorCut, TensorPart, TensorPiece, TensorRun, UnitSpec,
    joined_units, tensor_pieces,
};

/// A parameter that `ranks` ranks can divide.
#[derive(Clone, Debug)]
struct Case {
    param: ParamSpec,
    cut: TensorCut,
    ranks: u64,
}

/// Parameters of up to three dimensions, with extents of 0 besides the cut one.
fn case() -> impl Strategy<Value = Case> {
    let replicated =
        (prop::collection::vec(0u64..5, 0..4), 1u64..5).prop_map(|(shape, ranks)| Case {
            param: ParamSpec::new("p", shape),
            cut: TensorCut::Replicated,
            ranks,
        });
    let other = || prop::collection::vec(0u64..5, 0..3);
    let cut = (other(), other(), 1u64..5, 1u64..4, 1u64..4, any::<u64>()).prop_map(
        |(outer, inner, ranks, blocks, rows, missing)| {
            // The last rank may have fewer than `rows` rows of a single block.
            let padding = if blocks == 1 {
                missing % rows.min(ranks)
            } else {
                0
            };
            let extent = rows * ranks * blocks - padding;
            let dim = outer.len();
            let shape = [outer, vec![extent], inner].concat();
            Case {
                param: ParamSpec::new("p", shape),
                cut: TensorCut::Dim { dim, blocks },
                ranks,
            }
        },
    );
    prop_oneof![1 => replicated, 4 => cut]
}

/// The element of the whole parameter that each element of the part of `rank` is.
fn part_by_loop(case: &Case, rank: u64) -> Vec<Option<u64>> {
    let shape = &case.param.shape;
    let (dim, blocks) = match case.cut {
        TensorCut::Replicated => {
            return (0..shape.iter().product()).map(Some).collect();
        }
        TensorCut::Dim { dim, blocks } => (dim, blocks),
    };
    let outer: u64 = shape[..dim].iter().product();
    let extent = shape[dim];
    let inner: u64 = shape[dim + 1..].iter().product();
    let rows = extent.div_ceil(blocks * case.ranks);

    let mut part = Vec::new();
    for o in 0..outer {
        for block in 0..blocks {
            for row in rank * rows..(rank + 1) * rows {
                for i in 0..inner {
                    let whole_row = block * (extent / blocks) + row;
                    let is_real = row < extent / blocks;
                    part.push(is_real.then(|| (o * extent + whole_row) * inner + i));
                }
            }
        }
    }
    part
}

fn part(rank: u64, ranks: u64) -> TensorPart {
    TensorPart::new(rank, ranks).unwrap()
}

proptest! {
    #![proptest_config(cases(256))]

    /// The parts of all ranks have each element of a cut parameter once, each of a replicated one
    /// on every rank.
    #[test]
    fn parts_cover_the_parameter(case in case()) {
        let numel = case.param.numel_elems().unwrap();
        let mut held = vec![0; numel as usize];
        for rank in 0..case.ranks {
            let part = part(rank, case.ranks);
            let shape = part.shape(&case.param, case.cut).unwrap();
            let elems = shape.iter().product();
            for run in part.runs(&case.param, case.cut, 0..elems).unwrap() {
                for elem in run.in_whole.into_iter().flatten() {
                    held[elem as usize] += 1;
                }
            }
        }
        let times = match case.cut {
            TensorCut::Replicated => case.ranks,
            TensorCut::Dim { .. } => 1,
        };
        prop_assert!(held.iter().all(|held| *held == times));
    }

    /// The runs of any range agree with the loop over [outer, blocks, rows, inner], are adjacent,
    /// and are as long as they can be.
    #[test]
    fn runs_of_any_range_match_a_loop(case in case(), rank in any::<u64>(), a in any::<u64>(), b in any::<u64>()) {
        let rank = rank % case.ranks;
        let expected = part_by_loop(&case, rank);
        let len = expected.len() as u64;
        let (a, b) = (a % (len + 1), b % (len + 1));
        let range = a.min(b)..a.max(b);
        let runs: Vec<TensorRun> =
            part(rank, case.ranks).runs(&case.param, case.cut, range.clone()).unwrap().collect();

        let mut at = range.start;
        for run in &runs {
            prop_assert_eq!(run.in_part.start, at);
            prop_assert!(!run.in_part.is_empty() && run.in_part.end <= range.end);
            let elems = run.in_part.end - run.in_part.start;
            let whole: Vec<Option<u64>> = match &run.in_whole {
                Some(whole) => whole.clone().map(Some).collect(),
                None => vec![None; elems as usize],
            };
            prop_assert_eq!(&whole[..], &expected[at as usize..run.in_part.end as usize]);
            at = run.in_part.end;
        }
        prop_assert_eq!(at, range.end);

        for two in runs.windows(2) {
            let joined = match (&two[0].in_whole, &two[1].in_whole) {
                (Some(first), Some(second)) => first.end == second.start,
                (None, None) => true,
                _ => false,
            };
            prop_assert!(!joined, "{:?}", two);
        }
    }

    /// The pieces of any range of the whole parameter are in the parts where the runs say.
    #[test]
    fn pieces_invert_runs(case in case(), a in any::<u64>(), b in any::<u64>()) {
        let numel = case.param.numel_elems().unwrap();
        let (a, b) = (a % (numel + 1), b % (numel + 1));
        let range = a.min(b)..a.max(b);
        let parts: Vec<_> = (0..case.ranks).map(|rank| part_by_loop(&case, rank)).collect();
        let pieces: Vec<TensorPiece> =
            tensor_pieces(&case.param, case.cut, case.ranks, range.clone()).unwrap().collect();

        let mut at = range.start;
        for piece in &pieces {
            prop_assert_eq!(piece.in_whole.start, at);
            prop_assert!(!piece.in_whole.is_empty() && piece.in_whole.end <= range.end);
            let held = &parts[piece.rank as usize][piece.in_part.start as usize..piece.in_part.end as usize];
            let expected: Vec<_> = piece.in_whole.clone().map(Some).collect();
            prop_assert_eq!(held, &expected[..]);
            at = piece.in_whole.end;
        }
        prop_assert_eq!(at, range.end);
        let joinable = |two: &[TensorPiece]| two[0].rank == two[1].rank && two[0].in_part.end == two[1].in_part.start;
        prop_assert!(!pieces.windows(2).any(joinable), "{:?}", pieces);
    }

    /// A unit's part has the cut parameters first; its first `cut_elems` elements are theirs.
    #[test]
    fn unit_has_cut_parameters_first(
        shapes in prop::collection::vec((1u64..4, 1u64..4, any::<bool>()), 0..6), ranks in 1u64..5, rank in any::<u64>(),
    ) {
        let part = part(rank % ranks, ranks);
        let cut_of = |p: &ParamSpec| match p.name.starts_with('c') {
            true => TensorCut::Dim { dim: 1, blocks: 1 },
            false => TensorCut::Replicated,
        };
        let param = |(i, (rows, columns, is_cut)): (usize, &(u64, u64, bool))| {
            let kind = if *is_cut { 'c' } else { 'r' };
            ParamSpec::new(format!("{kind}{i}"), [*rows, columns * ranks])
        };
        let unit = UnitSpec::new("u", shapes.iter().enumerate().map(param).collect::<Vec<_>>());
        let local = part.unit(&unit, cut_of).unwrap();
        let cut_elems = part.cut_elems(&unit, cut_of).unwrap();
        let elems = |params: &[ParamSpec]| params.iter().map(|p| p.numel_elems().unwrap()).sum::<u64>();

        prop_assert_eq!(&local.name, "u");
        if ranks == 1 {
            prop_assert_eq!(&local, &unit);
            prop_assert_eq!(cut_elems, elems(&unit.params));
            return Ok(());
        }
        let first = local.params.iter().filter(|p| p.name.starts_with('c')).count();
        prop_assert!(local.params[..first].iter().all(|p| p.name.starts_with('c')));
        prop_assert_eq!(elems(&local.params[..first]), cut_elems);
        let mut again: Vec<_> = local.params.iter().map(|p| p.name[1..].to_owned()).collect();
        prop_assert!(again[..first].is_sorted() && again[first..].is_sorted());
        again.sort();
        prop_assert!(again.iter().enumerate().all(|(i, name)| *name == i.to_string()));
    }
}

proptest! {
    #![proptest_config(cases(256))]

    /// Shard m * D + d of a joined unit is shard d of part m, with its padding behind the last part.
    #[test]
    fn shards_of_joined_units_are_those_of_the_parts(
        units in small_units(), tensor_ranks in 1u64..6, data_ranks in 1u64..6, align in 1u64..20,
    ) {
        let local = Layout::new(&units, data_ranks, align).unwrap();
        let joined = joined_units(&units, tensor_ranks, data_ranks, align).unwrap();
        let joined = Layout::new(&joined, tensor_ranks * data_ranks, align).unwrap();
        prop_assert_eq!(joined.shard_elems(), local.shard_elems());

        for (unit, part) in joined.units().iter().zip(local.units()) {
            prop_assert_eq!((&unit.name, unit.shard_range()), (&part.name, part.shard_range()));
            let stride = part.params.len() + 1;
            for m in 0..tensor_ranks {
                for (i, param) in part.params.iter().enumerate() {
                    let placed = &unit.params[m as usize * stride + i];
                    let name = match tensor_ranks {
                        1 => param.name.clone(),
                        _ => format!("{}@{m}/{tensor_ranks}", param.name),
                    };
                    prop_assert_eq!((&placed.name, &placed.shape), (&name, &param.shape));
                    let part_start = m * data_ranks * part.shard_elems;
                    prop_assert_eq!(placed.offset_elems, part_start + param.offset_elems);
                }
            }
        }
    }
}

#[test]
fn padding_is_behind_every_part_but_the_last() {
    let units = [UnitSpec::new("head", [ParamSpec::new("w", [5u64])])];
    let joined = joined_units(&units, 3, 2, 4).unwrap();
    let params: Vec<_> = joined[0]
        .params
        .iter()
        .map(|p| (p.name.as_str(), p.shape[0]))
        .collect();
    assert_eq!(
        params,
        [
            ("w@0/3", 5),
            ("pad.head@0/3", 3),
            ("w@1/3", 5),
            ("pad.head@1/3", 3),
            ("w@2/3", 5)
        ]
    );
    assert_eq!(joined_units(&units, 0, 2, 4), Err(ShardError::NoRanks));
    assert_eq!(joined_units(&units, 3, 0, 4), Err(ShardError::NoRanks));
    assert_eq!(
        joined_units(&units, 3, 2, 0),
        Err(ShardError::ZeroAlignment)
    );
}

#[test]
fn vocabulary_is_padded() {
    let wte = ParamSpec::new("wte", [5u64, 2]);
    let cut = TensorCut::Dim { dim: 0, blocks: 1 };
    let last = part(1, 2);
    assert_eq!(last.shape(&wte, cut).unwrap(), [3, 2]);
    let runs: Vec<_> = last.runs(&wte, cut, 1..6).unwrap().collect();
    let expected = [
        TensorRun {
            in_part: 1..4,
            in_whole: Some(7..10),
        },
        TensorRun {
            in_part: 4..6,
            in_whole: None,
        },
    ];
    assert_eq!(runs, expected);
}

#[test]
fn columns_of_three_blocks_are_cut() {
    let c_attn = ParamSpec::new("c_attn", [2u64, 12]);
    let cut = TensorCut::Dim { dim: 1, blocks: 3 };
    let part = part(1, 2);
    assert_eq!(part.shape(&c_attn, cut).unwrap(), [2, 6]);
    let elems: Vec<u64> = part
        .runs(&c_attn, cut, 0..12)
        .unwrap()
        .flat_map(|run| run.in_whole.unwrap())
        .collect();
    assert_eq!(elems, [2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23]);
}

/// A dimension of 10^15 takes a few steps, not one for each row.
#[test]
fn huge_parameters_have_few_runs() {
    let param = ParamSpec::new("p", [1_000_000_000_000_001u64, 4096]);
    let cut = TensorCut::Dim { dim: 0, blocks: 1 };
    let last = part(7, 8);
    let elems = last.shape(&param, cut).unwrap().iter().product();
    assert_eq!(last.runs(&param, cut, 0..elems).unwrap().count(), 2);
    let numel = param.numel_elems().unwrap();
    let pieces = tensor_pieces(&param, cut, 8, 0..numel).unwrap();
    assert_eq!(pieces.count(), 8);
}

#[test]
fn impossible_cuts_are_rejected() {
    let param = ParamSpec::new("h.0.w", [2u64, 12]);
    let dim = |dim, blocks| TensorCut::Dim { dim, blocks };
    let text = |cut, ranks| part(0, ranks).shape(&param, cut).unwrap_err().to_string();

    let missing = text(dim(2, 1), 2);
    assert!(
        missing.contains("\"h.0.w\"") && missing.contains("it has 2 dimensions"),
        "{missing}"
    );
    let uneven = text(dim(1, 3), 8);
    assert!(
        uneven.contains("\"h.0.w\"") && uneven.contains("extent 12"),
        "{uneven}"
    );
    assert!(uneven.contains("3 * 8"), "{uneven}");
    assert!(text(dim(1, 0), 2).contains("0 blocks"));
    assert!(text(dim(1, u64::MAX), 2).contains("is not a multiple of"));

    // 12 rows over 8 ranks are 2 rows on each of 6 ranks.
    let empty = text(dim(1, 1), 8);
    assert!(
        empty.contains("extent 12") && empty.contains("use fewer ranks"),
        "{empty}"
    );
    let none = ParamSpec::new("none", [0u64]);
    assert!(part(0, 2).shape(&none, dim(0, 1)).is_err());
    assert_eq!(TensorPart::whole().shape(&none, dim(0, 1)).unwrap(), [0]);

    let part = part(0, 2);
    let unit = UnitSpec::new("u", [param.clone()]);
    assert!(part.unit(&unit, |_| dim(2, 1)).is_err());
    assert!(part.cut_elems(&unit, |_| dim(2, 1)).is_err());
    assert!(part.runs(&param, dim(2, 1), 0..0).is_err());
    assert!(tensor_pieces(&param, dim(2, 1), 2, 0..0).is_err());
    assert!(matches!(
        part.runs(&param, dim(1, 3), 0..13).err().unwrap(),
        ShardError::RangeOutside { len_elems: 12, .. }
    ));
    assert!(matches!(
        tensor_pieces(&param, dim(1, 3), 2, 0..25).err().unwrap(),
        ShardError::RangeOutside { len_elems: 24, .. }
    ));

    // It fits 64 bits without its padding.
    let padded = ParamSpec::new("padded", [(1u64 << 62) - 1, 4]);
    assert!(matches!(
        part.shape(&padded, dim(0, 1)).unwrap_err(),
        ShardError::TooLarge { .. }
    ));
    let huge = ParamSpec::new("huge", [u64::MAX, 2]);
    assert!(matches!(
        part.shape(&huge, TensorCut::Replicated).unwrap_err(),
        ShardError::TooLarge { .. }
    ));
}

#[test]
fn part_of_no_rank_is_rejected() {
    for (rank, ranks) in [(0, 0), (2, 2)] {
        let error = TensorPart::new(rank, ranks).unwrap_err();
        assert_eq!(
            error,
            ShardError::UnknownRank {
                rank,
                world_size: ranks
            }
        );
    }
    assert_eq!(
        (TensorPart::whole().rank(), TensorPart::whole().ranks()),
        (0, 1)
    );
}

#[test]
fn cuts_round_trip_through_json() {
    for (cut, text) in [
        (TensorCut::Replicated, "\"replicated\""),
        (
            TensorCut::Dim { dim: 1, blocks: 3 },
            "{\"dim\":{\"dim\":1,\"blocks\":3}}",
        ),
    ] {
        assert_eq!(serde_json::to_string(&cut).unwrap(), text);
        assert_eq!(serde_json::from_str::<TensorCut>(text).unwrap(), cut);
    }
}
