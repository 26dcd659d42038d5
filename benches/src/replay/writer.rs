//! Recording a synthetic trace.

use super::{Op, Trace};

/// A trace being recorded; live allocations are identified by slot.
pub(super) struct Writer {
    trace: Trace,
    sizes: Vec<u64>,
    spare: Vec<u32>,
    live_bytes: u64,
    random: u64,
}

impl Writer {
    pub(super) fn new(name: String, seed: u64) -> Self {
        let trace = Trace {
            name,
            ..Trace::default()
        };
        Self {
            trace,
            sizes: Vec::new(),
            spare: Vec::new(),
            live_bytes: 0,
            random: seed,
        }
    }

    pub(super) fn allocate(&mut self, bytes: u64) -> u32 {
        let slot = self.spare.pop().unwrap_or(self.sizes.len() as u32);
        if slot as usize == self.sizes.len() {
            self.sizes.push(0);
        }
        self.sizes[slot as usize] = bytes;
        self.live_bytes += bytes;
        self.trace.live_peak_bytes = self.trace.live_peak_bytes.max(self.live_bytes);
        self.trace.allocations += 1;
        self.trace.ops.push(Op::Allocate { slot, bytes });
        slot
    }

    pub(super) fn free(&mut self, slot: u32) {
        self.live_bytes -= self.sizes[slot as usize];
        self.spare.push(slot);
        self.trace.ops.push(Op::Free { slot });
    }

    pub(super) fn free_all(&mut self, slots: Vec<u32>) {
        for slot in slots {
            self.free(slot);
        }
    }

    /// A temporary, allocated and freed at once.
    pub(super) fn scratch(&mut self, bytes: u64) {
        let slot = self.allocate(bytes);
        self.free(slot);
    }

    /// A random number below `bound` (SplitMix64).
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }

    /// The size of the block in `slot`.
    pub(super) fn bytes_of(&self, slot: u32) -> u64 {
        self.sizes[slot as usize]
    }

    pub(super) fn finish(mut self) -> Trace {
        self.trace.slots = self.sizes.len();
        self.trace
    }
}
