//! Blocks that compaction may move.

use std::fmt;
use std::sync::Arc;

use super::state::{Allocation, Moving};
use super::{AllocError, Central, Pool, Purpose};
use crate::device::{AnySlice, DType, Device, DeviceError, Stream};

/// An owned piece of device memory without a fixed address: [`Pool::compact`] may move it while it
/// is not in use. Dropping it frees it in stream order.
#[must_use = "dropping a block frees its memory"]
pub struct Movable<D: Device> {
    central: Arc<Central<D>>,
    allocation: Allocation,
    len: usize,
    dtype: DType,
    purpose: Purpose,
    home: D::Stream,
}

impl<D: Device> fmt::Debug for Movable<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Movable({:?}: {} x {})",
            self.purpose, self.len, self.dtype
        )
    }
}

impl<D: Device> Pool<D> {
    /// Allocates as [`Pool::allocate`] does, but a block that compaction may move.
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
        self.device().check_stream("allocate_movable", stream)?;
        let bytes = self.bytes_of(len, dtype, purpose)?;
        let (allocation, _) =
            self.allocate_central(self.central().state.lock(), bytes, purpose, stream)?;
        if allocation != Allocation::Empty {
            let mut state = self.central().state.lock();
            if let Allocation::Range(range) = allocation {
                state.planner.pin(range, false);
            }
            let moving = Moving {
                home: stream.clone(),
                uses: Vec::new(),
                ready: None,
                lost: None,
                unrecorded: Vec::new(),
                pins: 0,
            };
            state.movable.insert(allocation, moving);
        }

        Ok(Movable {
            central: Arc::clone(&self.0[0].central),
            allocation,
            len,
            dtype,
            purpose,
            home: stream.clone(),
        })
    }
}

impl<D: Device> Movable<D> {
    /// The number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the block has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The purpose under which the block is accounted.
    pub fn purpose(&self) -> Purpose {
        self.purpose
    }

    /// Calls `enqueue`, which enqueues operations that use the block on `stream`. The block does
    /// not move during the call, and later moves wait for these operations.
    ///
    /// # Errors
    /// The stream failed, or is of another device; or a failed move lost the block's contents.
    ///
    /// # Safety
    /// The slice is used only by operations that `enqueue` enqueues on `stream`; conflicting
    /// accesses are ordered by streams and events.
    pub unsafe fn with<R>(
        &self,
        stream: &D::Stream,
        enqueue: impl FnOnce(AnySlice) -> R,
    ) -> Result<R, DeviceError> {
        self.central.device.check_stream("Movable::with", stream)?;
        let mut state = self.central.state.lock();
        let ptr = state.address(self.allocation);
        if let Some(moving) = state.movable.get_mut(&self.allocation) {
            if let Some(error) = &moving.lost {
                return Err(error.clone());
            }
            if let Some((_, ready)) = moving.ready.as_ref().filter(|(id, _)| *id != stream.id()) {
                stream.wait(ready)?;
            }
            moving.pins += 1;
            if let Allocation::Range(range) = self.allocation {
                state.planner.pin(range, true);
            }
        }

        drop(state);
        let unpin = Unpin {
            block: self,
            stream,
        };

        // SAFETY: the block is valid for its length and stays where it is; the rest is the caller's
        // promise.
        let slice = unsafe {
            AnySlice::from_raw_parts(ptr, self.len, self.dtype, self.central.device.id())
        };
        let result = enqueue(slice);
        drop(unpin);
        Ok(result)
    }
}

/// Records the use and lets the block move again, also if `enqueue` panics.
struct Unpin<'a, D: Device> {
    block: &'a Movable<D>,
    stream: &'a D::Stream,
}

impl<D: Device> Drop for Unpin<'_, D> {
    fn drop(&mut self) {
        let allocation = self.block.allocation;
        let used = self.stream.record();
        let mut state = self.block.central.state.lock();
        let Some(moving) = state.movable.get_mut(&allocation) else {
            return;
        };
        // A use that cannot be recorded keeps its pin: the block never moves again.
        let Ok(event) = used else {
            return moving.unrecorded.push(self.stream.clone());
        };
        moving.uses.retain(|(id, _)| *id != self.stream.id());
        moving.uses.push((self.stream.id(), event));
        moving.pins -= 1;
        if let Allocation::Range(range) = allocation
            && moving.pins == 0
        {
            state.planner.pin(range, false);
        }
    }
}

impl<D: Device> Drop for Movable<D> {
    fn drop(&mut self) {
        let mut state = self.central.state.lock();
        let moving = state.movable.remove(&self.allocation);
        let bytes = self.len * self.dtype.size_bytes();
        let (mut home, mut uses, unrecorded) = moving.map_or_else(
            || (self.home.clone(), Vec::new(), Vec::new()),
            |m| (m.home, m.uses, m.unrecorded),
        );

        for stream in unrecorded {
            uses.retain(|(id, _)| *id != stream.id());
            match stream.record() {
                Ok(event) => uses.push((stream.id(), event)),
                // As the home stream it is recorded at reuse, which fails until that succeeds.
                Err(_) => {
                    let before = std::mem::replace(&mut home, stream);
                    if !uses.iter().any(|(id, _)| *id == before.id()) {
                        uses.extend(before.record().map(|event| (before.id(), event)));
                    }
                }
            }
        }

        state.free(self.allocation, &home, uses);
        state.account.sub(self.purpose, bytes);
    }
}
