//! How fast one pool serves one thread and eight: allocation and free in pairs, and pairs with one operation enqueued
//! between them. Figures of one run, rounds by turns; the best of each counts.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use zero_alloc::device::{DType, Device, DeviceError, Stream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_alloc::{AllocError, Pool, Purpose};

const PAIRS: usize = 100_000;

fn pairs(pool: &Pool<HostDevice>, stream: &HostStream, enqueue: bool) -> Result<(), AllocError> {
    for i in 0..PAIRS {
        let bytes = 256 << (i % 9);
        let block = pool.allocate(bytes, DType::U8, Purpose::Activations, stream)?;
        if enqueue {
            stream.enqueue("nothing", || Ok::<_, DeviceError>(()))?;
        }
        drop(block);
    }
    stream.synchronize(Duration::from_secs(600))?;
    Ok(())
}

/// Nanoseconds a pair takes on each of `threads` threads.
fn measure(threads: usize, enqueue: bool) -> Result<f64, AllocError> {
    let device = HostDevice::new();
    let pool = Pool::new(device.clone(), 1 << 30);
    let barrier = Barrier::new(threads);
    let times: Result<Vec<f64>, AllocError> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|i| {
                let (pool, device, barrier) = (&pool, &device, &barrier);
                scope.spawn(move || {
                    let stream = device.create_stream(&format!("stream {i}"))?;
                    barrier.wait();
                    let start = Instant::now();
                    pairs(pool, &stream, enqueue)?;
                    Ok(start.elapsed().as_nanos() as f64 / PAIRS as f64)
                })
            })
            .collect();
        workers.into_iter().map(|w| w.join().unwrap_or_else(|p| std::panic::resume_unwind(p))).collect()
    });
    let times = times?;
    Ok(times.iter().sum::<f64>() / threads as f64)
}

fn main() -> Result<(), AllocError> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for enqueue in [false, true] {
        let (mut one, mut eight) = (f64::MAX, f64::MAX);
        for _ in 0..5 {
            one = one.min(measure(1, enqueue)?);
            eight = eight.min(measure(8, enqueue)?);
        }
        let what = if enqueue { "with one operation enqueued" } else { "alone" };
        println!(
            "pairs {what}: {one:.0} ns on one thread, {eight:.0} ns on each of 8 ({cores} cores): {:.2} of the speed",
            one / eight
        );
    }
    Ok(())
}
