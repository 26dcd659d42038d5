//! The operations on host streams: arguments are checked at the call, the work runs in stream order.

use half::{bf16, f16};
use zero_alloc::device::{AnySlice, DType, DeviceError, DeviceSlice, Element};
use zero_alloc::host::{HostDevice, HostStream};

use super::{AdamSlices, Workers, same_len};
use crate::{AdamArgs, AdamHyper, Float, GradStats, KernelError, Kernels, StepScalars};

/// The operations on the host's streams, each split over a fixed number of threads.
#[derive(Clone, Debug)]
pub struct HostKernels {
    workers: Workers,
}

impl HostKernels {
    /// Operations that each use `threads` threads (0 and 1: the stream's own).
    ///
    /// # Errors
    /// The operating system refused a thread.
    pub fn new(threads: usize) -> Result<Self, KernelError> {
        Ok(Self { workers: Workers::new(threads)? })
    }

    /// Operations on threads that are shared with others.
    pub fn with_workers(workers: Workers) -> Self {
        Self { workers }
    }
}

/// Where a slice lies.
#[derive(Clone, Copy)]
struct Extent {
    what: &'static str,
    start: usize,
    end: usize,
}

impl Extent {
    fn of(what: &'static str, slice: AnySlice) -> Self {
        let start = slice.as_ptr() as usize;
        Self { what, start, end: start.saturating_add(slice.len_bytes()) }
    }
}

/// Refuses a written slice that shares memory with another argument: `&mut` must be exclusive.
fn disjoint(written: &[Extent], read: &[Extent]) -> Result<(), KernelError> {
    for (i, a) in written.iter().enumerate() {
        for b in written[i + 1..].iter().chain(read) {
            if a.start < b.end && b.start < a.end {
                return Err(KernelError::Overlap { first: a.what, second: b.what });
            }
        }
    }
    Ok(())
}

fn aligned(what: &'static str, slice: AnySlice) -> Result<(), KernelError> {
    let align_bytes = slice.dtype().size_bytes();
    let address = slice.as_ptr() as usize;
    if slice.is_empty() || address.is_multiple_of(align_bytes) {
        Ok(())
    } else {
        Err(KernelError::Misaligned { what, address, align_bytes })
    }
}

/// What a launch finds out when it runs; the arguments were checked before, so it is never used.
fn failed(error: KernelError) -> DeviceError {
    DeviceError::Driver { call: "host kernel", message: error.to_string() }
}

/// Reads one element of host memory.
///
/// # Safety
/// As for [`DeviceSlice::as_host`].
unsafe fn read_first<T: Copy>(slice: DeviceSlice<T>) -> Option<T> {
    // SAFETY: the caller's promise.
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

impl HostKernels {
    fn enqueue_adam<G: Float, P: Float>(&self, stream: &HostStream, args: AdamArgs) -> Result<(), KernelError> {
        let workers = self.workers.clone();
        let AdamArgs { master, first_moment, second_moment, grad, param_out, scalars, hyper } = args;
        let (grad, param_out) = (grad.typed::<G>()?, param_out.map(AnySlice::typed::<P>).transpose()?);
        let run = move |scalars: &StepScalars, hyper: &AdamHyper| {
            // SAFETY: host memory, disjoint from the others; its maker promised ordered accesses.
            let weights = unsafe { master.as_host_mut() };
            // SAFETY: as for the weights.
            let first_moment = unsafe { first_moment.as_host_mut() };
            // SAFETY: as for the weights.
            let second_moment = unsafe { second_moment.as_host_mut() };
            // SAFETY: as for the weights; nothing writes to it.
            let grad = unsafe { grad.as_host() };
            // SAFETY: as for the weights.
            let param_out = param_out.map(|p| unsafe { p.as_host_mut() });
            workers.adam(AdamSlices { weights, first_moment, second_moment, grad, param_out }, scalars, hyper)
        };
        stream.enqueue("adam", move || {
            // SAFETY: host memory; its maker promised ordered accesses.
            let scalars = unsafe { read_first(scalars) }.unwrap_or_default();
            run(&scalars, &hyper).map_err(failed)
        })?;
        Ok(())
    }
}

impl Kernels<HostDevice> for HostKernels {
    fn adam(&self, stream: &HostStream, args: AdamArgs) -> Result<(), KernelError> {
        let n = args.master.len();
        same_len("adam: first_moment", n, args.first_moment.len())?;
        same_len("adam: second_moment", n, args.second_moment.len())?;
        same_len("adam: grad", n, args.grad.len())?;
        same_len("adam: param_out", n, args.param_out.map_or(n, AnySlice::len))?;
        same_len("adam: scalars", 1, args.scalars.len())?;
        aligned("adam: grad", args.grad)?;
        let mut written = vec![
            Extent::of("adam: master", args.master.erase()),
            Extent::of("adam: first_moment", args.first_moment.erase()),
            Extent::of("adam: second_moment", args.second_moment.erase()),
        ];
        if let Some(param_out) = args.param_out {
            aligned("adam: param_out", param_out)?;
            written.push(Extent::of("adam: param_out", param_out));
        }
        disjoint(&written, &[Extent::of("adam: grad", args.grad)])?;
        with_float!("adam: grad", args.grad.dtype(), G => match args.param_out {
            None => self.enqueue_adam::<G, f32>(stream, args),
            Some(p) => with_float!("adam: param_out", p.dtype(), P => self.enqueue_adam::<G, P>(stream, args)),
        })
    }

    fn cast(&self, stream: &HostStream, src: AnySlice, dst: AnySlice, scale: f32) -> Result<(), KernelError> {
        same_len("cast: dst", src.len(), dst.len())?;
        aligned("cast: src", src)?;
        aligned("cast: dst", dst)?;
        disjoint(&[Extent::of("cast: dst", dst)], &[Extent::of("cast: src", src)])?;
        let workers = self.workers.clone();
        with_float!("cast: src", src.dtype(), S => with_float!("cast: dst", dst.dtype(), D => {
            let (src, dst) = (src.typed::<S>()?, dst.typed::<D>()?);
            stream.enqueue("cast", move || {
                // SAFETY: host memory; its maker promised ordered accesses.
                let src = unsafe { src.as_host() };
                // SAFETY: as above, and disjoint from `src`.
                let dst = unsafe { dst.as_host_mut() };
                workers.cast(src, dst, scale).map_err(failed)
            })?;
            Ok(())
        }))
    }

    fn accumulate(&self, stream: &HostStream, grad: AnySlice, acc: DeviceSlice<f32>) -> Result<(), KernelError> {
        same_len("accumulate: acc", grad.len(), acc.len())?;
        aligned("accumulate: grad", grad)?;
        disjoint(&[Extent::of("accumulate: acc", acc.erase())], &[Extent::of("accumulate: grad", grad)])?;
        let workers = self.workers.clone();
        with_float!("accumulate: grad", grad.dtype(), G => {
            let grad = grad.typed::<G>()?;
            stream.enqueue("accumulate", move || {
                // SAFETY: host memory; its maker promised ordered accesses.
                let grad = unsafe { grad.as_host() };
                // SAFETY: as above, and disjoint from `grad`.
                let acc = unsafe { acc.as_host_mut() };
                workers.accumulate(grad, acc).map_err(failed)
            })?;
            Ok(())
        })
    }

    fn grad_stats(
        &self,
        stream: &HostStream,
        grad: AnySlice,
        out: DeviceSlice<GradStats>,
    ) -> Result<(), KernelError> {
        same_len("grad_stats: out", 1, out.len())?;
        aligned("grad_stats: grad", grad)?;
        let workers = self.workers.clone();
        with_float!("grad_stats: grad", grad.dtype(), G => {
            let grad = grad.typed::<G>()?;
            stream.enqueue("grad_stats", move || {
                // SAFETY: host memory; its maker promised ordered accesses.
                let stats = workers.grad_stats(unsafe { grad.as_host() });
                // SAFETY: as above, and nothing else accesses it now.
                unsafe { out.as_host_mut() }.fill(stats);
                Ok(())
            })?;
            Ok(())
        })
    }
}

/// Every dtype of [`Float`] is one that [`with_float`] knows.
const _: () = {
    const fn known(d: DType) -> bool {
        matches!(d, DType::F32 | DType::Bf16 | DType::F16)
    }
    assert!(known(<f32 as Element>::DTYPE) && known(<bf16 as Element>::DTYPE) && known(<f16 as Element>::DTYPE));
};
