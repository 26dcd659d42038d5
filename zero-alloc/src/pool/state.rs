//! The state that a pool's lock protects: allocating, freeing, moving.

use std::collections::HashMap;

use super::Purpose;
use super::hazards::{Hazards, record_end, wait_unless_done};
use super::report::Account;
use super::source::Source;
use super::stitched::{ViewId, Views};
use crate::device::{AnySlice, DType, Device, DeviceError, Stream};
use crate::planner::{Compaction, Planner, RangeId, Remedy, Request, Stitch};

/// The memory of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Allocation {
    Empty,
    /// A range of a lane's space.
    Lane(RangeId),
    /// A range of the offset space.
    Range(RangeId),
    /// Several ranges, mapped as a view.
    View(ViewId),
}

/// The reason why bytes could not be allocated.
#[derive(Debug)]
pub(super) enum Failure {
    /// The budget (`None`) or the device (with its message) is exhausted, and moving does not help.
    OutOfMemory(Option<String>),
    /// The device failed.
    Device(DeviceError),
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::OutOfMemory { detail, .. } => Self::OutOfMemory(Some(detail)),
            error => Self::Device(error),
        }
    }
}

/// The progress of a plan when the device refused to enqueue a copy.
struct Refused {
    /// The number of moves that were enqueued completely.
    completed: usize,
    /// Whether a part of the next was enqueued.
    partial: bool,
    error: DeviceError,
}

/// The state of a movable block.
pub(super) struct Moving<D: Device> {
    pub(super) home: D::Stream,
    /// The last recorded use on each stream.
    pub(super) uses: Vec<(u64, D::Event)>,
    /// The stream id and event of the copy that moved it last.
    pub(super) ready: Option<(u64, D::Event)>,
    /// Set if a failed move lost the contents; every later use returns this error.
    pub(super) lost: Option<DeviceError>,
    /// Streams with a use whose event could not be recorded.
    pub(super) unrecorded: Vec<D::Stream>,
    /// The number of uses being enqueued, plus one for each of `unrecorded`. A view never moves.
    pub(super) pins: u32,
}

pub(super) struct State<D: Device> {
    pub(super) planner: Planner,
    pub(super) source: Source,
    pub(super) hazards: Hazards<D>,
    pub(super) views: Views<D>,
    pub(super) movable: HashMap<Allocation, Moving<D>>,
    /// Of the blocks that are not in lanes.
    pub(super) account: Account,
    /// Bytes of the lanes' chunks.
    pub(super) lane_bytes: usize,
    pub(super) moved_bytes: u64,
    pub(super) compactions: u64,
}

/// The tag of the lanes' chunks; lower tags are purposes.
pub(super) const LANE_TAG: u8 = Purpose::ALL.len() as u8;

/// Each round of [`State::allocate`] grows or compacts; more than a few would be a bug in the
/// planner.
const ROUNDS: usize = 8;

impl<D: Device> State<D> {
    /// Allocates bytes, ordered on `stream` after their earlier users.
    pub(super) fn allocate(
        &mut self,
        device: &D,
        request: Request,
        stream: &D::Stream,
        budget_bytes: usize,
    ) -> Result<Allocation, Failure> {
        let used = self.account.report.total.live_bytes + self.lane_bytes;
        if request.bytes as usize > budget_bytes.saturating_sub(used) {
            return Err(Failure::OutOfMemory(None));
        }
        for _ in 0..ROUNDS {
            if let Some((range, start)) = self.planner.allocate(request) {
                let end = start + self.planner.bytes_of(range);
                if let Err(error) = self.hazards.wait_and_remove(start..end, stream) {
                    self.planner.free(range);
                    return Err(error.into());
                }
                self.planner.pin(range, true);
                return Ok(Allocation::Range(range));
            }
            if let Some(view) = self.make_room(device, request, stream, budget_bytes)? {
                return Ok(view);
            }
        }
        Err(Failure::OutOfMemory(None))
    }

    /// Grows, moves or maps so that the request fits; returns the allocation if a view holds it.
    fn make_room(
        &mut self,
        device: &D,
        request: Request,
        stream: &D::Stream,
        budget_bytes: usize,
    ) -> Result<Option<Allocation>, Failure> {
        let bytes = request.bytes as usize;
        if let Source::Backings(backings) = &mut self.source {
            let refused = match backings.grow(device, bytes, budget_bytes) {
                Ok(Some(bytes)) => {
                    backings.set_start(self.planner.add_segment(bytes as u64));
                    return Ok(None);
                }
                Ok(None) => None,
                Err(error) => Some(error),
            };
            return match self.planner.plan_compaction(request.bytes, request.align) {
                Some(plan) => Ok(self.apply(device, &plan, stream).map(|()| None)?),
                None => Err(refused.map_or(Failure::OutOfMemory(None), Into::into)),
            };
        }

        if let Some(view) = self
            .views
            .allocate_kept(&mut self.planner, request.bytes, request.tag)
        {
            return Ok(self.order_view(view, stream).map(Some)?);
        }
        let remedy = match self
            .planner
            .find_remedy(request)
            .map_err(|_| Failure::OutOfMemory(None))?
        {
            Remedy::Grow { bytes } => match self.grow(device, bytes) {
                Ok(()) => return Ok(None),
                // The device is out of pages: only reserved memory can help.
                Err(error) => self
                    .planner
                    .find_remedy_without_growing(request)
                    .ok_or(error)?,
            },
            remedy => remedy,
        };

        match remedy {
            Remedy::Grow { .. } => {}
            Remedy::Compact(plan) => self.apply(device, &plan, stream)?,
            Remedy::Stitch(plan) => {
                return Ok(Some(self.stitch(device, &plan, request.tag, stream)?));
            }
        }

        Ok(None)
    }

    fn grow(&mut self, device: &D, bytes: u64) -> Result<(), DeviceError> {
        if let (Source::Arena(arena), Some(memory)) = (&mut self.source, device.virtual_memory()) {
            arena.grow(memory, bytes as usize)?;
            self.planner.grow(bytes);
        }
        Ok(())
    }

    fn stitch(
        &mut self,
        device: &D,
        plan: &Stitch,
        tag: u8,
        stream: &D::Stream,
    ) -> Result<Allocation, DeviceError> {
        let (Source::Arena(arena), Some(memory)) = (&self.source, device.virtual_memory()) else {
            return Err(DeviceError::Driver {
                call: "stitch",
                message: "no virtual memory".into(),
            });
        };
        let view = self
            .views
            .allocate_stitched(memory, arena, &mut self.planner, plan, tag)?;
        self.order_view(view, stream)
    }

    /// Orders a view that was just allocated after the earlier users of its bytes.
    fn order_view(&mut self, view: ViewId, stream: &D::Stream) -> Result<Allocation, DeviceError> {
        let pieces = self.views.pieces(view);
        // All waits first: if one fails, the pieces are freed with their hazards unchanged.
        if let Err(error) = pieces
            .iter()
            .try_for_each(|piece| self.hazards.wait(piece.clone(), stream))
        {
            self.views.cancel(view, &mut self.planner);
            return Err(error);
        }
        for piece in pieces {
            self.hazards.remove(piece);
        }
        Ok(Allocation::View(view))
    }

    /// The address of an allocation's first byte.
    pub(super) fn address(&self, allocation: Allocation) -> *mut u8 {
        match allocation {
            // A lane knows the addresses of its ranges.
            Allocation::Empty | Allocation::Lane(_) => std::ptr::null_mut(),
            Allocation::Range(range) => self.source.address(self.planner.offset_of(range)),
            Allocation::View(view) => self.views.address(view),
        }
    }

    /// Frees bytes: their next user on another stream runs after `uses` and everything on `home` so
    /// far.
    pub(super) fn free(
        &mut self,
        allocation: Allocation,
        home: &D::Stream,
        uses: Vec<(u64, D::Event)>,
    ) {
        match allocation {
            Allocation::Empty | Allocation::Lane(_) => {}
            Allocation::Range(range) => {
                let (start, bytes) = self.planner.free(range);
                self.hazards.insert(start..start + bytes, home, uses);
            }
            Allocation::View(view) => {
                let mut uses = uses;
                if home.may_end() {
                    record_end(home, &mut uses);
                }
                self.views.free(view, &mut self.planner, home, &uses);
                for piece in self.views.pieces(view) {
                    self.hazards.insert(piece, home, uses.clone());
                }
            }
        }
    }

    /// Carries out a plan by copies on `stream`, ordered after all earlier uses of the bytes and
    /// before all later uses of the moved blocks.
    ///
    /// If the device refuses a copy, the moves before it remain valid. A block that is half moved
    /// then, or whose later uses cannot be ordered after the copy, is lost: using it is an error.
    pub(super) fn apply(
        &mut self,
        device: &D,
        plan: &Compaction,
        stream: &D::Stream,
    ) -> Result<(), DeviceError> {
        // All waits first: if one fails, nothing has moved, and the hazards are unchanged.
        self.wait_before(plan, stream)?;

        let refused = self.copy(device, plan, stream).err();
        let completed = refused
            .as_ref()
            .map_or(plan.moves.len(), |refused| refused.completed);
        let half = plan.moves[completed..]
            .first()
            .filter(|_| refused.as_ref().is_some_and(|refused| refused.partial));

        if refused.is_none() {
            self.planner.apply(plan);
        } else if completed > 0 {
            let mut valid = plan.clone();
            valid.moves.truncate(completed);
            self.planner.apply(&valid);
        }

        let done = stream.record();
        for m in &plan.moves[..completed] {
            self.moved_bytes += m.bytes;
            self.hazards.remove(m.to..m.to + m.bytes);
            match &done {
                Err(error) => self.lose(m.range, stream, error),
                Ok(done) => {
                    if let Some(moving) = self.movable.get_mut(&Allocation::Range(m.range)) {
                        moving.uses = vec![(stream.id(), done.clone())];
                        moving.ready = Some((stream.id(), done.clone()));
                    }
                }
            }
        }

        if let (Some(m), Some(refused)) = (half, &refused) {
            self.lose(m.range, stream, &refused.error);
        }

        // Vacated bytes, and free bytes written by half a move, may be used after the copies.
        let vacated = plan.moves[..completed]
            .iter()
            .map(|m| m.from..m.from + m.bytes);
        let written = half.map(|m| m.to..m.to + m.bytes);

        for range in self.planner.free_within(vacated.chain(written)) {
            self.hazards.remove(range.clone());
            let uses = done
                .iter()
                .map(|done| (stream.id(), done.clone()))
                .collect();
            self.hazards.insert(range, stream, uses);
        }

        self.compactions += u64::from(completed > 0);
        refused.map_or(done.map(|_| ()), |refused| Err(refused.error))
    }

    /// Makes `stream` wait for the uses of the blocks that a plan moves, and of the bytes to which
    /// it moves them.
    fn wait_before(&self, plan: &Compaction, stream: &D::Stream) -> Result<(), DeviceError> {
        for m in &plan.moves {
            let Some(moving) = self.movable.get(&Allocation::Range(m.range)) else {
                continue;
            };
            for (_, event) in moving.uses.iter().filter(|(id, _)| *id != stream.id()) {
                wait_unless_done(stream, event)?;
            }
            let home = moving.home.id();
            if home != stream.id() && !moving.uses.iter().any(|(id, _)| *id == home) {
                wait_unless_done(stream, &moving.home.record()?)?;
            }
        }
        for m in &plan.moves {
            self.hazards.wait(m.to..m.to + m.bytes, stream)?;
        }
        Ok(())
    }

    /// Enqueues the copies of a plan.
    fn copy(&self, device: &D, plan: &Compaction, stream: &D::Stream) -> Result<(), Refused> {
        for (completed, m) in plan.moves.iter().enumerate() {
            for (nth, (from, to, bytes)) in m.copies().enumerate() {
                // SAFETY: offsets of ranges are within the pool's memory, which is the device's;
                // `apply` orders the accesses by events.
                let at = |offset| unsafe {
                    AnySlice::from_raw_parts(
                        self.source.address(offset),
                        bytes as usize,
                        DType::U8,
                        device.id(),
                    )
                };
                let copied = device.copy(stream, at(from), at(to));
                copied.map_err(|error| Refused {
                    completed,
                    partial: nth > 0,
                    error,
                })?;
            }
        }

        Ok(())
    }

    /// Marks a block's contents as lost: every later use returns an error. All its earlier uses
    /// precede the operations that are on `stream` now.
    fn lose(&mut self, range: RangeId, stream: &D::Stream, why: &DeviceError) {
        self.planner.pin(range, true);
        if let Some(moving) = self.movable.get_mut(&Allocation::Range(range)) {
            let cause = format!("the block's contents were lost when a move failed: {why}").into();
            let stream_name = stream.name().to_owned();
            let op = "compaction".to_owned();
            moving.lost = Some(DeviceError::Operation {
                stream: stream_name,
                op,
                cause,
            });
            (moving.home, moving.uses, moving.ready) = (stream.clone(), Vec::new(), None);
        }
    }
}
