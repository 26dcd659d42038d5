//! The loss curve as SVG.

use plotters::prelude::*;

use super::picture::{self, DrawError, tick};
use crate::error::CliError;
use zero_trainer::StepMetrics;

const RAW: RGBColor = RGBColor(158, 190, 230);
const SMOOTH: RGBColor = RGBColor(20, 80, 170);
const VALIDATION: RGBColor = RGBColor(225, 120, 0);
const UNIGRAM: RGBColor = RGBColor(200, 40, 40);
/// The smoothed loss is drawn from this number of steps on.
const SMOOTHED_STEPS: usize = 20;
/// The smoothed loss is a fit to this part of the run on each side.
const SMOOTHED_PART: usize = 25;
/// Points of the smoothed loss; more would only take time.
const SMOOTHED_POINTS: usize = 2000;
/// Losses above this multiple of the largest usual one are cut.
const OUTLIER: f64 = 3.0;

/// A step and its loss.
type Point = (u64, f64);

/// Plots the loss of each step, smoothed and raw, the validation losses, and the loss of a unigram
/// model.
pub(crate) fn svg(
    steps: &[StepMetrics],
    validation: &[Point],
    unigram: f64,
) -> Result<String, CliError> {
    let raw: Vec<Point> = steps.iter().map(|s| (s.step, s.loss)).collect();
    curve(&raw, validation, unigram)
}

fn curve(raw: &[Point], validation: &[Point], unigram: f64) -> Result<String, CliError> {
    let is_finite = |p: &&Point| p.1.is_finite();
    let (finite, validation) = (
        raw.iter().filter(is_finite),
        validation.iter().filter(is_finite).copied(),
    );
    let (finite, validation): (Vec<Point>, Vec<Point>) =
        (finite.copied().collect(), validation.collect());
    let (least, most) = range(&finite, &validation, unigram);
    // Without the outliers, which would lift the line for many steps.
    let usual: Vec<Point> = finite.iter().filter(|p| p.1 <= most).copied().collect();
    let smooth = if finite.len() < SMOOTHED_STEPS {
        Vec::new()
    } else {
        smoothed(&usual)
    };

    let mut notes = Vec::new();
    let mut note = |count: usize, text: &str| {
        if count > 0 {
            let steps = if count == 1 { "step" } else { "steps" };
            notes.push(format!("{count} {steps} {text}"));
        }
    };

    note(raw.len() - finite.len(), "without a finite loss");
    note(
        finite.iter().filter(|p| p.1 > most).count(),
        "above the picture",
    );
    let mut legend = vec![(
        if smooth.is_empty() { SMOOTH } else { RAW },
        "training loss".to_owned(),
    )];

    if !smooth.is_empty() {
        legend.push((
            SMOOTH,
            format!("smoothed over about {} steps", width(usual.len())),
        ));
    }

    if !validation.is_empty() {
        legend.push((VALIDATION, "validation loss".to_owned()));
    }
    if unigram.is_finite() {
        legend.push((UNIGRAM, "token frequencies alone".to_owned()));
    }
    let steps = || raw.iter().chain(&validation).map(|p| p.0);
    let first = steps().min().unwrap_or(0);
    let last = steps().max().unwrap_or(1).max(first + 1);

    picture::draw("Loss", &notes.join(", "), &legend, |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(14)
            .margin_right(26)
            .x_label_area_size(42)
            .y_label_area_size(70)
            .build_cartesian_2d(first..last, least..most)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .x_labels(8)
            .x_desc("step")
            .y_desc("nats a token")
            .y_label_formatter(&|y| tick(*y, most - least))
            .draw()?;
        if unigram.is_finite() {
            chart.draw_series(LineSeries::new(
                [(first, unigram), (last, unigram)],
                UNIGRAM.stroke_width(1),
            ))?;
        }
        let mut line = |points: &[Point], color: RGBColor, width: u32| -> Result<(), DrawError> {
            let cut = |p: &Point| (p.0, p.1.min(most));
            chart.draw_series(LineSeries::new(
                points.iter().map(cut),
                color.stroke_width(width),
            ))?;
            if let [single] = points {
                chart.draw_series([Circle::new(cut(single), 3, color.filled())])?;
            }
            Ok(())
        };
        // A step without a finite loss interrupts the line.
        for part in raw
            .split(|p| !p.1.is_finite())
            .filter(|part| !part.is_empty())
        {
            line(part, legend[0].0, 1)?;
        }
        line(&smooth, SMOOTH, 2)?;
        line(&validation, VALIDATION, 1)?;
        for point in &validation {
            line(&[*point], VALIDATION, 1)?;
        }
        Ok(())
    })
}

/// The steps on each side over which the smoothed loss is a fit.
fn width(steps: usize) -> usize {
    (steps / SMOOTHED_PART).max(5)
}

/// The value of a line that is fitted to the neighbours of each point, nearer ones with more weight
/// (Cleveland 1979, with triangular weights). A mean of earlier losses would lag a falling curve,
/// and a mean around a step ends before the ends.
fn smoothed(points: &[Point]) -> Vec<Point> {
    let width = width(points.len());
    let every = points.len().div_ceil(SMOOTHED_POINTS).max(1);
    let last = points.len().saturating_sub(1);
    let drawn = (0..points.len()).filter(|at| at % every == 0 || *at == last);
    drawn
        .map(|at| (points[at].0, fitted(points, at, width)))
        .collect()
}

/// The value at point `at` of the line through the points that are at most `width` away, by
/// weighted least squares.
fn fitted(points: &[Point], at: usize, width: usize) -> f64 {
    let near = &points[at.saturating_sub(width)..points.len().min(at + width + 1)];
    let (x, y) = points[at];
    // Relative to the point, for the sake of rounding.
    let relative = |point: &Point| (point.0 as f64 - x as f64, point.1 - y);
    let reach = near
        .iter()
        .map(|point| relative(point).0.abs())
        .fold(0.0, f64::max)
        + 1.0;
    let [mut w, mut wx, mut wy, mut wxx, mut wxy] = [0.0; 5];

    for (dx, dy) in near.iter().map(relative) {
        let weight = 1.0 - dx.abs() / reach;
        w += weight;
        wx += weight * dx;
        wy += weight * dy;
        wxx += weight * dx * dx;
        wxy += weight * dx * dy;
    }

    let spread = w * wxx - wx * wx;
    // A single point, or several of one step, have no line.
    let offset = if spread > 0.0 {
        (wxx * wy - wx * wxy) / spread
    } else {
        wy / w
    };

    y + offset
}

/// The least and the largest drawn loss: all of them, except single outliers above.
fn range(raw: &[Point], validation: &[Point], unigram: f64) -> (f64, f64) {
    let mut losses: Vec<f64> = raw.iter().map(|p| p.1).collect();
    losses.sort_by(f64::total_cmp);
    let others = || {
        validation
            .iter()
            .map(|p| p.1)
            .chain([unigram])
            .filter(|l| l.is_finite())
    };

    let usual = losses
        .get(losses.len() * 19 / 20)
        .copied()
        .into_iter()
        .chain(others())
        .fold(0.0, f64::max);
    let top = losses
        .last()
        .copied()
        .filter(|l| *l <= OUTLIER * usual)
        .unwrap_or(usual);
    let most = others().chain([top]).fold(f64::NEG_INFINITY, f64::max);
    let least = others().chain(losses.first().copied()).fold(most, f64::min);
    let span = if most > least {
        most - least
    } else {
        most.abs().max(1e-9)
    };

    (least - 0.05 * span, most + 0.05 * span)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ramp(n: u64) -> Vec<Point> {
        (1..=n)
            .map(|i| {
                (
                    i,
                    5.0 / (i as f64).sqrt() + 0.3 * ((i * 7919 % 13) as f64 / 13.0),
                )
            })
            .collect()
    }

    #[test]
    fn all_shapes_are_drawn() {
        let with = |mut points: Vec<Point>, at: usize, loss: f64| {
            points[at].1 = loss;
            points
        };

        let resumed: Vec<Point> = ramp(60).into_iter().map(|p| (p.0 + 123_456, p.1)).collect();
        let shapes = [
            ("none", vec![]),
            ("one", ramp(1)),
            ("two", ramp(2)),
            ("short", ramp(15)),
            ("long", ramp(3000)),
            ("resumed", resumed),
            ("nan", with(with(ramp(40), 20, f64::NAN), 0, f64::INFINITY)),
            ("all-nan", vec![(1, f64::NAN), (2, f64::NAN)]),
            ("outlier", with(ramp(200), 100, 1e6)),
            (
                "tiny",
                ramp(50).into_iter().map(|p| (p.0, p.1 * 1e-7)).collect(),
            ),
            (
                "huge",
                ramp(50).into_iter().map(|p| (p.0, p.1 * 1e12)).collect(),
            ),
            ("zero", vec![(1, 0.0), (2, 0.0)]),
        ];

        for (name, raw) in shapes {
            let validation: Vec<Point> = raw.iter().step_by(9).map(|p| (p.0, p.1 * 1.1)).collect();
            let svg = curve(&raw, &validation, 3.4).unwrap();
            assert!(
                svg.contains("</svg>") && !svg.contains("NaN") && !svg.contains("inf"),
                "{name}: {svg}"
            );
            assert_eq!(
                svg.contains("smoothed over about"),
                raw.len() >= SMOOTHED_STEPS,
                "{name}"
            );
            if let Ok(dir) = std::env::var("PICTURES") {
                std::fs::write(format!("{dir}/loss-{name}.svg"), svg).unwrap();
            }
        }

        assert!(curve(&ramp(5), &[], f64::NAN).is_ok());
    }

    /// The smoothed curve neither lags the losses nor leads them, at the ends either.
    #[test]
    fn smoothed_losses_do_not_lag() {
        for n in [1, 2, 20, 100, 5000] {
            let line: Vec<Point> = (1..=n).map(|i| (i, 10.0 - i as f64 * 1e-3)).collect();
            let smooth = smoothed(&line);
            for (step, loss) in &smooth {
                assert!(
                    (loss - (10.0 - *step as f64 * 1e-3)).abs() < 1e-9,
                    "{n}: {loss} at {step}"
                );
            }
            assert_eq!((smooth[0].0, smooth[smooth.len() - 1].0), (1, n));
        }
        // Noise is averaged: its effect is a fraction of its size.
        let noisy: Vec<Point> = (1..=1000)
            .map(|i| (i, if i % 2 == 0 { 3.0 } else { 2.0 }))
            .collect();
        assert!(
            smoothed(&noisy)
                .iter()
                .all(|point| (point.1 - 2.5).abs() < 0.1)
        );
    }

    #[test]
    fn single_outliers_are_cut() {
        let mut points = ramp(100);
        points[50].1 = 1e9;
        assert!(range(&points, &[], 3.4).1 < 10.0);
        assert!(
            range(&points[50..53], &[], 3.4).1 >= 1e9,
            "not if there are few steps"
        );
    }
}
