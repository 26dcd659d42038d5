//! A hook for the seeded scheduler to see which memory an operation touches.
//!
//! [`DeviceSlice::as_host`](super::DeviceSlice::as_host) and its writing counterpart report here.
//! Without the `testing` feature the hook is empty; with it, a thread without a watcher pays for
//! one thread-local flag.

#[cfg(any(test, feature = "testing"))]
mod hook {
    use std::cell::{Cell, RefCell};
    use std::ops::Range;
    use std::rc::Rc;

    /// Receives the addresses touched, and whether they may be written.
    pub(crate) type Watcher = Rc<dyn Fn(Range<usize>, bool)>;

    thread_local! {
        static ACTIVE: Cell<bool> = const { Cell::new(false) };
        static WATCHER: RefCell<Option<Watcher>> = const { RefCell::new(None) };
    }

    /// Reports that this thread is about to touch memory.
    #[inline]
    pub(crate) fn touch(start: usize, bytes: usize, write: bool) {
        if ACTIVE.get() && bytes > 0 {
            let watcher = WATCHER.with_borrow(Clone::clone);
            if let Some(watcher) = watcher {
                watcher(start..start + bytes, write);
            }
        }
    }

    /// Runs `work` while `watcher` observes this thread.
    pub(crate) fn watched<R>(watcher: Watcher, work: impl FnOnce() -> R) -> R {
        struct Restore(Option<Watcher>, bool);
        impl Drop for Restore {
            fn drop(&mut self) {
                ACTIVE.set(self.1);
                let _ = WATCHER.replace(self.0.take());
            }
        }
        let _restore = Restore(WATCHER.replace(Some(watcher)), ACTIVE.replace(true));
        work()
    }
}

#[cfg(any(test, feature = "testing"))]
pub(crate) use hook::{touch, watched};

/// Does nothing in this build.
#[cfg(not(any(test, feature = "testing")))]
#[inline]
pub(super) fn touch(_start: usize, _bytes: usize, _write: bool) {}
