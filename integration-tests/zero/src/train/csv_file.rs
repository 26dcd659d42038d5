//! The file of `--csv`: a header, and one row a step. A figure that a step does not have is an
//! empty cell. The last column is the run, so that a row that a crash cut short is recognized.

use std::path::Path;
use std::{fs, io};

use super::figures::{FIGURES, Number, StepFigures};
use super::line_file::{Line, Lines};
use crate::error::CliError;

/// Digits of the id of a run.
const RUN_DIGITS: usize = 16;

/// Comma-separated rows.
pub(crate) struct CsvLines;

/// Creates the folder of a table, which a DeepSpeed configuration may name.
///
/// # Errors
/// Exit code 2.
pub(crate) fn create_folder(path: &Path) -> Result<(), CliError> {
    let folder = path.parent().unwrap_or(Path::new(""));
    fs::create_dir_all(folder).map_err(|e| {
        let (path, folder) = (path.display(), folder.display());
        usage!("--csv {path}: failed to create the folder {folder}: {e}")
    })
}

impl Lines for CsvLines {
    const FLAG: &'static str = "--csv";
    const KIND: &'static str = "table";

    fn header() -> String {
        let columns = FIGURES.iter().map(|figure| figure.column);
        columns.chain(["run"]).collect::<Vec<_>>().join(",") + "\n"
    }

    fn parse(line: &str) -> Result<Line, String> {
        let cells: Vec<&str> = line.split(',').collect();
        let expected = FIGURES.len() + 1;
        if cells.len() != expected {
            return Err(format!("expected {expected} cells, found {}", cells.len()));
        }
        let (step, run) = (cells[0], cells[expected - 1]);
        let Ok(step) = step.parse() else {
            return Err(format!("the step is {step:?}; expected a number"));
        };
        let is_run = run.len() == RUN_DIGITS && run.bytes().all(|b| b.is_ascii_hexdigit());
        if !is_run {
            return Err(format!("the run is {run:?}; expected {RUN_DIGITS} digits"));
        }
        Ok(Line {
            step,
            run: Some(run.to_owned()),
        })
    }

    fn is_start(text: &str) -> bool {
        let mut cells = text.split(',');
        let has_step = cells.next().is_some_and(|step| step.parse::<u64>().is_ok());
        has_step && cells.count() <= FIGURES.len()
    }

    fn of_step(figures: &StepFigures<'_>) -> io::Result<String> {
        let cells = FIGURES.iter().map(|figure| {
            let value = (figure.value)(figures);
            value.map(Number::text).unwrap_or_default()
        });
        let run = figures.run.to_owned();
        Ok(cells.chain([run]).collect::<Vec<_>>().join(","))
    }
}

#[cfg(test)]
mod tests {
    use integration_tests::{Folder, Printed};

    use proptest::prelude::*;
    use zero_trainer::{StepMetrics, Validation};

    use super::*;
    use crate::train::line_file::{check_lines, check_recorded, parse, start};

    const RUN: &str = "0123456789abcdef";

    fn row(metrics: &StepMetrics) -> String {
        let figures = StepFigures {
            metrics,
            mfu: Some(0.1 + 0.2),
            run: RUN,
            settings: None,
        };
        CsvLines::of_step(&figures).unwrap() + "\n"
    }

    fn rows(steps: std::ops::RangeInclusive<u64>) -> String {
        let of_step = |step| {
            row(&StepMetrics {
                step,
                ..StepMetrics::default()
            })
        };
        CsvLines::header() + &steps.map(of_step).collect::<String>()
    }

    #[test]
    fn later_and_torn_rows_are_removed() {
        let dir = &Folder::on_disk();
        let path = dir.join("t.csv");
        let next = rows(5..=5)[CsvLines::header().len()..].to_owned();
        for torn in ["", "5", "5,0.1", &next[..next.len() - 2], &next, "\0\0"] {
            fs::write(&path, rows(1..=4) + torn).unwrap();
            check_lines::<CsvLines>(&path, Some(&[RUN])).unwrap();
            drop(start::<CsvLines>(&path, 4).unwrap());
            assert_eq!(fs::read_to_string(&path).unwrap(), rows(1..=3), "{torn:?}");
        }
        let header = CsvLines::header();
        for torn in ["", &header[..7], &header] {
            fs::write(&path, torn).unwrap();
            drop(start::<CsvLines>(&path, 1).unwrap());
            assert_eq!(fs::read_to_string(&path).unwrap(), header, "{torn:?}");
        }
    }

    #[test]
    fn other_tables_are_refused() {
        let dir = &Folder::on_disk();
        let path = dir.join("t.csv");
        let four = rows(1..=4);
        let others = [
            "step,loss\n1,2.0\n".to_owned(),
            "notes\n".to_owned(),
            four.clone() + "notes\n",
            four.clone() + "notes",
            four.replacen('\n', "\n1,2\n", 1),
        ];
        for text in others {
            fs::write(&path, &text).unwrap();
            let error = check_lines::<CsvLines>(&path, Some(&[RUN])).unwrap_err();
            assert!(error.to_string().contains("not a table of `zero train`"));
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }

        fs::write(&path, &four).unwrap();
        let error = check_lines::<CsvLines>(&path, None)
            .unwrap_err()
            .to_string();
        error.shows(&["--csv", RUN]);
        check_lines::<CsvLines>(&path, Some(&["aa"])).unwrap_err();
        check_recorded::<CsvLines>(&path, &[RUN]).unwrap();
    }

    proptest! {
        /// Numbers read back to the bit, and the row is one of this run.
        #[test]
        fn numbers_read_back(bits: [u64; 3], step: u64, peak: u64) {
            let [loss, lr, other] = bits.map(f64::from_bits);
            let mut metrics = StepMetrics { step, loss, lr, ..StepMetrics::default() };
            metrics.grad_norm = (bits[0] % 2 == 0).then_some(other);
            metrics.validation =
                (bits[1] % 2 == 0).then_some(Validation { loss: other, perplexity: 1.0, tokens: 1 });
            metrics.memory.peak_bytes = peak;
            let text = CsvLines::header() + &row(&metrics);
            prop_assert_eq!(parse::<CsvLines>(text.as_bytes()).unwrap()[0].0.step, step);

            let cells: Vec<&str> = text[CsvLines::header().len()..].trim_end().split(',').collect();
            let at = |column| FIGURES.iter().position(|figure| figure.column == column).unwrap();
            let same = |column, value: f64| {
                let read: f64 = cells[at(column)].parse().unwrap();
                read.to_bits() == value.to_bits() || read.is_nan() && value.is_nan()
            };
            prop_assert!(same("loss", loss) && same("lr", lr));
            prop_assert!(metrics.grad_norm.map_or(cells[at("grad_norm")].is_empty(), |x| same("grad_norm", x)));
            prop_assert_eq!(cells[at("memory.peak_bytes")].parse::<u64>().unwrap(), peak);
        }
    }
}
