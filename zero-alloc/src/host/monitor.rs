//! How operations of host streams wait for each other.
//!
//! A collective of the threads communicator blocks inside its operation until its peers arrive. It
//! must wait through a [`Monitor`] and hold no other lock meanwhile: then the seeded scheduler sees
//! that the operation is blocked and runs another stream, and its checker learns the order.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::seeded::{self, Clock};
use crate::TimeLimit;
use crate::device::DeviceError;
use crate::primitive::{Condvar, Mutex};

/// A value that threads change and wait on.
#[derive(Debug, Default)]
pub struct Monitor<T> {
    value: Mutex<Guarded<T>>,
    changed: Condvar,
    /// The number of changes.
    version: AtomicU64,
    polling: Polling,
}

#[derive(Debug, Default)]
struct Guarded<T> {
    value: T,
    /// The joined clocks of seeded operations that changed the value.
    clock: Option<Clock>,
}

impl<T> Monitor<T> {
    /// A monitor of `value` with waiters that sleep at once.
    pub fn new(value: T) -> Self {
        Self {
            value: Mutex::new(Guarded { value, clock: None }),
            changed: Condvar::new(),
            version: AtomicU64::new(0),
            polling: Polling::Never,
        }
    }

    /// The same monitor, with waiters that poll for a change before they sleep.
    #[must_use]
    pub const fn with_polling(mut self, polling: Polling) -> Self {
        self.polling = polling;
        self
    }

    /// Changes the value and wakes all waiters. Everything the caller did before is visible to each
    /// [`Monitor::wait_until`] that returns afterwards.
    pub fn update<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        self.update_and_wake(change, |_| true)
    }

    /// As [`Self::update`], but wakes the waiters only if `wakes` returns true for the changed
    /// value: it must, if what a waiter waits for may have become true.
    pub fn update_and_wake<R>(
        &self,
        change: impl FnOnce(&mut T) -> R,
        wakes: impl FnOnce(&T) -> bool,
    ) -> R {
        let mut guarded = self.value.lock();
        seeded::release(&mut guarded.clock);
        let result = change(&mut guarded.value);
        let wakes = wakes(&guarded.value);
        self.version.fetch_add(1, Ordering::Release);
        drop(guarded);

        seeded::note_progress();
        if wakes {
            self.changed.notify_all();
        }
        result
    }

    /// Blocks until `ready` returns a value, at most `limit` (see [`TimeLimit`]). `ready` runs
    /// first at once, then at least after each [`Monitor::update`]; it may change the value, which
    /// wakes no other waiter.
    ///
    /// # Errors
    /// [`DeviceError::TimedOut`] with the text of `what`.
    pub fn wait_until<R>(
        &self,
        limit: Duration,
        what: impl FnOnce() -> String,
        mut ready: impl FnMut(&mut T) -> Option<R>,
    ) -> Result<R, DeviceError> {
        let mut polls = self.polling.count();
        let mut deadline = None;
        let mut time = None;
        let mut timed_out = false;

        loop {
            let progress = seeded::progress();
            let mut guarded = self.value.lock();
            if let Some(result) = ready(&mut guarded.value) {
                seeded::acquire(guarded.clock.as_ref());
                return Ok(result);
            }
            if timed_out {
                return Err(DeviceError::TimedOut {
                    what: what(),
                    limit,
                });
            }
            if polls > 0 && !seeded::in_operation() {
                let seen = self.version.load(Ordering::Relaxed);
                drop(guarded);
                self.poll(&mut polls, seen);
                continue;
            }
            if seeded::in_operation() {
                drop(guarded);
                // Not a time limit: the end of a slice would make the order depend on the clock.
                let deadline = *deadline.get_or_insert_with(|| Instant::now().checked_add(limit));
                seeded::block(progress, deadline);
                timed_out = deadline.is_some_and(|deadline| Instant::now() >= deadline);
                continue;
            }
            let time = time.get_or_insert_with(|| TimeLimit::new(limit));
            let waited = self
                .changed
                .wait_until(&mut guarded, Instant::now() + time.slice());
            timed_out = time.has_passed() && waited.timed_out();
        }
    }

    /// Polls until the version differs from `seen` or no polls are left.
    fn poll(&self, polls: &mut u32, seen: u64) {
        while *polls > 0 && self.version.load(Ordering::Acquire) == seen {
            *polls -= 1;
            match self.polling {
                Polling::Never => return,
                Polling::Spin(_) => std::hint::spin_loop(),
                Polling::Yield(_) => {
                    if !yield_core() {
                        *polls = 0;
                    }
                }
            }
        }
    }
}

/// How a waiter polls before it sleeps: waking a thread takes tens of microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Polling {
    /// It sleeps at once.
    #[default]
    Never,
    /// This many iterations of a spin loop, about 50 a microsecond, if every thread has a core.
    Spin(u32),
    /// Yields its core this many times to the threads that it waits for, if threads outnumber
    /// cores.
    ///
    /// Why not always: beside a program that computes, a yield gives a whole time slice away, and
    /// sleeping does not. After a long one, the next thousand waits of the process sleep at once.
    Yield(u32),
}

impl Polling {
    const fn count(self) -> u32 {
        match self {
            Self::Never => 0,
            Self::Spin(count) | Self::Yield(count) => count,
        }
    }
}

/// A yield that takes longer has given the core to other work than that of a small collective.
const LONG_YIELD: Duration = Duration::from_micros(100);

/// Waits of this process that sleep at once after a long yield.
const SLEEPS_AFTER_LONG_YIELD: u32 = 1000;

/// Yields the core; or returns false where sleeping is better.
fn yield_core() -> bool {
    static SLEEPS: AtomicU32 = AtomicU32::new(0);
    let left = SLEEPS.load(Ordering::Relaxed);
    if left > 0 {
        // Lost updates only lengthen the count.
        SLEEPS.store(left - 1, Ordering::Relaxed);
        return false;
    }
    let before = Instant::now();
    std::thread::yield_now();
    if before.elapsed() <= LONG_YIELD {
        return true;
    }
    SLEEPS.store(SLEEPS_AFTER_LONG_YIELD, Ordering::Relaxed);
    false
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn waiter_passes_when_value_is_right() {
        let monitor = Monitor::new(0);
        std::thread::scope(|s| {
            let waiter = s.spawn(|| {
                monitor.wait_until(LIMIT, || "three".into(), |v| (*v == 3).then_some(*v))
            });
            for _ in 0..3 {
                monitor.update(|v| *v += 1);
            }
            assert_eq!(waiter.join().expect("the waiter ends"), Ok(3));
        });
    }

    #[test]
    fn spinning_and_sleeping_waiters_pass() {
        for polling in [
            Polling::Never,
            Polling::Spin(3),
            Polling::Spin(30_000),
            Polling::Yield(3),
        ] {
            let monitors = [0, 0].map(|value| Monitor::new(value).with_polling(polling));
            std::thread::scope(|s| {
                for me in [0, 1] {
                    let monitors = &monitors;
                    s.spawn(move || {
                        for turn in 1..if cfg!(miri) { 10 } else { 1000 } {
                            monitors[me].update(|v| *v = turn);
                            let ready = |v: &mut i32| (*v >= turn).then_some(());
                            monitors[1 - me]
                                .wait_until(LIMIT, || "peer".into(), ready)
                                .expect("the peer arrives");
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn expired_limit_is_a_named_error() {
        let monitor = Monitor::new(false).with_polling(Polling::Yield(4));
        let limit = Duration::from_millis(1);
        let error = monitor
            .wait_until(limit, || "rank 3".into(), |v| v.then_some(()))
            .expect_err("never true");
        assert_eq!(
            error,
            DeviceError::TimedOut {
                what: "rank 3".into(),
                limit
            }
        );
    }
}
