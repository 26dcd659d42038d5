//! Steps without a device: rank statistics, clipping, loss scale, schedules, settings and saved
//! progress.

use proptest::prelude::*;
use serde::de::DeserializeOwned;
use serde_json::json;
use zero_kernels::GradStats;
use zero_kernels::{AdamScalars, StepScalars};
use zero_optim::{
    Decay, DecayCurve, Divisor, DynamicScaling, LossScaling, LrSchedule, OneCycle, OptimError,
    OptimizerConfig, Progress, RangeTest, RankStats, StepController, StepOutcome, Warmup,
};

/// The scalars as Adam reads them.
fn adam(scalars: StepScalars) -> AdamScalars {
    bytemuck::cast(scalars)
}

fn stats(sum_sq: f64, nonfinite: u64) -> GradStats {
    GradStats { sum_sq, nonfinite }
}

fn good(sum_sq: f64) -> RankStats {
    RankStats::new(&[stats(sum_sq, 0)], 0.0)
}

fn bad() -> RankStats {
    RankStats::new(&[stats(1.0, 0), stats(0.0, 3)], 0.0)
}

/// A step of one micro-batch.
fn advance(steps: &mut StepController, ranks: &[RankStats]) -> (StepScalars, StepOutcome) {
    advance_by(steps, ranks, 1)
}

fn advance_by(
    steps: &mut StepController,
    ranks: &[RankStats],
    micro_batches: usize,
) -> (StepScalars, StepOutcome) {
    let divisor = Divisor::MicroBatches(micro_batches);
    let (scalars, outcome) = steps.advance(ranks, divisor, &names()).unwrap();
    (scalars[0], outcome)
}

fn from_json<T: DeserializeOwned>(json: serde_json::Value) -> T {
    serde_json::from_value(json).unwrap()
}

fn names() -> Vec<String> {
    vec!["embedding".into(), "block".into()]
}

fn dynamic(settings: DynamicScaling) -> OptimizerConfig {
    OptimizerConfig::default().loss_scaling(LossScaling::Dynamic(settings))
}

#[test]
fn rank_stats_add_units_in_order() {
    let combined = RankStats::new(&[stats(0.1, 0), stats(0.2, 2), stats(0.3, 1)], 4.0);
    assert_eq!(
        combined,
        RankStats {
            sum_sq: 0.1 + 0.2 + 0.3,
            nonfinite: 3,
            first_bad_unit: 1,
            loss: 4.0,
            flags: 0
        }
    );

    assert_eq!(
        RankStats::new(&[], 1.0),
        RankStats {
            sum_sq: 0.0,
            nonfinite: 0,
            first_bad_unit: RankStats::NO_UNIT,
            loss: 1.0,
            flags: 0
        }
    );

    assert_eq!(size_of::<RankStats>(), 40, "gathered as bytes");
}

#[test]
fn clipping_uses_the_mean_gradient() {
    let config = OptimizerConfig::default()
        .max_grad_norm(2.0)
        .loss_scaling(LossScaling::Static { scale: 8.0 });
    let mut steps = StepController::new(config).unwrap();
    // 2 ranks, 3 micro-batches, scale 8: sums are 48 times the mean. A mean norm of 5 is a sum of
    // squares of 240^2.
    let (scalars, outcome) = advance_by(&mut steps, &[good(144.0 * 144.0), good(192.0 * 192.0)], 3);

    let StepOutcome::Applied {
        grad_norm, clip, ..
    } = outcome
    else {
        panic!("skipped")
    };

    assert_eq!((grad_norm, clip), (5.0, 2.0 / (5.0 + 1e-6)));
    assert_eq!(scalars.grad_scale, (clip / 48.0) as f32);
    // A norm equal to the limit is not clipped.
    let (scalars, outcome) = advance_by(&mut steps, &[good(96.0 * 96.0), good(0.0)], 3);

    let StepOutcome::Applied {
        grad_norm, clip, ..
    } = outcome
    else {
        panic!("skipped")
    };

    assert_eq!(
        (grad_norm, clip, scalars.grad_scale),
        (2.0, 1.0, (1.0 / 48.0) as f32)
    );
}

#[test]
fn no_clipping_by_default() {
    let mut steps = StepController::new(OptimizerConfig::default()).unwrap();
    let (scalars, outcome) = advance(&mut steps, &[good(1e12)]);
    assert_eq!((scalars.grad_scale, outcome.grad_norm()), (1.0, Some(1e6)));
}

/// Regression test for DeepSpeed #2686: the scale grew between backward and step, and the new scale
/// was divided out.
#[test]
fn gradients_are_divided_by_their_scale() {
    let growing = dynamic(DynamicScaling::default().initial_scale_power(4).window(1));
    let mut steps = StepController::new(growing).unwrap();
    for step in 0..4 {
        let scale = steps.loss_scale();
        let (scalars, outcome) = advance(&mut steps, &[good(scale * scale)]);
        assert_eq!(scalars.grad_scale, 1.0 / scale as f32, "step {step}");
        assert_eq!(
            (outcome.grad_norm(), outcome.loss_scale()),
            (Some(1.0), scale)
        );
    }
    assert!(steps.loss_scale() > 16.0, "it grew");
}

#[test]
fn non_finite_gradient_skips_the_step() {
    // The default: a static scale of 1, as for fp32 and bf16.
    let mut steps = StepController::new(OptimizerConfig::default()).unwrap();
    let ranks = [
        RankStats {
            flags: 0b110,
            ..good(1.0)
        },
        RankStats {
            flags: 0b011,
            ..bad()
        },
    ];

    let (scalars, outcome) = advance(&mut steps, &ranks);
    assert_eq!((outcome.flags().any, outcome.flags().all), (0b111, 0b010));
    assert_eq!((scalars.skip, outcome.grad_norm()), (1, None));
    let StepOutcome::Skipped { overflow, .. } = outcome else {
        panic!("applied")
    };
    assert_eq!(
        (overflow.rank, overflow.unit.as_str(), overflow.nonfinite),
        (1, "block", 3)
    );
    assert_eq!(
        (steps.progress().adam_steps, steps.progress().skipped_steps),
        (0, 1)
    );
}

#[test]
fn bias_corrections_count_applied_steps() {
    let mut steps = StepController::new(OptimizerConfig::default()).unwrap();
    let mut applied = 0;
    for step in 0..20 {
        let ranks = [if step % 3 == 1 { bad() } else { good(1.0) }];
        let (scalars, outcome) = advance(&mut steps, &ranks);
        if !outcome.is_skipped() {
            applied += 1;
            assert_eq!(
                adam(scalars).step_size,
                (1e-3 / (1.0 - 0.9f64.powf(f64::from(applied)))) as f32
            );
        }
    }
    assert_eq!(steps.progress().adam_steps, u64::from(applied as u32));
}

#[test]
fn one_cycle_changes_the_betas() {
    let params = json!({"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5,
        "cycle_first_step_size": 2, "decay_step_size": 2, "decay_lr_rate": 1.0, "decay_mom_rate": 0.5}});
    let schedule: LrSchedule = from_json(params);
    let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} and {b}");

    for (position, lr, beta1) in [
        (0, 0.1, 0.8),
        (1, 0.3, 0.85),
        (2, 0.5, 0.8),
        (3, 0.3, 0.85),
        (4, 0.1, 0.9),
    ] {
        near(schedule.lr(1.0, position), lr);
        near(schedule.betas(position).unwrap().0, beta1);
    }

    // One step after the cycle: half an interval of decay.
    near(schedule.lr(1.0, 5), 0.1 / 1.5);
    near(schedule.betas(5).unwrap().0, 0.9 * 1.25);
    let mut steps = StepController::new(OptimizerConfig::default().schedule(schedule)).unwrap();
    let (scalars, _) = advance(&mut steps, &[good(1.0)]);
    assert_eq!(
        (adam(scalars).one_minus_beta1, adam(scalars).beta2),
        ((1.0 - 0.8f64) as f32, 0.99)
    );
}

#[test]
fn one_cycle_climbs_in_stairs() {
    let params = json!({"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 4,
        "cycle_second_step_size": 2, "cycle_first_stair_count": 2, "cycle_second_stair_count": 1,
        "cycle_momentum": false});
    let cycle: OneCycle = from_json(params);
    let schedule = LrSchedule::OneCycle(cycle);
    let rates: Vec<f64> = (0..8).map(|p| schedule.lr(1.0, p)).collect();
    assert_eq!(rates, [0.0, 0.0, 0.5, 0.5, 1.0, 0.0, 0.0, 0.0]);
    assert_eq!(schedule.betas(3), None);
}

#[test]
fn linear_warmup_ends_at_the_base_rate() {
    let schedule = LrSchedule::LinearWarmup { warmup_steps: 4 };
    let rates: Vec<f64> = (0..6).map(|p| schedule.lr(1.0, p)).collect();
    assert_eq!(rates, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]);
    assert_eq!(LrSchedule::LinearWarmup { warmup_steps: 0 }.lr(1.0, 0), 1.0);
    assert_eq!(LrSchedule::Constant.lr(0.5, 1 << 40), 0.5);
}

#[test]
fn schedules_have_deepspeed_names_and_defaults() {
    let parse = |json: serde_json::Value| serde_json::from_value::<LrSchedule>(json);
    let bare = parse(json!({"type": "WarmupLR", "params": {}})).unwrap();
    assert_eq!(bare, LrSchedule::Warmup(Warmup::default()));
    assert_eq!(bare.lr(3e-4, 5000), 3e-4, "up to the base rate");
    let bare = parse(json!({"type": "LRRangeTest", "params": {}})).unwrap();
    assert_eq!(bare, LrSchedule::RangeTest(RangeTest::default()));
    assert!(
        parse(json!({"type": "WarmupLR", "params": {"warmup_steps": 3}})).is_err(),
        "unknown key"
    );
    assert!(
        parse(json!({"type": "WarmupDecayLR", "params": {}})).is_err(),
        "no total_num_steps"
    );
    let again = serde_json::to_value(LrSchedule::RangeTest(RangeTest::default())).unwrap();
    assert_eq!(again["type"], "LRRangeTest");
    let stairs = RangeTest {
        lr_range_test_staircase: true,
        lr_range_test_step_size: 2,
        ..Default::default()
    };

    let schedule = LrSchedule::RangeTest(stairs);
    let rates: Vec<f64> = (0..5).map(|p| schedule.lr(1.0, p)).collect();
    assert_eq!(rates, [1e-3, 1e-3, 2e-3, 2e-3, 3e-3]);
}

#[test]
fn settings_outside_their_ranges_are_refused() {
    let refused = |config: OptimizerConfig| match StepController::new(config).map(drop) {
        Err(OptimError::Setting { setting, .. }) => setting,
        other => panic!("{other:?}"),
    };

    let base = OptimizerConfig::default;
    let with = |schedule| base().schedule(schedule);
    let d = DynamicScaling::default;
    let decay = Decay {
        curve: DecayCurve::Linear,
        warmup_steps: 0,
        decay_steps: 5,
        total_steps: 9,
        min_lr: 0.0,
    };
    let decay_of = |decay_steps, min_lr| {
        with(LrSchedule::Decay(Decay {
            decay_steps,
            min_lr,
            ..decay.clone()
        }))
    };
    let schedule = |kind: &str, params: serde_json::Value| {
        with(from_json(json!({"type": kind, "params": params})))
    };

    let static_scale = LossScaling::Static { scale: 0.0 };
    let decaying = json!({"total_num_steps": 9, "warmup_max_lr": -1.0});
    let cosine = json!({"total_num_steps": 9, "cos_min_ratio": -1.0});
    let cycle = json!({"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_min_mom": 1.0});
    for (config, setting) in [
        (base().max_grad_norm(-1.0), "max_grad_norm"),
        (base().loss_scaling(static_scale), "loss_scale"),
        (dynamic(d().window(0)), "loss_scale_window"),
        (base().sub_group_elems(0), "sub_group_elems"),
        (dynamic(d().initial_scale_power(200)), "initial_scale_power"),
        (dynamic(d().min_scale(1e9)), "min_loss_scale"),
        (
            schedule("WarmupLR", json!({"warmup_num_steps": 0})),
            "warmup_num_steps",
        ),
        (schedule("WarmupDecayLR", decaying), "warmup_max_lr"),
        (schedule("WarmupCosineLR", cosine), "cos_min_ratio"),
        (schedule("OneCycle", cycle), "cycle_min_mom"),
        (decay_of(0, 0.0), "decay_steps"),
        (decay_of(10, 0.0), "decay_steps"),
        (decay_of(5, -1.0), "min_lr"),
        (
            schedule("LRRangeTest", json!({"lr_range_test_step_size": 0})),
            "lr_range_test_step_size",
        ),
    ] {
        assert_eq!(refused(config), setting);
    }
}

#[test]
fn excessive_counts_are_not_restored() {
    let mut steps = StepController::new(OptimizerConfig::default()).unwrap();
    let good = steps.progress();
    let [mut adam, mut schedule, mut skipped, mut scaler] = [good; 4];
    adam.adam_steps = u64::MAX;
    schedule.schedule_position = u64::MAX;
    skipped.skipped_steps = u64::MAX;
    scaler.loss_scaler.iteration = u64::MAX;
    for bad in [adam, schedule, skipped, scaler] {
        let error = steps.restore(&bad).unwrap_err().to_string();
        let expected = "18446744073709551615 steps, above the maximum of 9007199254740992";
        assert_eq!(error, format!("saved progress does not fit: {expected}"));
        assert_eq!(steps.progress(), good);
    }
    adam.adam_steps = 1 << 53;
    steps.restore(&adam).unwrap();
}

/// The keys are a checkpoint format.
#[test]
fn saved_progress_keeps_its_json_keys() {
    let json = r#"{"adam_steps":7,"schedule_position":8,"skipped_steps":2,"loss_scaler":{"scale":4.0,"iteration":9,"since":3,"hysteresis_left":1}}"#;
    let progress: Progress = serde_json::from_str(json).unwrap();
    let mut steps = StepController::new(dynamic(DynamicScaling::default())).unwrap();
    steps.restore(&progress).unwrap();
    assert_eq!(serde_json::to_string(&steps.progress()).unwrap(), json);
}

#[test]
fn progress_without_hysteresis_is_restored() {
    let mut steps = StepController::new(dynamic(DynamicScaling::default().hysteresis(0))).unwrap();
    let saved = StepController::new(dynamic(DynamicScaling::default()))
        .unwrap()
        .progress();
    steps.restore(&saved).unwrap();
    assert_eq!(steps.progress().loss_scaler.hysteresis_left, 0);
}

#[test]
fn bad_loss_scale_is_not_restored() {
    let mut steps = StepController::new(dynamic(DynamicScaling::default())).unwrap();
    let with = |scale: f64, since: u64| -> Progress {
        let scaler = json!({"scale": scale, "iteration": 9, "since": since, "hysteresis_left": 5});
        serde_json::from_value(json!({
            "adam_steps": 9, "schedule_position": 9, "skipped_steps": 0, "loss_scaler": scaler
        }))
        .unwrap()
    };

    steps.restore(&with(4.0, 3)).unwrap();
    let mut limited = with(4.0, 3).loss_scaler;
    limited.hysteresis_left = 2;
    assert_eq!(
        steps.progress().loss_scaler,
        limited,
        "at most this run's hysteresis"
    );
    let mut not_a_number = with(4.0, 3);
    not_a_number.loss_scaler.scale = f64::NAN;

    for bad in [not_a_number, with(0.0, 3), with(4.0, 10)] {
        assert!(matches!(
            steps.restore(&bad),
            Err(OptimError::Restore {
                what: "loss scale",
                ..
            })
        ));
        assert_eq!(steps.progress().loss_scaler, limited);
    }

    let fixed = OptimizerConfig::default().loss_scaling(LossScaling::Static { scale: 8.0 });
    let mut fixed = StepController::new(fixed).unwrap();
    assert!(fixed.restore(&with(4.0, 3)).is_err());
    fixed.restore(&with(8.0, 3)).unwrap();
    advance(&mut fixed, &[bad()]);
    assert_eq!(fixed.loss_scale(), 8.0, "a static scale never changes");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    /// The scale is a power of two, at least the minimum; it doubles only after `window` good steps
    /// and halves only on an overflow with a hysteresis of 1 left.
    #[test]
    #[cfg_attr(miri, ignore)]
    fn loss_scale_stays_in_its_bounds(
        overflows in prop::collection::vec(prop::bool::weighted(0.2), 0..200),
        power in 0u32..20,
        window in 1u64..8,
        hysteresis in 0u32..4,
        consecutive_hysteresis: bool,
    ) {
        let settings = DynamicScaling::default()
            .initial_scale_power(power)
            .window(window)
            .hysteresis(hysteresis)
            .consecutive_hysteresis(consecutive_hysteresis)
            .fail_at_min(false);
        let mut steps = StepController::new(dynamic(settings)).unwrap();
        let mut good_steps = 0;

        for overflow in overflows {
            let before = steps.progress().loss_scaler;
            let ranks = [if overflow { bad() } else { good(1.0) }];
            let (_, outcome) = advance(&mut steps, &ranks);
            let after = steps.progress().loss_scaler;
            prop_assert_eq!((outcome.is_skipped(), outcome.loss_scale()), (overflow, before.scale));
            prop_assert!(after.scale >= 1.0 && after.scale.log2().fract() == 0.0);
            prop_assert!((hysteresis.min(1)..=hysteresis).contains(&after.hysteresis_left));
            good_steps = if overflow { 0 } else { good_steps + 1 };
            if overflow && before.hysteresis_left > 1 {
                prop_assert_eq!((after.scale, after.hysteresis_left), (before.scale, before.hysteresis_left - 1));
            } else if overflow && hysteresis == 0 {
                prop_assert_eq!(after.scale, before.scale);
            } else if overflow {
                prop_assert_eq!(after.scale, (before.scale / 2.0).max(1.0));
            } else if after.scale > before.scale {
                prop_assert!(good_steps > window && after.scale == 2.0 * before.scale);
            } else {
                prop_assert_eq!(after.scale, before.scale);
            }
        }
    }
}
