//! For back ends, and for wrappers around one: a [`Group`] of ranks checks the arguments of a collective and makes a
//! [`Checked`] call, which [`Communicator::enqueue`] runs. Programs that only call collectives need none of this.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use zero_alloc::device::Device;

pub use crate::call::{Call, Checked, Counts, Group};
use crate::{CommError, Communicator, Traffic};

/// Enqueues a call in a wrapper's place.
type Enqueue<D> =
    dyn Fn(&Wrapped<D>, &<D as Device>::Stream, Checked) -> Result<(), CommError> + Send + Sync;

/// Another communicator whose calls, and those of its splits, a function enqueues: with a delay,
/// damage or a record.
pub struct Wrapped<D: Device> {
    inner: Arc<dyn Communicator<D>>,
    enqueue: Arc<Enqueue<D>>,
    split_number: Option<usize>,
    /// The number of splits, of this communicator and of its splits.
    splits: Arc<AtomicUsize>,
}

impl<D: Device> fmt::Debug for Wrapped<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Group { rank, world_size } = self.inner.group();
        write!(f, "Wrapped(rank {rank} of {world_size})")
    }
}

impl<D: Device> Wrapped<D> {
    /// Wraps `inner`.
    ///
    /// # Safety
    /// `enqueue` keeps the promise of [`Communicator::enqueue`]: it uses the call's buffers only in
    /// operations on the stream that it is passed.
    pub unsafe fn new(
        inner: Arc<dyn Communicator<D>>,
        enqueue: impl Fn(&Self, &D::Stream, Checked) -> Result<(), CommError> + Send + Sync + 'static,
    ) -> Self {
        Self {
            inner,
            enqueue: Arc::new(enqueue),
            split_number: None,
            splits: Arc::default(),
        }
    }

    /// The communicator that is wrapped.
    pub fn inner(&self) -> &dyn Communicator<D> {
        &*self.inner
    }

    /// If this is the result of a split, its number among all splits, from 0.
    pub fn split_number(&self) -> Option<usize> {
        self.split_number
    }
}

// SAFETY: the group is that of the inner communicator; `new` has the promise of `enqueue`.
unsafe impl<D: Device> Communicator<D> for Wrapped<D> {
    fn group(&self) -> Group {
        self.inner.group()
    }

    fn enqueue(&self, stream: &D::Stream, checked: Checked) -> Result<(), CommError> {
        (self.enqueue)(self, stream, checked)
    }

    fn split(
        &self,
        color: Option<u64>,
        key: u64,
    ) -> Result<Option<Arc<dyn Communicator<D>>>, CommError> {
        let number = self.splits.fetch_add(1, Ordering::Relaxed);
        let wrap = |inner| Self {
            inner,
            enqueue: Arc::clone(&self.enqueue),
            split_number: Some(number),
            splits: Arc::clone(&self.splits),
        };
        let child = self.inner.split(color, key)?;
        Ok(child.map(|inner| Arc::new(wrap(inner)) as Arc<dyn Communicator<D>>))
    }

    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn failure(&self) -> Option<CommError> {
        self.inner.failure()
    }
}
