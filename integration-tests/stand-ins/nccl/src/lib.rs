//! Stands in for `libnccl.so.2` on machines without a GPU, beside the stand-in for `libcuda`, whose device memory is
//! host memory: the functions that zero-comm calls, between processes of one machine, which pass data by files in
//! memory.
//!
//! It is as strict as NCCL is where that is documented, or stricter, so that what NCCL would forgive by chance shows
//! here:
//!
//! - communicators do not block: initialisation, splitting, and the first collective of each kind are in progress
//!   until all ranks have come, every other collective until another thread has put it on its stream, and the end
//!   until all ranks want it; any call before that is refused;
//! - ending and aborting a communicator wait for graphs with collectives of it, and aborting blocks: until what was
//!   under way has left its streams, which may stand behind another communicator's;
//! - a collective whose peers differ in kind, count or type, or do not come, never ends, until it is aborted;
//! - memory is registered only if it lies in one allocation that other processes can open (NCCL takes other memory
//!   and does not use it, or in some versions uses it wrongly), a collective that finds it registered on some ranks
//!   only never ends, and one that is deregistered while it is worked in, or when it is gone, fails the communicator;
//! - collectives of a communicator run one after the other, on whatever streams;
//! - sums of 16-bit types are rounded at each rank, and start at another rank for each part, as around a ring: they
//!   are not the host's bits.
//!
//! `ZERO_STANDIN_NCCL_ERROR_AT=RANK:SEQUENCE`: that rank's communicator of the world has an asynchronous error in the
//! collective of that number. Its times mean nothing.

mod api;
mod comm;
mod cuda;
mod exchange;
mod work;

pub use api::*;
