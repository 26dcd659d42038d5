//! Simulated steps as a timeline.

use std::path::Path;

use serde_json::{Value, json};
use zero_alloc::host::OpSpan;
use zero_ckpt::files;
use zero_shard::ZeroStage;

use super::SimulatedOn;
use super::runs::METRICS_BYTES;
use crate::error::CliError;
use crate::plan::report::Report;
use crate::plan::request::PlanRequest;

/// Writes the steps of the fastest stage that fits, or of the fastest.
pub(super) fn write(
    path: &Path,
    beside: Option<&Path>,
    request: &PlanRequest,
    on: &SimulatedOn,
    report: &Report,
) -> Result<(), CliError> {
    let fastest = |fits: bool| {
        let stages = report.stages.iter();
        stages
            .filter(move |stage| !fits || stage.fits != Some(false))
            .filter_map(|stage| Some((stage.stage, stage.simulated.as_ref()?.step_ms)))
            .min_by(|a, b| a.1.total_cmp(&b.1))
    };
    let stage = fastest(true).or_else(|| fastest(false));
    let stage = stage.and_then(|(stage, _)| ZeroStage::from_number(stage.into()));
    let Some(stage) = stage else {
        return Err(usage!(
            "--timeline: no stage is simulated; pass --model or the whole shape of one"
        ));
    };
    let largest = report.largest_unit_elems;
    let Some(prepared) = on.prepared(request, stage, largest) else {
        return Ok(());
    };
    let mut events = events(&prepared.spans(&on.efficiencies));
    if let Some(beside) = beside {
        events.push(process(SIMULATED, "simulated"));
        events.push(process(MEASURED, "measured"));
        events.extend(measured(beside)?);
    }
    let text = json!({"traceEvents": events}).to_string();
    std::fs::write(path, text).map_err(|error| failure!("--timeline {}: {error}", path.display()))
}

/// The processes of a timeline.
const SIMULATED: u32 = 0;
const MEASURED: u32 = 1;

fn process(pid: u32, name: &str) -> Value {
    json!({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
}

/// The events of the `trace.json` of `zero train --report`, as another process that begins at 0.
fn measured(path: &Path) -> Result<Vec<Value>, CliError> {
    let error = |what: &dyn std::fmt::Display| {
        usage!(
            "--timeline-beside {}: {what}; pass the trace.json of zero train --report",
            path.display()
        )
    };
    let text = files::read_text(path, METRICS_BYTES).map_err(|e| error(&e))?;
    let trace: Value = serde_json::from_str(&text).map_err(|e| error(&e))?;
    let events = trace.get("traceEvents").unwrap_or(&trace).as_array();
    let mut events = events.cloned().ok_or_else(|| error(&"no list of events"))?;
    let starts = events.iter().filter_map(|event| event["ts"].as_f64());
    let first = starts.fold(f64::INFINITY, f64::min);
    for event in events.iter_mut().filter_map(Value::as_object_mut) {
        event.insert("pid".to_owned(), MEASURED.into());
        if let Some(start) = event.get("ts").and_then(Value::as_f64) {
            event.insert("ts".to_owned(), (start - first).into());
        }
    }
    Ok(events)
}

/// Chrome's trace events, which Perfetto opens: one track a stream, in microseconds.
fn events(spans: &[OpSpan]) -> Vec<Value> {
    let mut tracks: Vec<&str> = spans.iter().map(|span| &*span.stream).collect();
    tracks.sort_unstable();
    tracks.dedup();
    let names = tracks.iter().enumerate().map(|(track, name)| {
        json!({"ph": "M", "pid": SIMULATED, "tid": track, "name": "thread_name", "args": {"name": name}})
    });
    let spans = spans.iter().filter(|span| span.end > span.start);
    let spans = spans.map(|span| {
        let track = tracks.iter().position(|track| *track == &*span.stream);
        let us = |time: std::time::Duration| time.as_nanos() as f64 / 1e3;
        json!({
            "ph": "X", "pid": SIMULATED, "tid": track, "name": span.label, "cat": span.phase,
            "ts": us(span.start), "dur": us(span.end - span.start),
        })
    });
    names.chain(spans).collect()
}
