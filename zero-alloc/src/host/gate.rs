//! The way in which operations of host streams wait for each other.
//!
//! A collective of the threads communicator blocks inside its operation until its peers arrive. It must do
//! that through a [`Gate`], and by no other lock that is held across a wait: then the seeded scheduler knows
//! that the operation is blocked and runs another stream, and the checker knows what is ordered behind what.

use std::time::{Duration, Instant};

use super::seeded::{self, Clock};
use crate::device::DeviceError;
use crate::primitive::{Condvar, Mutex};

/// A value that threads change and wait on.
#[derive(Debug, Default)]
pub struct Gate<T> {
    value: Mutex<Guarded<T>>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Guarded<T> {
    value: T,
    /// What those knew who changed it; only operations of the seeded scheduler leave something here.
    known: Option<Clock>,
}

impl<T> Gate<T> {
    /// A gate around `value`.
    #[cfg(not(loom))]
    pub const fn new(value: T) -> Self {
        Self { value: Mutex::new(Guarded { value, known: None }), changed: Condvar::new() }
    }

    /// A gate around `value`, in a model.
    #[cfg(loom)]
    pub fn new(value: T) -> Self {
        Self { value: Mutex::new(Guarded { value, known: None }), changed: Condvar::new() }
    }

    /// Changes the value and wakes all that wait. What the caller did before is seen by every
    /// [`Gate::wait_until`] that passes afterwards.
    pub fn update<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let mut guarded = self.value.lock();
        seeded::cross(&mut guarded.known);
        let result = change(&mut guarded.value);
        drop(guarded);
        seeded::progress();
        self.changed.notify_all();
        result
    }

    /// Blocks until `ready` gives something, at most `limit`; `ready` may change the value, and is asked
    /// again after every [`Gate::update`]. A change made by a `ready` that passes wakes nobody.
    ///
    /// # Errors
    /// [`DeviceError::TimedOut`] with the words of `what`.
    pub fn wait_until<R>(
        &self,
        limit: Duration,
        what: impl FnOnce() -> String,
        mut ready: impl FnMut(&mut T) -> Option<R>,
    ) -> Result<R, DeviceError> {
        let deadline = Instant::now().checked_add(limit);
        let mut timed_out = false;
        loop {
            let seen = seeded::progress_so_far();
            let mut guarded = self.value.lock();
            if let Some(result) = ready(&mut guarded.value) {
                seeded::pass(guarded.known.as_ref());
                return Ok(result);
            }
            if timed_out {
                return Err(DeviceError::TimedOut { what: what(), limit });
            }
            if seeded::in_operation() {
                drop(guarded);
                seeded::block(seen, deadline);
                timed_out = deadline.is_some_and(|deadline| Instant::now() >= deadline);
                continue;
            }
            timed_out = match deadline {
                Some(deadline) => self.changed.wait_until(&mut guarded, deadline).timed_out(),
                None => {
                    self.changed.wait(&mut guarded);
                    false
                }
            };
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_waiter_passes_when_the_value_is_right() {
        let gate = Gate::new(0);
        std::thread::scope(|s| {
            let waiter =
                s.spawn(|| gate.wait_until(Duration::from_secs(60), || "three".into(), |v| (*v == 3).then_some(*v)));
            for _ in 0..3 {
                gate.update(|v| *v += 1);
            }
            assert_eq!(waiter.join().expect("the waiter ends"), Ok(3));
        });
    }

    #[test]
    fn a_limit_that_passes_is_named() {
        let gate = Gate::new(false);
        let limit = Duration::from_millis(1);
        let error = gate.wait_until(limit, || "rank 3".into(), |v| v.then_some(())).expect_err("never true");
        assert_eq!(error, DeviceError::TimedOut { what: "rank 3".into(), limit });
    }
}
