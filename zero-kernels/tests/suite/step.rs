//! The rules of a step, apart from those that zero-optim's tests compare with DeepSpeed.

use zero_kernels::step::{StepConfig, StepRates, StepState, advance_step};
use zero_kernels::{AdamHyper, AdamScalars, GradStats, RULE_SCALARS, RankStats, StepScalars};

#[test]
fn missing_rates_halt_the_run() {
    let config = StepConfig {
        max_grad_norm: 0.0,
        min_scale: 1.0,
        window: 1,
        micro_batches: 1,
        first_position: 5,
        dynamic: 0,
        hysteresis: 1,
        consecutive_hysteresis: 0,
        fail_at_min: 1,
        divisor: 0.0,
    };

    let start = StepState {
        schedule_position: 5,
        ..StepState::new(1.0, 1)
    };

    let ranks = [RankStats::new(&[], 0.0)];
    let rates = [StepRates {
        lr: 1e-3,
        of_rule: [0.5; RULE_SCALARS],
    }];

    let mut state = start;
    let mut scalars = [StepScalars::default()];
    advance_step(&ranks, &config, &rates, &mut state, &mut scalars);
    assert_eq!(scalars[0].skip, 0);
    let record = advance_step(&ranks, &config, &rates, &mut state, &mut scalars);
    assert_eq!(
        (scalars[0].skip, record.unwrap().halted, state.halted),
        (1, StepState::NO_RATE, StepState::NO_RATE)
    );
    let before = state;
    assert_eq!(
        advance_step(&ranks, &config, &rates, &mut state, &mut scalars),
        None
    );
    assert_eq!(state, before);
    let mut early = StepState {
        schedule_position: 4,
        ..start
    };

    advance_step(&ranks, &config, &rates, &mut early, &mut scalars);
    assert_eq!(early.halted, StepState::NO_RATE);
}

/// DeepSpeed's FusedAdam with `bias_correction: false` divides by neither `1 - beta1^t` nor
/// `1 - beta2^t`.
#[test]
fn bias_correction_can_be_off() {
    let on = AdamHyper {
        beta1: 0.9,
        beta2: 0.99,
        eps: 1e-8,
        weight_decay: 0.0,
        decoupled: true,
        bias_correction: true,
    };

    let off = AdamHyper {
        bias_correction: false,
        ..on
    };

    let with = |t, hyper: &AdamHyper| {
        let scalars = AdamScalars::new(t, 0.25, hyper, 1.0);
        (scalars.step_size, scalars.bias_correction2_sqrt)
    };

    for t in [1, 2, 1000] {
        assert_eq!(with(t, &off), (0.25, 1.0));
    }
    assert_eq!(
        with(1, &on),
        ((0.25 / (1.0 - 0.9)) as f32, 0.01f64.sqrt() as f32)
    );
}

#[test]
fn scale_never_halves_without_hysteresis() {
    let config = StepConfig {
        max_grad_norm: 0.0,
        min_scale: 1.0,
        window: 2,
        micro_batches: 1,
        first_position: 0,
        dynamic: 1,
        hysteresis: 0,
        consecutive_hysteresis: 0,
        fail_at_min: 1,
        divisor: 0.0,
    };

    let rates = [StepRates {
        lr: 1e-3,
        of_rule: [0.5; RULE_SCALARS],
    }; 8];

    let mut state = StepState::new(4.0, 0);
    let scales = [1, 1, 1, 0, 0, 0, 1].map(|nonfinite| {
        let ranks = [RankStats::new(
            &[GradStats {
                sum_sq: 1.0,
                nonfinite,
            }],
            0.0,
        )];
        advance_step(
            &ranks,
            &config,
            &rates,
            &mut state,
            &mut [StepScalars::default()],
        );
        assert_eq!(
            (state.hysteresis_left, state.halted),
            (0, StepState::RUNNING)
        );
        state.loss_scale
    });

    assert_eq!(scales, [4.0, 4.0, 4.0, 4.0, 4.0, 8.0, 8.0]);
}
