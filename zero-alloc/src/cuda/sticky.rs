//! How failures stick to streams and spread by waits.
//!
//! A failure of the device itself the driver repeats to everyone. Failures that the driver knows nothing of (a launch
//! that it refused, a host operation, a collective that was aborted) are kept here: the first of a stream counts,
//! from the position at which the failed operation was enqueued, and what waits for a later position of that stream
//! fails too.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::device::DeviceError;

/// The failure of one stream. What is enqueued has a position: a number that rises.
#[derive(Debug, Default)]
pub(super) struct Sticky {
    next: AtomicU64,
    /// The position of the first failed operation, and why it failed.
    first: OnceLock<(u64, DeviceError)>,
    waiting: Mutex<Vec<Waiting>>,
}

/// A stream that waits for another.
#[derive(Debug)]
struct Waiting {
    stream: Weak<Sticky>,
    /// The last position waited for.
    until: u64,
    /// Where in the waiting stream the first wait is.
    from: u64,
}

impl Sticky {
    /// The position of what is enqueued now.
    pub(super) fn position(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// The failure of the stream, if there is one.
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        self.check_before(u64::MAX)
    }

    /// The failure that stopped the stream before `position`.
    pub(super) fn check_before(&self, position: u64) -> Result<(), DeviceError> {
        match self.first.get() {
            Some((at, error)) if *at <= position => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// Notes that `op`, enqueued at `position`, failed; gives the stream's first failure. A limit that passed is no
    /// failure of the stream.
    pub(super) fn fail(&self, stream: &str, op: &str, position: u64, error: DeviceError) -> DeviceError {
        let named = named(stream, op, error);
        if !matches!(named, DeviceError::TimedOut { .. }) {
            self.adopt(position, &named);
            return self.check().err().unwrap_or(named);
        }
        named
    }

    fn adopt(&self, position: u64, error: &DeviceError) {
        if self.first.set((position, error.clone())).is_ok() {
            self.spread();
        }
    }

    /// `later` waits for `position` of this stream, from its own position `from` on.
    pub(super) fn is_waited_for(&self, position: u64, later: &Arc<Self>, from: u64) {
        let mut waiting = self.waiting.lock();
        waiting.retain(|w| w.stream.strong_count() > 0);
        match waiting.iter_mut().find(|w| w.stream.as_ptr() == Arc::as_ptr(later)) {
            Some(known) => known.until = known.until.max(position),
            None => waiting.push(Waiting { stream: Arc::downgrade(later), until: position, from }),
        }
        drop(waiting);
        // It may have failed already.
        self.spread();
    }

    fn spread(&self) {
        let Some((at, error)) = self.first.get() else { return };
        let waiting: Vec<_> = {
            let waiting = self.waiting.lock();
            let behind = waiting.iter().filter(|w| w.until >= *at);
            behind.filter_map(|w| Some((w.stream.upgrade()?, w.from))).collect()
        };
        // Streams that wait for each other end this: a stream fails once.
        for (stream, from) in waiting {
            stream.adopt(from, error);
        }
    }
}

/// The error with the names of the stream and the operation, where it has none yet.
pub(super) fn named(stream: &str, op: &str, error: DeviceError) -> DeviceError {
    match error {
        DeviceError::TimedOut { .. } | DeviceError::Operation { .. } | DeviceError::Panicked { .. } => error,
        error => DeviceError::Operation { stream: stream.into(), op: op.into(), message: error.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(what: &str) -> DeviceError {
        DeviceError::Operation { stream: "a".into(), op: what.into(), message: "no".into() }
    }

    #[test]
    fn the_first_failure_counts_from_its_position() {
        let sticky = Sticky::default();
        let (before, op, after) = (sticky.position(), sticky.position(), sticky.position());
        let no = DeviceError::Driver { call: "cuLaunchKernel", message: "no".into() };
        let named = sticky.fail("a", "adam", op, no.clone());
        let expected =
            DeviceError::Operation { stream: "a".into(), op: "adam".into(), message: "cuLaunchKernel: no".into() };
        assert_eq!(named, expected);
        assert_eq!(sticky.fail("a", "later", after, no), expected);
        assert_eq!(sticky.check_before(before), Ok(()));
        assert_eq!((sticky.check_before(after), sticky.check()), (Err(expected.clone()), Err(expected)));
    }

    #[test]
    fn a_limit_that_passes_is_no_failure_of_the_stream() {
        let sticky = Sticky::default();
        let late = DeviceError::TimedOut { what: "upload".into(), limit: std::time::Duration::ZERO };
        assert_eq!(sticky.fail("a", "upload", 0, late.clone()), late);
        assert_eq!(sticky.check(), Ok(()));
    }

    #[test]
    fn a_failure_spreads_to_what_waits_for_it_and_through_that() {
        let [a, b, c, other] = [(); 4].map(|()| Arc::new(Sticky::default()));
        let (early, op, late) = (a.position(), a.position(), a.position());
        a.is_waited_for(early, &other, other.position());
        let b_before = b.position();
        a.is_waited_for(late, &b, b.position());
        b.is_waited_for(b.position(), &c, c.position());
        // A ring: it must end.
        c.is_waited_for(c.position(), &a, a.position());
        a.adopt(op, &failure("adam"));
        assert_eq!((b.check(), c.check()), (Err(failure("adam")), Err(failure("adam"))));
        assert_eq!((b.check_before(b_before), other.check()), (Ok(()), Ok(())));
        // Whoever waits afterwards learns it at once.
        let late_comer = Arc::new(Sticky::default());
        a.is_waited_for(late, &late_comer, 0);
        assert_eq!(late_comer.check(), Err(failure("adam")));
    }
}
