//! What the measurements share.

pub mod replay;
