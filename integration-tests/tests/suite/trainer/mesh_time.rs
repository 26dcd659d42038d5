//! Groups of ranks in modelled time: what is sent between groups overlaps compute, exactly, whatever
//! else the machine does.

use std::time::Duration;

use zero_alloc::device::DType;
use zero_alloc::host::HostDevice;
use zero_shard::Sharding;

use super::on_ranks::{on_ranks, third_step_ms};
use super::support::{Case, groups_of};
use super::toy::Toy;

/// As many blocks as GPT-2 1.5B has.
const UNITS: usize = 48;
const FORWARD: u32 = 10;
const BACKWARD: u32 = 20;
/// A gather or a reduction of a unit within a group.
const WITHIN: u32 = 1;

/// Milliseconds of a unit between the groups.
#[derive(Clone, Copy, Debug)]
struct Between {
    /// The reduction of gradients.
    reduce: u32,
    /// The gather of parameters.
    gather: u32,
}

fn cost(sharding: Sharding, between: Between, stream: &str, label: &str) -> Duration {
    let is_between = stream.ends_with("replicas");
    let ms = match label {
        "toy forward" => FORWARD,
        "toy backward" => BACKWARD,
        "all_reduce" => between.reduce,
        "reduce_scatter" if is_between || sharding == Sharding::Secondary => between.reduce,
        "all_gather" if is_between => between.gather,
        "reduce_scatter" | "all_gather" => WITHIN,
        _ => 0,
    };
    Duration::from_millis(ms.into())
}

/// Milliseconds of the third step of rank 0: from its first forward to that of the fourth.
fn step_ms(sharding: Sharding, between: Between) -> u128 {
    let case = Case {
        stage: 3,
        ranks: 4,
        steps: 5,
        dtype: DType::Bf16,
        mesh: groups_of(2, sharding),
        ..Case::default()
    };
    let toy = Toy::new(&vec![vec![64]; UNITS], false);
    let spans = on_ranks(&case, &toy, |_, comm, train| {
        let cost = move |stream: &str, label: &str| cost(sharding, between, stream, label);
        let device = HostDevice::modelled(cost);
        train(device.clone(), comm);
        device.modelled_spans()
    });

    third_step_ms(&spans[0], UNITS)
}

/// A step costs at most 1.1 times the larger of compute and the time of the link between groups.
///
/// Sums are complete before the update and with it before the next forward, so what backward does
/// not hide is exposed: where the link takes longer than backward, but not much longer, no order of
/// operations has this bound.
#[test]
fn link_between_groups_is_hidden() {
    for sharding in [Sharding::Replicated, Sharding::Hybrid, Sharding::Secondary] {
        for (reduce, gather) in [(18, 9), (5, 2), (120, 60)] {
            // HSDP gathers nothing.
            let gather = if sharding == Sharding::Replicated {
                0
            } else {
                gather
            };
            let between = Between { reduce, gather };
            let ms = step_ms(sharding, between);
            let most = UNITS as u32 * (FORWARD + BACKWARD).max(reduce + gather);
            println!("{sharding:?}, {between:?}: {ms} ms, {most} at best");
            assert!(
                ms as f64 <= 1.1 * f64::from(most),
                "{sharding:?}, {between:?}: {ms} ms, {most} at best"
            );
        }
    }
}
