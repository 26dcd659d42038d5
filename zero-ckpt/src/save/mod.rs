//! Saving: staging, the exchange between the ranks, publication.

pub(crate) mod agreement;
pub(crate) mod assemble;
pub(crate) mod background;
pub(crate) mod description;
pub(crate) mod import;
pub(crate) mod leftovers;
pub(crate) mod meta;
pub(crate) mod publish;
pub(crate) mod records;
pub(crate) mod removals;
pub(crate) mod replace;
pub(crate) mod shard_data;
pub(crate) mod shared;
pub(crate) mod staged;
pub(crate) mod store;
mod streamed;
pub(crate) mod sweep;
mod unit_parts;
