//! The rules of a step, apart from those that zero-optim's tests compare with DeepSpeed.

use zero_kernels::RankStats;
use zero_kernels::step::{StepConfig, StepRates, StepState, advance_step};

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
    };
    let start = StepState { schedule_position: 5, ..StepState::new(1.0, 1) };
    let (ranks, rates) = ([RankStats::new(&[], 0.0)], [StepRates { lr: 1e-3, beta1: 0.9, beta2: 0.999 }]);
    let mut state = start;
    assert_eq!(advance_step(&ranks, &config, &rates, &mut state).0.skip, 0);
    let (scalars, record) = advance_step(&ranks, &config, &rates, &mut state);
    assert_eq!((scalars.skip, record.unwrap().halted, state.halted), (1, StepState::NO_RATE, StepState::NO_RATE));
    let before = state;
    assert_eq!(advance_step(&ranks, &config, &rates, &mut state), (scalars, None));
    assert_eq!(state, before);
    let mut early = StepState { schedule_position: 4, ..start };
    advance_step(&ranks, &config, &rates, &mut early);
    assert_eq!(early.halted, StepState::NO_RATE);
}
