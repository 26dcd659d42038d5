//! What lies behind a pool's lock: taking, freeing, moving.

use std::collections::HashMap;

use super::Purpose;
use super::hazards::{Hazards, wait_unless_done};
use super::report::Account;
use super::source::Source;
use super::stitched::{ViewId, Views};
use crate::device::{AnySlice, DType, Device, DeviceError, Stream};
use crate::planner::{Compaction, Planner, RangeId, Request, Room, Stitch};

/// What a block holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Allocation {
    /// No bytes.
    Nothing,
    /// A range of the offset space.
    Range(RangeId),
    /// A range of the space of a lane.
    Lane(RangeId),
    /// Several, seen through a view.
    View(ViewId),
}

/// Why bytes could not be taken.
#[derive(Debug)]
pub(super) enum Refusal {
    /// Neither the device nor the budget has more, and moving does not help. What the device said, where it was the
    /// device that had no more.
    NoRoom(Option<String>),
    /// The device failed.
    Failed(DeviceError),
}

impl From<DeviceError> for Refusal {
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::OutOfMemory { detail, .. } => Self::NoRoom(Some(detail)),
            error => Self::Failed(error),
        }
    }
}

/// A copy that the device refused to enqueue.
struct Refused {
    /// How many moves were enqueued whole.
    made: usize,
    /// Whether a part of the next was.
    begun: bool,
    error: DeviceError,
}

/// A block that may be moved while nobody looks.
pub(super) struct Moving<D: Device> {
    pub(super) home: D::Stream,
    /// The last noted use on each stream.
    pub(super) uses: Vec<(u64, D::Event)>,
    /// Its bytes are in place behind this event, of this stream.
    pub(super) ready: Option<(u64, D::Event)>,
    /// Set where its contents are gone: what every use is told.
    pub(super) lost: Option<DeviceError>,
    /// Streams with a use that gave no event.
    pub(super) unnoted: Vec<D::Stream>,
    /// How many look, and once for each of those.
    pub(super) pins: u32,
}

pub(super) struct State<D: Device> {
    pub(super) planner: Planner,
    pub(super) source: Source,
    pub(super) hazards: Hazards<D>,
    pub(super) views: Views<D>,
    pub(super) movable: HashMap<RangeId, Moving<D>>,
    /// Of the blocks that are not in lanes.
    pub(super) account: Account,
    /// Bytes of the chunks that lanes have.
    pub(super) lent_bytes: usize,
    pub(super) moved_bytes: u64,
    pub(super) compactions: u64,
}

/// The tag of what lanes have; those below are purposes.
pub(super) const LENT: u8 = Purpose::ALL.len() as u8;

/// Each round of [`State::take`] grows or compacts; more than a few would mean a mistake in the planner.
const ROUNDS: usize = 8;

impl<D: Device> State<D> {
    /// Takes bytes, ordered on `stream` behind their earlier users.
    pub(super) fn take(
        &mut self,
        device: &D,
        request: Request,
        stream: &D::Stream,
        budget_bytes: usize,
    ) -> Result<Allocation, Refusal> {
        for _ in 0..ROUNDS {
            if let Some((range, start)) = self.planner.allocate(request) {
                let end = start + self.planner.bytes_of(range);
                if let Err(error) = self.hazards.take(start..end, stream) {
                    self.planner.free(range);
                    return Err(error.into());
                }
                self.planner.pin(range, true);
                return Ok(Allocation::Range(range));
            }
            if let Some(hold) = self.make_room(device, request, stream, budget_bytes)? {
                return Ok(hold);
            }
        }
        Err(Refusal::NoRoom(None))
    }

    /// What the budget leaves for new blocks.
    pub(super) fn room(&self, budget_bytes: usize) -> usize {
        budget_bytes.saturating_sub(self.account.0.total.live_bytes + self.lent_bytes)
    }

    /// Grows, moves or maps so that the request fits; a view holds it at once.
    fn make_room(
        &mut self,
        device: &D,
        request: Request,
        stream: &D::Stream,
        budget_bytes: usize,
    ) -> Result<Option<Allocation>, Refusal> {
        let bytes = request.bytes as usize;
        if let Source::Backings(backings) = &mut self.source {
            let refused = match backings.grow(device, bytes, budget_bytes) {
                Ok(Some(got)) => {
                    let start = self.planner.add_segment(got as u64);
                    backings.starts_at(start);
                    return Ok(None);
                }
                Ok(None) => None,
                Err(error) => Some(error),
            };
            return match self.planner.plan_compaction(request.bytes, request.align) {
                Some(plan) => Ok(self.apply(device, &plan, stream).map(|()| None)?),
                None => Err(refused.map_or(Refusal::NoRoom(None), Into::into)),
            };
        }
        if let Some(view) = self.views.reuse(&mut self.planner, request.bytes, request.tag) {
            return Ok(self.enter(view, stream).map(Some)?);
        }
        let refused = match self.planner.make_room(request) {
            Ok(Room::Grow { bytes }) => match self.grow(device, bytes) {
                Ok(()) => return Ok(None),
                Err(error) => error,
            },
            Ok(Room::Compact(plan)) => return Ok(self.apply(device, &plan, stream).map(|()| None)?),
            Ok(Room::Stitch(plan)) => return Ok(self.stitch(device, &plan, request.tag, stream).map(Some)?),
            Err(_) => return Err(Refusal::NoRoom(None)),
        };
        // The device has no page left: what is free already must do.
        match self.planner.make_room_without_growing(request) {
            Some(Room::Compact(plan)) => Ok(self.apply(device, &plan, stream).map(|()| None)?),
            Some(Room::Stitch(plan)) => Ok(self.stitch(device, &plan, request.tag, stream).map(Some)?),
            _ => Err(refused.into()),
        }
    }

    fn grow(&mut self, device: &D, bytes: u64) -> Result<(), DeviceError> {
        if let (Source::Arena(arena), Some(memory)) = (&mut self.source, device.virtual_memory()) {
            arena.grow(memory, bytes as usize)?;
            self.planner.grow(bytes);
        }
        Ok(())
    }

    fn stitch(&mut self, device: &D, plan: &Stitch, tag: u8, stream: &D::Stream) -> Result<Allocation, DeviceError> {
        let (Source::Arena(arena), Some(memory)) = (&self.source, device.virtual_memory()) else {
            return Err(DeviceError::Driver { call: "stitch", message: "no virtual memory".into() });
        };
        let view = self.views.stitch(memory, arena, &mut self.planner, plan, tag)?;
        self.enter(view, stream)
    }

    /// Orders a view that was just taken behind the earlier users of its bytes.
    fn enter(&mut self, view: ViewId, stream: &D::Stream) -> Result<Allocation, DeviceError> {
        let pieces = self.views.pieces(view);
        // All waits first: should one fail, the pieces go back with the hazards that they had.
        if let Err(error) = pieces.iter().try_for_each(|piece| self.hazards.wait(piece.clone(), stream)) {
            self.views.give_up(view, &mut self.planner);
            return Err(error);
        }
        for piece in pieces {
            self.hazards.forget(piece);
        }
        Ok(Allocation::View(view))
    }

    /// The address of a hold's first byte.
    pub(super) fn address(&self, hold: Allocation) -> *mut u8 {
        match hold {
            // A lane knows the addresses of what it has.
            Allocation::Nothing | Allocation::Lane(_) => std::ptr::null_mut(),
            Allocation::Range(range) => self.source.address(self.planner.offset_of(range)),
            Allocation::View(view) => self.views.address(view),
        }
    }

    /// Gives bytes back: `uses` and all of `home` so far lie before anyone else's.
    pub(super) fn free(&mut self, hold: Allocation, home: &D::Stream, uses: Vec<(u64, D::Event)>) {
        match hold {
            Allocation::Nothing | Allocation::Lane(_) => {}
            Allocation::Range(range) => {
                self.movable.remove(&range);
                let (start, bytes) = self.planner.free(range);
                self.hazards.put(start..start + bytes, home, uses);
            }
            Allocation::View(view) => {
                self.views.free(view, &mut self.planner, home, &uses);
                for piece in self.views.pieces(view) {
                    self.hazards.put(piece, home, uses.clone());
                }
            }
        }
    }

    /// Makes the moves of a plan: copies on `stream`, behind everything that used the bytes, and everyone who uses
    /// the moved blocks later comes behind the copies.
    ///
    /// Where the device refuses a copy, the moves before it stand. A block that is half moved then, or that no later
    /// use can be ordered behind, is lost: using it is an error.
    pub(super) fn apply(&mut self, device: &D, plan: &Compaction, stream: &D::Stream) -> Result<(), DeviceError> {
        // All waits first: should one fail, nothing has moved, and the hazards are as they were.
        for m in &plan.moves {
            if let Some(moving) = self.movable.get(&m.range) {
                for (_, event) in moving.uses.iter().filter(|(id, _)| *id != stream.id()) {
                    wait_unless_done(stream, event)?;
                }
                if moving.home.id() != stream.id() && !moving.uses.iter().any(|(id, _)| *id == moving.home.id()) {
                    wait_unless_done(stream, &moving.home.record()?)?;
                }
            }
        }
        for m in &plan.moves {
            self.hazards.wait(m.to..m.to + m.bytes, stream)?;
        }
        let refused = self.copy(device, plan, stream).err();
        let made = refused.as_ref().map_or(plan.moves.len(), |refused| refused.made);
        let half = plan.moves[made..].first().filter(|_| refused.as_ref().is_some_and(|refused| refused.begun));
        if refused.is_none() {
            self.planner.apply(plan);
        } else if made > 0 {
            let mut stands = plan.clone();
            stands.moves.truncate(made);
            self.planner.apply(&stands);
        }
        let done = stream.record();
        for m in &plan.moves[..made] {
            self.moved_bytes += m.bytes;
            self.hazards.forget(m.to..m.to + m.bytes);
            match &done {
                Err(error) => self.lose(m.range, stream, error),
                Ok(done) => {
                    if let Some(moving) = self.movable.get_mut(&m.range) {
                        moving.uses = vec![(stream.id(), done.clone())];
                        moving.ready = Some((stream.id(), done.clone()));
                    }
                }
            }
        }
        if let (Some(m), Some(refused)) = (half, &refused) {
            self.lose(m.range, stream, &refused.error);
        }
        // What became free may be touched behind the copies, and so may the free bytes that half a move wrote.
        let vacated = plan.moves[..made].iter().map(|m| m.from..m.from + m.bytes);
        let written = half.map(|m| m.to..m.to + m.bytes);
        for range in self.planner.free_within(vacated.chain(written)) {
            self.hazards.forget(range.clone());
            let uses = done.iter().map(|done| (stream.id(), done.clone())).collect();
            self.hazards.put(range, stream, uses);
        }
        self.compactions += u64::from(made > 0);
        refused.map_or(done.map(|_| ()), |refused| Err(refused.error))
    }

    /// Enqueues the copies of a plan.
    fn copy(&self, device: &D, plan: &Compaction, stream: &D::Stream) -> Result<(), Refused> {
        for (made, m) in plan.moves.iter().enumerate() {
            for (nth, (from, to, bytes)) in m.copies().enumerate() {
                let copied = device.copy(stream, self.bytes_at(from, bytes), self.bytes_at(to, bytes));
                copied.map_err(|error| Refused { made, begun: nth > 0, error })?;
            }
        }
        Ok(())
    }

    /// The contents of a block are not what they were: from now on using it is an error. All that used it
    /// lies before what `stream` has so far.
    fn lose(&mut self, range: RangeId, stream: &D::Stream, why: &DeviceError) {
        self.planner.pin(range, true);
        if let Some(moving) = self.movable.get_mut(&range) {
            let message = format!("the contents of a block that was being moved are lost: {why}");
            let (stream_name, op) = (stream.name().to_owned(), "compaction".to_owned());
            moving.lost = Some(DeviceError::Operation { stream: stream_name, op, message });
            (moving.home, moving.uses, moving.ready) = (stream.clone(), Vec::new(), None);
        }
    }

    fn bytes_at(&self, offset: u64, bytes: u64) -> AnySlice {
        // SAFETY: offsets of ranges lie within the pool's memory; `apply` orders the accesses by events.
        unsafe { AnySlice::from_raw_parts(self.source.address(offset), bytes as usize, DType::U8) }
    }
}
