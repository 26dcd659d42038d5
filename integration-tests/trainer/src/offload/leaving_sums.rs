//! Sums over ranks that leave the device, for an optimizer on the host.
//!
//! A reduced unit leaves through one of two transfer buffers. Each kind of sum has its route:
//!
//! | sums | route |
//! |---|---|
//! | in pinned memory, one micro-batch | the device copies to the sum |
//! | in pinned memory or a file, of a GPU | the device copies to a pinned buffer, the host adds it to the sum |
//! | in a file, if the device is the host | the host adds the transfer buffer to the sum |

use std::ops::Range;

use zero_alloc::device::{AnySlice, Device, Reduced, Stream};
use zero_alloc::host::{HostDevice, HostEvent, HostStream};
use zero_alloc::swap::SwapAccess;
use zero_alloc::{Block, Purpose};
use zero_kernels::Kernels;

use crate::error::TrainError;
use crate::offload::host_optimizer::HostOptimizer;
use crate::offload::unit_file::{UnitFile, file_name};
use crate::rank::Rank;

/// The sums of one rank.
pub(crate) struct LeavingSums<D: Device> {
    /// Reduced units on the device.
    leaving: [Leaving<D>; 2],
    next: usize,
    /// Elements of each reduced unit.
    reduced: Vec<usize>,
    route: Route,
    copies: D::Stream,
    update: HostStream,
}

/// A transfer buffer, and the events after which it may be overwritten.
struct Leaving<D: Device> {
    block: Block<D>,
    copied: Option<D::Event>,
    added: Option<HostEvent>,
}

enum Route {
    /// The copy is the sum.
    Copied(PinnedSums),
    /// The host adds a copy.
    Added {
        arrived: [Arrived; 2],
        sums: SumStore,
    },
    /// The host adds the transfer buffer.
    AddedInPlace(Box<UnitFile>),
}

/// A copy in host memory, and the event after which it may be overwritten.
struct Arrived {
    block: Block<HostDevice>,
    added: Option<HostEvent>,
}

enum SumStore {
    Pinned(PinnedSums),
    File(Box<UnitFile>),
}

/// Sums of all units in pinned memory.
struct PinnedSums {
    block: Block<HostDevice>,
    units: Vec<Range<usize>>,
}

impl PinnedSums {
    fn unit(&self, unit: usize) -> AnySlice {
        // SAFETY: copies of the device and operations of the host use it, ordered by events; the
        // optimizer, which is dropped first, waits for both.
        let all = unsafe { self.block.slice() };
        all.slice(self.units[unit].clone())
    }
}

/// A sum that arrives at the host: micro-batch `micro` of a unit, complete on the host's stream.
struct Arrival<'a> {
    unit: usize,
    micro: usize,
    last: bool,
    from: AnySlice,
    kernels: &'a dyn Kernels<HostDevice>,
    update: &'a HostStream,
}

impl Arrival<'_> {
    /// Adds it to `sum`, which the first micro-batch replaces.
    fn add_to(&self, sum: AnySlice) -> Result<(), TrainError> {
        match self.micro {
            0 => self.kernels.cast(self.update, self.from, sum, 1.0)?,
            _ => self
                .kernels
                .accumulate(self.update, self.from, sum.typed()?)?,
        }
        Ok(())
    }

    /// Adds it to the sum in `file`.
    fn add_to_file<D: Device>(
        &self,
        file: &mut UnitFile,
        optimizer: &mut HostOptimizer<D>,
    ) -> Result<(), TrainError> {
        let access = match self.micro {
            0 => SwapAccess::Overwrite,
            _ => SwapAccess::Update,
        };
        let sum = file.acquire(self.unit, access)?;
        self.add_to(sum.values)?;
        if self.last {
            optimizer.enqueue_stats(self.unit, sum.values)?;
        }
        Ok(sum.write_back()?)
    }
}

impl<D: Device> LeavingSums<D> {
    pub(crate) fn new(
        rank: &Rank<D>,
        optimizer: &mut HostOptimizer<D>,
    ) -> Result<Self, TrainError> {
        let settings = &rank.settings;
        let update = optimizer.stream().clone();
        let lens = lens_of(rank, Rank::held);
        let reduced = lens_of(rank, Rank::reduced);
        let largest = reduced.iter().copied().max().unwrap_or(0);
        let on_file = match settings.offload.grads_on_file() {
            Some(dir) => {
                let name = file_name(&update, "gradients");
                let dtype = settings.grad_dtype();
                let parts = UnitFile::parts(rank, &name, dir, dtype, &lens)?;
                let file = UnitFile::new(rank, &update, &name, &parts, dtype)?;
                optimizer.count(file.file().clone());
                Some(Box::new(file))
            }
            None => None,
        };

        let pinned = |elems, dtype| {
            let pool = &rank.host.pinned;
            pool.allocate(elems, dtype, Purpose::Grads, &update)
        };

        let arrived = || {
            let block = pinned(largest, settings.dtype)?;
            Ok::<_, TrainError>(Arrived { block, added: None })
        };

        let in_memory = || pinned_sums(&lens, |elems| pinned(elems, settings.grad_dtype()));
        let route = match on_file {
            Some(file) if rank.is_host() => Route::AddedInPlace(file),
            Some(file) => Route::Added {
                arrived: [arrived()?, arrived()?],
                sums: SumStore::File(file),
            },
            None if settings.grad_accum_steps > 1 => Route::Added {
                arrived: [arrived()?, arrived()?],
                sums: SumStore::Pinned(in_memory()?),
            },
            None => Route::Copied(in_memory()?),
        };

        Ok(Self {
            leaving: [leaving(rank, largest)?, leaving(rank, largest)?],
            next: 0,
            reduced,
            route,
            copies: optimizer.copies().clone(),
            update,
        })
    }

    /// The file of the sums, if they are in one.
    pub(crate) fn on_file(&mut self) -> Option<&mut UnitFile> {
        match &mut self.route {
            Route::AddedInPlace(file)
            | Route::Added {
                sums: SumStore::File(file),
                ..
            } => Some(file),
            Route::Copied(_) | Route::Added { .. } => None,
        }
    }

    /// The next transfer buffer. `stream`, which writes it, waits until its last unit has left.
    pub(crate) fn next_buffer(
        &mut self,
        rank: &Rank<D>,
        unit: usize,
        stream: &D::Stream,
    ) -> Result<AnySlice, TrainError> {
        self.next = (self.next + 1) % self.leaving.len();
        let leaving = &mut self.leaving[self.next];
        if let Some(copied) = leaving.copied.take() {
            stream.wait(&copied)?;
        }
        if let Some(added) = leaving.added.take() {
            let limit = rank.settings.host_limit();
            rank.pool.device().wait_for_host(stream, &added, limit)?;
        }
        // SAFETY: the compute stream or the communication stream, the copies' and, if the device is
        // the host, the update's use it, ordered by events; the optimizer, which is dropped first,
        // waits for them.
        let buffer = unsafe { leaving.block.slice() };
        Ok(buffer.slice(0..self.reduced[unit]))
    }

    /// Lets a reduced unit leave the last transfer buffer. The host adds it to those of earlier
    /// micro-batches; the optimizer takes the last sum.
    pub(crate) fn take(
        &mut self,
        rank: &Rank<D>,
        unit: usize,
        micro: usize,
        reduced: &Reduced<D>,
        optimizer: &mut HostOptimizer<D>,
    ) -> Result<(), TrainError> {
        let device = rank.pool.device();
        let limit = rank.settings.host_limit();
        let copies = &self.copies;
        let update = &self.update;
        let leaving = &mut self.leaving[self.next];
        // SAFETY: copied on the stream, before `copied`, which the next write of the buffer waits
        // for; where the host uses it, for `added`, too.
        let left = unsafe { reduced.slice_on(copies) }?;

        let arrival = |from| Arrival {
            unit,
            micro,
            last: micro + 1 == rank.settings.grad_accum_steps,
            from,
            kernels: &*rank.host.kernels,
            update,
        };

        let mut leave = |to: Option<AnySlice>| {
            if let Some(to) = to {
                device.copy(copies, left, to)?;
            }
            let copied = copies.record()?;
            device.host_waits(update, &copied, limit)?;
            leaving.copied = Some(copied);
            Ok::<_, TrainError>(())
        };

        match &mut self.route {
            Route::Copied(sums) => {
                let sum = sums.unit(unit);
                optimizer.wait_for_release(rank, copies, unit)?;
                leave(Some(sum))?;
                optimizer.take_host_sum(unit, sum)
            }
            Route::Added { arrived, sums } => {
                let arrived = &mut arrived[self.next];
                if let Some(added) = arrived.added.take() {
                    device.wait_for_host(copies, &added, limit)?;
                }
                // SAFETY: as for the sums.
                let copy = unsafe { arrived.block.slice() }.slice(0..left.len());
                leave(Some(copy))?;
                let arrival = arrival(copy);
                match sums {
                    SumStore::Pinned(sums) => {
                        let sum = sums.unit(unit);
                        arrival.add_to(sum)?;
                        if arrival.last {
                            optimizer.take_host_sum(unit, sum)?;
                        }
                    }
                    SumStore::File(file) => arrival.add_to_file(file, optimizer)?,
                }
                arrived.added = Some(update.record()?);
                Ok(())
            }
            Route::AddedInPlace(file) => {
                leave(None)?;
                arrival(left).add_to_file(file, optimizer)?;
                leaving.added = Some(update.record()?);
                Ok(())
            }
        }
    }
}

/// Elements of a range of each unit; none of a frozen unit.
fn lens_of<D: Device>(rank: &Rank<D>, of: impl Fn(&Rank<D>, usize) -> Range<u64>) -> Vec<usize> {
    let len = |unit| {
        let range = of(rank, unit);
        if rank.trains(unit) {
            (range.end - range.start) as usize
        } else {
            0
        }
    };
    (0..rank.units()).map(len).collect()
}

fn leaving<D: Device>(rank: &Rank<D>, elems: usize) -> Result<Leaving<D>, TrainError> {
    let dtype = rank.settings.dtype;
    let pool = &rank.pool;
    let block = pool.allocate(elems, dtype, Purpose::Buckets, &rank.compute)?;
    rank.comm_stream.wait(&rank.compute.record()?)?;
    Ok(Leaving {
        block,
        copied: None,
        added: None,
    })
}

fn pinned_sums<E>(
    lens: &[usize],
    allocate: impl FnOnce(usize) -> Result<Block<HostDevice>, E>,
) -> Result<PinnedSums, E> {
    let mut units = Vec::with_capacity(lens.len());
    let mut end = 0;
    for len in lens {
        units.push(end..end + len);
        end += len;
    }
    let block = allocate(end)?;
    Ok(PinnedSums { block, units })
}

impl<D: Device> Drop for LeavingSums<D> {
    fn drop(&mut self) {
        // Recording fails only on a closed stream, which no longer uses the block.
        for leaving in &mut self.leaving {
            let _closed = leaving.block.record_use(&self.copies);
        }
        let (arrived, sums) = match &mut self.route {
            Route::Copied(sums) => (None, Some(sums)),
            Route::Added { arrived, sums } => (
                Some(arrived),
                match sums {
                    SumStore::Pinned(sums) => Some(sums),
                    SumStore::File(_) => None,
                },
            ),
            Route::AddedInPlace(_) => (None, None),
        };

        for arrived in arrived.into_iter().flatten() {
            let _closed = arrived.block.record_use(&self.update);
        }
        if let Some(sums) = sums {
            let _closed = sums.block.record_use(&self.update);
        }
    }
}
