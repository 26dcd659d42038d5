//! The operations on CUDA streams: planned by `plan`, loaded once, launched.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use zero_alloc::cuda::{CudaDevice, CudaStream, Function};
use zero_alloc::device::{AnySlice, DType, Device, DeviceError, DeviceSlice, Memory, Stream};

use super::plan::{self, Launch};
use super::{Functions, Loader, SOURCES, entry};
use crate::kernels::{DecideArgs, RemainderArgs};
use crate::step::RankStats;
use crate::{AdamArgs, GradStats, KernelError, Kernels};

/// The operations on one GPU's streams. Cloning gives another handle of the same kernels.
///
/// A source is compiled and loaded when the first of its kernels is launched, or all of them by [`Self::warm`]: loading
/// synchronises with the device, and so must not happen while a collective waits for another rank of the process.
#[derive(Clone, Debug)]
pub struct CudaKernels {
    loader: Loader,
    loaded: Arc<[OnceLock<Functions>; SOURCES.len()]>,
}

impl CudaKernels {
    /// Operations on `device`, compiled by NVRTC and kept in the user's folder ([`Loader::new`]).
    ///
    /// # Errors
    /// NVRTC is missing, or knows nothing that the device could run.
    pub fn new(device: &CudaDevice) -> Result<Self, KernelError> {
        Ok(Self::with_loader(Loader::new(device)?))
    }

    /// Operations on the loader's device.
    pub fn with_loader(loader: Loader) -> Self {
        Self { loader, loaded: Arc::default() }
    }

    /// Compiles and loads all kernels and runs each once, on nothing: afterwards no launch compiles, loads or
    /// allocates. Blocks the host, at most `limit` for the runs.
    ///
    /// # Errors
    /// A kernel does not compile, or the device failed.
    pub fn warm(&self, stream: &CudaStream, limit: Duration) -> Result<(), KernelError> {
        for index in 0..SOURCES.len() {
            self.source(index)?;
        }
        let device = self.loader.device();
        let bytes = device.granularity_bytes().max(WARM_BYTES);
        let memory = device.allocate(bytes)?;
        // SAFETY: allocated just now, used on `stream` alone, and given back when that is drained.
        let all = unsafe { AnySlice::from_raw_parts(memory.as_ptr(), WARM_BYTES, DType::U8) };
        let ran = device.fill_zero(stream, all).map_err(KernelError::from).and_then(|()| {
            let launches = plan::idle(all.as_ptr() as u64);
            // SAFETY: idle launches touch only the zeroes at the given place.
            launches.iter().try_for_each(|launch| unsafe { self.launch(stream, "warm", launch) })
        });
        let drained = stream.synchronize(limit);
        if drained.is_ok() {
            // SAFETY: as above; a device that did not drain keeps the few bytes.
            unsafe { device.deallocate(memory, bytes) };
        }
        ran.and(drained.map_err(KernelError::from))
    }

    /// The kernels of source `index`.
    fn source(&self, index: usize) -> Result<&Functions, KernelError> {
        let slot = &self.loaded[index];
        if let Some(functions) = slot.get() {
            return Ok(functions);
        }
        let source = &SOURCES[index];
        let functions = self.loader.load(source, &entry::of_source(source.name))?;
        Ok(slot.get_or_init(|| functions))
    }

    fn function(&self, launch: &Launch) -> Result<&Function, KernelError> {
        let index = SOURCES.iter().position(|s| s.name == launch.source);
        let functions = index.map(|index| self.source(index)).transpose()?;
        functions.and_then(|f| f.get(launch.entry)).ok_or_else(|| {
            let message = format!("{} has no {}", launch.source, launch.entry);
            DeviceError::Driver { call: "kernel", message }.into()
        })
    }

    /// Enqueues `launch`.
    ///
    /// # Safety
    /// What its addresses point to is valid until it has run, and conflicting accesses are ordered.
    unsafe fn launch(&self, stream: &CudaStream, op: &'static str, launch: &Launch) -> Result<(), KernelError> {
        let function = self.function(launch)?;
        let mut params = launch.params.clone();
        let mut args: Vec<_> = params.iter_mut().map(plan::Param::as_mut_ptr).collect();
        let (grid, block) = ([launch.blocks, 1, 1], [launch.threads, 1, 1]);
        let enqueue = || {
            // SAFETY: `plan` lists the kernel's parameters in its order and with its types, which tests hold against
            // the compiled kernels; the memory is the caller's promise.
            unsafe { function.launch(stream, grid, block, 0, &mut args) }
        };
        Ok(stream.labelled(op, enqueue)?)
    }

    /// Enqueues what a checked operation became, if anything.
    fn enqueue(&self, stream: &CudaStream, op: &'static str, launch: Option<&Launch>) -> Result<(), KernelError> {
        let Some(launch) = launch else { return Ok(()) };
        // SAFETY: the addresses and lengths are those of slices that `plan` checked against one another; the maker of a
        // slice promised that its memory is valid and its accesses ordered.
        unsafe { self.launch(stream, op, launch) }
    }
}

/// Room for what idle launches touch.
const WARM_BYTES: usize = 1024;
const _: () = assert!(WARM_BYTES >= plan::IDLE_BYTES);

impl Kernels<CudaDevice> for CudaKernels {
    fn adam(&self, stream: &CudaStream, args: AdamArgs) -> Result<(), KernelError> {
        self.enqueue(stream, "adam", plan::adam(&args)?.as_ref())
    }

    fn adam_remainder(&self, stream: &CudaStream, args: RemainderArgs) -> Result<(), KernelError> {
        self.enqueue(stream, "adam_remainder", plan::adam_remainder(&args)?.as_ref())
    }

    fn cast(&self, stream: &CudaStream, src: AnySlice, dst: AnySlice, scale: f32) -> Result<(), KernelError> {
        self.enqueue(stream, "cast", plan::cast(src, dst, scale)?.as_ref())
    }

    fn accumulate(&self, stream: &CudaStream, grad: AnySlice, acc: DeviceSlice<f32>) -> Result<(), KernelError> {
        self.enqueue(stream, "accumulate", plan::accumulate(grad, acc)?.as_ref())
    }

    fn stats_scratch_elems(&self, len: usize) -> usize {
        plan::stats_scratch_elems(len)
    }

    fn grad_stats(
        &self,
        stream: &CudaStream,
        grad: AnySlice,
        scratch: DeviceSlice<f64>,
        out: DeviceSlice<GradStats>,
    ) -> Result<(), KernelError> {
        let (chunks, combine) = plan::grad_stats(grad, scratch, out)?;
        self.enqueue(stream, "grad_stats", chunks.as_ref())?;
        self.enqueue(stream, "grad_stats_combine", Some(&combine))
    }

    fn make_vote(
        &self,
        stream: &CudaStream,
        units: DeviceSlice<GradStats>,
        loss: DeviceSlice<f64>,
        flags: DeviceSlice<u64>,
        out: DeviceSlice<RankStats>,
    ) -> Result<(), KernelError> {
        self.enqueue(stream, "make_vote", Some(&plan::make_vote(units, loss, flags, out)?))
    }

    fn decide_step(&self, stream: &CudaStream, args: DecideArgs) -> Result<(), KernelError> {
        self.enqueue(stream, "decide_step", Some(&plan::decide_step(&args)?))
    }
}
