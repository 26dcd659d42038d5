//! Handles passed to C. They are numbers, so that using a stale handle is an error and not a crash.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Locks, and ignores poisoning: every change is a single assignment or insertion, so a panic
/// leaves the data valid.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The handle of no live object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stale;

/// The live objects of one type.
pub struct Handles<T> {
    live: Mutex<Option<HashMap<usize, Arc<T>>>>,
}

/// A handle unique across all types of a library. It is never 0, 1 or 2, the handles of default
/// streams.
pub fn fresh_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0x1000);
    NEXT.fetch_add(0x10, Ordering::Relaxed)
}

#[allow(clippy::new_without_default)] // Made in statics, which need `const`.
impl<T> Handles<T> {
    /// No live objects.
    pub const fn new() -> Self {
        Self {
            live: Mutex::new(None),
        }
    }

    /// Adds an object; returns its handle.
    pub fn insert(&self, number: usize, object: Arc<T>) -> usize {
        lock(&self.live)
            .get_or_insert_default()
            .insert(number, object);
        number
    }

    /// The object of a live handle.
    pub fn get(&self, number: usize) -> Result<Arc<T>, Stale> {
        lock(&self.live)
            .as_ref()
            .and_then(|live| live.get(&number).cloned())
            .ok_or(Stale)
    }

    /// Removes the object. Its handle is stale afterwards.
    pub fn remove(&self, number: usize) -> Result<Arc<T>, Stale> {
        lock(&self.live)
            .as_mut()
            .and_then(|live| live.remove(&number))
            .ok_or(Stale)
    }

    /// All objects that `which` accepts, with their handles.
    pub fn select(&self, which: impl Fn(&T) -> bool) -> Vec<(usize, Arc<T>)> {
        let live = lock(&self.live);
        let all = live.iter().flatten().filter(|(_, object)| which(object));
        all.map(|(&number, object)| (number, object.clone()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removed_handle_is_stale() {
        static HANDLES: Handles<u32> = Handles::new();

        let first = HANDLES.insert(fresh_number(), Arc::new(1));
        let second = HANDLES.insert(fresh_number(), Arc::new(2));
        assert_ne!(first, second);
        assert_eq!(HANDLES.remove(first).as_deref(), Ok(&1));

        assert_eq!(HANDLES.get(first), Err(Stale));
        assert_eq!(HANDLES.remove(first), Err(Stale));
        assert_eq!(HANDLES.get(second).as_deref(), Ok(&2));
        assert_eq!(HANDLES.select(|&n| n > 1).len(), 1);
    }
}
