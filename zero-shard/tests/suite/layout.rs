//! Partition, order, inverse maps and balance of layouts: small models are compared with a plain
//! list of elements, large ones are checked at sampled elements.

use crate::support::{cases, huge_layout, huge_units, laid_out, small_layout};
use proptest::prelude::*;
use zero_shard::{
    Layout, LayoutOptions, LayoutSpec, ParamId, ParamSpec, ShardError, Tie, UnitSpec,
};

/// The flat parameter of a unit, element by element: the global index, or padding.
fn plain_flat(layout: &Layout, unit: usize) -> Vec<Option<u64>> {
    let placed = &layout.units()[unit];
    let mut flat = Vec::new();
    let mut global: u64 = layout.units()[..unit].iter().map(|u| u.numel_elems).sum();
    let options = layout.options();
    let mut was_small = false;
    for p in &placed.params {
        let numel = p.shape.iter().product::<u64>();
        let is_odd = !numel.is_multiple_of(options.param_align_elems);
        let is_small =
            options.packed_below_elems > 0 && (is_odd || numel < options.packed_below_elems);
        let is_packed = is_small && was_small;
        was_small = is_small;
        while !is_packed && !(flat.len() as u64).is_multiple_of(options.param_align_elems) {
            flat.push(None);
        }
        for _ in 0..p.shape.iter().product::<u64>() {
            flat.push(Some(global));
            global += 1;
        }
    }
    let chunk = layout.world_size() * layout.align_elems();
    while !(flat.len() as u64).is_multiple_of(chunk) {
        flat.push(None);
    }
    flat
}

/// All shard storages, rank by rank, element by element.
fn plain_storages(layout: &Layout) -> Vec<Vec<Option<u64>>> {
    let mut storages = vec![Vec::new(); layout.world_size() as usize];
    for unit in 0..layout.units().len() {
        let flat = plain_flat(layout, unit);
        for (rank, shard) in flat
            .chunks((flat.len() / storages.len()).max(1))
            .enumerate()
        {
            storages[rank].extend_from_slice(shard);
        }
    }
    storages
}

proptest! {
    #![proptest_config(cases(300))]

    /// Every element has one owner, the owner's place maps back to the element, and nothing else is
    /// owned.
    #[test]
    fn elements_are_partitioned_as_a_plain_list_is(layout in small_layout()) {
        let storages = plain_storages(&layout);
        let mut seen = 0;
        for (rank, storage) in storages.iter().enumerate() {
            prop_assert_eq!(storage.len() as u64, layout.shard_elems());
            for (at, &global) in storage.iter().enumerate() {
                prop_assert_eq!(layout.global_at(rank as u64, at as u64), global);
                if let Some(global) = global {
                    let found = layout.locate_elem(global).unwrap();
                    prop_assert_eq!((found.rank, found.in_storage), (rank as u64, at as u64));
                    prop_assert_eq!(layout.place_of(found.id, found.in_param), Some((rank as u64, at as u64)));
                    prop_assert_eq!(layout.param(found.id).unwrap().global_offset_elems + found.in_param, global);
                    seen += 1;
                }
            }
        }
        prop_assert_eq!(seen, layout.numel_elems());
        prop_assert_eq!(layout.owner(layout.numel_elems()), None);
        prop_assert_eq!(layout.global_at(0, layout.shard_elems()), None);
        prop_assert_eq!(layout.global_at(layout.world_size(), 0), None);
    }

    /// `params_in` lists the pieces of a shard in order, without overlap; `locate` of each piece
    /// returns it.
    #[test]
    fn locate_and_params_in_are_inverse(layout in small_layout(), cut in (0u64..200, 0u64..200)) {
        let storages = plain_storages(&layout);
        for (u, unit) in layout.units().iter().enumerate() {
            let a = cut.0.min(unit.shard_elems);
            let b = cut.1.min(unit.shard_elems);
            let range = a.min(b)..a.max(b);
            for rank in 0..layout.world_size() {
                let storage = &storages[rank as usize];
                let mut listed = vec![None; storage.len()];
                let mut last_end = 0;
                for piece in layout.params_in(u, rank, range.clone()).unwrap() {
                    prop_assert!(piece.in_storage.start < piece.in_storage.end && last_end <= piece.in_storage.start);
                    last_end = piece.in_storage.end;
                    let global = layout.param(piece.id).unwrap().global_offset_elems;
                    for (i, at) in piece.in_storage.clone().enumerate() {
                        listed[at as usize] = Some(global + piece.in_param.start + i as u64);
                    }
                    let back: Vec<_> = layout.locate(piece.id, piece.in_param.clone()).unwrap().collect();
                    prop_assert_eq!(back, vec![piece]);
                }
                let base = unit.shard_offset_elems as usize;
                let inside = base + range.start as usize..base + range.end as usize;
                prop_assert_eq!(&listed[inside.clone()], &storage[inside]);
            }
        }

        for rank in 0..layout.world_size() {
            let count: u64 = layout.rank_pieces(rank).unwrap().map(|p| p.in_param.end - p.in_param.start).sum();
            prop_assert_eq!(count, storages[rank as usize].iter().flatten().count() as u64);
        }
    }

    /// `locate` splits any range of a parameter at shard boundaries and nowhere else.
    #[test]
    fn located_pieces_cover_the_range_in_order(layout in small_layout(), cut in (0u64..300, 0u64..300)) {
        for (id, p) in layout.params() {
            let a = cut.0.min(p.numel_elems);
            let b = cut.1.min(p.numel_elems);
            let range = a.min(b)..a.max(b);
            let mut at = range.start;
            let mut last_rank = None;
            for piece in layout.locate(id, range.clone()).unwrap() {
                prop_assert_eq!(piece.in_param.start, at);
                prop_assert!(last_rank < Some(piece.rank));
                (at, last_rank) = (piece.in_param.end, Some(piece.rank));
                for (i, in_param) in piece.in_param.clone().enumerate() {
                    let found = layout.place_of(id, in_param).unwrap();
                    prop_assert_eq!(found, (piece.rank, piece.in_storage.start + i as u64));
                }
            }
            prop_assert_eq!(at, range.end);
        }
    }

    /// Every shard is a multiple of the alignment, and less than one alignment longer than
    /// necessary.
    #[test]
    fn shards_are_balanced_and_aligned(units in huge_units(), ranks in 1u64..=65_536, align in 1u64..5_000) {
        let layout = laid_out(&units, ranks, align, 1);
        let mut whole = 0;
        let mut shard = 0;
        for (i, unit) in layout.units().iter().enumerate() {
            prop_assert_eq!(unit.shard_elems % align, 0);
            for rank in [0, ranks / 2, ranks - 1] {
                let shard = unit.shard(rank);
                prop_assert_eq!(shard.end - shard.start, unit.shard_elems);
                let own = layout.own_in_whole(i, rank).unwrap();
                prop_assert_eq!(own, whole + shard.start..whole + shard.end);
            }
            prop_assert_eq!(unit.padded_elems, unit.shard_elems * ranks);
            prop_assert!(unit.padded_elems >= unit.numel_elems);
            prop_assert!(unit.shard_elems < unit.numel_elems.div_ceil(ranks) + align);
            prop_assert_eq!((unit.whole_offset_elems, unit.shard_offset_elems), (whole, shard));
            (whole, shard) = (whole + unit.padded_elems, shard + unit.shard_elems);
            prop_assert_eq!(unit.shard(0).start, 0);
            prop_assert_eq!(unit.shard(ranks - 1).end, unit.padded_elems);
            prop_assert!(unit.shard(ranks).is_empty() && unit.shard(u64::MAX).is_empty());
        }

        prop_assert_eq!((layout.padded_elems(), layout.shard_elems()), (whole, shard));
        prop_assert!(layout.own_in_whole(units.len(), 0).is_err() && layout.own_in_whole(0, ranks).is_err());
    }

    /// A layout equals the layout of its specification.
    #[test]
    fn a_layout_is_its_specification(layout in small_layout()) {
        prop_assert_eq!(Layout::try_from(LayoutSpec::from(layout.clone())), Ok(layout));
    }

    /// The maps are inverse for 10^13 elements over 65,536 ranks.
    #[test]
    fn huge_layouts_invert(layout in huge_layout(), samples in prop::collection::vec(any::<u64>(), 20)) {
        for sample in samples {
            if layout.numel_elems() > 0 {
                let global = sample % layout.numel_elems();
                let at = layout.locate_elem(global).unwrap();
                prop_assert_eq!(layout.global_at(at.rank, at.in_storage), Some(global));
                prop_assert_eq!(layout.owner(global), Some(at.rank));
                let unit = &layout.units()[at.id.unit];
                prop_assert!(unit.shard_range().contains(&at.in_storage));
                let p = layout.param(at.id).unwrap();
                prop_assert!(p.global_range().contains(&global));
                prop_assert_eq!(layout.find_param(&p.name), Some(at.id));
                let piece = layout.locate(at.id, at.in_param..at.in_param + 1).unwrap().next().unwrap();
                prop_assert_eq!((piece.rank, piece.in_storage.start), (at.rank, at.in_storage));
            }
        }
    }

    /// Buckets cover each shard, within the capacity.
    #[test]
    fn buckets_cover_every_shard_once(layout in small_layout(), capacity in 0u64..300) {
        for u in 0..layout.units().len() {
            let mut end = 0;
            let unit = &layout.units()[u];
            for piece in zero_shard::bucket_pieces(unit.shard_elems, layout.world_size(), capacity) {
                prop_assert_eq!(piece.in_shard.start, end);
                prop_assert!(piece.elems() <= capacity.max(layout.world_size()));
                end = piece.in_shard.end;
                for (rank, segment) in piece.segments().enumerate() {
                    prop_assert_eq!(segment.start, unit.shard(rank as u64).start + piece.in_shard.start);
                    prop_assert_eq!(segment.end - segment.start, piece.segment_elems());
                }
            }
            prop_assert_eq!(end, unit.shard_elems);
        }
    }
}

fn one(shape: &[u64]) -> Vec<UnitSpec> {
    vec![UnitSpec::new("u", [ParamSpec::new("p", shape)])]
}

#[test]
fn a_model_smaller_than_the_world_has_ranks_of_padding() {
    let layout = Layout::new(&one(&[3]), 8, 1).unwrap();
    assert_eq!((layout.shard_elems(), layout.padded_elems()), (1, 8));
    assert_eq!(
        (0..4).map(|i| layout.owner(i)).collect::<Vec<_>>(),
        [Some(0), Some(1), Some(2), None]
    );
    assert!((3..8).all(|rank| layout.rank_pieces(rank).unwrap().next().is_none()));
}

#[test]
fn empty_models_units_and_parameters_are_layouts() {
    let empty = Layout::new(&[], 4, 8).unwrap();
    assert_eq!(
        (empty.numel_elems(), empty.padded_elems(), empty.owner(0)),
        (0, 0, None)
    );
    let layout = Layout::new(&one(&[5, 0]), 4, 8).unwrap();
    assert_eq!(
        (layout.padded_elems(), layout.units()[0].owner(0)),
        (0, None)
    );
    let id = layout.find_param("p").unwrap();
    assert_eq!(layout.locate(id, 0..0).unwrap().count(), 0);
    assert_eq!(layout.units()[0].locate(0..0).unwrap().count(), 0);
    assert_eq!(zero_shard::bucket_pieces(0, 4, 100).count(), 0);
    // An extent of 0 makes the parameter empty, however large the others are.
    assert_eq!(
        Layout::new(&one(&[u64::MAX, u64::MAX, 0]), 4, 8)
            .unwrap()
            .numel_elems(),
        0
    );
}

#[test]
fn ties_are_names_without_elements() {
    let units = [
        UnitSpec::new(
            "embedding",
            [
                ParamSpec::new("wte", [10, 4]),
                ParamSpec::new("wpe", [3, 4]),
            ],
        ),
        UnitSpec::new("head", [ParamSpec::new("ln_f", [4])]),
    ];

    let options = LayoutOptions::default().ties(vec![Tie::new("head", "lm_head", "wte")]);
    let layout = Layout::with_options(&units, 2, options).unwrap();
    assert_eq!(layout.numel_elems(), 56);
    assert_eq!(
        layout.find_param("lm_head"),
        Some(ParamId { unit: 0, param: 0 })
    );
    assert_eq!(
        (layout.units_needed_by(0), layout.units_needed_by(1)),
        (vec![0], vec![0, 1])
    );

    assert_eq!(
        layout
            .ties()
            .map(|(t, user, id)| (t.name.as_str(), user, id.unit))
            .next(),
        Some(("lm_head", 1, 0))
    );

    assert_eq!(layout.find_param("nothing"), None);
}

#[test]
fn each_wrong_layout_has_its_error() {
    let units = one(&[4]);
    let with = |options: LayoutOptions| Layout::with_options(&units, 2, options).unwrap_err();
    assert_eq!(Layout::new(&units, 0, 1).unwrap_err(), ShardError::NoRanks);
    assert_eq!(
        Layout::new(&units, 1, 0).unwrap_err(),
        ShardError::ZeroAlignment
    );
    assert_eq!(
        with(LayoutOptions::default().param_align_elems(0)),
        ShardError::ZeroAlignment
    );
    let twice = [
        UnitSpec::new("a", [ParamSpec::new("p", [1])]),
        UnitSpec::new("b", [ParamSpec::new("p", [1])]),
    ];
    assert_eq!(
        Layout::new(&twice, 1, 1).unwrap_err(),
        ShardError::DuplicateName { name: "p".into() }
    );
    let twice = [UnitSpec::new("a", []), UnitSpec::new("a", [])];
    assert_eq!(
        Layout::new(&twice, 1, 1).unwrap_err(),
        ShardError::DuplicateName { name: "a".into() }
    );
    let tie =
        |unit, name, target| LayoutOptions::default().ties(vec![Tie::new(unit, name, target)]);
    assert_eq!(
        with(tie("u", "p", "p")),
        ShardError::DuplicateName { name: "p".into() }
    );
    assert_eq!(
        with(tie("v", "q", "p")),
        ShardError::UnknownUnitName { name: "v".into() }
    );
    assert_eq!(
        with(tie("u", "q", "r")),
        ShardError::UnknownParam { name: "r".into() }
    );
    // The target of a tie must be a parameter, not a tie.
    assert_eq!(
        with(tie("u", "q", "q")),
        ShardError::UnknownParam { name: "q".into() }
    );
}

#[test]
fn sizes_beyond_64_bits_are_errors() {
    let too_large = |e: ShardError| assert!(matches!(e, ShardError::TooLarge { .. }), "{e}");
    too_large(Layout::new(&one(&[1 << 32, 1 << 32]), 1, 1).unwrap_err());
    too_large(Layout::new(&one(&[u64::MAX]), 2, 1).unwrap_err());
    too_large(Layout::new(&one(&[u64::MAX]), 1, 2).unwrap_err());
    too_large(Layout::new(&one(&[1]), u64::MAX, 2).unwrap_err());
    let two = |a: u64, b: u64| {
        [
            UnitSpec::new("a", [ParamSpec::new("x", [a])]),
            UnitSpec::new("b", [ParamSpec::new("y", [b])]),
        ]
    };

    too_large(Layout::new(&two(u64::MAX, 1), 1, 1).unwrap_err());
    let largest = Layout::new(&two(u64::MAX - 1, 1), 1, 1).unwrap();
    assert_eq!(largest.owner(u64::MAX - 1), Some(0));
    assert_eq!(largest.owner(u64::MAX), None);
    let both = [UnitSpec::new(
        "a",
        [ParamSpec::new("x", [u64::MAX]), ParamSpec::new("y", [1])],
    )];
    too_large(Layout::new(&both, 1, 1).unwrap_err());
    let gap = LayoutOptions::default().param_align_elems(1 << 63);
    let three = [1u64, 1, 1]
        .iter()
        .enumerate()
        .map(|(i, &n)| ParamSpec::new(format!("{i}"), [n]));
    let three = [UnitSpec::new("a", three.collect::<Vec<_>>())];
    too_large(Layout::with_options(&three, 1, gap).unwrap_err());
}

#[test]
fn ranges_and_ranks_outside_are_errors() {
    let layout = Layout::new(&one(&[10]), 4, 1).unwrap();
    let id = ParamId { unit: 0, param: 0 };
    let outside = |e: ShardError| assert!(matches!(e, ShardError::RangeOutside { .. }), "{e}");
    outside(layout.locate(id, 0..11).err().unwrap());
    #[expect(clippy::reversed_empty_ranges)]
    outside(layout.locate(id, 3..2).err().unwrap());
    outside(layout.units()[0].locate(0..13).err().unwrap());
    outside(layout.units()[0].params_in(0..13).err().unwrap());
    outside(layout.params_in(0, 0, 0..4).err().unwrap());
    assert_eq!(
        layout.params_in(1, 0, 0..1).err(),
        Some(ShardError::UnknownUnit { unit: 1, units: 1 })
    );

    assert_eq!(
        layout.rank_pieces(4).err(),
        Some(ShardError::UnknownRank {
            rank: 4,
            world_size: 4
        })
    );

    let none = layout.locate(ParamId { unit: 0, param: 1 }, 0..1).err();
    assert_eq!(
        none,
        Some(ShardError::UnknownParam {
            name: "number 1 of u".into()
        })
    );
    assert_eq!(layout.place_of(id, 10), None);
}

#[test]
fn alignment_to_blocks_keeps_other_alignments() {
    for (own, expected) in [
        (1, 256),
        (16, 256),
        (24, 768),
        (256, 256),
        (512, 512),
        (0, 0),
    ] {
        let options = LayoutOptions::default().shard_align_elems(own);
        assert_eq!(options.in_blocks().shard_align_elems, expected, "{own}");
    }
}
