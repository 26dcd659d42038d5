//! Simulated steps as a timeline.

use std::path::Path;

use serde_json::json;
use zero_shard::ZeroStage;
use zero_simulator::Step;

use super::SimulatedOn;
use crate::error::CliError;
use crate::plan::{Report, Request};

/// Writes the steps of the fastest stage that fits, or of the fastest.
pub(super) fn write(
    path: &Path,
    request: &Request,
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
        return Err(CliError::Usage(
            "--timeline: no stage is simulated; pass --model or the whole shape of one".to_owned(),
        ));
    };
    let largest = report.largest_unit_elems;
    let step = on.stage(request, stage, largest).map_err(CliError::usage)?;
    let Some((_, step)) = step else {
        return Ok(());
    };
    let text = serde_json::to_string(&events(&step)).map_err(CliError::failure)?;
    std::fs::write(path, text)
        .map_err(|error| CliError::Failure(format!("--timeline {}: {error}", path.display())))
}

/// Chrome's trace events, which Perfetto opens: one track a stream, in microseconds.
fn events(step: &Step) -> serde_json::Value {
    let mut tracks: Vec<&str> = step.spans.iter().map(|span| &*span.stream).collect();
    tracks.sort_unstable();
    tracks.dedup();
    let names = tracks.iter().enumerate().map(|(track, name)| {
        json!({"ph": "M", "pid": 0, "tid": track, "name": "thread_name", "args": {"name": name}})
    });
    let spans = step.spans.iter().filter(|span| span.end > span.start);
    let spans = spans.map(|span| {
        let track = tracks.iter().position(|track| *track == &*span.stream);
        let us = |time: std::time::Duration| time.as_nanos() as f64 / 1e3;
        json!({
            "ph": "X", "pid": 0, "tid": track, "name": span.label, "cat": span.phase,
            "ts": us(span.start), "dur": us(span.end - span.start),
        })
    });
    json!({"traceEvents": names.chain(spans).collect::<Vec<_>>()})
}
