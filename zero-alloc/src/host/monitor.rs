//! The way in which operations of host streams wait for each other.
//!
//! A collective of the threads communicator blocks inside its operation until its peers arrive. It must do
//! that through a [`Monitor`], and by no other lock that is held across a wait: then the seeded scheduler knows
//! that the operation is blocked and runs another stream, and the checker knows what is ordered behind what.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::seeded::{self, Clock};
use crate::device::DeviceError;
use crate::primitive::{Condvar, Mutex};

/// What a waiter does before it goes to sleep, since waking it up takes several microseconds: it looks `times` times
/// whether the value has changed, and after each look lets other threads have the core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpinPolicy {
    /// How many looks.
    pub times: u32,
    /// For how many turns of a loop each goes on: some 50 to a microsecond. None where threads outnumber cores, so
    /// that no core is kept from whoever is waited for.
    pub spins: u32,
}

/// A value that threads change and wait on.
#[derive(Debug, Default)]
pub struct Monitor<T> {
    value: Mutex<Guarded<T>>,
    changed: Condvar,
    /// How often the value has changed.
    version: AtomicU64,
    looks: SpinPolicy,
}

#[derive(Debug, Default)]
struct Guarded<T> {
    value: T,
    /// What those knew who changed it; only operations of the seeded scheduler leave something here.
    known: Option<Clock>,
}

impl<T> Monitor<T> {
    /// A gate around `value`.
    #[cfg(not(loom))]
    pub const fn new(value: T) -> Self {
        Self {
            value: Mutex::new(Guarded { value, known: None }),
            changed: Condvar::new(),
            version: AtomicU64::new(0),
            looks: SpinPolicy { times: 0, spins: 0 },
        }
    }

    /// A gate around `value`, in a model.
    #[cfg(loom)]
    pub fn new(value: T) -> Self {
        Self {
            value: Mutex::new(Guarded { value, known: None }),
            changed: Condvar::new(),
            version: AtomicU64::new(0),
            looks: SpinPolicy { times: 0, spins: 0 },
        }
    }

    /// The same gate, whose waiters look before they sleep.
    #[must_use]
    pub const fn looking(mut self, looks: SpinPolicy) -> Self {
        self.looks = looks;
        self
    }

    /// Changes the value and wakes all that wait. What the caller did before is seen by every
    /// [`Monitor::wait_until`] that passes afterwards.
    pub fn update<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let mut guarded = self.value.lock();
        seeded::cross(&mut guarded.known);
        let result = change(&mut guarded.value);
        self.version.fetch_add(1, Ordering::Release);
        drop(guarded);
        seeded::progress();
        self.changed.notify_all();
        result
    }

    /// Blocks until `ready` gives something, at most `limit`; `ready` may change the value, and is asked
    /// again after every [`Monitor::update`]. A change made by a `ready` that passes wakes nobody.
    ///
    /// # Errors
    /// [`DeviceError::TimedOut`] with the words of `what`.
    pub fn wait_until<R>(
        &self,
        limit: Duration,
        what: impl FnOnce() -> String,
        mut ready: impl FnMut(&mut T) -> Option<R>,
    ) -> Result<R, DeviceError> {
        let mut looks = self.looks.times;
        let mut deadline = None;
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
            if looks > 0 && !seeded::in_operation() {
                let seen = self.version.load(Ordering::Relaxed);
                drop(guarded);
                self.look(&mut looks, seen);
                continue;
            }
            let deadline = *deadline.get_or_insert_with(|| Instant::now().checked_add(limit));
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

    /// Looks until the version is not `seen` any more, while there are `looks` left.
    fn look(&self, looks: &mut u32, seen: u64) {
        while *looks > 0 {
            *looks -= 1;
            for _ in 0..=self.looks.spins {
                if self.version.load(Ordering::Acquire) != seen {
                    return;
                }
                std::hint::spin_loop();
            }
            std::thread::yield_now();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_waiter_passes_when_the_value_is_right() {
        let gate = Monitor::new(0);
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
    fn a_waiter_that_looks_first_passes_too_before_it_sleeps_and_after() {
        for looks in [SpinPolicy::default(), SpinPolicy { times: 3, spins: 0 }, SpinPolicy { times: 1000, spins: 30 }]
        {
            let gates = [0, 0].map(|value| Monitor::new(value).looking(looks));
            std::thread::scope(|s| {
                for me in [0, 1] {
                    let gates = &gates;
                    s.spawn(move || {
                        for turn in 1..if cfg!(miri) { 10 } else { 1000 } {
                            gates[me].update(|v| *v = turn);
                            let ready = |v: &mut i32| (*v >= turn).then_some(());
                            gates[1 - me]
                                .wait_until(Duration::from_secs(60), || "peer".into(), ready)
                                .expect("it comes");
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn a_limit_that_passes_is_named() {
        let gate = Monitor::new(false).looking(SpinPolicy { times: 2, spins: 2 });
        let limit = Duration::from_millis(1);
        let error = gate.wait_until(limit, || "rank 3".into(), |v| v.then_some(())).expect_err("never true");
        assert_eq!(error, DeviceError::TimedOut { what: "rank 3".into(), limit });
    }
}
