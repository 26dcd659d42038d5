//! `HostKernels`: launches on streams, and what they refuse.

use std::time::Duration;

use half::bf16;
use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice, Element, Stream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_kernels::host::HostKernels;
use zero_kernels::{AdamArgs, AdamHyper, GradStats, KernelError, Kernels, StepScalars};

const LIMIT: Duration = Duration::from_secs(20);

fn slice<T>(v: &mut [T]) -> DeviceSlice<T> {
    // SAFETY: every test keeps its vectors until its stream is drained, and uses one stream.
    unsafe { DeviceSlice::from_raw_parts(v.as_mut_ptr(), v.len()) }
}

fn any<T: Element>(v: &mut [T]) -> AnySlice {
    slice(v).erase()
}

fn setup() -> (HostKernels, HostStream) {
    (HostKernels::new(if cfg!(miri) { 1 } else { 2 }).unwrap(), HostDevice::new().create_stream("compute").unwrap())
}

const HYPER: AdamHyper = AdamHyper { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, decoupled: true };

#[test]
fn a_step_runs_in_stream_order_and_reads_its_scalars_when_it_runs() {
    let (kernels, stream) = setup();
    let n = if cfg!(miri) { 40 } else { 1000 };
    let (mut w, mut m, mut v, mut p) = (vec![1f32; n], vec![0f32; n], vec![0f32; n], vec![bf16::NAN; n]);
    let (mut g, mut total) = (vec![bf16::from_f32(2.0); n], vec![0f32; n]);
    let (mut stats, mut scalars) = (vec![GradStats::default()], vec![StepScalars::default()]);
    // Each vector is lent once: lending it again would end the slices that are in flight.
    let (sum, param) = (slice(&mut total), any(&mut p));
    let grad = any(&mut g);
    kernels.accumulate(&stream, grad, sum).unwrap();
    kernels.accumulate(&stream, grad, sum).unwrap();
    kernels.grad_stats(&stream, sum.erase(), slice(&mut stats)).unwrap();
    let at = slice(&mut scalars);
    stream
        .enqueue("scalars", move || {
            let new = StepScalars { grad_scale: 0.25, lr: 0.5, step_size: 5.0, bias_correction2_sqrt: 1.0, skip: 0 };
            // SAFETY: the vector lives, and the stream orders all that use it.
            unsafe { at.as_host_mut() }.fill(new);
            Ok(())
        })
        .unwrap();
    let args = AdamArgs {
        master: slice(&mut w),
        first_moment: slice(&mut m),
        second_moment: slice(&mut v),
        grad: sum.erase(),
        param_out: Some(param),
        scalars: at,
        hyper: HYPER,
    };
    kernels.adam(&stream, args).unwrap();
    kernels.cast(&stream, param, sum.erase(), 2.0).unwrap();
    stream.synchronize(LIMIT).unwrap();
    assert_eq!(stats[0], GradStats { sum_sq: 16.0 * n as f64, nonfinite: 0 });
    // g = 4 * 0.25 = 1; m = 0.1, v = 0.001; the step is 0.5 * 0.1/0.1 / sqrt(0.001) = 15.81.
    assert!((w[0] - (1.0 - 0.5 / 0.001f32.sqrt())).abs() < 1e-4, "{}", w[0]);
    assert_eq!(p, vec![bf16::from_f32(w[0]); n]);
    assert_eq!(total, vec![2.0 * p[0].to_f32(); n]);
}

#[test]
fn bad_arguments_are_refused_at_the_call_and_leave_the_stream_usable() {
    let (kernels, stream) = setup();
    let (mut w, mut m, mut v, mut g) = (vec![1f32; 8], vec![0f32; 8], vec![0f32; 8], vec![0f32; 8]);
    let mut scalars = vec![StepScalars::default()];
    let good = AdamArgs {
        master: slice(&mut w),
        first_moment: slice(&mut m),
        second_moment: slice(&mut v),
        grad: any(&mut g),
        param_out: None,
        scalars: slice(&mut scalars),
        hyper: HYPER,
    };
    let refuse = |args: AdamArgs| kernels.adam(&stream, args).unwrap_err();

    let short = AdamArgs { grad: good.grad.slice(0..7), ..good };
    assert_eq!(refuse(short), KernelError::LengthMismatch { what: "adam: grad", expected: 8, got: 7 });
    let short = AdamArgs { first_moment: good.first_moment.slice(0..7), ..good };
    assert_eq!(refuse(short), KernelError::LengthMismatch { what: "adam: first_moment", expected: 8, got: 7 });
    let short = AdamArgs { second_moment: good.second_moment.slice(0..7), ..good };
    assert_eq!(refuse(short), KernelError::LengthMismatch { what: "adam: second_moment", expected: 8, got: 7 });
    let none = AdamArgs { scalars: good.scalars.slice(0..0), ..good };
    assert_eq!(refuse(none), KernelError::LengthMismatch { what: "adam: scalars", expected: 1, got: 0 });

    let mut doubles = vec![0f64; 8];
    let wide = AdamArgs { grad: any(&mut doubles), ..good };
    assert_eq!(refuse(wide), KernelError::Unsupported { what: "adam: grad", dtype: DType::F64 });
    let wide = AdamArgs { param_out: Some(any(&mut doubles)), ..good };
    assert_eq!(refuse(wide), KernelError::Unsupported { what: "adam: param_out", dtype: DType::F64 });

    let shared = AdamArgs { param_out: Some(good.master.erase()), ..good };
    assert_eq!(refuse(shared), KernelError::Overlap { first: "adam: master", second: "adam: param_out" });
    let shared = AdamArgs { grad: good.second_moment.erase(), ..good };
    assert_eq!(refuse(shared), KernelError::Overlap { first: "adam: second_moment", second: "adam: grad" });

    let mut bytes = vec![0u8; 64];
    let odd = bytes.as_ptr() as usize % 2;
    // SAFETY: within `bytes`; it is refused before any use.
    let askew = unsafe { AnySlice::from_raw_parts(bytes.as_mut_ptr().wrapping_add(1 - odd), 8, DType::Bf16) };
    assert!(matches!(refuse(AdamArgs { grad: askew, ..good }), KernelError::Misaligned { align_bytes: 2, .. }));

    let cast = kernels.cast(&stream, good.grad, any(&mut doubles), 1.0).unwrap_err();
    assert_eq!(cast, KernelError::Unsupported { what: "cast: dst", dtype: DType::F64 });
    let cast = kernels.cast(&stream, good.grad, good.grad, 1.0).unwrap_err();
    assert_eq!(cast, KernelError::Overlap { first: "cast: dst", second: "cast: src" });
    let cast = kernels.cast(&stream, good.grad, good.grad.slice(1..3), 1.0).unwrap_err();
    assert_eq!(cast, KernelError::LengthMismatch { what: "cast: dst", expected: 8, got: 2 });
    let sum = kernels.accumulate(&stream, any(&mut doubles), good.master).unwrap_err();
    assert_eq!(sum, KernelError::Unsupported { what: "accumulate: grad", dtype: DType::F64 });
    let sum = kernels.accumulate(&stream, good.grad, good.master.slice(0..1)).unwrap_err();
    assert_eq!(sum, KernelError::LengthMismatch { what: "accumulate: acc", expected: 8, got: 1 });
    let mut out = vec![GradStats::default(); 2];
    let stats = kernels.grad_stats(&stream, good.grad, slice(&mut out)).unwrap_err();
    assert_eq!(stats, KernelError::LengthMismatch { what: "grad_stats: out", expected: 1, got: 2 });
    let stats = kernels.grad_stats(&stream, any(&mut doubles), slice(&mut out[..1])).unwrap_err();
    assert_eq!(stats, KernelError::Unsupported { what: "grad_stats: grad", dtype: DType::F64 });

    kernels.adam(&stream, AdamArgs { scalars: slice(&mut scalars), ..good }).unwrap();
    stream.synchronize(LIMIT).unwrap();
}
