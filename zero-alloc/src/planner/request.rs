//! Requests to a planner, and the remedies for requests that do not fit.

use super::Stitch;

/// The expected lifetime of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Lifetime {
    /// As long as the model: packed at the low end.
    Long,
    /// Within a step; placed like `Unknown`.
    Short,
    /// Unknown.
    #[default]
    Unknown,
}

/// A request for a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Request {
    /// The size; 0 is treated as 1.
    pub bytes: u64,
    /// The alignment, a power of two; the granule at least.
    pub align: u64,
    /// The expected lifetime.
    pub lifetime: Lifetime,
    /// The purpose, a number below [`TAGS`]; live bytes are counted by tag.
    pub tag: u8,
}

impl Request {
    /// A request for `bytes` without further hints.
    pub const fn new(bytes: u64) -> Self {
        Self {
            bytes,
            align: 1,
            lifetime: Lifetime::Unknown,
            tag: 0,
        }
    }
}

setters!(Request {
    align: u64,
    lifetime: Lifetime,
    tag: u8,
});

/// The number of tags.
pub const TAGS: usize = 8;

/// A way to make a request fit.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Remedy {
    /// Reserve more memory, then call [`Planner::grow`](super::Planner::grow).
    Grow {
        /// The number of bytes, a multiple of the page size.
        bytes: u64,
    },
    /// Map free pages under new addresses and call
    /// [`Planner::allocate_pieces`](super::Planner::allocate_pieces), which allocates the request.
    Stitch(Stitch),
}

/// The numbers of a request for which there is no remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shortage {
    /// The request's size, in whole granules.
    pub requested_bytes: u64,
    /// In used ranges.
    pub live_bytes: u64,
    /// Reserved and in no used range.
    pub free_bytes: u64,
    /// The largest free range.
    pub largest_free_bytes: u64,
    /// The limit of reserved bytes.
    pub limit_bytes: u64,
}
