//! The planner: decides at which offset a block lies. Pure arithmetic, no memory is touched.
#![deny(unsafe_code)]

mod offsets;
mod size_class;

pub use offsets::{Offsets, RangeId, Side};
