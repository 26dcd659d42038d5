//! One collective of one rank over MPI: the ranks compare their calls, then transfer data directly.
//!
//! Every rank sends its call to every other rank; calls that differ are a mismatch. Then each rank
//! sends segments directly to the ranks that need them:
//!
//! - reduce_scatter: segment q of `send` to rank q, which adds all ranks' segments in rank order,
//!   by the same code and with the same bits as over threads;
//! - all_gather, all_to_all: one transfer per pair; all_reduce: reduce_scatter, then all_gather;
//! - broadcast: the root scatters, then all ranks gather.
//!
//! [`Traffic`](crate::Traffic) counts these bytes. Tags differ by communicator, sequence number and
//! phase ([`tags`](super::tags)), so collectives of different streams can be in flight at the same
//! time.

use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use zero_alloc::TimeLimit;
use zero_alloc::device::{AnySlice, DType, DeviceId};

use super::notice::Notice;
use super::raw::{MpiError, Request};
use super::staging::Staging;
use super::tags::{Pending, Phase};
use super::world::{Interrupt, Pause, World};
use crate::call::{Call, Checked, Counts};
use crate::comm_dtype::CommDType;
use crate::reduce::{CHUNK_ELEMS, Reducible, Store};
use crate::{Collective, CommError, ReduceOp};

/// A communicator's identity and members.
#[derive(Clone)]
pub(super) struct Members {
    pub(super) context: u32,
    /// This rank's number in the communicator.
    pub(super) rank: usize,
    /// World ranks, by rank of the communicator.
    pub(super) world_ranks: Arc<[usize]>,
}

/// One collective of this rank. Dropping it before it has run, because its stream failed, fails the
/// world.
pub(super) struct Operation {
    pub(super) world: Arc<World>,
    pub(super) members: Members,
    pub(super) sequence: u64,
    pub(super) checked: Checked,
    pub(super) stream: String,
    pub(super) begun: bool,
    /// Those of the communicator, with this one until it is dropped.
    pub(super) pending: Pending,
}

impl Drop for Operation {
    fn drop(&mut self) {
        let sequence = self.sequence;
        let call = self.call();
        let rank = self.members.rank;
        if !self.begun {
            let stream = std::mem::take(&mut self.stream);
            self.fail(
                rank,
                CommError::Skipped {
                    sequence,
                    call,
                    rank,
                    stream,
                },
            );
        } else if std::thread::panicking() {
            self.fail(
                rank,
                CommError::Panicked {
                    sequence,
                    call,
                    rank,
                },
            );
        }

        // Only now may a later collective use the tags: it finds the failure first.
        self.pending.remove(self.sequence);
    }
}

/// The bytes to send to a peer or to receive from it.
struct PeerBytes {
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

    /// The segments of `whole`, except this rank's.
    fn parts(&self, whole: AnySlice) -> Vec<PeerBytes> {
        self.parts_by(&self.checked.call.segments, whole)
    }

    fn parts_by(&self, segments: &Counts, whole: AnySlice) -> Vec<PeerBytes> {
        let segments = segments.ranges(self.n()).enumerate();
        let part = |(peer, segment): (usize, Range<usize>)| PeerBytes {
            peer,
            bytes: whole.slice(segment),
        };
        segments
            .filter(|&(peer, _)| peer != self.members.rank)
            .map(part)
            .collect()
    }

    fn fail(&self, at_fault: usize, error: CommError) -> CommError {
        let notice = Notice::Failed {
            at_fault: self.members.world_ranks[at_fault],
            message: error.to_string(),
        };
        self.world.fail(error, &notice)
    }

    /// Waits until the collective that had the same tags has ended on this rank.
    fn wait_for_tags(&self) -> Result<(), CommError> {
        let Some(previous) = self.world.raw.tags.previous(self.sequence) else {
            return Ok(());
        };
        let mut time = TimeLimit::new(self.world.limit);
        let mut pause = Pause::default();

        while self.pending.contains(previous) {
            if let Some(error) = self.world.poll() {
                return Err(error);
            }
            if time.elapsed() >= self.world.limit {
                let sequence = self.sequence;
                let call = self.call();
                let rank = self.members.rank;
                let limit = self.world.limit;
                return Err(self.fail(
                    rank,
                    CommError::Stalled {
                        sequence,
                        call,
                        rank,
                        limit,
                        done: previous,
                    },
                ));
            }
            pause.sleep(false);
        }

        Ok(())
    }

    /// Sends and receives the parts of one phase, and waits for all of them.
    fn exchange(
        &self,
        phase: Phase,
        sends: &[PeerBytes],
        receives: &[PeerBytes],
    ) -> Result<(), CommError> {
        let sizes: Vec<_> = receives
            .iter()
            .map(|part| (part.peer, part.bytes.len_bytes()))
            .collect();
        self.transfer(phase, sends, &sizes, |received| {
            receives
                .iter()
                .enumerate()
                .for_each(|(index, part)| received.copy_to(index, part.bytes));
            Ok(())
        })
    }

    /// Sends parts and receives others of these peers and bytes, waits for all of them, and calls
    /// `deliver` with them.
    fn transfer(
        &self,
        phase: Phase,
        sends: &[PeerBytes],
        receives: &[(usize, usize)],
        deliver: impl FnOnce(&Staging) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let sent: Vec<AnySlice> = sends.iter().map(|part| part.bytes).collect();
        let mut staging = Staging::new(&sent, receives.iter().map(|&(_, bytes)| bytes));
        let [from, to] = staging.places();
        let outgoing = sends
            .iter()
            .map(|part| part.peer)
            .zip(from)
            .map(|(peer, place)| (false, peer, place));
        let incoming = receives
            .iter()
            .map(|&(peer, _)| peer)
            .zip(to)
            .map(|(peer, place)| (true, peer, place));
        let mut requests = Vec::with_capacity(sends.len() + receives.len());
        // SAFETY: the places are parts of `staging`, which is freed below only when every request
        // is done; nothing writes to parts that are sent or accesses parts that are received before
        // that.
        let started = unsafe { self.start(phase, incoming.chain(outgoing), &mut requests) };
        let have_all_requests = started.is_ok();
        let result = started.map_err(|(peer, error)| Interrupt::Broken(peer, error));
        let result = result.and_then(|()| {
            self.world
                .wait(&mut requests, self.members.context, self.sequence)
        });

        let Err(interrupt) = result else {
            let delivered = deliver(&staging);
            // SAFETY: every request is done.
            unsafe { staging.free() };
            return delivered;
        };

        let index = |peer: usize| {
            self.members
                .world_ranks
                .iter()
                .position(|&q| q == peer)
                .unwrap_or(0)
        };

        let sequence = self.sequence;
        let call = self.call();
        let error = match interrupt {
            Interrupt::Failed(error) => error,
            Interrupt::Broken(peer, error) => {
                let message = format!(
                    "collective {sequence}, {call}: {}: {}",
                    error.call, error.message
                );
                self.fail(
                    index(peer),
                    CommError::Peer {
                        rank: index(peer),
                        message,
                    },
                )
            }
            Interrupt::Left(peer, done) => self.fail(
                index(peer),
                CommError::Left {
                    sequence,
                    call,
                    rank: index(peer),
                    done,
                },
            ),
            Interrupt::Late(silent) => {
                let rank = index(silent.rank);
                self.fail(
                    rank,
                    CommError::Silent {
                        sequence,
                        call,
                        rank,
                        waits: index(silent.waits),
                        limit: self.world.limit,
                    },
                )
            }
        };

        if self.world.settle(&mut requests) && have_all_requests {
            // SAFETY: every request is done.
            unsafe { staging.free() };
        }

        Err(error)
    }

    /// Starts the transfers of one phase: whether it receives, the peer, the place and its bytes.
    ///
    /// # Safety
    /// As for [`World::start`], for every place.
    unsafe fn start(
        &self,
        phase: Phase,
        parts: impl Iterator<Item = (bool, usize, (*mut u8, usize))>,
        requests: &mut Vec<Request>,
    ) -> Result<(), (usize, MpiError)> {
        let tag = self
            .world
            .raw
            .tags
            .of(self.members.context, self.sequence, phase);
        for (receives, peer, (at, bytes)) in parts {
            let peer = self.members.world_ranks[peer];
            // SAFETY: the caller's promise.
            unsafe { self.world.start(receives, at, bytes, peer, tag, requests) }?;
        }
        Ok(())
    }

    /// Compares the calls of all ranks.
    fn compare(&self) -> Result<(), CommError> {
        let call = &self.checked.call;
        let bytes = Call::max_serialized_bytes(self.n());
        let sequence = self.sequence;
        let rank = self.members.rank;
        let mut own = postcard::to_allocvec(call).unwrap_or_default();
        debug_assert!(
            !own.is_empty() && own.len() <= bytes,
            "{call}: {} bytes, at most {bytes} expected",
            own.len()
        );
        // SAFETY: `own` outlives the transfer, which alone accesses it until it ends.
        let own = unsafe {
            AnySlice::from_raw_parts(own.as_mut_ptr(), own.len(), DType::U8, DeviceId::HOST)
        };
        let sends: Vec<PeerBytes> = self
            .others()
            .map(|peer| PeerBytes { peer, bytes: own })
            .collect();
        let receives: Vec<_> = self.others().map(|peer| (peer, bytes)).collect();

        self.transfer(Phase::Compare, &sends, &receives, |received| {
            let mut calls = Vec::with_capacity(self.n());
            for (index, peer) in self.others().enumerate() {
                // A call may be shorter than its place.
                match postcard::take_from_bytes::<Call>(received.received(index)) {
                    Ok((other, _)) => {
                        Call::compare(sequence, [call, &other], [rank, peer])
                            .map_err(|error| self.fail(peer, error))?;
                        calls.push(other);
                    }
                    Err(error) => {
                        let message = format!(
                            "collective {sequence}, {call}: received an undecodable call: {error}"
                        );
                        return Err(self.fail(
                            peer,
                            CommError::Peer {
                                rank: peer,
                                message,
                            },
                        ));
                    }
                }
            }
            calls.insert(rank, call.clone());
            Call::compare_pairs(sequence, &calls, |rank| rank).map_err(|error| {
                let at_fault = match error {
                    CommError::Unmatched { rank, .. } => rank,
                    _ => rank,
                };
                self.fail(at_fault, error)
            })
        })
    }

    /// Runs the collective.
    pub(super) fn run(mut self) -> Result<(), CommError> {
        self.begun = true;
        if let Some(error) = self.world.failure() {
            return Err(error);
        }
        self.wait_for_tags()?;
        self.compare()?;
        let (
            Checked {
                call, send, recv, ..
            },
            rank,
        ) = (&self.checked, self.members.rank);
        let send = *send;
        let recv = *recv;
        let own = call.segments.range(rank, self.n());

        match (call.collective, call.op) {
            (Collective::ReduceScatter, Some(op)) => self.reduce_scatter(op, send, recv),
            (Collective::AllReduce, Some(op)) => {
                self.reduce_scatter(op, send, recv.slice(own.clone()))?;
                self.all_gather(recv.slice(own), recv)
            }
            (Collective::AllGather, _) => self.all_gather(send, recv),
            (Collective::Broadcast, _) => {
                let root = call.root.unwrap_or(0);
                let (sends, receives) = if rank == root {
                    (self.parts(send), Vec::new())
                } else {
                    (
                        Vec::new(),
                        vec![PeerBytes {
                            peer: root,
                            bytes: send.slice(own.clone()),
                        }],
                    )
                };
                self.exchange(Phase::Scatter, &sends, &receives)?;
                // The root has all segments: it sends its own and receives none.
                let sends: Vec<PeerBytes> = self
                    .others()
                    .filter(|&peer| peer != root)
                    .map(|peer| PeerBytes {
                        peer,
                        bytes: send.slice(own.clone()),
                    })
                    .collect();
                let receives = if rank == root {
                    Vec::new()
                } else {
                    self.parts(send)
                };
                self.exchange(Phase::Gather, &sends, &receives)
            }
            (Collective::AllToAll, _) => {
                let received = call.segments.received();
                copy(send.slice(own), recv.slice(received.range(rank, self.n())));
                let receives = self.parts_by(&received, recv);
                self.exchange(Phase::Scatter, &self.parts(send), &receives)
            }
            (Collective::Barrier | Collective::ReduceScatter | Collective::AllReduce, _) => Ok(()),
        }
    }

    fn all_gather(&self, send: AnySlice, recv: AnySlice) -> Result<(), CommError> {
        copy(
            send,
            recv.slice(
                self.checked
                    .call
                    .segments
                    .range(self.members.rank, self.n()),
            ),
        );
        let sends: Vec<PeerBytes> = self
            .others()
            .map(|peer| PeerBytes { peer, bytes: send })
            .collect();
        self.exchange(Phase::Gather, &sends, &self.parts(recv))
    }

    fn reduce_scatter(
        &self,
        op: ReduceOp,
        send: AnySlice,
        recv: AnySlice,
    ) -> Result<(), CommError> {
        match self.checked.call.comm_dtype() {
            CommDType::F32 => self.reduce_scatter_of::<f32>(op, send, recv),
            CommDType::F64 => self.reduce_scatter_of::<f64>(op, send, recv),
            CommDType::Bf16 => self.reduce_scatter_of::<bf16>(op, send, recv),
            CommDType::F16 => self.reduce_scatter_of::<f16>(op, send, recv),
            CommDType::U8 => self.reduce_scatter_of::<u8>(op, send, recv),
        }
    }

    fn reduce_scatter_of<T: Reducible>(
        &self,
        op: ReduceOp,
        send: AnySlice,
        recv: AnySlice,
    ) -> Result<(), CommError> {
        let rank = self.members.rank;
        let n = self.n();
        let own = self.checked.call.segments.range(rank, n);
        let len = own.len();
        let mine = send.slice(own).typed::<T>()?;
        let out = recv.typed::<T>()?;
        let receives: Vec<_> = self
            .others()
            .map(|peer| (peer, len * size_of::<T>()))
            .collect();

        self.transfer(Phase::Scatter, &self.parts(send), &receives, |received| {
            let theirs: Vec<&[T]> = (0..receives.len())
                .map(|index| bytemuck::cast_slice(received.received(index)))
                .collect();
            let mut result = vec![T::default(); CHUNK_ELEMS.min(len)];
            for start in (0..len).step_by(CHUNK_ELEMS) {
                let chunk = start..(start + CHUNK_ELEMS).min(len);
                let result = &mut result[..chunk.len()];
                // SAFETY: the memory is valid by the promise of the slice's maker, and nothing
                // writes to it now; this view's last use precedes the write to `out`, which may be
                // the same memory.
                let mine = unsafe { mine.slice(chunk.clone()).as_host() };
                let mut views: Vec<&[T]> =
                    theirs.iter().map(|theirs| &theirs[chunk.clone()]).collect();
                views.insert(rank, mine);
                T::reduce(op, &views, result, Store::Cached);
                // SAFETY: the memory is valid by the promise of the slice's maker, and only this
                // operation accesses it now.
                unsafe { out.slice(chunk.clone()).as_host_mut() }.copy_from_slice(result);
            }
            Ok(())
        })
    }
}

/// Copies `from` to `to`, unless they are the same.
fn copy(from: AnySlice, to: AnySlice) {
    if from.as_ptr() != to.as_ptr() {
        from.note_access(false);
        to.note_access(true);
        // SAFETY: both are valid by the promises of their makers and have the same length; they are
        // not the same memory, and the check of the call excludes any other overlap.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), from.len_bytes()) };
    }
}
