//! A small run of `control_plane`, which checks its counts. Nothing here depends on time.

use std::process::Command;

#[test]
fn control_plane_counts() {
    // 64 ranks, 5 steps of 100 calls and 50 ms.
    let output = Command::new(env!("CARGO_BIN_EXE_control_plane"))
        .args(["64", "5", "100", "50"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(
        table
            .lines()
            .nth(2)
            .is_some_and(|row| row.starts_with("| 64 |")),
        "{table}"
    );
}
