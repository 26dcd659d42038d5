//! Collectives over all ranks in two levels: within groups, such as the ranks of a machine, and
//! between them.
//!
//! With N ranks in groups of K, a rank has a *position* within its group. Ranks here are in the
//! order of position, then of group, so that the segments of the ranks of one position are one
//! range, the *shard* of that position:
//!
//! ```text
//! reduce_scatter   within the group: send -> the shard in send    between: the shard -> recv
//! all_gather       between: send -> the shard in recv             within: the shard -> recv
//! all_reduce       within: reduce_scatter into recv               between: all_reduce of the shard
//!                  within: all_gather of the shards in recv
//! ```
//!
//! No level allocates memory. A rank sends (N-1)/N of the whole buffer, as in one ring. Of M
//! groups each sends (M-1)/M of it to others, where a ring sends (N-1)/N, and the latency is that
//! of K-1 + M-1 neighbours, where a ring has N-1.
//!
//! Sums are those of the groups' sums, rounded to the dtype at each level: other bits than one ring
//! has.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use zero_alloc::device::{AnySlice, Device};

use crate::call::{Checked, Counts, Group, balanced_range};
use crate::{Collective, CommError, Communicator, ReduceOp, Traffic};

/// A communicator of all ranks whose reduce-scatters, all-gathers and all-reduces run in two
/// levels. Other calls run on one communicator of all ranks: reduce-scatters that must keep `send`,
/// uneven segments, broadcasts, all-to-alls and barriers.
///
/// With `groups` groups, a rank has the number `position * groups + group`.
pub struct TwoLevel<D: Device> {
    /// All ranks, in the same order.
    ring: Arc<dyn Communicator<D>>,
    /// The ranks of this rank's group.
    within: Arc<dyn Communicator<D>>,
    /// The ranks with this rank's position.
    between: Arc<dyn Communicator<D>>,
    /// Of the calls that run in two levels.
    traffic: Mutex<Traffic>,
}

/// Bytes that a rank has sent, by the communicator that sent them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LevelTraffic {
    /// Over all ranks in one level.
    pub ring: Traffic,
    /// To ranks of its group.
    pub within: Traffic,
    /// To ranks with its position.
    pub between: Traffic,
}

impl<D: Device> fmt::Debug for TwoLevel<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Group { rank, world_size } = self.ring.group();
        let group = self.within.world_size();
        write!(
            f,
            "TwoLevel(rank {rank} of {world_size}, groups of {group})"
        )
    }
}

impl<D: Device> TwoLevel<D> {
    /// Splits `world` into groups of `group_size` consecutive ranks. All ranks of `world` call it.
    ///
    /// # Errors
    /// `group_size` does not divide the number of ranks, or as [`Communicator::split`].
    pub fn new(world: &dyn Communicator<D>, group_size: usize) -> Result<Self, CommError> {
        let world_size = world.world_size();
        if group_size == 0 || !world_size.is_multiple_of(group_size) {
            return Err(CommError::Groups {
                world_size,
                group_size,
            });
        }
        let groups = world_size / group_size;
        let group = |rank: usize| rank / group_size;
        let position = |rank: usize| rank % group_size;
        Ok(Self {
            ring: world.split_by(&|rank| (0, position(rank) * groups + group(rank)))?,
            within: world.split_by(&|rank| (group(rank), position(rank)))?,
            between: world.split_by(&|rank| (position(rank), group(rank)))?,
            traffic: Mutex::default(),
        })
    }

    /// The ranks of this rank's group, and those with its position: the hops of a
    /// [quantised reduction](crate::Reduce::quantised). Their all-to-alls count as this
    /// communicator's traffic, and no other calls do.
    pub fn levels(&self) -> [&Arc<dyn Communicator<D>>; 2] {
        [&self.within, &self.between]
    }

    /// The bytes sent by each of the communicators.
    pub fn traffic_by_level(&self) -> LevelTraffic {
        LevelTraffic {
            ring: self.ring.traffic(),
            within: self.within.traffic(),
            between: self.between.traffic(),
        }
    }

    /// The shard of this rank's position in a whole buffer with segments of `segment` elements.
    fn shard(&self, whole: AnySlice, segment: usize) -> AnySlice {
        let len = segment * self.between.world_size();
        let start = self.within.rank() * len;
        whole.slice(start..start + len)
    }

    fn reduce_scatter(
        &self,
        stream: &D::Stream,
        checked: &Checked,
        op: ReduceOp,
    ) -> Result<(), CommError> {
        let shard = self.shard(checked.send(), checked.recv().len());
        self.within
            .reduce_scatter(stream, checked.send(), shard, op)?;
        self.between
            .reduce_scatter_overwriting(stream, shard, checked.recv(), op)
    }

    fn all_gather(&self, stream: &D::Stream, checked: &Checked) -> Result<(), CommError> {
        let send = checked.send();
        let recv = checked.recv();
        let shard = self.shard(recv, send.len());
        if checked.call().control {
            self.between.control_all_gather(stream, send, shard)?;
            self.within.control_all_gather(stream, shard, recv)
        } else {
            self.between.all_gather(stream, send, shard)?;
            self.within.all_gather(stream, shard, recv)
        }
    }

    /// The shards of the positions are as equal as possible.
    fn all_reduce(
        &self,
        stream: &D::Stream,
        checked: &Checked,
        op: ReduceOp,
    ) -> Result<(), CommError> {
        let send = checked.send();
        let recv = checked.recv();
        let positions = self.within.world_size();
        let shard = recv.slice(balanced_range(recv.len(), positions, self.within.rank()));
        if recv.len().is_multiple_of(positions) {
            self.within.reduce_scatter(stream, send, shard, op)?;
            self.between.all_reduce(stream, shard, shard, op)?;
            return self.within.all_gather(stream, shard, recv);
        }
        let counts: Vec<usize> = (0..positions)
            .map(|position| balanced_range(recv.len(), positions, position).len())
            .collect();
        self.within
            .reduce_scatter_uneven(stream, send, shard, &counts, op)?;
        self.between.all_reduce(stream, shard, shard, op)?;
        self.within.all_gather_uneven(stream, shard, recv, &counts)
    }
}

// SAFETY: the group is that of `ring`. Calls are those of the inner communicators, with parts of
// the buffers.
unsafe impl<D: Device> Communicator<D> for TwoLevel<D> {
    fn group(&self) -> Group {
        self.ring.group()
    }

    fn enqueue(&self, stream: &D::Stream, checked: Checked) -> Result<(), CommError> {
        let group = self.group();
        checked.check_group(group)?;
        let call = checked.call();
        let is_even = matches!(call.segments, Counts::Even(_));
        match (call.collective, call.op) {
            (Collective::ReduceScatter, Some(op)) if is_even && checked.may_overwrite_send() => {
                self.reduce_scatter(stream, &checked, op)?;
            }
            (Collective::AllGather, _) if is_even => self.all_gather(stream, &checked)?,
            (Collective::AllReduce, Some(op)) => self.all_reduce(stream, &checked, op)?,
            _ => return self.ring.enqueue(stream, checked),
        }
        group.count(call, &mut self.traffic.lock());
        Ok(())
    }

    fn split(
        &self,
        color: Option<u64>,
        key: u64,
    ) -> Result<Option<Arc<dyn Communicator<D>>>, CommError> {
        self.ring.split(color, key)
    }

    fn split_by(
        &self,
        place: &dyn Fn(usize) -> (usize, usize),
    ) -> Result<Arc<dyn Communicator<D>>, CommError> {
        self.ring.split_by(place)
    }

    fn traffic(&self) -> Traffic {
        // No call of this communicator is an all-to-all of a level.
        let of_level = |comm: &Arc<dyn Communicator<D>>| comm.traffic().all_to_all_bytes;
        let mut sent = *self.traffic.lock() + self.ring.traffic();
        sent.all_to_all_bytes += of_level(&self.within) + of_level(&self.between);
        sent
    }

    fn abort(&self, reason: &str) {
        for comm in [&self.ring, &self.within, &self.between] {
            comm.abort(reason);
        }
    }

    fn failure(&self) -> Option<CommError> {
        let comms = [&self.ring, &self.within, &self.between];
        comms.into_iter().find_map(|comm| comm.failure())
    }
}
