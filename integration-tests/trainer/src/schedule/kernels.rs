//! Operations on flat ranges that are recorded: their labels, and the bytes that they move.

use std::sync::Arc;

use zero_alloc::device::{AnySlice, Device, DeviceSlice};
use zero_alloc::host::HostStream;
use zero_alloc::schedule::Work;
use zero_kernels::{
    AdvanceArgs, Codec, EncodeSums, Feedback, GradStats, KernelError, Kernels, MatrixRows,
    OrthogonaliseArgs, RankStats, Segments, UpdateArgs, UpdateRule,
};
use zero_shard::BlockFormat;

/// The operations of a ZeRO step on streams that record.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ScheduledKernels;

fn enqueue(stream: &HostStream, label: &'static str, bytes: usize) -> Result<(), KernelError> {
    Ok(stream.enqueue_sized(label, Work::bytes(bytes as u64), || Ok(()))?)
}

// SAFETY: an operation uses no memory.
unsafe impl<D: Device<Stream = HostStream>> Kernels<D> for ScheduledKernels {
    /// Reads the gradient, reads and writes weights and slots.
    fn update(
        &self,
        stream: &HostStream,
        rule: &Arc<dyn UpdateRule>,
        args: UpdateArgs,
    ) -> Result<(), KernelError> {
        enqueue(stream, rule.label(&args.form()), args.bytes())
    }

    /// Reads and writes the matrix; the class is the number of launches. Each iteration has
    /// products `[s, s, l]`, `[s, s, s]` and `[s, l, s]` of its shorter side s and its longer side
    /// l.
    fn orthogonalise(
        &self,
        stream: &HostStream,
        args: OrthogonaliseArgs,
    ) -> Result<(), KernelError> {
        let bytes = 2 * args.rows * args.cols * size_of::<f32>();
        let short = args.rows.min(args.cols);
        let of_iteration = 4 * args.rows * args.cols * short + 2 * short.pow(3);
        let flops = u64::from(args.rule.steps) * of_iteration as u64;
        let launches = 3 * args.rule.steps + 5;
        let work = Work::bytes(bytes as u64).flops(flops).class(launches);
        Ok(stream.enqueue_sized("orthogonalise", work, || Ok(()))?)
    }

    /// A copy of the matrix and two squares, without the host's padding.
    fn orthogonalise_scratch_elems(&self, rows: usize, cols: usize) -> usize {
        rows * cols + 2 * rows.min(cols).pow(2)
    }

    fn cast(
        &self,
        stream: &HostStream,
        src: AnySlice,
        dst: AnySlice,
        _scale: f32,
    ) -> Result<(), KernelError> {
        enqueue(stream, "cast", src.len_bytes() + dst.len_bytes())
    }

    fn cast_rows(
        &self,
        stream: &HostStream,
        src: MatrixRows,
        dst: MatrixRows,
        [rows, cols]: [usize; 2],
        _scale: f32,
    ) -> Result<(), KernelError> {
        let width = |of: MatrixRows| of.data.dtype().size_bytes();
        enqueue(stream, "cast_rows", rows * cols * (width(src) + width(dst)))
    }

    fn updates(&self, _codec: Codec) -> bool {
        true
    }

    /// Reads the source, writes the blocks, and reads and writes the error.
    fn encode_blocks(
        &self,
        stream: &HostStream,
        _format: BlockFormat,
        src: AnySlice,
        blocks: AnySlice,
        feedback: Option<Feedback>,
        _sums: Option<DeviceSlice<EncodeSums>>,
    ) -> Result<(), KernelError> {
        let error = feedback.map_or(0, |feedback| feedback.error.erase().len_bytes());
        let bytes = src.len_bytes() + blocks.len_bytes() + 2 * error;
        enqueue(stream, "encode_blocks", bytes)
    }

    fn decode_blocks(
        &self,
        stream: &HostStream,
        _format: BlockFormat,
        blocks: AnySlice,
        _parts: usize,
        dst: AnySlice,
    ) -> Result<(), KernelError> {
        let bytes = blocks.len_bytes() + dst.len_bytes();
        enqueue(stream, "decode_blocks", bytes)
    }

    /// Reads the parts' elements within the segments, and writes all of `dst`.
    fn pack(
        &self,
        stream: &HostStream,
        parts: &[(AnySlice, usize)],
        _segments: Segments,
        dst: AnySlice,
    ) -> Result<(), KernelError> {
        let whole: usize = parts.iter().map(|(part, _)| part.len()).sum();
        let part = parts.first();
        let read = part.map_or(0, |(part, _)| {
            dst.len().min(whole) * part.dtype().size_bytes()
        });
        enqueue(stream, "pack", read + dst.len_bytes())
    }

    fn accumulate(
        &self,
        stream: &HostStream,
        grad: AnySlice,
        acc: DeviceSlice<f32>,
    ) -> Result<(), KernelError> {
        let bytes = grad.len_bytes() + 2 * acc.erase().len_bytes();
        enqueue(stream, "accumulate", bytes)
    }

    fn stats_scratch_elems(&self, _lens: &[usize]) -> usize {
        0
    }

    fn grad_stats(
        &self,
        stream: &HostStream,
        grads: &[AnySlice],
        _scratch: DeviceSlice<f64>,
        _out: DeviceSlice<GradStats>,
    ) -> Result<(), KernelError> {
        let bytes = grads.iter().map(|grad| grad.len_bytes()).sum();
        enqueue(stream, "grad_stats", bytes)
    }

    fn rank_stats(
        &self,
        stream: &HostStream,
        units: DeviceSlice<GradStats>,
        _loss: DeviceSlice<f64>,
        _flags: DeviceSlice<u64>,
        _out: DeviceSlice<RankStats>,
    ) -> Result<(), KernelError> {
        let bytes = units.len() * size_of::<GradStats>();
        enqueue(stream, "rank_stats", bytes)
    }

    fn advance_step(&self, stream: &HostStream, args: AdvanceArgs) -> Result<(), KernelError> {
        let bytes = args.ranks.len() * size_of::<RankStats>();
        enqueue(stream, "advance_step", bytes)
    }
}
