//! The interpreter: decoded programs, warps of 32 lanes, blocks, grids.

pub(crate) mod block;
pub(crate) mod grid;
pub(crate) mod program;
pub(crate) mod races;
pub(crate) mod sample;
pub(crate) mod traffic;
pub(crate) mod warp;
