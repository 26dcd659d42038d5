//! Blocks made of free pages from several places, mapped at contiguous addresses.
//!
//! The pages stay mapped where they are, too: a stitched block is a second view of them, and its
//! pieces are allocated from the offset space like any block. After the block is freed the view is
//! kept, and reused if all its pieces are free again. A view is unmapped only when everything that
//! used it has run.

use std::ops::Range;
use std::ptr::NonNull;

use super::hazards::record_end;
use super::source::Arena;
use crate::device::{Device, DeviceError, Event, Stream, VirtualMemory};
use crate::planner::{Planner, RangeId, Stitch};

/// The number of kept views above which views are unmapped, if that is possible without waiting.
pub(super) const KEPT: usize = 64;

struct View<D: Device> {
    base: NonNull<u8>,
    bytes: usize,
    /// First offset and size of each piece.
    pieces: Vec<(u64, u64)>,
    /// The ranges of the pieces while a block uses them.
    ranges: Vec<RangeId>,
    /// Once these are reached, nothing uses the view's addresses. `None` if an event of the last
    /// user could not be recorded.
    last_uses: Option<Vec<D::Event>>,
}

/// A view in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ViewId(usize);

/// All views, in use or kept.
pub(super) struct Views<D: Device> {
    slots: Vec<Option<View<D>>>,
    mapped_pages: u64,
}

// SAFETY: a view owns its addresses, which are not tied to a thread; events are Send.
unsafe impl<D: Device> Send for Views<D> {}

impl<D: Device> Default for Views<D> {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            mapped_pages: 0,
        }
    }
}

impl<D: Device> Views<D> {
    /// Pages mapped for views so far.
    pub(super) fn mapped_pages(&self) -> u64 {
        self.mapped_pages
    }

    pub(super) fn address(&self, id: ViewId) -> *mut u8 {
        self.slots[id.0]
            .as_ref()
            .map_or(std::ptr::null_mut(), |view| view.base.as_ptr())
    }

    /// The offsets of a view's pieces.
    pub(super) fn pieces(&self, id: ViewId) -> Vec<Range<u64>> {
        let pieces = self.slots[id.0]
            .as_ref()
            .map(|view| view.pieces.as_slice())
            .unwrap_or_default();
        pieces
            .iter()
            .map(|(start, bytes)| *start..start + bytes)
            .collect()
    }

    /// Allocates a kept view that holds `bytes` and whose pieces are all free.
    pub(super) fn allocate_kept(
        &mut self,
        planner: &mut Planner,
        bytes: u64,
        tag: u8,
    ) -> Option<ViewId> {
        let fits = |view: &View<D>| {
            // At most an eighth is wasted.
            view.ranges.is_empty()
                && view.bytes as u64 >= bytes
                && view.bytes as u64 <= bytes + bytes / 8
        };

        for (id, slot) in self.slots.iter_mut().enumerate() {
            let Some(view) = slot.as_mut().filter(|view| fits(view)) else {
                continue;
            };
            for (start, bytes) in &view.pieces {
                match planner.allocate_at(*start, *bytes, tag) {
                    Some(range) => view.ranges.push(range),
                    None => break,
                }
            }
            if view.ranges.len() == view.pieces.len() {
                return Some(ViewId(id));
            }
            for range in view.ranges.drain(..) {
                planner.free(range);
            }
        }

        None
    }

    /// Allocates the pieces of `plan` and maps them; on failure nothing is allocated or mapped.
    pub(super) fn allocate_stitched(
        &mut self,
        memory: &dyn VirtualMemory,
        arena: &Arena,
        planner: &mut Planner,
        plan: &Stitch,
        tag: u8,
    ) -> Result<ViewId, DeviceError> {
        self.drop_some(memory);
        let bytes = plan.bytes() as usize;
        let base = memory.reserve(bytes)?;
        let pages: Vec<_> = plan
            .pieces
            .iter()
            .flat_map(|(start, bytes)| arena.pages(*start..start + bytes))
            .copied()
            .collect();
        // SAFETY: just reserved, with nothing mapped; the arena's pages live as long as the pool.
        if let Err(error) = unsafe { memory.map(base, &pages) } {
            // SAFETY: reserved above; a failed `map` leaves nothing mapped.
            unsafe { memory.release(base, bytes) };
            return Err(error);
        }

        self.mapped_pages += pages.len() as u64;
        let ranges = planner.allocate_pieces(plan, tag);
        let view = View {
            base,
            bytes,
            pieces: plan.pieces.clone(),
            ranges,
            last_uses: Some(Vec::new()),
        };

        let free = self
            .slots
            .iter()
            .position(Option::is_none)
            .unwrap_or(self.slots.len());
        if free == self.slots.len() {
            self.slots.push(None);
        }
        self.slots[free] = Some(view);

        Ok(ViewId(free))
    }

    /// Frees the pieces and keeps the view.
    pub(super) fn free(
        &mut self,
        id: ViewId,
        planner: &mut Planner,
        home: &D::Stream,
        uses: &[(u64, D::Event)],
    ) {
        self.cancel(id, planner);
        let Some(view) = &mut self.slots[id.0] else {
            return;
        };
        let mut last_uses = uses.to_vec();
        record_end(home, &mut last_uses);
        let complete = last_uses.iter().any(|(id, _)| *id == home.id());
        let events = last_uses.into_iter().map(|(_, event)| event);
        view.last_uses = complete.then(|| events.collect());
    }

    /// Frees the pieces of a view that was allocated and not used.
    pub(super) fn cancel(&mut self, id: ViewId, planner: &mut Planner) {
        let Some(view) = &mut self.slots[id.0] else {
            return;
        };
        for range in view.ranges.drain(..) {
            planner.free(range);
        }
    }

    /// Unmaps unused views if more than [`KEPT`] are kept.
    fn drop_some(&mut self, memory: &dyn VirtualMemory) {
        let kept = self
            .slots
            .iter()
            .flatten()
            .filter(|view| view.ranges.is_empty())
            .count();
        let mut surplus = kept.saturating_sub(KEPT);
        for slot in self.slots.iter_mut() {
            if surplus == 0 {
                return;
            }
            if slot.as_ref().is_some_and(View::is_unused)
                && let Some(view) = slot.take()
            {
                surplus -= 1;
                // SAFETY: no block has it, and everything that used it has run.
                unsafe { view.unmap(memory) };
            }
        }
    }

    /// Unmaps the views with a piece above an offset.
    ///
    /// # Safety
    /// No block has them, and everything that used them has run.
    pub(super) unsafe fn drop_above(&mut self, offset: u64, memory: &dyn VirtualMemory) {
        for slot in self.slots.iter_mut() {
            if slot.as_ref().is_some_and(|view| view.end() > offset)
                && let Some(view) = slot.take()
            {
                // SAFETY: the caller's promise.
                unsafe { view.unmap(memory) };
            }
        }
    }

    /// Unmaps everything.
    ///
    /// # Safety
    /// No operation uses the memory any more.
    pub(super) unsafe fn release(self, memory: &dyn VirtualMemory) {
        for view in self.slots.into_iter().flatten() {
            // SAFETY: the caller's promise.
            unsafe { view.unmap(memory) };
        }
    }
}

impl<D: Device> View<D> {
    /// The end of its highest piece.
    fn end(&self) -> u64 {
        self.pieces
            .iter()
            .map(|(start, bytes)| start + bytes)
            .max()
            .unwrap_or(0)
    }

    /// Whether no block has it and everything that used it has run.
    fn is_unused(&self) -> bool {
        let done =
            |events: &Vec<D::Event>| events.iter().all(|event| event.is_done().unwrap_or(true));
        self.ranges.is_empty() && self.last_uses.as_ref().is_some_and(done)
    }

    /// # Safety
    /// No operation uses the view any more.
    unsafe fn unmap(self, memory: &dyn VirtualMemory) {
        // SAFETY: mapped by `allocate_stitched`; unused by the caller's promise.
        unsafe { memory.unmap(self.base, self.bytes / memory.page_bytes()) };
        // SAFETY: reserved by `allocate_stitched`, with nothing mapped any more.
        unsafe { memory.release(self.base, self.bytes) };
    }
}
