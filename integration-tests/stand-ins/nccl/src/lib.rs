//! A stand-in for `libnccl.so.2` on machines without a GPU. It implements the functions that
//! zero-comm calls, between processes of one machine, which exchange data through files in memory.
//! It needs the stand-in for `libcuda`, whose device memory is host memory.
//!
//! It is as strict as NCCL's documentation or stricter, so that tests show what NCCL tolerates only
//! by chance:
//!
//! - communicators are non-blocking. Initialization, splitting, and the first collective of each
//!   kind are in progress until all ranks have called them, every other collective until another
//!   thread has enqueued it, and finalization until all ranks call it. Any other call before that
//!   fails;
//! - finalizing and aborting a communicator wait for graphs with its collectives. Aborting blocks
//!   until its running collectives have left their streams, where they may be queued after another
//!   communicator's;
//! - a collective whose kind, count or type differs between ranks, or that some rank does not call,
//!   hangs until it is aborted;
//! - memory can be registered only if it is within one allocation that other processes can open.
//!   (NCCL accepts other memory; depending on the version it ignores it or uses it wrongly.) A
//!   collective on memory that only some ranks registered hangs. Deregistration during a collective
//!   on the memory, or after it was freed, fails the communicator;
//! - collectives of a communicator run in order, on any streams;
//! - sums of 16-bit types are rounded at each rank and start at another rank for each part, as in a
//!   ring, so their bits differ from the host's.
//!
//! In the driver's dry mode (`ZERO_STANDIN_DRY=1`) operations that send more than 4 KiB return
//! without running.
//!
//! `ZERO_STANDIN_NCCL_ERROR_AT=RANK:SEQUENCE` makes that rank's communicator of the world report an
//! asynchronous error in the collective of that number. The stand-in's times are meaningless.

mod api;
mod comm;
mod exchange;
mod work;

pub use api::*;
