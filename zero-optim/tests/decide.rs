//! The pure parts: votes, clipping, the loss scale of the backward, schedules, and what they refuse.

use proptest::prelude::*;
use zero_kernels::GradStats;
use zero_optim::{
    DynamicScaling, LossScaler, LossScalerState, LossScaling, LrSchedule, OneCycle, OptimError, OptimizerConfig,
    Progress, RangeTest, RankStats, ScaleChange, StepController, StepOutcome, Warmup, WarmupCosine, WarmupDecay,
};

fn vote(sum_sq: f64) -> RankStats {
    RankStats::new(&[GradStats { sum_sq, nonfinite: 0 }], 0.0)
}

fn bad_vote() -> RankStats {
    RankStats::new(&[GradStats { sum_sq: 1.0, nonfinite: 0 }, GradStats { sum_sq: 0.0, nonfinite: 3 }], 0.0)
}

fn names() -> Vec<String> {
    vec!["embedding".into(), "block".into()]
}

fn dynamic(settings: DynamicScaling) -> OptimizerConfig {
    OptimizerConfig { loss_scaling: LossScaling::Dynamic(settings), ..OptimizerConfig::default() }
}

#[test]
fn a_vote_adds_units_in_order_and_names_the_first_bad_one() {
    let stats = |sum_sq, nonfinite| GradStats { sum_sq, nonfinite };
    let vote = RankStats::new(&[stats(0.1, 0), stats(0.2, 2), stats(0.3, 1)], 4.0);
    assert_eq!(vote, RankStats { sum_sq: 0.1 + 0.2 + 0.3, nonfinite: 3, first_bad_unit: 1, loss: 4.0, flags: 0 });
    assert_eq!(
        RankStats::new(&[], 1.0),
        RankStats { sum_sq: 0.0, nonfinite: 0, first_bad_unit: RankStats::NO_UNIT, loss: 1.0, flags: 0 }
    );
    assert_eq!(size_of::<RankStats>(), 40, "it travels as bytes");
}

#[test]
fn clipping_takes_the_norm_of_the_mean_gradient() {
    let rules = OptimizerConfig {
        max_grad_norm: 2.0,
        loss_scaling: LossScaling::Static { scale: 8.0 },
        ..Default::default()
    };
    let mut decider = StepController::new(rules).unwrap();
    // 2 ranks, 3 micro-batches, scale 8: sums are 48 times the mean. Mean norm 5: sum of squares (240)^2.
    let scale = decider.backward_scale();
    let decision = decider.decide(&[vote(144.0 * 144.0), vote(192.0 * 192.0)], scale, 3, &names()).unwrap();
    let StepOutcome::Applied { grad_norm, clip, .. } = decision.outcome else { panic!("skipped") };
    assert_eq!((grad_norm, clip), (5.0, 2.0 / (5.0 + 1e-6)));
    assert_eq!(decision.scalars.grad_scale, (clip / 48.0) as f32);
    // At the limit nothing is clipped.
    let decision = decider.decide(&[vote(96.0 * 96.0), vote(0.0)], scale, 3, &names()).unwrap();
    let StepOutcome::Applied { grad_norm, clip, .. } = decision.outcome else { panic!("skipped") };
    assert_eq!((grad_norm, clip, decision.scalars.grad_scale), (2.0, 1.0, (1.0 / 48.0) as f32));
}

#[test]
fn clipping_off_lets_any_norm_through() {
    let mut decider = StepController::new(OptimizerConfig::default()).unwrap();
    let decision = decider.decide(&[vote(1e12)], decider.backward_scale(), 1, &names()).unwrap();
    assert_eq!(decision.scalars.grad_scale, 1.0);
    assert_eq!(decision.outcome.grad_norm(), Some(1e6));
}

/// DeepSpeed #2686: the scale grew between backward and step, and gradients were divided by the new one.
#[test]
fn gradients_are_divided_by_the_scale_that_their_backward_used() {
    let mut decider =
        StepController::new(dynamic(DynamicScaling { initial_scale_power: 4, window: 1, ..Default::default() }))
            .unwrap();
    for step in 0..4 {
        let scale = decider.backward_scale();
        let decision = decider.decide(&[vote(scale.get() * scale.get())], scale, 1, &names()).unwrap();
        assert_eq!(decision.scalars.grad_scale, 1.0 / scale.get() as f32, "step {step}");
        assert_eq!(decision.outcome.grad_norm(), Some(1.0));
        assert_eq!(decision.outcome.loss_scale(), scale.get());
    }
    assert!(decider.backward_scale().get() > 16.0, "it grew");
}

#[test]
fn a_non_finite_gradient_skips_in_every_dtype_and_is_named() {
    // Static scale 1 is fp32 and bf16.
    let mut decider = StepController::new(OptimizerConfig::default()).unwrap();
    let decision = decider.decide(&[vote(1.0), bad_vote()], decider.backward_scale(), 1, &names()).unwrap();
    let StepOutcome::Skipped { overflow, .. } = &decision.outcome else { panic!("applied") };
    assert_eq!((overflow.rank, overflow.unit.as_str(), overflow.nonfinite), (1, "block", 3));
    assert_eq!(decision.scalars.skip, 1);
    assert_eq!((decider.progress().adam_steps, decider.progress().skipped_steps), (0, 1));
    assert_eq!(decision.outcome.grad_norm(), None);
}

#[test]
fn bias_corrections_count_applied_steps_only() {
    let mut decider = StepController::new(OptimizerConfig::default()).unwrap();
    let mut applied = 0;
    for step in 0..20 {
        let votes = [if step % 3 == 1 { bad_vote() } else { vote(1.0) }];
        let decision = decider.decide(&votes, decider.backward_scale(), 1, &names()).unwrap();
        if !decision.outcome.is_skipped() {
            applied += 1;
            assert_eq!(decision.scalars.step_size, (1e-3 / (1.0 - 0.9f64.powf(f64::from(applied)))) as f32);
        }
    }
    assert_eq!(decider.progress().adam_steps, u64::from(applied as u32));
}

#[test]
fn one_cycle_moves_the_betas() {
    let params = serde_json::json!({"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5,
        "cycle_first_step_size": 2, "decay_step_size": 2, "decay_lr_rate": 1.0, "decay_mom_rate": 0.5}});
    let schedule: LrSchedule = serde_json::from_value(params).unwrap();
    let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} and {b}");
    for (position, lr, beta1) in [(0, 0.1, 0.8), (1, 0.3, 0.85), (2, 0.5, 0.8), (3, 0.3, 0.85), (4, 0.1, 0.9)] {
        near(schedule.lr(1.0, position), lr);
        near(schedule.betas(position).unwrap().0, beta1);
    }
    // One step into the decay: half an interval.
    near(schedule.lr(1.0, 5), 0.1 / 1.5);
    near(schedule.betas(5).unwrap().0, 0.9 * 1.25);
    let mut decider = StepController::new(OptimizerConfig { schedule, ..Default::default() }).unwrap();
    let decision = decider.decide(&[vote(1.0)], decider.backward_scale(), 1, &names()).unwrap();
    assert_eq!((decision.hyper.beta1, decision.hyper.beta2), (0.8, 0.99));
}

#[test]
fn one_cycle_climbs_in_stairs() {
    let params = serde_json::json!({"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 4,
        "cycle_second_step_size": 2, "cycle_first_stair_count": 2, "cycle_second_stair_count": 1,
        "cycle_momentum": false});
    let cycle: OneCycle = serde_json::from_value(params).unwrap();
    let schedule = LrSchedule::OneCycle(cycle);
    let rates: Vec<f64> = (0..8).map(|p| schedule.lr(1.0, p)).collect();
    assert_eq!(rates, [0.0, 0.0, 0.5, 0.5, 1.0, 0.0, 0.0, 0.0]);
    assert_eq!(schedule.betas(3), None);
}

#[test]
fn plain_warm_up_reaches_the_rate_at_its_last_step() {
    let schedule = LrSchedule::LinearWarmup { warmup_steps: 4 };
    let rates: Vec<f64> = (0..6).map(|p| schedule.lr(1.0, p)).collect();
    assert_eq!(rates, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]);
    assert_eq!(LrSchedule::LinearWarmup { warmup_steps: 0 }.lr(1.0, 0), 1.0);
    assert_eq!(LrSchedule::Constant.lr(0.5, 1 << 40), 0.5);
}

#[test]
fn a_configuration_keeps_deepspeeds_names_and_defaults() {
    let parse = |json: serde_json::Value| serde_json::from_value::<LrSchedule>(json);
    let bare = parse(serde_json::json!({"type": "WarmupLR", "params": {}})).unwrap();
    assert_eq!(bare, LrSchedule::Warmup(Warmup::default()));
    assert_eq!(bare.lr(3e-4, 5000), 3e-4, "up to the optimizer's own rate");
    let bare = parse(serde_json::json!({"type": "LRRangeTest", "params": {}})).unwrap();
    assert_eq!(bare, LrSchedule::RangeTest(RangeTest::default()));
    assert!(parse(serde_json::json!({"type": "WarmupLR", "params": {"warmup_steps": 3}})).is_err(), "unknown key");
    assert!(parse(serde_json::json!({"type": "WarmupDecayLR", "params": {}})).is_err(), "no total_num_steps");
    let again = serde_json::to_value(LrSchedule::RangeTest(RangeTest::default())).unwrap();
    assert_eq!(again["type"], "LRRangeTest");
    let stairs = RangeTest { lr_range_test_staircase: true, lr_range_test_step_size: 2, ..Default::default() };
    let schedule = LrSchedule::RangeTest(stairs);
    let rates: Vec<f64> = (0..5).map(|p| schedule.lr(1.0, p)).collect();
    assert_eq!(rates, [1e-3, 1e-3, 2e-3, 2e-3, 3e-3]);
}

#[test]
fn settings_outside_their_ranges_are_refused_by_name() {
    let refused = |rules: OptimizerConfig| match StepController::new(rules).map(drop) {
        Err(OptimError::Setting { setting, .. }) => setting,
        other => panic!("{other:?}"),
    };
    let base = OptimizerConfig::default;
    let with = |schedule| OptimizerConfig { schedule, ..base() };
    assert_eq!(refused(OptimizerConfig { max_grad_norm: -1.0, ..base() }), "max_grad_norm");
    assert_eq!(refused(OptimizerConfig { loss_scaling: LossScaling::Static { scale: 0.0 }, ..base() }), "loss_scale");
    let d = DynamicScaling::default;
    assert_eq!(refused(dynamic(DynamicScaling { window: 0, ..d() })), "loss_scale_window");
    assert_eq!(refused(dynamic(DynamicScaling { hysteresis: 0, ..d() })), "hysteresis");
    assert_eq!(refused(dynamic(DynamicScaling { initial_scale_power: 200, ..d() })), "initial_scale_power");
    assert_eq!(refused(dynamic(DynamicScaling { min_scale: 1e9, ..d() })), "min_loss_scale");
    let zero = Warmup { warmup_num_steps: 0, ..Default::default() };
    assert_eq!(refused(with(LrSchedule::Warmup(zero))), "warmup_num_steps");
    let decay = |json| serde_json::from_value::<WarmupDecay>(json).unwrap();
    let json = serde_json::json!({"total_num_steps": 9, "warmup_max_lr": -1.0});
    assert_eq!(refused(with(LrSchedule::WarmupDecay(decay(json)))), "warmup_max_lr");
    let json = serde_json::json!({"total_num_steps": 9, "cos_min_ratio": -1.0});
    let cosine: WarmupCosine = serde_json::from_value(json).unwrap();
    assert_eq!(refused(with(LrSchedule::WarmupCosine(cosine))), "cos_min_ratio");
    let json = serde_json::json!({"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_min_mom": 1.0});
    let cycle: OneCycle = serde_json::from_value(json).unwrap();
    assert_eq!(refused(with(LrSchedule::OneCycle(cycle))), "cycle_min_mom");
    let zero = RangeTest { lr_range_test_step_size: 0, ..Default::default() };
    assert_eq!(refused(with(LrSchedule::RangeTest(zero))), "lr_range_test_step_size");
}

#[test]
fn counts_that_no_run_comes_to_are_not_restored() {
    let mut decider = StepController::new(OptimizerConfig::default()).unwrap();
    let good = decider.progress();
    let scaler = LossScalerState { iteration: u64::MAX, ..good.loss_scaler };
    for bad in [
        Progress { adam_steps: u64::MAX, ..good },
        Progress { schedule_position: u64::MAX, ..good },
        Progress { skipped_steps: u64::MAX, ..good },
        Progress { loss_scaler: scaler, ..good },
    ] {
        let error = decider.restore(&bad).unwrap_err().to_string();
        assert_eq!(
            error,
            "saved progress does not fit: 18446744073709551615 steps, and a run has 9007199254740992 at most"
        );
        assert_eq!(decider.progress(), good);
    }
    decider.restore(&Progress { adam_steps: 1 << 53, ..good }).unwrap();
}

#[test]
fn a_loss_scaler_restores_only_what_fits() {
    let state = LossScalerState { scale: 4.0, iteration: 9, since: 3, hysteresis_left: 5 };
    let mut scaler = LossScaler::new(LossScaling::Dynamic(DynamicScaling::default())).unwrap();
    scaler.restore(state).unwrap();
    assert_eq!(scaler.state(), LossScalerState { hysteresis_left: 2, ..state }, "no more than this run endures");
    for bad in [
        LossScalerState { scale: f64::NAN, ..state },
        LossScalerState { scale: 0.0, ..state },
        LossScalerState { since: 10, ..state },
    ] {
        assert!(matches!(scaler.restore(bad), Err(OptimError::Restore { what: "loss scale", .. })));
    }
    let mut fixed = LossScaler::new(LossScaling::Static { scale: 8.0 }).unwrap();
    assert!(fixed.restore(state).is_err());
    fixed.restore(LossScalerState { scale: 8.0, ..state }).unwrap();
    assert_eq!(fixed.update(true), Ok(ScaleChange::Kept), "a static scale never moves");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..Default::default() })]

    /// The scale is a power of two between the minimum and the first scale times 2 per window.
    #[test]
    #[cfg_attr(miri, ignore)]
    fn the_loss_scale_stays_in_its_bounds(
        overflows in prop::collection::vec(prop::bool::weighted(0.2), 0..200),
        power in 0u32..20,
        window in 1u64..8,
        hysteresis in 1u32..4,
        consecutive_hysteresis: bool,
    ) {
        let settings = DynamicScaling {
            initial_scale_power: power, window, hysteresis, consecutive_hysteresis, min_scale: 1.0, fail_at_min: false,
        };
        let mut scaler = LossScaler::new(LossScaling::Dynamic(settings)).unwrap();
        let mut good = 0;
        for overflow in overflows {
            let before = scaler.scale();
            let change = scaler.update(overflow).unwrap();
            let after = scaler.scale();
            prop_assert!(after >= 1.0 && after.log2().fract() == 0.0);
            prop_assert!((1..=hysteresis).contains(&scaler.state().hysteresis_left));
            good = if overflow { 0 } else { good + 1 };
            match change {
                ScaleChange::Doubled => prop_assert!(!overflow && good > window && after == 2.0 * before),
                ScaleChange::Halved => prop_assert!(overflow && (after == before / 2.0 || after == 1.0)),
                ScaleChange::Endured { .. } => prop_assert!(overflow && after == before),
                ScaleChange::Kept => prop_assert!(!overflow && after == before),
            }
        }
    }
}
