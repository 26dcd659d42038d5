//! The memory of rank 0 over its last step, as SVG: by purpose, stacked.

use std::time::Duration;

use indicatif::HumanBytes;
use plotters::prelude::*;
use zero_alloc::Purpose;

use super::picture::{self, Entry, tick};
use crate::error::CliError;
use zero_trainer::{MemoryPoint, MemoryTrace};

/// From the bottom up, with the names of the table.
const LAYERS: [(Purpose, &str, RGBColor); Purpose::COUNT] = [
    (Purpose::Optimizer, "optimizer state", RGBColor(90, 90, 160)),
    (Purpose::Params, "parameters", RGBColor(70, 130, 200)),
    (Purpose::Grads, "gradients", RGBColor(110, 190, 200)),
    (Purpose::Activations, "activations", RGBColor(245, 190, 90)),
    (Purpose::Workspace, "workspace", RGBColor(190, 190, 190)),
    (
        Purpose::Buckets,
        "buckets, gathered units",
        RGBColor(215, 110, 100),
    ),
];
/// The copy of the state for a checkpoint, above all layers.
const COPY: RGBColor = RGBColor(150, 110, 90);
/// The stripe above the areas, by the first word of the operation.
const PHASES: [(&str, RGBColor); 3] = [
    ("forward", RGBColor(120, 180, 120)),
    ("backward", RGBColor(60, 120, 60)),
    ("optimizer", RGBColor(150, 100, 180)),
];
/// Points that are drawn; more would only make the file larger.
const POINTS: usize = 2000;

/// Memory that a trace does not have.
#[derive(Clone, Debug, Default)]
pub(crate) struct Besides {
    /// The copy of the state for a checkpoint, in the memory of the trace: drawn during the whole
    /// step.
    pub(crate) copy_bytes: u64,
    /// The parts that are not drawn, as text, such as `3 GiB in host memory`; empty if all is.
    pub(crate) undrawn: String,
}

/// Draws the trace; `None` if it is empty.
pub(crate) fn svg(trace: &MemoryTrace, besides: Besides) -> Result<Option<String>, CliError> {
    let Some(peak) = trace.peak() else {
        return Ok(None);
    };
    let bytes = |n: u64| HumanBytes(n).to_string();
    let peak_bytes = peak.total_bytes() + besides.copy_bytes;
    let moment = trace.peak_moment().unwrap_or_default();
    let mut note = format!("rank 0, last step; peak {} {moment}", bytes(peak_bytes));
    if !besides.undrawn.is_empty() {
        note = format!("{note}; not drawn: {}", besides.undrawn);
    }
    let legend = legend(trace, &peak.bytes, besides.copy_bytes);

    let (unit, divisor) = [("GiB", 30), ("MiB", 20), ("KiB", 10), ("bytes", 0)]
        .map(|(unit, power)| (unit, (1u64 << power) as f64))
        .into_iter()
        .find(|(_, divisor)| peak_bytes as f64 >= *divisor)
        .unwrap_or(("bytes", 1.0));
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let end = ms(trace.step).max(1e-3);
    let top = (peak_bytes as f64 / divisor).max(1e-3);
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
            let above: Vec<f64> = points
                .iter()
                .zip(&below)
                .map(|(point, below)| below + held(point))
                .collect();
            if above != below {
                let mut outline = edge(&points, &above, end);
                outline.extend(edge(&points, &below, end).into_iter().rev());
                chart.draw_series([Polygon::new(outline, color.filled())])?;
            }
            below = above;
        }
        if besides.copy_bytes > 0 {
            let copy = besides.copy_bytes as f64 / divisor;
            let above: Vec<f64> = below.iter().map(|below| below + copy).collect();
            let mut outline = edge(&points, &above, end);
            outline.extend(edge(&points, &below, end).into_iter().rev());
            chart.draw_series([Polygon::new(outline, COPY.filled())])?;
        }
        for (i, point) in points.iter().enumerate() {
            let until = points.get(i + 1).map_or(end, |next| ms(next.at));
            if let Some((_, color)) = PHASES.iter().find(|(name, _)| *name == phase_of(point)) {
                let stripe = [(ms(point.at), top * 1.06), (until, top * 1.09)];
                chart.draw_series([Rectangle::new(stripe, color.filled())])?;
            }
        }
        let at = ms(peak.at);
        chart.draw_series([PathElement::new(
            [(at, 0.0), (at, top * 1.05)],
            BLACK.stroke_width(1),
        )])?;
        Ok(())
    })?;

    Ok(Some(drawn))
}

/// From the top down, what is drawn, with its bytes at the peak.
fn legend(trace: &MemoryTrace, at_peak: &[u64; Purpose::COUNT], copy_bytes: u64) -> Vec<Entry> {
    let text = |name: &str, n: u64| format!("{name} {}", HumanBytes(n));
    let mut legend = Vec::new();
    if copy_bytes > 0 {
        legend.push((COPY, text("copy for a checkpoint", copy_bytes)));
    }
    for (purpose, name, color) in LAYERS.into_iter().rev() {
        let index = purpose as usize;
        if trace.points.iter().any(|point| point.bytes[index] > 0) {
            legend.push((color, text(name, at_peak[index])));
        }
    }
    let runs = |phase: &str| trace.points.iter().any(|point| phase_of(point) == phase);
    legend.extend(
        PHASES
            .into_iter()
            .filter(|(name, _)| runs(name))
            .map(|(name, color)| (color, name.to_owned())),
    );
    legend
}

/// The phase of the operation that runs at a point, by its first word.
fn phase_of(point: &MemoryPoint) -> &str {
    match point.operation.split(' ').next().unwrap_or_default() {
        "decision" => "optimizer",
        phase => phase,
    }
}

/// The points with the most bytes of each of at most [`POINTS`] parts.
fn thinned(points: &[MemoryPoint]) -> Vec<&MemoryPoint> {
    let part = points.len().div_ceil(POINTS).max(1);
    points
        .chunks(part)
        .filter_map(|part| part.iter().max_by_key(|point| point.total_bytes()))
        .collect()
}

/// The line of `heights` over the points, constant until the next point.
fn edge(points: &[&MemoryPoint], heights: &[f64], end: f64) -> Vec<(f64, f64)> {
    let at = |i: usize| {
        points
            .get(i)
            .map_or(end, |point| point.at.as_secs_f64() * 1e3)
    };
    heights
        .iter()
        .enumerate()
        .flat_map(|(i, height)| [(at(i), *height), (at(i + 1), *height)])
        .collect()
}

#[cfg(test)]
mod tests {
    use integration_tests::Printed;

    use super::*;

    #[test]
    fn picture_has_the_copy_and_no_empty_entries() {
        let mut bytes = [0; Purpose::COUNT];
        bytes[Purpose::Params as usize] = 3 << 20;
        let point = |ms: u64, activations: u64| {
            let mut bytes = bytes;
            bytes[Purpose::Activations as usize] = activations;
            MemoryPoint {
                at: Duration::from_millis(ms),
                operation: "forward block".to_owned(),
                bytes,
            }
        };

        let points = vec![point(0, 0), point(2, 1 << 20), point(6, 0)];
        let trace = MemoryTrace {
            step: Duration::from_millis(9),
            points,
        };

        let copy = Besides {
            copy_bytes: 2 << 20,
            undrawn: String::new(),
        };

        let svg = svg(&trace, copy).unwrap().unwrap();
        svg.shows(&[
            "peak 6.00 MiB",
            "copy for a checkpoint 2.00 MiB",
            "parameters 3.00 MiB",
            "activations 1.00 MiB",
            "forward",
        ]);

        for part in [
            "gradients",
            "optimizer",
            "buckets",
            "workspace",
            "backward",
            "host memory",
        ] {
            assert!(!svg.contains(part), "{part:?} is in: {svg}");
        }

        let host = Besides {
            copy_bytes: 0,
            undrawn: "5 GiB in host memory".to_owned(),
        };

        let svg = super::svg(&trace, host).unwrap().unwrap();
        svg.shows(&["peak 4.00 MiB", "; not drawn: 5 GiB in host memory"]);
    }
}
