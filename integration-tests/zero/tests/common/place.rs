//! The program `zero`: that of the build or, on a machine without Rust, the one in `PATH`.

use std::path::Path;
use std::process::Command;
use std::sync::Once;

pub(crate) use integration_tests::data;

/// The program `zero`.
pub(crate) fn zero() -> Command {
    default_signals();
    let built = Path::new(env!("CARGO_BIN_EXE_zero"));
    let program = if built.exists() {
        built
    } else {
        Path::new("zero")
    };
    Command::new(program)
}

/// Gives the signals that end a run their default action in this process, and so in those that it
/// starts. Tests that run in the background, or under nohup, begin with ignored ones, which a run
/// would leave ignored.
pub(crate) fn default_signals() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM, libc::SIGUSR1] {
            // SAFETY: the default action calls no function of this process.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
    });
}
