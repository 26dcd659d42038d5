//! Parameters that one rank sees whole.

use proptest::prelude::*;
use zero_shard::{Layout, ParamId, Updaters};

use crate::support::{cases, huge_layout, small_layout};

fn numel(layout: &Layout, id: ParamId) -> u64 {
    layout.units()[id.unit].params[id.param].numel_elems
}

/// Every second parameter, by its elements.
fn every_second(layout: &Layout, id: ParamId) -> Option<u64> {
    (id.unit + id.param)
        .is_multiple_of(2)
        .then(|| numel(layout, id))
}

proptest! {
    #![proptest_config(cases(300))]

    /// Ranks give an updater each part of the parameter, once; and what they hold is what their
    /// shards have of their part.
    #[test]
    fn updaters_get_each_element_once(
        layout in small_layout(),
        parts in 1..4_u64,
        replicated: bool,
        unit_waves: bool,
    ) {
        let cost = |id| every_second(&layout, id);
        let is_cut = |id: ParamId| id.param.is_multiple_of(3);
        let whole = Updaters::of_parts(&layout, (parts, is_cut), replicated, unit_waves, cost);
        let ranks = layout.world_size() * parts;
        prop_assert_eq!(whole.world_size(), ranks);
        let mut sent = vec![0; ranks as usize];
        for param in whole.waves().flatten() {
            let unit = &layout.units()[param.id.unit];
            let mut givers = vec![Vec::new(); (parts * param.numel_elems()) as usize];
            for rank in 0..ranks {
                let part = param.part_of(rank);
                prop_assert_eq!([part.rank(), part.ranks()], [rank % parts, parts]);
                for elem in param.given(rank) {
                    givers[(part.rank() * param.numel_elems() + elem) as usize].push(rank);
                }
                let held: Vec<u64> = param.held(rank).collect();
                let flat = unit.params[param.id.param].range();
                let owns = |elem: &u64| {
                    replicated || unit.owner(flat.start + elem) == Some(rank / parts)
                };
                let expected: Vec<u64> = (0..param.numel_elems()).filter(owns).collect();
                prop_assert_eq!(&held, &expected);
                if rank != param.updater {
                    sent[rank as usize] += param.given(rank).count() as u64;
                    sent[param.updater as usize] += held.len() as u64;
                }
            }
            prop_assert!(givers.iter().all(|of_elem| of_elem.len() == 1), "{:?}", givers);
            let joined = if is_cut(param.id) { parts } else { 1 };
            prop_assert_eq!(param.joined_elems(), joined * param.numel_elems());
        }
        for rank in 0..ranks {
            prop_assert_eq!(whole.sent_elems(rank), sent[rank as usize]);
        }
    }

    /// The waves are all parameters with a cost, in order, cut where units end.
    #[test]
    fn waves_are_of_whole_units(layout in small_layout(), unit_waves: bool) {
        let whole = Updaters::new(&layout, false, unit_waves, |id| every_second(&layout, id));
        let ids: Vec<ParamId> = whole.waves().flatten().map(|param| param.id).collect();
        let all = layout.params().map(|(id, _)| id);
        let expected: Vec<_> = all.filter(|id| every_second(&layout, *id).is_some()).collect();
        prop_assert_eq!(ids, expected);

        let waves: Vec<_> = whole.waves().collect();
        for (nth, wave) in waves.iter().enumerate() {
            let unit = |of: &zero_shard::ParamUpdater| of.id.unit;
            let next = waves.get(nth + 1).and_then(|next| next.first());
            prop_assert!(next.is_none_or(|next| unit(next) > unit(&wave[wave.len() - 1])));
            if unit_waves {
                prop_assert!(wave.iter().all(|of| unit(of) == unit(&wave[0])));
            }
        }
    }

    /// No rank has more than the mean and the largest parameter.
    #[test]
    fn work_is_balanced(layout in huge_layout()) {
        let whole = Updaters::new(&layout, false, false, |id| Some(numel(&layout, id)));
        for wave in whole.waves() {
            let mut loads = std::collections::HashMap::new();
            for param in wave {
                *loads.entry(param.updater).or_insert(0) += param.numel_elems();
            }
            let largest = wave.iter().map(|param| param.numel_elems()).max().unwrap_or(0);
            let mean = loads.values().sum::<u64>() / layout.world_size();
            prop_assert!(loads.values().all(|load| *load <= mean + largest));
        }
    }
}

/// A rank that holds all of a parameter updates it, where the work is equal: nothing is sent.
#[test]
fn holders_update() {
    use zero_shard::{ParamSpec, UnitSpec};
    let params = vec![ParamSpec::new("a", [4, 4]), ParamSpec::new("b", [4, 4])];
    let units = [UnitSpec::new("unit", params)];
    let layout = Layout::new(&units, 2, 1).unwrap();
    let whole = Updaters::new(&layout, false, false, |_| Some(1));
    assert_eq!([0, 1].map(|rank| whole.sent_elems(rank)), [0, 0]);
    // Of whole replicas only the updates travel.
    let whole = Updaters::new(&layout, true, false, |_| Some(1));
    assert_eq!([0, 1].map(|rank| whole.sent_elems(rank)), [16, 16]);
    // Of two parts, or copies, one travels to the updater, and its update back.
    for is_cut in [true, false] {
        let layout = Layout::new(&units, 1, 1).unwrap();
        let whole = Updaters::of_parts(&layout, (2, |_| is_cut), false, false, |_| Some(1));
        assert_eq!([0, 1].map(|rank| whole.sent_elems(rank)), [32, 32]);
    }
}
