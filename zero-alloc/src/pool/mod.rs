//! The pool: the memory of model state, buckets, gathered units and activations.
//!
//! A [`Block`] is an owned piece of device memory with a [`Purpose`]. Dropping it frees the memory
//! in stream order: another stream reuses it after the uses that [`Block::record_use`] recorded.
//!
//! The life of memory here: a **backing** comes from
//! [`Memory::allocate`](crate::device::Memory::allocate) and is freed when the last handle and
//! block of the pool are dropped. It is a segment of one offset space, which the [`Planner`] cuts
//! into blocks; if the device has virtual memory, pages mapped in one range of addresses replace
//! backings. A freed block can be reused at once; what other streams must wait for before they
//! touch it is a **hazard** of its bytes, kept until they are allocated again.

mod backings;
mod block;
mod block_map;
mod error;
#[cfg(all(test, not(any(loom, miri))))]
mod fault_tests;
mod hazards;
mod lane;
#[cfg(all(test, not(loom)))]
mod lane_tests;
#[cfg(all(test, loom))]
mod loom_tests;
mod map;
mod purpose;
mod release;
mod report;
mod source;
mod state;
mod stitched;
mod trim;

use std::fmt;
use std::sync::Arc;

use self::backings::Backings;
use self::hazards::Hazards;
use self::lane::{LANES, Lane, LaneState};
use self::report::Account;
use self::source::{Arena, Source};
use self::state::{Allocation, Failure, LANE_TAG, State};
use self::stitched::Views;
use crate::device::{BlockNote, DType, Device};
use crate::planner::{Planner, PlannerConfig, Request};
use crate::primitive::{Mutex, MutexGuard, thread_number};

pub use block::Block;
pub use block_map::BlockMap;
pub use error::AllocError;
pub use map::{MemoryMap, MemoryRange};
pub use purpose::Purpose;
pub use report::{AllocatedBytes, Change, MemoryKind, Report};

/// The alignment of blocks, if the device's backings have it.
const ALIGN_BYTES: usize = 256;

/// The state that all lanes share.
struct Central<D: Device> {
    device: D,
    budget_bytes: usize,
    kind: MemoryKind,
    /// The size of the lanes' chunks.
    chunk_bytes: usize,
    state: Mutex<State<D>>,
}

/// A pool of blocks of one device. A clone is another handle of the same pool.
pub struct Pool<D: Device>(Arc<[Arc<Lane<D>>; LANES]>);

impl<D: Device> Clone for Pool<D> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<D: Device> fmt::Debug for Pool<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("device", self.device())
            .field("report", &self.report())
            .finish()
    }
}

impl<D: Device> Pool<D> {
    /// A pool that reserves at most `budget_bytes` of the device, rounded up to the device's
    /// granularity. It reserves nothing before the first block. [`Pool::memory_kind`] returns
    /// whether it uses pages.
    pub fn new(device: D, budget_bytes: usize) -> Self {
        let granule = device.granularity_bytes().min(ALIGN_BYTES) as u64;
        let mut config = PlannerConfig::default()
            .granule_bytes(granule)
            .page_bytes(granule);
        let mut source = Source::Backings(Backings::default());
        let mut kind = MemoryKind::Backings;

        if let Some(memory) = device.virtual_memory() {
            match Arena::new(memory, budget_bytes) {
                Ok(arena) => {
                    config.page_bytes = memory.page_bytes() as u64;
                    config.limit_bytes = arena.address_bytes() as u64;
                    config.stitching = true;
                    (source, kind) = (Source::Arena(arena), MemoryKind::Pages);
                }
                Err(error) => kind = MemoryKind::BackingsForPages(error),
            }
        }

        let state = State {
            planner: Planner::new(config),
            source,
            hazards: Hazards::default(),
            views: Views::default(),
            account: Account::default(),
            lane_bytes: 0,
        };

        let chunk_bytes = lane::chunk_bytes(budget_bytes, granule as usize);
        let central = Arc::new(Central {
            device,
            budget_bytes,
            kind,
            chunk_bytes,
            state: Mutex::new(state),
        });

        Self(Arc::new(std::array::from_fn(|_| {
            Arc::new(Lane::new(Arc::clone(&central), granule))
        })))
    }

    fn central(&self) -> &Central<D> {
        &self.0[0].central
    }

    /// The lane of the calling thread.
    fn lane(&self) -> &Arc<Lane<D>> {
        &self.0[thread_number() % LANES]
    }

    /// Locks everything, in order.
    fn lock(&self) -> (Vec<MutexGuard<'_, LaneState<D>>>, MutexGuard<'_, State<D>>) {
        (
            self.0.iter().map(|lane| lane.lock()).collect(),
            self.central().state.lock(),
        )
    }

    /// The device whose memory this is.
    pub fn device(&self) -> &D {
        &self.central().device
    }

    /// The kind of memory that the pool reserves, and why it uses no pages if the device has them.
    pub fn memory_kind(&self) -> &MemoryKind {
        &self.central().kind
    }

    /// A block of `len` elements of `dtype`, first used on `stream`; its contents are unspecified,
    /// but initialised in host memory. Operations enqueued on `stream` from now on run after the
    /// earlier users of the memory; neither the host nor another stream waits.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`], the stream is of another device, or the device failed.
    pub fn allocate(
        &self,
        len: usize,
        dtype: DType,
        purpose: Purpose,
        stream: &D::Stream,
    ) -> Result<Block<D>, AllocError> {
        self.device().check_stream("allocate", stream)?;
        let bytes = self.bytes_of(len, dtype, purpose)?;
        let lane = self.lane();
        let (allocation, ptr) = self.allocate_bytes(lane, bytes, purpose, stream)?;
        Ok(Block::new(
            Arc::clone(lane),
            ptr,
            (len, dtype),
            purpose,
            allocation,
            stream.clone(),
        ))
    }

    fn bytes_of(&self, len: usize, dtype: DType, purpose: Purpose) -> Result<usize, AllocError> {
        len.checked_mul(dtype.size_bytes()).ok_or_else(|| {
            let (lanes, state) = self.lock();
            self.out_of_memory(&lanes, &state, usize::MAX, purpose, None)
        })
    }

    /// Allocates from the planner, or from the lane while other threads hold the pool's lock.
    fn allocate_bytes(
        &self,
        lane: &Lane<D>,
        bytes: usize,
        purpose: Purpose,
        stream: &D::Stream,
    ) -> Result<(Allocation, *mut u8), AllocError> {
        let central = self.central();
        let mut state = None;
        if lane.serves(bytes) {
            let mut in_lane = lane.use_turn();
            if !in_lane {
                state = central.state.try_lock();
                in_lane = state.is_none();
                if in_lane {
                    lane.start_turns();
                }
            }
            if in_lane && let Some(allocated) = lane.allocate(bytes, purpose, stream)? {
                return Ok(allocated);
            }
        }

        self.allocate_central(
            state.unwrap_or_else(|| central.state.lock()),
            bytes,
            purpose,
            stream,
        )
    }

    /// Allocates from the planner.
    fn allocate_central(
        &self,
        mut state: MutexGuard<'_, State<D>>,
        bytes: usize,
        purpose: Purpose,
        stream: &D::Stream,
    ) -> Result<(Allocation, *mut u8), AllocError> {
        match self.central().allocate(&mut state, bytes, purpose, stream) {
            Err(Failure::OutOfMemory(_)) => {
                drop(state);
                self.allocate_last(bytes, purpose, stream)
            }
            Err(Failure::Device(error)) => Err(error.into()),
            Ok(allocated) => Ok(allocated),
        }
    }

    /// Allocates after the lanes have returned their empty chunks.
    #[cold]
    fn allocate_last(
        &self,
        bytes: usize,
        purpose: Purpose,
        stream: &D::Stream,
    ) -> Result<(Allocation, *mut u8), AllocError> {
        for lane in self.0.iter() {
            lane.return_empty(&mut lane.lock());
        }
        let (lanes, mut state) = self.lock();
        match self.central().allocate(&mut state, bytes, purpose, stream) {
            Err(Failure::OutOfMemory(device)) => {
                Err(self.out_of_memory(&lanes, &state, bytes, purpose, device))
            }
            Err(Failure::Device(error)) => Err(error.into()),
            Ok(allocated) => Ok(allocated),
        }
    }

    fn out_of_memory(
        &self,
        lanes: &[MutexGuard<'_, LaneState<D>>],
        state: &State<D>,
        bytes: usize,
        purpose: Purpose,
        device: Option<String>,
    ) -> AllocError {
        let mut report = state.account.report.clone();
        lanes
            .iter()
            .for_each(|lane| report.add_held(&lane.account.report));
        state.out_of_memory(&report, bytes, purpose, self.central().budget_bytes, device)
    }

    /// The pool's live and reserved bytes. Exact, except that if several threads allocate, a
    /// peak is the sum of each lane's own peak: an upper bound.
    pub fn report(&self) -> Report {
        let (lanes, state) = self.lock();
        let mut report = state.account.report.clone();
        report.memory = self.central().kind.clone();
        report.reserved_bytes = state.source.bytes();
        report.backing_allocations = state.source.allocations();
        let planner = state.planner.report();
        report.free_bytes = planner.free_bytes as usize;
        report.largest_free_bytes = planner.largest_free_bytes as usize;
        report.stitched_pages = state.views.mapped_pages();
        for lane in &lanes {
            report.add_held(&lane.account.report);
            report.free_bytes += lane.free_bytes() as usize;
        }
        report
    }

    /// Resets all peaks to the live bytes.
    pub fn reset_peaks(&self) {
        let (mut lanes, mut state) = self.lock();
        state.account.reset_peaks();
        lanes.iter_mut().for_each(|lane| lane.account.reset_peaks());
    }

    /// Starts to record every change of the live bytes, for [`Pool::take_changes`].
    pub fn record_changes(&self) {
        let (mut lanes, mut state) = self.lock();
        let accounts = lanes
            .iter_mut()
            .map(|lane| &mut lane.account)
            .chain([&mut state.account]);
        accounts.for_each(|account| account.changes = Some(Vec::new()));
    }

    /// Stops to record, and returns the changes since [`Pool::record_changes`] in the order of
    /// their times; empty without that call.
    pub fn take_changes(&self) -> Vec<Change> {
        let (mut lanes, mut state) = self.lock();
        let accounts = lanes
            .iter_mut()
            .map(|lane| &mut lane.account)
            .chain([&mut state.account]);
        let mut changes: Vec<Change> = accounts
            .filter_map(|account| account.changes.take())
            .flatten()
            .collect();
        changes.sort_by_key(|change| change.at);
        changes
    }

    /// Checks the planner's invariants and the accounts; for tests.
    ///
    /// # Errors
    /// The first violated invariant.
    pub fn check_invariants(&self) -> Result<(), String> {
        let (lanes, state) = self.lock();
        state.planner.check_invariants()?;
        let chunks: u64 = lanes.iter().map(|lane| lane.bytes()).sum();
        if chunks != state.lane_bytes as u64
            || chunks != state.planner.report().by_tag[LANE_TAG as usize]
        {
            return Err(format!(
                "lanes have {chunks} bytes of chunks, {} are accounted",
                state.lane_bytes
            ));
        }
        lanes.iter().try_for_each(|lane| lane.check_invariants())?;
        let live = state.account.report.total.live_bytes as u64;
        let planned = state.planner.live_bytes();
        if live > planned {
            return Err(format!(
                "{live} bytes are accounted as live, {planned} are allocated"
            ));
        }
        Ok(())
    }
}

impl<D: Device> Central<D> {
    fn allocate(
        &self,
        state: &mut State<D>,
        bytes: usize,
        purpose: Purpose,
        stream: &D::Stream,
    ) -> Result<(Allocation, *mut u8), Failure> {
        if bytes == 0 {
            return Ok((Allocation::Empty, std::ptr::null_mut()));
        }
        let request = Request {
            bytes: bytes as u64,
            align: 1,
            lifetime: purpose.lifetime(),
            tag: purpose as u8,
        };
        let allocation = state.allocate(&self.device, request, stream, self.budget_bytes)?;
        let ptr = state.address(allocation);
        state.account.add(purpose, bytes);
        self.device.note_block(BlockNote::Allocated {
            ptr,
            bytes,
            purpose,
            stream,
        });
        Ok((allocation, ptr))
    }

    fn free(
        &self,
        allocation: Allocation,
        (ptr, bytes): (*mut u8, usize),
        purpose: Purpose,
        home: &D::Stream,
        uses: Vec<(u64, D::Event)>,
    ) {
        if allocation == Allocation::Empty {
            return;
        }
        let mut state = self.state.lock();
        self.device.note_block(BlockNote::Freed {
            ptr,
            bytes,
            home,
            uses: &uses,
        });
        state.free(allocation, home, uses);
        state.account.sub(purpose, bytes);
    }
}
