//! The examples `own_framework` and `own_framework_stage_3`.

#[path = "../../examples/own_framework/main.rs"]
#[allow(dead_code, reason = "its main function")]
#[allow(
    clippy::duplicate_mod,
    reason = "both programs load the same framework"
)]
mod stage_2;

#[path = "../../examples/own_framework_stage_3.rs"]
#[allow(dead_code, reason = "its main function")]
#[allow(
    clippy::duplicate_mod,
    reason = "both programs load the same framework"
)]
mod stage_3;

/// Two ranks sum bf16 gradients in another order than four: their losses differ by rounding.
#[test]
fn two_ranks_resume_what_four_saved() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [whole, parts] = dirs.each_ref().map(|dir| dir.path());
    let whole = stage_2::on_ranks(4, whole, 0..40).unwrap();
    let first = stage_2::on_ranks(4, parts, 0..20).unwrap();
    let rest = stage_3::on_ranks(2, parts, 20..40).unwrap();
    assert_eq!(whole[..20], first);
    for (a, b) in whole[20..].iter().zip(&rest) {
        assert!((a - b).abs() < 0.02 * a, "{a} {b}");
    }
    assert!(whole[39] < whole[0] / 10.0, "{whole:?}");
}

#[test]
fn both_stages_have_the_same_losses() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let two = stage_2::on_ranks(3, dirs[0].path(), 0..10).unwrap();
    assert_eq!(two, stage_3::on_ranks(3, dirs[1].path(), 0..10).unwrap());
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

/// The number that zero-optim's guide gives.
#[test]
fn glue_has_one_unsafe_block() {
    let two = include_str!("../../examples/own_framework/main.rs");
    let three = include_str!("../../examples/own_framework_stage_3.rs");
    assert_eq!([unsafe_blocks(two), unsafe_blocks(three)], [1, 1]);
}
