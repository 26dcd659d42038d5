//! The state that a pool's lock protects: allocating, freeing.

use super::Purpose;
use super::hazards::{Hazards, record_end};
use super::report::Account;
use super::source::Source;
use super::stitched::{ViewId, Views};
use crate::device::{Device, DeviceError, Stream};
use crate::planner::{Planner, RangeId, Remedy, Request, Stitch};

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
    /// The budget (`None`) or the device (with its message) is exhausted.
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

pub(super) struct State<D: Device> {
    pub(super) planner: Planner,
    pub(super) source: Source,
    pub(super) hazards: Hazards<D>,
    pub(super) views: Views<D>,
    /// Of the blocks that are not in lanes.
    pub(super) account: Account,
    /// Bytes of the lanes' chunks.
    pub(super) lane_bytes: usize,
}

/// The tag of the lanes' chunks; lower tags are purposes.
pub(super) const LANE_TAG: u8 = Purpose::ALL.len() as u8;

/// Each round of [`State::allocate`] grows; more than a few would be a bug in the
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
                return Ok(Allocation::Range(range));
            }
            if let Some(view) = self.make_room(device, request, stream, budget_bytes)? {
                return Ok(view);
            }
        }
        Err(Failure::OutOfMemory(None))
    }

    /// Grows or maps so that the request fits; returns the allocation if a view holds it.
    fn make_room(
        &mut self,
        device: &D,
        request: Request,
        stream: &D::Stream,
        budget_bytes: usize,
    ) -> Result<Option<Allocation>, Failure> {
        let bytes = request.bytes as usize;
        if let Source::Backings(backings) = &mut self.source {
            return match backings.grow(device, bytes, budget_bytes)? {
                Some(bytes) => {
                    backings.set_start(self.planner.add_segment(bytes as u64));
                    Ok(None)
                }
                None => Err(Failure::OutOfMemory(None)),
            };
        }

        if let Some(view) = self
            .views
            .allocate_kept(&mut self.planner, request.bytes, request.tag)
        {
            return Ok(self.order_view(view, stream).map(Some)?);
        }
        let remedy = self
            .planner
            .find_remedy(request)
            .map_err(|_| Failure::OutOfMemory(None))?;
        let plan = match remedy {
            Remedy::Stitch(plan) => plan,
            Remedy::Grow { bytes } => match self.grow(device, bytes) {
                Ok(()) => return Ok(None),
                // The device is out of pages: only reserved memory can help.
                Err(error) => self.planner.find_stitch(request).ok_or(error)?,
            },
        };
        Ok(Some(self.stitch(device, &plan, request.tag, stream)?))
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
}
