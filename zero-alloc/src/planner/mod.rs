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

pub use planner::{Planner, PlannerConfig, PlannerReport};
pub(crate) use ranges::Offsets;
pub use ranges::RangeId;
pub use request::{Lifetime, Remedy, Request, Shortage, TAGS};
pub(crate) use search::{Pick, Side};
pub use stitch::Stitch;
