//! The planner: decides at which offset a block lies. Pure arithmetic, no memory is touched.
#![deny(unsafe_code)]

mod check;
mod compaction;
mod cost;
mod evict;
mod offsets;
mod placement_policy;
#[expect(clippy::module_inception, reason = "the file is named for its one type")]
mod planner;
mod range_snapshot;
mod ranges;
mod regrowth;
mod relocate;
mod request;
mod search;
mod size_class;
mod slide;
mod spread;
mod stitch;

pub use compaction::{Compaction, Relocation};
pub use cost::CostModel;
pub use offsets::{Offsets, Pick, RangeId, Side};
pub use planner::{Planner, PlannerConfig, PlannerReport};
pub use request::{Lifetime, Request, Room, Shortage, TAGS};
pub use stitch::Stitch;
