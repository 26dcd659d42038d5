//! Launches run in the order of their stream and read their scalars when they run.

use std::sync::Arc;

use half::bf16;
use zero_alloc::device::{Device, DeviceSlice};
use zero_kernels::{
    AdamHyper, AdamScalars, GradStats, Rounding, StepScalars, UpdateArgs, UpdateRule, Weights,
};

use crate::Rig;
use crate::rig::Buffer;

/// The buffer as bytes, for copies.
fn bytes<D: Device, T: bytemuck::Pod>(buffer: &Buffer<'_, D, T>) -> zero_alloc::device::AnySlice {
    let slice = buffer.slice();
    // SAFETY: the same memory, as bytes.
    unsafe {
        DeviceSlice::from_raw_parts(
            slice.as_ptr().cast::<u8>(),
            slice.len() * size_of::<T>(),
            slice.device(),
        )
    }
    .erase()
}

pub fn scalars_are_read_in_stream_order<D: Device>(rig: &Rig<D>) {
    let n = if cfg!(miri) { 40 } else { 1000 };
    let w = rig.buffer(&vec![1f32; n], 0);
    let m = rig.buffer(&vec![0f32; n], 0);
    let v = rig.buffer(&vec![0f32; n], 0);
    let param = rig.poisoned::<bf16>(n, 0);
    let grad = rig.buffer(&vec![bf16::from_f32(2.0); n], 0);
    let total = rig.buffer(&vec![0f32; n], 0);
    let stats = rig.poisoned::<GradStats>(1, 0);
    let scratch = rig.poisoned::<f64>(rig.kernels.stats_scratch_elems(&[n]), 0);

    let hyper = AdamHyper {
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.0,
        decoupled: true,
        bias_correction: true,
    };

    let scalars = AdamScalars::new(1, 0.5, &hyper, 0.25);
    let later = AdamScalars {
        step_size: 5.0,
        bias_correction2_sqrt: 1.0,
        ..scalars
    };

    let scalars = rig.buffer(&[StepScalars::skipped()], 0);
    let later = rig.buffer(&[StepScalars::from(later)], 0);
    let rule: Arc<dyn UpdateRule> = Arc::new(hyper);
    let kernels = &rig.kernels;
    let stream = &rig.stream;
    kernels
        .accumulate(stream, grad.any(), total.slice())
        .unwrap();
    kernels
        .accumulate(stream, grad.any(), total.slice())
        .unwrap();
    kernels
        .grad_stats(stream, &[total.any()], scratch.slice(), stats.slice())
        .unwrap();

    let args = UpdateArgs {
        weights: Weights::Fp32 {
            master: w.slice(),
            param_out: Some(param.any()),
        },
        slots: vec![m.slice().into(), v.slice().into()],
        grad: total.any(),
        scalars: scalars.slice(),
        weight_decay: hyper.weight_decay,
        rounding: Rounding::Nearest,
    };

    kernels.update(stream, &rule, args.clone()).unwrap();
    rig.device
        .copy(stream, bytes(&later), bytes(&scalars))
        .unwrap();
    kernels.update(stream, &rule, args).unwrap();
    kernels.cast(stream, param.any(), total.any(), 2.0).unwrap();

    assert_eq!(
        stats.read(),
        [GradStats {
            sum_sq: 16.0 * n as f64,
            nonfinite: 0
        }]
    );

    // The first step is skipped. Then g = 4 * 0.25 = 1; m = 0.1, v = 0.001; the step is 0.5 *
    // 0.1/0.1 / sqrt(0.001).
    let w = w.read();
    assert!(
        (w[0] - (1.0 - 0.5 / 0.001f32.sqrt())).abs() < 1e-4,
        "{}",
        w[0]
    );
    let p = param.read();
    assert_eq!(p, vec![bf16::from_f32(w[0]); n]);
    assert_eq!(total.read(), vec![2.0 * p[0].to_f32(); n]);
}
