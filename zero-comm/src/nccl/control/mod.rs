//! The control plane: what names the rank at fault. It calls no NCCL.
//!
//! | module | part |
//! |---|---|
//! | `ranks` | this process's place, from the launcher's variables |
//! | `handshake`, `message`, `frames`, `wire` | the protocol: proof of the token, messages, their frames, connections |
//! | `rendezvous` | connects each rank to the coordinator |
//! | `server`, `coordinator` | in rank 0's process: the event loop, and its state machine without I/O or clock |
//! | `calls` | a rank's calls and their hash |
//! | `world` | a rank's side, with its watcher thread |
//! | `abort` | the completion of an asynchronous abort |

pub(crate) mod abort;
mod calls;
mod coordinator;
mod descriptors;
pub(crate) mod error;
mod frames;
mod handshake;
pub(crate) mod message;
mod ranks;
pub(crate) mod rendezvous;
mod server;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(all(test, not(miri)))] // Miri has no sockets.
mod tests;
mod wire;
pub(crate) mod world;

pub use ranks::{Launcher, Ranks, Token};
