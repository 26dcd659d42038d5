//! Unit prefetch: values, order, limit and memory.

use crate::common::{Comm, LIMIT, Random, Streams, copy, delay, on_ranks, view};
use proptest::prelude::*;
use std::collections::BTreeSet;
use zero_alloc::device::{AnySlice, DType, DeviceError};
use zero_alloc::host::HostDevice;
use zero_alloc::{Pool, Purpose};
use zero_comm::{
    CommError, CommOptions, OrderCheck, PrefetchError, PrefetchOptions, PrefetchReport, Prefetcher,
    plan_step,
};

/// Forward and backward over four units.
const ORDER: &[usize] = &[0, 1, 2, 3, 3, 2, 1, 0];
/// Elements of a rank's shard of each unit.
const SHARDS: [usize; 4] = [2, 5, 5, 3];

fn prefetcher(
    comm: &Comm,
    streams: &Streams,
    pool: &Pool<HostDevice>,
    shards: Vec<AnySlice>,
    options: PrefetchOptions,
) -> Prefetcher<HostDevice> {
    Prefetcher::new(
        pool.clone(),
        comm.clone(),
        streams.compute.clone(),
        streams.comm.clone(),
        shards,
        options,
    )
}

/// Runs one step per order of `orders`, checks every gathered value, and returns the reports of
/// rank 0. Between steps, the compute stream changes the shards, as an optimizer does.
fn run(
    n: usize,
    options: PrefetchOptions,
    given: Option<&[usize]>,
    orders: &[&[usize]],
) -> Vec<PrefetchReport> {
    let reports = on_ranks(n, CommOptions::default(), |comm, streams| {
        let mut random = Random::new(comm.rank() as u64);
        let pool = Pool::new(HostDevice::new(), 1 << 20);
        let value = |step: usize, unit: usize, rank: usize| (step * 100 + unit * 10 + rank) as f32;
        let mut shards: Vec<Vec<f32>> = SHARDS.iter().map(|&len| vec![0.0; len]).collect();
        let views: Vec<AnySlice> = shards.iter_mut().map(|s| view(s)).collect();
        let mut prefetch = prefetcher(&comm, streams, &pool, views.clone(), options);
        if let Some(order) = given {
            prefetch.expect_order(order.to_vec()).unwrap();
        }
        let mut reports = Vec::new();
        let mut backings = 0;
        for (step, order) in orders.iter().enumerate() {
            let mut new: Vec<Vec<f32>> = SHARDS
                .iter()
                .enumerate()
                .map(|(u, &len)| vec![value(step, u, comm.rank()); len])
                .collect();
            delay(&streams.compute, &mut random);
            for (new, shard) in new.iter_mut().zip(&views) {
                copy(&streams.compute, view(new), *shard);
            }
            let mut seen: Vec<Vec<f32>> = order
                .iter()
                .map(|&unit| vec![-1.0; SHARDS[unit] * n])
                .collect();
            let mut running = prefetch.step().unwrap();
            for (&unit, seen) in order.iter().zip(&mut seen) {
                let unsharded = running.unshard(unit).unwrap();
                let live = running.live_elems();
                assert!(live <= options.max_live_elems || live == unsharded.len());
                delay(&streams.compute, &mut random);
                // SAFETY: used on the compute stream, before it is resharded.
                copy(&streams.compute, unsafe { unsharded.slice() }, view(seen));
                running.reshard(unsharded);
            }
            reports.push(running.end());
            assert_eq!(prefetch.live_elems(), 0);
            assert_eq!(pool.report().of(Purpose::Buckets).live_bytes, 0);
            streams.synchronize();
            for (&unit, seen) in order.iter().zip(&seen) {
                let expected: Vec<f32> = (0..n)
                    .flat_map(|q| vec![value(step, unit, q); SHARDS[unit]])
                    .collect();
                assert_eq!(seen, &expected, "step {step}, unit {unit}");
            }
            if step == 2 {
                backings = pool.report().backing_allocations;
            }
        }
        if orders.len() > 3 {
            assert_eq!(
                pool.report().backing_allocations,
                backings,
                "a steady step takes nothing from the device"
            );
        }
        reports
    });

    reports.into_iter().next().unwrap()
}

/// It was gathered for another stream, which this prefetcher's compute stream does not wait for.
#[test]
fn unit_of_another_prefetcher_is_freed() {
    on_ranks(1, CommOptions::default(), |comm, streams| {
        let pool = Pool::new(HostDevice::new(), 1 << 20);
        let mut shard = vec![0f32; 5];
        let shards = vec![view(&mut shard)];
        let options = PrefetchOptions::default().persistence_threshold_elems(usize::MAX);
        let [mut a, mut b] =
            [(), ()].map(|()| prefetcher(&comm, streams, &pool, shards.clone(), options));
        let mut a = a.step().unwrap();
        let mut b = b.step().unwrap();
        b.reshard(a.unshard(0).unwrap());
        assert_eq!(a.live_elems(), 0);
        let own = b.unshard(0).unwrap();
        b.reshard(own);
        let report = b.end();
        assert_eq!((report.on_demand, report.kept), (1, 0));
        streams.synchronize();
    });
}

#[test]
fn the_first_step_records_and_later_ones_prefetch() {
    for n in [1, 2, 3] {
        let reports = run(n, PrefetchOptions::default(), None, &[ORDER; 6]);
        assert_eq!(
            (reports[0].order, reports[0].on_demand),
            (OrderCheck::Recorded, 8)
        );
        for report in &reports[1..] {
            let seen = (
                report.order,
                report.prefetched,
                report.on_demand,
                report.kept,
                report.wasted,
            );
            // Unit 3 is used twice in a row: once gathered, once kept.
            assert_eq!(seen, (OrderCheck::Followed, 7, 0, 1, 0));
            assert_eq!(report.peak_live_elems, 10 * n, "two units at a time");
        }
    }
}

#[test]
fn a_given_order_prefetches_from_the_first_step() {
    for ahead in 1..5 {
        let options = PrefetchOptions::default().ahead(ahead);
        for report in run(2, options, Some(ORDER), &[ORDER; 5]) {
            assert_eq!(
                (report.order, report.on_demand, report.wasted),
                (OrderCheck::Followed, 0, 0)
            );
        }
    }
}

#[test]
fn no_prefetch_gathers_on_demand() {
    let options = PrefetchOptions::default().ahead(0);
    for report in run(2, options, Some(ORDER), &[ORDER; 4]) {
        assert_eq!(
            (report.prefetched, report.on_demand, report.kept),
            (0, 7, 1)
        );
        assert_eq!(report.peak_live_elems, 10, "one unit at a time");
    }
}

#[test]
fn changed_order_is_gathered_on_demand_then_expected() {
    let other = [0, 1, 3, 2, 2, 3, 1, 0];
    let shorter = [0, 1];
    let reports = run(
        2,
        PrefetchOptions::default(),
        None,
        &[ORDER, ORDER, &other, &other, &shorter, &shorter],
    );
    assert_eq!(reports[1].order, OrderCheck::Followed);

    assert_eq!(
        reports[2].order,
        OrderCheck::Changed {
            position: 2,
            expected: Some(2),
            got: Some(3)
        }
    );

    assert_eq!(
        (
            reports[2].prefetched,
            reports[2].on_demand,
            reports[2].wasted
        ),
        (2, 6, 1)
    );

    assert_eq!(
        (reports[3].order, reports[3].on_demand),
        (OrderCheck::Followed, 0)
    );
    assert_eq!(
        reports[4].order,
        OrderCheck::Changed {
            position: 2,
            expected: Some(3),
            got: None
        }
    );

    assert_eq!(
        (reports[5].order, reports[5].prefetched),
        (OrderCheck::Followed, 2)
    );
    let longer = run(1, PrefetchOptions::default(), Some(&[0]), &[&[0, 1]]);

    assert_eq!(
        longer[0].order,
        OrderCheck::Changed {
            position: 1,
            expected: None,
            got: Some(1)
        }
    );
}

#[test]
fn the_limit_of_live_elements_is_never_exceeded() {
    // Units have 4, 10, 10 and 6 elements: room for one large unit and the last, but not for two
    // large ones.
    let options = PrefetchOptions::default().ahead(8).max_live_elems(16);
    for report in run(2, options, Some(ORDER), &[ORDER; 4]) {
        assert_eq!(report.peak_live_elems, 16);
        assert_eq!(
            (report.prefetched, report.on_demand, report.kept),
            (5, 2, 1),
            "two large units never fit"
        );
    }
    // A unit that is larger than the limit is gathered on demand, when nothing else is live.
    let options = PrefetchOptions::default().ahead(8).max_live_elems(9);
    for report in run(2, options, Some(ORDER), &[ORDER; 4]) {
        assert_eq!(report.peak_live_elems, 10);
    }
}

/// Units have 4, 10, 10 and 6 elements; unit 3, used twice in a row, is gathered once.
#[test]
fn units_in_flight_fit_their_limit() {
    let peaks = |ahead_elems| {
        let options = PrefetchOptions::default()
            .ahead(usize::MAX)
            .ahead_elems(ahead_elems);
        let reports = run(2, options, Some(ORDER), &[ORDER; 3]);
        for report in &reports {
            assert_eq!(
                (report.prefetched, report.on_demand, report.wasted),
                (7, 0, 0),
                "{ahead_elems}"
            );
        }
        reports[0].peak_live_elems
    };

    // At least one unit is in flight beside the one in use: 10 + 10.
    for ahead_elems in [0, 1, 9, 10] {
        assert_eq!(peaks(ahead_elems), 20, "{ahead_elems}");
    }
    // Units 0 and 1 before the first use, or units 2 and 3 while unit 1 is in use.
    assert_eq!(peaks(13), 20);
    assert_eq!(peaks(14), 24);
    assert_eq!(peaks(16), 26);
    // All four before the first use.
    assert_eq!((peaks(30), peaks(usize::MAX)), (30, 30));
}

#[test]
fn small_units_are_gathered_once_in_a_step() {
    let options = PrefetchOptions::default().persistence_threshold_elems(6);
    for report in run(2, options, Some(ORDER), &[ORDER; 4]) {
        assert_eq!(
            (
                report.prefetched,
                report.on_demand,
                report.kept,
                report.wasted
            ),
            (6, 0, 2, 0)
        );
    }
}

#[test]
fn failed_gather_leaves_nothing_live() {
    on_ranks(1, CommOptions::default(), |comm, streams| {
        let pool = Pool::new(HostDevice::new(), 100);
        let mut shards: Vec<Vec<f32>> = vec![vec![1.0; 10], vec![1.0; 10], vec![1.0; 1000]];
        let views: Vec<AnySlice> = shards.iter_mut().map(|s| view(s)).collect();
        let options = PrefetchOptions::default().max_live_elems(15);
        let mut prefetch = prefetcher(&comm, streams, &pool, views, options);
        assert_eq!(
            prefetch.expect_order(vec![0, 3]),
            Err(PrefetchError::NoSuchUnit { unit: 3, units: 3 })
        );
        let mut prefetch = prefetch.step().unwrap();
        assert_eq!(
            prefetch.unshard(7).unwrap_err(),
            PrefetchError::NoSuchUnit { unit: 7, units: 3 }
        );
        let held = prefetch.unshard(0).unwrap();
        assert_eq!(
            prefetch.unshard(0).unwrap_err(),
            PrefetchError::Held { unit: 0 }
        );
        let full = PrefetchError::LiveLimit {
            unit: 1,
            unit_elems: 10,
            live_elems: 10,
            limit_elems: 15,
        };
        assert_eq!(prefetch.unshard(1).unwrap_err(), full);
        drop(held);
        assert_eq!(prefetch.live_elems(), 0);
        assert!(matches!(
            prefetch.unshard(2).unwrap_err(),
            PrefetchError::Alloc(_)
        ));
        assert_eq!(prefetch.live_elems(), 0);
        streams.comm.close();
        let closed = prefetch.unshard(1).unwrap_err();
        assert!(
            matches!(
                closed,
                PrefetchError::Comm(CommError::Device(DeviceError::Closed { .. }))
                    | PrefetchError::Alloc(_)
            ),
            "{closed}"
        );
        assert_eq!(
            (prefetch.live_elems(), pool.report().total.live_bytes),
            (0, 0)
        );
    });
}

/// Memory is short on one rank. What it tries again are the gathers that the other rank has made.
#[test]
fn failed_prefetch_can_be_tried_again() {
    const LEN: usize = 1024;
    const UNIT: usize = 2 * LEN;
    on_ranks(2, CommOptions::default(), |comm, streams| {
        let pool = Pool::new(HostDevice::new(), 8 * UNIT * 4);
        let value = |unit: usize, rank: usize| (10 * unit + rank) as f32;
        let mut shards = [0, 1, 2, 3].map(|unit| vec![value(unit, comm.rank()); LEN]);
        let views = shards.iter_mut().map(|shard| view(shard)).collect();
        let mut prefetch = prefetcher(
            &comm,
            streams,
            &pool,
            views,
            PrefetchOptions::default().ahead(2),
        );
        prefetch.expect_order(vec![0, 1, 2, 3]).unwrap();
        let is_short = comm.rank() == 1;
        let fill = |units: usize| {
            let others = || {
                pool.allocate(units * UNIT, DType::F32, Purpose::Workspace, &streams.comm)
                    .unwrap()
            };
            is_short.then(others)
        };
        let full = |error: Option<PrefetchError>| matches!(error, Some(PrefetchError::Alloc(_)));

        // Room for the first of two units.
        if let Some(others) = fill(7) {
            assert!(full(prefetch.step().err()));
            drop(others);
        }
        let mut running = prefetch.step().unwrap();
        // Two units are gathered; no room for the third.
        if let Some(others) = fill(6) {
            assert!(full(running.unshard(0).err()));
            drop(others);
        }
        for unit in 0..4 {
            let unsharded = running.unshard(unit).unwrap();
            let values = unsharded
                .read(LIMIT, |values: &[f32]| values.to_vec())
                .unwrap();
            running.reshard(unsharded);
            assert_eq!(
                values,
                [vec![value(unit, 0); LEN], vec![value(unit, 1); LEN]].concat(),
                "unit {unit}"
            );
        }
        assert_eq!(running.end().order, OrderCheck::Followed);
        streams.synchronize();
    });
}

#[test]
fn dropped_step_is_ended() {
    on_ranks(1, CommOptions::default(), |comm, streams| {
        let pool = Pool::new(HostDevice::new(), 1 << 20);
        let mut shard = vec![0f32; 5];
        let shards = vec![view(&mut shard); 2];
        let mut prefetch = prefetcher(&comm, streams, &pool, shards, PrefetchOptions::default());
        for step in 0..3 {
            let mut running = prefetch.step().unwrap();
            for unit in 0..2 {
                let unsharded = running.unshard(unit).unwrap();
                running.reshard(unsharded);
            }
            if step == 2 {
                let report = running.end();
                assert_eq!(
                    (report.order, report.prefetched),
                    (OrderCheck::Followed, 2),
                    "the order was recorded"
                );
            }
        }
        assert_eq!(prefetch.live_elems(), 0);
        streams.synchronize();
    });
}

/// The order [0, 0]: within a step the unit is kept for its second use.
#[test]
fn unit_of_an_earlier_step_is_not_kept() {
    let seen = on_ranks(2, CommOptions::default(), |comm, streams| {
        let pool = Pool::new(HostDevice::new(), 1 << 20);
        let mut shard = vec![1f32; 3];
        let mut prefetch = prefetcher(
            &comm,
            streams,
            &pool,
            vec![view(&mut shard)],
            PrefetchOptions::default(),
        );
        prefetch.expect_order(vec![0, 0]).unwrap();
        let unit = prefetch.step().unwrap().unshard(0).unwrap();
        streams.synchronize();
        shard.fill(2.0);
        let mut step = prefetch.step().unwrap();
        step.reshard(unit);
        let unit = step.unshard(0).unwrap();
        let values = unit.read(LIMIT, <[f32]>::to_vec).unwrap();
        step.reshard(unit);
        let again = step.unshard(0).unwrap();
        step.reshard(again);
        let report = step.end();
        streams.synchronize();
        // The first step ended after an error, so to speak: its uses are no new order.
        (values, report.kept, report.order)
    });

    assert_eq!(seen, vec![(vec![2.0; 6], 1, OrderCheck::Followed); 2]);
}

#[test]
fn unit_is_read_in_its_dtype() {
    on_ranks(2, CommOptions::default(), |comm, streams| {
        let pool = Pool::new(HostDevice::new(), 1 << 20);
        let mut shard = vec![1f32; 3];
        let shards = vec![view(&mut shard)];
        let mut prefetch = prefetcher(&comm, streams, &pool, shards, PrefetchOptions::default());

        let unit = prefetch.step().unwrap().unshard(0).unwrap();

        assert!(unit.read::<u8, _>(LIMIT, |_| ()).is_err(), "another dtype");
        assert_eq!(unit.read(LIMIT, <[f32]>::to_vec).unwrap(), [1.0; 6]);
        streams.synchronize();
    });
}

proptest! {
    #![proptest_config(crate::buckets::cases(100))]

    /// `plan_step` computes what a step measures, for any units, order and limits.
    #[test]
    fn gathers_are_known_before_the_step(
        shards in prop::collection::vec(1usize..9, 1..6),
        uses in prop::collection::vec(prop::collection::btree_set(0usize..6, 1..3), 1..16),
        ahead in prop_oneof![Just(0), 1usize..4, Just(usize::MAX)],
        ahead_elems in prop_oneof![1usize..20, Just(usize::MAX)],
        max_live_elems in prop_oneof![1usize..30, Just(usize::MAX)],
        persistence_threshold_elems in 0usize..6,
    ) {
        let options = PrefetchOptions::default()
            .ahead(ahead)
            .ahead_elems(ahead_elems)
            .max_live_elems(max_live_elems)
            .persistence_threshold_elems(persistence_threshold_elems);
        let uses: Vec<Vec<usize>> = uses
            .iter()
            .map(|units| units.iter().map(|unit| unit % shards.len()).collect::<BTreeSet<_>>())
            .map(|units| units.into_iter().collect())
            .collect();

        let measured = on_ranks(1, CommOptions::default(), |comm, streams| {
            let pool = Pool::new(HostDevice::new(), 1 << 20);
            let mut memory: Vec<Vec<f32>> = shards.iter().map(|&len| vec![0.0; len]).collect();
            let views = memory.iter_mut().map(|shard| view(shard)).collect();
            let mut prefetch = prefetcher(&comm, streams, &pool, views, options);
            prefetch.expect_order(uses.concat()).unwrap();
            let mut step = prefetch.step().unwrap();
            for units in &uses {
                let held: Result<Vec<_>, _> = units.iter().map(|&unit| step.unshard(unit)).collect();
                // Units of one use that exceed the limit together.
                let Ok(held) = held else { return None };
                held.into_iter().for_each(|unit| step.reshard(unit));
            }
            let report = step.end();
            streams.synchronize();
            Some(report)
        });

        if let Some(report) = measured[0] {
            let elems: Vec<u64> = shards.iter().map(|&len| len as u64).collect();
            let planned = plan_step(&elems, &uses, &options);
            prop_assert_eq!(planned.peak_live_elems, report.peak_live_elems as u64);
            let gathers = report.prefetched + report.on_demand + report.wasted;
            prop_assert_eq!(planned.gathers, gathers as u64);
        }
    }
}
