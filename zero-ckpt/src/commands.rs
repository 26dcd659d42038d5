//! The commands of the program that this crate is a part of, for the remedies in its messages.

use std::sync::OnceLock;

/// Commands and options of a program, for the remedies in errors and notices.
///
/// The default names the functions of this crate.
#[derive(Clone, Copy, Debug)]
pub struct Commands {
    /// Makes a checkpoint of staged files, as [`assemble`](crate::assemble): followed by folders.
    pub assemble: &'static str,
    /// Makes one of a save of a step, as [`assemble_step`](crate::assemble_step): followed by the
    /// step.
    pub assemble_step: &'static str,
    /// Continues from the newest whole checkpoint, as [`resolve`](crate::resolve).
    pub resume: &'static str,
    /// The option for [`StoreOptions::keep_last`](crate::StoreOptions::keep_last).
    pub keep_last: &'static str,
}

static COMMANDS: OnceLock<Commands> = OnceLock::new();

/// Sets the commands of this process, which its messages then name. The first call counts.
pub fn name_commands(commands: Commands) {
    let _ = COMMANDS.set(commands);
}

/// A command as text, with the function of this crate that it calls.
pub(crate) fn with_function(command: &str, function: &str) -> String {
    if command == function {
        format!("`{command}`")
    } else {
        format!("`{command}` ({function})")
    }
}

/// The commands of this process.
pub(crate) fn commands() -> Commands {
    let of_crate = Commands {
        assemble: "zero_ckpt::assemble",
        assemble_step: "zero_ckpt::assemble_step",
        resume: "zero_ckpt::resolve",
        keep_last: "StoreOptions::keep_last",
    };
    COMMANDS.get().copied().unwrap_or(of_crate)
}
