//! Votes and decisions, against the plain functions, bit for bit.

use zero_alloc::device::Device;
use zero_kernels::step::{StepRates, StepReport, StepSettings, StepState, decide_step};
use zero_kernels::{DecideArgs, GradStats, RankStats, StepScalars};

use super::Rig;
use crate::common::Random;

const BAD: GradStats = GradStats { sum_sq: 2.0, nonfinite: 3 };
const GOOD: GradStats = GradStats { sum_sq: 0.1, nonfinite: 0 };

pub fn votes<D: Device>(rig: &Rig<D>) {
    let overflown = GradStats { sum_sq: f64::INFINITY, nonfinite: 0 };
    for units in [vec![], vec![GOOD; 3], vec![GOOD, GOOD, BAD, GOOD, BAD], vec![overflown]] {
        let (on_units, loss, flags) = (rig.buffer(&units, 0), rig.buffer(&[2.5f64], 0), rig.buffer(&[0xf00du64], 0));
        let out = rig.poisoned::<RankStats>(1, 0);
        rig.kernels.make_vote(&rig.stream, on_units.slice(), loss.slice(), flags.slice(), out.slice()).unwrap();
        assert_eq!(out.read(), [RankStats { flags: 0xf00d, ..RankStats::new(&units, 2.5) }]);
    }
}

/// A run of steps, decided in device memory and by the plain function.
fn check_run<D: Device>(rig: &Rig<D>, settings: StepSettings, ranks: usize, steps: u64, rates: u64, seed: u64) {
    const REPORTS: usize = 5;
    let mut random = Random(seed);
    // The betas move too.
    let rate = |p| StepRates { lr: 1e-3 / (p + 1) as f64, beta1: 0.9 - 0.01 * (p % 7) as f64, beta2: 0.999 };
    let rates: Vec<StepRates> = (0..rates).map(rate).collect();
    let mut state = StepState {
        loss_scale: 16.0,
        iteration: 0,
        since: 0,
        adam_steps: 0,
        schedule_position: settings.first_position,
        skipped_steps: 0,
        hysteresis_left: settings.hysteresis,
        halted: StepState::RUNNING,
    };
    let on_state = rig.buffer(&[state], 0);
    let (on_settings, on_rates) = (rig.buffer(&[settings], 0), rig.buffer(&rates, 0));
    let (scalars, reports) = (rig.poisoned::<StepScalars>(1, 0), rig.poisoned::<StepReport>(REPORTS, 0));
    let mut expected = reports.read();
    for _ in 0..steps {
        let votes: Vec<RankStats> = (0..ranks as u64)
            .map(|rank| match random.next() % (4 * ranks as u64) {
                0 => RankStats { first_bad_unit: rank, ..RankStats::new(&[BAD], 1.5) },
                r => RankStats {
                    flags: random.next(),
                    ..RankStats::new(&[GradStats { sum_sq: r as f64 * 17.3, nonfinite: 0 }], 0.1)
                },
            })
            .collect();
        let on_votes = rig.buffer(&votes, 0);
        let args = DecideArgs {
            votes: on_votes.slice(),
            settings: on_settings.slice(),
            rates: on_rates.slice(),
            state: on_state.slice(),
            scalars: scalars.slice(),
            reports: reports.slice(),
        };
        rig.kernels.decide_step(&rig.stream, args).unwrap();
        let (decided, report) = decide_step(&votes, &settings, &rates, &mut state);
        if let Some(report) = report {
            expected[report.iteration as usize % REPORTS] = report;
        }
        assert_eq!(scalars.read(), [decided]);
        assert_eq!(on_state.read(), [state]);
        // As bytes: places that were never written hold NaNs.
        assert_eq!(bytemuck::cast_slice::<_, u8>(&reports.read()), bytemuck::cast_slice::<_, u8>(&expected));
    }
}

pub fn decisions<D: Device>(rig: &Rig<D>) {
    let settings = StepSettings {
        max_grad_norm: 1.0,
        min_scale: 4.0,
        window: 3,
        micro_batches: 2,
        first_position: 5,
        dynamic: 1,
        hysteresis: 2,
        consecutive_hysteresis: 0,
        fail_at_min: 0,
    };
    let steps = if cfg!(miri) { 6 } else { 40 };
    check_run(rig, settings, 1, steps, 64, 1);
    check_run(rig, StepSettings { max_grad_norm: 0.0, consecutive_hysteresis: 1, ..settings }, 3, steps, 64, 2);
    check_run(rig, StepSettings { dynamic: 0, ..settings }, 2, steps, 64, 3);
    // These two runs are halted on the way: at the least scale, and by a table of rates that is too short.
    check_run(rig, StepSettings { fail_at_min: 1, min_scale: 16.0, hysteresis: 1, ..settings }, 2, steps, 64, 4);
    check_run(rig, settings, 2, steps, 2, 5);
}
