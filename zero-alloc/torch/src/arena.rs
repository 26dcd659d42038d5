//! One device's arena, and the rules by which blocks are allocated and freed.
//!
//! The life of a block: it is allocated on a stream, its home; PyTorch names other streams that use
//! it; when it is freed, its uses end at what those streams have enqueued so far. The legacy
//! default stream is never destroyed, so the pool records its end when another stream reuses the
//! memory, and not at all if that is the same stream. The end of any other stream is recorded when
//! the block is freed, and the stream's handle is not used for it afterwards.
//!
//! Two kinds of blocks cannot end at an event. What a recorded graph uses is free when the graph is
//! gone ([`GraphPools`]), and a block that is freed while its stream is recorded waits until the
//! recording is over, since events of a recording never happen.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use zero_alloc::cuda::{CudaDevice, CudaEvent, CudaStream, interop};
use zero_alloc::device::{Device, DeviceError, Stream};
use zero_alloc::{AllocError, Block, BlockMap, Pool, Purpose};

use crate::error::ArenaError;
use crate::graphs::{GraphPoolId, GraphPools, Recording};
use crate::streams::{Streams, TorchStream};

/// PyTorch does not say what a block is for. A purpose of short life is one that no policy pins to
/// the low end.
const PURPOSE: Purpose = Purpose::Workspace;

/// How long an allocation that does not fit waits for the free end of the arena.
const TRIM_LIMIT: Duration = Duration::from_secs(1);

/// How long an allocation for a graph waits for the earlier users of its memory.
const GRAPH_LIMIT: Duration = Duration::from_secs(600);

/// The largest blocks that an error of an exhausted arena names.
const LARGEST_NAMED: usize = 5;

/// The state of a live block.
struct Tag {
    home: Arc<TorchStream>,
    /// The streams of `record_stream`.
    users: Vec<Arc<TorchStream>>,
    recording: Option<Recording>,
}

impl Tag {
    fn streams(&self) -> impl Iterator<Item = &Arc<TorchStream>> {
        self.users.iter().chain([&self.home])
    }
}

/// Counts of calls.
#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) allocations: AtomicU64,
    pub(crate) frees: AtomicU64,
    pub(crate) out_of_memory: AtomicU64,
    pub(crate) peak_reserved_bytes: AtomicU64,
}

/// The arena of one device.
pub(crate) struct Arena {
    device: CudaDevice,
    budget_bytes: usize,
    blocks: BlockMap<CudaDevice, Tag>,
    streams: Streams,
    /// The arena's own stream: home of the blocks of graphs, and for events in place of streams
    /// that can record none.
    own: CudaStream,
    graphs: Mutex<GraphPools>,
    open_graph_pools: AtomicUsize,
    /// Blocks that were freed while one of their streams was recorded.
    deferred: Mutex<Vec<(Block<CudaDevice>, Tag)>>,
    deferred_count: AtomicUsize,
    pub(crate) counts: Counts,
}

impl Arena {
    /// The arena of a device, which reserves nothing yet. `budget_bytes` is the device's memory by
    /// default.
    pub(crate) fn new(ordinal: usize, budget_bytes: Option<usize>) -> Result<Self, DeviceError> {
        let device = CudaDevice::open(ordinal)?;
        let budget_bytes = match budget_bytes {
            Some(bytes) => bytes,
            None => device.memory_bytes()?.1,
        };
        let own = device.create_stream("arena")?;
        let pool = Pool::new(device.clone(), budget_bytes);
        Ok(Self {
            device,
            budget_bytes,
            blocks: BlockMap::new(pool),
            streams: Streams::default(),
            own,
            graphs: Mutex::default(),
            open_graph_pools: AtomicUsize::new(0),
            deferred: Mutex::default(),
            deferred_count: AtomicUsize::new(0),
            counts: Counts::default(),
        })
    }

    pub(crate) fn pool(&self) -> &Pool<CudaDevice> {
        self.blocks.pool()
    }

    pub(crate) fn budget_bytes(&self) -> usize {
        self.budget_bytes
    }

    /// The number of live blocks.
    pub(crate) fn block_count(&self) -> usize {
        let mut count = 0;
        self.blocks.for_each(|_, _, _| count += 1);
        count
    }

    /// Allocates `bytes`, at least one, for use on the stream of `handle`.
    pub(crate) fn allocate(
        &self,
        bytes: usize,
        handle: *mut c_void,
    ) -> Result<NonNull<u8>, ArenaError> {
        self.free_deferred();
        self.counts.allocations.fetch_add(1, Ordering::Relaxed);
        let home = self.streams.get(&self.device, handle)?;
        if home.is_recorded() {
            let allocate = || self.allocate_for_graph(bytes, home);
            return interop::with_relaxed_captures(&self.device, allocate)?;
        }

        let stream = home.stream.clone();
        let tag = Tag {
            home,
            users: Vec::new(),
            recording: None,
        };
        let allocate = || self.allocate_on(bytes, &stream, tag);
        if self.open_graph_pools.load(Ordering::Acquire) > 0 {
            return interop::with_relaxed_captures(&self.device, allocate)?;
        }
        allocate()
    }

    /// Allocates for a graph that is being recorded. The recorded stream must not wait for events
    /// from before the recording, so the host does.
    fn allocate_for_graph(
        &self,
        bytes: usize,
        home: Arc<TorchStream>,
    ) -> Result<NonNull<u8>, ArenaError> {
        let tag = Tag {
            home,
            users: Vec::new(),
            recording: Some(self.graphs.lock().owner()),
        };
        let ptr = self.allocate_on(bytes, &self.own, tag)?;
        if let Err(error) = self.own.synchronize(GRAPH_LIMIT) {
            drop(self.blocks.remove(ptr.as_ptr()));
            return Err(error.into());
        }
        Ok(ptr)
    }

    fn allocate_on(
        &self,
        bytes: usize,
        stream: &CudaStream,
        tag: Tag,
    ) -> Result<NonNull<u8>, ArenaError> {
        let (home, recording) = (Arc::clone(&tag.home), tag.recording);
        match self.blocks.allocate(bytes, PURPOSE, stream, tag) {
            Ok(ptr) => return Ok(ptr),
            Err(AllocError::OutOfMemory { .. }) => {}
            Err(error) => return Err(error.into()),
        }

        // Returns the free end to the device, which may then have contiguous pages for the request.
        self.pool().trim(TRIM_LIMIT);
        let tag = Tag {
            home,
            users: Vec::new(),
            recording,
        };
        match self.blocks.allocate(bytes, PURPOSE, stream, tag) {
            Err(cause @ AllocError::OutOfMemory { .. }) => {
                self.counts.out_of_memory.fetch_add(1, Ordering::Relaxed);
                let held = self.held();
                let cause = Box::new(cause);
                Err(ArenaError::OutOfMemory { cause, held })
            }
            allocated => Ok(allocated?),
        }
    }

    /// The holders of the arena's memory, in one line.
    fn held(&self) -> String {
        let mut by_stream: BTreeMap<String, (usize, usize)> = BTreeMap::new();
        let mut largest = Vec::new();
        self.blocks.for_each(|address, bytes, tag| {
            let of_stream = by_stream.entry(tag.home.name()).or_default();
            of_stream.0 += 1;
            of_stream.1 += bytes;
            largest.push((bytes, address));
        });
        largest.sort_unstable_by(|a, b| b.cmp(a));
        largest.truncate(LARGEST_NAMED);

        let streams: Vec<_> = by_stream
            .iter()
            .map(|(name, (count, bytes))| format!("{name}: {bytes} bytes in {count} blocks"))
            .collect();
        let largest: Vec<_> = largest
            .iter()
            .map(|(bytes, address)| format!("{bytes} bytes at {address:#x}"))
            .collect();
        let device = match self.device.memory_bytes() {
            Ok((free, total)) => format!("the device has {free} of {total} bytes free"),
            Err(error) => error.to_string(),
        };
        format!(
            "held by [{}]; largest blocks [{}]; {device}",
            streams.join("; "),
            largest.join("; ")
        )
    }

    /// Records that a stream uses the block until it is freed. Returns whether the block is live.
    pub(crate) fn record_stream(
        &self,
        ptr: *mut u8,
        handle: *mut c_void,
    ) -> Result<bool, ArenaError> {
        if self.blocks.with_tag(ptr, |_| ()).is_none() {
            return Ok(false);
        }
        let user = self.streams.get(&self.device, handle)?;
        let recorded = self.blocks.with_tag(ptr, |tag| {
            if tag.streams().all(|known| !Arc::ptr_eq(known, &user)) {
                tag.users.push(user);
            }
        });
        Ok(recorded.is_some())
    }

    /// Frees the block. Returns whether there was one.
    pub(crate) fn free(&self, ptr: *mut u8) -> Result<bool, ArenaError> {
        let Some((block, tag)) = self.blocks.remove(ptr) else {
            return Ok(false);
        };
        self.counts.frees.fetch_add(1, Ordering::Relaxed);
        self.free_block(block, tag)?;
        Ok(true)
    }

    fn free_block(&self, block: Block<CudaDevice>, tag: Tag) -> Result<(), ArenaError> {
        match tag.recording {
            Some(Recording::InPool(id)) => {
                let released = self.graphs.lock().keep(id, block);
                released.map_or(Ok(()), |block| self.free_after_all(block))
            }
            Some(Recording::InCache) => self.free_after_all(block),
            None if tag.streams().any(|stream| self.is_recorded(stream)) => {
                self.deferred.lock().push((block, tag));
                self.deferred_count.fetch_add(1, Ordering::Release);
                Ok(())
            }
            None => self.free_after_uses(block, &tag),
        }
    }

    /// Frees a block that graphs have used, which are gone: launches of them may still run on any
    /// stream, so the host waits for the device.
    fn free_after_all(&self, block: Block<CudaDevice>) -> Result<(), ArenaError> {
        if let Err(error) = interop::synchronize_context(&self.device) {
            // A graph may use the memory, so nobody gets it.
            std::mem::forget(block);
            return Err(error.into());
        }
        drop(block);
        Ok(())
    }

    /// Whether the stream lives and is being recorded.
    fn is_recorded(&self, stream: &TorchStream) -> bool {
        stream.is_usable(&self.device) && stream.is_recorded()
    }

    /// Frees a block; the next user of its memory runs after what its streams have enqueued so far.
    fn free_after_uses(&self, mut block: Block<CudaDevice>, tag: &Tag) -> Result<(), ArenaError> {
        let users = tag.users.iter();
        let home = [&tag.home].into_iter().filter(|home| home.stream.may_end());
        for user in users.chain(home) {
            match self.end_of(user) {
                // SAFETY: an event behind everything on the stream; the program frees the block, so
                // that it enqueues no more uses of it.
                Ok(end) => unsafe { block.record_end_of_use(&user.stream, end) },
                Err(error) => {
                    // The device has failed. The memory may be in use, so nobody gets it.
                    std::mem::forget(block);
                    return Err(error.into());
                }
            }
        }
        Ok(())
    }

    /// An event after everything on the stream so far. If the stream can record none, because it
    /// was destroyed or belongs to another thread, the host waits for the device.
    fn end_of(&self, stream: &TorchStream) -> Result<CudaEvent, DeviceError> {
        if let Some(end) = stream.end() {
            return Ok(end.clone());
        }
        if stream.is_usable(&self.device)
            && let Ok(end) = stream.stream.record()
        {
            return Ok(end);
        }
        interop::synchronize_context(&self.device)?;
        self.own.record()
    }

    /// Frees the deferred blocks whose streams are no longer recorded.
    fn free_deferred(&self) {
        if self.deferred_count.load(Ordering::Acquire) == 0 {
            return;
        }
        let ready: Vec<_> = self
            .deferred
            .lock()
            .extract_if(.., |(_, tag)| {
                !tag.streams().any(|stream| self.is_recorded(stream))
            })
            .collect();
        self.deferred_count
            .fetch_sub(ready.len(), Ordering::Release);
        for (block, tag) in ready {
            // An error means that the device has failed, which the allocation reports, too.
            let _ = self.free_after_uses(block, &tag);
        }
    }

    /// Records the end of a stream that the program is about to destroy.
    pub(crate) fn forget_stream(&self, handle: *mut c_void) -> Result<(), ArenaError> {
        if let Some(stream) = self.streams.forget(handle) {
            stream.set_end(self.end_of(&stream)?);
        }
        Ok(())
    }

    /// Returns the free end of the arena to the device. Returns the number of bytes.
    pub(crate) fn trim(&self) -> usize {
        self.free_deferred();
        self.pool().trim(TRIM_LIMIT)
    }

    pub(crate) fn begin_graph_pool(&self, id: GraphPoolId) {
        let mut graphs = self.graphs.lock();
        graphs.begin(id);
        self.open_graph_pools
            .store(graphs.open_count(), Ordering::Release);
    }

    pub(crate) fn end_graph_pool(&self, id: GraphPoolId) {
        let mut graphs = self.graphs.lock();
        graphs.end(id);
        self.open_graph_pools
            .store(graphs.open_count(), Ordering::Release);
    }

    /// Ends a graph's use of its pool. The last one frees what the pool kept: launches of the
    /// graphs may still run on any stream, so the host waits for the device. If that fails, the
    /// blocks stay.
    pub(crate) fn release_graph_pool(&self, id: GraphPoolId) -> Result<(), ArenaError> {
        if self.graphs.lock().frees_at_release(id) {
            interop::synchronize_context(&self.device)?;
        }
        drop(self.graphs.lock().release(id));
        Ok(())
    }
}
