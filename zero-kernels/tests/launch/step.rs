//! The step operations against the plain functions, bit for bit.

use zero_alloc::device::Device;
use zero_kernels::step::{self, StepConfig, StepRates, StepRecord, StepState};
use zero_kernels::{AdvanceArgs, GradStats, RankStats, StepScalars};

use crate::Rig;
use crate::common::Random;

const BAD: GradStats = GradStats {
    sum_sq: 2.0,
    nonfinite: 3,
};
const GOOD: GradStats = GradStats {
    sum_sq: 0.1,
    nonfinite: 0,
};

pub fn rank_stats<D: Device>(rig: &Rig<D>) {
    let overflown = GradStats {
        sum_sq: f64::INFINITY,
        nonfinite: 0,
    };

    for units in [
        vec![],
        vec![GOOD; 3],
        vec![GOOD, GOOD, BAD, GOOD, BAD],
        vec![overflown],
    ] {
        let on_units = rig.buffer(&units, 0);
        let loss = rig.buffer(&[2.5f64], 0);
        let flags = rig.buffer(&[0xf00du64], 0);
        let out = rig.poisoned::<RankStats>(1, 0);
        rig.kernels
            .rank_stats(
                &rig.stream,
                on_units.slice(),
                loss.slice(),
                flags.slice(),
                out.slice(),
            )
            .unwrap();
        assert_eq!(
            out.read(),
            [RankStats {
                flags: 0xf00d,
                ..RankStats::new(&units, 2.5)
            }]
        );
    }
}

/// Compares a run of steps in device memory with the plain function.
fn check_run<D: Device>(
    rig: &Rig<D>,
    config: StepConfig,
    ranks: usize,
    steps: u64,
    rates: u64,
    seed: u64,
) {
    const RECORDS: usize = 5;
    // Sets of rates, as of parameter groups.
    let sets = if seed.is_multiple_of(2) { 3 } else { 1 };
    let mut random = Random(seed);
    let rate = |p: u64| StepRates {
        lr: 1e-3 / (p + 1) as f64,
        of_rule: std::array::from_fn(|i| (p + i as u64) as f32),
    };

    let rates: Vec<StepRates> = (0..sets * rates).map(rate).collect();
    let mut state = StepState {
        schedule_position: config.first_position,
        ..StepState::new(16.0, config.hysteresis)
    };

    let on_state = rig.buffer(&[state], 0);
    let on_config = rig.buffer(&[config], 0);
    let on_rates = rig.buffer(&rates, 0);
    let scalars = rig.poisoned::<StepScalars>(sets as usize, 0);
    let records = rig.poisoned::<StepRecord>(RECORDS, 0);
    let mut expected = records.read();

    for _ in 0..steps {
        let stats: Vec<RankStats> = (0..ranks as u64)
            .map(|rank| match random.next() % (4 * ranks as u64) {
                0 => RankStats {
                    first_bad_unit: rank,
                    ..RankStats::new(&[BAD], 1.5)
                },
                r => RankStats {
                    flags: random.next(),
                    ..RankStats::new(
                        &[GradStats {
                            sum_sq: r as f64 * 17.3,
                            nonfinite: 0,
                        }],
                        0.1,
                    )
                },
            })
            .collect();
        let on_stats = rig.buffer(&stats, 0);
        let args = AdvanceArgs {
            ranks: on_stats.slice(),
            config: on_config.slice(),
            rates: on_rates.slice(),
            state: on_state.slice(),
            scalars: scalars.slice(),
            records: records.slice(),
        };
        rig.kernels.advance_step(&rig.stream, args).unwrap();
        let mut step_scalars = vec![StepScalars::default(); sets as usize];
        if let Some(record) =
            step::advance_step(&stats, &config, &rates, &mut state, &mut step_scalars)
        {
            expected[record.iteration as usize % RECORDS] = record;
        }
        assert_eq!(scalars.read(), step_scalars);
        assert_eq!(on_state.read(), [state]);
        // As bytes: records that were never written are NaNs.
        assert_eq!(
            bytemuck::cast_slice::<_, u8>(&records.read()),
            bytemuck::cast_slice::<_, u8>(&expected)
        );
    }
}

pub fn advance_step<D: Device>(rig: &Rig<D>) {
    let config = StepConfig {
        max_grad_norm: 1.0,
        min_scale: 4.0,
        window: 3,
        micro_batches: 2,
        first_position: 5,
        dynamic: 1,
        hysteresis: 2,
        consecutive_hysteresis: 0,
        fail_at_min: 0,
        divisor: 0.0,
    };

    // A config, the ranks, the length of the table of rates, a seed. The last two runs are halted: at
    // the minimum scale, and after the end of the table.
    let unlimited = StepConfig {
        max_grad_norm: 0.0,
        consecutive_hysteresis: 1,
        ..config
    };
    let fixed = StepConfig {
        dynamic: 0,
        ..config
    };
    let impatient = StepConfig {
        hysteresis: 0,
        ..config
    };
    let divided = StepConfig {
        divisor: 77.0,
        ..config
    };
    let failing = StepConfig {
        fail_at_min: 1,
        min_scale: 16.0,
        hysteresis: 1,
        ..config
    };
    let steps = if cfg!(miri) { 2 } else { 40 };
    for (config, ranks, rates, seed) in [
        (config, 1, 64, 1),
        (unlimited, 3, 64, 2),
        (fixed, 2, 64, 3),
        (impatient, 2, 64, 6),
        (divided, 2, 64, 8),
        (failing, 2, 64, 4),
        (config, 2, 2, 5),
    ] {
        check_run(rig, config, ranks, steps, rates, seed);
    }
}
