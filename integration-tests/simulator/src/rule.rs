//! The choice of rows for calibration, and the range of predictions.

use std::collections::BTreeMap;

use crate::Row;

/// Rows that a calibration uses at most.
///
/// Six parameters are fitted. Eight rows suffice for a mean error of 2 to 4 % on the other rows of
/// the published tables, and a person can measure eight.
pub const CALIBRATION_ROWS: usize = 8;

/// Picks at most [`CALIBRATION_ROWS`] rows of one source and GPU, without a look at what was
/// measured, and returns their indices. `memory_bytes`: memory of the GPU.
///
/// The rows are ordered by the size of the model, then by sequence, GPUs and batch, and taken at
/// even distances. Rows whose state nearly fills the memory are left out, unless all do: their speed
/// depends on the allocator.
pub fn calibration_rows(rows: &[Row], memory_bytes: f64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..rows.len())
        .filter(|&index| !is_memory_tight(&rows[index], memory_bytes))
        .collect();
    if order.is_empty() {
        order = (0..rows.len()).collect();
    }
    order.sort_by_key(|&index| {
        let row = &rows[index];
        // Models of one size differ by a few parameters, those of the positions.
        let size = row.shape.params / 10_000_000;
        let model = (size, row.shape.layers, row.shape.width, row.shape.seq);
        (
            model,
            row.gpus,
            row.micro_batch,
            row.global_batch,
            !row.recompute,
        )
    });
    if order.len() <= CALIBRATION_ROWS {
        return order;
    }

    // floor((i + 1/2) n / 8)
    let places = (0..CALIBRATION_ROWS).map(|i| (2 * i + 1) * order.len() / (2 * CALIBRATION_ROWS));
    places.map(|place| order[place]).collect()
}

/// The weights of all rows of one source and GPU in a fit: each number of GPUs counts alike, and
/// they are 1 on average.
///
/// Why: most published rows are of one node, whose links tell nothing of the network. Unweighted
/// they decide a fit that then predicts many nodes. Of llm-foundry's rows on up to 64 GPUs, all
/// weighted ones predict those on 128 within 1.5% (H100) and 1.3% (A100 40 GB) on average, all
/// unweighted ones within 2.2% and 1.6%, eight by the rule within 1.9% and 2.9%.
pub fn row_weights(rows: &[Row]) -> Vec<f64> {
    let mut counts: BTreeMap<u64, usize> = BTreeMap::new();
    for row in rows {
        *counts.entry(row.gpus).or_default() += 1;
    }
    let of_a_count = rows.len() as f64 / counts.len() as f64;
    let weights = rows.iter().map(|row| of_a_count / counts[&row.gpus] as f64);
    weights.collect()
}

/// Whether the state of the model takes more than half of the GPU's memory: 16 bytes per parameter
/// of the shard (16-bit parameters and gradients, 32-bit parameters and two moments), or at stage 0,
/// 18 of every parameter.
pub fn is_memory_tight(row: &Row, memory_bytes: f64) -> bool {
    let params = row.shape.params as f64;
    let state_bytes = match row.stage {
        0 => 18.0 * params,
        _ => 16.0 * params / row.gpus as f64,
    };
    state_bytes > 0.5 * memory_bytes
}

/// The range, in the unit of `predicted`, in which a measurement falls in four of five cases.
///
/// Source: the 10th and 90th percentile of measured / predicted over the published tables; `tight`
/// is [`is_memory_tight`].
pub fn likely_range(predicted: f64, tight: bool) -> [f64; 2] {
    let [low, high] = if tight { [0.78, 1.09] } else { [0.95, 1.04] };
    [low * predicted, high * predicted]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Machine, Table, groups};

    /// Indices into the group that `model.py` picked, the prototype of this crate.
    const PICKED: [(&str, &[usize]); 4] = [
        ("llm-foundry/a100_40gb", &[73, 64, 55, 46, 36, 27, 18, 6]),
        ("llm-foundry/a100_80gb", &[57, 50, 43, 36, 29, 22, 15, 8]),
        ("llm-foundry/h100", &[48, 42, 36, 30, 24, 18, 12, 4]),
        ("vtrain-single", &[65, 135, 143, 212, 231, 115, 230, 174]),
    ];

    fn published() -> Vec<Row> {
        let text = include_str!("../tests/data/steps.csv");
        Table::parse(text, "steps.csv").unwrap().rows
    }

    #[test]
    fn rows_are_the_prototypes() {
        let rows = published();
        for (source, picked) in PICKED {
            let group: Vec<Row> = rows
                .iter()
                .filter(|row| row.source == source)
                .cloned()
                .collect();
            let memory_bytes = Machine::preset(&group[0].gpu).unwrap().memory_bytes;
            assert_eq!(calibration_rows(&group, memory_bytes), picked, "{source}");
        }
    }

    #[test]
    fn measurements_do_not_matter() {
        let rows = published();
        let hidden: Vec<Row> = rows
            .iter()
            .cloned()
            .map(|row| Row {
                measured: None,
                ..row
            })
            .collect();
        assert_eq!(
            calibration_rows(&rows, 80e9),
            calibration_rows(&hidden, 80e9)
        );
    }

    #[test]
    fn numbers_of_gpus_count_alike() {
        let mut rows = published();
        rows.retain(|row| row.source == "llm-foundry/h100");
        let weights = row_weights(&rows);
        assert!((weights.iter().sum::<f64>() - rows.len() as f64).abs() < 1e-9);
        for gpus in [8, 16, 32, 64] {
            let all = weights
                .iter()
                .zip(&rows)
                .filter(|(_, row)| row.gpus == gpus);
            let sum: f64 = all.map(|(weight, _)| weight).sum();
            assert!(
                (sum - rows.len() as f64 / 4.0).abs() < 1e-9,
                "{gpus}: {sum}"
            );
        }
        assert!(row_weights(&[]).is_empty());
    }

    #[test]
    fn few_rows_are_all_used() {
        let rows = published();
        for count in 0..=CALIBRATION_ROWS {
            let mut picked = calibration_rows(&rows[..count], f64::INFINITY);
            picked.sort_unstable();
            assert!(picked.into_iter().eq(0..count));
        }
        assert_eq!(calibration_rows(&rows, 0.0).len(), CALIBRATION_ROWS);
    }

    #[test]
    fn groups_have_one_source_and_gpu() {
        let rows = published();
        let groups = groups(&rows);
        assert_eq!(groups.iter().map(Vec::len).sum::<usize>(), rows.len());
        for group in groups {
            let first = &rows[group[0]];
            let same =
                |&row: &usize| rows[row].source == first.source && rows[row].gpu == first.gpu;
            assert!(group.iter().all(same));
        }
    }
}
