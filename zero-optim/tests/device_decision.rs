//! The decision that a device takes (zero_kernels::step, the twin of cuda/step.cu) is the host's, bit for bit.

use proptest::prelude::*;
use zero_kernels::step::{StepRates, StepSettings, StepState, decide_step};
use zero_optim::{
    DynamicScaling, Flags, LossScaling, LrSchedule, OneCycle, OptimError, OptimizerConfig, RankStats, StepController,
    StepOutcome,
};

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..Default::default() })]

    #[test]
    #[cfg_attr(miri, ignore)]
    fn host_and_device_decide_alike(
        steps in prop::collection::vec((0.0f64..1e9, prop::bool::weighted(0.25), 0.0f64..10.0), 1..60),
        ranks in 1usize..5,
        micro_batches in 1usize..4,
        max_grad_norm in prop::sample::select(vec![0.0, 1.0]),
        dynamic: bool,
        window in 1u64..6,
        hysteresis in 1u32..4,
        consecutive_hysteresis: bool,
        initial_scale_power in 0u32..6,
        cycle: bool,
    ) {
        let settings = DynamicScaling {
            initial_scale_power, window, hysteresis, consecutive_hysteresis, min_scale: 1.0, fail_at_min: true,
        };
        let loss_scaling = if dynamic { LossScaling::Dynamic(settings) } else { LossScaling::Static { scale: 4.0 } };
        let schedule = if cycle { LrSchedule::OneCycle(one_cycle()) } else { LrSchedule::LinearWarmup { warmup_steps: 7 } };
        let rules = OptimizerConfig { loss_scaling, schedule, max_grad_norm, lr: 3e-4, ..OptimizerConfig::default() };
        let rates = |p| match rules.schedule.betas(p) {
            Some((beta1, beta2)) => StepRates { lr: rules.schedule.lr(rules.lr, p), beta1, beta2 },
            None => StepRates { lr: rules.schedule.lr(rules.lr, p), beta1: 0.9, beta2: 0.999 },
        };
        let rates: Vec<StepRates> = (0..64).map(rates).collect();
        let device_settings = StepSettings {
            max_grad_norm,
            min_scale: 1.0,
            window,
            micro_batches: micro_batches as u64,
            first_position: 0,
            dynamic: dynamic.into(),
            hysteresis,
            consecutive_hysteresis: consecutive_hysteresis.into(),
            fail_at_min: 1,
        };
        let mut decider = StepController::new(rules).unwrap();
        let mut state = StepState {
            loss_scale: decider.backward_scale().get(),
            iteration: 0,
            since: 0,
            adam_steps: 0,
            schedule_position: 0,
            skipped_steps: 0,
            hysteresis_left: decider.progress().loss_scaler.hysteresis_left,
            halted: StepState::RUNNING,
        };
        for (i, (sum_sq, bad, loss)) in steps.into_iter().enumerate() {
            let votes: Vec<RankStats> = (0..ranks)
                .map(|r| {
                    let bad = bad && r == i % ranks;
                    let first_bad_unit = if bad { 0 } else { RankStats::NO_UNIT };
                    let flags = (r * 5 + i) as u64 | 16;
                    RankStats { sum_sq: sum_sq / (r + 1) as f64, nonfinite: bad.into(), first_bad_unit, loss, flags }
                })
                .collect();
            let scale = decider.backward_scale();
            let host = decider.decide(&votes, scale, micro_batches, &["unit".to_owned()]);
            let (scalars, report) = decide_step(&votes, &device_settings, &rates, &mut state);
            match host {
                Err(OptimError::LossScaleAtMinimum { .. }) => {
                    prop_assert_eq!(report.unwrap().halted, StepState::AT_MINIMUM);
                    prop_assert_eq!((state.halted, scalars.skip), (StepState::AT_MINIMUM, 1));
                    break;
                }
                Err(other) => return Err(TestCaseError::fail(other.to_string())),
                Ok(host) => {
                    let report = report.unwrap();
                    prop_assert_eq!(host.scalars, scalars);
                    prop_assert_eq!((host.outcome.lr(), host.outcome.loss()), (report.lr, report.loss));
                    let Flags { any, all } = host.outcome.flags();
                    prop_assert_eq!((any, all), (report.flags_any, report.flags_all));
                    prop_assert!(all & 16 == 16 && any & all == all);
                    prop_assert_eq!(host.outcome.loss_scale(), report.loss_scale);
                    prop_assert_eq!(decider.backward_scale().get(), report.next_loss_scale);
                    prop_assert_eq!((report.iteration, report.halted), (i as u64, StepState::RUNNING));
                    prop_assert_eq!(host.outcome.is_skipped(), report.skipped != 0);
                    match host.outcome {
                        StepOutcome::Applied { grad_norm, clip, .. } => {
                            prop_assert_eq!((grad_norm, clip, u64::MAX), (report.grad_norm, report.clip, report.bad_rank));
                        }
                        StepOutcome::Skipped { overflow, .. } => {
                            let expected = (overflow.rank as u64, 0, overflow.nonfinite);
                            prop_assert_eq!((report.bad_rank, report.bad_unit, report.nonfinite), expected);
                        }
                    }
                }
            }
            let progress = decider.progress();
            prop_assert_eq!(progress.loss_scaler.scale, state.loss_scale);
            prop_assert_eq!(progress.loss_scaler.hysteresis_left, if dynamic { state.hysteresis_left } else { 1 });
            prop_assert_eq!((progress.adam_steps, progress.skipped_steps), (state.adam_steps, state.skipped_steps));
            prop_assert_eq!(progress.schedule_position, state.schedule_position);
        }
    }
}

/// Its rates and betas move.
fn one_cycle() -> OneCycle {
    serde_json::from_str(r#"{"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 5}"#).unwrap()
}

#[test]
fn outside_the_table_of_rates_the_run_is_halted_and_stays_so() {
    let settings = StepSettings {
        max_grad_norm: 0.0,
        min_scale: 1.0,
        window: 1,
        micro_batches: 1,
        first_position: 5,
        dynamic: 0,
        hysteresis: 1,
        consecutive_hysteresis: 0,
        fail_at_min: 1,
    };
    let start = StepState {
        loss_scale: 1.0,
        iteration: 0,
        since: 0,
        adam_steps: 0,
        schedule_position: 5,
        skipped_steps: 0,
        hysteresis_left: 1,
        halted: StepState::RUNNING,
    };
    let votes = [RankStats::new(&[], 0.0)];
    let rates = [StepRates { lr: 1e-3, beta1: 0.9, beta2: 0.999 }];
    let mut state = start;
    assert_eq!(decide_step(&votes, &settings, &rates, &mut state).0.skip, 0);
    let (scalars, report) = decide_step(&votes, &settings, &rates, &mut state);
    assert_eq!((scalars.skip, report.unwrap().halted, state.halted), (1, StepState::NO_RATE, StepState::NO_RATE));
    let before = state;
    assert_eq!(decide_step(&votes, &settings, &rates, &mut state), (scalars, None));
    assert_eq!(state, before);
    let mut early = StepState { schedule_position: 4, ..start };
    decide_step(&votes, &settings, &rates, &mut early);
    assert_eq!(early.halted, StepState::NO_RATE);
}
