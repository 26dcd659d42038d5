//! The process of a rank, which ends with this one.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use super::output::Prefixed;

/// A running rank. Dropping it kills its process group.
pub(super) struct Rank {
    pub(super) number: usize,
    group: ProcessGroup,
}

/// A process with its own process group, which the system kills when this process ends. Dropping it
/// kills the group.
pub(crate) struct ProcessGroup {
    child: Child,
    ended: bool,
}

impl Rank {
    pub(super) fn start(
        program: &Path,
        args: &[OsString],
        number: usize,
        variables: &[(String, String)],
        output: &Prefixed,
    ) -> io::Result<Self> {
        let mut command = Command::new(program);
        command
            .args(args)
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null());
        if number > 0 {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        let mut group = ProcessGroup::start(&mut command)?;
        let child = &mut group.child;
        if let (Some(out), Some(err)) = (child.stdout.take(), child.stderr.take()) {
            output.follow(number, out, err)?;
        }
        Ok(Self { number, group })
    }

    /// Sends a signal to the process group.
    pub(super) fn signal(&self, signal: Signal) {
        self.group.signal(signal);
    }

    /// The exit status, if it has ended.
    pub(super) fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        self.group.ended()
    }
}

impl ProcessGroup {
    /// Starts the process.
    pub(crate) fn start(command: &mut Command) -> io::Result<Self> {
        // With its own group it does not receive the terminal's signals, and all its descendants
        // can be killed.
        command.process_group(0);
        end_with_this_process(command);
        let child = command.spawn()?;
        Ok(Self {
            child,
            ended: false,
        })
    }

    /// Sends a signal to the group.
    fn signal(&self, signal: Signal) {
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw)
            && !self.ended
        {
            // Fails if the group has ended already.
            let _ = kill_process_group(pid, signal);
        }
    }

    /// Asks the group to end, and waits for the process, at most `limit`. Dropping kills what is left.
    pub(crate) fn end(&mut self, limit: Duration) {
        self.signal(Signal::TERM);
        let begun = Instant::now();
        while matches!(self.ended(), Ok(None)) && begun.elapsed() < limit {
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The exit status, if it has ended.
    pub(crate) fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        let status = self.child.try_wait()?;
        self.ended = status.is_some();
        Ok(status)
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if !self.ended {
            self.signal(Signal::KILL);
            let _ = self.child.wait();
        }
    }
}

/// Makes the system kill the child when the thread that starts it ends, for any reason.
#[cfg(target_os = "linux")]
fn end_with_this_process(command: &mut Command) {
    use rustix::process::{getpid, getppid, set_parent_process_death_signal};

    let parent = getpid();
    let before = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // If the parent ended before the call above, the signal will never be sent.
        if getppid() == Some(parent) {
            Ok(())
        } else {
            Err(io::Error::other("the launcher has ended"))
        }
    };
    // SAFETY: between fork and exec the closure makes two async-signal-safe system calls. It
    // allocates only for an error, after which the child exits.
    unsafe { command.pre_exec(before) };
}

#[cfg(not(target_os = "linux"))]
fn end_with_this_process(_command: &mut Command) {}
