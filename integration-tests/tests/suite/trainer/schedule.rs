//! A recorded schedule has the times of a run: the trainer on streams that run in modelled time and
//! the schedule of one rank agree to the nanosecond, for random plans.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use proptest::prelude::*;
use zero_alloc::device::DType;
use zero_alloc::host::{HostDevice, OpSpan};
use zero_alloc::schedule::Cost;
use zero_shard::Sharding;
use zero_trainer::{Home, MeshSettings, OffloadSettings, record_on_host};

use super::on_ranks::on_ranks;
use super::support::Case;
use super::toy::Toy;

/// Operations that set the weights have these labels, and those of steps cost nothing in them.
const FREE: [&str; 5] = ["upload", "download", "flags", "set weights", "copy"];

/// A cost from the labels of the operation and of its stream.
fn cost(seed: u64, stream: &str, label: &str) -> Duration {
    if FREE.contains(&label) {
        return Duration::ZERO;
    }
    let mut hasher = DefaultHasher::new();
    (seed, stream, label).hash(&mut hasher);
    Duration::from_nanos(hasher.finish() % 1_000_000_007)
}

/// Streams, labels, phases and times, from the first operation of a step on.
type Seen = Vec<(String, &'static str, &'static str, u128, u128)>;

fn seen(spans: &[OpSpan]) -> Seen {
    let of_steps = || spans.iter().filter(|span| !span.phase.is_empty());
    let first = of_steps().map(|span| span.enqueued).min();
    let since = |at: Duration| (at - first.unwrap_or_default()).as_nanos();
    let mut seen: Seen = of_steps()
        .map(|span| {
            let stream = span.stream.to_string();
            let (start, end) = (since(span.start), since(span.end));
            (stream, span.label, span.phase, start, end)
        })
        .collect();
    seen.sort_by(|a, b| (a.3, a.4, a).cmp(&(b.3, b.4, b)));
    seen
}

/// The operations of rank 0 in a run of all ranks on threads.
fn run(case: &Case, toy: &Toy, seed: u64) -> Seen {
    let spans = on_ranks(case, toy, |_, comm, train| {
        let device = HostDevice::modelled(move |stream, label| {
            // Each rank has the costs of rank 0.
            let stream = stream
                .split_once(' ')
                .and_then(|(_, rest)| rest.split_once(' '));
            cost(seed, stream.map_or("", |(_, name)| name), label)
        });
        train(device.clone(), comm);
        device.modelled_spans()
    });
    seen(&spans[0])
}

/// The same of a schedule of rank 0 alone.
fn recorded(case: &Case, toy: &Toy, seed: u64) -> Seen {
    let (settings, options) = (case.settings(), case.options(None));
    let recorded = record_on_host(0, case.ranks, &settings, toy, &options).unwrap();
    let schedule = recorded.schedule;
    let times = schedule.times(|operation| {
        let stream = schedule.streams[operation.stream].splitn(3, ' ').nth(2);
        Cost::time(cost(seed, stream.unwrap_or_default(), operation.label))
    });
    assert_eq!(times.marks.len() as u64, case.steps + 1);
    seen(&schedule.spans(&times))
}

fn mesh(ranks: usize) -> impl Strategy<Value = MeshSettings> {
    let mesh = |shard_group, sharding, two_level| MeshSettings {
        shard_group,
        sharding,
        two_level,
        ..MeshSettings::default()
    };
    let flat = MeshSettings::default();
    let of_four = vec![
        flat,
        mesh(Some(2), Sharding::Replicated, None),
        mesh(Some(2), Sharding::Hybrid, None),
        mesh(Some(2), Sharding::Secondary, None),
        mesh(None, Sharding::Flat, Some(2)),
    ];
    prop::sample::select(if ranks == 4 { of_four } else { vec![flat] })
}

fn case() -> impl Strategy<Value = Case> {
    let ranks = prop::sample::select(vec![1usize, 2, 3, 4]);
    ranks
        .prop_flat_map(|ranks| (Just(ranks), mesh(ranks)))
        .prop_flat_map(|(ranks, mesh)| {
            let stages = match mesh.sharding {
                Sharding::Secondary => 3..4u64,
                Sharding::Flat => 0..4,
                _ => 1..4,
            };
            let numbers = (stages, 1..4usize, 1..4u64, 4..12u32);
            let flags = (any::<bool>(), 0..4u32, any::<bool>(), any::<bool>());
            (Just(ranks), Just(mesh), numbers, flags)
        })
        .prop_map(|(ranks, mesh, (stage, grad_accum, steps, bits), flags)| {
            let (overlap, offload, bf16, every) = flags;
            // Runs make a file without a name in the folder for temporary files, schedules none.
            let on_disk = || Home::Nvme(std::env::temp_dir());
            let offload = OffloadSettings {
                optimizer: match offload {
                    0 => Home::Device,
                    1 => Home::Host,
                    _ => on_disk(),
                },
                params: match offload {
                    3 if stage == 3 => on_disk(),
                    _ => Home::Device,
                },
                ..OffloadSettings::default()
            };
            Case {
                ranks,
                mesh,
                stage,
                grad_accum,
                steps,
                bucket_elems: 1 << bits,
                overlap,
                offload,
                dtype: if bf16 { DType::Bf16 } else { DType::F32 },
                reduce_every_micro_batch: every,
                ..Case::default()
            }
        })
}

proptest! {
    #![proptest_config(super::identical::cases(40))]

    #[test]
    fn schedules_have_the_times_of_runs(
        case in case(),
        units in prop::collection::vec(prop::collection::vec(1u64..300, 1..4), 1..6),
        tied: bool,
        writes: bool,
        seed: u64,
    ) {
        let toy = Toy::new(&units, tied);
        let toy = if writes { toy.writing() } else { toy };
        let expected = run(&case, &toy, seed);
        let got = recorded(&case, &toy, seed);
        let count = |seen: &Seen| {
            let mut counts = BTreeMap::new();
            for (stream, label, phase, ..) in seen {
                *counts.entry((stream.clone(), *label, *phase)).or_insert(0) += 1;
            }
            counts
        };
        prop_assert_eq!(count(&got), count(&expected));
        prop_assert_eq!(got, expected);
    }
}
