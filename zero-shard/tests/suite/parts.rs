//! Parameter groups and two-dimensional topologies.

use std::ops::Range;

use crate::support::{cases, laid_out, small_layout, small_units};
use proptest::prelude::*;
use zero_shard::{
    Grid, GridLayout, Layout, LayoutOptions, ParamId, ParamSpec, Routing, ShardError, Sharding,
    UnitSpec, Widths, ZeroStage,
};

proptest! {
    #![proptest_config(cases(200))]

    /// Runs tile both storages. Elements are in their parameter's group, padding in that of the
    /// parameter before it.
    #[test]
    fn group_runs_tile_the_storages(layout in small_layout(), mask in any::<u64>()) {
        let group_of = |id: ParamId| (mask >> ((id.unit * 5 + id.param) % 64)) as usize & 1;
        let tiled = |runs: &[(Range<usize>, usize)], elems: u64| {
            runs.windows(2).all(|two| two[0].0.end == two[1].0.start && two[0].1 != two[1].1)
                && runs.iter().all(|(run, _)| !run.is_empty())
                && runs.first().map_or(0, |(run, _)| run.start) == 0
                && runs.last().map_or(0, |(run, _)| run.end) as u64 == elems
        };

        let group_at = |runs: &[(Range<usize>, usize)], at: u64| {
            runs.iter().find(|(run, _)| run.contains(&(at as usize))).map(|(_, group)| *group)
        };
        let whole = layout.whole_group_runs(group_of);
        prop_assert!(tiled(&whole, layout.padded_elems()));

        for (unit, placed) in layout.units().iter().enumerate() {
            for flat in 0..placed.padded_elems {
                let before = placed.params.iter().rposition(|p| p.numel_elems > 0 && p.offset_elems <= flat);
                let group = before.map(|param| group_of(ParamId { unit, param }));
                prop_assert_eq!(group_at(&whole, placed.whole_offset_elems + flat), group);
            }
        }

        for rank in 0..layout.world_size() {
            let runs = layout.group_runs(rank, group_of).unwrap();
            prop_assert!(tiled(&runs, layout.shard_elems()));
            for (unit, placed) in layout.units().iter().enumerate() {
                let in_whole = layout.own_in_whole(unit, rank).unwrap();
                for (i, at) in in_whole.enumerate() {
                    prop_assert_eq!(group_at(&runs, placed.shard_offset_elems + i as u64), group_at(&whole, at));
                }
            }
        }
    }

    /// A regrouped shard is the concatenation of the shards of consecutive ranks.
    #[test]
    fn regrouped_shards_are_those_of_neighbours(
        units in small_units(), groups in 1u64..5, group_size in 1u64..5, align in 1u64..5,
    ) {
        let layout = laid_out(&units, groups * group_size, align, 2);
        let again = layout.regroup(group_size).unwrap();
        prop_assert_eq!((again.world_size(), again.padded_elems()), (group_size, layout.padded_elems()));
        // It equals the layout with the longer alignment: ceil(ceil(n / P) / ka) = ceil(n / Na).
        prop_assert_eq!(&again, &laid_out(&units, group_size, align * groups, 2));
        for (one, two) in layout.units().iter().zip(again.units()) {
            prop_assert_eq!(one.whole_range(), two.whole_range());
            for position in 0..group_size {
                let neighbours = position * groups..(position + 1) * groups;
                prop_assert_eq!(two.shard(position).start, one.shard(neighbours.start).start);
                prop_assert_eq!(two.shard(position).end, one.shard(neighbours.end - 1).end);
            }
        }
        for elem in 0..layout.numel_elems() {
            prop_assert_eq!(again.owner(elem), layout.owner(elem).map(|rank| rank / groups));
            let at = again.locate_elem(elem).unwrap();
            prop_assert_eq!(again.global_at(at.rank, at.in_storage), Some(elem));
        }
    }

    /// Group and position identify each rank; groups are consecutive ranks; peers are one rank of
    /// each group.
    #[test]
    fn grids_name_every_rank_once(groups in 1u64..20, group_size in 1u64..20) {
        let grid = Grid::new(groups * group_size, group_size).unwrap();
        for rank in 0..grid.world_size() {
            prop_assert_eq!(grid.group_of(rank) * group_size + grid.position_of(rank), rank);
            prop_assert!(grid.group_ranks(rank).contains(&rank));
            prop_assert!(grid.group_ranks(rank).all(|r| grid.group_of(r) == grid.group_of(rank)));
            let peers: Vec<u64> = grid.peer_ranks(rank).collect();
            prop_assert!(peers.contains(&rank) && peers.len() as u64 == groups);
            prop_assert!(peers.iter().all(|&r| grid.position_of(r) == grid.position_of(rank)));
        }
    }

    /// The bytes that leave a group are the sum over pairs of ranks.
    #[test]
    fn traffic_over_a_grid(groups in 1u64..6, group_size in 1u64..6, elems in 1u64..1000, a in 1u64..4) {
        let units = [UnitSpec::new("u", [ParamSpec::new("p", [elems])])];
        let n = groups * group_size;
        let w = Widths::new(2, 12, a);
        let grid = Grid::new(n, group_size).unwrap();
        let layout = |sharding| GridLayout::new(&units, grid, sharding, LayoutOptions::default()).unwrap();
        let sent = |sharding, stage, routing| layout(sharding).step_traffic(stage, &w, a, routing).unwrap();

        for stage in ZeroStage::ALL {
            let flat = layout(Sharding::Flat);
            let whole = flat.parts().padded_elems();
            let once = flat.parts().step_traffic(stage, &w, a).unwrap();
            for routing in [Routing::Ring, Routing::TwoLevel] {
                // The route changes only the bytes that leave a group, not those that a rank sends.
                prop_assert_eq!(sent(Sharding::Flat, stage, routing).rank, once);
            }
            let times = match stage.number() { 0 => 2 * a, 1 | 2 => a + 1, _ => 3 * a };
            let part = if groups == 1 { 0 } else { 2 * times * whole };
            let ring = sent(Sharding::Flat, stage, Routing::Ring).group_egress_bytes;
            let two_level = sent(Sharding::Flat, stage, Routing::TwoLevel).group_egress_bytes;
            prop_assert_eq!(ring, part / n * (n - 1));
            prop_assert_eq!(two_level, part / groups * (groups - 1));
            // Two levels: a rank's M - 1 shards to its peers and (P - 1) M shards within its group
            // are the N - 1 shards of any all-gather.
            prop_assert_eq!((groups - 1) + (group_size - 1) * groups, n - 1);
            prop_assert!(two_level <= ring);
        }

        let flat = layout(Sharding::Flat);
        let whole = flat.parts().padded_elems();
        let shard = flat.group().shard_elems();
        let between = shard / groups * (groups - 1);
        for stage in [ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
            let stage_three = stage == ZeroStage::Three;
            let gathers = if stage_three { 2 * a } else { 1 };
            let gathered = 2 * gathers * shard * (group_size - 1);
            let scattered = 2 * a * shard * (group_size - 1);
            let of = |sharding| sent(sharding, stage, Routing::TwoLevel);

            // Replicas: only the reduced shard leaves the group, once per step.
            let all_reduce = 2 * between * w.grad_bytes;
            let hsdp = of(Sharding::Replicated);
            let rank = hsdp.rank;
            prop_assert_eq!(
                (rank.reduce_scatter_bytes, rank.all_gather_bytes, rank.all_reduce_bytes),
                (scattered, gathered, all_reduce)
            );
            prop_assert_eq!(hsdp.group_egress_bytes, all_reduce * group_size);

            // A shared update: the gather is of parameters.
            let hfsdp = of(Sharding::Hybrid);
            let rank = hfsdp.rank;
            let scatter = between * w.grad_bytes;
            let gather = between * 2;
            prop_assert_eq!(
                (rank.reduce_scatter_bytes, rank.all_gather_bytes, rank.all_reduce_bytes),
                (scattered + scatter, gathered + gather, 0)
            );
            prop_assert_eq!(hfsdp.group_egress_bytes, (scatter + gather) * group_size);

            // Nodes that are the groups: replicas send all of their bytes to other nodes.
            for sharding in [Sharding::Replicated, Sharding::Hybrid] {
                let axes = layout(sharding).axis_traffic(stage, &w, a).unwrap();
                let [all, group, replicas] =
                    [axes.all, axes.group, axes.replicas].map(|sent| sent.total_bytes());
                let egress = |node| grid.node_egress_bytes(node, all, group, replicas);
                prop_assert_eq!(egress(group_size).unwrap(), of(sharding).group_egress_bytes);
                prop_assert_eq!(egress(n).unwrap(), 0);
                // One rank a node: all is sent to other nodes.
                let sent = if groups > 1 { replicas } else { 0 };
                let within = if group_size > 1 { group } else { 0 };
                prop_assert_eq!(egress(1).unwrap(), if n > 1 { sent + within } else { 0 });
            }

            // hpZ: the gathers of passes stay in the group, and one of the step does not.
            let hpz = of(Sharding::Secondary);
            if stage_three {
                let reductions = 2 * a * (whole / n * (n - 1));
                prop_assert_eq!(
                    (hpz.rank.reduce_scatter_bytes, hpz.rank.all_gather_bytes),
                    (reductions, gathered + gather)
                );
                let crossing = whole / groups * (groups - 1);
                prop_assert_eq!(hpz.group_egress_bytes, 2 * a * crossing + 2 * crossing);
            } else {
                prop_assert_eq!(hpz, of(Sharding::Flat));
            }
        }
    }

    /// Each element has one part, within the shard of its group and within what its rank updates.
    #[test]
    fn parts_are_within_shards(groups in 1u64..6, group_size in 1u64..6, elems in 1u64..1000) {
        let units = [UnitSpec::new("u", [ParamSpec::new("p", [elems])])];
        let grid = Grid::new(groups * group_size, group_size).unwrap();
        for sharding in [Sharding::Flat, Sharding::Secondary, Sharding::Hybrid, Sharding::Replicated] {
            let layout = GridLayout::new(&units, grid, sharding, LayoutOptions::default()).unwrap();
            let range = |(layout, shard): (&Layout, u64)| layout.units()[0].shard(shard);
            let within = |inner: &std::ops::Range<u64>, outer: &std::ops::Range<u64>| {
                outer.start <= inner.start && inner.end <= outer.end
            };
            let mut end = 0;
            for part in 0..grid.world_size() {
                let rank = layout.rank_of_part(part);
                prop_assert_eq!(layout.part_of(rank), part);
                let part = range((layout.parts(), part));
                prop_assert_eq!(part.start, end);
                end = part.end;

                let group = range((layout.group(), grid.position_of(rank)));
                let [params, grads, optimizer] =
                    [layout.params(rank), layout.grads(rank), layout.optimizer(rank)].map(range);
                prop_assert!(within(&params, &group) && within(&grads, &params));
                prop_assert!(within(&optimizer, &grads) && within(&part, &optimizer));
            }
            prop_assert_eq!(end, layout.parts().padded_elems());
        }
    }
}

#[test]
fn memory_over_a_grid() {
    let units = [UnitSpec::new("u", [ParamSpec::new("p", [6400])])];
    let grid = Grid::new(64, 8).unwrap();
    let bytes = |sharding, stage| {
        let layout = GridLayout::new(&units, grid, sharding, LayoutOptions::default()).unwrap();
        layout
            .state_bytes(stage, &Widths::MIXED_ADAM)
            .unwrap()
            .total_bytes()
    };

    assert_eq!(bytes(Sharding::Flat, ZeroStage::Three), 16 * 100);
    assert_eq!(
        bytes(Sharding::Secondary, ZeroStage::Three),
        14 * 100 + 2 * 800
    );
    assert_eq!(
        bytes(Sharding::Hybrid, ZeroStage::Three),
        12 * 100 + 4 * 800
    );
    for stage in [ZeroStage::One, ZeroStage::Two] {
        assert_eq!(
            bytes(Sharding::Secondary, stage),
            bytes(Sharding::Flat, stage)
        );
    }
    assert_eq!(
        bytes(Sharding::Hybrid, ZeroStage::One),
        bytes(Sharding::Flat, ZeroStage::One)
    );
    assert_eq!(bytes(Sharding::Replicated, ZeroStage::Three), 16 * 800);
    let layout = |s| GridLayout::new(&units, grid, s, LayoutOptions::default()).unwrap();
    // Rank 19 is at position 3 of group 2.
    assert_eq!(layout(Sharding::Replicated).params(19).1, 3);
    assert_eq!(layout(Sharding::Secondary).grads(19).1, 3 * 8 + 2);
    assert_eq!(layout(Sharding::Secondary).group().shard_elems(), 800);
    assert_eq!(layout(Sharding::Flat).grid(), grid);
    assert_eq!(layout(Sharding::Flat).sharding(), Sharding::Flat);
}

#[test]
fn each_wrong_part_has_its_error() {
    assert_eq!(Grid::new(0, 1), Err(ShardError::NoRanks));
    assert_eq!(
        Grid::new(6, 4),
        Err(ShardError::NotDivisible {
            world_size: 6,
            group_size: 4
        })
    );

    assert_eq!(
        Grid::new(6, 0),
        Err(ShardError::NotDivisible {
            world_size: 6,
            group_size: 0
        })
    );

    let units = [UnitSpec::new("u", [ParamSpec::new("p", [5])])];
    let layout = Layout::new(&units, 6, 1).unwrap();
    assert_eq!(
        layout.regroup(4).err(),
        Some(ShardError::NotDivisible {
            world_size: 6,
            group_size: 4
        })
    );

    let far = Layout::new(&[], 4, u64::MAX).unwrap();
    assert_eq!(
        far.regroup(2).err(),
        Some(ShardError::TooLarge {
            what: "an alignment".into()
        })
    );

    assert_eq!(
        layout.group_runs(6, |_| 0),
        Err(ShardError::UnknownRank {
            rank: 6,
            world_size: 6
        })
    );

    let huge = [UnitSpec::new("u", [ParamSpec::new("p", [u64::MAX / 64])])];
    let grid = Grid::new(4, 2).unwrap();
    for sharding in [
        Sharding::Flat,
        Sharding::Secondary,
        Sharding::Hybrid,
        Sharding::Replicated,
    ] {
        let layout = GridLayout::new(&huge, grid, sharding, LayoutOptions::default()).unwrap();
        for stage in ZeroStage::ALL {
            let sent = layout.step_traffic(stage, &Widths::MIXED_ADAM, 64, Routing::TwoLevel);
            assert!(
                matches!(sent, Err(ShardError::TooLarge { .. })),
                "{sharding:?} {stage}"
            );
        }
    }
}
