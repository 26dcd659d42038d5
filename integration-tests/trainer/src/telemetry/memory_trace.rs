//! The memory of a step over time, by purpose.
//!
//! The host allocates and frees while it enqueues, often far ahead of the device. The trace
//! therefore places each block in the compute stream's time: between the operations that were
//! enqueued before and after it.

use std::ops::Range;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use zero_alloc::host::OpSpan;
use zero_alloc::{Purpose, Report};

/// The memory of one rank over its last step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MemoryTrace {
    /// The length of the step.
    pub step: Duration,
    /// The bytes held at the start, after each allocated or freed block, and from each phase on, in
    /// order.
    pub points: Vec<MemoryPoint>,
}

/// The bytes held from a moment on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MemoryPoint {
    /// Time since the start of the step.
    pub at: Duration,
    /// The phase of the compute stream's operation that runs then.
    pub operation: String,
    /// By purpose, in the order of [`Purpose::ALL`].
    pub bytes: [u64; Purpose::COUNT],
}

impl MemoryPoint {
    /// The bytes of all purposes.
    pub fn total_bytes(&self) -> u64 {
        self.bytes.iter().sum()
    }
}

impl MemoryTrace {
    /// The first moment with the most bytes; `None` if the trace is empty.
    pub fn peak(&self) -> Option<&MemoryPoint> {
        self.points
            .iter()
            .rev()
            .max_by_key(|point| point.total_bytes())
    }

    /// Describes the moment of the peak: `at 62% of the step, in the backward of a block`.
    pub fn peak_moment(&self) -> Option<String> {
        let peak = self.peak()?;
        if self
            .points
            .iter()
            .all(|point| point.total_bytes() == peak.total_bytes())
        {
            return Some("during the whole step".to_owned());
        }
        let operation = match peak.operation.split_once(' ') {
            Some((pass, "block")) => format!("{pass} of a block"),
            Some((pass, unit)) => format!("{pass} of the {unit}"),
            None => peak.operation.clone(),
        };
        Some(format!(
            "at {:.0}% of the step, in the {operation}",
            self.fraction(peak) * 100.0
        ))
    }

    /// The part of the step before `point`.
    pub fn fraction(&self, point: &MemoryPoint) -> f64 {
        point.at.as_secs_f64() / self.step.as_secs_f64().max(1e-9)
    }
}

/// The changes of a rank's memory in a step.
#[derive(Clone, Debug, Default)]
pub(crate) struct MemoryRecord {
    /// The step, in the timeline's time.
    pub(crate) step: Range<Duration>,
    /// The bytes held at its start, by purpose.
    pub(crate) base: [usize; Purpose::COUNT],
    /// When the host allocated or freed a block, in the timeline's time, its purpose and its bytes
    /// (negative if it was freed); in order.
    pub(crate) changes: Vec<(Duration, Purpose, i64)>,
}

/// The bytes that a pool holds now, by purpose.
pub(crate) fn live(report: &Report) -> [usize; Purpose::COUNT] {
    Purpose::ALL.map(|purpose| report.of(purpose).live_bytes)
}

impl MemoryRecord {
    /// Places the changes in the time of the compute stream, whose operations are among `spans`.
    pub(crate) fn trace(&self, spans: &[OpSpan], compute: &str) -> MemoryTrace {
        let mut ops: Vec<&OpSpan> = spans
            .iter()
            .filter(|s| &*s.stream == compute && s.label != "wait")
            .collect();
        ops.sort_by_key(|op| op.enqueued);
        let within = |at: Duration| at.clamp(self.step.start, self.step.end.max(self.step.start));
        let name = |op: usize| ops.get(op).or(ops.last()).map_or("", |op| op.phase);
        let mut bytes = self.base.map(|bytes| bytes as i64);
        let mut points: Vec<MemoryPoint> = Vec::with_capacity(self.changes.len() + ops.len());

        let mut add = |at: Duration, operation: &str, bytes: &[i64; Purpose::COUNT]| {
            let bytes = bytes.map(|bytes| bytes.max(0) as u64);
            let point = MemoryPoint {
                at: at.saturating_sub(self.step.start),
                operation: operation.to_owned(),
                bytes,
            };
            if points
                .last()
                .is_none_or(|last| (&last.operation, last.bytes) != (&point.operation, point.bytes))
            {
                points.push(point);
            }
        };

        add(
            self.step.start,
            name(ops.partition_point(|op| op.end <= self.step.start)),
            &bytes,
        );
        let mut changes = self.changes.as_slice();

        for next in 0..=ops.len() {
            // Changed before the next operation was enqueued.
            let count = ops.get(next).map_or(changes.len(), |op| {
                changes.partition_point(|c| c.0 < op.enqueued)
            });
            let (gap, later) = changes.split_at(count);
            changes = later;
            let start = next
                .checked_sub(1)
                .map_or(self.step.start, |before| within(ops[before].end));
            let end = ops
                .get(next)
                .map_or(self.step.end, |op| within(op.start))
                .max(start);
            for (i, (_, purpose, change)) in gap.iter().enumerate() {
                bytes[*purpose as usize] += change;
                let part = (i + 1) as f64 / (gap.len() + 1) as f64;
                add(start + (end - start).mul_f64(part), name(next), &bytes);
            }
            if let Some(op) = ops
                .get(next)
                .filter(|op| op.start < self.step.end && op.end > self.step.start)
            {
                add(end, op.phase, &bytes);
            }
        }

        MemoryTrace {
            step: self.step.end.saturating_sub(self.step.start),
            points,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_placed_between_operations() {
        let ms = Duration::from_millis;
        let op = |phase, enqueued, start, end| {
            OpSpan::new("op", "compute", ms(start), ms(end))
                .phase(phase)
                .enqueued(ms(enqueued))
        };

        // The operation before the step is the previous step's update.
        let spans = [
            op("optimizer", 1, 50, 104),
            op("forward", 3, 110, 140),
            op("backward", 6, 140, 180),
            op("decision", 8, 180, 185),
            op("optimizer", 9, 190, 195),
        ];

        let change = |at, bytes| (ms(at), Purpose::Buckets, bytes);
        let record = MemoryRecord {
            step: ms(100)..ms(200),
            base: [7, 0, 0, 0, 0, 0],
            changes: vec![change(2, 10), change(2, 20), change(5, -10), change(7, -20)],
        };

        let trace = record.trace(&spans, "compute");
        let seen: Vec<_> = trace
            .points
            .iter()
            .map(|p| (p.at.as_millis(), p.operation.as_str(), p.total_bytes()))
            .collect();

        let expected = [
            (0, "optimizer", 7),
            (6, "forward", 17),
            (8, "forward", 37),
            (40, "backward", 27),
            (80, "decision", 7),
            (90, "optimizer", 7),
        ];

        assert_eq!(seen, expected);
        assert_eq!(trace.step, ms(100));
        let peak = trace.peak().unwrap();
        assert_eq!(
            (peak.total_bytes(), peak.bytes[Purpose::Buckets as usize]),
            (37, 30)
        );
    }
}
