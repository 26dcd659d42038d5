//! A hook by which a checking back end sees which memory an operation touches.
//!
//! [`DeviceSlice::as_host`](super::DeviceSlice::as_host) and its writing twin report here. Without a watcher on the
//! thread, which is always so outside the host's seeded scheduler, that is one test of a thread-local flag.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;

/// Told the addresses touched and whether they may be written.
pub(crate) type Watcher = Rc<dyn Fn(Range<usize>, bool)>;

thread_local! {
    static ACTIVE: Cell<bool> = const { Cell::new(false) };
    static WATCHER: RefCell<Option<Watcher>> = const { RefCell::new(None) };
}

/// Reports that this thread is about to touch memory.
#[inline]
pub(super) fn touch(start: usize, bytes: usize, write: bool) {
    if ACTIVE.get() && bytes > 0 {
        let watcher = WATCHER.with_borrow(Clone::clone);
        if let Some(watcher) = watcher {
            watcher(start..start + bytes, write);
        }
    }
}

/// Runs `work` with `watcher` told of what it touches on this thread.
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
