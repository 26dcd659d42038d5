//! The conformance suite over threads, 1 to 16 ranks.

use crate::common::on_ranks;
use zero_alloc::host::HostDevice;
use zero_comm::conformance::{Plan, check};
use zero_comm::{CommOptions, Solo};

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
