//! The example `own_framework`.

#[path = "../../examples/own_framework.rs"]
#[allow(dead_code, reason = "its main function")]
mod example;

/// Two ranks sum bf16 gradients in another order than four: their losses differ by rounding.
#[test]
fn two_ranks_resume_what_four_saved() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [whole, parts] = dirs.each_ref().map(|dir| dir.path());
    let whole = example::on_ranks(4, whole, 0..40).unwrap();
    let first = example::on_ranks(4, parts, 0..20).unwrap();
    let rest = example::on_ranks(2, parts, 20..40).unwrap();
    assert_eq!(whole[..20], first);
    for (a, b) in whole[20..].iter().zip(&rest) {
        assert!((a - b).abs() < 0.02 * a, "{a} {b}");
    }
    assert!(whole[39] < whole[0] / 20.0, "{whole:?}");
}
