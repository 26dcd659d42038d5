//! Errors of predictions against measurements.

use std::fmt::Write;

use crate::Row;

/// Errors of the predictions of rows that the calibration did not use.
#[derive(Clone, Debug, PartialEq)]
pub struct Errors {
    /// Rows that were predicted.
    pub rows: usize,
    /// Mean of the absolute errors, in percent of the measurement.
    pub mean_percent: f64,
    /// 90th percentile of the absolute errors, interpolated between rows.
    pub p90_percent: f64,
    /// The row with the largest absolute error.
    pub worst: Worst,
    /// All pairs of rows, those of the calibration included.
    pub pairs: PairCount,
    /// Pairs of rows with the same model and number of GPUs: which batch or recomputation is faster.
    pub similar_pairs: PairCount,
}

/// The row with the largest error.
#[derive(Clone, Debug, PartialEq)]
pub struct Worst {
    /// Its index.
    pub row: usize,
    /// Model, GPUs, sequence and micro-batch.
    pub name: String,
    /// Predicted / measured - 1, in percent.
    pub percent: f64,
}

/// Pairs of rows, and those whose faster row was predicted to be the faster one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PairCount {
    /// Pairs that were ordered right.
    pub right: u64,
    /// Pairs with different measurements.
    pub all: u64,
}

impl PairCount {
    /// The part that was ordered right, in percent; 100 if there is no pair.
    pub fn percent(&self) -> f64 {
        match self.all {
            0 => 100.0,
            all => 100.0 * self.right as f64 / all as f64,
        }
    }

    fn count(&mut self, right: bool) {
        self.right += u64::from(right);
        self.all += 1;
    }
}

impl Errors {
    /// Compares `predicted`, the tokens per second and GPU of `rows`, with the measurements. The
    /// rows `used` by the calibration count in pairs only; those that were not measured do not
    /// count. The time grows with the square of the rows.
    ///
    /// Returns `None` if no measured row is left.
    pub fn of(rows: &[Row], predicted: &[f64], used: &[usize]) -> Option<Self> {
        let measured: Vec<Speed> = rows
            .iter()
            .zip(predicted)
            .enumerate()
            .filter_map(|(index, (row, &predicted))| {
                let measured = row.measured?;
                Some(Speed {
                    index,
                    row,
                    measured,
                    predicted,
                })
            })
            .collect();
        let judged = || measured.iter().filter(|speed| !used.contains(&speed.index));
        let worst = judged().max_by(|a, b| a.percent().abs().total_cmp(&b.percent().abs()))?;

        let mut percents: Vec<f64> = judged().map(|speed| speed.percent().abs()).collect();
        percents.sort_unstable_by(f64::total_cmp);
        let mean_percent = percents.iter().sum::<f64>() / percents.len() as f64;

        let mut pairs = PairCount::default();
        let mut similar_pairs = PairCount::default();
        for (count, a) in measured.iter().enumerate() {
            for b in &measured[..count] {
                if a.measured == b.measured {
                    continue;
                }
                let right = (a.predicted - b.predicted) * (a.measured - b.measured) > 0.0;
                pairs.count(right);
                if (&a.row.model, a.row.gpus) == (&b.row.model, b.row.gpus) {
                    similar_pairs.count(right);
                }
            }
        }

        Some(Self {
            rows: percents.len(),
            mean_percent,
            p90_percent: quantile(&percents, 0.9),
            worst: Worst {
                row: worst.index,
                name: worst.name(),
                percent: worst.percent(),
            },
            pairs,
            similar_pairs,
        })
    }
}

/// A measured row and its prediction, in tokens per second and GPU.
struct Speed<'a> {
    index: usize,
    row: &'a Row,
    measured: f64,
    predicted: f64,
}

impl Speed<'_> {
    fn percent(&self) -> f64 {
        100.0 * (self.predicted / self.measured - 1.0)
    }

    fn name(&self) -> String {
        let Row {
            model,
            gpus,
            shape,
            micro_batch,
            ..
        } = self.row;
        format!(
            "{model}, {gpus} GPUs, sequence {}, micro-batch {micro_batch}",
            shape.seq
        )
    }
}

/// Returns a text table with a line for each name and its errors.
pub fn errors_table(groups: &[(String, Errors)]) -> String {
    let names = groups.iter().map(|(name, _)| name.chars().count());
    let width = names.max().unwrap_or(0).max("group".len());
    let mut text = format!(
        "{:width$}  rows   mean    p90   pairs  similar   worst\n",
        "group"
    );
    for (name, errors) in groups {
        let Errors {
            rows,
            mean_percent,
            p90_percent,
            worst,
            pairs,
            similar_pairs,
        } = errors;
        // A `String` accepts every write.
        let _ = writeln!(
            text,
            "{name:width$}  {rows:4}  {mean_percent:4.1}%  {p90_percent:4.1}%  {:5.1}%  {:6.1}%  \
             {:+5.1}% {}",
            pairs.percent(),
            similar_pairs.percent(),
            worst.percent,
            worst.name,
        );
    }
    text
}

/// The quantile of ascending numbers, interpolated between neighbours; 0 of no numbers.
fn quantile(sorted: &[f64], part: f64) -> f64 {
    let place = part * sorted.len().saturating_sub(1) as f64;
    let below = place.floor();
    let at = |index: f64| sorted.get(index as usize).copied();
    match (at(below), at(place.ceil())) {
        (Some(low), Some(high)) => low + (place - below) * (high - low),
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Table;

    const CSV: &str = include_str!("../tests/data/steps.csv");

    #[test]
    fn errors_of_known_predictions() {
        let mut rows = Table::parse(CSV, "steps.csv").unwrap().rows;
        rows.truncate(5);
        for (row, measured) in rows.iter_mut().zip([100.0, 200.0, 300.0, 400.0, 400.0]) {
            row.measured = Some(measured);
        }
        rows[0].measured = None;
        let predicted = [1.0, 220.0, 150.0, 400.0, 380.0];

        let errors = Errors::of(&rows, &predicted, &[3]).unwrap();
        assert_eq!(errors.rows, 3);
        assert!((errors.mean_percent - 65.0 / 3.0).abs() < 1e-9);
        assert!((errors.p90_percent - 42.0).abs() < 1e-9);
        assert_eq!((errors.worst.row, errors.worst.percent), (2, -50.0));
        assert_eq!(
            errors.worst.name,
            "mpt-13b, 128 GPUs, sequence 2048, micro-batch 16"
        );
        assert_eq!(errors.pairs, PairCount { right: 4, all: 5 });
        assert_eq!(errors.similar_pairs, PairCount::default());
    }

    #[test]
    fn no_row_has_no_errors() {
        let rows = Table::parse(CSV, "steps.csv").unwrap().rows;
        assert_eq!(Errors::of(&rows[..2], &[1.0, 1.0], &[0, 1]), None);
        assert_eq!(Errors::of(&[], &[], &[]), None);
    }

    #[test]
    fn table_names_the_worst_row() {
        let rows = Table::parse(CSV, "steps.csv").unwrap().rows;
        let errors = Errors::of(&rows[..3], &[1000.0, 2000.0, 5080.0], &[]).unwrap();
        let table = errors_table(&[("h100".into(), errors)]);
        let expected = "\
group  rows   mean    p90   pairs  similar   worst
h100      3   4.8%   8.3%  100.0%   100.0%   -9.0% mpt-30b, 128 GPUs, sequence 2048, micro-batch 8
";
        assert_eq!(table, expected);
    }
}
