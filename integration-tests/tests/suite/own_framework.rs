//! The examples `own_framework`, with the facade, and `own_framework_crates`, without it.

#[path = "../../examples/own_framework/main.rs"]
#[allow(dead_code, reason = "its main function")]
#[allow(
    clippy::duplicate_mod,
    reason = "both programs load the same framework"
)]
mod facade;

#[path = "../../examples/own_framework_crates.rs"]
#[allow(dead_code, reason = "its main function")]
#[allow(
    clippy::duplicate_mod,
    reason = "both programs load the same framework"
)]
mod crates;

use zero_shard::ZeroStage;

/// Two ranks sum bf16 gradients in another order than four: their losses differ by rounding.
#[test]
fn two_ranks_resume_what_four_saved() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [whole, parts] = dirs.each_ref().map(|dir| dir.path());
    let whole = facade::on_ranks(4, ZeroStage::Two, whole, 0..40).unwrap();
    let first = facade::on_ranks(4, ZeroStage::One, parts, 0..20).unwrap();
    let rest = crates::on_ranks(2, parts, 20..40).unwrap();
    assert_eq!(whole[..20], first);
    for (a, b) in whole[20..].iter().zip(&rest) {
        assert!((a - b).abs() < 0.02 * a, "{a} {b}");
    }
    assert!(whole[39] < whole[0] / 10.0, "{whole:?}");
    // A checkpoint of the crates loads in the facade.
    facade::on_ranks(3, ZeroStage::Three, parts, 40..42).unwrap();
}

/// The facade has the bits of the crates beneath it, at all stages.
#[test]
fn all_stages_have_the_same_losses() {
    let dir = || tempfile::tempdir().unwrap();
    let by_hand = crates::on_ranks(3, dir().path(), 0..10).unwrap();
    for stage in ZeroStage::ALL {
        let losses = facade::on_ranks(3, stage, dir().path(), 0..10).unwrap();
        assert_eq!(losses, by_hand, "stage {stage}");
    }
}

/// The `unsafe` blocks of a program, all of which are in its glue.
fn unsafe_blocks(program: &str) -> usize {
    let mut within = false;
    let mut blocks = 0;
    for line in program.lines().map(str::trim) {
        match line {
            "// end of glue" => within = false,
            _ if line.starts_with("// glue") => within = true,
            _ if line.starts_with("//") || !line.contains("unsafe") => {}
            _ => {
                assert!(within, "{line}");
                blocks += 1;
            }
        }
    }
    blocks
}

/// The numbers that zero-optim's guide gives.
#[test]
fn unsafe_blocks_of_the_glue() {
    let facade = include_str!("../../examples/own_framework/main.rs");
    let crates = include_str!("../../examples/own_framework_crates.rs");
    assert_eq!([unsafe_blocks(facade), unsafe_blocks(crates)], [0, 1]);
}
