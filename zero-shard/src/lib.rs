//! ZeRO's shard layout map.
#![forbid(unsafe_code)]

mod align;
mod bucket;
mod error;
mod index;
mod layout;
mod lookup;
mod memory;
mod stage;
mod traffic;

pub use align::align_elems_for;
pub use bucket::{BucketPiece, bucket_pieces};
pub use error::ShardError;
pub use layout::{Layout, LayoutOptions, ParamId, ParamPlacement, ParamSpec, Tie, UnitLayout, UnitSpec};
pub use lookup::{ElemLocation, ParamPiece, ShardPiece, StoredPiece};
pub use memory::StateBytes;
pub use stage::{Widths, ZeroStage};
pub use traffic::StepTraffic;
