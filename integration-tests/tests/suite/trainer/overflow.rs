//! Gradients that are not finite: every rank skips the step, and the loss scale follows DeepSpeed's
//! rules.

use zero_alloc::device::DType;
use zero_alloc::host::HostDevice;
use zero_ckpt::Reader;
use zero_models::ModelConfig;
use zero_optim::{DynamicScaling, LossScaling, LrSchedule, OptimizerConfig};
use zero_trainer::{RunOptions, StepMetrics, run_on_threads};

use super::support::Case;

fn optimizer(initial_scale_power: u32) -> OptimizerConfig {
    let dynamic = DynamicScaling::default()
        .initial_scale_power(initial_scale_power)
        .hysteresis(1);
    OptimizerConfig::default()
        .loss_scaling(LossScaling::Dynamic(dynamic))
        .schedule(LrSchedule::LinearWarmup { warmup_steps: 100 })
}

#[test]
fn scale_halves_until_gradients_are_finite() {
    for stage in 0..4 {
        let case = Case {
            stage,
            dtype: DType::F16,
            steps: 16,
            optimizer: optimizer(30),
            ..Case::default()
        };
        let outcome = case.run_tiny();
        let skipped = outcome.steps.iter().take_while(|s| s.skipped).count();
        assert!(
            (2..14).contains(&skipped),
            "stage {stage}: {skipped} steps were skipped"
        );
        assert!(
            outcome.steps[skipped..].iter().all(|s| !s.skipped),
            "stage {stage}: a step was skipped later"
        );
        for (i, step) in outcome.steps.iter().enumerate() {
            assert_eq!(
                step.loss_scale,
                2f64.powi(30 - i.min(skipped) as i32),
                "halved by each skipped step"
            );
            assert_eq!(step.grad_norm.is_none(), step.skipped);
        }
        // A skipped step does not advance the schedule.
        assert_eq!(outcome.steps[skipped].lr, outcome.steps[0].lr);
        assert!(outcome.steps[skipped + 1].lr > outcome.steps[0].lr);
    }
}

#[test]
fn skipped_step_changes_no_state() {
    for stage in 0..4 {
        let all_skipped = Case {
            stage,
            dtype: DType::F16,
            steps: 2,
            optimizer: optimizer(60),
            ..Case::default()
        };
        let outcome = all_skipped.run_tiny();
        assert!(outcome.steps.iter().all(|s| s.skipped));
        let untouched = all_skipped.with(|case| case.steps = 0);
        let got = outcome.state();
        let start = untouched.run_tiny();
        assert!(start.steps.is_empty());
        for (name, bits) in got.iter().filter(|(name, _)| name.contains("moment/")) {
            assert!(bits.iter().all(|b| *b == 0), "stage {stage}: {name}");
        }
        let weights = all_skipped.tiny();
        for unit in outcome.layout.units() {
            for param in &unit.params {
                let mut want = vec![0.0; param.numel_elems as usize];
                let workload: &dyn zero_trainer::Workload<HostDevice> = &weights;
                workload.weights().unwrap()(&param.name, 0..param.numel_elems, &mut want).unwrap();
                let want: Vec<u32> = want.into_iter().map(f32::to_bits).collect();
                assert!(
                    got[&format!("master/{}", param.name)] == want,
                    "stage {stage}: {}",
                    param.name
                );
            }
        }
    }
}

/// Gradients are also checked in bf16 and fp32: a NaN norm must not be masked.
#[test]
fn nan_in_any_dtype_is_skipped() {
    for dtype in [DType::F32, DType::Bf16] {
        let case = Case {
            dtype,
            steps: 2,
            ..Case::default()
        };
        let mut workload = case.tiny();
        let ModelConfig::Gpt2(config) = &mut workload.config else {
            panic!("the default is a GPT-2");
        };
        config.layer_norm_epsilon = f32::MAX; // its square root is finite, but activations vanish
        let fine = case.run(&workload);
        assert!(fine.steps.iter().all(|s| !s.skipped));
        let case =
            case.with(|case| case.optimizer = OptimizerConfig::default().lr(f64::from(f32::MAX)));
        let outcome = Case { steps: 4, ..case }.run_tiny();
        assert!(
            outcome.steps.last().unwrap().skipped,
            "{dtype}: weights blew up, and the step after is skipped"
        );
    }
}

/// Under a static loss scale weights that are not finite stay so: the run ends and keeps the last
/// good checkpoint.
#[test]
fn lost_weights_end_the_run_and_keep_checkpoints() {
    let optimizer = OptimizerConfig::default().lr(f64::from(f32::MAX));
    let case = Case {
        ranks: 1,
        steps: 1000,
        optimizer,
        ..Case::default()
    };

    let dir = tempfile::tempdir().unwrap();
    let save = RunOptions {
        checkpoint: Some((dir.path().to_owned(), 1)),
        keep_last: Some(1),
        ..case.options(None)
    };

    let mut steps = 0;
    let settings = case.settings();
    let mut observe = |metrics: &StepMetrics| {
        steps = metrics.step;
        Ok(())
    };

    let error = run_on_threads(1, 1, &settings, &case.tiny(), &save, &mut observe)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains(&format!("step {steps}: 100 steps in a row were skipped")),
        "{error}"
    );
    let newest = Reader::open(dir.path()).unwrap().manifest().step;
    assert_eq!(newest, steps - 100, "the last step that was not skipped");
}
