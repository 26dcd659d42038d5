//! Published step times by the trainer's own schedule.

mod queues;

use std::time::Instant;

use zero_simulator::{
    Costs, Efficiencies, Errors, Row, Run, SimulatedRow, Table, calibration_rows, errors_table, fit,
};

fn group(source: &str) -> Vec<Row> {
    let table = Table::parse(include_str!("data/steps.csv"), "steps.csv").unwrap();
    let rows = table.rows.into_iter();
    rows.filter(|row| row.source == source).collect()
}

/// Errors that the goals allow, in percent, and the part of pairs that is ordered right at least.
const MEAN: f64 = 6.0;
const P90: f64 = 12.0;
const PAIRS: f64 = 90.0;

fn all(rows: &[Row]) -> Vec<SimulatedRow> {
    let rows = rows.iter().map(|row| SimulatedRow::new(row).unwrap());
    rows.collect()
}

fn speeds(rows: &[SimulatedRow], efficiencies: &Efficiencies) -> Vec<f64> {
    rows.iter().map(|row| row.speed(efficiencies)).collect()
}

/// The efficiencies by the rule, and the rows that it uses.
fn calibrate(rows: &[Row], all: &[SimulatedRow]) -> (Efficiencies, Vec<usize>) {
    let used = calibration_rows(rows, all[0].machine.memory_bytes);
    let measured: Vec<_> = used
        .iter()
        .map(|&row| rows[row].measured.unwrap())
        .collect();
    let fitted = fit(&Efficiencies::PRIOR, &measured, |efficiencies, row| {
        all[used[row]].speed(efficiencies)
    });
    (fitted.unwrap().efficiencies, used)
}

#[test]
fn eight_rows_predict_the_others() {
    let mut table = Vec::new();
    for source in [
        "llm-foundry/a100_40gb",
        "llm-foundry/a100_80gb",
        "llm-foundry/h100",
        "vtrain-single",
    ] {
        let rows = group(source);
        let all = all(&rows);
        let (efficiencies, used) = calibrate(&rows, &all);
        println!("{source}: {efficiencies:?}");
        let errors = Errors::of(&rows, &speeds(&all, &efficiencies), &used).unwrap();
        assert!(errors.mean_percent <= MEAN, "{source}: {errors:?}");
        assert!(errors.p90_percent <= P90, "{source}: {errors:?}");
        assert!(errors.pairs.percent() >= PAIRS, "{source}: {errors:?}");
        table.push((source.to_string(), errors));
    }
    println!("{}", errors_table(&table));
}

/// A calibration on 64 GPUs and fewer predicts 128 within 3% on average.
#[test]
fn small_runs_predict_larger_ones() {
    let (small, large): (Vec<Row>, Vec<Row>) = group("llm-foundry/a100_40gb")
        .into_iter()
        .partition(|row| row.gpus <= 64);
    let h100 = (group("llm-foundry/h100"), group("llm-foundry/h100-large"));
    for (small, large) in [(small, large), h100] {
        let (efficiencies, _) = calibrate(&small, &all(&small));
        let errors = Errors::of(&large, &speeds(&all(&large), &efficiencies), &[]).unwrap();
        println!("{errors:?}");
        assert!(errors.mean_percent <= 3.0, "{errors:?}");
    }
}

/// Our trainer on one H200: two rows, one of each model, predict the others within 5%, and the
/// efficiencies that `zero plan` uses by default are as near.
#[test]
fn our_own_steps_are_predicted() {
    let table = Table::parse(include_str!("data/ours.csv"), "ours.csv").unwrap();
    let all = all(&table.rows);
    let used = [3, 4];
    let measured = used.map(|row| table.rows[row].measured.unwrap());
    let fitted = fit(&Efficiencies::PRIOR, &measured, |efficiencies, row| {
        all[used[row]].speed(efficiencies)
    });
    for efficiencies in [fitted.unwrap().efficiencies, Efficiencies::OURS] {
        println!("{efficiencies:?}");
        for simulated in &all {
            let ratio = simulated.speed(&efficiencies) / simulated.row.measured.unwrap();
            assert!((ratio - 1.0).abs() < 0.05, "{:?}: {ratio}", simulated.row);
        }
    }
}

/// The trainer's schedule of a row is within a tenth of the two queues of the prototype, which have
/// no buckets, statistics and exchanges.
#[test]
fn schedules_are_near_the_two_queues() {
    for source in ["llm-foundry/h100", "vtrain-single"] {
        for row in all(&group(source)) {
            let queues = row
                .row
                .tokens_per_s(queues::step(&row.row, &Efficiencies::PRIOR));
            let ratio = row.speed(&Efficiencies::PRIOR) / queues;
            assert!((0.9..=1.01).contains(&ratio), "{:?}: {ratio}", row.row);
        }
    }
}

/// The operations of a rank, and so the time of a simulation, do not grow with the ranks.
#[test]
fn operations_do_not_grow_with_the_ranks() {
    let row = group("llm-foundry/h100-large").remove(0);
    let counts = [64, 16_384].map(|gpus| {
        let row = Row {
            gpus,
            nodes: gpus / 8,
            global_batch: gpus * row.micro_batch,
            ..row.clone()
        };
        let began = Instant::now();
        let software = row.software();
        let machine = row.machine().unwrap();
        let costs = Costs {
            machine: &machine,
            shape: &row.shape,
            software: &software,
            efficiencies: &Efficiencies::PRIOR,
        };
        let schedules = Run::of_row(&row).unwrap().schedules().unwrap();
        let spans = schedules.spans(&costs).len();
        println!("{gpus} ranks: {:?}", began.elapsed());
        spans
    });
    assert_eq!(counts[0], counts[1]);
}

/// A step has the same time from schedules that were recorded for another batch.
#[test]
fn batches_share_schedules() {
    let row = group("llm-foundry/h100").remove(0);
    let software = row.software();
    let machine = row.machine().unwrap();
    let costs = Costs {
        machine: &machine,
        shape: &row.shape,
        software: &software,
        efficiencies: &Efficiencies::PRIOR,
    };
    let recorded = |micro_batch: u64, micro_batches: u64| {
        let row = Row {
            micro_batch,
            global_batch: row.gpus * micro_batch * micro_batches,
            ..row.clone()
        };
        Run::of_row(&row).unwrap().schedules().unwrap()
    };
    let mut shared = recorded(1, 1);
    for (micro_batch, micro_batches) in [(4, 1), (2, 7), (2, 3), (1, 4), (3, 2)] {
        shared.set_batch(micro_batch, micro_batches).unwrap();
        let alone = recorded(micro_batch, micro_batches as u64);
        assert_eq!(shared.step(&costs).seconds, alone.step(&costs).seconds);
    }
}

/// Sizes that would take all memory, and a GPU that nobody knows, name their line.
#[test]
fn impossible_rows_are_refused() {
    let row = group("llm-foundry/h100").remove(0);
    let of = |change: fn(&mut Row)| {
        let mut row = row.clone();
        change(&mut row);
        SimulatedRow::new(&row).unwrap_err().to_string()
    };
    for (error, said) in [
        (
            of(|row| row.shape.layers = u64::MAX),
            "more than 65,536 layers",
        ),
        (of(|row| row.gpus = u64::MAX), "1,048,576 GPUs"),
        (
            of(|row| row.shape.params = 1),
            "fewer parameters than the embedding",
        ),
        (of(|row| row.gpu = "abacus".to_owned()), "abacus"),
    ] {
        assert!(error.contains(said) && error.contains("line "), "{error}");
    }
}
