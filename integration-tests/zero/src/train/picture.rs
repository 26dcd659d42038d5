//! The common parts of the report's pictures.

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::error::CliError;

/// A drawing area of an SVG.
pub(crate) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
/// A failure of the drawing library.
pub(crate) type DrawError = Box<dyn std::error::Error>;

/// Width and height in pixels.
const SIZE: (u32, u32) = (800, 480);
const MARGIN: i32 = 16;
const TITLE_PX: i32 = 40;
const ROW_PX: i32 = 20;
/// Entries of a legend in one row.
const PER_ROW: usize = 3;

/// An entry of a legend.
pub(crate) type Entry = (RGBColor, String);

/// Draws a picture: its title, a note beside it, a legend, and `chart` below them.
pub(crate) fn draw(
    title: &str,
    note: &str,
    legend: &[Entry],
    chart: impl FnOnce(&Area<'_>) -> Result<(), DrawError>,
) -> Result<String, CliError> {
    let mut out = String::new();
    let drawn = || -> Result<(), DrawError> {
        let root = SVGBackend::with_string(&mut out, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let rows = legend.len().div_ceil(PER_ROW) as i32;
        let (head, body) = root.split_vertically(TITLE_PX + ROW_PX * rows);
        head.draw(&Text::new(
            title.to_owned(),
            (MARGIN, 14),
            ("sans-serif", 20),
        ))?;
        let note_x = MARGIN + 30 + 11 * title.chars().count() as i32;
        head.draw(&Text::new(
            note.to_owned(),
            (note_x, 18),
            ("sans-serif", 14),
        ))?;
        for (i, (color, name)) in legend.iter().enumerate() {
            let column = (SIZE.0 as i32 - 2 * MARGIN) / PER_ROW as i32;
            let (x, y) = (
                MARGIN + (i % PER_ROW) as i32 * column,
                TITLE_PX + (i / PER_ROW) as i32 * ROW_PX,
            );
            head.draw(&Rectangle::new(
                [(x, y + 4), (x + 18, y + 10)],
                color.filled(),
            ))?;
            head.draw(&Text::new(name.clone(), (x + 26, y), ("sans-serif", 14)))?;
        }
        chart(&body)?;
        root.present()?;
        Ok(())
    };

    drawn().map_err(|e| failure!("failed to draw {title}: {e}"))?;
    Ok(out)
}

/// A number with as many digits as ticks over `span` need.
pub(crate) fn tick(value: f64, span: f64) -> String {
    let digits = (1.0 - span.max(f64::MIN_POSITIVE).log10().floor()).clamp(0.0, 9.0) as usize;
    match value {
        0.0 => "0".to_owned(),
        v if v.abs() >= 1e6 || v.abs() < 1e-4 => format!("{v:.1e}"),
        v => format!("{v:.digits$}"),
    }
}
