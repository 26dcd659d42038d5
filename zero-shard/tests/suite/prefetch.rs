//! Prefetch plans, played back: every use finds its units, and the count of live elements is exact.

use crate::support::{cases, small_layout};
use proptest::prelude::*;
use zero_shard::{Action, PrefetchLimits, PrefetchPlan, ShardError, forward_backward_uses};

/// What playing a plan back shows.
#[derive(Debug, Default, PartialEq, Eq)]
struct Played {
    peak_live: u64,
    peak_ahead: u64,
    gathered: u64,
    gathers: Vec<u32>,
}

fn play(plan: &PrefetchPlan, elems: &[u64], persistent: &[usize], uses: &[Vec<usize>]) -> Played {
    let mut live: Vec<bool> = (0..elems.len()).map(|u| persistent.contains(&u)).collect();
    let mut ahead = vec![false; elems.len()];
    let mut played = Played { gathers: vec![0; elems.len()], ..Played::default() };
    let mut next_use = 0;
    let count = |which: &[bool]| (0..elems.len()).filter(|&u| which[u]).map(|u| elems[u]).sum::<u64>();
    played.peak_live = count(&live);
    for action in &plan.actions {
        match *action {
            Action::Gather(u) => {
                assert!(!live[u], "gathered twice");
                (live[u], ahead[u]) = (true, true);
                played.gathered += elems[u];
                played.gathers[u] += 1;
            }
            Action::Use(i) => {
                assert_eq!(i, next_use);
                next_use += 1;
                for &u in &uses[i] {
                    assert!(live[u], "use {i} of unit {u}, which is not gathered");
                    ahead[u] = false;
                }
                played.peak_ahead = played.peak_ahead.max(count(&ahead));
            }
            Action::Release(u) => {
                assert!(live[u] && !persistent.contains(&u));
                assert!(!ahead[u], "gathered for nothing");
                live[u] = false;
            }
        }
        played.peak_live = played.peak_live.max(count(&live));
    }
    assert_eq!(next_use, uses.len());
    assert!((0..elems.len()).all(|u| live[u] == persistent.contains(&u)), "left gathered at the end");
    played
}

proptest! {
    #![proptest_config(cases(500))]

    #[test]
    fn plans_keep_every_limit(
        elems in prop::collection::vec(0u64..20, 1..8),
        uses in prop::collection::vec(prop::collection::vec(0usize..8, 0..3), 0..20),
        persistent in prop::collection::vec(0usize..8, 0..2),
        limits in (0u64..80, 0u64..60, 0u64..60),
    ) {
        let uses: Vec<Vec<usize>> =
            uses.iter().map(|needed| needed.iter().map(|u| u % elems.len()).collect()).collect();
        let mut persistent: Vec<usize> = persistent.iter().map(|u| u % elems.len()).collect();
        persistent.dedup();
        let limits = PrefetchLimits {
            max_live_elems: limits.0, prefetch_elems: limits.1, max_reuse_distance_elems: limits.2,
        };
        // What each use must have live, and so the least limit that any plan could keep.
        let must = |needed: &Vec<usize>| {
            (0..elems.len()).filter(|u| needed.contains(u) || persistent.contains(u)).map(|u| elems[u]).sum::<u64>()
        };
        let least = uses.iter().map(must).max().unwrap_or(0).max(must(&Vec::new()));
        match PrefetchPlan::new(&elems, &persistent, &uses, &limits) {
            Ok(plan) => {
                prop_assert!(least <= limits.max_live_elems);
                let played = play(&plan, &elems, &persistent, &uses);
                prop_assert!(played.peak_live <= limits.max_live_elems);
                if limits.max_reuse_distance_elems == 0 {
                    prop_assert!(played.peak_ahead <= limits.prefetch_elems);
                    // Nothing is kept but what a use needs and what is ahead; a neighbour's unit may be both.
                    prop_assert!(played.peak_live <= 2 * least + limits.prefetch_elems);
                }
                prop_assert_eq!((played.peak_live, played.gathered), (plan.peak_live_elems, plan.gathered_elems));
                for u in 0..elems.len() {
                    let times = uses.iter().filter(|needed| needed.contains(&u)).count();
                    prop_assert!(played.gathers[u] as usize <= times);
                }
            }
            Err(ShardError::OverLiveLimit { use_index, needs_elems, limit_elems }) => {
                prop_assert!(needs_elems > limit_elems && limit_elems == limits.max_live_elems);
                let needs = use_index.map_or(must(&Vec::new()), |i| must(&uses[i]));
                prop_assert_eq!(needs_elems, needs);
            }
            Err(other) => prop_assert!(false, "{other}"),
        }
    }

    /// One pass forward and back gathers at most twice the model, whatever is prefetched: the 2 Ψ of stage 3.
    #[test]
    fn a_pass_gathers_at_most_twice(layout in small_layout(), prefetch in 0u64..200, micro_batches in 1usize..4) {
        let elems: Vec<u64> = layout.units().iter().map(|u| u.padded_elems).collect();
        let uses = forward_backward_uses(&layout, micro_batches);
        let limits = PrefetchLimits { prefetch_elems: prefetch, max_reuse_distance_elems: 0, ..PrefetchLimits::DEEPSPEED };
        let plan = PrefetchPlan::new(&elems, &[], &uses, &limits).unwrap();
        play(&plan, &elems, &[], &uses);
        prop_assert!(plan.gathered_elems <= 2 * micro_batches as u64 * layout.padded_elems());
    }
}

fn limits(max_live_elems: u64, prefetch_elems: u64, max_reuse_distance_elems: u64) -> PrefetchLimits {
    PrefetchLimits { max_live_elems, prefetch_elems, max_reuse_distance_elems }
}

const PASS: [usize; 6] = [0, 1, 2, 2, 1, 0];

fn pass() -> Vec<Vec<usize>> {
    PASS.iter().map(|&u| vec![u]).collect()
}

#[test]
fn the_next_unit_is_gathered_before_this_one_computes() {
    use Action::{Gather, Release, Use};
    let plan = PrefetchPlan::new(&[10, 10, 10], &[], &pass(), &limits(20, 10, 0)).unwrap();
    let forward = [Gather(0), Gather(1), Use(0), Release(0), Gather(2), Use(1), Release(1), Gather(1), Use(2)];
    let backward = [Use(3), Release(2), Gather(0), Use(4), Release(1), Use(5), Release(0)];
    assert_eq!(plan.actions, [&forward[..], &backward[..]].concat());
    assert_eq!((plan.peak_live_elems, plan.gathered_elems), (20, 50));
}

#[test]
fn no_prefetch_is_one_unit_at_a_time() {
    let plan = PrefetchPlan::new(&[10, 10, 10], &[], &pass(), &limits(10, 0, 0)).unwrap();
    assert_eq!((plan.peak_live_elems, plan.gathered_elems), (10, 50));
}

#[test]
fn all_that_fits_is_kept_until_its_next_use() {
    let plan = PrefetchPlan::new(&[10, 10, 10], &[], &pass(), &limits(30, 10, 1000)).unwrap();
    assert_eq!((plan.peak_live_elems, plan.gathered_elems), (30, 30));
    // With room for two, the one that is needed again last goes first.
    let plan = PrefetchPlan::new(&[10, 10, 10], &[], &pass(), &limits(20, 10, 1000)).unwrap();
    assert_eq!((plan.peak_live_elems, plan.gathered_elems), (20, 40));
}

#[test]
fn the_kept_unit_that_is_needed_last_makes_room() {
    let uses: Vec<Vec<usize>> = [0, 1, 2, 3, 2, 1, 0].map(|u| vec![u]).to_vec();
    let plan = PrefetchPlan::new(&[10; 4], &[], &uses, &limits(30, 0, 1000)).unwrap();
    let released: Vec<_> = plan.actions.iter().filter(|a| matches!(a, Action::Release(_))).collect();
    assert_eq!(released[0], &Action::Release(0));
    assert_eq!(plan.gathered_elems, 50);
}

#[test]
fn persistent_units_are_live_and_never_gathered() {
    let plan = PrefetchPlan::new(&[10, 3, 10], &[1], &pass(), &limits(23, 10, 0)).unwrap();
    assert!(!plan.actions.contains(&Action::Gather(1)));
    assert_eq!(plan.peak_live_elems, 23);
}

#[test]
fn each_wrong_plan_has_its_error() {
    let over =
        |use_index, needs_elems, limit_elems| Err(ShardError::OverLiveLimit { use_index, needs_elems, limit_elems });
    let plan = |persistent: &[usize], uses: &[Vec<usize>], live| {
        PrefetchPlan::new(&[10, 5], persistent, uses, &limits(live, 100, 0)).map(|_| ())
    };
    assert_eq!(plan(&[], &[vec![1], vec![0]], 9), over(Some(1), 10, 9));
    assert_eq!(plan(&[], &[vec![1, 0]], 14), over(Some(0), 15, 14));
    assert_eq!(plan(&[1], &[vec![0]], 14), over(Some(0), 15, 14));
    assert_eq!(plan(&[0], &[], 9), over(None, 10, 9));
    assert_eq!(plan(&[], &[vec![2]], 9), Err(ShardError::UnknownUnit { unit: 2, units: 2 }));
    assert_eq!(plan(&[3], &[], 9), Err(ShardError::UnknownUnit { unit: 3, units: 2 }));
    let huge = PrefetchPlan::new(&[u64::MAX], &[], &[vec![0], vec![0]], &limits(u64::MAX, 0, 0));
    assert!(matches!(huge, Err(ShardError::TooLarge { .. })));
}
