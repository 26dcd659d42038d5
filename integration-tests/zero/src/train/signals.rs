//! SIGINT, SIGTERM, SIGHUP, and SIGUSR1, with which clusters warn before a time limit. The first
//! ends the run after the current step, or at the next micro-batch of an evaluation, with a
//! checkpoint; the second ends the process at once.
//!
//! A signal that is ignored when the program starts stays ignored: nohup ignores SIGHUP, and a
//! shell without job control ignores SIGINT in what it runs in the background.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator;
use zero_trainer::{RankSummary, RunOptions};

use super::launched::is_under_open_mpi;
use crate::error::CliError;
use crate::launcher::Report;
use crate::output::print_note;

/// The signals that end a run.
const ENDING: [i32; 4] = [SIGHUP, SIGINT, SIGTERM, SIGUSR1];

/// The signals that this process received since the start of the run.
pub(crate) struct Signals {
    /// Whether there was one.
    received: Arc<AtomicBool>,
    /// The last one; 0 before.
    last: Arc<AtomicUsize>,
    /// Those that end the run.
    ending: Vec<i32>,
}

impl Signals {
    /// Starts to handle signals.
    pub(crate) fn handle() -> Result<Self, CliError> {
        let signals = Self {
            received: Arc::default(),
            last: Arc::default(),
            ending: ending(),
        };
        for signal in &signals.ending {
            signals.register(*signal).map_err(not_handled)?;
        }
        // A write beyond the limit of a file's size (ulimit -f) then returns an error, and does not
        // end the process.
        flag::register(SIGXFSZ, Arc::default()).map_err(not_handled)?;
        Ok(signals)
    }

    fn register(&self, signal: i32) -> std::io::Result<()> {
        // In this order, so that the first signal only sets the flag, and that the flag comes after
        // the number. A rank that the launcher started may receive a signal twice, from it and from
        // the system, and leaves the end to it.
        if !Report::is_expected() {
            flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&self.received))?;
        }
        flag::register_usize(signal, Arc::clone(&self.last), signal as usize)?;
        flag::register(signal, Arc::clone(&self.received))?;
        Ok(())
    }

    /// Lets a signal end the run of these options.
    pub(crate) fn end(&self, options: &mut RunOptions) {
        options.cancel = Arc::clone(&self.received);
        options.signal = Arc::clone(&self.last);
    }

    /// Prints a note at the first signal: until the run ends, a step and a save may take a while.
    pub(crate) fn announce(&self) -> Result<(), CliError> {
        let mut signals = iterator::Signals::new(&self.ending).map_err(not_handled)?;
        let announce = move || {
            if let Some(signal) = signals.forever().next() {
                print_note(announcement(signal));
            }
        };
        std::thread::Builder::new()
            .name("signals".to_owned())
            .spawn(announce)
            .map(drop)
            .map_err(not_handled)
    }
}

/// The note at the first signal. It promises no save where Open MPI may kill the ranks before, as
/// after every signal to mpirun but those that it only forwards.
fn announcement(signal: i32) -> &'static str {
    if signal != SIGUSR1 && is_under_open_mpi() {
        "interrupted: the run ends after this step and its save, unless mpirun kills it before, which a signal to mpirun \
         makes it do"
    } else {
        "interrupted: the run ends after this step and its save; a second signal ends it at once"
    }
}

/// The result of the ranks of this process, of which a signal may have ended the run early.
///
/// # Errors
/// [`CliError::Interrupted`], or an echo of another rank's failure, which ended the run.
pub(crate) fn ended(summaries: &[RankSummary]) -> Result<(), CliError> {
    let Some(ended) = summaries.iter().find(|summary| summary.cancelled) else {
        return Ok(());
    };
    Err(match ended.signal {
        Some(signal) => CliError::Interrupted { signal },
        None => CliError::Echo("another rank failed and ended the run after a save".to_owned()),
    })
}

/// The signals that this process receives from now on and that should end it.
///
/// # Errors
/// No handler can be installed.
pub(crate) fn received() -> Result<iterator::Signals, CliError> {
    iterator::Signals::new(ending()).map_err(not_handled)
}

/// The signals that end a run of this process: those of [`ENDING`] that are not ignored.
fn ending() -> Vec<i32> {
    let handled = ENDING.into_iter().filter(|signal| !is_ignored(*signal));
    handled.collect()
}

fn is_ignored(signal: i32) -> bool {
    // SAFETY: a structure of integers and of a pointer that may be null.
    let mut now: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: without a new action the call only writes the current one.
    let result = unsafe { libc::sigaction(signal, std::ptr::null(), &mut now) };
    result == 0 && now.sa_sigaction == libc::SIG_IGN
}

/// The error of a handler that could not be installed.
fn not_handled(error: std::io::Error) -> CliError {
    failure!("failed to install a signal handler: {error}")
}
