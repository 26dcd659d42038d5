//! Blocks that compaction may move.

use std::fmt;
use std::sync::Arc;

use super::lane::Lane;
use super::state::{Allocation, Moving};
use super::{AllocError, Pool, Purpose};
use crate::device::{AnySlice, DType, Device, DeviceError, Stream};

/// An owned piece of device memory without a fixed address: [`Pool::compact`] may move it while it is not in
/// use. Dropping it gives it back in stream order.
#[must_use = "dropping a block gives its memory back"]
pub struct Movable<D: Device> {
    lane: Arc<Lane<D>>,
    hold: Allocation,
    len: usize,
    dtype: DType,
    purpose: Purpose,
    home: D::Stream,
}

impl<D: Device> fmt::Debug for Movable<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Movable({:?}: {} x {})", self.purpose, self.len, self.dtype)
    }
}

impl<D: Device> Pool<D> {
    /// A block as [`Pool::allocate`] gives it, but one that compaction may move.
    ///
    /// # Errors
    /// As for [`Pool::allocate`].
    pub fn allocate_movable(
        &self,
        len: usize,
        dtype: DType,
        purpose: Purpose,
        stream: &D::Stream,
    ) -> Result<Movable<D>, AllocError> {
        let bytes = self.bytes_of(len, dtype, purpose)?;
        // From the planner: a lane's blocks stay where they are.
        let (hold, _) = self.take_central(self.central().state.lock(), bytes, purpose, stream)?;
        let lane = self.lane();
        let mut state = lane.central.state.lock();
        if let Allocation::Range(range) = hold {
            state.planner.pin(range, false);
            let moving = Moving {
                home: stream.clone(),
                uses: Vec::new(),
                ready: None,
                lost: None,
                unnoted: Vec::new(),
                pins: 0,
            };
            state.movable.insert(range, moving);
        }
        drop(state);
        Ok(Movable { lane: Arc::clone(lane), hold, len, dtype, purpose, home: stream.clone() })
    }
}

impl<D: Device> Movable<D> {
    /// How many elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What it is held for.
    pub fn purpose(&self) -> Purpose {
        self.purpose
    }

    /// Lets `enqueue` put operations that use the block on `stream`. It does not move meanwhile, and whatever moves it
    /// later waits for them.
    ///
    /// # Errors
    /// The stream is gone; or the device failed while the block was moved, and its contents are lost.
    ///
    /// # Safety
    /// The slice is used only by operations that `enqueue` puts on `stream`; conflicting accesses are ordered by
    /// streams and events.
    pub unsafe fn with<R>(&self, stream: &D::Stream, enqueue: impl FnOnce(AnySlice) -> R) -> Result<R, DeviceError> {
        let mut state = self.lane.central.state.lock();
        let ptr = state.address(self.hold);
        if let Allocation::Range(range) = self.hold
            && let Some(moving) = state.movable.get_mut(&range)
        {
            if let Some(error) = &moving.lost {
                return Err(error.clone());
            }
            if let Some((_, ready)) = moving.ready.as_ref().filter(|(id, _)| *id != stream.id()) {
                stream.wait(ready)?;
            }
            moving.pins += 1;
            state.planner.pin(range, true);
        }
        drop(state);
        let unpin = Unpin { block: self, stream };
        // SAFETY: the block is valid for its length and stays where it is; the rest is the caller's promise.
        let result = enqueue(unsafe { AnySlice::from_raw_parts(ptr, self.len, self.dtype) });
        drop(unpin);
        Ok(result)
    }
}

/// Notes the use and lets the block move again, also if `enqueue` panics.
struct Unpin<'a, D: Device> {
    block: &'a Movable<D>,
    stream: &'a D::Stream,
}

impl<D: Device> Drop for Unpin<'_, D> {
    fn drop(&mut self) {
        let Allocation::Range(range) = self.block.hold else { return };
        let used = self.stream.record();
        let mut state = self.block.lane.central.state.lock();
        let Some(moving) = state.movable.get_mut(&range) else { return };
        // A use that cannot be noted keeps its pin: the block stays where it is for good.
        let Ok(event) = used else { return moving.unnoted.push(self.stream.clone()) };
        moving.uses.retain(|(id, _)| *id != self.stream.id());
        moving.uses.push((self.stream.id(), event));
        moving.pins -= 1;
        if moving.pins == 0 {
            state.planner.pin(range, false);
        }
    }
}

impl<D: Device> Drop for Movable<D> {
    fn drop(&mut self) {
        let mut state = self.lane.central.state.lock();
        let moving = match self.hold {
            Allocation::Range(range) => state.movable.remove(&range),
            _ => None,
        };
        let bytes = self.len * self.dtype.size_bytes();
        let (mut home, mut uses, unnoted) =
            moving.map_or_else(|| (self.home.clone(), Vec::new(), Vec::new()), |m| (m.home, m.uses, m.unnoted));
        for stream in unnoted {
            uses.retain(|(id, _)| *id != stream.id());
            match stream.record() {
                Ok(event) => uses.push((stream.id(), event)),
                // Whoever takes the bytes asks it again, and gets no bytes while it gives no event.
                Err(_) => {
                    let before = std::mem::replace(&mut home, stream);
                    if !uses.iter().any(|(id, _)| *id == before.id()) {
                        uses.extend(before.record().map(|event| (before.id(), event)));
                    }
                }
            }
        }
        state.free(self.hold, &home, uses);
        state.account.sub(self.purpose, bytes);
    }
}
