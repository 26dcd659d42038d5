//! Handles passed to C. They are numbers, so that using a stale handle is an error and not a crash.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{Failure, Outcome};

/// Locks, and ignores poisoning: every change is a single assignment or insertion, so a panic
/// leaves the data valid.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The live objects of one type.
pub(crate) struct Handles<T> {
    live: Mutex<Option<HashMap<usize, Arc<T>>>>,
}

/// A handle unique across all types. It is never 0, 1 or 2, the handles of default streams.
pub(crate) fn fresh_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0x1000);
    NEXT.fetch_add(0x10, Ordering::Relaxed)
}

impl<T> Handles<T> {
    pub(crate) const fn new() -> Self {
        Self {
            live: Mutex::new(None),
        }
    }

    pub(crate) fn insert(&self, number: usize, object: Arc<T>) -> usize {
        lock(&self.live)
            .get_or_insert_default()
            .insert(number, object);
        number
    }

    /// The object, or `InvalidHandle`.
    pub(crate) fn get(&self, number: usize) -> Outcome<Arc<T>> {
        lock(&self.live)
            .as_ref()
            .and_then(|live| live.get(&number).cloned())
            .ok_or(Failure::InvalidHandle)
    }

    /// Removes the object. Its handle is stale afterwards.
    pub(crate) fn remove(&self, number: usize) -> Outcome<Arc<T>> {
        lock(&self.live)
            .as_mut()
            .and_then(|live| live.remove(&number))
            .ok_or(Failure::InvalidHandle)
    }

    /// All objects that `which` accepts, with their handles.
    pub(crate) fn select(&self, which: impl Fn(&T) -> bool) -> Vec<(usize, Arc<T>)> {
        let live = lock(&self.live);
        let all = live.iter().flatten().filter(|(_, object)| which(object));
        all.map(|(&number, object)| (number, object.clone()))
            .collect()
    }
}
