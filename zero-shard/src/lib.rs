//! ZeRO's shard layout map.
#![forbid(unsafe_code)]

mod bucket;
mod error;
mod layout;

pub use bucket::{BucketPiece, bucket_pieces};
pub use error::ShardError;
pub use layout::{Layout, ParamPlacement, ParamSpec, UnitLayout, UnitSpec};
