//! Work on another thread, whose end and progress the ranks' messages report.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, Scope};
use std::time::{Duration, Instant};

use crate::CkptError;

/// The result of work that may still run on another thread.
pub(crate) struct Job<T>(Arc<Slot<T>>);

struct Slot<T> {
    state: Mutex<State<T>>,
    ended: Condvar,
}

enum State<T> {
    Running,
    Ended(T),
    /// The work panicked, or its result is taken.
    Empty,
}

impl<T: Send> Job<T> {
    fn in_state(state: State<T>) -> Self {
        Self(Arc::new(Slot {
            state: Mutex::new(state),
            ended: Condvar::new(),
        }))
    }

    /// A job that has ended.
    pub(crate) fn ended(result: T) -> Self {
        Self::in_state(State::Ended(result))
    }

    /// Runs `work` on a new thread, or here if none can be started: a late save is better than a
    /// lost one.
    pub(crate) fn start(work: impl FnOnce() -> T + Send + 'static) -> Self
    where
        T: 'static,
    {
        Self::start_with(work, |run| thread().spawn(run).is_ok())
    }

    /// As [`Job::start`], on a thread of `scope`.
    pub(crate) fn start_scoped<'scope>(
        scope: &'scope Scope<'scope, '_>,
        work: impl FnOnce() -> T + Send + 'scope,
    ) -> Self
    where
        T: 'scope,
    {
        Self::start_with(work, |run| thread().spawn_scoped(scope, run).is_ok())
    }

    fn start_with<'a, W: FnOnce() -> T + Send + 'a>(
        work: W,
        spawn: impl FnOnce(Box<dyn FnOnce() + Send + 'a>) -> bool,
    ) -> Self
    where
        T: 'a,
    {
        let job = Self::in_state(State::Running);
        let of_thread = Self(Arc::clone(&job.0));
        // If no thread starts, its closure is dropped; so the work stays here until the thread
        // takes it.
        let work = Arc::new(Mutex::new(Some(work)));
        let work_of_thread = Arc::clone(&work);
        let started = spawn(Box::new(move || of_thread.run(take(&work_of_thread))));
        if !started {
            job.run(take(&work));
        }
        job
    }

    fn run(&self, work: Option<impl FnOnce() -> T>) {
        let result = work.and_then(|work| catch_unwind(AssertUnwindSafe(work)).ok());
        *self.lock() = result.map_or(State::Empty, State::Ended);
        self.0.ended.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn has_ended(&self) -> bool {
        !matches!(*self.lock(), State::Running)
    }

    /// Waits for at most `limit`; returns whether the work has ended.
    pub(crate) fn wait(&self, limit: Duration) -> bool {
        let running = |state: &mut State<T>| matches!(state, State::Running);
        let waited = self.0.ended.wait_timeout_while(self.lock(), limit, running);
        !matches!(
            *waited.unwrap_or_else(PoisonError::into_inner).0,
            State::Running
        )
    }

    /// Waits until the work has ended, or makes no progress for `limit`; returns whether it has
    /// ended.
    pub(crate) fn wait_while_progressing(
        &self,
        limit: Duration,
        progress: impl Fn() -> u64,
    ) -> bool {
        let mut watch = Watch::new(limit);
        while !self.wait(watch.period()) {
            if watch.tick().is_stalled(0, progress()) {
                return false;
            }
        }
        true
    }

    /// The result of work that has ended.
    pub(crate) fn take(&self) -> Result<T, CkptError> {
        match std::mem::replace(&mut *self.lock(), State::Empty) {
            State::Ended(result) => Ok(result),
            State::Running | State::Empty => Err(CkptError::Panicked),
        }
    }
}

fn thread() -> Builder {
    Builder::new().name("zero-ckpt".into())
}

fn take<W>(work: &Mutex<Option<W>>) -> Option<W> {
    work.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// The longest interval between two messages of ranks that wait for each other.
const MAX_PERIOD: Duration = Duration::from_millis(500);

/// Finds work without progress. Time in which this process itself does not run, such as stopped by
/// a signal, counts as one interval only.
pub(crate) struct Watch {
    limit: Duration,
    last: Instant,
    /// Time since the last tick.
    step: Duration,
    /// The last progress of each rank, and the time since then.
    seen: Vec<(u64, Duration)>,
}

impl Watch {
    pub(crate) fn new(limit: Duration) -> Self {
        Self {
            limit,
            last: Instant::now(),
            step: Duration::ZERO,
            seen: Vec::new(),
        }
    }

    /// The interval of messages: several fit the limit, which may be the communicator's.
    pub(crate) fn period(&self) -> Duration {
        MAX_PERIOD.min(self.limit / 4)
    }

    /// Starts a round of [`Watch::is_stalled`].
    pub(crate) fn tick(&mut self) -> &mut Self {
        let now = Instant::now();
        self.step = now.duration_since(self.last).min(self.period() * 2);
        self.last = now;
        self
    }

    /// Whether `rank` has had this same progress for the limit. Call it once a round.
    pub(crate) fn is_stalled(&mut self, rank: usize, progress: u64) -> bool {
        if self.seen.len() <= rank {
            self.seen.resize(rank + 1, (u64::MAX, Duration::ZERO));
        }
        let (seen, idle) = &mut self.seen[rank];
        *idle = if *seen == progress {
            *idle + self.step
        } else {
            Duration::ZERO
        };
        *seen = progress;
        *idle >= self.limit
    }

    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_is_an_error() {
        let job = Job::<()>::start(|| std::panic::resume_unwind(Box::new("boom")));
        assert!(job.wait(Duration::from_secs(60)));
        assert!(job.take().unwrap_err().to_string().contains("panicked"));
    }

    #[test]
    fn progress_resets_the_limit() {
        let mut watch = Watch::new(Duration::from_millis(4));
        let mut stalls = |progress: u64| {
            std::thread::sleep(Duration::from_millis(3));
            watch.tick().is_stalled(1, progress)
        };
        // A tick counts at most two periods of 1 ms, however late it is.
        assert!((0..20).all(|progress| !stalls(progress)));
        assert_eq!([(); 3].map(|()| stalls(20)), [false, false, true]);
    }
}
