//! The planner decides at which offset a block is placed. It is integer arithmetic and touches no
//! memory.
#![deny(unsafe_code)]

mod check;
mod offsets;
#[expect(
    clippy::module_inception,
    reason = "the file is named for its one type"
)]
mod planner;
mod ranges;
mod request;
mod search;
mod size_class;
mod stitch;

pub use offsets::RangeId;
pub(crate) use offsets::{Offsets, Pick, Side};
pub use planner::{Planner, PlannerConfig, PlannerReport};
pub use request::{Lifetime, Remedy, Request, Shortage, TAGS};
pub use stitch::Stitch;
