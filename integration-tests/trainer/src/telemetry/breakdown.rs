//! The wall time of a step by the work on its critical path.
//!
//! Every instant of the step counts for exactly one part, so that the parts sum to the wall time:
//! 1. If the compute stream runs an operation, for the phase of that operation; a collective, of the
//!    model or without overlap, for exposed communication of its kind.
//! 2. Otherwise, if the host updates parameters that are offloaded, for the optimizer.
//! 3. Otherwise, if a communication stream runs one, that of replicas included, for exposed
//!    communication of that kind. A collective includes its wait for other ranks.
//! 4. Otherwise for what the host does meanwhile: data, checkpoint, validation, or anything else:
//!    host wait.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use zero_alloc::host::OpSpan;
use zero_comm::Collective;
use zero_comm::overlap::is_collective;

use crate::telemetry::phase::{Phase, UnitKind};

/// The wall time of a step on one rank, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Breakdown {
    /// From the end of the previous step to the end of this one: the sum of `parts`. Longer than
    /// `step_ms` by what is done between steps: checkpoints, validation, the metrics file.
    pub wall_ms: f64,
    /// Every instant in one part.
    pub parts: PartsMs,
    /// The forward and backward of `parts`, by the kind of unit.
    pub units: UnitsMs,
    /// Time in which the communication stream was busy, hidden behind compute or not.
    pub comm: CommMs,
    /// The host's update of offloaded state and its reads from files, hidden behind compute or not,
    /// in milliseconds.
    #[serde(default)]
    pub update_ms: f64,
    /// Model FLOPs per second of all ranks, in units of 10^12.
    pub tflops: f64,
    /// Model FLOPs utilization; null if the peak rate of the device is not known.
    pub mfu: Option<f64>,
}

/// The parts of a step, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PartsMs {
    /// Forward passes.
    pub forward_ms: f64,
    /// Backward passes, with the recomputation of activations.
    pub backward_ms: f64,
    /// Forward, backward and reduction replayed as a CUDA graph, which has no parts.
    pub graph_ms: f64,
    /// Zeroing gradients and packing them into buckets.
    pub pack_ms: f64,
    /// Gradient statistics, the decision and the update.
    pub optimizer_ms: f64,
    /// Communication that compute does not hide: reduction of gradients.
    pub exposed_reduce_ms: f64,
    /// Communication that compute does not hide: gathering parameters.
    pub exposed_gather_ms: f64,
    /// Communication that compute does not hide: statistics and losses.
    pub exposed_control_ms: f64,
    /// Communication that compute does not hide: the model's, of activations.
    #[serde(default)]
    pub exposed_model_ms: f64,
    /// Waiting for data.
    pub data_ms: f64,
    /// Copying state for a checkpoint, and waiting for a save.
    pub checkpoint_ms: f64,
    /// Validation.
    pub validation_ms: f64,
    /// Both streams are idle: the host has enqueued nothing that can run.
    pub host_wait_ms: f64,
}

/// Forward and backward by the kind of unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct UnitsMs {
    /// The embedding.
    pub embedding: PassMs,
    /// All blocks.
    pub block: PassMs,
    /// The head, with the loss.
    pub head: PassMs,
}

/// Forward and backward of one kind of unit, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PassMs {
    /// Forward passes.
    pub forward_ms: f64,
    /// Backward passes.
    pub backward_ms: f64,
}

/// Communication, hidden or not, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CommMs {
    /// Reduction of gradients.
    pub reduce_ms: f64,
    /// Gathering parameters.
    pub gather_ms: f64,
    /// Statistics and losses.
    pub control_ms: f64,
    /// Activations, between ranks that compute a micro-batch together; never hidden.
    #[serde(default)]
    pub model_ms: f64,
}

/// A part of a step. Communication counts here if nothing hides it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum StepPart {
    Forward(UnitKind),
    Backward(UnitKind),
    Graph,
    Pack,
    Optimizer,
    Reduce,
    Gather,
    Control,
    Model,
    Data,
    Checkpoint,
    Validation,
    HostWait,
}

impl StepPart {
    fn of_compute(span: &OpSpan) -> Self {
        match Phase::of(span) {
            Some(Phase::Forward(_) | Phase::Backward(_)) if is_collective(span) => Self::Model,
            // Without overlap all communication is on the compute stream.
            _ if is_collective(span) => Self::of_comm(span),
            Some(Phase::Forward(kind)) => Self::Forward(kind),
            Some(Phase::Backward(kind)) => Self::Backward(kind),
            Some(Phase::Graph) => Self::Graph,
            Some(Phase::Decision | Phase::Optimizer) => Self::Optimizer,
            Some(Phase::Data) => Self::Data,
            Some(Phase::Checkpoint) => Self::Checkpoint,
            Some(Phase::Validation) => Self::Validation,
            Some(Phase::Gradients) | None => Self::Pack,
        }
    }

    /// On the stream of the host's update: statistics, the update, and the transfers that it waits
    /// for.
    fn of_update(span: &OpSpan) -> Self {
        match Phase::of(span) {
            Some(Phase::Checkpoint) => Self::Checkpoint,
            Some(Phase::Validation) => Self::Validation,
            _ => Self::Optimizer,
        }
    }

    fn of_comm(span: &OpSpan) -> Self {
        match Phase::of(span) {
            Some(Phase::Checkpoint) => Self::Checkpoint,
            Some(Phase::Validation) => Self::Validation,
            Some(Phase::Decision) => Self::Control,
            _ if span.label == Collective::AllGather.name() => Self::Gather,
            // The reductions, and storing what they reduced.
            _ => Self::Reduce,
        }
    }

    fn of_host(span: &OpSpan) -> Self {
        match Phase::of(span) {
            Some(Phase::Data) => Self::Data,
            Some(Phase::Checkpoint) => Self::Checkpoint,
            Some(Phase::Validation) => Self::Validation,
            _ => Self::HostWait,
        }
    }
}

/// Time by part; a part that is missing has none.
type Times = BTreeMap<StepPart, Duration>;

/// Work without gaps in it: start, end, part.
type Work = (Duration, Duration, StepPart);

/// The names of a rank's tracks in the timeline.
pub(crate) struct Tracks<'a> {
    pub(crate) compute: &'a str,
    /// The host's update of offloaded state; the track of what it reads has this name and `read`.
    pub(crate) update: &'a str,
    /// Of collectives, beside compute.
    pub(crate) comm: Vec<&'a str>,
    pub(crate) host: &'a str,
}

impl Breakdown {
    /// The breakdown of the time `wall`.
    pub(crate) fn of(spans: &[OpSpan], tracks: &Tracks<'_>, wall: Range<Duration>) -> Self {
        let reads = format!("{} read", tracks.update);
        let compute = layer(spans, &[tracks.compute], &wall, StepPart::of_compute);
        let update = layer(spans, &[tracks.update, &reads], &wall, StepPart::of_update);
        let comm = layer(spans, &tracks.comm, &wall, StepPart::of_comm);
        let host = layer(spans, &[tracks.host], &wall, StepPart::of_host);
        let update_ms = ms(update.iter().map(|(start, end, _)| *end - *start).sum());
        let busy_ms = |part| {
            let works = comm.iter().chain(&compute).filter(|work| work.2 == part);
            ms(works.map(|(start, end, _)| *end - *start).sum())
        };

        let comm_ms = CommMs {
            reduce_ms: busy_ms(StepPart::Reduce),
            gather_ms: busy_ms(StepPart::Gather),
            control_ms: busy_ms(StepPart::Control),
            model_ms: busy_ms(StepPart::Model),
        };

        let times = partition(&[compute, update, comm, host], wall.clone());
        let part_ms = |part: StepPart| ms(times.get(&part).copied().unwrap_or_default());
        let units = UnitKind::ALL.map(|kind| PassMs {
            forward_ms: part_ms(StepPart::Forward(kind)),
            backward_ms: part_ms(StepPart::Backward(kind)),
        });

        let parts = PartsMs {
            forward_ms: units.iter().map(|unit| unit.forward_ms).sum(),
            backward_ms: units.iter().map(|unit| unit.backward_ms).sum(),
            graph_ms: part_ms(StepPart::Graph),
            pack_ms: part_ms(StepPart::Pack),
            optimizer_ms: part_ms(StepPart::Optimizer),
            exposed_reduce_ms: part_ms(StepPart::Reduce),
            exposed_gather_ms: part_ms(StepPart::Gather),
            exposed_control_ms: part_ms(StepPart::Control),
            exposed_model_ms: part_ms(StepPart::Model),
            data_ms: part_ms(StepPart::Data),
            checkpoint_ms: part_ms(StepPart::Checkpoint),
            validation_ms: part_ms(StepPart::Validation),
            host_wait_ms: part_ms(StepPart::HostWait),
        };

        let [embedding, block, head] = units;
        Self {
            wall_ms: ms(wall.end.saturating_sub(wall.start)),
            parts,
            units: UnitsMs {
                embedding,
                block,
                head,
            },
            comm: comm_ms,
            update_ms,
            tflops: 0.0,
            mfu: None,
        }
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The work on some tracks within `wall`, in order and disjoint. A track runs one operation at a
/// time; measured on a device, neighbours may overlap by the resolution of its clock.
fn layer(
    spans: &[OpSpan],
    tracks: &[&str],
    wall: &Range<Duration>,
    part: fn(&OpSpan) -> StepPart,
) -> Vec<Work> {
    let on_track = spans
        .iter()
        .filter(|span| tracks.contains(&&*span.stream) && span.label != "wait");
    let mut works: Vec<Work> = on_track
        .map(|s| (s.start.max(wall.start), s.end.min(wall.end), part(s)))
        .collect();
    works.sort_by_key(|(start, end, _)| (*start, *end));
    let mut reached = wall.start;
    for (start, end, _) in &mut works {
        *start = reached.max(*start);
        reached = reached.max(*end);
    }
    works.retain(|(start, end, _)| start < end);
    works
}

/// Assigns every instant of `wall` to the part of the first layer that works then, or to
/// [`StepPart::HostWait`].
fn partition(layers: &[Vec<Work>; 4], wall: Range<Duration>) -> Times {
    let mut times = Times::default();
    let mut rests = layers.each_ref().map(Vec::as_slice);
    let mut now = wall.start;
    while now < wall.end {
        let mut part = None;
        let mut until = wall.end;
        for rest in &mut rests {
            while let [(_, end, _), others @ ..] = *rest
                && *end <= now
            {
                *rest = others;
            }
            if let Some((start, end, of)) = rest.first() {
                let works = *start <= now;
                part = part.or(works.then_some(*of));
                until = until.min(if works { *end } else { *start });
            }
        }
        *times.entry(part.unwrap_or(StepPart::HostWait)).or_default() += until - now;
        now = until;
    }

    times
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tracks() -> Tracks<'static> {
        Tracks {
            compute: "compute",
            update: "update",
            comm: vec!["comm", "replicas"],
            host: "host",
        }
    }

    fn span(track: &str, phase: Phase, label: &'static str, start: u64, end: u64) -> OpSpan {
        let start = Duration::from_millis(start);
        let end = Duration::from_millis(end);
        OpSpan::new(label, track, start, end).phase(phase.name())
    }

    fn wall(start: u64, end: u64) -> Range<Duration> {
        Duration::from_millis(start)..Duration::from_millis(end)
    }

    #[test]
    fn a_step_by_hand() {
        let spans = [
            span("compute", Phase::Optimizer, "adam", 0, 14), // of the previous step
            span("host", Phase::Checkpoint, "checkpoint", 10, 20),
            span("comm", Phase::Optimizer, "all_gather", 13, 22),
            span("compute", Phase::Optimizer, "wait", 14, 22),
            span(
                "compute",
                Phase::Forward(UnitKind::Embedding),
                "forward embedding",
                22,
                30,
            ),
            span("compute", Phase::Backward(UnitKind::Head), "matmul", 30, 50),
            span("replicas", Phase::Gradients, "all_reduce", 45, 52),
            span("comm", Phase::Gradients, "reduce_scatter", 52, 60),
            span(
                "compute",
                Phase::Backward(UnitKind::Block),
                "all_reduce",
                70,
                73,
            ),
            span("host", Phase::Data, "data", 55, 70),
            span("compute", Phase::Gradients, "cast", 75, 76),
            span("comm", Phase::Decision, "all_gather", 90, 99),
            span("other", Phase::Optimizer, "adam", 80, 90),
        ];

        let breakdown = Breakdown::of(&spans, &tracks(), wall(10, 100));
        let expected = PartsMs {
            forward_ms: 8.0,
            backward_ms: 20.0,
            pack_ms: 1.0,
            optimizer_ms: 4.0,
            exposed_gather_ms: 8.0,
            exposed_reduce_ms: 10.0,
            exposed_control_ms: 9.0,
            exposed_model_ms: 3.0,
            data_ms: 10.0,
            host_wait_ms: 17.0,
            ..PartsMs::default()
        };

        assert_eq!(breakdown.parts, expected);
        assert_eq!(breakdown.wall_ms, 90.0);
        assert_eq!(
            breakdown.units.head,
            PassMs {
                forward_ms: 0.0,
                backward_ms: 20.0
            }
        );

        assert_eq!(
            breakdown.comm,
            CommMs {
                reduce_ms: 15.0,
                gather_ms: 9.0,
                control_ms: 9.0,
                model_ms: 3.0,
            }
        );
    }

    /// The part of an update that no compute hides is the optimizer's, a collective at the same
    /// time or not.
    #[test]
    fn update_on_the_host_is_counted() {
        let spans = [
            span(
                "compute",
                Phase::Backward(UnitKind::Embedding),
                "backward",
                0,
                10,
            ),
            span("update", Phase::Gradients, "statistics", 5, 12),
            span("comm", Phase::Decision, "all_gather", 12, 13),
            span("update read", Phase::Optimizer, "swap read", 13, 20),
            span("update", Phase::Optimizer, "wait", 13, 17),
            span("update", Phase::Optimizer, "adam", 17, 33),
            span("comm", Phase::Optimizer, "all_gather", 30, 40),
            span(
                "compute",
                Phase::Forward(UnitKind::Embedding),
                "forward",
                25,
                28,
            ),
        ];

        let breakdown = Breakdown::of(&spans, &tracks(), wall(0, 40));
        let expected = PartsMs {
            backward_ms: 10.0,
            forward_ms: 3.0,
            optimizer_ms: 19.0,
            exposed_control_ms: 1.0,
            exposed_gather_ms: 7.0,
            ..PartsMs::default()
        };

        assert_eq!(breakdown.parts, expected);
        assert_eq!(
            breakdown.comm,
            CommMs {
                reduce_ms: 0.0,
                gather_ms: 10.0,
                control_ms: 1.0,
                model_ms: 0.0,
            }
        );

        assert_eq!(breakdown.update_ms, 27.0);
    }

    proptest! {
        /// The oracle looks at each millisecond by itself.
        #[test]
        fn parts_sum_to_the_wall_time(
            spans in prop::collection::vec((0usize..4, 0usize..6, 0u64..60, 0u64..20), 0..30),
            from in 0u64..40,
            length in 0u64..40,
        ) {
            let phases = [Phase::Forward(UnitKind::Block), Phase::Decision, Phase::Data, Phase::Checkpoint, Phase::Gradients, Phase::Optimizer];
            let tracks = ["compute", "update", "comm", "host"];
            // A track runs one operation at a time.
            let mut reached = [0; 4];
            let spans: Vec<OpSpan> = spans
                .into_iter()
                .map(|(track, phase, gap, length)| {
                    let start = reached[track] + gap % 7;
                    reached[track] = start + length;
                    span(tracks[track], phases[phase], "op", start, start + length)
                })
                .collect();

            let wall = wall(from, from + length);
            let layers = [
                layer(&spans, &["compute"], &wall, StepPart::of_compute),
                layer(&spans, &["update"], &wall, StepPart::of_update),
                layer(&spans, &["comm"], &wall, StepPart::of_comm),
                layer(&spans, &["host"], &wall, StepPart::of_host),
            ];
            let times = partition(&layers, wall.clone());
            prop_assert_eq!(times.values().sum::<Duration>(), wall.end - wall.start, "exactly");
            let mut expected = Times::default();

            for ms in from..from + length {
                let at = Duration::from_millis(ms);
                let running = |track: &str| spans.iter().find(|s| &*s.stream == track && s.start <= at && at < s.end);
                let part = running("compute").map(StepPart::of_compute)
                    .or_else(|| running("update").map(StepPart::of_update))
                    .or_else(|| running("comm").map(StepPart::of_comm))
                    .or_else(|| running("host").map(StepPart::of_host))
                    .unwrap_or(StepPart::HostWait);
                *expected.entry(part).or_default() += Duration::from_millis(1);
            }

            prop_assert_eq!(times, expected);
        }
    }
}
