//! Ten steps compared with PyTorch's AdamW and Adam, element by element
//! (tests/data/torch_adam.safetensors).

use std::sync::Arc;

use safetensors::SafeTensors;
use zero_alloc::device::Device;
use zero_kernels::{
    AdamHyper, AdamScalars, Rounding, StepScalars, UpdateArgs, UpdateRule, Weights,
};

use crate::Rig;

const FILE: &[u8] = include_bytes!("../data/torch_adam.safetensors");

fn tensor(name: &str) -> Vec<f32> {
    let file = SafeTensors::deserialize(FILE).unwrap();
    bytemuck::pod_collect_to_vec(file.tensor(name).unwrap().data())
}

fn ulps(a: f32, b: f32) -> u32 {
    (a.to_bits() as i32).abs_diff(b.to_bits() as i32)
}

/// Runs the case. Moments must be equal; `close(t, ours, torch's)` accepts a parameter after step
/// t.
fn check<D: Device>(
    rig: &Rig<D>,
    name: &str,
    lr: f64,
    hyper: AdamHyper,
    close: impl Fn(i32, f32, f32) -> bool,
) {
    let start = tensor(&format!("{name}.param0"));
    let weights = rig.buffer(&start, 0);
    let zeroes = vec![0f32; start.len()];
    let first_moment = rig.buffer(&zeroes, 0);
    let second_moment = rig.buffer(&zeroes, 0);

    let rule: Arc<dyn UpdateRule> = Arc::new(hyper);
    for t in 1..=10 {
        let scalars = AdamScalars {
            step_size: (lr / (1.0 - hyper.beta1.powi(t))) as f32,
            bias_correction2_sqrt: (1.0 - hyper.beta2.powi(t)).sqrt() as f32,
            ..AdamScalars::new(t as u64, lr, &hyper, 1.0)
        };
        let grad = rig.buffer(&tensor(&format!("{name}.grad{}", t - 1)), 0);
        let scalars = rig.buffer(&[StepScalars::from(scalars)], 0);
        let args = UpdateArgs {
            weights: Weights::Fp32 {
                master: weights.slice(),
                param_out: None,
            },
            slots: vec![first_moment.slice().into(), second_moment.slice().into()],
            grad: grad.any(),
            scalars: scalars.slice(),
            weight_decay: hyper.weight_decay,
            rounding: Rounding::Nearest,
        };
        rig.kernels.update(&rig.stream, &rule, args).unwrap();
        for (i, (&ours, &theirs)) in weights
            .read()
            .iter()
            .zip(&tensor(&format!("{name}.param{t}")))
            .enumerate()
        {
            assert!(
                close(t, ours, theirs),
                "{name}, step {t}, element {i}: {ours:e}, torch {theirs:e}"
            );
        }
    }

    assert_eq!(first_moment.read(), tensor(&format!("{name}.exp_avg")));
    assert_eq!(second_moment.read(), tensor(&format!("{name}.exp_avg_sq")));
}

pub fn adamw_agrees_with_torch<D: Device>(rig: &Rig<D>) {
    let hyper = AdamHyper {
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.01,
        decoupled: true,
        bias_correction: true,
    };
    check(rig, "adamw_1", 1e-3, hyper, |_, a, b| ulps(a, b) <= 1);
    let hyper = AdamHyper {
        beta2: 0.95,
        weight_decay: 0.1,
        ..hyper
    };
    check(rig, "adamw_1025", 3e-4, hyper, |_, a, b| ulps(a, b) <= 1);
}

pub fn adam_with_l2_agrees_with_torch<D: Device>(rig: &Rig<D>) {
    // Near zero a parameter's ulp is tiny; there the bound is the rounding error of `t` updates of
    // about lr each.
    let hyper = AdamHyper {
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.05,
        decoupled: false,
        bias_correction: true,
    };
    let close =
        |t, a: f32, b: f32| ulps(a, b) <= 1 || (a - b).abs() <= t as f32 * 1e-2 * f32::EPSILON;
    check(rig, "adam_l2_257", 1e-2, hyper, close);
}
