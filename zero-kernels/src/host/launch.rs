//! The operations on host streams. The call checks the arguments; the work runs in stream order.

use std::sync::Arc;

use half::{bf16, f16};
use zero_alloc::device::{AnySlice, DType, DeviceError, DeviceId, DeviceSlice};
use zero_alloc::host::{HostDevice, HostStream};
use zero_shard::BlockFormat;

use super::pack::copies;
use super::update::FloatSlice;
use super::{Workers, coded, orthogonalise};
use crate::step::{self, RankStats};
use crate::{
    AdvanceArgs, Codec, EncodeSums, Feedback, Float, GradStats, KernelError, Kernels, MatrixRows,
    OrthogonaliseArgs, Segments, UpdateArgs, UpdateRule, check,
};

/// The operations on host streams. Updates, orthogonalise, cast, pack, accumulate and grad_stats are
/// split over a fixed number of threads; the others run on the stream's thread.
#[derive(Clone, Debug)]
pub struct HostKernels {
    workers: Workers,
}

impl HostKernels {
    /// Operations split over `threads` threads (0 or 1: only the stream's thread).
    ///
    /// # Errors
    /// [`KernelError::Threads`].
    pub fn new(threads: usize) -> Result<Self, KernelError> {
        Ok(Self {
            workers: Workers::new(threads)?,
        })
    }
}

/// Converts an error of a running operation: of a rule, since the call checked the arguments.
fn failed(error: KernelError) -> DeviceError {
    DeviceError::Driver {
        call: "host kernel",
        message: error.to_string(),
    }
}

/// Reads one element of host memory.
///
/// # Safety
/// As for [`DeviceSlice::as_host`].
unsafe fn read_first<T: Copy>(slice: DeviceSlice<T>) -> Option<T> {
    // SAFETY: the caller upholds the contract of `as_host`.
    unsafe { slice.as_host() }.first().copied()
}

/// Runs `$body` with `$t` as the Rust type of `$dtype`, or returns the error.
macro_rules! with_float {
    ($what:literal, $dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $t = f32;
                $body
            }
            DType::Bf16 => {
                type $t = bf16;
                $body
            }
            DType::F16 => {
                type $t = f16;
                $body
            }
            dtype => Err(KernelError::Unsupported { what: $what, dtype }),
        }
    };
}

// SAFETY: each operation is one host operation on the stream, over Rust slices of its arguments.
unsafe impl Kernels<HostDevice> for HostKernels {
    fn update(
        &self,
        stream: &HostStream,
        rule: &Arc<dyn UpdateRule>,
        args: UpdateArgs,
    ) -> Result<(), KernelError> {
        check::update(DeviceId::HOST, &**rule, &args)?;
        let workers = self.workers.clone();
        let rule = Arc::clone(rule);
        stream.enqueue(rule.label(&args.form()), move || {
            // SAFETY: `check` found host memory; its maker promised validity and ordered accesses.
            let scalars = unsafe { read_first(args.scalars) }.unwrap_or_default();
            if scalars.skip != 0 {
                return Ok(());
            }
            let updated = workers.on_ranges(args.elems(), |range| {
                // SAFETY: as above, `check` found what is written disjoint from all others, and
                // ranges do not overlap.
                unsafe { coded::update(&*rule, &args.slice(range), scalars) }
            });
            updated.map_err(failed)
        })?;
        Ok(())
    }

    fn orthogonalise(
        &self,
        stream: &HostStream,
        args: OrthogonaliseArgs,
    ) -> Result<(), KernelError> {
        let scratch_elems = orthogonalise::orthogonalise_scratch_elems(args.rows, args.cols);
        check::orthogonalise(DeviceId::HOST, &args, scratch_elems)?;
        let workers = self.workers.clone();
        stream.enqueue("orthogonalise", move || {
            // SAFETY: `check` found host memory, and the scratch disjoint from the values; their
            // maker promised validity and ordered accesses.
            unsafe { orthogonalise::orthogonalise(&workers, &args) };
            Ok(())
        })?;
        Ok(())
    }

    fn orthogonalise_scratch_elems(&self, rows: usize, cols: usize) -> usize {
        orthogonalise::orthogonalise_scratch_elems(rows, cols)
    }

    fn cast(
        &self,
        stream: &HostStream,
        src: AnySlice,
        dst: AnySlice,
        scale: f32,
    ) -> Result<(), KernelError> {
        check::cast(DeviceId::HOST, src, dst)?;
        let workers = self.workers.clone();
        with_float!("cast: src", src.dtype(), S => with_float!("cast: dst", dst.dtype(), D => {
            let src = src.typed::<S>()?;
            let dst = dst.typed::<D>()?;
            stream.enqueue("cast", move || {
                // SAFETY: `check` found host memory; its maker promised validity and ordered
                // accesses.
                let src = unsafe { src.as_host() };
                // SAFETY: as above, and `check` found it disjoint from `src`.
                let dst = unsafe { dst.as_host_mut() };
                workers.cast(src, dst, scale).map_err(failed)
            })?;
            Ok(())
        }))
    }

    fn cast_rows(
        &self,
        stream: &HostStream,
        src: MatrixRows,
        dst: MatrixRows,
        [rows, cols]: [usize; 2],
        scale: f32,
    ) -> Result<(), KernelError> {
        check::cast_rows(DeviceId::HOST, src, dst, [rows, cols])?;
        if cols == 0 {
            return Ok(());
        }
        let workers = self.workers.clone();
        with_float!("cast_rows: src", src.data.dtype(), S => with_float!("cast_rows: dst", dst.data.dtype(), D => {
            let from = src.data.typed::<S>()?;
            let to = dst.data.typed::<D>()?;
            let at = move |row: usize, stride: usize| row * stride..row * stride + cols;
            let rows_of_part = (workers.part_elems(rows * cols) / cols).max(1);
            stream.enqueue("cast_rows", move || {
                let parts = (0..rows).step_by(rows_of_part);
                workers.each(parts, |first| {
                    for row in first..rows.min(first + rows_of_part) {
                        // SAFETY: `check` found host memory; its maker promised validity and
                        // ordered accesses.
                        let src = unsafe { from.slice(at(row, src.stride)).as_host() };
                        // SAFETY: as above, and `check` found it disjoint from `src`; a row is of
                        // one part.
                        let dst = unsafe { to.slice(at(row, dst.stride)).as_host_mut() };
                        super::cast::run(src, dst, scale);
                    }
                });
                Ok(())
            })?;
            Ok(())
        }))
    }

    fn updates(&self, _codec: Codec) -> bool {
        true
    }

    fn encode_blocks(
        &self,
        stream: &HostStream,
        format: BlockFormat,
        src: AnySlice,
        blocks: AnySlice,
        feedback: Option<Feedback>,
        sums: Option<DeviceSlice<EncodeSums>>,
    ) -> Result<(), KernelError> {
        check::encode_blocks(DeviceId::HOST, format, (src, blocks), feedback, sums)?;
        let workers = self.workers.clone();
        stream.enqueue("encode_blocks", move || {
            // Whole entries of the sums, since parts are whole chunks of the statistics.
            let encoded = workers.on_ranges(src.len(), |range| {
                let bytes = format.bytes(range.start)..format.bytes(range.end);
                let entries = range.start / EncodeSums::ELEMS..EncodeSums::count(range.end);
                // SAFETY: `check` found host memory; its maker promised validity and ordered
                // accesses.
                let src = unsafe { FloatSlice::of(src.slice(range.clone())) }?;
                // SAFETY: as above; `check` found what is written disjoint from all others, and
                // ranges do not overlap.
                let blocks = unsafe { blocks.slice(bytes).typed()?.as_host_mut() };
                let feedback = feedback.map(|Feedback { error, keep }| {
                    // SAFETY: as for the blocks.
                    (unsafe { error.slice(range).as_host_mut() }, keep)
                });
                // SAFETY: as for the blocks.
                let sums = sums.map(|sums| unsafe { sums.slice(entries).as_host_mut() });
                coded::encode_blocks(format, src, blocks, feedback, sums)
            });
            encoded.map_err(failed)
        })?;
        Ok(())
    }

    fn decode_blocks(
        &self,
        stream: &HostStream,
        format: BlockFormat,
        blocks: AnySlice,
        parts: usize,
        dst: AnySlice,
    ) -> Result<(), KernelError> {
        check::decode_blocks(DeviceId::HOST, format, (blocks, parts), dst)?;
        let workers = self.workers.clone();
        with_float!("decode_blocks: dst", dst.dtype(), D => {
            let dst = dst.typed::<D>()?;
            stream.enqueue("decode_blocks", move || {
                // SAFETY: `check` found host memory; its maker promised validity and ordered
                // accesses.
                let blocks: &[u8] = unsafe { blocks.typed()?.as_host() };
                let decoded = workers.on_ranges(dst.len(), |range| {
                    // SAFETY: as above; ranges do not overlap.
                    let part = unsafe { dst.slice(range.clone()).as_host_mut() };
                    coded::decode_blocks(format, (blocks, parts), (dst.len(), range.start), part)
                });
                decoded.map_err(failed)
            })?;
            Ok(())
        })
    }

    fn pack(
        &self,
        stream: &HostStream,
        parts: &[(AnySlice, usize)],
        segments: Segments,
        dst: AnySlice,
    ) -> Result<(), KernelError> {
        check::pack(DeviceId::HOST, parts, segments, dst)?;
        if dst.is_empty() {
            return Ok(());
        }
        let workers = self.workers.clone();
        let copies = copies(parts, segments, dst);

        with_float!("pack: dst", dst.dtype(), D => {
            stream.enqueue("pack", move || {
                copies.iter().try_for_each(|(src, dst)| {
                    // SAFETY: `check` found host memory, disjoint from the parts; its maker
                    // promised validity and ordered accesses.
                    let dst = unsafe { dst.typed::<D>()?.as_host_mut() };
                    let Some(src) = src else {
                        dst.fill(D::from_f32(0.0));
                        return Ok(());
                    };
                    with_float!("pack: part", src.dtype(), S => {
                        // SAFETY: as for `dst`; nothing writes to it.
                        workers.cast(unsafe { src.typed::<S>()?.as_host() }, dst, 1.0)
                    })
                }).map_err(failed)
            })?;
            Ok(())
        })
    }

    fn accumulate(
        &self,
        stream: &HostStream,
        grad: AnySlice,
        acc: DeviceSlice<f32>,
    ) -> Result<(), KernelError> {
        check::accumulate(DeviceId::HOST, grad, acc)?;
        let workers = self.workers.clone();
        with_float!("accumulate: grad", grad.dtype(), G => {
            let grad = grad.typed::<G>()?;
            stream.enqueue("accumulate", move || {
                // SAFETY: `check` found host memory; its maker promised validity and ordered
                // accesses.
                let grad = unsafe { grad.as_host() };
                // SAFETY: as above, and `check` found it disjoint from `grad`.
                let acc = unsafe { acc.as_host_mut() };
                workers.accumulate(grad, acc).map_err(failed)
            })?;
            Ok(())
        })
    }

    /// Always 0: the host needs no scratch.
    fn stats_scratch_elems(&self, _lens: &[usize]) -> usize {
        0
    }

    fn grad_stats(
        &self,
        stream: &HostStream,
        grads: &[AnySlice],
        scratch: DeviceSlice<f64>,
        out: DeviceSlice<GradStats>,
    ) -> Result<(), KernelError> {
        check::grad_stats(DeviceId::HOST, grads, scratch, 0, out)?;
        let workers = self.workers.clone();
        let grads = grads.to_vec();
        stream.enqueue("grad_stats", move || {
            // SAFETY: `check` found host memory, disjoint from the gradients; its maker promised
            // validity and ordered accesses.
            for (grad, out) in grads.iter().zip(unsafe { out.as_host_mut() }) {
                *out = with_float!("grad_stats: grad", grad.dtype(), G => {
                    // SAFETY: as for `out`; nothing writes to it.
                    Ok(workers.grad_stats(unsafe { grad.typed::<G>()?.as_host() }))
                })
                .map_err(failed)?;
            }
            Ok(())
        })?;
        Ok(())
    }

    fn rank_stats(
        &self,
        stream: &HostStream,
        units: DeviceSlice<GradStats>,
        loss: DeviceSlice<f64>,
        flags: DeviceSlice<u64>,
        out: DeviceSlice<RankStats>,
    ) -> Result<(), KernelError> {
        check::rank_stats(DeviceId::HOST, units, loss, flags, out)?;
        stream.enqueue("rank_stats", move || {
            // SAFETY: `check` found host memory; its maker promised validity and ordered accesses.
            let units = unsafe { units.as_host() };
            // SAFETY: as above.
            let loss = unsafe { read_first(loss) }.unwrap_or_default();
            // SAFETY: as above.
            let flags = unsafe { read_first(flags) }.unwrap_or_default();
            // SAFETY: as above, and `check` found it disjoint from the others.
            unsafe { out.as_host_mut() }.fill(RankStats {
                flags,
                ..RankStats::new(units, loss)
            });
            Ok(())
        })?;
        Ok(())
    }

    fn advance_step(&self, stream: &HostStream, args: AdvanceArgs) -> Result<(), KernelError> {
        check::advance_step(DeviceId::HOST, &args)?;
        stream.enqueue("advance_step", move || {
            let AdvanceArgs {
                ranks,
                config,
                rates,
                state,
                scalars,
                records,
            } = args;
            // SAFETY: `check` found host memory; its maker promised validity and ordered accesses.
            let ranks = unsafe { ranks.as_host() };
            // SAFETY: as above.
            let config = unsafe { config.as_host() };
            // SAFETY: as above.
            let rates = unsafe { rates.as_host() };
            // SAFETY: as above, and `check` found it disjoint from the others.
            let state = unsafe { state.as_host_mut() };
            // SAFETY: as for the state.
            let scalars = unsafe { scalars.as_host_mut() };
            if let ([config], [state]) = (config, state)
                && let Some(record) = step::advance_step(ranks, config, rates, state, scalars)
            {
                let at = (record.iteration % records.len() as u64) as usize;
                // SAFETY: as for the state; only this record is borrowed, since the host may be
                // reading others.
                unsafe { records.slice(at..at + 1).as_host_mut() }.fill(record);
            }
            Ok(())
        })?;

        Ok(())
    }
}
