//! Loading: opening a checkpoint, reading it in any layout, verifying, exporting.

pub(crate) mod export;
mod inspect;
pub(crate) mod joined;
pub(crate) mod on_ranks;
pub(crate) mod read_list;
pub(crate) mod reader;
pub(crate) mod resharding;
pub(crate) mod resolve;
pub(crate) mod shard_file;
pub(crate) mod verify;
