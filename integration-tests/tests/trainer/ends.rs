//! Runs that end when they should: at a request, and not before their last step.

use zero_optim::{LrSchedule, OptimizerConfig};

use crate::support::Case;
use crate::toy::Toy;

/// One that comes while the device is at work, however far ahead the host is.
#[test]
fn a_request_to_stop_ends_the_step_under_way_on_all_ranks() {
    for stage in 0..4 {
        let case = Case { stage, ranks: 3, steps: 6, ..Case::default() };
        let mut toy = Toy::new(&[vec![40], vec![7], vec![100]], true);
        toy.cancel = Some(case.cancel.clone());
        let outcome = case.run(&toy);
        let ended: Vec<_> = outcome.summaries.iter().map(|s| (s.step, s.cancelled)).collect();
        assert_eq!(ended, [(3, true); 3], "stage {stage}");
        assert_eq!(outcome.steps.len(), 3);
        // What was saved is step 3.
        let case = Case { resume: Some(outcome.dir.path().to_owned()), cancel: Default::default(), ..case };
        assert_eq!(case.run(&Toy::new(&[vec![40], vec![7], vec![100]], true)).summaries[0].resumed_at, 3);
    }
}

/// Learning rates lie on the device for 1024 steps at a time.
#[test]
fn a_run_of_more_steps_than_lie_ahead_goes_on() {
    let rules = OptimizerConfig {
        lr: 1e-3,
        schedule: LrSchedule::LinearWarmup { warmup_steps: 5000 },
        ..OptimizerConfig::default()
    };
    let case = Case { ranks: 1, stage: 2, steps: 1030, rules: rules.clone(), ..Case::default() };
    let outcome = case.run(&Toy::new(&[vec![40]], false));
    assert_eq!(outcome.steps.len(), 1030);
    for (position, step) in outcome.steps.iter().enumerate() {
        assert_eq!(step.lr, rules.schedule.lr(rules.lr, position as u64));
    }
    let [after_two, in_all] = outcome.summaries[0].backing_allocations;
    assert_eq!(after_two, in_all, "the pool took memory after the second step");
}
