//! The end of a pool: its memory is freed when the last handle and block are dropped and everything
//! that used it has run. Memory whose users cannot be waited for, because a stream could not record
//! its end, is leaked.

use super::Central;
use super::backings::Backings;
use super::source::Source;
use super::stitched::Views;
use crate::device::Device;

impl<D: Device> Drop for Central<D> {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        let source = std::mem::replace(&mut state.source, Source::Backings(Backings::default()));
        let views = std::mem::take(&mut state.views);
        let hazards = std::mem::take(&mut state.hazards);
        // A lane that cannot tell the users of its chunks does not free them.
        if state.lane_bytes > 0 {
            return;
        }

        if hazards.all_done() {
            // SAFETY: no block is left, and everything that used the memory has run.
            unsafe { release(source, views, &self.device) };
            return;
        }

        // An operation may drop the last block; waiting here would then block its stream. So
        // another thread waits.
        let device = self.device.clone();
        let reaper = std::thread::Builder::new().name("pool reaper".into());
        let _ = reaper.spawn(move || {
            if hazards.wait_all() {
                // SAFETY: no block is left, and everything that used the memory has run.
                unsafe { release(source, views, &device) };
            }
        });
    }
}

/// Returns everything to the device.
///
/// # Safety
/// No operation uses the memory any more.
unsafe fn release<D: Device>(source: Source, views: Views<D>, device: &D) {
    if let Some(memory) = device.virtual_memory() {
        // SAFETY: the caller's promise.
        unsafe { views.release(memory) };
    }
    // SAFETY: the caller's promise; the views are gone.
    unsafe { source.release(device) };
}
