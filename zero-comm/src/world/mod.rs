//! Ranks that are processes: how they find each other, and how all of them learn of a failure, with
//! the rank at fault. It is what back ends of processes have in common, and calls no library of
//! theirs.
//!
//! The ranks meet at a TCP port of rank 0. Across machines they need a shared secret, the [`Token`]:
//! `export ZERO_TOKEN=$(openssl rand -hex 16)` on one machine, and the same value on all others
//! (`mpirun -x ZERO_TOKEN`; `srun` exports it by itself). A connection that does not prove that it
//! knows the token is closed without an answer, cannot disturb the others, and never receives the
//! library's unique id. `ZERO_TOKEN=none` opens the port to everyone. Ranks of one machine need no
//! token: rank 0 then listens on the loopback interface only. The token admits ranks; it does not
//! protect their traffic.
//!
//! | module | part |
//! |---|---|
//! | `ranks` | this process's place, from the launcher's variables |
//! | `handshake`, `message`, `frames`, `wire` | the protocol: proof of the token, messages, their frames, connections |
//! | `rendezvous` | connects each rank to the coordinator |
//! | `server`, `coordinator` | in rank 0's process: the event loop, and its state machine without I/O or clock |
//! | `process`, `watcher` | a rank's side: its collectives in flight, and the thread that reports them |
//! | `fnv` | the hash of a rank's calls |
//! | `abort` | the completion of an asynchronous abort |

pub(crate) mod abort;
mod coordinator;
mod descriptors;
pub(crate) mod error;
mod fnv;
mod frames;
mod handshake;
pub(crate) mod message;
pub(crate) mod process;
mod ranks;
pub(crate) mod rendezvous;
mod server;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod testing;
#[cfg(all(test, not(miri)))] // Miri has no sockets.
mod tests;
pub(crate) mod watcher;
mod wire;

pub use descriptors::{Socket, sockets};
pub use error::{LaunchError, RendezvousError};
pub use ranks::{Launcher, Ranks, Token};
