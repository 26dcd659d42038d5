//! One rank's part of a collective.
//!
//! | collective | rounds |
//! |---|---|
//! | reduce_scatter | each rank writes a piece of every other rank's segment, and sums those that it gets, in rank order |
//! | all_gather | each rank writes a piece of its segment, and copies those of the others |
//! | all_reduce | reduce_scatter, then all_gather |
//! | broadcast | the root writes a piece; the others copy it |
//! | all_to_all | as reduce_scatter, but the pieces are copied |
//! | barrier | one round without data |
//!
//! Sums are taken by the same code and in the same order as over [`threads`](crate::threads). The
//! call travels in front of the data of the first round: calls that differ are found before any
//! result is written.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use half::{bf16, f16};
use parking_lot::{Condvar, Mutex};
use zero_alloc::device::{AnySlice, DeviceError, DeviceSlice};

use super::rounds::{Broken, Halves, Rounds, wake_all};
use super::shared_memory::{DATA_BYTES, Memory};
use crate::call::{Call, Checked, Group};
use crate::comm_dtype::CommDType;
use crate::reduce::{CHUNK_ELEMS, Reducible, Store};
use crate::world::abort::AbortCompletion;
use crate::world::process::{Transport, World};
use crate::{Collective, CommError, ReduceOp};

/// An operation that waits for its turn looks again after this time.
const TURN: Duration = Duration::from_millis(100);

/// How the ranks of a communicator move data.
pub(super) trait Medium: Send {
    /// Runs a collective.
    ///
    /// # Errors
    /// The world has failed, or this rank has found a fault.
    fn run(&mut self, running: &Running<'_>) -> Result<(), Failure>;
}

/// A collective whose turn it is.
pub(super) struct Running<'a> {
    pub(super) checked: &'a Checked,
    pub(super) sequence: u64,
    pub(super) world: &'a World,
    /// The world has failed.
    pub(super) broken: &'a AtomicBool,
}

/// The state that the operations of a communicator share.
pub(super) struct Link {
    turn: Mutex<Turn>,
    next: Condvar,
    /// The world has failed.
    broken: AtomicBool,
    /// Ends the waits of the medium.
    wake: Box<dyn Fn() + Send + Sync>,
}

struct Turn {
    /// The number of the collective that runs next.
    sequence: u64,
    medium: Box<dyn Medium>,
}

impl Link {
    pub(super) fn new(
        medium: impl Medium + 'static,
        wake: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        Self {
            turn: Mutex::new(Turn {
                sequence: 0,
                medium: Box::new(medium),
            }),
            next: Condvar::new(),
            broken: AtomicBool::new(false),
            wake: Box::new(wake),
        }
    }

    /// A link over shared memory.
    pub(super) fn over(memory: Memory) -> Self {
        let memory = Arc::new(memory);
        Self::new(Rounds::new(Arc::clone(&memory)), move || wake_all(&memory))
    }
}

impl Transport for Link {
    fn error(&self) -> Option<String> {
        None
    }

    fn abort(&self) -> AbortCompletion {
        self.broken.store(true, Ordering::Release);
        (self.wake)();
        self.next.notify_all();
        AbortCompletion::new().1
    }
}

/// How far an operation is.
#[derive(Default)]
pub(super) struct Flags {
    pub(super) reached: AtomicBool,
    pub(super) ended: AtomicBool,
}

/// A collective of this rank on a stream. Dropping it before it has run, because its stream failed,
/// fails the world.
pub(super) struct Operation {
    pub(super) link: Arc<Link>,
    pub(super) world: Arc<World>,
    pub(super) flags: Arc<Flags>,
    pub(super) sequence: u64,
    pub(super) checked: Checked,
    pub(super) stream: String,
}

impl Drop for Operation {
    fn drop(&mut self) {
        let sequence = self.sequence;
        let rank = self.world.rank;
        let call = Box::new(self.checked.call.clone());
        if !self.flags.reached.load(Ordering::Acquire) {
            let stream = std::mem::take(&mut self.stream);
            self.world.fail(CommError::Skipped {
                sequence,
                call,
                rank,
                stream,
            });
        } else if std::thread::panicking() {
            self.world.fail(CommError::Panicked {
                sequence,
                call,
                rank,
            });
        }
        self.flags.ended.store(true, Ordering::Release);
    }
}

impl Operation {
    pub(super) fn run(self) -> Result<(), CommError> {
        let Link {
            turn, next, broken, ..
        } = &*self.link;
        let mut turn = turn.lock();
        while turn.sequence != self.sequence && !broken.load(Ordering::Acquire) {
            next.wait_for(&mut turn, TURN);
        }
        self.flags.reached.store(true, Ordering::Release);
        // A rank that knows of a failure gives the others nothing to go on with.
        if let Some(failure) = self.world.failure() {
            return Err(failure);
        }
        let running = Running {
            checked: &self.checked,
            sequence: self.sequence,
            world: &self.world,
            broken,
        };
        match turn.medium.run(&running) {
            Ok(()) => {
                turn.sequence += 1;
                next.notify_all();
                Ok(())
            }
            Err(Failure::Fault(error)) => Err(self.world.fail(error)),
            Err(Failure::World) => Err(self.world.failure().unwrap_or_else(|| CommError::Peer {
                rank: self.world.rank,
                message: "the communicator was aborted".to_owned(),
            })),
        }
    }
}

/// Why a collective ended early.
pub(super) enum Failure {
    /// The world has failed.
    World,
    /// This rank has found the fault.
    Fault(CommError),
}

impl From<Broken> for Failure {
    fn from(_: Broken) -> Self {
        Self::World
    }
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Self {
        Self::Fault(CommError::Device(error))
    }
}

impl Running<'_> {
    /// The call as bytes.
    pub(super) fn encoded(&self) -> Vec<u8> {
        postcard::to_allocvec(&self.checked.call).unwrap_or_default()
    }

    /// Compares the call with the one that another rank has sent, apart from pairs of counts, and
    /// returns that.
    pub(super) fn compare(&self, theirs: &[u8], other_rank: usize) -> Result<Call, Failure> {
        let call = &self.checked.call;
        let sequence = self.sequence;
        let undecodable = |_| CommError::Peer {
            rank: other_rank,
            message: format!("collective {sequence}, {call}: sent an undecodable call"),
        };
        let theirs = postcard::take_from_bytes::<Call>(theirs).map_err(undecodable);
        let compared = theirs.and_then(|(theirs, _)| {
            let named = [self.world.rank, other_rank];
            Call::compare(sequence, [call, &theirs], named).map(|()| theirs)
        });
        compared.map_err(Failure::Fault)
    }
}

impl Medium for Rounds {
    fn run(&mut self, running: &Running<'_>) -> Result<(), Failure> {
        let segments = &running.checked.call.segments;
        let work = Work {
            longest: segments.longest(self.memory().group().world_size),
            rounds: self,
            checked: running.checked,
            unsent: Some(running.encoded()),
            running,
        };
        work.run()
    }
}

/// A collective that runs over shared memory.
struct Work<'a> {
    rounds: &'a mut Rounds,
    running: &'a Running<'a>,
    checked: &'a Checked,
    /// The call as bytes, until the first round has sent it.
    unsent: Option<Vec<u8>>,
    /// The longest segment of all ranks, in elements: all have as many rounds as it needs. Before
    /// the first round only of this rank, whose pairs of counts are its own.
    longest: usize,
}

impl Work<'_> {
    fn run(mut self) -> Result<(), Failure> {
        let Checked {
            call, send, recv, ..
        } = self.checked;
        let own = call.segments.range(self.rank(), self.n());
        match (call.collective, call.op) {
            (Collective::ReduceScatter, Some(op)) => self.reduce_scatter(op, *recv),
            (Collective::AllReduce, Some(op)) => {
                self.reduce_scatter(op, recv.slice(own.clone()))?;
                self.all_gather(recv.slice(own), *recv)
            }
            (Collective::AllGather, _) => self.all_gather(*send, *recv),
            (Collective::Broadcast, _) => self.broadcast(*send, call.root.unwrap_or(0)),
            (Collective::AllToAll, _) => self.all_to_all(*recv),
            (Collective::Barrier | Collective::ReduceScatter | Collective::AllReduce, _) => {
                self.round(|_| {}, |_| Ok(()))
            }
        }
    }

    fn rank(&self) -> usize {
        self.group().rank
    }

    fn n(&self) -> usize {
        self.group().world_size
    }

    fn group(&self) -> Group {
        self.rounds.memory().group()
    }

    /// Runs a round: `write` fills this rank's data, `read` reads those of the others.
    fn round(
        &mut self,
        write: impl FnOnce(&mut [u8]),
        read: impl FnOnce(&Halves<'_>) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let header = self.rounds.memory().header_bytes();
        let Group { rank, world_size } = self.group();
        let unsent = self.unsent.take();
        // Only the first round has the call.
        let compared = if unsent.is_some() { world_size } else { 0 };
        let running = self.running;
        self.rounds.run(
            running.broken,
            |half| {
                if let Some(call) = &unsent {
                    half[..4].copy_from_slice(&(call.len() as u32).to_le_bytes());
                    half[4..4 + call.len()].copy_from_slice(call);
                }
                write(&mut half[header..]);
            },
            |halves| {
                let mut calls = Vec::with_capacity(compared);
                for peer in 0..compared {
                    if peer == rank {
                        calls.push(running.checked.call.clone());
                        continue;
                    }
                    let header = halves.header(peer)?;
                    let bytes = header
                        .first_chunk()
                        .map_or(0, |len| u32::from_le_bytes(*len) as usize);
                    let theirs = header.get(4..4 + bytes).unwrap_or_default();
                    // Behind the wait for the peer, which has written its rank before.
                    let theirs = running.compare(theirs, halves.world_rank(peer))?;
                    self.longest = self.longest.max(theirs.segments.longest(world_size));
                    calls.push(theirs);
                }
                Call::compare_pairs(running.sequence, &calls, |peer| halves.world_rank(peer))
                    .map_err(Failure::Fault)?;
                read(halves)
            },
        )
    }

    /// Sends segment q of `send` to rank q, in pieces. Range q of `into` has the length of what rank q
    /// sends; `take` gets the parts of these ranges, and the bytes for them, by rank.
    fn scatter(
        &mut self,
        into: &[Range<usize>],
        mut take: impl FnMut(&[Range<usize>], &[&[u8]]) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let Checked { call, send, .. } = self.checked;
        let Group { rank, world_size } = self.group();
        let elem = call.dtype.size_bytes();
        let stride = DATA_BYTES / world_size / 64 * 64;
        let step = (stride / elem).max(1);
        let segments: Vec<Range<usize>> = call.segments.ranges(world_size).collect();
        let part = |segment: &Range<usize>, at: usize| {
            let start = (segment.start + at).min(segment.end);
            start..(start + step).min(segment.end)
        };

        let mut at = 0;
        loop {
            let own = send.slice(part(&segments[rank], at));
            self.round(
                |half| {
                    for (peer, segment) in segments.iter().enumerate().filter(|(q, _)| *q != rank) {
                        let bytes = host(send.slice(part(segment, at)));
                        half[peer * stride..][..bytes.len()].copy_from_slice(bytes);
                    }
                },
                |halves| {
                    let parts: Vec<_> = into.iter().map(|range| part(range, at)).collect();
                    let mut pieces = Vec::with_capacity(world_size);
                    for (peer, part) in parts.iter().enumerate() {
                        pieces.push(match peer == rank {
                            true => host(own),
                            false => &halves.data(peer)?[rank * stride..][..part.len() * elem],
                        });
                    }
                    take(&parts, &pieces)
                },
            )?;
            at += step;
            if at >= self.longest {
                return Ok(());
            }
        }
    }

    fn reduce_scatter(&mut self, op: ReduceOp, recv: AnySlice) -> Result<(), Failure> {
        let call = &self.checked.call;
        let into = vec![0..recv.len(); self.n()];
        self.scatter(&into, |parts, pieces| {
            Ok(reduce((call, op), pieces, recv.slice(parts[0].clone()))?)
        })
    }

    fn all_to_all(&mut self, recv: AnySlice) -> Result<(), Failure> {
        let received = self.checked.call.segments.received();
        let into: Vec<Range<usize>> = received.ranges(self.n()).collect();
        self.scatter(&into, |parts, pieces| {
            for (piece, part) in pieces.iter().zip(parts) {
                copy(piece, recv.slice(part.clone()));
            }
            Ok(())
        })
    }

    /// Gathers the ranks' segments to `recv`; `send` is this rank's.
    fn all_gather(&mut self, send: AnySlice, recv: AnySlice) -> Result<(), Failure> {
        let call = &self.checked.call;
        let Group { rank, world_size } = self.group();
        let step = DATA_BYTES / call.dtype.size_bytes();
        let segments: Vec<Range<usize>> = call.segments.ranges(world_size).collect();
        let own = recv.slice(segments[rank].clone());
        if own.as_ptr() != send.as_ptr() {
            copy(host(send), own);
        }

        // Behind a reduce-scatter, ranks without elements have nothing to say.
        let least = usize::from(self.unsent.is_some());
        for at in (0..self.longest.max(least)).step_by(step) {
            let piece = |segment: &Range<usize>| {
                let start = (segment.start + at).min(segment.end);
                recv.slice(start..(start + step).min(segment.end))
            };
            self.round(
                |half| {
                    let bytes = host(piece(&segments[rank]));
                    half[..bytes.len()].copy_from_slice(bytes);
                },
                |halves| {
                    for (peer, segment) in segments.iter().enumerate().filter(|(q, _)| *q != rank) {
                        let into = piece(segment);
                        copy(&halves.data(peer)?[..into.len_bytes()], into);
                    }
                    Ok(())
                },
            )?;
        }
        Ok(())
    }

    fn broadcast(&mut self, buffer: AnySlice, root: usize) -> Result<(), Failure> {
        let rank = self.rank();
        let step = DATA_BYTES / self.checked.call.dtype.size_bytes();
        for at in (0..buffer.len().max(1)).step_by(step) {
            let piece = buffer.slice(at.min(buffer.len())..(at + step).min(buffer.len()));
            self.round(
                |half| {
                    if rank == root {
                        let bytes = host(piece);
                        half[..bytes.len()].copy_from_slice(bytes);
                    }
                },
                |halves| {
                    if rank != root {
                        copy(&halves.data(root)?[..piece.len_bytes()], piece);
                    }
                    Ok(())
                },
            )?;
        }
        Ok(())
    }
}

/// Writes the reduction of the ranks' pieces of a call, in rank order, to `out`.
pub(super) fn reduce(
    (call, op): (&Call, ReduceOp),
    pieces: &[&[u8]],
    out: AnySlice,
) -> Result<(), DeviceError> {
    fn of<T: Reducible>(op: ReduceOp, pieces: &[&[u8]], out: AnySlice) -> Result<(), DeviceError> {
        let out: DeviceSlice<T> = out.typed()?;
        let pieces: Vec<&[T]> = pieces
            .iter()
            .map(|bytes| bytemuck::cast_slice(bytes))
            .collect();
        let mut result = vec![T::default(); CHUNK_ELEMS.min(out.len())];
        for start in (0..out.len()).step_by(CHUNK_ELEMS) {
            let chunk = start..(start + CHUNK_ELEMS).min(out.len());
            let result = &mut result[..chunk.len()];
            let views: Vec<&[T]> = pieces.iter().map(|piece| &piece[chunk.clone()]).collect();
            T::reduce(op, &views, result, Store::Cached);
            // SAFETY: the memory is valid by the promise of the slice's maker, and only this
            // operation accesses it now. In place, it is this rank's piece, whose view was read
            // above for the last time.
            unsafe { out.slice(chunk).as_host_mut() }.copy_from_slice(result);
        }
        Ok(())
    }

    if out.is_empty() {
        return Ok(());
    }
    match call.comm_dtype() {
        CommDType::F32 => of::<f32>(op, pieces, out),
        CommDType::F64 => of::<f64>(op, pieces, out),
        CommDType::Bf16 => of::<bf16>(op, pieces, out),
        CommDType::F16 => of::<f16>(op, pieces, out),
        CommDType::U8 => of::<u8>(op, pieces, out),
    }
}

/// The bytes of a buffer of this rank, until the next one is written.
pub(super) fn host<'a>(slice: AnySlice) -> &'a [u8] {
    if slice.is_empty() {
        return &[];
    }
    slice.note_access(false);
    // SAFETY: host memory that is valid by the promise of the slice's maker, by `Checked::check`;
    // only this operation accesses it now, and it ends each view before it writes there.
    unsafe { std::slice::from_raw_parts(slice.as_ptr(), slice.len_bytes()) }
}

pub(super) fn copy(from: &[u8], to: AnySlice) {
    if to.is_empty() {
        return;
    }
    to.note_access(true);
    // SAFETY: as for `host`; the source is other memory.
    unsafe { std::slice::from_raw_parts_mut(to.as_ptr(), to.len_bytes()) }.copy_from_slice(from);
}
