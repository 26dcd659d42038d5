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

/// Lines of code in glue, and the `unsafe` blocks in them.
fn glue(program: &str) -> [usize; 2] {
    let (mut within, mut lines, mut unsafe_blocks) = (false, 0, 0);
    for line in program.lines().map(str::trim) {
        match line {
            "// end of glue" => within = false,
            _ if line.starts_with("// glue") => within = true,
            _ if line.is_empty() || line.starts_with("//") => {}
            _ => {
                assert!(within || !line.contains("unsafe"), "{line}");
                lines += usize::from(within);
                unsafe_blocks += usize::from(line.contains("unsafe"));
            }
        }
    }
    [lines, unsafe_blocks]
}

/// The numbers that zero-optim's guide gives.
#[test]
fn glue_is_short() {
    let [two, three] = [
        include_str!("../../examples/own_framework/main.rs"),
        include_str!("../../examples/own_framework_stage_3.rs"),
    ];
    assert_eq!([glue(two), glue(three)], [[47, 1], [54, 1]]);
    assert!(
        [two, three]
            .iter()
            .all(|program| program.lines().count() <= 150)
    );
}
