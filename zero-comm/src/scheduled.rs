//! One rank of a world that does not exist, whose collectives are recorded.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use parking_lot::Mutex;
use zero_alloc::device::{Device, DeviceId};
use zero_alloc::host::HostStream;
use zero_alloc::schedule::Work;

use crate::call::{Checked, Group};
use crate::{CommError, Communicator, Traffic};

/// The ranks of a communicator, as ranks of the world, in its order.
type Members = Arc<[usize]>;

/// The communicators of one world, in the order in which they were made.
#[derive(Clone, Debug, Default)]
pub struct ScheduledGroups(Arc<Mutex<Vec<Members>>>);

impl ScheduledGroups {
    /// The ranks of the communicator with the number `class`: the [`Work::class`] of its operations.
    pub fn ranks(&self, class: u32) -> Option<Arc<[usize]>> {
        self.0.lock().get(class as usize).cloned()
    }

    /// The ranks of all communicators, by class.
    pub fn all(&self) -> Vec<Arc<[usize]>> {
        self.0.lock().clone()
    }

    fn add(&self, members: Members) -> u32 {
        let mut groups = self.0.lock();
        groups.push(members);
        (groups.len() - 1) as u32
    }
}

/// A communicator of one rank whose other ranks do not exist. Each collective is an operation that
/// takes no part in any exchange, for streams of a
/// [`Recorder`](zero_alloc::schedule::Recorder): its label is the collective's name, its
/// [`Work::bytes`] are those of the whole buffer (the longer one, if what it sends and receives in an
/// all-to-all differs), and its [`Work::class`] is the communicator's
/// number in [`ScheduledGroups`].
pub struct ScheduledComm<D> {
    group: Group,
    members: Members,
    class: u32,
    groups: ScheduledGroups,
    /// The memory of the device.
    memory: DeviceId,
    traffic: Mutex<Traffic>,
    failure: Arc<Mutex<Option<CommError>>>,
    _device: PhantomData<fn(D)>,
}

impl<D> fmt::Debug for ScheduledComm<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Group { rank, world_size } = self.group;
        write!(f, "ScheduledComm(rank {rank} of {world_size})")
    }
}

impl<D: Device<Stream = HostStream>> ScheduledComm<D> {
    /// Rank `rank` of a world of `world_size` ranks, on `device`. `groups` takes note of it and of
    /// the communicators that are split from it.
    ///
    /// # Errors
    /// There is no such rank.
    pub fn new(
        device: &D,
        rank: usize,
        world_size: usize,
        groups: &ScheduledGroups,
    ) -> Result<Self, CommError> {
        if rank >= world_size {
            return Err(CommError::BackEnd {
                back_end: "schedule",
                message: format!("rank {rank} of {world_size}: ranks count from 0"),
            });
        }
        let members = (0..world_size).collect();
        let failure = Arc::default();
        Ok(Self::of(
            device.id(),
            rank,
            members,
            groups.clone(),
            failure,
        ))
    }

    fn of(
        memory: DeviceId,
        rank: usize,
        members: Members,
        groups: ScheduledGroups,
        failure: Arc<Mutex<Option<CommError>>>,
    ) -> Self {
        Self {
            group: Group {
                rank,
                world_size: members.len(),
            },
            class: groups.add(Arc::clone(&members)),
            members,
            groups,
            memory,
            traffic: Mutex::default(),
            failure,
            _device: PhantomData,
        }
    }
}

// SAFETY: an operation uses no memory.
unsafe impl<D: Device<Stream = HostStream>> Communicator<D> for ScheduledComm<D> {
    fn group(&self) -> Group {
        self.group
    }

    fn enqueue(&self, stream: &HostStream, checked: Checked) -> Result<(), CommError> {
        checked.check(self.group, self.memory)?;
        if let Some(failure) = Communicator::<D>::failure(self) {
            return Err(failure);
        }
        let call = checked.call();
        self.group.count(call, &mut self.traffic.lock());
        // Of an all-to-all with counts per pair, the longer one.
        let elems = checked.send().len().max(checked.recv().len());
        let bytes = (elems * call.dtype.size_bytes()) as u64;
        let work = Work::bytes(bytes).class(self.class);
        Ok(stream.enqueue_sized(call.collective.name(), work, || Ok(()))?)
    }

    /// Refuses: the other ranks, which would say their colors and keys, do not exist. Use
    /// [`split_by`](Communicator::split_by).
    fn split(
        &self,
        _color: Option<u64>,
        _key: u64,
    ) -> Result<Option<Arc<dyn Communicator<D>>>, CommError> {
        Err(CommError::BackEnd {
            back_end: "schedule",
            message: "the other ranks do not exist, so nobody says their colors: use split_by"
                .to_owned(),
        })
    }

    fn split_by(
        &self,
        place: &dyn Fn(usize) -> (usize, usize),
    ) -> Result<Arc<dyn Communicator<D>>, CommError> {
        let (own, _) = place(self.group.rank);
        let mut of_color: Vec<_> = (0..self.group.world_size)
            .filter_map(|rank| {
                let (color, key) = place(rank);
                (color == own).then_some((key, rank))
            })
            .collect();
        of_color.sort_unstable();
        let before_own = |(_, rank): &&(usize, usize)| *rank != self.group.rank;
        let rank = of_color.iter().take_while(before_own).count();
        let members = of_color
            .iter()
            .map(|(_, rank)| self.members[*rank])
            .collect();
        Ok(Arc::new(Self::of(
            self.memory,
            rank,
            members,
            self.groups.clone(),
            Arc::clone(&self.failure),
        )))
    }

    fn traffic(&self) -> Traffic {
        *self.traffic.lock()
    }

    fn abort(&self, reason: &str) {
        self.failure.lock().get_or_insert(CommError::Aborted {
            rank: self.group.rank,
            reason: reason.to_owned(),
        });
    }

    fn failure(&self) -> Option<CommError> {
        self.failure.lock().clone()
    }
}

#[cfg(test)]
mod tests {
    use zero_alloc::schedule::{Recorder, ScheduledDevice};

    use super::*;
    use crate::ReduceOp;

    fn world(rank: usize, ranks: usize) -> (Recorder, ScheduledDevice, ScheduledGroups) {
        let recorder = Recorder::new();
        let device = recorder.device();
        let groups = ScheduledGroups::default();
        ScheduledComm::new(&device, rank, ranks, &groups).unwrap();
        (recorder, device, groups)
    }

    /// Ranks in the order of their keys, and among equal keys of their numbers.
    #[test]
    fn a_split_has_the_ranks_of_its_color() {
        let (_, device, groups) = world(0, 12);
        let comm = ScheduledComm::new(&device, 5, 12, &groups).unwrap();
        // The rows of 3 x 4 ranks, backwards.
        let row = comm.split_by(&|rank| (rank / 4, 3 - rank % 4)).unwrap();
        assert_eq!((row.rank(), row.world_size()), (2, 4));
        assert_eq!(*groups.ranks(2).unwrap(), [7, 6, 5, 4]);
        // Of that the ranks with even places.
        let even = row.split_by(&|rank| (rank % 2, 0)).unwrap();
        assert_eq!((even.rank(), even.world_size()), (1, 2));
        assert_eq!(*groups.ranks(3).unwrap(), [7, 5]);
        assert_eq!(groups.all().len(), 4);
        assert_eq!(groups.ranks(4), None);
    }

    #[test]
    fn calls_are_recorded_with_their_whole_buffer() {
        let (recorder, device, groups) = world(0, 4);
        let comm = ScheduledComm::new(&device, 1, 4, &groups).unwrap();
        let stream = device.create_stream("comm").unwrap();
        let slice = |elems| {
            // SAFETY: nothing accesses the memory of a scheduled device.
            unsafe {
                zero_alloc::device::AnySlice::from_raw_parts(
                    std::ptr::without_provenance_mut(elems * 4096),
                    elems,
                    zero_alloc::device::DType::F32,
                    zero_alloc::device::Memory::id(&device),
                )
            }
        };
        let op = ReduceOp::Sum;
        comm.reduce_scatter(&stream, slice(64), slice(16), op)
            .unwrap();
        comm.all_gather(&stream, slice(16), slice(64)).unwrap();
        let schedule = recorder.schedule();
        let recorded: Vec<_> = schedule
            .operations()
            .map(|operation| (operation.label, operation.work))
            .collect();
        let work = Work::bytes(256).class(1);
        assert_eq!(recorded, [("reduce_scatter", work), ("all_gather", work)]);
        assert_eq!(
            Communicator::<ScheduledDevice>::traffic(&comm).reduce_scatter_bytes,
            192
        );

        Communicator::<ScheduledDevice>::abort(&comm, "on purpose");
        let refused = comm.all_gather(&stream, slice(16), slice(64)).unwrap_err();
        assert_eq!(refused.to_string(), "rank 1 aborted: on purpose");
    }

    #[test]
    fn ranks_that_do_not_exist_are_not_asked() {
        let (_, device, groups) = world(0, 2);
        let wrong = ScheduledComm::new(&device, 2, 2, &groups).unwrap_err();
        assert!(wrong.to_string().contains("rank 2 of 2"), "{wrong}");
        let comm = ScheduledComm::new(&device, 0, 2, &groups).unwrap();
        let refused = Communicator::<ScheduledDevice>::split(&comm, Some(0), 0);
        let error = refused.err().unwrap().to_string();
        assert!(error.contains("use split_by"), "{error}");
    }
}
