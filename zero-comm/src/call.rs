//! A collective call as plain data, which ranks compare, and the checks and counts that all back
//! ends share.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
#[cfg(doc)]
use zero_alloc::device::DeviceError;
use zero_alloc::device::{AnySlice, DType, DeviceId};

use crate::comm_dtype::CommDType;
use crate::{Collective, CommError, ReduceOp, Traffic};

/// The range of part `index` if `len` elements are cut into `parts` parts whose lengths differ by
/// at most 1, longer parts first.
///
/// # Panics
/// `parts` is 0.
pub(crate) const fn balanced_range(len: usize, parts: usize, index: usize) -> Range<usize> {
    let base = len / parts;
    let longer = len % parts;
    let start = index * base + if index < longer { index } else { longer };
    start..start + base + if index < longer { 1 } else { 0 }
}

/// The division of a call's whole buffer among the ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Counts {
    /// The same number of elements for each rank.
    Even(usize),
    /// One number of elements per rank.
    Uneven(Arc<[usize]>),
    /// This many elements in all, in segments as equal as possible, the longer ones first.
    Balanced(usize),
    /// The elements that this rank sends to each rank, and those that it receives from it; the
    /// whole buffer is `send`. Each rank has its own.
    Pairs(Arc<[[usize; 2]]>),
}

impl Counts {
    /// The segment of `rank`, as a range of the whole buffer.
    pub fn range(&self, rank: usize, world_size: usize) -> Range<usize> {
        match self {
            Self::Even(n) => rank * n..(rank + 1) * n,
            Self::Uneven(counts) => {
                let start = counts[..rank].iter().sum();
                start..start + counts[rank]
            }
            Self::Balanced(len) => balanced_range(*len, world_size, rank),
            Self::Pairs(counts) => {
                let start = counts[..rank].iter().map(|[sent, _]| sent).sum();
                start..start + counts[rank][0]
            }
        }
    }

    /// The division of `recv` in an all-to-all, whose `send` is divided by `self`.
    pub fn received(&self) -> Self {
        match self {
            Self::Pairs(counts) => {
                Self::Pairs(counts.iter().map(|&[sent, got]| [got, sent]).collect())
            }
            even => even.clone(),
        }
    }

    /// The segments of all ranks, in order: N additions, where [`range`](Self::range) of each rank
    /// needs N^2 / 2.
    pub fn ranges(&self, world_size: usize) -> impl Iterator<Item = Range<usize>> + '_ {
        let mut start = 0;
        (0..world_size).map(move |rank| {
            let len = match self {
                Self::Even(n) => *n,
                Self::Uneven(counts) => counts[rank],
                Self::Balanced(len) => balanced_range(*len, world_size, rank).len(),
                Self::Pairs(counts) => counts[rank][0],
            };
            start += len;
            start - len..start
        })
    }

    /// Elements of the longest segment.
    #[cfg(all(feature = "processes", target_os = "linux"))]
    pub(crate) fn longest(&self, world_size: usize) -> usize {
        let segments = self.ranges(world_size);
        segments.map(|segment| segment.len()).max().unwrap_or(0)
    }

    /// Elements of the whole buffer.
    pub fn total(&self, world_size: usize) -> usize {
        match self {
            Self::Even(n) => n * world_size,
            Self::Uneven(counts) => counts.iter().sum(),
            Self::Balanced(len) => *len,
            Self::Pairs(counts) => counts.iter().map(|[sent, _]| sent).sum(),
        }
    }
}

/// A rank's call of a collective. All ranks must make equal calls, apart from [`Counts::Pairs`]; a
/// difference is a [`CommError::Mismatch`]. Pairs of counts that do not match are a
/// [`CommError::Unmatched`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Call {
    /// The collective.
    pub collective: Collective,
    /// The reduction, if the collective has one.
    pub op: Option<ReduceOp>,
    /// Type of the elements.
    #[serde(with = "crate::comm_dtype")]
    pub dtype: DType,
    /// The whole buffer and its segments.
    pub segments: Counts,
    /// The root of a broadcast.
    pub root: Option<usize>,
    /// Whether its bytes count as control traffic.
    pub control: bool,
}

impl Call {
    /// The dtype. A call is made by [`Group::check`] or received from another rank, so it has no
    /// other.
    pub(crate) fn comm_dtype(&self) -> CommDType {
        CommDType::try_from(self.dtype)
            .unwrap_or_else(|dtype| unreachable!("a call of {dtype} was not refused"))
    }

    /// Upper bound of the bytes of a serialized call of `world_size` ranks; an integer has at most
    /// 10.
    #[cfg(any(feature = "mpi", feature = "processes"))]
    pub(crate) const fn max_serialized_bytes(world_size: usize) -> usize {
        32 + 20 * world_size
    }

    /// The part of the call that is equal on all ranks: of [`Counts::Pairs`], their number.
    pub(crate) fn shared(&self) -> Self {
        let mut call = self.clone();
        if let Counts::Pairs(counts) = &mut call.segments {
            *counts = counts.iter().map(|_| [0; 2]).collect();
        }
        call
    }

    /// Compares the calls of two ranks, apart from pairs of counts.
    pub(crate) fn compare(
        sequence: u64,
        [call, other_call]: [&Self; 2],
        [rank, other_rank]: [usize; 2],
    ) -> Result<(), CommError> {
        if call.shared() == other_call.shared() {
            return Ok(());
        }
        Err(CommError::Mismatch {
            sequence,
            rank,
            call: Box::new(call.clone()),
            other_rank,
            other_call: Box::new(other_call.clone()),
        })
    }

    /// Compares the pairs of counts of all ranks, whose calls these are, by rank in the
    /// communicator. `name` is the number of such a rank in errors.
    #[cfg(any(feature = "mpi", feature = "processes"))]
    pub(crate) fn compare_pairs(
        sequence: u64,
        calls: &[Self],
        name: impl Fn(usize) -> usize,
    ) -> Result<(), CommError> {
        let has_pairs = |call: &Self| matches!(call.segments, Counts::Pairs(_));
        let ranks = 0..calls.len();
        let mut pairs = ranks
            .filter(|&p| has_pairs(&calls[p]))
            .flat_map(|p| (0..p).map(move |q| [p, q]));
        let unmatched = pairs.find_map(|ranks| {
            Self::unmatched(
                sequence,
                ranks.map(|rank| &calls[rank]),
                ranks,
                ranks.map(&name),
            )
        });
        unmatched.map_or(Ok(()), Err)
    }

    /// The error if one of two ranks does not send what the other receives. `ranks` are their ranks
    /// in the communicator, `named` those in errors. A count that is missing is 0.
    pub(crate) fn unmatched(
        sequence: u64,
        calls: [&Self; 2],
        ranks: [usize; 2],
        named: [usize; 2],
    ) -> Option<CommError> {
        let [own, other] = [(0, 1), (1, 0)].map(|(of, with)| match &calls[of].segments {
            Counts::Pairs(counts) => counts.get(ranks[with]).copied().unwrap_or_default(),
            _ => [0; 2],
        });
        let pairs = [
            (named, own[0], other[1]),
            ([named[1], named[0]], other[0], own[1]),
        ];
        let unmatched = pairs.into_iter().find(|(_, sent, got)| sent != got);
        unmatched.map(
            |([rank, other_rank], sent, received)| CommError::Unmatched {
                sequence,
                rank,
                sent,
                other_rank,
                received,
            },
        )
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.control {
            f.write_str("control_")?;
        }
        f.write_str(self.collective.name())?;
        if let Some(op) = self.op {
            write!(f, "({})", op.name())?;
        }
        match &self.segments {
            _ if self.collective == Collective::Barrier => {}
            Counts::Even(n) => write!(f, " of {n} x {} a rank", self.dtype)?,
            Counts::Uneven(counts) => write!(f, " of {counts:?} x {}", self.dtype)?,
            Counts::Balanced(len) => write!(f, " of {len} x {}", self.dtype)?,
            Counts::Pairs(counts) => {
                let [sent, got]: [Vec<_>; 2] =
                    [0, 1].map(|way| counts.iter().map(|pair| pair[way]).collect());
                write!(
                    f,
                    " of {sent:?} to the ranks and {got:?} from them, x {}",
                    self.dtype
                )?;
            }
        }
        self.root
            .map_or(Ok(()), |root| write!(f, " from rank {root}"))
    }
}

/// A call that passed the checks of a [`Group`], with this rank's buffers.
#[derive(Clone, Debug)]
pub struct Checked {
    group: Group,
    pub(crate) call: Call,
    pub(crate) send: AnySlice,
    pub(crate) recv: AnySlice,
    may_overwrite_send: bool,
}

impl Checked {
    /// The same call, as control traffic.
    pub(crate) fn into_control(mut self) -> Self {
        self.call.control = true;
        self
    }

    /// Whether a reduce-scatter may overwrite all of `send`: in place, or by
    /// [`reduce_scatter_overwriting`](Group::reduce_scatter_overwriting).
    pub fn may_overwrite_send(&self) -> bool {
        let Group { rank, world_size } = self.group;
        let own = self.call.segments.range(rank, world_size);
        self.may_overwrite_send
            || self.call.collective == Collective::ReduceScatter
                && self.send.slice(own).as_ptr() == self.recv.as_ptr()
    }

    /// Checks that a communicator can run the call: it was checked for this `group`, since its
    /// buffers have the lengths of that group only, and its buffers are in memory of `device`.
    /// Every back end calls this first.
    ///
    /// # Errors
    /// [`CommError::AnotherGroup`], [`DeviceError::AnotherDevice`].
    pub fn check(&self, group: Group, device: DeviceId) -> Result<(), CommError> {
        self.check_group(group)?;
        let what = self.call.collective.name();
        self.send.check_device(what, device)?;
        Ok(self.recv.check_device(what, device)?)
    }

    /// Checks that the call was checked for this `group`.
    pub(crate) fn check_group(&self, group: Group) -> Result<(), CommError> {
        if self.group == group {
            return Ok(());
        }
        let collective = self.call.collective;
        let checked = self.group;
        Err(CommError::AnotherGroup {
            collective,
            checked: [checked.rank, checked.world_size],
            own: [group.rank, group.world_size],
        })
    }

    /// The call.
    pub fn call(&self) -> &Call {
        &self.call
    }

    /// The input of this rank.
    pub fn send(&self) -> AnySlice {
        self.send
    }

    /// The output of this rank.
    pub fn recv(&self) -> AnySlice {
        self.recv
    }
}

/// A rank and the number of ranks; the checks of calls are its methods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// This rank.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
}

impl Group {
    /// Checks a reduce-scatter with equal segments.
    ///
    /// # Errors
    /// Counts, dtypes or the overlap of the buffers are wrong.
    pub fn reduce_scatter(
        self,
        send: AnySlice,
        recv: AnySlice,
        op: ReduceOp,
    ) -> Result<Checked, CommError> {
        let segments = Counts::Even(recv.len());
        self.check(Collective::ReduceScatter, Some(op), segments, send, recv)
    }

    /// Checks a reduce-scatter that may overwrite `send`.
    ///
    /// # Errors
    /// Counts, dtypes or the overlap of the buffers are wrong.
    pub fn reduce_scatter_overwriting(
        self,
        send: AnySlice,
        recv: AnySlice,
        op: ReduceOp,
    ) -> Result<Checked, CommError> {
        Ok(Checked {
            may_overwrite_send: true,
            ..self.reduce_scatter(send, recv, op)?
        })
    }

    /// Checks a reduce-scatter with segments of `counts`.
    ///
    /// # Errors
    /// Counts, dtypes or the overlap of the buffers are wrong.
    pub fn reduce_scatter_uneven(
        self,
        send: AnySlice,
        recv: AnySlice,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Checked, CommError> {
        let segments = self.uneven(Collective::ReduceScatter, counts)?;
        self.check(Collective::ReduceScatter, Some(op), segments, send, recv)
    }

    /// Checks an all-gather with equal segments.
    ///
    /// # Errors
    /// Counts, dtypes or the overlap of the buffers are wrong.
    pub fn all_gather(self, send: AnySlice, recv: AnySlice) -> Result<Checked, CommError> {
        self.check(
            Collective::AllGather,
            None,
            Counts::Even(send.len()),
            send,
            recv,
        )
    }

    /// Checks an all-gather with segments of `counts`.
    ///
    /// # Errors
    /// Counts, dtypes or the overlap of the buffers are wrong.
    pub fn all_gather_uneven(
        self,
        send: AnySlice,
        recv: AnySlice,
        counts: &[usize],
    ) -> Result<Checked, CommError> {
        let segments = self.uneven(Collective::AllGather, counts)?;
        self.check(Collective::AllGather, None, segments, send, recv)
    }

    /// Checks an all-gather of control traffic.
    ///
    /// # Errors
    /// Counts, dtypes or the overlap of the buffers are wrong.
    pub fn control_all_gather(self, send: AnySlice, recv: AnySlice) -> Result<Checked, CommError> {
        Ok(self.all_gather(send, recv)?.into_control())
    }

    /// Checks an all-reduce.
    ///
    /// # Errors
    /// Counts, dtypes or the overlap of the buffers are wrong.
    pub fn all_reduce(
        self,
        send: AnySlice,
        recv: AnySlice,
        op: ReduceOp,
    ) -> Result<Checked, CommError> {
        self.check(
            Collective::AllReduce,
            Some(op),
            Counts::Balanced(send.len()),
            send,
            recv,
        )
    }

    /// Checks a broadcast.
    ///
    /// # Errors
    /// There is no such root.
    pub fn broadcast(self, buffer: AnySlice, root: usize) -> Result<Checked, CommError> {
        if root >= self.world_size {
            return Err(CommError::NoSuchRoot {
                root,
                world_size: self.world_size,
            });
        }
        let mut checked = self.check(
            Collective::Broadcast,
            None,
            Counts::Balanced(buffer.len()),
            buffer,
            buffer,
        )?;
        checked.call.root = Some(root);
        Ok(checked)
    }

    /// Checks an all-to-all.
    ///
    /// # Errors
    /// Counts, dtypes or the overlap of the buffers are wrong.
    pub fn all_to_all(self, send: AnySlice, recv: AnySlice) -> Result<Checked, CommError> {
        let len = send.len();
        let world_size = self.world_size;
        if !len.is_multiple_of(world_size) {
            return Err(CommError::NotDivisible {
                collective: Collective::AllToAll,
                len,
                world_size,
            });
        }
        self.check(
            Collective::AllToAll,
            None,
            Counts::Even(len / world_size),
            send,
            recv,
        )
    }

    /// Checks an all-to-all with counts per pair of ranks.
    ///
    /// # Errors
    /// Counts, dtypes or the overlap of the buffers are wrong.
    pub fn all_to_all_uneven(
        self,
        send: AnySlice,
        recv: AnySlice,
        send_counts: &[usize],
        recv_counts: &[usize],
    ) -> Result<Checked, CommError> {
        let collective = Collective::AllToAll;
        self.check_counts(collective, send_counts)?;
        self.check_counts(collective, recv_counts)?;
        let expected = send_counts[self.rank];
        let got = recv_counts[self.rank];
        if expected != got {
            return Err(CommError::Count {
                what: "all_to_all, recv_counts of this rank itself",
                expected,
                got,
            });
        }
        let pairs = send_counts.iter().zip(recv_counts);
        let pairs = Counts::Pairs(pairs.map(|(&sent, &got)| [sent, got]).collect());
        self.check(collective, None, pairs, send, recv)
    }

    /// A barrier, which needs no check.
    pub fn barrier(self) -> Checked {
        // SAFETY: an empty slice is never dereferenced, so its pointer may be null.
        let none =
            unsafe { AnySlice::from_raw_parts(std::ptr::null_mut(), 0, DType::U8, DeviceId::HOST) };
        let collective = Collective::Barrier;
        let segments = Counts::Even(0);
        let call = Call {
            collective,
            op: None,
            dtype: DType::U8,
            segments,
            root: None,
            control: false,
        };
        Checked {
            group: self,
            call,
            send: none,
            recv: none,
            may_overwrite_send: false,
        }
    }

    fn uneven(self, collective: Collective, counts: &[usize]) -> Result<Counts, CommError> {
        self.check_counts(collective, counts)?;
        Ok(Counts::Uneven(counts.into()))
    }

    fn check_counts(self, collective: Collective, counts: &[usize]) -> Result<(), CommError> {
        if counts.len() != self.world_size {
            return Err(CommError::RankCounts {
                collective,
                expected: self.world_size,
                got: counts.len(),
            });
        }
        // No buffer is longer than this; the bound keeps sums of counts from overflowing.
        let total = counts.iter().try_fold(0usize, |sum, &n| sum.checked_add(n));
        if total.is_none_or(|total| total > isize::MAX as usize) {
            return Err(CommError::CountsTooLarge { collective });
        }
        Ok(())
    }

    fn check(
        self,
        collective: Collective,
        op: Option<ReduceOp>,
        segments: Counts,
        send: AnySlice,
        recv: AnySlice,
    ) -> Result<Checked, CommError> {
        use Collective::{AllGather, AllReduce, AllToAll, Barrier, Broadcast, ReduceScatter};
        if send.dtype() != recv.dtype() {
            return Err(CommError::DTypes {
                collective,
                send: send.dtype(),
                recv: recv.dtype(),
            });
        }

        CommDType::try_from(send.dtype())
            .map_err(|dtype| CommError::DType { collective, dtype })?;
        let whole = segments.total(self.world_size);
        let own = segments.range(self.rank, self.world_size);
        let (in_send, in_recv, send_name, recv_name) = match collective {
            ReduceScatter => (
                whole,
                own.len(),
                "reduce_scatter, send",
                "reduce_scatter, recv",
            ),
            AllGather => (own.len(), whole, "all_gather, send", "all_gather, recv"),
            AllReduce => (whole, whole, "all_reduce, send", "all_reduce, recv"),
            AllToAll => (
                whole,
                segments.received().total(self.world_size),
                "all_to_all, send",
                "all_to_all, recv",
            ),
            Broadcast => (whole, whole, "broadcast", "broadcast"),
            Barrier => (0, 0, "barrier", "barrier"),
        };

        for (what, expected, got) in [
            (send_name, in_send, send.len()),
            (recv_name, in_recv, recv.len()),
        ] {
            if expected != got {
                return Err(CommError::Count {
                    what,
                    expected,
                    got,
                });
            }
        }

        if let (Some(op), DType::U8) = (op, send.dtype())
            && op == ReduceOp::Avg
        {
            return Err(CommError::Unsupported {
                collective,
                op,
                dtype: DType::U8,
            });
        }

        let in_place = match collective {
            ReduceScatter => send.slice(own).as_ptr() == recv.as_ptr(),
            AllGather => recv.slice(own).as_ptr() == send.as_ptr(),
            AllReduce | Broadcast => send.as_ptr() == recv.as_ptr(),
            AllToAll | Barrier => false,
        };

        if !in_place && overlap(send, recv) {
            return Err(CommError::Overlap { collective });
        }
        let call = Call {
            collective,
            op,
            dtype: send.dtype(),
            segments,
            root: None,
            control: false,
        };

        Ok(Checked {
            group: self,
            call,
            send,
            recv,
            may_overwrite_send: false,
        })
    }

    /// Adds the bytes that this rank must send in `call` to `traffic`.
    pub fn count(self, call: &Call, traffic: &mut Traffic) {
        let Self { rank, world_size } = self;
        let bytes = |elems: usize| (elems * call.dtype.size_bytes()) as u64;
        let whole = call.segments.total(world_size);
        let own = call.segments.range(rank, world_size).len();
        // A reduce-scatter sends every other segment to its rank; an all-gather sends this rank's
        // segment to every other.
        let scattered = bytes(whole - own);
        let gathered = bytes(own * (world_size - 1));
        match call.collective {
            Collective::AllGather if call.control => traffic.control_bytes += gathered,
            Collective::ReduceScatter => traffic.reduce_scatter_bytes += scattered,
            Collective::AllGather => traffic.all_gather_bytes += gathered,
            Collective::AllReduce => traffic.all_reduce_bytes += scattered + gathered,
            Collective::Broadcast => traffic.broadcast_bytes += gathered,
            Collective::AllToAll => traffic.all_to_all_bytes += scattered,
            Collective::Barrier => {}
        }
    }
}

fn overlap(a: AnySlice, b: AnySlice) -> bool {
    let a0 = a.as_ptr() as usize;
    let b0 = b.as_ptr() as usize;
    !a.is_empty() && !b.is_empty() && a0 < b0 + b.len_bytes() && b0 < a0 + a.len_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_those_of_each_rank() {
        for n in [1, 2, 7] {
            for segments in [
                Counts::Even(3),
                Counts::Balanced(17),
                Counts::Uneven((0..n).map(|q| q % 3).collect()),
                Counts::Pairs((0..n).map(|q| [q % 3, q]).collect()),
                Counts::Pairs((0..n).map(|q| [q % 3, q]).collect()).received(),
            ] {
                let each: Vec<_> = (0..n).map(|rank| segments.range(rank, n)).collect();
                assert_eq!(segments.ranges(n).collect::<Vec<_>>(), each);
                assert_eq!(each.last().map(|last| last.end), Some(segments.total(n)));
            }
        }
    }
}
