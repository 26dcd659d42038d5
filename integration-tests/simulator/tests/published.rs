//! Predictions against published step times.
//!
//! The figures are those of the prototype in Python, from which the formulas, the fit and the rule
//! were ported.

mod queues;

use queues::{Op, queues, step};
use zero_simulator::{
    Efficiencies, Errors, Fit, Machine, Row, Table, calibration_rows, errors_table, fit,
};

/// Errors of a group in percent: mean, 90th percentile, worst, pairs, pairs of one model and GPUs.
const GROUPS: [(&str, [f64; 5]); 4] = [
    ("llm-foundry/a100_40gb", [3.31, 8.63, 32.0, 99.1, 100.0]),
    ("llm-foundry/a100_80gb", [3.65, 6.83, 30.4, 99.3, 98.5]),
    ("llm-foundry/h100", [2.07, 2.69, 25.1, 99.4, 100.0]),
    ("vtrain-single", [2.74, 5.60, 8.5, 98.2, 100.0]),
];

/// Lines of `steps.csv` and their steps at the priors, in seconds.
const STEPS: [(usize, f64); 7] = [
    (8, 55.062573983),
    (19, 0.759892438),
    (6, 0.597940693),
    (129, 11.095317577),
    (218, 0.523208470),
    (221, 0.122000165),
    (214, 10.6256257014),
];

fn rows_of(source: &str) -> Vec<Row> {
    let table = Table::parse(include_str!("data/steps.csv"), "steps.csv").unwrap();
    let rows = table.rows.into_iter();
    rows.filter(|row| row.source.starts_with(source)).collect()
}

fn group(source: &str) -> Vec<Row> {
    let mut rows = rows_of(source);
    rows.retain(|row| row.source == source);
    rows
}

fn speeds(rows: &[Row], efficiencies: &Efficiencies) -> Vec<f64> {
    let speed = |row: &Row| row.tokens_per_s(step(row, efficiencies));
    rows.iter().map(speed).collect()
}

fn fit_to(rows: &[Row], used: &[usize]) -> Fit {
    let measured: Vec<f64> = used
        .iter()
        .map(|&row| rows[row].measured.unwrap())
        .collect();
    let predict = |efficiencies: &Efficiencies, index: usize| {
        let row = &rows[used[index]];
        row.tokens_per_s(step(row, efficiencies))
    };
    fit(&Efficiencies::PRIOR, &measured, predict).unwrap()
}

/// Fits by the rule.
fn calibrate(rows: &[Row]) -> (Vec<usize>, Fit) {
    let memory_bytes = Machine::preset(&rows[0].gpu).unwrap().memory_bytes;
    let used = calibration_rows(rows, memory_bytes);
    let fit = fit_to(rows, &used);
    (used, fit)
}

#[test]
fn queues_overlap() {
    let forward = |gather| Op {
        compute: 1.0,
        gather,
        reduce: 0.0,
    };
    let backward = |gather| Op {
        compute: 2.0,
        gather,
        reduce: 0.5,
    };
    let ops = [
        forward(0.5),
        forward(0.5),
        forward(0.5),
        backward(0.0),
        backward(0.5),
        backward(0.0),
    ];
    assert_eq!(queues(&ops, 0.0), 10.0);
    assert_eq!(queues(&ops, 0.5), 11.25);
}

#[test]
fn steps_are_the_prototypes() {
    let rows = rows_of("");
    for (line, expected) in STEPS {
        let found = step(&rows[line - 2], &Efficiencies::PRIOR);
        assert!(
            (found / expected - 1.0).abs() < 1e-8,
            "line {line}: {found}"
        );
    }
}

#[test]
fn eight_rows_predict_the_others() {
    let mut table = Vec::new();
    for (source, expected) in GROUPS {
        let rows = group(source);
        let (used, fit) = calibrate(&rows);
        println!("{source}: {:?}", fit.efficiencies);
        let errors = Errors::of(&rows, &speeds(&rows, &fit.efficiencies), &used).unwrap();
        table.push((source.to_string(), errors.clone()));

        assert!(errors.mean_percent <= 6.0, "{source}: {errors:?}");
        assert!(errors.p90_percent <= 12.0, "{source}: {errors:?}");
        assert!(errors.pairs.percent() >= 90.0, "{source}: {errors:?}");
        let found = [
            errors.mean_percent,
            errors.p90_percent,
            errors.worst.percent.abs(),
            errors.pairs.percent(),
            errors.similar_pairs.percent(),
        ];
        for (found, expected) in found.into_iter().zip(expected) {
            assert!(
                (found - expected).abs() < 0.05,
                "{source}: {expected}, {errors:?}"
            );
        }
    }
    println!("{}", errors_table(&table));
}

/// A calibration on 64 GPUs and fewer predicts 128 within 3 % on average.
#[test]
fn small_runs_predict_larger_ones() {
    let (small, large): (Vec<Row>, Vec<Row>) = group("llm-foundry/a100_40gb")
        .into_iter()
        .partition(|row| row.gpus <= 64);
    let h100 = (group("llm-foundry/h100"), group("llm-foundry/h100-large"));
    for ((small, large), expected) in [((small, large), 2.53), (h100, 0.96)] {
        let (_, fit) = calibrate(&small);
        let errors = Errors::of(&large, &speeds(&large, &fit.efficiencies), &[]).unwrap();
        println!("{errors:?}");
        assert!((errors.mean_percent - expected).abs() < 0.05, "{errors:?}");
    }
}

#[test]
fn fit_is_deterministic() {
    let rows = group("llm-foundry/h100");
    assert_eq!(calibrate(&rows), calibrate(&rows));
}
