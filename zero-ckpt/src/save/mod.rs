//! Saving: staging, the exchange between the ranks, publication.

pub(crate) mod agreement;
pub(crate) mod assemble;
pub(crate) mod background;
pub(crate) mod import;
pub(crate) mod replace;
pub(crate) mod shard_data;
pub(crate) mod store;
mod streamed;
