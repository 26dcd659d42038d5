//! A rank's process: started so that it ends with this one.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process_group};

use super::Job;
use super::output::Prefixed;

/// A running rank; dropping it kills it and what it has started.
pub(super) struct Rank {
    pub(super) number: usize,
    child: Child,
    ended: bool,
}

impl Rank {
    pub(super) fn start(
        job: &Job,
        number: usize,
        variables: &[(String, String)],
        output: &Prefixed,
    ) -> io::Result<Self> {
        let mut command = Command::new(&job.program);
        command.args(&job.args).envs(variables.iter().map(|(name, value)| (name, value))).stdin(Stdio::null());
        // In a group of its own: the terminal's signals come by this program only, and all of it can be killed at once.
        command.process_group(0);
        end_with_this_process(&mut command);
        if number > 0 {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        let mut child = command.spawn()?;
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let rank = Self { number, child, ended: false };
        if let (Some(out), Some(err)) = (out, err) {
            output.follow(number, out, err)?;
        }
        Ok(rank)
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw)
            && !self.ended
        {
            // It may have ended by itself meanwhile.
            let _ = kill_process_group(pid, signal);
        }
    }

    /// Asks it to end.
    pub(super) fn interrupt(&self) {
        self.signal(Signal::INT);
    }

    /// How it ended, if it has.
    pub(super) fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        let status = self.child.try_wait()?;
        self.ended = status.is_some();
        Ok(status)
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        if !self.ended {
            self.signal(Signal::KILL);
            let _ = self.child.wait();
        }
    }
}

/// The system kills the process when this one's thread that starts it ends, however it ends.
#[cfg(target_os = "linux")]
fn end_with_this_process(command: &mut Command) {
    use rustix::process::{getpid, getppid, set_parent_process_death_signal};

    let parent = getpid();
    let before = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // It may have ended just before: then nobody would send the signal.
        if getppid() == Some(parent) { Ok(()) } else { Err(io::Error::other("the launcher has ended")) }
    };
    // SAFETY: between fork and exec it makes two system calls, and allocates nothing but on the way to an error that
    // ends the process.
    unsafe { command.pre_exec(before) };
}

#[cfg(not(target_os = "linux"))]
fn end_with_this_process(_command: &mut Command) {}
