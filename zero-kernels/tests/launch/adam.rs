//! Adam with masters and with remainders, bit for bit against the plain loop, and close to fp64.

use std::sync::Arc;

use half::{bf16, f16};
use zero_alloc::device::Device;
use zero_kernels::adam::{self, RemainderSlices};
use zero_kernels::{
    AdamHyper, AdamScalars, Float, Rounding, StepScalars, UpdateArgs, UpdateRule, Weights, join,
    reference, split,
};

use crate::Rig;
use crate::common::{assert_same, hyper, scalars, squares, values};

/// The first element of stream `s` in case `i`: all streams aligned, misaligned equally, or
/// misaligned differently.
pub fn from(i: usize, s: usize) -> usize {
    [0, i, 3 * i + 5 * s][i % 3] % 8
}

struct State {
    weights: Vec<f32>,
    first_moment: Vec<f32>,
    second_moment: Vec<f32>,
}

impl State {
    fn new(len: usize) -> Self {
        Self {
            weights: values(len, 1, false),
            first_moment: values(len, 2, false),
            second_moment: squares(len, 3),
        }
    }

    fn slices<'a, G, P>(
        &'a mut self,
        grad: &'a [G],
        param: Option<&'a mut [P]>,
    ) -> adam::AdamSlices<'a, f32, f32, G, P> {
        let Self {
            weights,
            first_moment,
            second_moment,
        } = self;
        adam::AdamSlices {
            weights,
            first_moment,
            second_moment,
            grad,
            param_out: param,
        }
    }
}

/// One step, with or without a parameter output, at every length and alignment.
fn check<D: Device, G: Float, P: Float>(rig: &Rig<D>, with_param: bool) {
    for (i, len) in rig.lengths().into_iter().enumerate() {
        for decoupled in [true, false] {
            let what = format!(
                "{} elements, gradient {}, parameter {}",
                len,
                G::DTYPE,
                P::DTYPE
            );
            let start = State::new(len);
            let grad = values::<G>(len, 4, true);
            let scalars = scalars(1e-2, 0.37);
            let hyper = hyper(decoupled);
            let master = rig.buffer(&start.weights, from(i, 0));
            let first_moment = rig.buffer(&start.first_moment, from(i, 1));
            let second_moment = rig.buffer(&start.second_moment, from(i, 2));
            let on_device = rig.buffer(&grad, from(i, 3));
            let param = rig.poisoned::<P>(len, from(i, 4));
            let at = rig.buffer(&[StepScalars::from(scalars)], 0);
            let rule: Arc<dyn UpdateRule> = Arc::new(hyper);
            let args = UpdateArgs {
                weights: Weights::Fp32 {
                    master: master.slice(),
                    param_out: with_param.then(|| param.any()),
                },
                slots: vec![first_moment.slice().into(), second_moment.slice().into()],
                grad: on_device.any(),
                scalars: at.slice(),
                weight_decay: hyper.weight_decay,
                rounding: Rounding::Nearest,
            };
            rig.kernels.update(&rig.stream, &rule, args).unwrap();

            let mut expected = State::new(len);
            let mut narrow = param_poison::<P>(len);
            reference::adam(
                expected.slices(&grad, with_param.then_some(&mut narrow[..])),
                &scalars,
                &hyper,
            )
            .unwrap();
            for (name, ours, expected) in [
                ("master", master.read(), &expected.weights),
                ("first moment", first_moment.read(), &expected.first_moment),
                (
                    "second moment",
                    second_moment.read(),
                    &expected.second_moment,
                ),
            ] {
                assert_same(&format!("{what}: {name}"), &ours, expected);
            }
            assert_same(&format!("{what}: parameter"), &param.read(), &narrow);
            assert_same(&format!("{what}: gradient"), &on_device.read(), &grad);
            near_fp64(&start, &grad, &scalars, &hyper, &expected);
        }
    }
}

fn param_poison<P: Float>(len: usize) -> Vec<P> {
    vec![P::from_f32(f32::NAN); len]
}

/// Asserts that the plain loop is within a few roundings of the formula in fp64, where that is
/// finite.
fn near_fp64<G: Float>(start: &State, grad: &[G], s: &AdamScalars, h: &AdamHyper, ours: &State) {
    const U: f64 = f32::EPSILON as f64 / 2.0;
    let least = f64::from(f32::from_bits(1));
    for (i, grad) in grad.iter().enumerate() {
        let w0 = f64::from(start.weights[i]);
        let m0 = f64::from(start.first_moment[i]);
        let v0 = f64::from(start.second_moment[i]);
        let plain = f64::from(grad.to_f32()) * f64::from(s.grad_scale);
        if !plain.is_finite() || plain.abs() > 1e18 {
            continue;
        }
        let (w, g, largest) = if h.decoupled {
            (
                w0 * (1.0 - f64::from(s.lr) * h.weight_decay),
                plain,
                plain.abs(),
            )
        } else {
            (
                w0,
                plain + h.weight_decay * w0,
                plain.abs() + (h.weight_decay * w0).abs(),
            )
        };
        let m = h.beta1 * m0 + (1.0 - h.beta1) * g;
        let v = h.beta2 * v0 + (1.0 - h.beta2) * g * g;
        let denominator = v.sqrt() / f64::from(s.bias_correction2_sqrt) + h.eps;
        let update = f64::from(s.step_size) * m / denominator;
        let m_error = 8.0 * U * (m0.abs() + largest) + least;
        let v_error = 8.0 * U * (h.beta2 * v0 + (1.0 - h.beta2) * largest * largest) + least;
        let relative = m_error / m.abs().max(least) + v_error / v.max(least) + 8.0 * U;
        let w_error = 8.0 * U * (w0.abs() + w.abs() + update.abs()) + update.abs() * relative;
        for (what, ours, exact, error) in [
            ("first moment", ours.first_moment[i], m, m_error),
            ("second moment", ours.second_moment[i], v, v_error),
            ("weight", ours.weights[i], w - update, w_error),
        ] {
            assert!(
                (f64::from(ours) - exact).abs() <= error,
                "{what} {i}: {ours:e}, in fp64 {exact:e} +- {error:e}"
            );
        }
    }
}

pub fn adam_without_parameter_output<D: Device>(rig: &Rig<D>) {
    check::<D, f32, f32>(rig, false);
    check::<D, bf16, f32>(rig, false);
    check::<D, f16, f32>(rig, false);
}

pub fn adam_to_fp32_parameters<D: Device>(rig: &Rig<D>) {
    check::<D, f32, f32>(rig, true);
    check::<D, bf16, f32>(rig, true);
    check::<D, f16, f32>(rig, true);
}

pub fn adam_to_bf16_parameters<D: Device>(rig: &Rig<D>) {
    check::<D, f32, bf16>(rig, true);
    check::<D, bf16, bf16>(rig, true);
    check::<D, f16, bf16>(rig, true);
}

pub fn adam_to_fp16_parameters<D: Device>(rig: &Rig<D>) {
    check::<D, f32, f16>(rig, true);
    check::<D, bf16, f16>(rig, true);
    check::<D, f16, f16>(rig, true);
}

fn check_remainder<D: Device, G: Float>(rig: &Rig<D>) {
    for (i, len) in rig.lengths().into_iter().enumerate() {
        let mut m = values::<f32>(len, 2, false);
        let mut v = squares::<f32>(len, 3);
        let grad = values::<G>(len, 4, true);
        let (mut param, mut remainder): (Vec<bf16>, Vec<i16>) =
            values::<f32>(len, 1, false).into_iter().map(split).unzip();
        let scalars = scalars(1e-2, 0.37);
        let hyper = hyper(i % 2 == 0);
        let on_param = rig.buffer(&param, from(i, 0));
        let on_remainder = rig.buffer(&remainder, from(i, 1));
        let on_m = rig.buffer(&m, from(i, 2));
        let on_v = rig.buffer(&v, from(i, 3));
        let on_grad = rig.buffer(&grad, from(i, 4));
        let at = rig.buffer(&[StepScalars::from(scalars)], 0);
        let rule: Arc<dyn UpdateRule> = Arc::new(hyper);
        let args = UpdateArgs {
            weights: Weights::Remainder {
                param: on_param.slice(),
                remainder: on_remainder.slice(),
            },
            slots: vec![on_m.slice().into(), on_v.slice().into()],
            grad: on_grad.any(),
            scalars: at.slice(),
            weight_decay: hyper.weight_decay,
            rounding: Rounding::Nearest,
        };
        rig.kernels.update(&rig.stream, &rule, args).unwrap();
        let slices = RemainderSlices {
            param: &mut param,
            remainder: &mut remainder,
            first_moment: &mut m,
            second_moment: &mut v,
            grad: &grad,
        };
        adam::adam_remainder(slices, &scalars, &hyper).unwrap();
        let join = |(p, r): (Vec<bf16>, Vec<i16>)| -> Vec<f32> {
            p.into_iter().zip(r).map(|(p, r)| join(p, r)).collect()
        };
        assert_same(
            "weights",
            &join((on_param.read(), on_remainder.read())),
            &join((param, remainder)),
        );
        assert_same("first moment", &on_m.read(), &m);
        assert_same("second moment", &on_v.read(), &v);
    }
}

pub fn adam_with_remainders<D: Device>(rig: &Rig<D>) {
    check_remainder::<D, f32>(rig);
    check_remainder::<D, bf16>(rig);
    check_remainder::<D, f16>(rig);
}

pub fn skipped_step_writes_nothing<D: Device>(rig: &Rig<D>) {
    let len = rig.most_elems.min(255);
    let start = State::new(len);
    let grad = values::<bf16>(len, 4, true);
    let wide = rig.buffer(&start.weights, 1);
    let narrow = rig.buffer(&values::<bf16>(len, 5, false), 0);
    let m = rig.buffer(&start.first_moment, 0);
    let v = rig.buffer(&start.second_moment, 0);
    let g = rig.buffer(&grad, 0);
    let r = rig.buffer(&vec![5i16; len], 0);
    let at = rig.buffer(&[StepScalars::skipped()], 0);
    let param = rig.poisoned::<bf16>(len, 0);
    let rule: Arc<dyn UpdateRule> = Arc::new(hyper(true));
    for weights in [
        Weights::Fp32 {
            master: wide.slice(),
            param_out: Some(param.any()),
        },
        Weights::Remainder {
            param: narrow.slice(),
            remainder: r.slice(),
        },
    ] {
        let args = UpdateArgs {
            weights,
            slots: vec![m.slice().into(), v.slice().into()],
            grad: g.any(),
            scalars: at.slice(),
            weight_decay: rule.weight_decay(),
            rounding: Rounding::Nearest,
        };
        rig.kernels.update(&rig.stream, &rule, args).unwrap();
    }

    assert_same("master", &wide.read(), &start.weights);
    assert_same("weights", &narrow.read(), &values::<bf16>(len, 5, false));
    assert_same("first moment", &m.read(), &start.first_moment);
    assert_same("second moment", &v.read(), &start.second_moment);
    assert_same("parameter", &param.read(), &param_poison::<bf16>(len));
    assert_eq!(r.read(), vec![5; len]);
}
