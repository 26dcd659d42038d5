//! SIGINT, SIGTERM and SIGHUP. The first ends the run after the current step, or at the next
//! micro-batch of an evaluation, with a checkpoint; the second ends the process at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;

use crate::error::CliError;
use crate::launcher::Report;
use crate::output::print_note;

/// The signals that end a run.
pub(crate) const ENDING: [i32; 3] = [SIGHUP, SIGINT, SIGTERM];

/// The signals that this process received since the start of the run.
#[derive(Default)]
pub(crate) struct Signals {
    /// Whether there was one.
    pub(crate) received: Arc<AtomicBool>,
    /// The last one; 0 before.
    last: Arc<AtomicUsize>,
}

impl Signals {
    /// Starts to handle signals.
    pub(crate) fn handle() -> Result<Self, CliError> {
        let signals = Self::default();
        for signal in ENDING {
            signals.register(signal).map_err(not_handled)?;
        }
        // A write beyond the limit of a file's size (ulimit -f) then returns an error, and does not
        // end the process.
        flag::register(SIGXFSZ, Arc::default()).map_err(not_handled)?;
        Ok(signals)
    }

    fn register(&self, signal: i32) -> std::io::Result<()> {
        // In this order, so that the first signal only sets the flag. A rank that the launcher
        // started may receive a signal twice, from it and from the system, and leaves the end to
        // it.
        if !Report::is_expected() {
            flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&self.received))?;
        }
        flag::register(signal, Arc::clone(&self.received))?;
        flag::register_usize(signal, Arc::clone(&self.last), signal as usize)?;
        Ok(())
    }

    /// Prints a note at the first signal: until the run ends, a step and a save may take a while.
    pub(crate) fn announce(&self) -> Result<(), CliError> {
        let mut signals = signal_hook::iterator::Signals::new(ENDING).map_err(not_handled)?;
        let announce = move || {
            if signals.forever().next().is_some() {
                print_note(
                    "interrupted: the run ends after this step and its save; a second signal ends it at once",
                );
            }
        };
        std::thread::Builder::new()
            .name("signals".to_owned())
            .spawn(announce)
            .map(drop)
            .map_err(not_handled)
    }

    /// The end of a run that a signal ended early. The signal may have reached only another rank.
    pub(crate) fn interruption(&self) -> CliError {
        let last = i32::try_from(self.last.load(Ordering::Relaxed)).unwrap_or(0);
        CliError::Interrupted {
            signal: if last == 0 { SIGINT } else { last },
        }
    }
}

/// The error of a handler that could not be installed.
pub(crate) fn not_handled(error: std::io::Error) -> CliError {
    CliError::Failure(format!("failed to install a signal handler: {error}"))
}
