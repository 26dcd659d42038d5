//! Starts one process a rank, each this program again.

use std::time::Duration;

use super::resume::Resumed;
use super::signals;
use crate::error::CliError;
use crate::launcher::{Job, JobError};

/// Time for the other ranks to detect that one has failed.
const GRACE: Duration = Duration::from_secs(10);

/// Starts `ranks` ranks with these variables besides torchrun's, and waits for them.
///
/// # Errors
/// The first failure that no other rank caused, or a signal.
pub(crate) fn start_ranks(
    ranks: usize,
    variables: impl IntoIterator<Item = (String, String)>,
    resumed: Option<&Resumed>,
) -> Result<(), CliError> {
    let program = std::env::current_exe()
        .map_err(|e| failure!("failed to determine the path of this executable: {e}"))?;
    let resumed = resumed.map(Resumed::variable);
    let job = Job {
        ranks,
        program,
        args: std::env::args_os().skip(1).collect(),
        variables: variables.into_iter().chain(resumed).collect(),
        grace: GRACE,
    };

    let mut received = signals::received()?;
    job.run(&mut || received.pending().next())
        .map_err(|error| match &error {
            JobError::Interrupted { signal } => CliError::Interrupted { signal: *signal },
            JobError::Reported { report, .. } if report.code == 2 => CliError::usage(&error),
            _ => CliError::failure(error),
        })
}
