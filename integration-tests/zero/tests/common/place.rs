//! The program `zero`: that of the build or, on a machine without Rust, the one in `PATH`.

use std::path::Path;
use std::process::Command;

pub(crate) use integration_tests::data;

/// The program `zero`.
pub(crate) fn zero() -> Command {
    let built = Path::new(env!("CARGO_BIN_EXE_zero"));
    let program = if built.exists() {
        built
    } else {
        Path::new("zero")
    };
    Command::new(program)
}
