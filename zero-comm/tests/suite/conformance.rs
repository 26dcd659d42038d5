//! The conformance suite over threads, 1 to 16 ranks.

use crate::common::on_ranks;
use zero_alloc::host::HostDevice;
use zero_comm::conformance::{Plan, Sums, check};
use zero_comm::{CommOptions, Solo, TwoLevel};

fn run(worlds: std::ops::RangeInclusive<usize>, cases: usize) {
    for n in worlds {
        for result in on_ranks(n, CommOptions::default(), |comm, streams| {
            check(
                &HostDevice::new(),
                &*comm,
                &streams.comm,
                Plan::default().seed(n as u64).cases(cases),
            )
        }) {
            result.unwrap();
        }
    }
}

#[test]
fn threads_conform_with_few_ranks() {
    run(1..=4, 80);
}

#[test]
fn threads_conform_with_many_ranks() {
    run(5..=16, 14);
}

#[test]
fn one_rank_alone_conforms() {
    let device = HostDevice::new();
    let stream = zero_alloc::device::Device::create_stream(&device, "comm").unwrap();
    check(
        &device,
        &Solo::new(device.clone()),
        &stream,
        Plan::default().cases(200),
    )
    .unwrap();
}

/// An average of averages has the bits of one average if the size of a group is a power of 2.
#[test]
fn two_levels_conform() {
    for (n, group) in [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (6, 2), (8, 4)] {
        let plan = Plan::default()
            .seed(n as u64)
            .cases(80)
            .sums(Sums::AnyOrder);
        for result in on_ranks(n, CommOptions::default(), |comm, streams| {
            let comm = TwoLevel::new(&*comm, group).unwrap();
            check(&HostDevice::new(), &comm, &streams.comm, plan)
        }) {
            result.unwrap();
        }
    }
}
