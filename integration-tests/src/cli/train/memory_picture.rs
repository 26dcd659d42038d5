//! The memory of rank 0 over its last step, as SVG: by purpose, stacked.

use std::time::Duration;

use indicatif::HumanBytes;
use plotters::prelude::*;
use zero_alloc::Purpose;

use super::picture::{self, Entry, tick};
use crate::cli::CliError;
use crate::trainer::{MemoryPoint, MemoryTrace};

/// From the bottom up, with the names of the table.
const LAYERS: [(Purpose, &str, RGBColor); Purpose::COUNT] = [
    (Purpose::Optimizer, "optimizer state", RGBColor(90, 90, 160)),
    (Purpose::Params, "parameters", RGBColor(70, 130, 200)),
    (Purpose::Grads, "gradients", RGBColor(110, 190, 200)),
    (Purpose::Activations, "activations", RGBColor(245, 190, 90)),
    (Purpose::Workspace, "workspace", RGBColor(190, 190, 190)),
    (Purpose::Buckets, "buckets, gathered units", RGBColor(215, 110, 100)),
];
/// The stripe above the areas, by the first word of the operation.
const PHASES: [(&str, RGBColor); 3] = [
    ("forward", RGBColor(120, 180, 120)),
    ("backward", RGBColor(60, 120, 60)),
    ("optimizer", RGBColor(150, 100, 180)),
];
/// Points that are drawn; more would only make the file larger.
const POINTS: usize = 2000;

/// Draws the trace; `None` if it is empty.
pub(super) fn svg(trace: &MemoryTrace) -> Result<Option<String>, CliError> {
    let Some(peak) = trace.peak() else { return Ok(None) };
    let bytes = |n: u64| HumanBytes(n).to_string();
    let moment = trace.peak_moment().unwrap_or_default();
    let note = format!("rank 0, last step; peak {} {moment}", bytes(peak.total_bytes()));
    let at_peak = |&(purpose, name, color): &(Purpose, &str, RGBColor)| -> Entry {
        (color, format!("{name} {}", bytes(peak.bytes[purpose as usize])))
    };
    let mut legend: Vec<Entry> = LAYERS.iter().rev().map(at_peak).collect();
    legend.extend(PHASES.map(|(name, color)| (color, name.to_owned())));

    let (unit, divisor) = [("GiB", 30), ("MiB", 20), ("KiB", 10), ("bytes", 0)]
        .map(|(unit, power)| (unit, (1u64 << power) as f64))
        .into_iter()
        .find(|(_, divisor)| peak.total_bytes() as f64 >= *divisor)
        .unwrap_or(("bytes", 1.0));
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let (end, top) = (ms(trace.step).max(1e-3), (peak.total_bytes() as f64 / divisor).max(1e-3));
    let points = thinned(&trace.points);
    let drawn = picture::draw("Memory", &note, &legend, |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(14)
            .margin_right(26)
            .x_label_area_size(42)
            .y_label_area_size(70)
            .build_cartesian_2d(0.0..end, 0.0..top * 1.12)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .x_labels(8)
            .x_desc("ms since the start of the step")
            .y_desc(unit)
            .x_label_formatter(&|x| tick(*x, end))
            .y_label_formatter(&|y| tick(*y, top))
            .draw()?;
        let mut below = vec![0.0; points.len()];
        for (purpose, _, color) in LAYERS {
            let held = |point: &&MemoryPoint| point.bytes[purpose as usize] as f64 / divisor;
            let above: Vec<f64> = points.iter().zip(&below).map(|(point, below)| below + held(point)).collect();
            if above != below {
                let mut outline = edge(&points, &above, end);
                outline.extend(edge(&points, &below, end).into_iter().rev());
                chart.draw_series([Polygon::new(outline, color.filled())])?;
            }
            below = above;
        }
        for (i, point) in points.iter().enumerate() {
            let until = points.get(i + 1).map_or(end, |next| ms(next.at));
            let phase = point.operation.split(' ').next().unwrap_or_default();
            let phase = if phase == "decision" { "optimizer" } else { phase };
            if let Some((_, color)) = PHASES.iter().find(|(name, _)| *name == phase) {
                let stripe = [(ms(point.at), top * 1.06), (until, top * 1.09)];
                chart.draw_series([Rectangle::new(stripe, color.filled())])?;
            }
        }
        let at = ms(peak.at);
        chart.draw_series([PathElement::new([(at, 0.0), (at, top * 1.05)], BLACK.stroke_width(1))])?;
        Ok(())
    })?;
    Ok(Some(drawn))
}

/// The points with the most bytes of each of at most [`POINTS`] parts.
fn thinned(points: &[MemoryPoint]) -> Vec<&MemoryPoint> {
    let part = points.len().div_ceil(POINTS).max(1);
    points.chunks(part).filter_map(|part| part.iter().max_by_key(|point| point.total_bytes())).collect()
}

/// The line of `heights` over the points, constant until the next point.
fn edge(points: &[&MemoryPoint], heights: &[f64], end: f64) -> Vec<(f64, f64)> {
    let at = |i: usize| points.get(i).map_or(end, |point| point.at.as_secs_f64() * 1e3);
    heights.iter().enumerate().flat_map(|(i, height)| [(at(i), *height), (at(i + 1), *height)]).collect()
}
