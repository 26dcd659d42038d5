//! Unit prefetch: sharded units are gathered on the communication stream ahead of their use.
//!
//! Two buffers live here. A **shard** is the caller's, in its storage, for good. A **gathered unit** is a block
//! of `shard.len() * world_size` elements held as `Purpose::Buckets`:
//!
//! ```text
//! sharded --begin_step, unshard--> in flight --unshard--> held --reshard--> sharded
//!            (ahead of its use)    the gather runs        the caller's      the block is back in the pool,
//!                                                                           in stream order
//! ```
//!
//! - *in flight* ([`UnitGather`]): its block counts as live; the communication stream writes it.
//! - *held* ([`Unsharded`]): the compute stream waits for the gather; the caller's operations use the block.
//! - *kept*: resharded, but with its block: where the very next use is the same unit (the last block of a
//!   model, forward then backward), or where it is small ([`PrefetchOptions::persistence_threshold_elems`]).
//!   Weights do not change within a step, so it need not be gathered again until [`Prefetcher::end_step`].
//!
//! The order of use is given, or recorded on the first step, and checked on each later one. A use out of order
//! ends prefetching for that step: units are gathered on demand, the [`PrefetchReport`] says where the order
//! changed, and the next step expects the new one.
//!
//! **Limit.** The elements of all blocks in flight, held and kept never exceed
//! [`PrefetchOptions::max_live_elems`], but for a unit that exceeds it alone: it is gathered on demand when
//! nothing else is live. The host never waits; the memory of a resharded unit is reused in stream order.

mod gathered_unit;
mod live;
mod order;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use zero_alloc::device::{AnySlice, Device, DeviceError, Stream};
use zero_alloc::{AllocError, Pool};

pub use gathered_unit::{UnitGather, Unsharded};
pub use order::{OrderCheck, PrefetchReport};

use crate::{CommError, Communicator};
use live::{Lease, Live};

/// Why a unit could not be gathered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PrefetchError {
    /// There is no such unit.
    #[error("unit {unit} of {units}")]
    NoSuchUnit {
        /// The unit asked for.
        unit: usize,
        /// How many there are.
        units: usize,
    },
    /// The unit is held already.
    #[error("unit {unit} is unsharded already")]
    Held {
        /// The unit asked for.
        unit: usize,
    },
    /// What the caller holds leaves no room under the limit.
    #[error("unit {unit} has {asked_elems} elements, and {live_elems} of {limit_elems} live elements are held")]
    LiveLimit {
        /// The unit asked for.
        unit: usize,
        /// Its elements.
        asked_elems: usize,
        /// Live now.
        live_elems: usize,
        /// [`PrefetchOptions::max_live_elems`].
        limit_elems: usize,
    },
    /// The pool has no room for the unit.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// The collective was refused.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A stream refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// How units are prefetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchOptions {
    /// How many uses ahead units are gathered. 0: only when they are asked for, and then behind what compute has
    /// been given before, so that nothing overlaps. Default: 1.
    pub ahead: usize,
    /// The most elements that are live. Default: no limit.
    pub max_live_elems: usize,
    /// A unit of at most this many elements is gathered once in a step and kept until its end. Default: 0.
    pub persistence_threshold_elems: usize,
}

impl Default for PrefetchOptions {
    fn default() -> Self {
        Self { ahead: 1, max_live_elems: usize::MAX, persistence_threshold_elems: 0 }
    }
}

/// A unit that waits for its use.
enum Ready<D: Device> {
    InFlight(UnitGather<D>, Lease),
    Kept(Unsharded<D>),
}

/// Gathers the units of one rank ahead of their use.
pub struct Prefetcher<D: Device> {
    pool: Pool<D>,
    comm: Arc<dyn Communicator<D>>,
    compute: D::Stream,
    comm_stream: D::Stream,
    shards: Vec<AnySlice>,
    options: PrefetchOptions,
    live: Arc<Mutex<Live>>,
    ready: HashMap<usize, Ready<D>>,
    /// The expected order of use of a step.
    order: Option<Vec<usize>>,
    /// The uses of this step so far.
    used: Vec<usize>,
    report: PrefetchReport,
}

impl<D: Device> fmt::Debug for Prefetcher<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Prefetcher({} units, {:?})", self.shards.len(), self.options)
    }
}

impl<D: Device> Prefetcher<D> {
    /// For units whose shards of this rank are `shards`; each rank's are of the same lengths.
    pub fn new(
        pool: Pool<D>,
        comm: Arc<dyn Communicator<D>>,
        compute: D::Stream,
        comm_stream: D::Stream,
        shards: Vec<AnySlice>,
        options: PrefetchOptions,
    ) -> Self {
        let (live, ready) = (Arc::default(), HashMap::new());
        let (order, used, report) = (None, Vec::new(), PrefetchReport::default());
        Self { pool, comm, compute, comm_stream, shards, options, live, ready, order, used, report }
    }

    /// Expects `order`, the units of one step in their order of use (forward, then backward, for each
    /// micro-batch), instead of recording it on the first step.
    ///
    /// # Errors
    /// [`PrefetchError::NoSuchUnit`].
    pub fn expect_order(&mut self, order: Vec<usize>) -> Result<(), PrefetchError> {
        order.iter().try_for_each(|&unit| self.elems(unit).map(drop))?;
        self.order = Some(order);
        Ok(())
    }

    /// Elements of a gathered unit.
    ///
    /// # Errors
    /// [`PrefetchError::NoSuchUnit`].
    pub fn elems(&self, unit: usize) -> Result<usize, PrefetchError> {
        let shard = self.shards.get(unit).ok_or(PrefetchError::NoSuchUnit { unit, units: self.shards.len() })?;
        Ok(shard.len() * self.comm.world_size())
    }

    /// Elements in flight, held and kept now.
    pub fn live_elems(&self) -> usize {
        self.live.lock().elems
    }

    /// Starts a step: gathers see the shards as everything enqueued on the compute stream so far leaves them.
    ///
    /// # Errors
    /// A stream, the pool or the collective refused.
    pub fn begin_step(&mut self) -> Result<(), PrefetchError> {
        self.ready.clear();
        self.used.clear();
        self.report = PrefetchReport::default();
        self.report.order = if self.order.is_some() { OrderCheck::Followed } else { OrderCheck::Recorded };
        let mut live = self.live.lock();
        live.peak_elems = live.elems;
        drop(live);
        self.comm_stream.wait(&self.compute.record()?)?;
        self.gather_ahead()
    }

    /// The gathered unit, for the compute stream, which waits for it; starts the gathers of the next uses.
    ///
    /// # Errors
    /// There is no such unit, it is held, the held units leave no room for it, or the pool or a stream refused.
    pub fn unshard(&mut self, unit: usize) -> Result<Unsharded<D>, PrefetchError> {
        let elems = self.elems(unit)?;
        if self.live.lock().held.contains_key(&unit) {
            return Err(PrefetchError::Held { unit });
        }
        let expected = self.order.as_ref().and_then(|order| order.get(self.used.len()).copied());
        if expected != Some(unit) {
            self.order_changed(expected, Some(unit));
        }
        self.used.push(unit);
        let mut unsharded = match self.ready.remove(&unit) {
            Some(Ready::Kept(unsharded)) => {
                self.report.kept += 1;
                unsharded
            }
            Some(Ready::InFlight(gather, lease)) => {
                self.report.prefetched += 1;
                let mut unsharded = gather.wait_on(&self.compute)?;
                unsharded.lease = Some(lease);
                unsharded
            }
            None => {
                self.report.on_demand += 1;
                self.make_room(unit, elems)?;
                if self.options.ahead == 0 {
                    self.comm_stream.wait(&self.compute.record()?)?;
                }
                let (gather, lease) = self.gather(unit, elems)?;
                let mut unsharded = gather.wait_on(&self.compute)?;
                unsharded.lease = Some(lease);
                unsharded
            }
        };
        if let Some(lease) = &mut unsharded.lease {
            lease.set_held(true);
        }
        self.gather_ahead()?;
        Ok(unsharded)
    }

    /// Ends a use: the memory goes back to the pool in stream order, or is kept for the next use in this step.
    pub fn reshard(&mut self, mut unsharded: Unsharded<D>) {
        let Some(lease) = &mut unsharded.lease else { return };
        lease.set_held(false);
        let (unit, elems) = (lease.unit, lease.elems);
        let next = match self.report.order {
            OrderCheck::Followed => self.order.as_ref().and_then(|order| order.get(self.used.len()).copied()),
            _ => None,
        };
        if next == Some(unit) || elems <= self.options.persistence_threshold_elems {
            self.ready.insert(unit, Ready::Kept(unsharded));
        }
    }

    /// Ends a step: what is kept or in flight is given up, and the order of use is checked.
    pub fn end_step(&mut self) -> PrefetchReport {
        if let Some(&expected) = self.order.as_ref().and_then(|order| order.get(self.used.len())) {
            self.order_changed(Some(expected), None);
        }
        self.report.wasted += self.ready.values().filter(|r| matches!(r, Ready::InFlight(..))).count();
        self.ready.clear();
        if self.report.order != OrderCheck::Followed {
            self.order = Some(std::mem::take(&mut self.used));
        }
        self.report.peak_live_elems = self.live.lock().peak_elems;
        self.report
    }

    fn order_changed(&mut self, expected: Option<usize>, got: Option<usize>) {
        if self.report.order == OrderCheck::Followed {
            self.report.order = OrderCheck::Changed { position: self.used.len(), expected, got };
            self.give_up_in_flight();
        }
    }

    fn give_up_in_flight(&mut self) {
        let before = self.ready.len();
        self.ready.retain(|_, ready| matches!(ready, Ready::Kept(_)));
        self.report.wasted += before - self.ready.len();
    }

    /// Makes room for a unit that is gathered now: first what is in flight goes, then what is kept.
    fn make_room(&mut self, unit: usize, asked_elems: usize) -> Result<(), PrefetchError> {
        let limit_elems = self.options.max_live_elems;
        let fits = |live: usize| live == 0 || live.checked_add(asked_elems).is_some_and(|sum| sum <= limit_elems);
        if !fits(self.live_elems()) {
            self.give_up_in_flight();
        }
        if !fits(self.live_elems()) {
            self.ready.clear();
        }
        let live_elems = self.live_elems();
        if fits(live_elems) {
            Ok(())
        } else {
            Err(PrefetchError::LiveLimit { unit, asked_elems, live_elems, limit_elems })
        }
    }

    fn gather(&self, unit: usize, elems: usize) -> Result<(UnitGather<D>, Lease), PrefetchError> {
        let lease = Lease::new(&self.live, unit, elems);
        Ok((UnitGather::start(&self.pool, &*self.comm, &self.comm_stream, self.shards[unit])?, lease))
    }

    /// Starts the gathers of the next uses, in their order, as far as the limit allows.
    fn gather_ahead(&mut self) -> Result<(), PrefetchError> {
        if self.report.order != OrderCheck::Followed {
            return Ok(());
        }
        let at = self.used.len();
        for position in at..at.saturating_add(self.options.ahead) {
            let Some(&unit) = self.order.as_ref().and_then(|order| order.get(position)) else { break };
            if self.ready.contains_key(&unit) {
                continue;
            }
            let elems = self.elems(unit)?;
            let live = self.live.lock();
            let room = live.elems.checked_add(elems).is_some_and(|sum| sum <= self.options.max_live_elems);
            // A unit that is held now may be kept when it is resharded.
            if !room || live.held.contains_key(&unit) {
                break;
            }
            drop(live);
            let (gather, lease) = self.gather(unit, elems)?;
            self.ready.insert(unit, Ready::InFlight(gather, lease));
        }
        Ok(())
    }
}
