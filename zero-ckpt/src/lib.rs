#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

#[cfg(target_endian = "big")]
compile_error!("zero-ckpt stores little-endian elements and supports little-endian machines only");

#[cfg(not(unix))]
compile_error!(
    "zero-ckpt needs a Unix system: it opens files relative to a directory's descriptor"
);

mod agree;
mod commands;
mod error;
pub mod files;
pub mod format;
mod io;
mod job;
mod load;
mod messages;
mod model_files;
mod save;

pub use commands::{Commands, name_commands};
pub use error::CkptError;
pub use format::dtype::StateDtype;
pub use format::encoding::StateEncoding;
pub use format::file_layout::{StateSpec, UnitRange};
pub use format::header::TensorEntry;
pub use format::manifest::{DocumentRecord, FileRecord, LayoutRecord, MANIFEST_NAME, Manifest};
pub use format::model::ModelSpec;
pub use format::tensor_folder::TensorFolder;
pub use format::tensor_parallel::{TENSOR_PARALLEL_JSON, TensorParallel, TensorParam, TensorUnit};
pub use load::export::{ExportOptions, ExportReport, ReadTensor, export};
pub use load::newest::{Resolved, count_checkpoints, has_checkpoints, resolve};
pub use load::on_ranks::Selection;
pub use load::reader::Reader;
pub use load::resharding::View;
pub use load::verify::VerifyReport;
pub use messages::{Exchange, ExchangeFn, MESSAGE_BYTES, RECORD_BYTES, SingleRank};
pub use model_files::{MODEL_FILES_FOLDER, MODEL_FILES_JSON, ModelFiles};
pub use save::assemble::{Assembled, assemble, assemble_step};
pub use save::background::{BackgroundStore, Fence};
pub use save::import::import;
pub use save::leftovers::{StagedSaves, staged_saves};
pub use save::meta::SaveMeta;
pub use save::records::{PublishedCheckpoint, StagedFile, StagingSlice};
pub use save::shard_data::ShardData;
pub use save::store::{Store, StoreOptions};

/// Items for tests and fuzz targets, besides [`Store::observe`].
#[cfg(feature = "testing")]
pub mod testing {
    pub use crate::format::header::Header;
    pub use crate::io::counts::{IoCounts, io_counts};
    pub use crate::save::store::SavePoint;
}
