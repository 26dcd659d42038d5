//! Runs of all ranks, a thread and a device each.

use std::sync::Arc;

use zero_alloc::host::{HostDevice, OpSpan};
use zero_comm::threads::World;
use zero_comm::{CommOptions, Communicator};
use zero_trainer::run_on_host_device;

use super::support::Case;
use super::toy::Toy;

/// Calls `body` on a thread of each rank, whose modelled time begins at zero, with its communicator
/// and with what trains it. Returns the results by rank.
pub(super) fn on_ranks<R: Send>(
    case: &Case,
    toy: &Toy,
    body: impl Fn(usize, Arc<dyn Communicator<HostDevice>>, Train<'_>) -> R + Sync,
) -> Vec<R> {
    let settings = case.settings();
    let options = case.options(None);
    let train = |device: HostDevice, comm: Arc<dyn Communicator<HostDevice>>| {
        let observe = &mut |_: &_| Ok(());
        run_on_host_device(device, comm, 1, &settings, toy, &options, observe)
            .unwrap_or_else(|error| panic!("{case:?}: {error}"));
    };
    let comms = World::new(case.ranks, CommOptions::default()).unwrap();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = comms
            .into_iter()
            .enumerate()
            .map(|(rank, comm)| {
                let (body, train) = (&body, &train);
                scope.spawn(move || body(rank, Arc::new(comm), train))
            })
            .collect();
        let results = ranks.into_iter().map(|rank| rank.join().unwrap());
        results.collect()
    })
}

/// Trains a rank on a device.
pub(super) type Train<'a> = &'a (dyn Fn(HostDevice, Arc<dyn Communicator<HostDevice>>) + Sync);

/// Asserts that no access is unordered in an order of operations that streams and events allow.
pub(super) fn no_wait_is_missing(case: &Case, toy: &Toy, seed: u64) {
    on_ranks(case, toy, |rank, comm, train| {
        let device = HostDevice::seeded(10 * seed + rank as u64);
        train(device.clone(), comm);
        let violations = device.violations();
        assert!(
            violations.is_empty(),
            "seed {seed}, {case:?}: {violations:?}"
        );
    });
}

/// Milliseconds of the third step: from its first forward of `units` to that of the fourth.
pub(super) fn third_step_ms(spans: &[OpSpan], units: usize) -> u128 {
    let forwards = spans.iter().filter(|span| span.label == "toy forward");
    let mut starts: Vec<_> = forwards.map(|span| span.start).collect();
    starts.sort_unstable();
    (starts[3 * units] - starts[2 * units]).as_millis()
}
