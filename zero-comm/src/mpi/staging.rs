//! The memory of transfers. MPI accesses only this memory, never a caller's buffer: after a failure
//! it is leaked unless all of its transfers have ended, whereas the caller may free the buffers at
//! once.
//!
//! This costs one copy of the bytes sent and one of the bytes received, and as much memory while a
//! phase runs. The leak is bounded by the phases that run at the first failure, after which no
//! other begins.

use std::mem::ManuallyDrop;
use std::ops::Range;

use zero_alloc::device::AnySlice;

/// The alignment of a part: that of the widest element.
const ALIGN: usize = align_of::<u64>();

/// The memory of one phase's transfers. Dropping it leaks the memory.
pub(super) struct Staging {
    memory: ManuallyDrop<Vec<u64>>,
    sends: Vec<Range<usize>>,
    receives: Vec<Range<usize>>,
}

impl Staging {
    /// Copies `sends` to new memory, a part that is sent to several ranks once, with space for
    /// received parts of `receives` bytes.
    pub(super) fn new(sends: &[AnySlice], receives: impl Iterator<Item = usize>) -> Self {
        let mut end = 0;
        let mut place = |bytes: usize| {
            let start = end;
            end += bytes.next_multiple_of(ALIGN);
            start..start + bytes
        };

        let repeats = |index: usize| {
            let same = |a: AnySlice, b: AnySlice| {
                a.as_ptr() == b.as_ptr() && a.len_bytes() == b.len_bytes()
            };
            index > 0 && same(sends[index], sends[index - 1])
        };

        let mut places: Vec<Range<usize>> = Vec::with_capacity(sends.len());
        for (index, part) in sends.iter().enumerate() {
            places.push(if repeats(index) {
                places[index - 1].clone()
            } else {
                place(part.len_bytes())
            });
        }

        let receives = receives.map(&mut place).collect();
        let memory = ManuallyDrop::new(vec![0; end / ALIGN]);
        let mut staging = Self {
            memory,
            sends: places,
            receives,
        };

        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut staging.memory);
        for (_, (part, place)) in sends
            .iter()
            .zip(&staging.sends)
            .enumerate()
            .filter(|&(index, _)| !repeats(index))
        {
            part.note_access(false);
            // SAFETY: the caller's buffer is valid for its length and not written to during the
            // collective, by the promise of its maker; `bytes` is new memory.
            unsafe {
                part.as_ptr()
                    .copy_to_nonoverlapping(bytes[place.clone()].as_mut_ptr(), place.len())
            };
        }

        staging
    }

    /// The places of the parts to send and to receive: addresses and bytes.
    pub(super) fn places(&mut self) -> [Vec<(*mut u8, usize)>; 2] {
        let start = self.memory.as_mut_ptr().cast::<u8>();
        let at = |place: &Range<usize>| (start.wrapping_add(place.start), place.len());
        [
            self.sends.iter().map(at).collect(),
            self.receives.iter().map(at).collect(),
        ]
    }

    /// A received part.
    pub(super) fn received(&self, index: usize) -> &[u8] {
        &bytemuck::cast_slice(&self.memory)[self.receives[index].clone()]
    }

    /// Copies a received part to `to`, which has its length.
    pub(super) fn copy_to(&self, index: usize, to: AnySlice) {
        let from = self.received(index);
        debug_assert_eq!(from.len(), to.len_bytes());
        to.note_access(true);
        // SAFETY: the caller's buffer is valid for its length, and only this collective accesses it
        // now, by the promise of its maker; the part is other memory.
        unsafe {
            to.as_ptr()
                .copy_from_nonoverlapping(from.as_ptr(), from.len().min(to.len_bytes()))
        };
    }

    /// Frees the memory.
    ///
    /// # Safety
    /// All transfers have ended.
    pub(super) unsafe fn free(mut self) {
        // SAFETY: `self` is consumed, so this happens once; no transfer accesses the memory, by the
        // caller's promise.
        unsafe { ManuallyDrop::drop(&mut self.memory) };
    }
}

#[cfg(test)]
mod tests {
    use zero_alloc::device::{DType, DeviceId};

    use super::*;

    #[test]
    fn transfers_use_other_memory_than_the_buffers() {
        let mut a = [1u8, 2, 3];
        let mut b = [4u8; 9];
        let mut out = [0u8; 5];
        // SAFETY: the arrays outlive the slices; nothing else accesses them.
        let slice = |bytes: &mut [u8]| unsafe {
            AnySlice::from_raw_parts(bytes.as_mut_ptr(), bytes.len(), DType::U8, DeviceId::HOST)
        };
        let a = slice(&mut a);
        let b = slice(&mut b);
        let to = slice(&mut out);
        let mut staging = Staging::new(&[a, a, b], [5, 0].into_iter());
        let [sends, receives] = staging.places();
        // A part for several ranks is copied once.
        assert_eq!((sends[0], sends[0].1, sends[2].1), (sends[1], 3, 9));
        assert!(
            sends
                .iter()
                .chain(&receives)
                .all(|(at, _)| at.addr().is_multiple_of(ALIGN))
        );
        // SAFETY: the place has 9 bytes.
        assert_eq!(unsafe { std::slice::from_raw_parts(sends[2].0, 9) }, [4; 9]);
        // SAFETY: the place has 5 bytes.
        unsafe { receives[0].0.write_bytes(7, 5) };
        staging.copy_to(0, to);
        assert_eq!(
            (staging.received(0), staging.received(1)),
            (&[7u8; 5][..], &[][..])
        );
        // SAFETY: nothing was transferred.
        unsafe { staging.free() };
        assert_eq!(out, [7; 5]);
    }
}
