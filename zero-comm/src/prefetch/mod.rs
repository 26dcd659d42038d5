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
mod plan;
mod report;
mod step;
mod unsharded;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use zero_alloc::device::{AnySlice, DType, Device, DeviceError, Stream};
use zero_alloc::{AllocError, Pool};

pub use plan::{PlannedStep, plan_step};
pub use report::{OrderCheck, PrefetchReport};
pub use step::PrefetchStep;
pub use unsharded::{OwnShard, Unsharded};

use crate::{CommError, Communicator};
use live::{Lease, Live};

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
    comm: Arc<dyn Communicator<D>>,
    compute: D::Stream,
    comm_stream: D::Stream,
    shards: Shards<D>,
    options: PrefetchOptions,
    live: Arc<Mutex<Live>>,
    /// The units in flight or kept, by index.
    ready: HashMap<usize, Unsharded<D>>,
    /// The expected order of use of a step.
    order: Option<Vec<usize>>,
    /// The uses of this step so far.
    used: Vec<usize>,
    /// A step is being started: its first gathers are not all enqueued.
    starting: bool,
    report: PrefetchReport,
}

/// The shards of one rank that are elsewhere than in memory of the device, such as host memory or
/// NVMe.
pub trait ShardSource<D: Device>: Send {
    /// The dtype of the shards.
    fn dtype(&self) -> DType;

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
}

enum Shards<D: Device> {
    Slices(Vec<AnySlice>),
    Source {
        elems: Vec<usize>,
        source: Box<dyn ShardSource<D>>,
    },
}

impl<D: Device> Shards<D> {
    fn units(&self) -> usize {
        match self {
            Self::Slices(slices) => slices.len(),
            Self::Source { elems, .. } => elems.len(),
        }
    }

    fn elems(&self, unit: usize) -> Option<usize> {
        match self {
            Self::Slices(slices) => slices.get(unit).map(|slice| slice.len()),
            Self::Source { elems, .. } => elems.get(unit).copied(),
        }
    }
}

impl<D: Device> fmt::Debug for Prefetcher<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Prefetcher({} units, {:?})",
            self.shards.units(),
            self.options
        )
    }
}

impl<D: Device> Prefetcher<D> {
    /// Creates a prefetcher. `shards[u]` is this rank's shard of unit `u`; its length is the same
    /// on all ranks.
    pub fn new(
        pool: Pool<D>,
        comm: Arc<dyn Communicator<D>>,
        compute: D::Stream,
        comm_stream: D::Stream,
        shards: Vec<AnySlice>,
        options: PrefetchOptions,
    ) -> Self {
        Self::of(
            pool,
            comm,
            compute,
            comm_stream,
            Shards::Slices(shards),
            options,
        )
    }

    /// As [`Self::new`], with shards from `source`.
    pub fn with_source(
        pool: Pool<D>,
        comm: Arc<dyn Communicator<D>>,
        compute: D::Stream,
        comm_stream: D::Stream,
        source: impl ShardSource<D> + 'static,
        options: PrefetchOptions,
    ) -> Self {
        let elems = source.shard_elems();
        let source = Box::new(source);
        Self::of(
            pool,
            comm,
            compute,
            comm_stream,
            Shards::Source { elems, source },
            options,
        )
    }

    fn of(
        pool: Pool<D>,
        comm: Arc<dyn Communicator<D>>,
        compute: D::Stream,
        comm_stream: D::Stream,
        shards: Shards<D>,
        options: PrefetchOptions,
    ) -> Self {
        let live = Arc::default();
        let ready = HashMap::new();
        let order = None;
        let used = Vec::new();
        let report = PrefetchReport::default();
        Self {
            pool,
            comm,
            compute,
            comm_stream,
            shards,
            options,
            live,
            ready,
            order,
            used,
            starting: false,
            report,
        }
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
        self.order = Some(order);
        Ok(())
    }

    /// Elements of a gathered unit.
    ///
    /// # Errors
    /// [`PrefetchError::NoSuchUnit`].
    pub fn elems(&self, unit: usize) -> Result<usize, PrefetchError> {
        let no_such = || PrefetchError::NoSuchUnit {
            unit,
            units: self.shards.units(),
        };
        Ok(self.shards.elems(unit).ok_or_else(no_such)? * self.comm.world_size())
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

    fn begin_step(&mut self) -> Result<(), PrefetchError> {
        // A start that failed may have gathered units, which other ranks count: the next start goes
        // on with them.
        if !std::mem::replace(&mut self.starting, true) {
            self.ready.clear();
            self.used.clear();
            self.report = PrefetchReport::default();
            self.report.order = if self.order.is_some() {
                OrderCheck::Followed
            } else {
                OrderCheck::Recorded
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
        let expected = self
            .order
            .as_ref()
            .and_then(|order| order.get(self.used.len()).copied());
        if expected != Some(unit) {
            self.order_changed(expected, Some(unit));
        }
        self.used.push(unit);
        let unsharded = self.take(unit, elems);
        if unsharded.is_err() {
            // The use can be tried again, with the gathers of other ranks.
            self.used.pop();
        }
        unsharded
    }

    fn take(&mut self, unit: usize, elems: usize) -> Result<Unsharded<D>, PrefetchError> {
        let mut unsharded = match self.ready.remove(&unit) {
            Some(unsharded) => {
                let in_flight = unsharded.is_in_flight();
                *(if in_flight {
                    &mut self.report.prefetched
                } else {
                    &mut self.report.kept
                }) += 1;
                unsharded
            }
            None => {
                self.report.on_demand += 1;
                self.make_room(unit, elems)?;
                if self.options.ahead == 0 {
                    self.comm_stream.wait(&self.compute.record()?)?;
                }
                self.gather(unit, elems)?
            }
        };

        if unsharded.is_in_flight() {
            unsharded.wait_on(&self.compute)?;
        }
        unsharded.lease.set_held(true);
        if let Err(error) = self.gather_ahead() {
            unsharded.lease.set_held(false);
            self.ready.insert(unit, unsharded);
            return Err(error);
        }

        Ok(unsharded)
    }

    fn reshard(&mut self, unsharded: Unsharded<D>) {
        if !unsharded.lease.is_of(&self.live) {
            return;
        }
        unsharded.lease.set_held(false);
        let unit = unsharded.lease.unit;
        let elems = unsharded.lease.elems;
        let next = match self.report.order {
            OrderCheck::Followed => self
                .order
                .as_ref()
                .and_then(|order| order.get(self.used.len()).copied()),
            _ => None,
        };
        if next == Some(unit) || elems <= self.options.persistence_threshold_elems {
            self.ready.insert(unit, unsharded);
        }
    }

    /// `whole`: all uses were made, so that a missing one is a change of order.
    fn end_step(&mut self, whole: bool) -> PrefetchReport {
        if whole
            && let Some(&expected) = self
                .order
                .as_ref()
                .and_then(|order| order.get(self.used.len()))
        {
            self.order_changed(Some(expected), None);
        }
        self.drop_in_flight();
        self.ready.clear();
        if self.report.order != OrderCheck::Followed {
            self.order = Some(std::mem::take(&mut self.used));
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
            self.drop_in_flight();
        }
    }

    fn drop_in_flight(&mut self) {
        let before = self.ready.len();
        // The gather reads this rank's shard, which compute may write next.
        let gathers = self.ready.values().filter(|unit| unit.is_in_flight());
        gathers.for_each(|unit| unit.hold_writers(&self.compute));
        self.ready.retain(|_, unit| !unit.is_in_flight());
        self.report.wasted += before - self.ready.len();
    }

    /// Frees units in flight, then units kept, until `unit` fits the limit.
    fn make_room(&mut self, unit: usize, unit_elems: usize) -> Result<(), PrefetchError> {
        let limit_elems = self.options.max_live_elems;
        let fits = |live: usize| {
            live == 0
                || live
                    .checked_add(unit_elems)
                    .is_some_and(|sum| sum <= limit_elems)
        };

        if !fits(self.live_elems()) {
            self.drop_in_flight();
        }
        if !fits(self.live_elems()) {
            self.ready.clear();
        }
        let live_elems = self.live_elems();

        if fits(live_elems) {
            Ok(())
        } else {
            Err(PrefetchError::LiveLimit {
                unit,
                unit_elems,
                live_elems,
                limit_elems,
            })
        }
    }

    fn gather(&mut self, unit: usize, elems: usize) -> Result<Unsharded<D>, PrefetchError> {
        let Self {
            pool,
            comm,
            comm_stream,
            live,
            shards,
            ..
        } = self;

        let lease = Lease::new(live, unit, elems);
        match shards {
            Shards::Slices(shards) => {
                let shard = shards[unit];
                Unsharded::gather(
                    pool,
                    &**comm,
                    comm_stream,
                    (shard.len(), shard.dtype()),
                    |_| Ok(Some(shard)),
                    lease,
                )
            }
            Shards::Source { elems, source } => {
                let shard = (elems[unit], source.dtype());
                Unsharded::gather(
                    pool,
                    &**comm,
                    comm_stream,
                    shard,
                    |own| source.fetch(comm_stream, unit, own),
                    lease,
                )
            }
        }
    }

    /// Enqueues the gathers of the next uses, in order, as far as the limits allow.
    fn gather_ahead(&mut self) -> Result<(), PrefetchError> {
        if self.report.order != OrderCheck::Followed {
            return Ok(());
        }
        let mut in_flight: usize = self
            .ready
            .values()
            .filter(|unit| unit.is_in_flight())
            .map(|unit| unit.lease.elems)
            .sum();
        let at = self.used.len();

        for position in at..at.saturating_add(self.options.ahead) {
            let Some(&unit) = self.order.as_ref().and_then(|order| order.get(position)) else {
                break;
            };
            if self.ready.contains_key(&unit) {
                continue;
            }
            let elems = self.elems(unit)?;
            if in_flight > 0 && in_flight.saturating_add(elems) > self.options.ahead_elems {
                break;
            }
            let live = self.live.lock();
            let room = live
                .elems
                .checked_add(elems)
                .is_some_and(|sum| sum <= self.options.max_live_elems);
            // A held unit may become kept, so do not gather it now.
            if !room || live.held.contains(&unit) {
                break;
            }
            drop(live);
            let gathered = self.gather(unit, elems)?;
            self.ready.insert(unit, gathered);
            in_flight += elems;
        }

        Ok(())
    }
}
