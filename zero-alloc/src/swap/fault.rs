//! Failures on request, for tests.

use parking_lot::Mutex;

/// How a request fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// With this errno, without reaching the disk.
    Errno(i32),
    /// It transfers at most this many bytes.
    Short(usize),
    /// It comes back, but only after the limit.
    Late,
    /// It never comes back.
    Never,
}

/// The faults to come: each with the number of requests before it.
#[derive(Debug, Default)]
pub(super) struct Faults(Mutex<Vec<(u64, Fault)>>);

impl Faults {
    pub(super) fn inject(&self, after: u64, fault: Fault) {
        self.0.lock().push((after, fault));
    }

    /// Counts a request; returns its fault.
    pub(super) fn next(&self) -> Option<Fault> {
        let mut faults = self.0.lock();
        let due = faults.iter().position(|(after, _)| *after == 0).map(|at| faults.swap_remove(at).1);
        faults.iter_mut().for_each(|(after, _)| *after = after.saturating_sub(1));
        due
    }
}
