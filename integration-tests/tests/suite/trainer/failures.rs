//! A rank that fails ends the run on all ranks, with an error that names it.

use zero_trainer::{Settings, StepMetrics, run_on_threads};

use super::support::Case;
use super::toy::Toy;

#[test]
fn host_device_refuses_graphs() {
    let case = Case {
        ranks: 1,
        stage: 2,
        ..Case::default()
    };
    let settings = Settings {
        graphs: true,
        ..case.settings()
    };
    let options = case.options(None);
    let toy = Toy::new(&[vec![40]], false);
    let error = run_on_threads(1, 1, &settings, &toy, &options, &mut |_: &StepMetrics| {
        Ok(())
    })
    .unwrap_err();
    assert!(error.to_string().contains("--device cuda"), "{error}");
}

/// Asserts that a panic on rank 0 ends the run on all ranks, with an error that names it.
pub(super) fn death_ends_all(case: &Case) {
    for panic_at in [0, 2] {
        let mut toy = Toy::new(&[vec![40], vec![7], vec![100]], true);
        toy.panic_at = Some(panic_at);
        let error = case.refusal_of(&toy);
        assert!(
            error.contains("rank 0") && error.contains("panic requested"),
            "{case:?}: {error}"
        );
    }
}

#[test]
fn panic_ends_the_run_and_names_the_rank() {
    for stage in 0..4 {
        for ranks in [1, 4] {
            death_ends_all(&Case {
                stage,
                ranks,
                ..Case::default()
            });
        }
    }
}
