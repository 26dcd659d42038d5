#![doc = include_str!("../README.md")]
//!
//! # Terms
//!
//! - A **unit** is a list of parameters that are gathered, freed and reduced together: the
//!   embedding, a block, the head. Its **flat parameter** is the concatenation of its parameters,
//!   padded; it is cut into one **shard** of equal length for each **rank**.
//! - The **whole storage** is the concatenation of all flat parameters. A rank's **shard storage**
//!   is the concatenation of its shards of all units. The **global** numbering counts the elements
//!   of all parameters, without padding.
//! - A **bucket** is the same range of every rank's shard: the payload of one reduce-scatter.
//! - A **tied** parameter has two names.
//! - A **grid** divides the ranks into groups, such as nodes; see [`GridLayout`] for hpZ, MiCS and
//!   HSDP.
//! - A **part** is what one tensor-parallel rank has of every parameter; see [`TensorPart`].
//!
//! All sizes are 64-bit counts of elements (`_elems`) or bytes (`_bytes`). Inconsistent arguments
//! are a [`ShardError`] that contains the numbers.
//!
//! # What it does not do
//!
//! It stores and moves no values and uses no device, stream or file: zero-comm communicates,
//! zero-ckpt reads and writes files. A layout shards along the data-parallel dimension only; apply
//! tensor parallelism ([`TensorPart::unit`]) and pipeline parallelism first, to the list of units.
//! All shards of a unit have equal length, even if the ranks have different amounts of memory.
#![forbid(unsafe_code)]

#[macro_use]
mod setters;

mod activations;
mod blocks;
mod bucket;
mod checked;
mod error;
mod footprint;
mod groups;
mod home;
mod index;
mod joined;
mod layout;
mod lookup;
mod memory;
mod reshard;
mod stage;
mod tensor_cut;
mod topology;
mod traffic;
mod updaters;

pub use activations::{ActivationBytes, ActivationOptions, TransformerShape};
pub use blocks::BlockFormat;
pub use bucket::{BucketPiece, bucket_pieces};
pub use error::ShardError;
pub use footprint::{Footprint, MemoryModel, Placement, Tier, TierBytes, largest};
pub use home::Home;
pub use joined::joined_units;
pub use layout::{
    Layout, LayoutOptions, LayoutSpec, ParamId, ParamPlacement, ParamSpec, Tie, UnitLayout,
    UnitSpec,
};
pub use lookup::{ElemLocation, ParamPiece, ShardPiece, StoredPiece};
pub use memory::StateBytes;
pub use reshard::{Move, reshard_rank};
pub use stage::{Widths, ZeroStage};
pub use tensor_cut::{TensorCut, TensorPart, TensorPiece, TensorRun, tensor_pieces};
pub use topology::{AxisTraffic, Grid, GridLayout, GridTraffic, Routing, Sharding};
pub use traffic::{StepTraffic, WireFormat};
pub use updaters::{ParamUpdater, Updaters};
