//! A step of a prefetcher.
//!
//! Why a step is a guard: a forgotten start let gathers read parameters that the optimizer still
//! wrote, a forgotten end kept old ones, and neither was an error. This value is the only one that
//! gathers, and its drop ends the step. It borrows the prefetcher, so who runs several
//! micro-batches in a step holds one guard over all of them.

use zero_alloc::device::Device;

use super::{PrefetchError, PrefetchReport, Prefetcher, Unsharded};

/// A step of a [`Prefetcher`], which units are gathered in. [`Self::end`] or the drop ends it: the
/// units kept or in flight are freed, and a first step has recorded the order of use. A drop before
/// the last expected use, as after an error, leaves the expected order as it is.
#[derive(Debug)]
#[must_use = "dropping it ends the step"]
pub struct PrefetchStep<'a, D: Device>(pub(super) &'a mut Prefetcher<D>);

impl<D: Device> PrefetchStep<'_, D> {
    /// Returns the gathered unit, for which the compute stream waits, and enqueues the gathers of
    /// the next uses.
    ///
    /// # Errors
    /// There is no such unit, the caller holds it, it would exceed the limit together with the held
    /// units, or the pool, the collective or a stream returned an error.
    pub fn unshard(&mut self, unit: usize) -> Result<Unsharded<D>, PrefetchError> {
        self.0.unshard(unit)
    }

    /// Ends a use: frees the memory in stream order, or keeps the unit for its next use in this
    /// step. A unit of an earlier step, whose parameters may have changed, or of another
    /// prefetcher, which is for that one's stream, is freed.
    pub fn reshard(&mut self, unsharded: Unsharded<D>) {
        self.0.reshard(unsharded);
    }

    /// Elements in flight, held and kept.
    pub fn live_elems(&self) -> usize {
        self.0.live_elems()
    }

    /// Keeps the step open without the guard, for a caller that cannot borrow the prefetcher for so
    /// long. [`Prefetcher::continue_step`] goes on with it.
    pub fn pause(self) {
        std::mem::forget(self);
    }

    /// Ends the step and checks the order of use.
    pub fn end(self) -> PrefetchReport {
        // The drop would end it again.
        std::mem::ManuallyDrop::new(self).0.end_step(true)
    }
}

impl<D: Device> Drop for PrefetchStep<'_, D> {
    fn drop(&mut self) {
        self.0.end_step(false);
    }
}
