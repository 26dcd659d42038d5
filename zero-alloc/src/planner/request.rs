//! What a planner is asked for, and what it answers where that does not fit.

use super::compaction::Compaction;
use super::stitch::Stitch;

/// How long a block will live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Lifetime {
    /// As long as the model: gathered at the low end.
    Long,
    /// Within a step; placed as if that were not known.
    Short,
    /// Not known.
    #[default]
    Unknown,
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// How many bytes; not 0.
    pub bytes: u64,
    /// A power of two; the granule at least.
    pub align: u64,
    /// How long.
    pub lifetime: Lifetime,
    /// What for: any number below [`TAGS`].
    pub tag: u8,
}

impl Request {
    /// `bytes`, with no more known.
    pub const fn new(bytes: u64) -> Self {
        Self { bytes, align: 1, lifetime: Lifetime::Unknown, tag: 0 }
    }

    /// One of no bytes takes a granule all the same.
    pub(super) const fn of_some_bytes(self) -> Self {
        Self { bytes: if self.bytes == 0 { 1 } else { self.bytes }, ..self }
    }
}

/// How many tags are told apart.
pub const TAGS: usize = 8;

/// What would make room for a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Room {
    /// Reserve this many bytes more ([`grow`](super::Planner::grow)).
    Grow {
        /// How many; a multiple of the page.
        bytes: u64,
    },
    /// Move used ranges ([`apply`](super::Planner::apply)).
    Compact(Compaction),
    /// Map free pages under new addresses ([`take_pieces`](super::Planner::take_pieces)); then nothing else is to be
    /// allocated.
    Stitch(Stitch),
}

/// Why there is no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// Asked for, in granules.
    pub asked_bytes: u64,
    /// In used ranges.
    pub live_bytes: u64,
    /// Reserved and in no used range.
    pub free_bytes: u64,
    /// The largest free range.
    pub largest_free_bytes: u64,
    /// The limit.
    pub limit_bytes: u64,
}
