//! Locks; under `--cfg loom`, the loom versions of them.

#[cfg(not(loom))]
pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};

/// The calling thread's number: threads count from 0 in the order of their first call.
#[cfg(not(loom))]
pub(crate) fn thread_number() -> usize {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static NUMBER: usize = NEXT.fetch_add(1, Ordering::Relaxed));
    // A thread that is ending has no number any more.
    NUMBER.try_with(|number| *number).unwrap_or(0)
}

#[cfg(loom)]
pub(crate) use loom_locks::{Condvar, Mutex, MutexGuard, thread_number};

#[cfg(loom)]
mod loom_locks {
    //! parking_lot's interface over loom's types. Time does not pass in a model: a limit of zero
    //! expires whenever a thread waits with it, and no other limit expires.

    use std::ops::{Deref, DerefMut};
    use std::time::Instant;

    /// Tests name each thread with its number.
    pub(crate) fn thread_number() -> usize {
        loom::thread::current()
            .name()
            .and_then(|name| name.parse().ok())
            .unwrap_or(0)
    }

    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    pub(crate) struct MutexGuard<'a, T>(Option<loom::sync::MutexGuard<'a, T>>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard(Some(self.0.lock().expect("no thread of a model panics")))
        }

        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok().map(|guard| MutexGuard(Some(guard)))
        }

        pub(crate) fn get_mut(&mut self) -> &mut T {
            self.0.get_mut().expect("no thread of a model panics")
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;
        fn deref(&self) -> &T {
            self.0.as_ref().expect("held")
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.0.as_mut().expect("held")
        }
    }

    #[derive(Debug, Default)]
    pub(crate) struct Condvar(loom::sync::Condvar);

    pub(crate) struct Waited(bool);

    impl Waited {
        pub(crate) fn timed_out(&self) -> bool {
            self.0
        }
    }

    impl Condvar {
        pub(crate) fn new() -> Self {
            Self(loom::sync::Condvar::new())
        }

        pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            let held = guard.0.take().expect("held");
            guard.0 = Some(self.0.wait(held).expect("no thread of a model panics"));
        }

        pub(crate) fn wait_until<T>(
            &self,
            guard: &mut MutexGuard<'_, T>,
            deadline: Instant,
        ) -> Waited {
            let expired = deadline <= Instant::now();
            if !expired {
                self.wait(guard);
            }
            Waited(expired)
        }

        pub(crate) fn notify_one(&self) {
            self.0.notify_one();
        }

        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }
    }
}
