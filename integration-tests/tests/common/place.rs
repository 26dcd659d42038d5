//! The paths of the tests' data and of `zero`: those of the build or, on a machine without Rust,
//! below the current folder (the repository's root) and in `PATH`.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A file of tests/data/gpt2-tiny (see tests/data/README.md).
#[allow(dead_code, reason = "not every test program reads them")]
pub(crate) fn data(name: &str) -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR"));
    let crate_root = if built.exists() {
        built
    } else {
        Path::new("integration-tests")
    };
    std::path::absolute(crate_root.join("tests/data/gpt2-tiny").join(name)).unwrap()
}

/// The program `zero`.
#[allow(dead_code, reason = "not every test program starts it")]
pub(crate) fn zero() -> Command {
    let built = Path::new(env!("CARGO_BIN_EXE_zero"));
    Command::new(if built.exists() {
        built
    } else {
        Path::new("zero")
    })
}
