//! Failures on request, for tests.

use parking_lot::Mutex;

use super::request::TransferRequest;

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
        let due = faults
            .iter()
            .position(|(after, _)| *after == 0)
            .map(|at| faults.swap_remove(at).1);
        faults
            .iter_mut()
            .for_each(|(after, _)| *after = after.saturating_sub(1));
        due
    }
}

/// The faults of the requests in flight.
#[derive(Default)]
pub(super) struct Injected {
    /// Requests that finish without reaching the disk.
    done: Vec<(usize, i32)>,
    /// Requests that never finish.
    never: Vec<usize>,
    /// Requests that finish after the limit.
    late: Vec<usize>,
}

impl Injected {
    /// The request to queue, if any.
    pub(super) fn apply(
        &mut self,
        fault: Option<Fault>,
        slot: usize,
        request: TransferRequest,
    ) -> Option<TransferRequest> {
        match fault {
            Some(Fault::Errno(errno)) => self.done.push((slot, -errno)),
            Some(Fault::Short(0)) => self.done.push((slot, 0)),
            Some(Fault::Short(bytes)) => {
                return Some(TransferRequest {
                    bytes: bytes.min(request.bytes),
                    ..request
                });
            }
            Some(Fault::Late) => self.late.push(slot),
            Some(Fault::Never) => self.never.push(slot),
            None => {}
        }
        (!matches!(fault, Some(Fault::Errno(_) | Fault::Short(0)))).then_some(request)
    }

    /// Whether there is something to do without waiting for the disk.
    pub(super) fn is_due(&self) -> bool {
        !self.done.is_empty() || !self.late.is_empty()
    }

    /// Changes what has finished.
    pub(super) fn finish(&mut self, done: &mut Vec<(usize, i32)>) {
        done.append(&mut self.done);
        done.retain(|(slot, _)| !self.never.contains(slot));
        self.done
            .extend(done.extract_if(.., |(slot, _)| self.late.contains(slot)));
    }

    /// Lets the limit pass, if a request is late; it may finish from now on.
    pub(super) fn pass_limit(&mut self) -> bool {
        !std::mem::take(&mut self.late).is_empty()
    }
}
