//! The flags that ranks exchange at the end of a step: a request to stop, and readiness to advance
//! a save.
//!
//! | buffer | bytes | lifetime |
//! |---|---|---|
//! | `words`, of a GPU | 16, in pinned memory | the flags of a rank that is not ready, and of one that is; the host adds `STOP` when the request comes |
//! | `device` | 8, on the device | this step's flags, written in the compute stream, read by the all-gather of statistics |
//!
//! A request to stop takes effect in the step that the device is computing, even if the host is
//! ahead: the flags of a step are read when the compute stream gets there. On a GPU that is a copy
//! of one of `words`, because a host operation would hold up the compute stream; on the host it is
//! an operation of the stream.
//!
//! `READY` belongs to the step for which the host set it: which word a step copies is decided when
//! the copy is enqueued, and of the words only the bit `STOP` changes, once.
//!
//! A failed write of the metrics is a request to stop, too: the run saves before it fails.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use zero_alloc::device::{AnySlice, DType, Device, DeviceError, DeviceSlice, Event, Stream};
use zero_alloc::{Block, Purpose, TimeLimit};

use crate::error::TrainError;
use crate::rank::Rank;
use crate::rank_exchange::RankExchange;

/// The words of a rank that is not ready, and of one that is.
type Words = [AtomicU64; 2];
const BYTES: usize = size_of::<u64>();
/// A rank requests to stop after this step.
const STOP: u64 = 1;
/// The rank is ready to advance the save in progress.
const READY: u64 = 2;
/// The host looks for a request this often while it waits for the device.
const REQUEST_EVERY: Duration = Duration::from_millis(10);

/// The flags of one rank.
pub(crate) struct Flags<'a, D: Device> {
    rank: &'a Rank<D>,
    /// `None` if the device is the host.
    words: Option<NonNull<Words>>,
    device: Block<D>,
}

/// The flags of an enqueued step.
pub(crate) struct Enqueued<E> {
    /// On the device, read in compute-stream order.
    pub(crate) flags: DeviceSlice<u64>,
    /// Later requests are for the next step.
    read: E,
    /// Behind the exchange of the statistics of quantised values, if there are any.
    pub(crate) quantised: Option<E>,
}

impl<'a, D: Device> Flags<'a, D> {
    pub(crate) fn new(rank: &'a Rank<D>) -> Result<Self, TrainError> {
        let device = rank
            .pool
            .allocate(BYTES, DType::U8, Purpose::Workspace, &rank.compute)?;
        let words = match rank.is_host() {
            true => None,
            false => {
                // Backings are aligned to 64 bytes or more.
                let words: NonNull<Words> = rank.host.memory.allocate(size_of::<Words>())?.cast();
                // SAFETY: allocated above with this size and alignment, and nothing uses it yet.
                unsafe { words.write([AtomicU64::new(0), AtomicU64::new(READY)]) };
                Some(words)
            }
        };
        Ok(Self {
            rank,
            words,
            device,
        })
    }

    /// The words, which the drop frees.
    fn words(&self) -> Option<&Words> {
        // SAFETY: written by `new`, and live until the drop; the host changes them as atomics, and
        // the device only copies one.
        self.words.map(|words| unsafe { words.as_ref() })
    }

    /// Enqueues the write of this rank's flags on the compute stream.
    pub(crate) fn enqueue(
        &self,
        cancel: &Arc<AtomicBool>,
        ready: bool,
    ) -> Result<Enqueued<D::Event>, TrainError> {
        let Rank {
            compute,
            pool,
            host,
            ..
        } = self.rank;

        // SAFETY: only the compute stream uses the block; the drop records that stream.
        let device = unsafe { self.device.slice() };
        // SAFETY: eight bytes at the start of a block, which is aligned for them.
        let flags = unsafe {
            DeviceSlice::<u64>::from_raw_parts(device.as_ptr().cast(), 1, device.device())
        };
        self.request(cancel);

        match self.words() {
            Some(words) => {
                let word = words[usize::from(ready)].as_ptr().cast();
                // SAFETY: one word, until the drop has waited for the copy. The host only stores to
                // it as an atomic, which a copy of one word allows.
                let word =
                    unsafe { AnySlice::from_raw_parts(word, BYTES, DType::U8, host.memory.id()) };
                pool.device().copy(compute, word, device)?;
            }
            None => {
                let cancel = Arc::clone(cancel);
                let write = move || {
                    let stop = if cancel.load(Ordering::Relaxed) {
                        STOP
                    } else {
                        0
                    };
                    // SAFETY: host memory, used in the order of this stream.
                    unsafe { flags.as_host_mut() }.fill(stop | if ready { READY } else { 0 });
                    Ok(())
                };
                compute.enqueue_host("flags", write)?;
            }
        }

        Ok(Enqueued {
            flags,
            read: compute.record()?,
            quantised: None,
        })
    }

    /// Adds a request to stop to the flags that are not read yet.
    fn request(&self, cancel: &AtomicBool) {
        if let (true, Some(words)) = (cancel.load(Ordering::Relaxed), self.words()) {
            for word in words {
                word.fetch_or(STOP, Ordering::Relaxed);
            }
        }
    }

    /// Waits until the device has read the flags of a step, and adds a request to stop that comes
    /// meanwhile. On the host, where the stream reads the request itself, it returns at once.
    pub(crate) fn watch(
        &self,
        cancel: &AtomicBool,
        step: &Enqueued<D::Event>,
    ) -> Result<(), TrainError> {
        if self.words.is_none() {
            return Ok(());
        }
        let mut limit = TimeLimit::new(self.rank.settings.host_limit());
        loop {
            self.request(cancel);
            match step.read.synchronize(REQUEST_EVERY) {
                Err(DeviceError::TimedOut { .. }) if !limit.has_passed() => {}
                Err(DeviceError::TimedOut { what, .. }) => {
                    return Err(DeviceError::TimedOut {
                        what,
                        limit: limit.limit(),
                    }
                    .into());
                }
                waited => return Ok(waited?),
            }
        }
    }
}

/// Whether any rank requests to stop.
pub(crate) fn stop(flags: zero_optim::ReducedFlags) -> bool {
    flags.any & STOP != 0
}

/// The signal that requested the end of the run, on whichever rank; of several the lowest.
/// Collective, once all ranks know of the request.
pub(crate) fn signal<D: Device>(
    rank: &Rank<D>,
    own: &AtomicUsize,
) -> Result<Option<i32>, TrainError> {
    // Signals have numbers up to 64.
    let own = u8::try_from(own.load(Ordering::SeqCst)).unwrap_or_default();
    let all = RankExchange::of(rank).all_gather(&[own])?;
    Ok(all.into_iter().filter(|n| *n != 0).min().map(i32::from))
}

/// Whether all ranks are ready to advance the save in progress.
pub(crate) fn ready(flags: zero_optim::ReducedFlags) -> bool {
    flags.all & READY != 0
}

impl<D: Device> Drop for Flags<'_, D> {
    /// Drains the compute stream.
    fn drop(&mut self) {
        // Recording fails only on a closed stream, which no longer uses the block.
        let _closed = self.device.record_use(&self.rank.compute);
        // After a failure or a timeout a copy may still be queued, so the memory is leaked.
        if self
            .rank
            .compute
            .synchronize(self.rank.settings.host_limit())
            .is_ok()
            && let Some(words) = self.words
        {
            // SAFETY: allocated with this size; every operation on it has run.
            unsafe {
                self.rank
                    .host
                    .memory
                    .deallocate(words.cast(), size_of::<Words>())
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use zero_alloc::cuda::{CudaDevice, PinnedMemory};
    use zero_alloc::host::{HostDevice, Monitor, Timeline};
    use zero_comm::Solo;
    use zero_kernels::cuda::CudaKernels;
    use zero_shard::{ParamSpec, UnitSpec, ZeroStage};

    use super::*;
    use crate::offload::settings::OffloadSettings;
    use crate::rank::HostSide;
    use crate::rank_bytes::tests::settings;
    use crate::settings::Settings;
    use crate::units::RunUnits;

    const LIMIT: Duration = Duration::from_secs(60);

    fn rank(device: &CudaDevice) -> Rank<CudaDevice> {
        let units = [UnitSpec::new("unit", [ParamSpec::new("weight", [16])])];
        let comm = Solo::new(device.clone());
        let settings = Settings {
            limit: LIMIT,
            ..settings(ZeroStage::One, OffloadSettings::default())
        };

        let units = RunUnits::of(&settings, &units, 1).unwrap();
        let device = device.clone();
        let comm = Arc::new(comm);
        Rank::new(
            device,
            Timeline::new(),
            comm,
            units,
            Vec::new(),
            &settings,
            |device, _| {
                let memory = Arc::new(PinnedMemory::new(device));
                let host = HostSide::new(&HostDevice::new(), memory, None, 1)?;
                Ok((Arc::new(CudaKernels::new(device)?), host))
            },
        )
        .unwrap()
    }

    /// The flags of three steps, which the device reads after a request.
    #[test]
    #[ignore = "needs a CUDA device"]
    fn cuda_request_counts_in_the_step_under_way() {
        let device = CudaDevice::open(0).unwrap();
        let rank = rank(&device);
        let flags = Flags::new(&rank).unwrap();
        let kept = rank
            .pool
            .allocate(3 * BYTES, DType::U8, Purpose::Workspace, &rank.compute)
            .unwrap();
        // SAFETY: used on the compute stream, which is drained before the block is dropped.
        let kept = unsafe { kept.slice() };

        for requested in [false, true] {
            let cancel = Arc::<AtomicBool>::default();
            let gate = Arc::new(Monitor::new(false));
            let held = Arc::clone(&gate);
            let hold =
                move || held.wait_until(LIMIT, || "the test".into(), |open| open.then_some(()));
            rank.compute.enqueue_host("hold", hold).unwrap();
            let enqueue = |(step, ready)| {
                let enqueued = flags.enqueue(&cancel, ready).unwrap();
                let copy = kept.slice(step * BYTES..(step + 1) * BYTES);
                // SAFETY: the same memory as bytes, used on the compute stream.
                let from = unsafe {
                    AnySlice::from_raw_parts(
                        enqueued.flags.as_ptr().cast(),
                        BYTES,
                        DType::U8,
                        copy.device(),
                    )
                };
                device.copy(&rank.compute, from, copy).unwrap();
                enqueued
            };
            let steps = [true, false, true]
                .into_iter()
                .enumerate()
                .map(enqueue)
                .collect::<Vec<_>>();
            cancel.store(requested, Ordering::Relaxed);
            let words = flags.words().unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let start = Instant::now();
                    let stops = |word: &AtomicU64| word.load(Ordering::Relaxed) & STOP != 0;
                    while requested && !words.iter().all(stops) && start.elapsed() < LIMIT {
                        std::thread::yield_now();
                    }
                    gate.update(|open| *open = true);
                });
                flags.watch(&cancel, &steps[2]).unwrap();
            });
            let mut seen = [0; 3 * BYTES];
            device
                .download(&rank.compute, kept, &mut seen, LIMIT)
                .unwrap();
            let stop = if requested { STOP } else { 0 };
            let expected = [stop | READY, stop, stop | READY];
            assert_eq!(
                seen.as_chunks()
                    .0
                    .iter()
                    .map(|b| u64::from_ne_bytes(*b))
                    .collect::<Vec<_>>(),
                expected
            );
        }
    }
}
