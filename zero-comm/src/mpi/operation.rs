//! One collective of one rank over MPI: the ranks compare their calls, then transfer data directly.
//!
//! Every rank sends its call to every other rank; calls that differ are a mismatch. Then each rank sends segments
//! directly to the ranks that need them:
//!
//! - reduce_scatter: segment q of `send` to rank q, which adds all ranks' segments in rank order, by the same code
//!   and with the same bits as over threads;
//! - all_gather, all_to_all: one transfer per pair; all_reduce: reduce_scatter, then all_gather;
//! - broadcast: the root scatters, then all ranks gather.
//!
//! [`Traffic`](crate::Traffic) counts these bytes. Tags contain the communicator, the sequence number and the phase,
//! so collectives of different streams can be in flight at the same time.

use std::ffi::c_int;
use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use zero_alloc::device::{AnySlice, DType, DeviceId, DeviceSlice};

use super::notice::Notice;
use super::raw::{MpiError, Request};
use super::world::{Interrupt, World};
use crate::call::{Call, Checked};
use crate::reduce::{CHUNK_ELEMS, Reducible, Store};
use crate::{Collective, CommError, ReduceOp};

/// The greatest context that fits in a tag.
pub(super) const MAX_CONTEXT: u32 = 0xff;

/// A communicator's identity and members.
#[derive(Clone)]
pub(super) struct Members {
    pub(super) context: u32,
    /// This rank's number in the communicator.
    pub(super) rank: usize,
    /// World ranks, by rank of the communicator.
    pub(super) world_ranks: Arc<[usize]>,
}

/// One collective of this rank. Dropping it before it has run, because its stream failed, fails the world.
pub(super) struct Operation {
    pub(super) world: Arc<World>,
    pub(super) members: Members,
    pub(super) sequence: u64,
    pub(super) checked: Checked,
    pub(super) stream: String,
    pub(super) begun: bool,
}

impl Drop for Operation {
    fn drop(&mut self) {
        let (sequence, call, rank) = (self.sequence, self.call(), self.members.rank);
        if !self.begun {
            let stream = std::mem::take(&mut self.stream);
            self.fail(rank, CommError::Skipped { sequence, call, rank, stream });
        } else if std::thread::panicking() {
            self.fail(rank, CommError::Panicked { sequence, call, rank });
        }
    }
}

/// The phases of a collective, which are part of its tags.
#[derive(Clone, Copy)]
enum Phase {
    Compare,
    Scatter,
    Gather,
}

/// The bytes to send to a peer or to receive from it.
struct Part {
    peer: usize,
    bytes: AnySlice,
}

impl Operation {
    fn call(&self) -> Box<Call> {
        Box::new(self.checked.call.clone())
    }

    fn n(&self) -> usize {
        self.members.world_ranks.len()
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.members.rank;
        (0..self.n()).filter(move |&q| q != rank)
    }

    fn range(&self, rank: usize) -> Range<usize> {
        self.checked.call.segments.range(rank, self.n())
    }

    fn fail(&self, at_fault: usize, error: CommError) -> CommError {
        let notice = Notice::Failed { at_fault: self.members.world_ranks[at_fault], message: error.to_string() };
        self.world.fail(error, &notice)
    }

    fn tag(&self, phase: Phase) -> c_int {
        // 8 bits of communicator, 20 of sequence number, 2 of phase: less than 2^30, which is within the tag limit
        // (`MPI_TAG_UB`) of the MPI libraries used on clusters.
        ((self.members.context & MAX_CONTEXT) as c_int) << 22
            | ((self.sequence as c_int & 0xf_ffff) << 2)
            | phase as c_int
    }

    /// Sends and receives the parts of one phase, and waits for all of them.
    fn exchange(&self, phase: Phase, sends: &[Part], receives: &[Part]) -> Result<(), CommError> {
        let mut requests = Vec::with_capacity(sends.len() + receives.len());
        // SAFETY: the parts are memory that this operation alone uses now: the call's buffers, whose makers promised
        // ordered accesses, or a buffer that outlives this call. Received parts overlap no other part of the phase. Every
        // request is done (`wait`) or ended (`settle`) before this returns.
        let result = unsafe { self.start(phase, sends, receives, &mut requests) };
        let result = result.map_err(|(peer, error)| Interrupt::Broken(peer, error));
        let result = result.and_then(|()| self.world.wait(&mut requests, self.members.context, self.sequence));
        result.map_err(|interrupt| {
            let index = |peer: usize| self.members.world_ranks.iter().position(|&q| q == peer).unwrap_or(0);
            let (sequence, call) = (self.sequence, self.call());
            let error = match interrupt {
                Interrupt::Failed(error) => error,
                Interrupt::Broken(peer, error) => {
                    let message = format!("collective {sequence}, {call}: {}: {}", error.call, error.message);
                    self.fail(index(peer), CommError::Peer { rank: index(peer), message })
                }
                Interrupt::Left(peer, done) => {
                    self.fail(index(peer), CommError::Left { sequence, call, rank: index(peer), done })
                }
                Interrupt::Late(peer) => {
                    let (rank, limit) = (index(peer), self.world.limit);
                    // The collectives of a communicator are in order, so the late rank had reached all before.
                    self.fail(rank, CommError::Stalled { sequence, call, rank, limit, done: sequence })
                }
            };
            self.world.settle(&mut requests);
            error
        })
    }

    /// Starts the transfers of one phase.
    ///
    /// # Safety
    /// As for [`World::start`], for every part.
    unsafe fn start(
        &self,
        phase: Phase,
        sends: &[Part],
        receives: &[Part],
        requests: &mut Vec<Request>,
    ) -> Result<(), (usize, MpiError)> {
        let tag = self.tag(phase);
        for (part, receives) in receives.iter().map(|part| (part, true)).chain(sends.iter().map(|part| (part, false)))
        {
            part.bytes.note_access(receives);
            let peer = self.members.world_ranks[part.peer];
            // SAFETY: the caller's promise.
            unsafe { self.world.start(receives, part.bytes, peer, tag, requests) }?;
        }
        Ok(())
    }

    /// Compares the calls of all ranks.
    fn compare(&self) -> Result<(), CommError> {
        let (call, bytes) = (&self.checked.call, Call::max_serialized_bytes(self.n()));
        let (sequence, rank) = (self.sequence, self.members.rank);
        let mut own = postcard::to_allocvec(call).unwrap_or_default();
        debug_assert!(!own.is_empty() && own.len() <= bytes, "{call}: {} bytes, at most {bytes} expected", own.len());
        let mut received = vec![0u8; bytes * self.n()];
        // SAFETY: `own` and `received` outlive the exchange, which alone accesses them until it ends.
        let slice = |bytes: &mut [u8]| unsafe {
            AnySlice::from_raw_parts(bytes.as_mut_ptr(), bytes.len(), DType::U8, DeviceId::HOST)
        };
        let sends: Vec<Part> = self.others().map(|peer| Part { peer, bytes: slice(&mut own) }).collect();
        let receives = received.chunks_exact_mut(bytes).enumerate().filter(|(peer, _)| *peer != rank);
        let receives: Vec<Part> = receives.map(|(peer, bytes)| Part { peer, bytes: slice(bytes) }).collect();
        self.exchange(Phase::Compare, &sends, &receives)?;
        for peer in self.others() {
            // A call may be shorter than its buffer.
            match postcard::take_from_bytes::<Call>(&received[peer * bytes..(peer + 1) * bytes]) {
                Ok((other, _)) if other == *call => {}
                Ok((other, _)) => {
                    let (call, other_call) = (self.call(), Box::new(other));
                    let error = CommError::Mismatch { sequence, rank, call, other_rank: peer, other_call };
                    return Err(self.fail(peer, error));
                }
                Err(error) => {
                    let message = format!("collective {sequence}, {call}: received an undecodable call: {error}");
                    return Err(self.fail(peer, CommError::Peer { rank: peer, message }));
                }
            }
        }
        Ok(())
    }

    /// Runs the collective.
    pub(super) fn run(mut self) -> Result<(), CommError> {
        self.begun = true;
        if let Some(error) = self.world.failure() {
            return Err(error);
        }
        self.compare()?;
        let (Checked { call, send, recv, .. }, rank) = (&self.checked, self.members.rank);
        let (send, recv, own) = (*send, *recv, self.range(rank));
        match (call.collective, call.op) {
            (Collective::ReduceScatter, Some(op)) => self.reduce_scatter(op, send, recv),
            (Collective::AllReduce, Some(op)) => {
                self.reduce_scatter(op, send, recv.slice(own.clone()))?;
                self.all_gather(recv.slice(own), recv)
            }
            (Collective::AllGather, _) => self.all_gather(send, recv),
            (Collective::Broadcast, _) => {
                let root = call.root.unwrap_or(0);
                let part = |peer: usize| Part { peer, bytes: send.slice(self.range(peer)) };
                let (sends, receives) = if rank == root {
                    (self.others().map(part).collect(), Vec::new())
                } else {
                    (Vec::new(), vec![Part { peer: root, bytes: send.slice(own.clone()) }])
                };
                self.exchange(Phase::Scatter, &sends, &receives)?;
                // The root has all segments: it sends its own and receives none.
                let sends: Vec<Part> = self
                    .others()
                    .filter(|&peer| peer != root)
                    .map(|peer| Part { peer, bytes: send.slice(own.clone()) })
                    .collect();
                let receives: Vec<Part> = if rank == root { Vec::new() } else { self.others().map(part).collect() };
                self.exchange(Phase::Gather, &sends, &receives)
            }
            (Collective::AllToAll, _) => {
                let sends: Vec<Part> =
                    self.others().map(|peer| Part { peer, bytes: send.slice(self.range(peer)) }).collect();
                let receives: Vec<Part> =
                    self.others().map(|peer| Part { peer, bytes: recv.slice(self.range(peer)) }).collect();
                copy(send.slice(own.clone()), recv.slice(own));
                self.exchange(Phase::Scatter, &sends, &receives)
            }
            (Collective::Barrier | Collective::ReduceScatter | Collective::AllReduce, _) => Ok(()),
        }
    }

    fn all_gather(&self, send: AnySlice, recv: AnySlice) -> Result<(), CommError> {
        copy(send, recv.slice(self.range(self.members.rank)));
        let sends: Vec<Part> = self.others().map(|peer| Part { peer, bytes: send }).collect();
        let receives: Vec<Part> =
            self.others().map(|peer| Part { peer, bytes: recv.slice(self.range(peer)) }).collect();
        self.exchange(Phase::Gather, &sends, &receives)
    }

    fn reduce_scatter(&self, op: ReduceOp, send: AnySlice, recv: AnySlice) -> Result<(), CommError> {
        match send.dtype() {
            DType::F32 => self.reduce_scatter_of::<f32>(op, send, recv),
            DType::F64 => self.reduce_scatter_of::<f64>(op, send, recv),
            DType::Bf16 => self.reduce_scatter_of::<bf16>(op, send, recv),
            DType::F16 => self.reduce_scatter_of::<f16>(op, send, recv),
            DType::U8 => self.reduce_scatter_of::<u8>(op, send, recv),
        }
    }

    fn reduce_scatter_of<T: Reducible>(&self, op: ReduceOp, send: AnySlice, recv: AnySlice) -> Result<(), CommError> {
        let (rank, n, own) = (self.members.rank, self.n(), self.range(self.members.rank));
        let len = own.len();
        let mut staged: Vec<T> = vec![T::default(); len * n];
        // SAFETY: `staged` outlives the exchange, which alone accesses it until it ends.
        let places =
            unsafe { DeviceSlice::from_raw_parts(staged.as_mut_ptr(), staged.len(), DeviceId::HOST) }.erase();
        let sends: Vec<Part> = self.others().map(|peer| Part { peer, bytes: send.slice(self.range(peer)) }).collect();
        let receives: Vec<Part> =
            self.others().map(|peer| Part { peer, bytes: places.slice(peer * len..(peer + 1) * len) }).collect();
        self.exchange(Phase::Scatter, &sends, &receives)?;
        let (mine, out) = (send.slice(own).typed::<T>()?, recv.typed::<T>()?);
        let mut result = vec![T::default(); CHUNK_ELEMS.min(len)];
        for start in (0..len).step_by(CHUNK_ELEMS) {
            let chunk = start..(start + CHUNK_ELEMS).min(len);
            let result = &mut result[..chunk.len()];
            // SAFETY: the memory is valid by the promise of the slice's maker, and nothing writes to it now; this
            // view's last use precedes the write to `out`, which may be the same memory.
            let mine = unsafe { mine.slice(chunk.clone()).as_host() };
            let theirs = |q: usize| &staged[q * len + chunk.start..q * len + chunk.end];
            let views: Vec<&[T]> = (0..n).map(|q| if q == rank { mine } else { theirs(q) }).collect();
            T::reduce(op, &views, result, Store::Cached);
            // SAFETY: the memory is valid by the promise of the slice's maker, and only this operation accesses it
            // now.
            unsafe { out.slice(chunk.clone()).as_host_mut() }.copy_from_slice(result);
        }
        Ok(())
    }
}

/// Copies `from` to `to`, unless they are the same.
fn copy(from: AnySlice, to: AnySlice) {
    if from.as_ptr() != to.as_ptr() {
        from.note_access(false);
        to.note_access(true);
        // SAFETY: both are valid by the promises of their makers and have the same length; they are not the same
        // memory, and the check of the call excludes any other overlap.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), from.len_bytes()) };
    }
}
