//! Loading: opening a checkpoint, reading it in any layout, verifying, exporting.

pub(crate) mod catalog;
pub(crate) mod division;
pub(crate) mod document;
pub(crate) mod export;
mod inspect;
pub(crate) mod joined;
pub(crate) mod newest;
pub(crate) mod on_ranks;
pub(crate) mod read_list;
pub(crate) mod reader;
pub(crate) mod resharding;
pub(crate) mod shard_file;
pub(crate) mod verify;
