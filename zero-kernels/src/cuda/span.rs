//! The launch geometry of a flat range: the elements before the first whole tile, the streams that
//! are aligned to 16 bytes from there on, and the number of blocks. Pure arithmetic on addresses.
//!
//! A warp works on tiles of 256 elements, a thread on 8 of them: 16 bytes of a 16-bit stream, 32 of
//! an fp32 stream. Shards start at any element, so the streams of one launch may be aligned
//! differently; the head is chosen so that as many bytes as possible use 16-byte accesses. The
//! other streams are accessed element by element.

use bytemuck::{Pod, Zeroable};
use zero_alloc::device::AnySlice;

/// Threads of a block (`THREADS` of cuda/prelude.cuh).
pub const THREADS: u32 = 256;
/// Threads of a warp (`WARP` of cuda/prelude.cuh).
const WARP: u64 = 32;
/// Elements of a thread (`GROUP` of cuda/prelude.cuh).
pub(super) const GROUP_ELEMS: u64 = 8;
/// Elements of a tile (`TILE_ELEMS` of cuda/prelude.cuh).
const TILE_ELEMS: u64 = WARP * GROUP_ELEMS;
/// Bytes of a wide access.
const WIDE_BYTES: u64 = 16;

/// The partition of a range into tiles: `Span` of cuda/prelude.cuh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Span {
    /// Elements.
    pub len: u64,
    /// Elements before the first whole tile: fewer than 8.
    pub head: u32,
    /// Bit `s`: stream `s` is aligned to 16 bytes at the start of every tile but the head.
    pub wide: u32,
}

impl Span {
    /// The partition with the most bytes in 16-byte accesses, for at most 32 streams of equal
    /// length, in the kernel's order.
    pub fn of(streams: &[AnySlice]) -> Self {
        let streams_at: Vec<(u64, u64)> = streams
            .iter()
            .map(|s| (s.as_ptr() as u64, s.dtype().size_bytes() as u64))
            .collect();
        Self::best(streams.first().map_or(0, |s| s.len() as u64), &streams_at)
    }

    /// The partition whose first tile starts at the first element: of streams beside blocks, which
    /// are in tiles.
    pub(super) fn from_start(streams: &[AnySlice]) -> Self {
        let is_aligned = |s: &AnySlice| (s.as_ptr() as u64).is_multiple_of(WIDE_BYTES);
        let wide = (0..)
            .zip(streams)
            .map(|(i, s)| u32::from(is_aligned(s)) << i);
        Self {
            len: streams.first().map_or(0, |s| s.len() as u64),
            head: 0,
            wide: wide.sum(),
        }
    }

    /// The partition with the most bytes in 16-byte accesses, for streams of `len` elements as
    /// (address, element bytes).
    fn best(len: u64, streams: &[(u64, u64)]) -> Self {
        let wide_at = |head: u64| {
            let is_aligned =
                |&(address, size): &(u64, u64)| (address + head * size).is_multiple_of(WIDE_BYTES);
            let aligned = streams.iter().enumerate().filter(|(_, s)| is_aligned(s));
            aligned.fold((0u32, 0u64), |(bits, bytes), (i, &(_, size))| {
                (bits | 1 << i, bytes + size)
            })
        };

        let mut best = (0, wide_at(0));
        for head in 1..GROUP_ELEMS {
            let this = wide_at(head);
            if this.1 > best.1.1 {
                best = (head, this);
            }
        }

        let (head, (wide, _)) = best;
        Self {
            len,
            head: head.min(len) as u32,
            wide,
        }
    }

    /// The number of tiles: the head, if any, and tiles of 256 elements after it, the last of which
    /// may be shorter.
    pub fn tiles(&self) -> u64 {
        u64::from(self.head > 0) + (self.len - u64::from(self.head)).div_ceil(TILE_ELEMS)
    }

    /// Blocks of a launch: one warp per tile, up to the grid's limit; beyond it the kernels loop.
    pub fn blocks(&self) -> u32 {
        grid(self.tiles().div_ceil(u64::from(THREADS) / WARP))
    }
}

/// The number of blocks within the grid's limit.
pub(super) fn grid(blocks: u64) -> u32 {
    u32::try_from(blocks)
        .unwrap_or(u32::MAX)
        .min(i32::MAX as u32)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::host::stats_order::{CHUNK_ELEMS, STRIP_ELEMS, TOP_LANES};

    /// The elements of tile `index`: `tile_at` of the prelude.
    fn tile(span: &Span, index: u64) -> std::ops::Range<u64> {
        let head = u64::from(span.head);
        let Some(whole) = index.checked_sub(u64::from(head > 0)) else {
            return 0..head;
        };
        let start = head + whole * TILE_ELEMS;
        start..(start + TILE_ELEMS).min(span.len)
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        #[cfg_attr(miri, ignore)]
        fn tiles_are_aligned_and_cover_the_range(
            len in 0u64..1000,
            streams in prop::collection::vec((0u64..1000, prop::sample::select(vec![2u64, 4])), 1..6),
        ) {
            let streams: Vec<(u64, u64)> = streams.into_iter().map(|(at, size)| (at * size, size)).collect();
            let span = Span::best(len, &streams);
            prop_assert!(u64::from(span.head) < GROUP_ELEMS && u64::from(span.head) <= len);
            let mut next = 0;

            for i in 0..span.tiles() {
                let tile = tile(&span, i);
                prop_assert_eq!(tile.start, next);
                prop_assert!(tile.start < tile.end && tile.end - tile.start <= TILE_ELEMS);
                next = tile.end;
                let is_head = i == 0 && span.head > 0;
                for (s, &(address, size)) in streams.iter().enumerate() {
                    if span.wide >> s & 1 == 1 && !is_head && tile.end - tile.start == TILE_ELEMS {
                        prop_assert!((address + tile.start * size).is_multiple_of(WIDE_BYTES));
                    }
                }
            }

            prop_assert_eq!(next, len);
            // Each stream alone can always be wide: sizes divide 16.
            for &stream in &streams {
                prop_assert_eq!(Span::best(100, &[stream]).wide, 1);
            }
        }
    }

    #[test]
    fn most_bytes_use_wide_accesses() {
        for (streams, head, wide) in [
            // Aligned streams need no head.
            (
                &[(4096, 4), (8192, 4), (512, 4), (64, 2), (96, 2)][..],
                0,
                0b11111,
            ),
            // Three fp32 streams one element past a boundary: a head of 3; the bf16 stream is then
            // misaligned.
            (&[(4100, 4), (8196, 4), (516, 4), (64, 2)], 3, 0b0111),
            // One element past a boundary each: a head of 7 serves both widths.
            (&[(4100, 4), (66, 2)], 7, 0b11),
        ] {
            let len = 1000;
            assert_eq!(Span::best(len, streams), Span { len, head, wide });
        }
    }

    #[test]
    fn grids_stay_within_the_hardware_limit() {
        assert_eq!(Span::best(0, &[(0, 4)]).blocks(), 0);
        assert_eq!(Span::best(1, &[(0, 4)]).blocks(), 1);
        assert_eq!(Span::best(2049, &[(0, 4)]).blocks(), 2);
        assert_eq!(
            Span::best(u64::MAX / 4, &[(0, 4)]).blocks(),
            i32::MAX as u32
        );
    }

    /// The kernels' constants are the host's.
    #[test]
    fn sources_define_the_same_sizes() {
        let text = crate::cuda::KernelSource::named("grad_stats.cu")
            .unwrap()
            .text();
        for (name, value) in [
            ("THREADS", THREADS as usize),
            ("WARP", WARP as usize),
            ("GROUP", GROUP_ELEMS as usize),
            ("CHUNK", CHUNK_ELEMS),
            ("STRIP", STRIP_ELEMS),
            ("RANGES", super::super::launch::RANGES),
        ] {
            assert!(
                text.contains(&format!("#define {name} {value}\n")),
                "{name}"
            );
        }
        assert_eq!(
            THREADS as usize, TOP_LANES,
            "a thread a lane in the second stage"
        );
    }
}
