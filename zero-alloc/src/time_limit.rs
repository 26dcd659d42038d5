//! Time limits that do not count the time during which the process is stopped (SIGSTOP, Ctrl-Z, a
//! debugger).
//!
//! The system's clock goes on while a process is stopped: every rank would miss its limit when it
//! continues. So a wait is cut into slices, and the time between two checks counts at most as one
//! slice.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// The longest slice.
const SLICE: Duration = Duration::from_secs(1);

/// Returns whether a wait shall end.
type Interrupt = Rc<dyn Fn() -> bool>;

thread_local! {
    static INTERRUPT: RefCell<Option<Interrupt>> = const { RefCell::new(None) };
}

/// Calls `call`. At each check of a [`TimeLimit`] on this thread meanwhile, thus about once a second,
/// `interrupt` is called; if it returns true, the limit has passed. For programs that must handle
/// signals on the thread that waits.
pub fn with_interrupt<R>(interrupt: impl Fn() -> bool + 'static, call: impl FnOnce() -> R) -> R {
    struct Reset(Option<Interrupt>);

    impl Drop for Reset {
        fn drop(&mut self) {
            INTERRUPT.set(self.0.take());
        }
    }

    let _reset = Reset(INTERRUPT.replace(Some(Rc::new(interrupt))));
    call()
}

fn is_interrupted() -> bool {
    // `interrupt` may wait, too.
    let taken = INTERRUPT.try_with(RefCell::take);
    taken.ok().flatten().is_some_and(|interrupt| {
        let ends = interrupt();
        INTERRUPT.set(Some(interrupt));
        ends
    })
}

/// The limit of a wait. The waiter checks it at least once per [`TimeLimit::slice`]; a stop of the
/// process then counts at most as one slice, a quarter of the limit or less.
#[derive(Clone, Debug)]
pub struct TimeLimit {
    limit: Duration,
    slice: Duration,
    counted: Duration,
    checked: Instant,
}

impl TimeLimit {
    /// A limit that starts now. `Duration::MAX` never passes.
    pub fn new(limit: Duration) -> Self {
        Self {
            limit,
            slice: (limit / 4).min(SLICE),
            counted: Duration::ZERO,
            checked: Instant::now(),
        }
    }

    /// The whole limit.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// The time until the next check is due.
    pub fn slice(&self) -> Duration {
        self.slice.min(self.limit.saturating_sub(self.counted))
    }

    /// Counts the time since the last check, at most one slice; returns the time counted so far.
    pub fn elapsed(&mut self) -> Duration {
        if is_interrupted() {
            self.counted = self.limit;
        }
        self.elapsed_at(Instant::now())
    }

    /// Counts as [`TimeLimit::elapsed`]; returns what is left of the limit.
    pub fn left(&mut self) -> Duration {
        self.limit.saturating_sub(self.elapsed())
    }

    /// Counts as [`TimeLimit::elapsed`]; returns whether the limit has passed.
    pub fn has_passed(&mut self) -> bool {
        self.left().is_zero()
    }

    fn elapsed_at(&mut self, now: Instant) -> Duration {
        self.counted = self
            .counted
            .saturating_add(now.saturating_duration_since(self.checked).min(self.slice));
        self.checked = now;
        self.counted
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn stop_counts_as_one_slice() {
        let mut limit = TimeLimit::new(Duration::from_secs(10));
        let start = limit.checked;
        let at = |seconds| start + Duration::from_secs_f64(seconds);
        assert_eq!(limit.elapsed_at(at(0.5)), Duration::from_millis(500));
        assert_eq!(limit.elapsed_at(at(3600.0)), Duration::from_millis(1500));
        assert_eq!(limit.slice(), Duration::from_secs(1));
        // Checked once per slice, the limit passes when it should.
        for second in 1..=9 {
            limit.elapsed_at(at(3600.0 + f64::from(second)));
        }
        assert_eq!(limit.counted, Duration::from_millis(10_500));
        assert_eq!(limit.slice(), Duration::ZERO);
        assert!(limit.has_passed());
    }

    #[test]
    fn interrupt_ends_waits_of_its_thread() {
        let mut limit = TimeLimit::new(Duration::MAX);
        assert!(!with_interrupt(|| false, || limit.has_passed()));
        let elsewhere = || std::thread::spawn(|| TimeLimit::new(Duration::MAX).has_passed());
        assert!(!with_interrupt(|| true, elsewhere).join().unwrap());
        assert!(!limit.has_passed());
        assert!(with_interrupt(|| true, || limit.has_passed()));
    }

    #[test]
    fn short_and_endless_limits() {
        let mut short = TimeLimit::new(Duration::from_secs(1));
        assert_eq!(
            short.elapsed_at(short.checked + Duration::from_secs(60)),
            Duration::from_millis(250)
        );
        assert!(TimeLimit::new(Duration::ZERO).has_passed());
        let mut endless = TimeLimit::new(Duration::MAX);
        assert!(!endless.has_passed());
        assert_eq!(endless.slice(), SLICE);
    }
}
