//! The end of a run: at a request to stop, or at its last step.

use zero_optim::{LrSchedule, OptimizerConfig};

use super::support::Case;
use super::toy::Toy;
use super::volumes::memory_stays;

/// The request arrives while the device computes the step; the host has enqueued the rest of it.
#[test]
fn stop_request_ends_the_current_step_everywhere() {
    for stage in 0..4 {
        let case = Case {
            stage,
            ranks: 3,
            steps: 6,
            ..Case::default()
        };
        let mut toy = Toy::new(&[vec![40], vec![7], vec![100]], true);
        toy.cancel = Some(case.cancel.clone());
        let outcome = case.run(&toy);
        let ended: Vec<_> = outcome
            .summaries
            .iter()
            .map(|s| (s.step, s.cancelled))
            .collect();
        assert_eq!(ended, [(3, true); 3], "stage {stage}");
        assert_eq!(outcome.steps.len(), 3);
        // The checkpoint is that of step 3.
        let case = Case {
            resume: Some(outcome.dir.path().to_owned()),
            cancel: Default::default(),
            ..case
        };
        assert_eq!(
            case.run(&Toy::new(&[vec![40], vec![7], vec![100]], true))
                .summaries[0]
                .resumed_at,
            3
        );
    }
}

/// Learning rates are uploaded for 1024 steps at a time.
#[test]
fn run_outlasts_uploaded_learning_rates() {
    let optimizer = OptimizerConfig::default()
        .lr(1e-3)
        .schedule(LrSchedule::LinearWarmup { warmup_steps: 5000 });
    let case = Case {
        ranks: 1,
        stage: 2,
        steps: 1030,
        optimizer: optimizer.clone(),
        ..Case::default()
    };

    let outcome = case.run(&Toy::new(&[vec![40]], false));
    assert_eq!(outcome.steps.len(), 1030);
    for (position, step) in outcome.steps.iter().enumerate() {
        assert_eq!(
            step.lr,
            optimizer.schedule.lr(optimizer.lr, position as u64)
        );
    }

    memory_stays(&outcome.summaries[0], "1030 steps");
}
