//! Stub.
mod error;
mod hub;
mod message;
mod ranks;
mod rendezvous;
mod server;
mod wire;
mod world;
pub use error::RendezvousError;
pub use ranks::{LaunchError, Launcher, Ranks};
#[cfg(test)]
mod tests;
