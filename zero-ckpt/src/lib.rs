#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

#[cfg(target_endian = "big")]
compile_error!("zero-ckpt stores little-endian elements and has been written for little-endian machines");

mod agree;
mod assemble;
mod background;
mod catalog;
mod coverage;
mod dir;
mod dtype;
mod error;
mod export;
#[doc = include_str!("../FORMAT.md")]
pub mod format {}
mod header;
mod import;
mod inspect;
mod lock;
mod manifest;
mod model;
#[allow(unsafe_code)] // two derives that prove a page to be plain bytes
mod pages;
mod plan;
mod reader;
mod replace;
mod report;
mod runs;
mod shard;
mod shard_file;
mod store;
mod tensors;
mod transfer;
mod verify;
mod view;

pub use assemble::SaveMeta;
pub use background::{BackgroundStore, Fence, Slot, StagingMemory, staging_bytes};
pub use dtype::StateDtype;
pub use error::CkptError;
pub use export::{ExportOptions, Exported};
pub use header::{Header, MAX_HEADER_BYTES, TensorEntry};
pub use import::import;
pub use manifest::{FORMAT_VERSION, FileRecord, Hex64, LayoutRecord, MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest};
pub use model::{ModelSpec, ParamRecord, UnitRecord};
pub use pages::Pages;
pub use plan::{BLOCK_BYTES, BLOCK_TABLE, Piece, StateSpec, checksum};
pub use reader::Reader;
pub use report::{Published, Receipt, frame_bytes};
pub use shard::ShardData;
pub use store::{SAVE_POINTS, SavePoint, Store, StoreOptions};
pub use transfer::IoOptions;
pub use verify::Verified;
pub use view::View;
