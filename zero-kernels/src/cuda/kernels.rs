//! The operations on CUDA streams. `launch` builds each launch; kernels are loaded at first use.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use zero_alloc::cuda::{CudaDevice, CudaStream, Function};
use zero_alloc::device::{
    AnySlice, DType, Device, DeviceError, DeviceId, DeviceSlice, Memory, Stream,
};
use zero_shard::BlockFormat;

use super::every_kernel::{EVERY_KERNEL_BYTES, entries_of, every_kernel};
use super::launch::{self, Launch, Param};
use super::newton_schulz::{MatrixProducts, Parts, orthogonalise_scratch_elems};
use super::source::SOURCES;
use super::{Functions, Loader, launch_blocks};
use crate::step::RankStats;
use crate::{
    AdvanceArgs, AverageCodecs, Codec, EncodeSums, Feedback, GradStats, KernelError, Kernels,
    MatrixRows, OrthogonaliseArgs, Segments, UpdateArgs, UpdateRule, check,
};

/// The operations on one GPU's streams. A clone is another handle of the same kernels.
///
/// A source is compiled and loaded when the first of its kernels is launched, or by [`Self::warm`].
/// Loading synchronises with the device, so it must not happen while a collective waits for another
/// rank of the process.
#[derive(Clone, Debug)]
pub struct CudaKernels {
    loader: Loader,
    loaded: Arc<[OnceLock<Functions>; SOURCES.len()]>,
    products: Option<Arc<dyn MatrixProducts>>,
}

impl CudaKernels {
    /// Operations on `device`, compiled by NVRTC and cached in the user's folder ([`Loader::new`]).
    ///
    /// # Errors
    /// NVRTC is missing, or supports no architecture that the device can run.
    pub fn new(device: &CudaDevice) -> Result<Self, KernelError> {
        Ok(Self::with_loader(Loader::new(device)?))
    }

    /// Operations on the loader's device.
    pub fn with_loader(loader: Loader) -> Self {
        Self {
            loader,
            loaded: Arc::default(),
            products: None,
        }
    }

    /// With products for [`Kernels::orthogonalise`], which is refused without.
    #[must_use]
    pub fn with_products(self, products: Arc<dyn MatrixProducts>) -> Self {
        Self {
            products: Some(products),
            ..self
        }
    }

    fn products(&self) -> Result<&Arc<dyn MatrixProducts>, KernelError> {
        self.products.as_ref().ok_or(KernelError::Refused {
            what: "orthogonalise",
            reason: "the kernels have no matrix products: pass some to CudaKernels::with_products",
        })
    }

    /// Compiles and loads all kernels and runs each once on empty ranges; afterwards no launch
    /// compiles, loads or allocates. Blocks the host, for at most `limit` while the kernels run.
    ///
    /// # Errors
    /// A kernel does not compile, or the device failed.
    pub fn warm(&self, stream: &CudaStream, limit: Duration) -> Result<(), KernelError> {
        for index in 0..SOURCES.len() {
            self.source(index)?;
        }
        let device = self.loader.device();
        let bytes = device.granularity_bytes().max(EVERY_KERNEL_BYTES);
        let memory = device.allocate(bytes)?;
        // SAFETY: allocated above, used on `stream` only, and freed after that is drained.
        let all = unsafe {
            AnySlice::from_raw_parts(memory.as_ptr(), EVERY_KERNEL_BYTES, DType::U8, device.id())
        };

        let enqueue = || {
            device.fill_zero(stream, all)?;
            let mut launches = every_kernel(all.as_ptr() as usize, device.id())?.into_iter();
            // SAFETY: these launches access only the zeroed bytes.
            launches.try_for_each(|launch| unsafe { self.launch(stream, "warm", launch) })
        };

        let enqueued = enqueue();
        let drained = stream.synchronize(limit);
        if drained.is_ok() {
            // SAFETY: as above. If the stream does not drain, the memory leaks.
            unsafe { device.deallocate(memory, bytes) };
        }

        enqueued.and(drained.map_err(KernelError::from))
    }

    /// The id of the memory that the kernels can access.
    fn id(&self) -> DeviceId {
        self.loader.device().id()
    }

    /// The kernels of source `index`.
    fn source(&self, index: usize) -> Result<&Functions, KernelError> {
        let slot = &self.loaded[index];
        if let Some(functions) = slot.get() {
            return Ok(functions);
        }
        let source = &SOURCES[index];
        let functions = self.loader.load(source, &entries_of(source.name)?)?;
        Ok(slot.get_or_init(|| functions))
    }

    fn function(&self, launch: &Launch) -> Result<&Function, KernelError> {
        let index = SOURCES.iter().position(|s| s.name == launch.source);
        let functions = index.map(|index| self.source(index)).transpose()?;
        functions.and_then(|f| f.get(launch.entry)).ok_or_else(|| {
            let message = format!("{} has no {}", launch.source, launch.entry);
            DeviceError::Driver {
                call: "kernel",
                message,
            }
            .into()
        })
    }

    /// Enqueues `launch`.
    ///
    /// # Safety
    /// The memory at its addresses is valid until it has run, and conflicting accesses are ordered.
    unsafe fn launch(
        &self,
        stream: &CudaStream,
        op: &'static str,
        launch: Launch,
    ) -> Result<(), KernelError> {
        stream.check_device(op, self.id())?;
        let function = self.function(&launch)?;
        let (grid, block, mut params) =
            ([launch.blocks, 1, 1], [launch.threads, 1, 1], launch.params);
        let mut args: Vec<_> = params.iter_mut().map(Param::as_mut_ptr).collect();
        let enqueue = || {
            // SAFETY: `params` has the kernel's parameters in order and with their types
            // (tests/nvrtc.rs compares them with the compiled kernels); the caller guarantees the
            // memory.
            unsafe { function.launch(stream, grid, block, 0, &mut args) }
        };
        Ok(stream.labelled(op, enqueue)?)
    }

    /// Enqueues the launch of a checked operation, unless its range is empty.
    pub(super) fn enqueue(
        &self,
        stream: &CudaStream,
        op: &'static str,
        launch: Launch,
    ) -> Result<(), KernelError> {
        if launch.blocks == 0 {
            return Ok(());
        }
        // SAFETY: the addresses and lengths are those of slices that `check` compared with one
        // another; the creator of a slice guarantees that its memory is valid and its accesses
        // ordered.
        unsafe { self.launch(stream, op, launch) }
    }
}

// SAFETY: each operation is launches on the stream, of kernels within their arguments (`launch`).
unsafe impl Kernels<CudaDevice> for CudaKernels {
    fn update(
        &self,
        stream: &CudaStream,
        rule: &Arc<dyn UpdateRule>,
        args: UpdateArgs,
    ) -> Result<(), KernelError> {
        let launch = launch::update(self.id(), &**rule, &args)?;
        self.enqueue(stream, rule.label(&args.form()), launch)
    }

    fn orthogonalise(
        &self,
        stream: &CudaStream,
        args: OrthogonaliseArgs,
    ) -> Result<(), KernelError> {
        let scratch_elems = self.orthogonalise_scratch_elems(args.rows, args.cols);
        check::orthogonalise(self.id(), &args, scratch_elems)?;
        let products = self.products()?;
        match Parts::new(args.rows, args.cols, products.workspace_bytes()) {
            Some(parts) if scratch_elems > 0 => self.newton_schulz(stream, &args, products, parts),
            // `check` refuses scratch memory whose size overflows.
            _ => Ok(()),
        }
    }

    fn can_orthogonalise(&self) -> Result<(), KernelError> {
        self.products().map(|_| ())
    }

    fn orthogonalise_scratch_elems(&self, rows: usize, cols: usize) -> usize {
        let workspace_bytes = self.products.as_ref().map_or(0, |of| of.workspace_bytes());
        orthogonalise_scratch_elems(rows, cols, workspace_bytes)
    }

    fn cast(
        &self,
        stream: &CudaStream,
        src: AnySlice,
        dst: AnySlice,
        scale: f32,
    ) -> Result<(), KernelError> {
        self.enqueue(stream, "cast", launch::cast(self.id(), src, dst, scale)?)
    }

    fn cast_rows(
        &self,
        stream: &CudaStream,
        src: MatrixRows,
        dst: MatrixRows,
        shape: [usize; 2],
        scale: f32,
    ) -> Result<(), KernelError> {
        let launch = launch::cast_rows(self.id(), src, dst, shape, scale)?;
        self.enqueue(stream, "cast_rows", launch)
    }

    fn updates(&self, codec: Codec) -> bool {
        let averages = [
            Codec::Fp32.into(),
            AverageCodecs::EIGHT_BITS,
            AverageCodecs::FOUR_BITS,
        ];
        averages
            .iter()
            .any(|codecs| [codecs.signed, codecs.positive].contains(&codec))
    }

    fn encode_blocks(
        &self,
        stream: &CudaStream,
        format: BlockFormat,
        src: AnySlice,
        blocks: AnySlice,
        feedback: Option<Feedback>,
        sums: Option<DeviceSlice<EncodeSums>>,
    ) -> Result<(), KernelError> {
        let arrays = (src, blocks);
        let launch = launch_blocks::encode_blocks(self.id(), format, arrays, feedback, sums)?;
        self.enqueue(stream, "encode_blocks", launch)
    }

    fn decode_blocks(
        &self,
        stream: &CudaStream,
        format: BlockFormat,
        blocks: AnySlice,
        parts: usize,
        dst: AnySlice,
    ) -> Result<(), KernelError> {
        let launch = launch_blocks::decode_blocks(self.id(), format, (blocks, parts), dst)?;
        self.enqueue(stream, "decode_blocks", launch)
    }

    fn pack(
        &self,
        stream: &CudaStream,
        parts: &[(AnySlice, usize)],
        segments: Segments,
        dst: AnySlice,
    ) -> Result<(), KernelError> {
        let mut launches = launch::pack(self.id(), parts, segments, dst)?.into_iter();
        launches.try_for_each(|launch| self.enqueue(stream, "pack", launch))
    }

    fn accumulate(
        &self,
        stream: &CudaStream,
        grad: AnySlice,
        acc: DeviceSlice<f32>,
    ) -> Result<(), KernelError> {
        self.enqueue(
            stream,
            "accumulate",
            launch::accumulate(self.id(), grad, acc)?,
        )
    }

    fn stats_scratch_elems(&self, lens: &[usize]) -> usize {
        launch::stats_scratch_elems(lens)
    }

    fn grad_stats(
        &self,
        stream: &CudaStream,
        grads: &[AnySlice],
        scratch: DeviceSlice<f64>,
        out: DeviceSlice<GradStats>,
    ) -> Result<(), KernelError> {
        for [chunks, combine] in launch::grad_stats(self.id(), grads, scratch, out)? {
            self.enqueue(stream, "grad_stats", chunks)?;
            self.enqueue(stream, "grad_stats_combine", combine)?;
        }
        Ok(())
    }

    fn rank_stats(
        &self,
        stream: &CudaStream,
        units: DeviceSlice<GradStats>,
        loss: DeviceSlice<f64>,
        flags: DeviceSlice<u64>,
        out: DeviceSlice<RankStats>,
    ) -> Result<(), KernelError> {
        self.enqueue(
            stream,
            "rank_stats",
            launch::rank_stats(self.id(), units, loss, flags, out)?,
        )
    }

    fn advance_step(&self, stream: &CudaStream, args: AdvanceArgs) -> Result<(), KernelError> {
        self.enqueue(
            stream,
            "advance_step",
            launch::advance_step(self.id(), &args)?,
        )
    }
}
