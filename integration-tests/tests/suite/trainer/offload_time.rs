//! Offload in modelled time: what overlaps, exactly, whatever else the machine does.

use std::path::Path;
use std::time::Duration;

use zero_alloc::device::DType;
use zero_alloc::host::{HostDevice, OpSpan};
use zero_trainer::Home;

use super::on_ranks::{on_ranks, third_step_ms};
use super::support::{Case, homes};
use super::toy::Toy;

/// As many blocks as GPT-2 1.5B has: the first unit of a step waits for its own transfers.
const UNITS: usize = 48;
const FORWARD: u32 = 10;
const BACKWARD: u32 = 20;

/// Milliseconds of the operations of a unit.
#[derive(Clone, Copy, Debug, Default)]
struct Costs {
    adam: u32,
    read: u32,
    write: u32,
    /// Reading the parameters of a unit for a gather.
    gather: u32,
    /// Reading or writing parameters or gradients of a unit beside the update.
    other: u32,
}

fn cost(costs: Costs, stream: &str, label: &str) -> Duration {
    let ms = match label {
        "toy forward" => FORWARD,
        "toy backward" => BACKWARD,
        "adam" => costs.adam,
        "swap read" if stream.ends_with("update reads") => costs.read,
        "swap write" if stream.ends_with("update writes") => costs.write,
        "swap read" if stream.ends_with("params gathers reads") => costs.gather,
        "swap read" | "swap write" => costs.other,
        _ => 0,
    };
    Duration::from_millis(ms.into())
}

/// All operations of a run on one rank.
fn spans(case: &Case, costs: Costs) -> Vec<OpSpan> {
    let toy = Toy::new(&vec![vec![64]; UNITS], false);
    let mut spans = on_ranks(case, &toy, |_, comm, train| {
        let device = HostDevice::modelled(move |stream, label| cost(costs, stream, label));
        train(device.clone(), comm);
        device.modelled_spans()
    });
    let mut spans = spans.remove(0);
    spans.sort_by_key(|span| (span.start, span.end));
    spans
}

/// The starts of the operations with this label, and the last end.
fn of<'a>(spans: &'a [OpSpan], label: &'a str) -> impl Iterator<Item = &'a OpSpan> {
    spans.iter().filter(move |span| span.label == label)
}

fn offload(dir: &Path, stage: u64, params: bool) -> Case {
    let nvme = || Home::Nvme(dir.to_owned());
    let params = if params { nvme() } else { Home::Device };
    Case {
        stage,
        ranks: 1,
        steps: 5,
        dtype: DType::Bf16,
        offload: homes(nvme(), params),
        ..Case::default()
    }
}

/// A step costs at most 1.05 times the greatest of compute, update and transfers, each of which
/// fits behind forward.
#[test]
fn forward_hides_the_update() {
    let dir = tempfile::tempdir().unwrap();
    let compute = UNITS as u32 * (FORWARD + BACKWARD);
    for stage in 0..4 {
        for costs in [
            Costs {
                adam: 9,
                ..Costs::default()
            },
            Costs {
                adam: 1,
                read: 10,
                write: 10,
                ..Costs::default()
            },
            Costs {
                adam: 10,
                read: 9,
                write: 9,
                ..Costs::default()
            },
            // The disk is slower than the update.
            Costs {
                adam: 3,
                read: 9,
                write: 10,
                gather: 9,
                other: 9,
            },
        ] {
            let params = costs.other > 0;
            if params && stage < 3 {
                continue;
            }
            let ms = third_step_ms(&spans(&offload(dir.path(), stage, params), costs), UNITS);
            let most = compute.max(UNITS as u32 * costs.adam.max(costs.read).max(costs.write));
            println!("stage {stage}, {costs:?}: {ms} ms, {most} at best");
            assert!(
                ms as f64 <= 1.05 * f64::from(most),
                "stage {stage}, {costs:?}: {ms} ms, {most} at best"
            );
        }
    }
}

/// The forward of the first unit starts before the last unit is updated, and statistics are
/// computed during backward.
#[test]
fn next_forward_starts_before_the_last_update() {
    let dir = tempfile::tempdir().unwrap();
    for stage in 0..4 {
        let spans = spans(
            &offload(dir.path(), stage, false),
            Costs {
                adam: 8,
                ..Costs::default()
            },
        );
        let updates: Vec<_> = of(&spans, "adam").collect();
        let forwards: Vec<_> = of(&spans, "toy forward").collect();
        let backwards: Vec<_> = of(&spans, "toy backward").collect();
        for step in 0..4 {
            let first = updates[step * UNITS];
            let last = updates[(step + 1) * UNITS - 1];
            let next = forwards[(step + 1) * UNITS];
            assert!(
                first.end <= next.start && next.start < last.start,
                "stage {stage}, step {step}"
            );
        }
        let statistics: Vec<_> = of(&spans, "grad_stats").collect();
        let last_backward = backwards[UNITS - 1];
        let early = statistics
            .iter()
            .take(UNITS)
            .filter(|span| span.start < last_backward.end)
            .count();
        assert_eq!(
            early,
            UNITS - 1,
            "stage {stage}: statistics during backward"
        );
    }
}

/// Without overlap a step is the sum of its parts: the test above can fail.
#[test]
fn without_overlap_the_update_is_exposed() {
    let dir = tempfile::tempdir().unwrap();
    let case = offload(dir.path(), 2, false).with(|case| case.overlap = false);
    let costs = Costs {
        adam: 9,
        ..Costs::default()
    };
    let ms = third_step_ms(&spans(&case, costs), UNITS);
    assert!(
        ms >= u128::from(UNITS as u32 * (FORWARD + BACKWARD + 9)),
        "{ms} ms"
    );
}

/// Reading parameters more than one unit ahead gains little: a disk that is slower than forward
/// stays slower, and one that is faster needs no more.
#[test]
fn one_unit_ahead_is_enough() {
    let dir = tempfile::tempdir().unwrap();
    for gather in [5, 9, 12, 18, 30] {
        let costs = Costs {
            gather,
            ..Costs::default()
        };
        let [one, two, four] = [1, 2, 4].map(|ahead| {
            let case = offload(dir.path(), 3, true).with(|case| case.ahead = Some(ahead));
            third_step_ms(&spans(&case, costs), UNITS)
        });
        println!("gathers of {gather} ms: {one}, {two} and {four} ms with 1, 2 and 4 units ahead");
        assert!(
            one as f64 <= 1.05 * four as f64,
            "gathers of {gather} ms: {one} ms with one, {four} with four"
        );
    }
}
