//! Two ranks, taking turns on one thread, train y = a x + b with sharded AdamW; each stores half of
//! the state. Shared arrays replace the collectives (reduce-scatter, all-gather).

use std::sync::Arc;
use std::time::Duration;

use zero_alloc::Pool;
use zero_alloc::device::{AnySlice, Device, DeviceError, DeviceId, DeviceSlice, Reduced, Stream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_kernels::host::HostKernels;
use zero_optim::{
    Divisor, GatheredStats, LrSchedule, OptimizerConfig, RankStats, Segment, ShardedOptimizer,
    UnitSlices,
};

const LIMIT: Duration = Duration::from_secs(10);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = HostDevice::new();
    let stream = device.create_stream("compute")?;
    let pool = Pool::new(device, 1 << 20);
    let schedule = LrSchedule::LinearWarmup { warmup_steps: 10 };
    let config = OptimizerConfig::default()
        .lr(0.1)
        .schedule(schedule)
        .max_grad_norm(1.0);
    let mut ranks = Vec::new();

    for _ in 0..2 {
        let kernels = Arc::new(HostKernels::new(1)?);
        let segments = vec![Segment::shard("line", 0..1)];
        let builder = ShardedOptimizer::builder(&pool, kernels, &stream);
        ranks.push(builder.config(config.clone()).build(segments)?);
    }

    let mut params = [0f32; 2]; // a belongs to rank 0, b to rank 1
    for step in 0..300 {
        let scale = ranks[0].loss_scale() as f32;
        // Each rank has another point of the line 3 x - 1; gradients are summed over ranks.
        let mut loss = [0f64; 2];
        let mut grads = [0f32; 2];
        for (rank, loss) in loss.iter_mut().enumerate() {
            let x = ((step + rank) % 5) as f32;
            let error = params[0] * x + params[1] - (3.0 * x - 1.0);
            *loss = f64::from(error * error) / 2.0;
            grads[0] += 2.0 * error * x * scale;
            grads[1] += 2.0 * error * scale;
        }
        let mut stats: Vec<RankStats> = Vec::new();
        for (rank, optim) in ranks.iter_mut().enumerate() {
            optim.enqueue_stats(&stream, &[reduced(&mut grads[rank], &stream)?])?;
            stats.push(optim.rank_stats(&stream, loss[rank], LIMIT)?);
        }
        for (rank, optim) in ranks.iter_mut().enumerate() {
            let grad = reduced(&mut grads[rank], &stream)?;
            let param = [(one(&mut params[rank]), 0)];
            let units = [UnitSlices {
                grad: &grad,
                param: &param,
            }];
            let gathered = GatheredStats::new(&stats, Divisor::MicroBatches(1));
            let outcome = optim.step(&stream, &units, gathered, LIMIT)?;
            stream.synchronize(LIMIT)?;
            if rank == 0 && step % 50 == 49 {
                let norm = outcome.grad_norm().unwrap_or(f64::NAN);
                println!(
                    "step {:3}: loss {:.5}, gradient norm {norm:.4}, y = {} x + {}",
                    step + 1,
                    outcome.loss(),
                    params[0],
                    params[1]
                );
            }
        }
    }

    Ok(())
}

fn reduced(x: &mut f32, stream: &HostStream) -> Result<Reduced<HostDevice>, DeviceError> {
    // SAFETY: already written by main, which writes it again after the stream is drained.
    Ok(unsafe { Reduced::new(one(x), stream.record()?) })
}

fn one(x: &mut f32) -> AnySlice {
    // SAFETY: main's arrays outlive each step's work, which one stream orders.
    unsafe { DeviceSlice::from_raw_parts(x, 1, DeviceId::HOST) }.erase()
}
