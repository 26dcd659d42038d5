//! `--calibrate A.csv --predict B.csv`: predictions of one table after a calibration on another.

use std::path::Path;

use zero_ckpt::files::{self, SMALL_FILE_BYTES};
use zero_simulator::{
    Efficiencies, Errors, Fit, Row, RowsError, SimulatedRow, Table, calibration_rows, errors_table,
    fit_weighted, row_weights,
};

use super::result::Calibration;
use crate::error::CliError;
use crate::output::print_text;
use crate::plan::args::{CalibrationRows, SimulateArgs};

fn all(rows: &[Row]) -> Result<Vec<SimulatedRow>, CliError> {
    let rows = rows
        .iter()
        .map(|row| SimulatedRow::new(row).map_err(CliError::usage));
    rows.collect()
}

/// The indices of the rows to fit: measured ones, all or by the rule.
fn used(rows: &[Row], by: CalibrationRows) -> Result<Vec<usize>, CliError> {
    let measured: Vec<usize> = (0..rows.len())
        .filter(|&row| rows[row].measured.is_some())
        .collect();
    if by == CalibrationRows::All || measured.is_empty() {
        return Ok(measured);
    }
    let of_rule: Vec<Row> = measured.iter().map(|&row| rows[row].clone()).collect();
    let memory_bytes = of_rule[0].machine().map_err(CliError::usage)?.memory_bytes;
    let chosen = calibration_rows(&of_rule, memory_bytes);
    Ok(chosen.into_iter().map(|index| measured[index]).collect())
}

/// One machine and software, or an error that says how the rows differ.
fn check_one_group(path: &Path, rows: &[Row]) -> Result<(), CliError> {
    let Some(first) = rows.first() else {
        return Err(usage!("--calibrate {}: no rows", path.display()));
    };
    let other = rows
        .iter()
        .find(|row| row.source != first.source || row.gpu != first.gpu);
    match other {
        None => Ok(()),
        Some(other) => Err(usage!(
            "--calibrate {}: line {} is of {} on {}, line {} of {} on {}: calibrate on rows of one machine and software",
            path.display(),
            first.line,
            first.source,
            first.gpu,
            other.line,
            other.source,
            other.gpu
        )),
    }
}

fn fit_to(rows: &[SimulatedRow], used: &[usize], by: CalibrationRows) -> Result<Fit, CliError> {
    let measured: Vec<f64> = used
        .iter()
        .filter_map(|&row| rows[row].row.measured)
        .collect();
    let weights = match by {
        CalibrationRows::All => {
            let rows: Vec<Row> = used.iter().map(|&row| rows[row].row.clone()).collect();
            row_weights(&rows)
        }
        CalibrationRows::Rule => vec![1.0; used.len()],
    };
    let predict = |efficiencies: &Efficiencies, index: usize| rows[used[index]].speed(efficiencies);
    fit_weighted(&Efficiencies::PRIOR, &measured, &weights, predict).map_err(CliError::usage)
}

/// Whether two rows are of the same configuration and measurement.
fn same(a: &Row, b: &Row) -> bool {
    let without_line = |row: &Row| Row {
        line: 0,
        ..row.clone()
    };
    without_line(a) == without_line(b)
}

fn table(path: &Path) -> Result<Table, CliError> {
    let file = path.display().to_string();
    let text = files::read_text(path, SMALL_FILE_BYTES);
    let text = text.map_err(|source| RowsError::Read {
        file: file.clone(),
        source,
    });
    text.and_then(|text| Table::parse(&text, &file))
        .map_err(CliError::usage)
}

/// Prints the predicted table, and the errors of its measured rows.
pub(super) fn run(args: &SimulateArgs) -> Result<(), CliError> {
    let ([calibrate], [predict]) = (&args.calibrate[..], &args.predict[..]) else {
        return Err(usage!(
            "--calibrate and --predict with tables: one file each"
        ));
    };
    let known = table(calibrate)?;
    let table = table(predict)?;
    check_one_group(calibrate, &known.rows)?;
    let simulated = all(&known.rows)?;
    let used = used(&known.rows, args.rows)?;
    let fitted = fit_to(&simulated, &used, args.rows)?;
    if let Some(path) = &args.save_efficiencies {
        let first = &known.rows[0];
        let calibration = Calibration {
            source: format!("{} rows of {} on {}", used.len(), first.source, first.gpu),
            efficiencies: fitted.efficiencies,
            residuals: fitted.residuals.clone(),
        };
        calibration.write(path)?;
    }

    let predicted: Vec<f64> = all(&table.rows)?
        .iter()
        .map(|row| row.speed(&fitted.efficiencies))
        .collect();
    let is_used = |row: &Row| {
        used.iter()
            .any(|&known_row| same(&known.rows[known_row], row))
    };
    let used_here: Vec<usize> = (0..table.rows.len())
        .filter(|&row| is_used(&table.rows[row]))
        .collect();

    let mut text = table.to_csv(&predicted);
    text += &format!(
        "\ncalibrated on {} rows: {}\n",
        used.len(),
        fitted.efficiencies
    );
    text += &match Errors::of(&table.rows, &predicted, &used_here) {
        Some(errors) => errors_table(&[(predict.display().to_string(), errors)]),
        None => "no measured row is left to judge the predictions by\n".to_owned(),
    };
    print_text(text)
}
