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

#[test]
fn panic_ends_the_run_and_names_the_rank() {
    for stage in 0..4 {
        for ranks in [1, 4] {
            for panic_at in [0, 2] {
                let mut toy = Toy::new(&[vec![40], vec![7], vec![100]], true);
                toy.panic_at = Some(panic_at);
                let error = match (Case {
                    stage,
                    ranks,
                    ..Case::default()
                })
                .try_run(&toy)
                {
                    Ok(_) => panic!("stage {stage}, {ranks} ranks: the run went on"),
                    Err(error) => error.to_string(),
                };
                assert!(
                    error.contains("rank 0"),
                    "stage {stage}, {ranks} ranks: {error}"
                );
                assert!(
                    error.contains("panic requested"),
                    "stage {stage}, {ranks} ranks: {error}"
                );
            }
        }
    }
}
