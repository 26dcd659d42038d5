//! ZeRO's shard layout map.
#![forbid(unsafe_code)]

mod activations;
mod align;
mod bucket;
mod checked;
mod error;
mod footprint;
mod index;
mod layout;
mod lookup;
mod memory;
mod persist;
mod prefetch;
mod reshard;
mod stage;
mod subgroup;
mod topology;
mod traffic;

pub use activations::{ActivationBytes, ActivationOptions, TransformerShape};
pub use align::align_elems_for;
pub use bucket::{BucketPiece, bucket_pieces};
pub use error::ShardError;
pub use footprint::{Footprint, MemoryModel, Placement, Tier, TierBytes, largest};
pub use layout::{Layout, LayoutOptions, ParamId, ParamPlacement, ParamSpec, Tie, UnitLayout, UnitSpec};
pub use lookup::{ElemLocation, ParamPiece, ShardPiece, StoredPiece};
pub use memory::StateBytes;
pub use persist::{PersistentSplit, split_persistent};
pub use prefetch::{Action, PrefetchLimits, PrefetchPlan, forward_backward_uses};
pub use reshard::{Extent, Move, Sources, reshard, reshard_rank};
pub use stage::{Widths, ZeroStage};
pub use subgroup::{GroupRun, ParamGroups, UnitPiece};
pub use topology::{Grid, GridLayout, GridTraffic, Routing, Sharding};
pub use traffic::StepTraffic;
