//! A rank that fails ends the run on all ranks, with an error that names it.

use crate::support::Case;
use crate::toy::Toy;

#[test]
fn a_panic_in_one_rank_ends_the_run_and_names_the_rank() {
    for stage in 0..4 {
        for ranks in [1, 4] {
            for panic_at in [0, 2] {
                let mut toy = Toy::new(&[vec![40], vec![7], vec![100]], true);
                toy.panic_at = Some(panic_at);
                let error = match (Case { stage, ranks, ..Case::default() }).try_run(&toy) {
                    Ok(_) => panic!("stage {stage}, {ranks} ranks: the run went on"),
                    Err(error) => error.to_string(),
                };
                assert!(error.contains("rank 0"), "stage {stage}, {ranks} ranks: {error}");
                assert!(error.contains("told to panic"), "stage {stage}, {ranks} ranks: {error}");
            }
        }
    }
}
