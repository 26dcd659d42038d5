//! Operations on flat ranges that are recorded: their labels, and the bytes that they move.

use zero_alloc::device::{AnySlice, Device, DeviceSlice};
use zero_alloc::host::HostStream;
use zero_alloc::schedule::Work;
use zero_kernels::{
    AdamArgs, AdvanceArgs, GradStats, KernelError, Kernels, RankStats, RemainderArgs, Segments,
};

/// The operations of a ZeRO step on streams that record.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ScheduledKernels;

fn enqueue(stream: &HostStream, label: &'static str, bytes: usize) -> Result<(), KernelError> {
    Ok(stream.enqueue_sized(label, Work::bytes(bytes as u64), || Ok(()))?)
}

// SAFETY: an operation uses no memory.
unsafe impl<D: Device<Stream = HostStream>> Kernels<D> for ScheduledKernels {
    /// Reads the gradient, reads and writes master and moments, writes the parameter.
    fn adam(&self, stream: &HostStream, args: AdamArgs) -> Result<(), KernelError> {
        let state = 2 * 3 * args.master.len() * size_of::<f32>();
        let param = args.param_out.map_or(0, AnySlice::len_bytes);
        enqueue(stream, "adam", state + args.grad.len_bytes() + param)
    }

    /// Reads the gradient, reads and writes parameter, remainder and moments.
    fn adam_remainder(&self, stream: &HostStream, args: RemainderArgs) -> Result<(), KernelError> {
        let of_elem = 2 * (2 * size_of::<f32>() + 2 * size_of::<u16>());
        let bytes = args.param.len() * of_elem + args.grad.len_bytes();
        enqueue(stream, "adam_remainder", bytes)
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
