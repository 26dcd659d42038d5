//! What the stand-ins for the libraries of a GPU machine share: handles, settings, messages, and
//! the calls by which a library's stand-in enqueues its work on the driver's streams.

pub mod driver;
mod handles;
mod settings;

pub use handles::{Handles, Stale, fresh_number, lock};
pub use settings::{Settings, print};
