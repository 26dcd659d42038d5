//! `--sweep gpus=FROM..TO`: the same run on other numbers of GPUs.

use indicatif::HumanCount;
use plotters::prelude::*;

use super::result::Point;
use super::{SimulatedOn, cluster};
use crate::error::CliError;
use crate::plan::args::{Gpus, PlanArgs};
use crate::plan::report::Report;
use crate::plan::request::PlanRequest;

/// The points of the sweep; draws it if asked to.
pub(super) fn run(args: &PlanArgs, gpus: Gpus, on: &SimulatedOn) -> Result<Vec<Point>, CliError> {
    let of_node = match &args.simulate.hardware {
        Some(hardware) => cluster(hardware)?.gpus_per_node as u64,
        None => return Ok(Vec::new()),
    };
    let on = &SimulatedOn {
        explains: false,
        ..on.clone()
    };
    let mut points = Vec::new();
    let mut count = gpus.from;
    while count <= gpus.to {
        if count <= of_node || count.is_multiple_of(of_node) {
            let nodes = count.div_ceil(of_node);
            let of_count = PlanArgs {
                gpus: Some(count),
                nodes,
                ..args.clone()
            };
            let (request, _) = PlanRequest::new(&of_count)?;
            let report = Report::with_times(&request, Some(on)).map_err(CliError::usage)?;
            for stage in report.stages {
                let Some(simulated) = stage.simulated else {
                    continue;
                };
                points.push(Point {
                    gpus: count,
                    stage: stage.stage,
                    step_ms: simulated.step_ms,
                    tokens_per_s: simulated.tokens_per_s,
                    mfu: simulated.mfu,
                    fits: stage.fits,
                    extrapolated: simulated.extrapolated,
                });
            }
        }
        count *= 2;
    }
    if let Some(path) = &args.simulate.sweep_svg {
        draw(path, &points).map_err(|error| failure!("--sweep-svg {}: {error}", path.display()))?;
    }
    Ok(points)
}

/// The points as text; empty without any.
pub(crate) fn table(points: &[Point]) -> String {
    if points.is_empty() {
        return String::new();
    }
    let mut text = "\n   GPUs  stage     step ms      tokens/s    MFU\n".to_owned();
    for point in points {
        let note = match (point.fits, point.extrapolated) {
            (Some(false), _) => "  does not fit",
            (_, true) => "  extrapolated",
            _ => "",
        };
        text += &format!(
            "{:>7}  {:>5}  {:>10.1}  {:>12.0}  {:>4.1}%{note}\n",
            point.gpus,
            point.stage,
            point.step_ms,
            point.tokens_per_s,
            100.0 * point.mfu
        );
    }
    text
}

/// Tokens per second and GPU over GPUs in powers of ten; a line a stage.
fn draw(path: &std::path::Path, points: &[Point]) -> Result<(), Box<dyn std::error::Error>> {
    let (Some(first), Some(last)) = (points.first(), points.last()) else {
        return Err("nothing was simulated".into());
    };
    let of_gpu = |point: &Point| point.tokens_per_s / point.gpus as f64;
    let highest = points.iter().map(of_gpu).fold(0.0, f64::max);
    let number = |value: &f64| HumanCount(*value as u64).to_string();

    let root = SVGBackend::new(path, (900, 560)).into_drawing_area();
    root.fill(&WHITE)?;
    let x = (first.gpus as f64 / 1.1..last.gpus as f64 * 1.1).log_scale();
    let mut chart = ChartBuilder::on(&root)
        .caption("Simulated tokens/s of a GPU", ("sans-serif", 20))
        .margin(16)
        .x_label_area_size(40)
        .y_label_area_size(80)
        .build_cartesian_2d(x, 0.0..highest * 1.1)?;
    chart
        .configure_mesh()
        .x_desc("GPUs")
        .y_desc("tokens/s of a GPU")
        .x_label_formatter(&number)
        .y_label_formatter(&number)
        .draw()?;
    // Stages 1 and 2 often have the same times: the later line is thinner.
    for stage in 0..4u8 {
        let color = Palette99::pick(stage.into()).to_rgba();
        let style = color.stroke_width(u32::from(5 - stage));
        let line = points.iter().filter(|point| point.stage == stage);
        let line = line.map(|point| (point.gpus as f64, of_gpu(point)));
        chart
            .draw_series(LineSeries::new(line, style))?
            .label(format!("stage {stage}"))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerLeft)
        .border_style(BLACK)
        .background_style(WHITE)
        .draw()?;
    root.present()?;
    Ok(())
}
