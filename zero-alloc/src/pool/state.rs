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
pub(super) enum Hold {
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
    /// Neither the device nor the budget has more, and moving does not help.
    NoRoom,
    /// The device failed.
    Failed(DeviceError),
}

impl From<DeviceError> for Refusal {
    fn from(error: DeviceError) -> Self {
        Self::Failed(error)
    }
}

/// A block that may be moved while nobody looks.
pub(super) struct Moving<D: Device> {
    pub(super) home: D::Stream,
    /// The last noted use on each stream.
    pub(super) uses: Vec<(u64, D::Event)>,
    /// Its bytes are in place behind this event, of this stream.
    pub(super) ready: Option<(u64, D::Event)>,
    /// How many look.
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
    ) -> Result<Hold, Refusal> {
        for _ in 0..ROUNDS {
            if let Some((range, start)) = self.planner.allocate(request) {
                let end = start + self.planner.bytes_of(range);
                if let Err(error) = self.hazards.take(start..end, stream) {
                    self.planner.free(range);
                    return Err(error.into());
                }
                self.planner.pin(range, true);
                return Ok(Hold::Range(range));
            }
            if let Some(hold) = self.make_room(device, request, stream, budget_bytes)? {
                return Ok(hold);
            }
        }
        Err(Refusal::NoRoom)
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
    ) -> Result<Option<Hold>, Refusal> {
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
                None => Err(refused.map_or(Refusal::NoRoom, Into::into)),
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
            Err(_) => return Err(Refusal::NoRoom),
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

    fn stitch(&mut self, device: &D, plan: &Stitch, tag: u8, stream: &D::Stream) -> Result<Hold, DeviceError> {
        let (Source::Arena(arena), Some(memory)) = (&self.source, device.virtual_memory()) else {
            return Err(DeviceError::Driver { call: "stitch", message: "no virtual memory".into() });
        };
        let view = self.views.stitch(memory, arena, &mut self.planner, plan, tag)?;
        self.enter(view, stream)
    }

    /// Orders a view that was just taken behind the earlier users of its bytes.
    fn enter(&mut self, view: ViewId, stream: &D::Stream) -> Result<Hold, DeviceError> {
        for piece in self.views.pieces(view) {
            if let Err(error) = self.hazards.take(piece, stream) {
                // What was waited for is waited for; only the bytes go back.
                self.free(Hold::View(view), stream, Vec::new());
                return Err(error);
            }
        }
        Ok(Hold::View(view))
    }

    /// The address of a hold's first byte.
    pub(super) fn address(&self, hold: Hold) -> *mut u8 {
        match hold {
            // A lane knows the addresses of what it has.
            Hold::Nothing | Hold::Lane(_) => std::ptr::null_mut(),
            Hold::Range(range) => self.source.address(self.planner.offset_of(range)),
            Hold::View(view) => self.views.address(view),
        }
    }

    /// Gives bytes back: `uses` and all of `home` so far lie before anyone else's.
    pub(super) fn free(&mut self, hold: Hold, home: &D::Stream, uses: Vec<(u64, D::Event)>) {
        match hold {
            Hold::Nothing | Hold::Lane(_) => {}
            Hold::Range(range) => {
                self.movable.remove(&range);
                let (start, bytes) = self.planner.free(range);
                self.hazards.put(start..start + bytes, home, uses);
            }
            Hold::View(view) => {
                self.views.free(view, &mut self.planner, home, &uses);
                for piece in self.views.pieces(view) {
                    self.hazards.put(piece, home, uses.clone());
                }
            }
        }
    }

    /// Makes the moves of a plan: copies on `stream`, behind everything that used the bytes, and everyone who uses
    /// the moved blocks later comes behind the copies.
    pub(super) fn apply(&mut self, device: &D, plan: &Compaction, stream: &D::Stream) -> Result<(), DeviceError> {
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
        // Hazards first: should a wait fail, nothing has moved yet.
        for m in &plan.moves {
            self.hazards.take(m.to..m.to + m.bytes, stream)?;
        }
        for m in &plan.moves {
            for (from, to, bytes) in m.copies() {
                device.copy(stream, self.bytes_at(from, bytes), self.bytes_at(to, bytes))?;
            }
            self.moved_bytes += m.bytes;
        }
        self.planner.apply(plan);
        let done = stream.record()?;
        for m in &plan.moves {
            if let Some(moving) = self.movable.get_mut(&m.range) {
                moving.uses = vec![(stream.id(), done.clone())];
                moving.ready = Some((stream.id(), done.clone()));
            }
        }
        // What became free may be touched behind the copies.
        let vacated = self.planner.free_within(plan.moves.iter().map(|m| m.from..m.from + m.bytes));
        for range in vacated {
            self.hazards.put_behind(range, stream, &done);
        }
        self.compactions += 1;
        Ok(())
    }

    fn bytes_at(&self, offset: u64, bytes: u64) -> AnySlice {
        // SAFETY: offsets of ranges lie within the pool's memory; `apply` orders the accesses by events.
        unsafe { AnySlice::from_raw_parts(self.source.address(offset), bytes as usize, DType::U8) }
    }
}
