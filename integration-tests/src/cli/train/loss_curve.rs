//! The loss curve as SVG.

use plotters::prelude::*;

use crate::cli::CliError;
use crate::trainer::StepMetrics;

/// Plots the loss of each step, and the loss of a unigram model.
pub(super) fn svg(steps: &[StepMetrics], unigram: f64) -> Result<String, CliError> {
    let mut out = String::new();
    draw(&mut out, steps, unigram).map_err(|e| CliError::Failure(format!("failed to draw the loss curve: {e}")))?;
    Ok(out)
}

fn draw(out: &mut String, steps: &[StepMetrics], unigram: f64) -> Result<(), Box<dyn std::error::Error>> {
    let points: Vec<(f64, f64)> =
        steps.iter().filter(|s| s.loss.is_finite()).map(|s| (s.step as f64, s.loss)).collect();
    let losses = || points.iter().map(|p| p.1).chain([unigram]);
    let (least, most) = (losses().fold(f64::INFINITY, f64::min), losses().fold(0.0, f64::max));
    let first = points.first().map_or(0.0, |p| p.0);
    let last = points.last().map_or(1.0, |p| p.0).max(first + 1.0);

    let root = SVGBackend::with_string(out, (800, 450)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption("Loss", ("sans-serif", 22))
        .margin(14)
        .x_label_area_size(42)
        .y_label_area_size(58)
        .build_cartesian_2d(first..last, least * 0.95..most * 1.02)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc("step")
        .y_desc("nats a token")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y:.2}"))
        .draw()?;
    chart
        .draw_series(LineSeries::new([(first, unigram), (last, unigram)], RED.stroke_width(1)))?
        .label("token frequencies alone")
        .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], RED));
    chart
        .draw_series(LineSeries::new(points, BLUE.stroke_width(1)))?
        .label("training loss")
        .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], BLUE));
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .label_font(("sans-serif", 14))
        .border_style(BLACK.mix(0.3))
        .background_style(WHITE)
        .draw()?;
    root.present()?;
    Ok(())
}
