//! Collectives over bytes that the program moves: each is one to three exchanges between all ranks.
//!
//! | collective | exchanges behind that of the calls |
//! |---|---|
//! | reduce_scatter | segments, which are summed in rank order |
//! | all_gather | segments |
//! | all_reduce | reduce_scatter, then all_gather |
//! | broadcast | the root sends segments, then all_gather |
//! | all_to_all | segments |

use std::ops::Range;
use std::sync::Arc;

use zero_alloc::device::AnySlice;

use super::collective::{Failure, Medium, Running, copy, host, reduce};
use crate::call::{Call, Group};
use crate::world::process::ANSWER_LIMIT;
use crate::{Collective, CommError};

/// Moves bytes between the ranks of a [`ProcessComm`](super::ProcessComm) that share no memory.
pub trait Carrier: Send + Sync {
    /// Sends and receives the parts, of each other rank at most one, and returns when both are done.
    /// All ranks call it in the same order; what one sends to another has the length that the other
    /// receives.
    ///
    /// # Errors
    /// The transfer failed. Nothing accesses the parts any more.
    fn exchange(&self, parts: Vec<Part<'_>>) -> Result<(), String>;

    /// Ends the exchange that runs, with an error, and those to come. Any thread calls it.
    fn abort(&self);
}

/// The bytes that a rank sends to another one, and receives from it.
#[derive(Debug)]
pub struct Part<'a> {
    /// The other rank.
    pub rank: usize,
    /// The bytes to send.
    pub send: &'a [u8],
    /// The bytes to receive.
    pub recv: &'a mut [u8],
}

/// The medium of a communicator over a [`Carrier`].
pub(super) struct Carried {
    pub(super) group: Group,
    pub(super) carrier: Arc<dyn Carrier>,
}

impl Medium for Carried {
    fn run(&mut self, running: &Running<'_>) -> Result<(), Failure> {
        self.compare(running)?;
        let checked = running.checked;
        let call = &checked.call;
        let segments: Vec<Range<usize>> = call.segments.ranges(self.group.world_size).collect();
        let work = Work {
            link: self,
            running,
            own: segments[self.group.rank].clone(),
            segments,
        };
        match (call.collective, call.op) {
            (Collective::ReduceScatter, Some(_)) => work.reduce_scatter(checked.recv),
            (Collective::AllReduce, Some(_)) => {
                let own = checked.recv.slice(work.own.clone());
                work.reduce_scatter(own)?;
                work.all_gather(own)
            }
            (Collective::AllGather, _) => work.all_gather(checked.send),
            (Collective::Broadcast, _) => work.broadcast(call.root.unwrap_or(0)),
            (Collective::AllToAll, _) => work.all_to_all(),
            // The calls have been exchanged.
            (Collective::Barrier | Collective::ReduceScatter | Collective::AllReduce, _) => Ok(()),
        }
    }
}

impl Carried {
    /// Compares the calls of all ranks, before any data is used.
    fn compare(&self, running: &Running<'_>) -> Result<(), Failure> {
        let Group { rank, world_size } = self.group;
        let mut own = running.encoded();
        own.resize(Call::max_serialized_bytes(world_size), 0);
        let mut theirs = vec![0; own.len() * world_size];
        let calls = theirs.chunks_mut(own.len()).enumerate();
        let parts = calls.map(|(rank, recv)| Part {
            rank,
            send: &own,
            recv,
        });
        self.exchange(running, parts.collect())?;

        let calls = theirs.chunks(own.len()).enumerate();
        let calls = calls.map(|(peer, call)| match peer == rank {
            true => Ok(running.checked.call.clone()),
            false => running.compare(call, peer),
        });
        let calls: Vec<Call> = calls.collect::<Result<_, _>>()?;
        Call::compare_pairs(running.sequence, &calls, |rank| rank).map_err(Failure::Fault)
    }

    /// Exchanges the parts of the other ranks.
    fn exchange(&self, running: &Running<'_>, mut parts: Vec<Part<'_>>) -> Result<(), Failure> {
        let is_empty = |part: &Part<'_>| part.send.is_empty() && part.recv.is_empty();
        parts.retain(|part| part.rank != self.group.rank && !is_empty(part));
        self.carrier.exchange(parts).map_err(|message| {
            // The end of another rank is noticed here and by the coordinator, which knows its cause.
            match running.world.wait_for_failure(ANSWER_LIMIT) {
                Some(_) => Failure::World,
                None => Failure::Fault(CommError::BackEnd {
                    back_end: "exchange",
                    message,
                }),
            }
        })
    }
}

/// A collective that runs.
struct Work<'a> {
    link: &'a Carried,
    running: &'a Running<'a>,
    segments: Vec<Range<usize>>,
    /// This rank's segment.
    own: Range<usize>,
}

impl Work<'_> {
    /// Exchanges `send(q)` and `recv(q)` with each other rank q.
    fn exchange(
        &self,
        send: impl Fn(usize) -> AnySlice,
        recv: impl Fn(usize) -> AnySlice,
    ) -> Result<(), Failure> {
        let part = |rank| Part {
            rank,
            send: host(send(rank)),
            recv: host_mut(recv(rank)),
        };
        let Group { rank, world_size } = self.link.group;
        let others = (0..world_size).filter(|&peer| peer != rank);
        self.link.exchange(self.running, others.map(part).collect())
    }

    fn reduce_scatter(&self, recv: AnySlice) -> Result<(), Failure> {
        let checked = self.running.checked;
        let Some(op) = checked.call.op else {
            return Ok(());
        };
        let Group { rank, world_size } = self.link.group;
        let own = checked.send.slice(self.own.clone());
        let bytes = own.len_bytes();
        // Of the widest alignment.
        let mut memory = vec![0u64; bytes.div_ceil(8) * world_size];
        let staged: &mut [u8] = bytemuck::cast_slice_mut(&mut memory);
        let stride = bytes.next_multiple_of(8);

        let mut rest = &mut *staged;
        let mut parts = Vec::with_capacity(world_size);
        for (peer, segment) in self.segments.iter().enumerate() {
            let (place, behind) = rest.split_at_mut(stride);
            rest = behind;
            parts.push(Part {
                rank: peer,
                send: host(checked.send.slice(segment.clone())),
                recv: &mut place[..bytes],
            });
        }
        self.link.exchange(self.running, parts)?;

        let piece = |peer: usize| match peer == rank {
            true => host(own),
            false => &staged[peer * stride..][..bytes],
        };
        let pieces: Vec<&[u8]> = (0..world_size).map(piece).collect();
        Ok(reduce((&checked.call, op), &pieces, recv)?)
    }

    /// Gathers the ranks' segments to the output; `send` is this rank's.
    fn all_gather(&self, send: AnySlice) -> Result<(), Failure> {
        let recv = self.running.checked.recv;
        let own = recv.slice(self.own.clone());
        if own.as_ptr() != send.as_ptr() {
            copy(host(send), own);
        }
        self.exchange(|_| own, |peer| recv.slice(self.segments[peer].clone()))
    }

    fn broadcast(&self, root: usize) -> Result<(), Failure> {
        let buffer = self.running.checked.recv;
        let empty = buffer.slice(0..0);
        let is_root = self.link.group.rank == root;
        let own = buffer.slice(self.own.clone());
        self.exchange(
            |peer| match is_root {
                true => buffer.slice(self.segments[peer].clone()),
                false => empty,
            },
            |peer| if peer == root { own } else { empty },
        )?;
        // The root has all of it.
        self.exchange(
            |peer| if peer == root { empty } else { own },
            |peer| match is_root {
                true => empty,
                false => buffer.slice(self.segments[peer].clone()),
            },
        )
    }

    fn all_to_all(&self) -> Result<(), Failure> {
        let checked = self.running.checked;
        let Group { rank, world_size } = self.link.group;
        let received = checked.call.segments.received();
        let received: Vec<Range<usize>> = received.ranges(world_size).collect();
        let from = |peer: usize| checked.send.slice(self.segments[peer].clone());
        let to = |peer: usize| checked.recv.slice(received[peer].clone());
        copy(host(from(rank)), to(rank));
        self.exchange(from, to)
    }
}

/// The bytes of a buffer that this rank receives.
fn host_mut<'a>(slice: AnySlice) -> &'a mut [u8] {
    if slice.is_empty() {
        return &mut [];
    }
    slice.note_access(true);
    // SAFETY: host memory that is valid by the promise of the slice's maker, by `Checked::check`; only
    // this operation accesses it now, and the segments of a collective do not overlap.
    unsafe { std::slice::from_raw_parts_mut(slice.as_ptr(), slice.len_bytes()) }
}
