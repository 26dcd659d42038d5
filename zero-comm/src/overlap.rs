//! The overlap of communication and compute in a recorded step, and the step as a Chrome trace.
//!
//! T_step is the time of the step; T_compute is the time during which compute ran; T_comm is the
//! time during which communication ran. The **overlap fraction** is
//! `1 - (T_step - T_compute) / T_comm`, at least 0: 1 if communication adds no time, 0 if compute
//! waits for all of it. **Exposed** communication is the time during which only communication ran.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use zero_alloc::host::OpSpan;

use crate::Collective;

/// The label of a stream's wait for an event.
const WAIT: &str = "wait";

/// The times of one step of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Overlap {
    /// From the first start to the last end of any operation.
    pub step: Duration,
    /// Time in which a compute operation ran.
    pub compute: Duration,
    /// Time in which communication ran.
    pub comm: Duration,
    /// Time in which communication ran without compute.
    pub exposed: Duration,
}

impl Overlap {
    /// Computes the times of `spans`; waits do not count. Collectives, and all else on
    /// `comm_streams`, are communication; the rest is compute.
    pub fn of(spans: &[OpSpan], comm_streams: &[&str]) -> Self {
        let is_comm = |span: &OpSpan| comm_streams.contains(&&*span.stream) || is_collective(span);
        let work = || spans.iter().filter(|s| s.label != WAIT);
        let (comm, compute): (Vec<&OpSpan>, Vec<&OpSpan>) = work().partition(|s| is_comm(s));
        let comm = merged(&comm);
        let compute = merged(&compute);
        let start = work().map(|s| s.start).min().unwrap_or_default();
        let end = work().map(|s| s.end).max().unwrap_or_default();
        let comm_time = length(&comm);
        let compute_time = length(&compute);
        let exposed = comm_time - common(&comm, &compute);
        Self {
            step: end - start,
            compute: compute_time,
            comm: comm_time,
            exposed,
        }
    }

    /// `1 - (T_step - T_compute) / T_comm`; 1 without communication, and 0 if compute is idle for
    /// longer than T_comm.
    pub fn fraction(&self) -> f64 {
        let waited = self.step.saturating_sub(self.compute).as_secs_f64();
        if self.comm.is_zero() {
            1.0
        } else {
            (1.0 - waited / self.comm.as_secs_f64()).max(0.0)
        }
    }
}

/// Whether an operation is a collective.
pub fn is_collective(span: &OpSpan) -> bool {
    let mut all = Collective::ALL.iter();
    all.any(|collective| collective.name() == span.label)
}

type Interval = (Duration, Duration);

/// The union of the spans, as disjoint intervals in order.
fn merged(spans: &[&OpSpan]) -> Vec<Interval> {
    let mut all: Vec<Interval> = spans.iter().map(|s| (s.start, s.end)).collect();
    all.sort_unstable();
    let mut union: Vec<Interval> = Vec::with_capacity(all.len());
    for (start, end) in all {
        match union.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => union.push((start, end)),
        }
    }
    union
}

fn length(intervals: &[Interval]) -> Duration {
    intervals.iter().map(|(start, end)| *end - *start).sum()
}

/// The total length of the intersection of two ordered lists of disjoint intervals.
fn common(a: &[Interval], b: &[Interval]) -> Duration {
    let mut i = 0;
    let mut j = 0;
    let mut sum = Duration::ZERO;
    while let (Some(x), Some(y)) = (a.get(i), b.get(j)) {
        sum += x.1.min(y.1).saturating_sub(x.0.max(y.0));
        if x.1 <= y.1 { i += 1 } else { j += 1 }
    }
    sum
}

/// Formats spans as Chrome trace JSON for Perfetto and chrome://tracing: one process, one track per
/// stream.
pub fn chrome_trace(spans: &[OpSpan]) -> String {
    let mut lines: BTreeMap<&str, usize> = BTreeMap::new();
    for span in spans {
        let next = lines.len();
        lines.entry(&span.stream).or_insert(next);
    }

    let mut events = Vec::with_capacity(spans.len() + lines.len());
    for (stream, line) in &lines {
        let name = quoted(stream);
        events.push(format!(
            r#"{{"name":"thread_name","ph":"M","pid":0,"tid":{line},"args":{{"name":{name}}}}}"#
        ));
    }

    for span in spans {
        let micros = |d: Duration| d.as_secs_f64() * 1e6;
        let name = quoted(span.label);
        let phase = quoted(span.phase);
        let line = lines[&*span.stream];
        let (start, length) = (
            micros(span.start),
            micros(span.end.saturating_sub(span.start)),
        );
        events.push(format!(
            r#"{{"name":{name},"cat":{phase},"ph":"X","pid":0,"tid":{line},"ts":{start:.3},"dur":{length:.3}}}"#
        ));
    }

    format!(
        "{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n{}\n]}}\n",
        events.join(",\n")
    )
}

/// Quotes `text` as a JSON string.
fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c.is_control() => {
                // Writing to a string cannot fail.
                let _ok = write!(out, "\\u{:04x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn span(stream: &str, label: &'static str, start: u64, end: u64) -> OpSpan {
        let start = Duration::from_millis(start);
        let end = Duration::from_millis(end);
        OpSpan::new(label, stream, start, end)
    }

    #[test]
    fn a_step_by_hand() {
        let spans = [
            span("compute", "forward", 0, 10),
            span("compute", "wait", 10, 14),
            span("compute", "backward", 14, 20),
            span("comm", "all_gather", 8, 14),
            span("comm", "reduce_scatter", 18, 23),
        ];

        let overlap = Overlap::of(&spans, &["comm"]);
        let ms = Duration::from_millis;
        assert_eq!(
            overlap,
            Overlap {
                step: ms(23),
                compute: ms(16),
                comm: ms(11),
                exposed: ms(4 + 3)
            }
        );

        assert!((overlap.fraction() - (1.0 - 7.0 / 11.0)).abs() < 1e-12);
        assert_eq!(Overlap::of(&[], &["comm"]).fraction(), 1.0);
        // Compute is idle for longer than communication runs, as in a first step that waits for its
        // data.
        let idle = [
            span("comm", "all_gather", 0, 2),
            span("compute", "forward", 90, 100),
        ];
        assert_eq!(Overlap::of(&idle, &["comm"]).fraction(), 0.0);
    }

    #[test]
    fn trace_is_valid_json() {
        let trace = chrome_trace(&[
            span("rank 0 \"comm\"\n", "all_gather", 1, 3),
            span("b\\c", "x", 2, 2),
        ]);
        let json: serde_json::Value = serde_json::from_str(&trace).expect("valid JSON");
        let events = json["traceEvents"].as_array().expect("a list");
        assert_eq!(events.len(), 4);
        assert!(
            events
                .iter()
                .any(|e| e["args"]["name"] == "rank 0 \"comm\"\n")
        );
        assert!(
            events
                .iter()
                .any(|e| e["name"] == "all_gather" && e["ts"] == 1000.0 && e["dur"] == 2000.0)
        );
    }

    proptest! {
        /// The oracle counts milliseconds one by one.
        #[test]
        fn times_equal_a_plain_count(
            spans in prop::collection::vec((any::<bool>(), 0u64..60, 0u64..20), 0..20)
        ) {
            let spans: Vec<OpSpan> = spans
                .into_iter()
                .map(|(comm, start, len)| span(if comm { "comm" } else { "compute" }, "op", start, start + len))
                .collect();
            let runs = |stream: &str, ms: u64| {
                spans.iter().any(|s| &*s.stream == stream && s.start.as_millis() as u64 <= ms && ms < s.end.as_millis() as u64)
            };
            let count = |f: &dyn Fn(u64) -> bool| Duration::from_millis((0..100).filter(|&ms| f(ms)).count() as u64);
            let overlap = Overlap::of(&spans, &["comm"]);
            prop_assert_eq!(overlap.comm, count(&|ms| runs("comm", ms)));
            prop_assert_eq!(overlap.compute, count(&|ms| runs("compute", ms)));
            prop_assert_eq!(overlap.exposed, count(&|ms| runs("comm", ms) && !runs("compute", ms)));
        }
    }
}
