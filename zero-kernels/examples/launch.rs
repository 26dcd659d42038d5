//! The fused step on plain vectors and a host stream, as a framework that manages its own memory
//! would call it.

use std::sync::Arc;
use std::time::Duration;

use half::bf16;
use zero_alloc::device::{AnySlice, Device, DeviceId, DeviceSlice, Element, Stream};
use zero_alloc::host::HostDevice;
use zero_kernels::host::HostKernels;
use zero_kernels::{
    AdamHyper, AdamScalars, GradStats, Kernels, Rounding, UpdateArgs, UpdateRule, Weights,
};

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

    let mut scalars = [AdamScalars::new(1, 1e-3, &hyper, 1.0).into()];
    let mut stats = [GradStats::default()];

    let kernels = HostKernels::new(2)?;
    let stream = HostDevice::new().create_stream("compute")?;
    let args = UpdateArgs {
        weights: Weights::Fp32 {
            master: typed(&mut master),
            param_out: Some(any(&mut param)),
        },
        slots: vec![typed(&mut m).into(), typed(&mut v).into()],
        grad: any(&mut grad),
        scalars: typed(&mut scalars),
        weight_decay: hyper.weight_decay,
        rounding: Rounding::Nearest,
    };

    let mut scratch = vec![0f64; kernels.stats_scratch_elems(&[len])];
    kernels.grad_stats(
        &stream,
        &[args.grad],
        typed(&mut scratch),
        typed(&mut stats),
    )?;
    let rule: Arc<dyn UpdateRule> = Arc::new(hyper);
    kernels.update(&stream, &rule, args)?;
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
