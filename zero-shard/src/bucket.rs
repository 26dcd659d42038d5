//! Cutting a unit's gradient into buckets of constant capacity.
//!
//! A bucket contains the same range of every rank's shard: one **segment** per rank, in rank order.
//! One reduce-scatter sums the segments and writes each rank's sum directly into a contiguous range
//! of its shard:
//!
//! ```text
//! flat gradient    | ..aaa... | ..bbb... | ..ccc... |     shards of ranks 0, 1, 2; the piece 2..5 of each
//! bucket           | aaa | bbb | ccc |
//! ```
//!
//! A gradient larger than a bucket is split. A bucket does not span units, so a unit is reduced as
//! soon as its own backward is done.

use std::ops::Range;

/// The part of a unit in one bucket: the same range of every rank's shard.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct BucketPiece {
    /// Range within the shard of each rank.
    pub in_shard: Range<u64>,
    /// Number of ranks, which is the number of segments.
    pub world_size: u64,
    /// Length of a shard: the distance between corresponding elements of consecutive ranks in the
    /// flat parameter.
    pub shard_elems: u64,
}

impl BucketPiece {
    /// Elements of one rank's segment.
    pub fn segment_elems(&self) -> u64 {
        self.in_shard.end - self.in_shard.start
    }

    /// Elements in the bucket: `segment_elems * world_size`.
    pub fn elems(&self) -> u64 {
        self.segment_elems() * self.world_size
    }

    /// The range of each rank's segment in the unit's flat parameter, in rank order.
    pub fn segments(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        (0..self.world_size).map(|rank| {
            let base = rank * self.shard_elems;
            base + self.in_shard.start..base + self.in_shard.end
        })
    }
}

/// Cuts a unit, of shards of `shard_elems` elements, into pieces of at most `capacity_elems`
/// elements over all ranks. Each piece has at least one element per rank: a capacity below the
/// world size counts as the world size.
pub fn bucket_pieces(
    shard_elems: u64,
    world_size: u64,
    capacity_elems: u64,
) -> impl Iterator<Item = BucketPiece> + use<> {
    pieces(
        shard_elems,
        world_size.max(1),
        (capacity_elems / world_size.max(1)).max(1),
    )
}

fn pieces(
    shard_elems: u64,
    world_size: u64,
    step: u64,
) -> impl Iterator<Item = BucketPiece> + use<> {
    (0..shard_elems.div_ceil(step)).map(move |i| BucketPiece {
        in_shard: i * step..i * step + step.min(shard_elems - i * step),
        world_size,
        shard_elems,
    })
}
