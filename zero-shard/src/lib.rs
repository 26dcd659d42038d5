#![doc = include_str!("../README.md")]
//!
//! # Terms
//!
//! - A **unit** is a list of parameters that are gathered, released and reduced together: the embedding, a
//!   block, the head. Its parameters end to end, padded, are its **flat parameter**, which is cut into one
//!   **shard** of equal length for each **rank**.
//! - The **whole storage** is all flat parameters end to end; a rank's **shard storage** is its shards of all
//!   units end to end. The **global** numbering counts the elements of all parameters, without padding.
//! - A **bucket** is the same piece of every rank's shard: the payload of one reduce-scatter. A **sub-group** is a
//!   part of a shard storage that the optimizer updates at a time.
//! - A **persistent** parameter stays whole on every rank at stage 3. A **tied** parameter has two names.
//! - A **grid** is ranks in groups (nodes); see [`GridLayout`] for hpZ, MiCS and HSDP.
//!
//! All sizes are 64-bit counts of elements (`_elems`) or bytes (`_bytes`). Arguments that contradict each other
//! are a [`ShardError`] that carries the numbers.
//!
//! # What it does not do
//!
//! It holds and moves no values, and knows no device, stream or file: zero-comm executes the copies, zero-ckpt
//! reads and writes them. It shards along the data-parallel dimension only;
//! tensor and pipeline parallelism are applied before, to the list of units. Shards of a unit are of
//! equal length: ranks of unequal memory are not weighed.
#![forbid(unsafe_code)]

mod activations;
mod bucket;
mod checked;
mod error;
mod footprint;
mod index;
mod layout;
mod lookup;
mod memory;
mod persist;
mod reshard;
mod stage;
mod subgroup;
mod topology;
mod traffic;

pub use activations::{ActivationBytes, ActivationOptions, TransformerShape};
pub use bucket::{BucketPiece, bucket_pieces};
pub use error::ShardError;
pub use footprint::{Footprint, MemoryModel, Placement, Tier, TierBytes, largest};
pub use layout::{Layout, LayoutOptions, LayoutSpec, ParamId, ParamPlacement, ParamSpec, Tie, UnitLayout, UnitSpec};
pub use lookup::{ElemLocation, ParamPiece, ShardPiece, StoredPiece};
pub use memory::StateBytes;
pub use persist::{PersistentSplit, split_persistent};
pub use reshard::{Extent, Move, Sources, reshard, reshard_rank};
pub use stage::{Widths, ZeroStage};
pub use subgroup::{GroupRun, ParamGroups};
pub use topology::{Grid, GridLayout, GridTraffic, Routing, Sharding};
pub use traffic::StepTraffic;
