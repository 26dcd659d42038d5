//! The commands of the program that this crate is a part of, for the remedies in its messages.

use std::sync::OnceLock;

const ASSEMBLE: &str = "zero_ckpt::assemble";
const ASSEMBLE_STEP: &str = "zero_ckpt::assemble_step";
const RESOLVE: &str = "zero_ckpt::resolve";

/// Commands and options of a program, for the remedies in errors and notices.
///
/// The default names the functions of this crate.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
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

impl Default for Commands {
    fn default() -> Self {
        Self {
            assemble: ASSEMBLE,
            assemble_step: ASSEMBLE_STEP,
            resume: RESOLVE,
            keep_last: "StoreOptions::keep_last",
        }
    }
}

zero_shard::setters!(Commands {
    assemble: &'static str,
    assemble_step: &'static str,
    resume: &'static str,
    keep_last: &'static str,
});

static COMMANDS: OnceLock<Commands> = OnceLock::new();

/// Sets the commands of this process, which its messages then name. The first call counts.
pub fn name_commands(commands: Commands) {
    let _ = COMMANDS.set(commands);
}

/// The commands of this process.
pub(crate) fn commands() -> Commands {
    COMMANDS.get().copied().unwrap_or_default()
}

impl Commands {
    /// The command that assembles, and the function that it calls.
    pub(crate) fn assemble_text(&self) -> String {
        with_function(self.assemble, "", ASSEMBLE)
    }

    /// The command that assembles the save of `step`, and the function that it calls.
    pub(crate) fn assemble_step_text(&self, step: u64) -> String {
        with_function(self.assemble_step, &step.to_string(), ASSEMBLE_STEP)
    }

    /// The command that assembles into and from folders.
    pub(crate) fn assemble_folders_text(&self, folders: &str) -> String {
        with_arguments(self.assemble, folders, ASSEMBLE)
    }

    /// The command that resumes, and the function that it calls.
    pub(crate) fn resume_text(&self) -> String {
        with_function(self.resume, "", RESOLVE)
    }
}

/// A command with its arguments, and the function of this crate that it calls.
fn with_function(command: &str, arguments: &str, function: &str) -> String {
    let text = with_arguments(command, arguments, function);
    if command == function {
        text
    } else {
        format!("{text} ({function})")
    }
}

/// A command with its arguments, which are no part of the name of a `function`.
fn with_arguments(command: &str, arguments: &str, function: &str) -> String {
    if arguments.is_empty() {
        format!("`{command}`")
    } else if command == function {
        format!("`{command}` with `{arguments}`")
    } else {
        format!("`{command} {arguments}`")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(commands: Commands) -> [String; 4] {
        [
            commands.assemble_text(),
            commands.assemble_step_text(8),
            commands.assemble_folders_text("NEW d"),
            commands.resume_text(),
        ]
    }

    #[test]
    fn remedies_name_functions_or_commands() {
        assert_eq!(
            texts(Commands::default()),
            [
                "`zero_ckpt::assemble`",
                "`zero_ckpt::assemble_step` with `8`",
                "`zero_ckpt::assemble` with `NEW d`",
                "`zero_ckpt::resolve`",
            ]
        );
        let of_program = Commands::default()
            .assemble("zero ckpt assemble")
            .assemble_step("zero ckpt assemble --step")
            .resume("zero train --resume");
        assert_eq!(
            texts(of_program),
            [
                "`zero ckpt assemble` (zero_ckpt::assemble)",
                "`zero ckpt assemble --step 8` (zero_ckpt::assemble_step)",
                "`zero ckpt assemble NEW d`",
                "`zero train --resume` (zero_ckpt::resolve)",
            ]
        );
    }
}
