//! The fused step on plain vectors and a host stream, as a framework that manages its own memory
//! would call it.

use std::time::Duration;

use half::bf16;
use zero_alloc::device::{AnySlice, Device, DeviceId, DeviceSlice, Element, Stream};
use zero_alloc::host::HostDevice;
use zero_kernels::host::HostKernels;
use zero_kernels::{AdamArgs, AdamHyper, GradStats, Kernels, StepScalars};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let len = 1 << 20;
    let mut master = vec![1f32; len];
    let mut m = vec![0f32; len];
    let mut v = vec![0f32; len];
    let mut grad = vec![bf16::from_f32(0.01); len];
    let mut param = vec![bf16::ZERO; len];

    let hyper = AdamHyper {
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.1,
        decoupled: true,
        bias_correction: true,
    };

    let mut scalars = [StepScalars::new(1, 1e-3, &hyper, 1.0)];
    let mut stats = [GradStats::default()];

    let kernels = HostKernels::new(2)?;
    let stream = HostDevice::new().create_stream("compute")?;
    let args = AdamArgs {
        master: typed(&mut master),
        first_moment: typed(&mut m),
        second_moment: typed(&mut v),
        grad: any(&mut grad),
        param_out: Some(any(&mut param)),
        scalars: typed(&mut scalars),
        hyper,
    };

    let mut scratch = vec![0f64; kernels.stats_scratch_elems(&[len])];
    kernels.grad_stats(
        &stream,
        &[args.grad],
        typed(&mut scratch),
        typed(&mut stats),
    )?;
    kernels.adam(&stream, args)?;
    stream.synchronize(Duration::from_secs(10))?;

    println!(
        "gradient norm {:.4}, {} elements not finite",
        stats[0].sum_sq.sqrt(),
        stats[0].nonfinite
    );
    println!("weights 1 -> {} (fp32), {} (bf16)", master[0], param[0]);

    Ok(())
}

fn typed<T>(memory: &mut [T]) -> DeviceSlice<T> {
    // SAFETY: main keeps its memory until the stream is drained, and uses one stream.
    unsafe { DeviceSlice::from_raw_parts(memory.as_mut_ptr(), memory.len(), DeviceId::HOST) }
}

fn any<T: Element>(memory: &mut [T]) -> AnySlice {
    typed(memory).erase()
}
