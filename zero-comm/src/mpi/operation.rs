//! One collective of one rank over MPI: a meeting by headers, then direct transfers.
//!
//! Every rank sends every other one the header of its call; differing headers are a mismatch, named on each
//! side. Then each segment goes from the rank that has it straight to the rank that needs it:
//!
//! - reduce_scatter: segment q of `send` to rank q; the own segments of all are added in rank order, by the same
//!   code as over threads, so the bits are the same;
//! - all_gather, all_to_all: one transfer a pair; all_reduce: reduce_scatter, then all_gather;
//! - broadcast: the root scatters, then all gather.
//!
//! These are the bytes that [`Traffic`](crate::Traffic) counts. Tags carry the communicator, the sequence number
//! and the phase, so collectives of different streams may be under way at once.

use std::ffi::c_int;
use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use zero_alloc::device::{AnySlice, DType, DeviceSlice};

use super::raw::{MpiError, Request};
use super::wire::Notice;
use super::world::{Interrupt, World};
use crate::call::{Call, Checked};
use crate::call_codec::{call_of, header, header_words};
use crate::reduce::{CHUNK_ELEMS, Reducible, Store};
use crate::{Collective, CommError, ReduceOp};

/// The greatest context that fits into a tag.
pub(super) const MAX_CONTEXT: u32 = 0xff;

/// A communicator's identity and members.
#[derive(Clone)]
pub(super) struct Members {
    pub(super) context: u32,
    /// Rank here.
    pub(super) rank: usize,
    /// Ranks in the world, by rank here.
    pub(super) world_ranks: Arc<[usize]>,
}

/// One collective. Dropped before it ran (its stream failed and skipped it), it ends the world.
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

/// The phases of a collective, told apart by their tags.
#[derive(Clone, Copy)]
enum Phase {
    Meet,
    Scatter,
    Gather,
}

/// Where bytes go to or come from, for one peer.
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

    fn fail(&self, blamed: usize, error: CommError) -> CommError {
        let notice = Notice::Failed { blamed: self.members.world_ranks[blamed], message: error.to_string() };
        self.world.fail(error, &notice)
    }

    fn tag(&self, phase: Phase) -> c_int {
        // 8 bits of communicator, 20 of sequence number, 2 of phase: below the least upper bound that clusters'
        // MPI libraries have (2^30).
        ((self.members.context & MAX_CONTEXT) as c_int) << 22
            | ((self.sequence as c_int & 0xf_ffff) << 2)
            | phase as c_int
    }

    /// Sends and receives the parts of one phase, and waits for all of them.
    fn exchange(&self, phase: Phase, sends: &[Part], receives: &[Part]) -> Result<(), CommError> {
        let mut requests = Vec::with_capacity(sends.len() + receives.len());
        let result = self.start(phase, sends, receives, &mut requests);
        let result = result.map_err(|(peer, error)| Interrupt::Broken(peer, error));
        let result = result.and_then(|()| self.world.wait(&mut requests, self.members.context, self.sequence));
        result.map_err(|interrupt| {
            let here = |peer: usize| self.members.world_ranks.iter().position(|&q| q == peer).unwrap_or(0);
            let (sequence, call) = (self.sequence, self.call());
            let error = match interrupt {
                Interrupt::Failed(error) => error,
                Interrupt::Broken(peer, error) => {
                    let message = format!("collective {sequence}, {call}: {}: {}", error.call, error.message);
                    self.fail(here(peer), CommError::Peer { rank: here(peer), message })
                }
                Interrupt::Left(peer, done) => {
                    self.fail(here(peer), CommError::Left { sequence, call, rank: here(peer), done })
                }
                Interrupt::Late(peer) => {
                    let (rank, limit) = (here(peer), self.world.limit);
                    // A rank that is late here had come to everything before.
                    self.fail(rank, CommError::Stalled { sequence, call, rank, limit, done: sequence })
                }
            };
            self.world.settle(&mut requests);
            error
        })
    }

    fn start(
        &self,
        phase: Phase,
        sends: &[Part],
        receives: &[Part],
        requests: &mut Vec<Request>,
    ) -> Result<(), (usize, MpiError)> {
        let tag = self.tag(phase);
        let world_rank = |part: &Part| (self.members.world_ranks[part.peer], tag);
        // `exchange` keeps the buffers until every request is done, or settled after a failure; parts that are
        // received do not overlap anything else that the phase uses.
        for part in receives {
            part.bytes.note_access(true);
            let (to, len) = (part.bytes.as_ptr(), part.bytes.len_bytes());
            // SAFETY: as said above.
            unsafe { self.world.receive(to, len, world_rank(part), requests) }?;
        }
        for part in sends {
            part.bytes.note_access(false);
            let (from, len) = (part.bytes.as_ptr(), part.bytes.len_bytes());
            // SAFETY: as said above.
            unsafe { self.world.send(from, len, world_rank(part), requests) }?;
        }
        Ok(())
    }

    /// All ranks come and say what they called.
    fn meet(&self) -> Result<(), CommError> {
        let words = header_words(self.n());
        let mut own = header(&self.checked.call, self.n());
        let mut theirs = vec![0u64; words * self.n()];
        let sends: Vec<Part> = self.others().map(|peer| Part { peer, bytes: words_of(&mut own) }).collect();
        let mut receives = Vec::with_capacity(self.n());
        for (peer, place) in theirs.chunks_exact_mut(words).enumerate().filter(|(q, _)| *q != self.members.rank) {
            receives.push(Part { peer, bytes: words_of(place) });
        }
        self.exchange(Phase::Meet, &sends, &receives)?;
        for peer in self.others() {
            let other_call = call_of(&theirs[peer * words..(peer + 1) * words]);
            if other_call.as_ref() == Some(&self.checked.call) {
                continue;
            }
            let (sequence, rank, call) = (self.sequence, self.members.rank, self.call());
            return Err(match other_call {
                Some(other) => {
                    let (other_rank, other_call) = (peer, Box::new(other));
                    self.fail(peer, CommError::Mismatch { sequence, rank, call, other_rank, other_call })
                }
                None => {
                    let message = format!("collective {sequence}, {call}: a header that is none");
                    self.fail(peer, CommError::Peer { rank: peer, message })
                }
            });
        }
        Ok(())
    }

    /// Runs the collective.
    pub(super) fn run(mut self) -> Result<(), CommError> {
        self.begun = true;
        if let Some(error) = self.world.failure() {
            return Err(error);
        }
        self.meet()?;
        let (Checked { call, send, recv }, rank) = (&self.checked, self.members.rank);
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
                // The root has everything already: it gives its own segment and takes none.
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
        // SAFETY: `staged` outlives the exchange, and is not touched while it goes on.
        let places = unsafe { DeviceSlice::from_raw_parts(staged.as_mut_ptr(), staged.len()) }.erase();
        let sends: Vec<Part> = self.others().map(|peer| Part { peer, bytes: send.slice(self.range(peer)) }).collect();
        let receives: Vec<Part> =
            self.others().map(|peer| Part { peer, bytes: places.slice(peer * len..(peer + 1) * len) }).collect();
        self.exchange(Phase::Scatter, &sends, &receives)?;
        let (mine, out) = (send.slice(own).typed::<T>()?, recv.typed::<T>()?);
        let mut result = vec![T::default(); CHUNK_ELEMS.min(len)];
        for start in (0..len).step_by(CHUNK_ELEMS) {
            let chunk = start..(start + CHUNK_ELEMS).min(len);
            let result = &mut result[..chunk.len()];
            // SAFETY: host memory that its maker keeps valid and that nothing writes to now; this view is gone
            // before `out`, which may be the same, is written.
            let mine = unsafe { mine.slice(chunk.clone()).as_host() };
            let theirs = |q: usize| &staged[q * len + chunk.start..q * len + chunk.end];
            let views: Vec<&[T]> = (0..n).map(|q| if q == rank { mine } else { theirs(q) }).collect();
            T::reduce(op, &views, result, Store::Cached);
            // SAFETY: host memory that its maker keeps valid and that only this operation accesses now.
            unsafe { out.slice(chunk.clone()).as_host_mut() }.copy_from_slice(result);
        }
        Ok(())
    }
}

/// The words as bytes, for the exchange of headers.
fn words_of(words: &mut [u64]) -> AnySlice {
    // SAFETY: `meet` keeps its words, untouched, until the exchange that uses the slice has ended.
    unsafe { AnySlice::from_raw_parts(words.as_mut_ptr().cast(), size_of_val(words), DType::U8) }
}

/// `from` to `to`, unless they are the same.
fn copy(from: AnySlice, to: AnySlice) {
    if from.as_ptr() != to.as_ptr() {
        from.note_access(false);
        to.note_access(true);
        // SAFETY: host memory that its makers keep valid, of one length; the check of the call allows no other
        // overlap than being the same.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), from.len_bytes()) };
    }
}
