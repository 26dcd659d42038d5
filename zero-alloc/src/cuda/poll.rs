//! Waits for a device without blocking in the driver.
//!
//! A call that blocks in the driver has no limit, and may hold locks that another rank of the
//! process needs. So the host polls: first continuously, then with increasing sleeps.

use std::time::{Duration, Instant};

use super::host_wait;
use crate::TimeLimit;
use crate::device::DeviceError;

/// The time during which the host polls without sleeping.
const SPIN: Duration = Duration::from_micros(50);
const LEAST_SLEEP: Duration = Duration::from_micros(10);
/// The host notices the end of a step's work, and enqueues more, at most this much later.
const MOST_SLEEP: Duration = Duration::from_micros(100);

/// The limit of a wait.
#[derive(Debug)]
pub(super) struct Deadline(TimeLimit);

impl Deadline {
    pub(super) fn after(limit: Duration) -> Self {
        Self(TimeLimit::new(limit))
    }

    /// Polls `ready` until it returns true.
    ///
    /// # Errors
    /// `ready` failed, or [`DeviceError::TimedOut`] with the text of `what`.
    pub(super) fn wait(
        &mut self,
        what: impl FnOnce() -> String,
        mut ready: impl FnMut() -> Result<bool, DeviceError>,
    ) -> Result<(), DeviceError> {
        let start = Instant::now();
        let mut sleep = LEAST_SLEEP;
        loop {
            host_wait::expire();
            // The clock is read first, so that readiness at the limit counts.
            let has_passed = self.0.has_passed();
            if ready()? {
                return Ok(());
            }
            if has_passed {
                return Err(DeviceError::TimedOut {
                    what: what(),
                    limit: self.0.limit(),
                });
            }
            if start.elapsed() < SPIN {
                std::hint::spin_loop();
                continue;
            }
            std::thread::sleep(sleep.min(self.0.slice()));
            sleep = (sleep * 2).min(MOST_SLEEP);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_ends_when_ready() {
        let mut left = 5;
        let ready = || {
            left -= 1;
            Ok(left == 0)
        };
        assert_eq!(
            Deadline::after(Duration::MAX).wait(|| "five".into(), ready),
            Ok(())
        );
        assert_eq!(left, 0);
        // Also with a limit of zero.
        assert_eq!(
            Deadline::after(Duration::ZERO).wait(|| "now".into(), || Ok(true)),
            Ok(())
        );
    }

    #[test]
    fn expired_limit_and_failure_are_errors() {
        let limit = Duration::from_millis(2);
        let late = Deadline::after(limit).wait(|| "rank 3".into(), || Ok(false));
        assert_eq!(
            late,
            Err(DeviceError::TimedOut {
                what: "rank 3".into(),
                limit
            })
        );
        let failure = DeviceError::Closed { stream: "a".into() };
        let failed = Deadline::after(limit).wait(|| "rank 3".into(), || Err(failure.clone()));
        assert_eq!(failed, Err(failure));
    }
}
