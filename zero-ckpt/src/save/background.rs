//! Saving in the background: a training step waits for a copy into a staging buffer, not for the
//! disk.
//!
//! ```text
//! trainer       begin: copy -> buffer | any number of steps | advance: staged files | steps | advance: outcome
//! save thread                           fence, write, sync     rank 0: publish
//! ```
//!
//! Ranks can add [`BackgroundStore::ready`] to their exchange of each step. Once it is true on all
//! ranks, [`BackgroundStore::advance`] costs one small exchange and does not wait for a disk.
//! [`BackgroundStore::complete`] waits until the save is published.
//!
//! Buffers of this module: `buffers` staging buffers, each of the size of this rank's state,
//! allocated once. A buffer is free, being filled by `begin`, or owned by the thread that writes it
//! to a file. There are at most as many saves in flight as buffers.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use zero_shard::Layout;

use super::agreement::Save;
use super::meta::check_pieces;
use super::records::{PublishedCheckpoint, StagedFile, StagingSlice};
use super::unit_parts::{UnitPart, unit_parts};
use crate::format::file_layout::{FileLayout, file_order, shard_pieces};
use crate::io::page_buffer::PageBuffer;
use crate::io::parallel::{ByteSource as _, Slice, Slices, in_parallel};
use crate::job::Job;
use crate::{CkptError, Exchange, SaveMeta, ShardData, StateSpec, Store};

/// Bytes that a thread of [`BackgroundStore::begin_copy`] copies at a time.
const COPY_BYTES: usize = 32 << 20;

/// Threads of a copy.
const MAX_COPY_THREADS: usize = 4;

/// Waits until the copies into the staging buffer are complete; called on the save thread. It is a
/// no-op for host memory and waits for an event for a device.
pub type Fence = Box<dyn FnOnce() -> Result<(), String> + Send>;

/// A [`Store`] that saves in the background. All ranks call `begin`, `advance` and `complete` in
/// the same order.
pub struct BackgroundStore {
    store: Arc<Store>,
    layout: Arc<Layout>,
    states: Vec<StateSpec>,
    file: FileLayout,
    limit: usize,
    /// Buffers that no save uses.
    free: Arc<Mutex<Vec<PageBuffer>>>,
    /// The saves that have begun and are not complete, oldest first.
    in_flight: VecDeque<(Arc<SaveMeta>, Save)>,
}

impl BackgroundStore {
    /// Creates a store that saves the `states` of `layout` through `store`, with `buffers` staging
    /// buffers (at least 1) in host memory.
    ///
    /// # Errors
    /// [`CkptError::OutOfMemory`], a shard that ends within a block of a state or sizes beyond 64
    /// bits ([`CkptError::NotStorable`]), or on rank 0 a layout whose manifest readers would reject
    /// ([`CkptError::TooLarge`]).
    pub fn new(
        store: Store,
        layout: Arc<Layout>,
        mut states: Vec<StateSpec>,
        buffers: usize,
    ) -> Result<Self, CkptError> {
        if store.rank() == 0 {
            check_pieces(&layout)?;
        }
        states.sort_by_key(file_order);
        let file = FileLayout::new(&states, &layout, shard_pieces(&layout, store.rank())?)
            .map_err(|why| CkptError::NotStorable { why })?;
        let bytes = file.state_bytes();
        let limit = buffers.max(1);
        let allocate = |_| {
            let buffer = usize::try_from(bytes).ok().and_then(PageBuffer::touched);
            buffer.ok_or(CkptError::OutOfMemory { bytes })
        };

        let free = (0..limit).map(allocate).collect::<Result<_, _>>()?;
        let free = Arc::new(Mutex::new(free));
        Ok(Self {
            store: Arc::new(store),
            layout,
            states,
            file,
            limit,
            free,
            in_flight: VecDeque::new(),
        })
    }

    /// Begins a save. `copy` fills every slice, or starts copies and returns the fence to wait for;
    /// `begin` returns right after it. A failed copy counts as a save in flight, so that the order
    /// of saves stays the same on all ranks; all ranks receive its error from
    /// [`BackgroundStore::advance`].
    ///
    /// # Errors
    /// [`CkptError::InFlight`] if no buffer is free; then no buffer is free on any rank.
    pub fn begin(
        &mut self,
        meta: SaveMeta,
        copy: impl FnOnce(Vec<StagingSlice<'_>>) -> Result<Fence, String>,
    ) -> Result<(), CkptError> {
        if self.in_flight.len() >= self.limit {
            return Err(CkptError::InFlight { limit: self.limit });
        }
        let meta = Arc::new(meta);
        let staging = self
            .begin_staging(&meta, copy)
            .unwrap_or_else(|error| Job::ended(Err(error)));
        let save = Save::new(&self.store, meta.step, staging);
        self.in_flight.push_back((meta, save));
        Ok(())
    }

    fn begin_staging(
        &mut self,
        meta: &Arc<SaveMeta>,
        copy: impl FnOnce(Vec<StagingSlice<'_>>) -> Result<Fence, String>,
    ) -> Result<Job<Result<StagedFile, CkptError>>, CkptError> {
        let number = self.store.number_save();
        let buffer = lock(&self.free).pop();
        let mut borrowed = Borrowed {
            buffer: Some(buffer.ok_or_else(|| CkptError::Snapshot {
                message: "the staging buffer of an earlier save that failed is still in use".into(),
            })?),
            free: Arc::clone(&self.free),
        };

        let slices = staging_slices(
            &self.layout,
            self.store.rank(),
            &self.states,
            borrowed.bytes_mut(),
        );

        let fence = copy(slices).map_err(|message| CkptError::Snapshot { message })?;

        let store = Arc::clone(&self.store);
        let layout = Arc::clone(&self.layout);
        let meta = Arc::clone(meta);
        let states = self.states.clone();
        let pieces = self.file.pieces.clone();

        Ok(Job::start(move || {
            let source = Slices::new(vec![Slice::Bytes(borrowed.bytes())]);
            let save = (meta.step, number);
            let staged = fence()
                .map_err(|message| CkptError::Snapshot { message })
                .and_then(|()| store.stage_source(save, &layout, states, pieces, &source));
            store.describe(&meta, &layout, staged)
        }))
    }

    /// [`BackgroundStore::begin`] for state in host memory.
    ///
    /// # Errors
    /// As `begin`. A shard of another rank, layout or other states fails the save on all ranks.
    pub fn begin_copy(&mut self, meta: SaveMeta, shard: &ShardData<'_>) -> Result<(), CkptError> {
        let rank = self.store.rank();
        let same =
            shard.specs() == self.states && *shard.layout() == *self.layout && shard.rank() == rank;
        self.begin(meta, |slices| {
            if !same {
                return Err(
                    "the shard has other states, another layout or another rank than the store"
                        .into(),
                );
            }
            let source = shard.source();
            // The slices are the bytes of the file, in order.
            let mut end = 0;
            let chunks = slices
                .into_iter()
                .flat_map(|slice| slice.bytes.chunks_mut(COPY_BYTES))
                .map(|bytes| {
                    end += bytes.len() as u64;
                    (end - bytes.len() as u64, bytes)
                });
            // One core does not reach the memory's bandwidth.
            let threads = (source.len() as usize)
                .div_ceil(COPY_BYTES)
                .min(MAX_COPY_THREADS);
            in_parallel(chunks, threads, |(start, bytes), _| {
                source.fill(start, bytes).map_err(|e| e.to_string())
            })?;
            Ok(Box::new(|| Ok(())))
        })
    }

    /// Bytes of the staging buffers.
    pub fn staging_bytes(&self) -> u64 {
        self.file.state_bytes() * self.limit as u64
    }

    /// The number of saves that have begun and are not complete.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Whether [`BackgroundStore::advance`] would not wait for this rank's thread. Call `advance`
    /// once it is true on all ranks.
    pub fn ready(&self) -> bool {
        self.in_flight
            .front()
            .is_some_and(|(_, save)| save.is_ready())
    }

    /// Advances the oldest save in flight: the first call gathers the records of the staged files,
    /// after which rank 0 publishes in the background (returns `None`); the second broadcasts the
    /// outcome. If a rank is not ready, the ranks wait for it, and exchange their progress at least
    /// every 500 ms.
    ///
    /// # Errors
    /// [`CkptError::NothingInFlight`], or an error of [`Store::save`], which is the same on all
    /// ranks and ends the save.
    pub fn advance(
        &mut self,
        exchange: &mut impl Exchange,
    ) -> Result<Option<PublishedCheckpoint>, CkptError> {
        let (meta, mut save) = self
            .in_flight
            .pop_front()
            .ok_or(CkptError::NothingInFlight)?;
        let publish = &mut |all| {
            let store = Arc::clone(&self.store);
            let layout = Arc::clone(&self.layout);
            let meta = Arc::clone(&meta);
            Job::start(move || store.publish_files(&meta, &layout, all))
        };
        let published = save.advance(&self.store, &self.layout, exchange, publish)?;
        if published.is_none() {
            self.in_flight.push_front((meta, save));
        }
        Ok(published)
    }

    /// Completes the oldest save in flight together with the other ranks; waits until it is
    /// published.
    ///
    /// # Errors
    /// As [`BackgroundStore::advance`].
    pub fn complete(
        &mut self,
        exchange: &mut impl Exchange,
    ) -> Result<PublishedCheckpoint, CkptError> {
        loop {
            if let Some(published) = self.advance(exchange)? {
                return Ok(published);
            }
        }
    }

    /// See [`Store::finish_removals`].
    pub fn finish_removals(&self) -> Vec<String> {
        self.store.finish_removals()
    }
}

impl Drop for BackgroundStore {
    /// Waits for the threads while they make progress. Staged files that are not published stay.
    fn drop(&mut self) {
        for (_, save) in &mut self.in_flight {
            save.wait_for_threads(&self.store);
        }
    }
}

/// A staging buffer in use. Its drop returns it, but leaks it after a panic: copies into it may
/// still be in progress.
struct Borrowed {
    buffer: Option<PageBuffer>,
    free: Arc<Mutex<Vec<PageBuffer>>>,
}

impl Borrowed {
    fn bytes(&self) -> &[u8] {
        self.buffer
            .as_ref()
            .map(PageBuffer::bytes)
            .unwrap_or_default()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.buffer
            .as_mut()
            .map(PageBuffer::bytes_mut)
            .unwrap_or_default()
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        let buffer = self.buffer.take();
        if std::thread::panicking() {
            std::mem::forget(buffer);
        } else {
            lock(&self.free).extend(buffer);
        }
    }
}

fn lock(buffers: &Mutex<Vec<PageBuffer>>) -> MutexGuard<'_, Vec<PageBuffer>> {
    buffers.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Splits a staging buffer into the slices to fill, in the order of the file.
fn staging_slices<'a>(
    layout: &Layout,
    rank: u64,
    states: &'a [StateSpec],
    buffer: &'a mut [u8],
) -> Vec<StagingSlice<'a>> {
    let mut rest = buffer;
    let slice = |part: UnitPart| {
        let (bytes, later) = std::mem::take(&mut rest).split_at_mut(part.bytes() as usize);
        rest = later;
        StagingSlice {
            state: &states[part.state],
            unit: part.unit,
            in_shard: part.in_shard,
            bytes,
            encoding: part.encoding,
        }
    };
    let parts = unit_parts(layout, rank, states);
    parts.into_iter().map(slice).collect()
}
