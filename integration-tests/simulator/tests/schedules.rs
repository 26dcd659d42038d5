//! Published step times by the trainer's own schedule.

mod queues;

use std::time::Instant;

use zero_simulator::{
    Costs, Efficiencies, Errors, Machine, Row, Run, StepSchedules, Table, calibration_rows,
    errors_table, fit,
};

fn group(source: &str) -> Vec<Row> {
    let table = Table::parse(include_str!("data/steps.csv"), "steps.csv").unwrap();
    let rows = table.rows.into_iter();
    rows.filter(|row| row.source == source).collect()
}

struct Simulated {
    row: Row,
    machine: Machine,
    schedules: StepSchedules,
}

impl Simulated {
    fn new(row: Row) -> Self {
        Self {
            machine: row.machine().unwrap(),
            schedules: Run::of_row(&row).unwrap().schedules().unwrap(),
            row,
        }
    }

    fn speed(&self, efficiencies: &Efficiencies) -> f64 {
        let step = self.schedules.step(&Costs {
            machine: &self.machine,
            shape: &self.row.shape,
            software: &self.row.software(),
            efficiencies,
        });
        self.row.tokens_per_s(step.seconds)
    }
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
        let began = Instant::now();
        let rows = group(source);
        let all: Vec<_> = rows.iter().cloned().map(Simulated::new).collect();
        let recorded = began.elapsed();
        let ratios: Vec<_> = all
            .iter()
            .map(|s| {
                s.speed(&Efficiencies::PRIOR)
                    / s.row
                        .tokens_per_s(queues::step(&s.row, &Efficiencies::PRIOR))
            })
            .collect();
        let used = calibration_rows(&rows, all[0].machine.memory_bytes);
        let measured: Vec<_> = used.iter().map(|&i| rows[i].measured.unwrap()).collect();
        let fitted = fit(&measured, |e, i| all[used[i]].speed(e)).unwrap();
        let predicted: Vec<_> = all.iter().map(|s| s.speed(&fitted.efficiencies)).collect();
        let errors = Errors::of(&rows, &predicted, &used).unwrap();
        println!(
            "{source}: {:?}, recorded in {recorded:?}, all {:?}; to the recurrence {:?} {:?}",
            fitted.efficiencies,
            began.elapsed(),
            ratios.iter().copied().fold(f64::INFINITY, f64::min),
            ratios.iter().copied().fold(0.0, f64::max),
        );
        table.push((source.to_string(), errors));
    }
    println!("{}", errors_table(&table));
}
