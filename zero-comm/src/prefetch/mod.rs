//! Unit prefetch: sharded units are gathered on the communication stream ahead of their use.
//!
//! The caller owns the **shards** and keeps them valid for the prefetcher's lifetime. A **gathered
//! unit** is a block of `shard.len() * world_size` elements, allocated as `Purpose::Buckets`. A
//! step is a [`PrefetchStep`]:
//!
//! ```text
//! sharded --step, unshard--> in flight --unshard--> held --reshard--> sharded
//!         (ahead of its use) the gather runs        in use            the block is freed in stream order
//! ```
//!
//! - *in flight*: its block counts as live; the communication stream writes it.
//! - *held* ([`Unsharded`]): the compute stream waits for the gather; the caller's operations use
//!   the block.
//! - *kept*: resharded, but its block stays live, because the next use is of the same unit (the
//!   last unit of a model, forward then backward), or because it is small
//!   ([`PrefetchOptions::persistence_threshold_elems`]). Parameters do not change within a step, so
//!   it is not gathered again before the step ends.
//!
//! The order of use is set by [`Prefetcher::expect_order`] or recorded on the first step, and
//! checked on each later one. A use out of order ends prefetching for that step: later units are
//! gathered on demand, the [`PrefetchReport`] contains the position, and the next step expects this
//! step's order.
//!
//! **Limits.** The elements in flight together exceed [`PrefetchOptions::ahead_elems`] only if a
//! single unit does. The elements in flight, held and kept together never exceed
//! [`PrefetchOptions::max_live_elems`]. One exception: a unit that is larger than the limit is
//! gathered on demand when nothing else is live. The host never waits; the memory of a resharded
//! unit is reused in stream order.
//!
//! **Exposed communication** with one use ahead: `tests/suite/overlap.rs` derives a bound and tests
//! it.

mod live;
mod policy;
mod report;
mod step;
mod unsharded;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use zero_alloc::device::{AnySlice, DType, Device, DeviceError, DeviceKind, Stream};
use zero_alloc::{AllocError, Pool, Purpose};

pub use policy::{PlannedStep, plan_step};
pub use report::{OrderCheck, PrefetchReport};
pub use step::PrefetchStep;
use unsharded::UnitMemory;
pub use unsharded::{CallerMemory, OwnShard, Unsharded};

use crate::{CommError, Gather};
use live::{Lease, Live};
use policy::Policy;

/// The reason why a unit could not be gathered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
#[non_exhaustive]
pub enum PrefetchError {
    /// There is no such unit.
    #[error("no unit {unit}: there are {units} units")]
    NoSuchUnit { unit: usize, units: usize },
    /// The caller holds the unit already.
    #[error("unit {unit} is already unsharded; reshard it first")]
    Held { unit: usize },
    /// The unit exceeds the limit together with the units that the caller holds.
    #[error(
        "unit {unit} of {unit_elems} elements exceeds max_live_elems {limit_elems}: held units have {live_elems}"
    )]
    LiveLimit {
        unit: usize,
        unit_elems: usize,
        live_elems: usize,
        limit_elems: usize,
    },
    /// The allocation of the unit failed.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// The caller has no memory for the unit.
    #[error("there is no memory for unit {unit}: {message}")]
    Memory { unit: usize, message: String },
    /// The gather was not enqueued.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A stream returned an error.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Prefetch limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrefetchOptions {
    /// How many uses ahead units are gathered. With 0, a gather is enqueued at its use and waits
    /// for all earlier compute, so nothing overlaps. Default: 1.
    pub ahead: usize,
    /// Limit of the elements in flight together. One unit is gathered ahead even if it is larger.
    /// Default: no limit.
    pub ahead_elems: usize,
    /// Limit of live elements. Default: no limit.
    pub max_live_elems: usize,
    /// A unit of at most this many elements is gathered once per step and kept until its end.
    /// Default: 0.
    pub persistence_threshold_elems: usize,
}

zero_alloc::setters!(PrefetchOptions {
    ahead: usize,
    ahead_elems: usize,
    max_live_elems: usize,
    persistence_threshold_elems: usize,
});

impl Default for PrefetchOptions {
    fn default() -> Self {
        Self {
            ahead: 1,
            ahead_elems: usize::MAX,
            max_live_elems: usize::MAX,
            persistence_threshold_elems: 0,
        }
    }
}

/// Gathers the units of one rank ahead of their use, within a [step](Self::step). Gathers before a
/// step, which could read parameters that the optimizer still writes, do not compile:
///
/// ```compile_fail,E0599
/// # use zero_alloc::host::HostDevice;
/// # use zero_comm::{PrefetchError, Prefetcher};
/// fn forward(prefetcher: &mut Prefetcher<HostDevice>) -> Result<(), PrefetchError> {
///     let unit = prefetcher.unshard(0)?;
///     prefetcher.reshard(unit);
///     Ok(())
/// }
/// ```
///
/// Within a step they do:
///
/// ```
/// # use zero_alloc::host::HostDevice;
/// # use zero_comm::{PrefetchError, Prefetcher};
/// fn forward(prefetcher: &mut Prefetcher<HostDevice>) -> Result<(), PrefetchError> {
///     let mut step = prefetcher.step()?;
///     let unit = step.unshard(0)?;
///     step.reshard(unit);
///     Ok(())
/// }
/// ```
pub struct Prefetcher<D: Device> {
    pool: Pool<D>,
    gather: Gather<D>,
    compute: D::Stream,
    comm_stream: D::Stream,
    shards: Box<dyn ShardSource<D>>,
    shard_elems: Vec<usize>,
    options: PrefetchOptions,
    policy: Policy,
    live: Arc<Mutex<Live>>,
    /// The units in flight or kept, by index.
    ready: HashMap<usize, Unsharded<D>>,
    /// The uses of this step so far.
    used: Vec<usize>,
    /// A step is being started: its first gathers are not all enqueued.
    starting: bool,
    report: PrefetchReport,
    /// Memory of the caller for gathered units, and the limit of a wait for its users.
    memory: Option<(Box<dyn CallerMemory>, Duration)>,
}

/// The shards of one rank that are elsewhere than in memory of the device, such as host memory or
/// NVMe.
pub trait ShardSource<D: Device>: Send {
    /// The dtype of the shard of `unit`.
    fn dtype(&self, unit: usize) -> DType;

    /// Elements of each unit's shard; they do not change.
    fn shard_elems(&self) -> Vec<usize>;

    /// Enqueues filling `own` with the shard of `unit`, in the order of `comm_stream`, and returns
    /// `None`; or returns other memory of the device that has the shard for the work enqueued on
    /// `comm_stream` next. The host should not wait.
    ///
    /// # Errors
    /// A stream or a collective returned an error.
    fn fetch(
        &mut self,
        comm_stream: &D::Stream,
        unit: usize,
        own: OwnShard<'_>,
    ) -> Result<Option<AnySlice>, PrefetchError>;

    /// Enqueues the gather of a unit to `whole` on `comm_stream`, and returns true; or returns
    /// false, and the unit is gathered from what [`Self::fetch`] returns. For units that are stored
    /// in another format: all ranks return the same. The slice is not kept.
    ///
    /// # Errors
    /// As [`Self::fetch`].
    ///
    /// # Safety
    /// Operations use `whole` in the order of `comm_stream`.
    unsafe fn gather(
        &mut self,
        _comm_stream: &D::Stream,
        _unit: usize,
        _whole: AnySlice,
    ) -> Result<bool, PrefetchError> {
        Ok(false)
    }
}

/// Shards in memory of the device.
struct Slices(Vec<AnySlice>);

impl<D: Device> ShardSource<D> for Slices {
    fn dtype(&self, unit: usize) -> DType {
        self.0[unit].dtype()
    }

    fn shard_elems(&self) -> Vec<usize> {
        self.0.iter().map(|slice| slice.len()).collect()
    }

    fn fetch(
        &mut self,
        _comm_stream: &D::Stream,
        unit: usize,
        _own: OwnShard<'_>,
    ) -> Result<Option<AnySlice>, PrefetchError> {
        Ok(Some(self.0[unit]))
    }
}

impl<D: Device> fmt::Debug for Prefetcher<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Prefetcher({} units, {:?})",
            self.shard_elems.len(),
            self.options
        )
    }
}

impl<D: Device> Prefetcher<D> {
    /// Creates a prefetcher. `shards[u]` is this rank's shard of unit `u`; its length is the same
    /// on all ranks.
    pub fn new(
        pool: Pool<D>,
        gather: impl Into<Gather<D>>,
        compute: D::Stream,
        comm_stream: D::Stream,
        shards: Vec<AnySlice>,
        options: PrefetchOptions,
    ) -> Self {
        Self::with_source(pool, gather, compute, comm_stream, Slices(shards), options)
    }

    /// As [`Self::new`], with shards from `source`.
    pub fn with_source(
        pool: Pool<D>,
        gather: impl Into<Gather<D>>,
        compute: D::Stream,
        comm_stream: D::Stream,
        source: impl ShardSource<D> + 'static,
        options: PrefetchOptions,
    ) -> Self {
        let gather = gather.into();
        let shard_elems = source.shard_elems();
        let ranks = gather.comm().world_size();
        let elems = shard_elems.iter().map(|&elems| (elems * ranks) as u64);
        Self {
            policy: Policy::new(elems.collect(), options),
            pool,
            gather,
            compute,
            comm_stream,
            shards: Box::new(source),
            shard_elems,
            options,
            live: Arc::default(),
            ready: HashMap::new(),
            used: Vec::new(),
            starting: false,
            report: PrefetchReport::default(),
            memory: None,
        }
    }

    /// Gathers units into memory of the caller. `limit` bounds the wait for the streams when a unit
    /// is dropped; what they may still use then is never freed.
    pub fn set_memory(&mut self, memory: Box<dyn CallerMemory>, limit: Duration) {
        self.memory = Some((memory, limit));
    }

    /// Sets the expected order: the units of one step in order of use (forward, then backward, for
    /// each micro-batch). Without it the first step records the order.
    ///
    /// # Errors
    /// [`PrefetchError::NoSuchUnit`].
    pub fn expect_order(&mut self, order: Vec<usize>) -> Result<(), PrefetchError> {
        order
            .iter()
            .try_for_each(|&unit| self.elems(unit).map(drop))?;
        self.policy.set_order(order);
        Ok(())
    }

    /// Elements of a gathered unit.
    ///
    /// # Errors
    /// [`PrefetchError::NoSuchUnit`].
    pub fn elems(&self, unit: usize) -> Result<usize, PrefetchError> {
        let units = self.shard_elems.len();
        if unit >= units {
            return Err(PrefetchError::NoSuchUnit { unit, units });
        }
        Ok(self.shard_elems[unit] * self.gather.comm().world_size())
    }

    /// Elements in flight, held and kept.
    pub fn live_elems(&self) -> usize {
        self.live.lock().elems
    }

    /// Starts a step, during which parameters do not change. Its gathers wait for everything
    /// enqueued on the compute stream so far, such as the update of the parameters.
    ///
    /// # Errors
    /// A stream, the pool or the collective returned an error.
    pub fn step(&mut self) -> Result<PrefetchStep<'_, D>, PrefetchError> {
        self.begin_step()?;
        Ok(PrefetchStep(self))
    }

    /// Goes on with a step that was [paused](PrefetchStep::pause). Without one, no unit of an
    /// earlier step is used again, since its end has freed them.
    pub fn continue_step(&mut self) -> PrefetchStep<'_, D> {
        PrefetchStep(self)
    }

    fn begin_step(&mut self) -> Result<(), PrefetchError> {
        // A start that failed may have gathered units, which other ranks count: the next start goes
        // on with them.
        if !std::mem::replace(&mut self.starting, true) {
            self.ready.clear();
            self.used.clear();
            self.report = PrefetchReport::default();
            self.report.order = match self.policy.begin_step() {
                true => OrderCheck::Followed,
                false => OrderCheck::Recorded,
            };
            let mut live = self.live.lock();
            live.step += 1;
            live.peak_elems = live.elems;
        }
        self.comm_stream.wait(&self.compute.record()?)?;
        self.gather_ahead()?;
        self.starting = false;
        Ok(())
    }

    fn unshard(&mut self, unit: usize) -> Result<Unsharded<D>, PrefetchError> {
        let elems = self.elems(unit)?;
        if self.live.lock().held.contains(&unit) {
            return Err(PrefetchError::Held { unit });
        }
        let expected = self.policy.expected();
        if expected != Some(unit) {
            self.order_changed(expected, Some(unit));
        }

        self.policy.begin_use(unit);
        let unsharded = match self.ready.remove(&unit) {
            Some(unsharded) => {
                match unsharded.is_in_flight() {
                    true => self.report.prefetched += 1,
                    false => self.report.kept += 1,
                }
                Ok(unsharded)
            }
            None => {
                self.report.on_demand += 1;
                self.gather_on_demand(unit, elems)
            }
        };
        let mut unsharded = unsharded.inspect_err(|_| self.policy.undo_use(unit, false))?;

        if unsharded.is_in_flight()
            && let Err(error) = unsharded.wait_on(&self.compute)
        {
            self.policy.undo_use(unit, false);
            return Err(error.into());
        }
        unsharded.lease.set_held(true);
        if let Err(error) = self.gather_ahead() {
            unsharded.lease.set_held(false);
            self.policy.undo_use(unit, true);
            self.ready.insert(unit, unsharded);
            return Err(error);
        }
        self.used.push(unit);
        Ok(unsharded)
    }

    fn gather_on_demand(
        &mut self,
        unit: usize,
        unit_elems: usize,
    ) -> Result<Unsharded<D>, PrefetchError> {
        let Self {
            policy,
            ready,
            live,
            compute,
            report,
            ..
        } = self;

        let fits = policy.make_room(unit, |freed| {
            free(freed, ready, compute, report);
            live.lock().elems as u64
        });
        if !fits {
            return Err(PrefetchError::LiveLimit {
                unit,
                unit_elems,
                live_elems: self.live_elems(),
                limit_elems: self.options.max_live_elems,
            });
        }
        if self.options.ahead == 0 {
            self.comm_stream.wait(&self.compute.record()?)?;
        }
        self.gather_unit(unit)
    }

    fn reshard(&mut self, unsharded: Unsharded<D>) {
        if !unsharded.lease.is_of(&self.live) {
            return;
        }
        unsharded.lease.set_held(false);
        let unit = unsharded.lease.unit;
        if self.policy.reshard(unit) {
            self.ready.insert(unit, unsharded);
        }
    }

    /// `whole`: all uses were made, so that a missing one is a change of order.
    fn end_step(&mut self, whole: bool) -> PrefetchReport {
        if let (true, Some(expected)) = (whole, self.policy.expected()) {
            self.order_changed(Some(expected), None);
        }
        self.stop_following();
        self.ready.clear();
        if self.report.order != OrderCheck::Followed {
            self.policy.set_order(std::mem::take(&mut self.used));
        }
        self.report.peak_live_elems = self.live.lock().peak_elems;
        self.report
    }

    fn order_changed(&mut self, expected: Option<usize>, got: Option<usize>) {
        if self.report.order == OrderCheck::Followed {
            self.report.order = OrderCheck::Changed {
                position: self.used.len(),
                expected,
                got,
            };
            self.stop_following();
        }
    }

    fn stop_following(&mut self) {
        let in_flight = self.policy.stop_following();
        free(&in_flight, &mut self.ready, &self.compute, &mut self.report);
    }

    /// Enqueues the gathers of the next uses.
    fn gather_ahead(&mut self) -> Result<(), PrefetchError> {
        loop {
            let live = self.live.lock();
            let is_held = |unit| live.held.contains(&unit);
            let next = self.policy.next_ahead(live.elems as u64, is_held);
            drop(live);
            let Some(unit) = next else { return Ok(()) };
            let gathered = self.gather_unit(unit)?;
            self.ready.insert(unit, gathered);
            self.policy.gathered(unit);
        }
    }

    fn gather_unit(&mut self, unit: usize) -> Result<Unsharded<D>, PrefetchError> {
        let elems = self.elems(unit)?;
        let shard = (self.shard_elems[unit], self.shards.dtype(unit));
        let lease = Lease::new(&self.live, unit, elems);
        let comm_stream = &self.comm_stream;
        let (len, dtype) = shard;
        let memory = match &mut self.memory {
            None => {
                let block = self
                    .pool
                    .allocate(elems, dtype, Purpose::Buckets, comm_stream)?;
                // SAFETY: every stream that uses the slice is recorded before the block is dropped:
                // the communication stream by `gather`, the user's stream by `Unsharded`'s drop.
                let slice = unsafe { block.slice() };
                (UnitMemory::Pool(block), slice)
            }
            Some((memory, limit)) => {
                let (slice, owner) = memory.allocate(unit, elems, dtype)?;
                if self.pool.device().kind() != DeviceKind::Host {
                    // Its last user is on the compute stream.
                    comm_stream.wait(&self.compute.record()?)?;
                }
                (UnitMemory::Caller(Some(owner), *limit), slice)
            }
        };
        let device = self.pool.device();
        Unsharded::gather(
            (device, &self.gather, comm_stream),
            memory,
            (unit, len),
            &mut *self.shards,
            lease,
        )
    }
}

/// Frees units in flight or kept.
fn free<D: Device>(
    units: &[usize],
    ready: &mut HashMap<usize, Unsharded<D>>,
    compute: &D::Stream,
    report: &mut PrefetchReport,
) {
    let freed = units.iter().filter_map(|unit| ready.remove(unit));
    for mut unsharded in freed.filter(Unsharded::is_in_flight) {
        // The gather reads this rank's shard, which compute may write next.
        unsharded.hold_writers(compute);
        report.wasted += 1;
    }
}
