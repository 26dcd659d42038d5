//! `newton_schulz [THREADS]`: Newton-Schulz of matrices on the host beside a plain product of faer,
//! which it multiplies with. The plain product runs on each of the threads at once.

use std::time::{Duration, Instant};

use faer::{Accum, Mat, Par};
use zero_alloc::device::{Device, DeviceId, DeviceSlice, Stream};
use zero_alloc::host::HostDevice;
use zero_kernels::host::HostKernels;
use zero_kernels::{Kernels, NewtonSchulz, OrthogonaliseArgs};

const ROUNDS: usize = 20;

/// The least of the times of [`ROUNDS`] runs, in seconds.
fn least(mut run: impl FnMut()) -> f64 {
    let times = (0..ROUNDS).map(|_| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    });
    times.fold(f64::MAX, f64::min)
}

/// Values of -1/2 to 1/2.
fn value(i: usize) -> f32 {
    let hashed = (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    hashed as f32 / (1 << 24) as f32 - 0.5
}

fn slice(values: &mut [f32]) -> DeviceSlice<f32> {
    // SAFETY: the vectors outlive the operation, which is waited for.
    unsafe { DeviceSlice::from_raw_parts(values.as_mut_ptr(), values.len(), DeviceId::HOST) }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let threads = std::env::args().nth(1).map_or(Ok(1), |n| n.parse())?;
    let kernels = HostKernels::new(threads)?;
    let stream = HostDevice::new().create_stream("products")?;

    for (rows, cols) in [(1024, 1024), (576, 1536), (1536, 576)] {
        let short = rows.min(cols);
        let long = rows.max(cols);
        let lhs = Mat::<f32>::from_fn(short, short, |i, j| value(i * short + j));
        let rhs = Mat::<f32>::from_fn(short, long, |i, j| value(i * long + j));
        let product = || {
            let mut out = Mat::<f32>::zeros(short, long);
            let (lhs, rhs) = (lhs.as_ref(), rhs.as_ref());
            faer::linalg::matmul::matmul(out.as_mut(), Accum::Replace, lhs, rhs, 1.0, Par::Seq);
            std::hint::black_box(out);
        };
        let plain = least(|| {
            std::thread::scope(|scope| {
                for _thread in 1..threads {
                    scope.spawn(product);
                }
                product();
            });
        });

        let mut values: Vec<f32> = (0..rows * cols).map(value).collect();
        let scratch = Kernels::<HostDevice>::orthogonalise_scratch_elems(&kernels, rows, cols);
        let mut scratch = vec![0.0; scratch];
        let args = OrthogonaliseArgs {
            values: slice(&mut values),
            rows,
            cols,
            row_stride: cols,
            scratch: slice(&mut scratch),
            rule: NewtonSchulz::default(),
            scale: 1.0,
        };
        let mut failed = Ok(());
        let ours = least(|| {
            let run = kernels.orthogonalise(&stream, args);
            failed = run.and(
                stream
                    .synchronize(Duration::from_secs(60))
                    .map_err(Into::into),
            );
        });
        failed?;

        let of_product = (2 * short * short * long) as f64;
        let of_square = (2 * short * short * short) as f64;
        let whole = 5.0 * (2.0 * of_product + of_square);
        println!(
            "{rows} x {cols}: {:.1} ms, {:.0} GFLOP/s of whole products; plain product {:.0} GFLOP/s",
            ours * 1e3,
            whole / ours / 1e9,
            threads as f64 * of_product / plain / 1e9
        );
    }
    Ok(())
}
