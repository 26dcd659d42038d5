//! Sticky failures of streams, which spread by waits.
//!
//! The driver reports a failure of the device to every later call. Failures unknown to the driver
//! (a refused launch, a host operation, an aborted collective) are kept here: a stream keeps its
//! first failure and the position at which the failed operation was enqueued, and streams that wait
//! for a later position of it fail too.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::device::DeviceError;

/// The failure of one stream. Each enqueued operation has a position, an increasing number.
#[derive(Debug, Default)]
pub(super) struct Sticky {
    next: AtomicU64,
    /// The position of the first failed operation, and its error.
    first: OnceLock<(u64, DeviceError)>,
    waiting: Mutex<Vec<Waiting>>,
}

/// A stream that waits for another.
#[derive(Debug)]
struct Waiting {
    stream: Weak<Sticky>,
    /// The last position that it waits for.
    until: u64,
    /// The position of the first wait in the waiting stream.
    from: u64,
}

impl Sticky {
    /// The position of the next operation.
    pub(super) fn position(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the failure of the stream, if any.
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        self.check_before(u64::MAX)
    }

    /// Returns the failure that stopped the stream before `position`, if any.
    pub(super) fn check_before(&self, position: u64) -> Result<(), DeviceError> {
        match self.first.get() {
            Some((at, error)) if *at <= position => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// Records that `op`, enqueued at `position`, failed, and returns the stream's first failure.
    /// An expired limit is not a failure of the stream.
    pub(super) fn fail(
        &self,
        stream: &str,
        op: &str,
        position: u64,
        error: DeviceError,
    ) -> DeviceError {
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

    /// Records that the stream `later` waits, from its position `from` on, for `position` of this
    /// stream.
    pub(super) fn is_waited_for(&self, position: u64, later: &Arc<Self>, from: u64) {
        let mut waiting = self.waiting.lock();
        waiting.retain(|w| w.stream.strong_count() > 0);
        match waiting
            .iter_mut()
            .find(|w| w.stream.as_ptr() == Arc::as_ptr(later))
        {
            Some(known) => known.until = known.until.max(position),
            None => waiting.push(Waiting {
                stream: Arc::downgrade(later),
                until: position,
                from,
            }),
        }
        drop(waiting);
        // This stream may have failed already.
        self.spread();
    }

    fn spread(&self) {
        let Some((at, error)) = self.first.get() else {
            return;
        };
        let waiting: Vec<_> = {
            let waiting = self.waiting.lock();
            let behind = waiting.iter().filter(|w| w.until >= *at);
            behind
                .filter_map(|w| Some((w.stream.upgrade()?, w.from)))
                .collect()
        };
        // This ends also if streams wait for each other, because a stream fails only once.
        for (stream, from) in waiting {
            stream.adopt(from, error);
        }
    }
}

/// Adds the names of the stream and the operation, except to an expired limit.
pub(super) fn named(stream: &str, op: &str, error: DeviceError) -> DeviceError {
    if matches!(error, DeviceError::TimedOut { .. }) {
        error
    } else {
        error.in_operation(stream, op)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(what: &str) -> DeviceError {
        DeviceError::Operation {
            stream: "a".into(),
            op: what.into(),
            cause: "no".into(),
        }
    }

    #[test]
    fn first_failure_counts_from_its_position() {
        let sticky = Sticky::default();
        let before = sticky.position();
        let op = sticky.position();
        let after = sticky.position();
        let no = DeviceError::Driver {
            call: "cuLaunchKernel",
            message: "no".into(),
        };

        let named = sticky.fail("a", "adam", op, no.clone());
        let expected = DeviceError::Operation {
            stream: "a".into(),
            op: "adam".into(),
            cause: "cuLaunchKernel: no".into(),
        };

        assert_eq!(named, expected);
        assert_eq!(sticky.fail("a", "later", after, no), expected);
        assert_eq!(sticky.check_before(before), Ok(()));
        assert_eq!(
            (sticky.check_before(after), sticky.check()),
            (Err(expected.clone()), Err(expected))
        );
    }

    #[test]
    fn expired_limit_does_not_poison() {
        let sticky = Sticky::default();
        let late = DeviceError::TimedOut {
            what: "upload".into(),
            limit: std::time::Duration::ZERO,
        };
        assert_eq!(sticky.fail("a", "upload", 0, late.clone()), late);
        assert_eq!(sticky.check(), Ok(()));
    }

    #[test]
    fn failure_spreads_through_waits() {
        let [a, b, c, other] = [(); 4].map(|()| Arc::new(Sticky::default()));
        let early = a.position();
        let op = a.position();
        let late = a.position();
        a.is_waited_for(early, &other, other.position());
        let b_before = b.position();
        a.is_waited_for(late, &b, b.position());
        b.is_waited_for(b.position(), &c, c.position());
        // A cycle of waits.
        c.is_waited_for(c.position(), &a, a.position());
        a.adopt(op, &failure("adam"));
        assert_eq!(
            (b.check(), c.check()),
            (Err(failure("adam")), Err(failure("adam")))
        );
        assert_eq!((b.check_before(b_before), other.check()), (Ok(()), Ok(())));
        // A stream that waits afterwards fails at once.
        let latecomer = Arc::new(Sticky::default());
        a.is_waited_for(late, &latecomer, 0);
        assert_eq!(latecomer.check(), Err(failure("adam")));
    }
}
