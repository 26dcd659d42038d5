//! The element-wise phases of Muon, bit for bit against the plain loops.

use std::sync::Arc;

use half::{bf16, f16};
use zero_alloc::device::{AnySlice, Device};
use zero_kernels::{
    AverageCodecs, Codec, CodedSlice, Float, Muon, Rounding, StepPoint, StepScalars, UpdateArgs,
    UpdateRule, Weights, join, reference, split,
};

use crate::Rig;
use crate::adam::from;
use crate::common::{assert_same, values};

/// Both weights of `lerp` below 1/2, above it, and as in training; and no momentum.
const MOMENTA: [f64; 4] = [0.95, 0.5, 0.3, 0.0];

const LR: f64 = 0.02;

fn muon(momentum: f64, nesterov: bool) -> Muon {
    Muon {
        momentum,
        nesterov,
        ..Muon::default()
    }
}

fn scalars(muon: &Muon) -> StepScalars {
    let at = StepPoint {
        t: 3,
        lr: LR,
        betas: None,
    };
    StepScalars::new(0.37, muon.scalars(&at))
}

fn check_direction<D: Device, G: Float>(rig: &Rig<D>) {
    for (i, len) in rig.lengths().into_iter().enumerate() {
        let muon = muon(MOMENTA[i % MOMENTA.len()], i % 3 != 2);
        let grad = values::<G>(len, 4, true);
        let mut momentum = values::<f32>(len, 2, false);
        let mut direction = vec![f32::NAN; len];
        let scalars = scalars(&muon);
        let on_momentum = rig.buffer(&momentum, from(i, 0));
        let on_grad = rig.buffer(&grad, from(i, 1));
        let on_direction = rig.poisoned::<f32>(len, from(i, 2));
        let at = rig.buffer(&[scalars], 0);
        let rule: Arc<dyn UpdateRule> = Arc::new(muon);
        let args = UpdateArgs {
            weights: Weights::Fp32 {
                master: on_direction.slice(),
                param_out: None,
            },
            slots: vec![on_momentum.slice().into()],
            grad: on_grad.any(),
            scalars: at.slice(),
            weight_decay: muon.weight_decay,
            rounding: Rounding::Nearest,
        };
        rig.kernels.update(&rig.stream, &rule, args).unwrap();

        reference::muon_direction(
            &mut direction,
            &mut momentum,
            &grad,
            &scalars,
            muon.nesterov,
        )
        .unwrap();
        let what = format!("{len} elements of {}, {muon:?}", G::DTYPE);
        assert_same(&format!("{what}: momentum"), &on_momentum.read(), &momentum);
        assert_same(
            &format!("{what}: direction"),
            &on_direction.read(),
            &direction,
        );
        assert_same(&format!("{what}: gradient"), &on_grad.read(), &grad);
    }
}

pub fn direction_from_every_type<D: Device>(rig: &Rig<D>) {
    check_direction::<D, f32>(rig);
    check_direction::<D, bf16>(rig);
    check_direction::<D, f16>(rig);
}

/// A momentum in blocks is decoded, updated and encoded.
fn check_coded<D: Device, G: Float>(rig: &Rig<D>, averages: AverageCodecs) {
    let Codec::Blocks(format) = averages.signed else {
        unreachable!("a format of blocks");
    };
    for (i, len) in [0, 1, 255, 256, 2049].into_iter().enumerate() {
        let muon = muon(MOMENTA[i % MOMENTA.len()], i % 2 == 0);
        let scalars = scalars(&muon);
        let grad = values::<G>(len, 4, false);
        let mut stored = vec![0; format.bytes(len)];
        format.encode(&values::<f32>(len, 2, false), &mut stored);
        let on_momentum = rig.buffer(&stored, 4 * from(i, 0));
        let on_grad = rig.buffer(&grad, from(i, 1));
        let on_direction = rig.buffer(&vec![0f32; len], from(i, 2));
        let at = rig.buffer(&[scalars], 0);
        let rule: Arc<dyn UpdateRule> = Arc::new(muon);
        let args = UpdateArgs {
            weights: Weights::Fp32 {
                master: on_direction.slice(),
                param_out: None,
            },
            slots: vec![CodedSlice::new(averages.signed, on_momentum.any())],
            grad: on_grad.any(),
            scalars: at.slice(),
            weight_decay: muon.weight_decay,
            rounding: Rounding::Nearest,
        };
        rig.kernels.update(&rig.stream, &rule, args).unwrap();

        let mut momentum = vec![0.0; len];
        let mut direction = vec![0.0; len];
        format.decode(&stored, &mut momentum);
        reference::muon_direction(
            &mut direction,
            &mut momentum,
            &grad,
            &scalars,
            muon.nesterov,
        )
        .unwrap();
        format.encode(&momentum, &mut stored);
        let what = format!("{format:?}, {len} elements of {}", G::DTYPE);
        assert_eq!(on_momentum.read(), stored, "{what}");
        assert_same(&what, &on_direction.read(), &direction);
    }
}

pub fn momentum_in_blocks<D: Device>(rig: &Rig<D>) {
    for averages in [AverageCodecs::EIGHT_BITS, AverageCodecs::FOUR_BITS] {
        check_coded::<D, f32>(rig, averages);
        check_coded::<D, bf16>(rig, averages);
        check_coded::<D, f16>(rig, averages);
    }
}

/// Applies an update to `weights`.
fn apply<D: Device>(rig: &Rig<D>, weights: Weights, update: AnySlice, scalars: StepScalars) {
    let at = rig.buffer(&[scalars], 0);
    let rule = Muon::default().matrix_rule().unwrap().apply;
    let args = UpdateArgs {
        weights,
        slots: Vec::new(),
        grad: update,
        scalars: at.slice(),
        weight_decay: rule.weight_decay(),
        rounding: Rounding::Nearest,
    };
    rig.kernels.update(&rig.stream, &rule, args).unwrap();
}

fn check_apply<D: Device, P: Float>(rig: &Rig<D>, with_param: bool) {
    let muon = Muon::default();
    let scalars = scalars(&muon);
    for (i, len) in rig.lengths().into_iter().enumerate() {
        let mut weights = values::<f32>(len, 1, false);
        let update = values::<f32>(len, 4, true);
        let mut param = vec![P::from_f32(f32::NAN); len];
        let master = rig.buffer(&weights, from(i, 0));
        let on_update = rig.buffer(&update, from(i, 1));
        let on_param = rig.poisoned::<P>(len, from(i, 2));
        let on_device = Weights::Fp32 {
            master: master.slice(),
            param_out: with_param.then(|| on_param.any()),
        };
        apply(rig, on_device, on_update.any(), scalars);

        let param_out = with_param.then_some(&mut param[..]);
        let decay = muon.weight_decay as f32;
        reference::muon_apply(&mut weights, param_out, &update, &scalars, decay).unwrap();
        let what = format!("{len} elements, parameter {}", P::DTYPE);
        assert_same(&format!("{what}: master"), &master.read(), &weights);
        assert_same(&what, &on_param.read(), &param);
    }
}

pub fn apply_to_every_type<D: Device>(rig: &Rig<D>) {
    check_apply::<D, f32>(rig, false);
    check_apply::<D, f32>(rig, true);
    check_apply::<D, bf16>(rig, true);
    check_apply::<D, f16>(rig, true);
}

pub fn apply_with_remainders<D: Device>(rig: &Rig<D>) {
    let muon = Muon::default();
    let scalars = scalars(&muon);
    for (i, len) in rig.lengths().into_iter().enumerate() {
        let mut weights = values::<f32>(len, 1, false);
        let update = values::<f32>(len, 4, true);
        let (param, remainder): (Vec<bf16>, Vec<i16>) = weights.iter().map(|w| split(*w)).unzip();
        let on_param = rig.buffer(&param, from(i, 0));
        let on_remainder = rig.buffer(&remainder, from(i, 1));
        let on_update = rig.buffer(&update, from(i, 2));
        let on_device = Weights::Remainder {
            param: on_param.slice(),
            remainder: on_remainder.slice(),
        };
        apply(rig, on_device, on_update.any(), scalars);

        let decay = muon.weight_decay as f32;
        reference::muon_apply::<f32>(&mut weights, None, &update, &scalars, decay).unwrap();
        let parts = on_param.read().into_iter().zip(on_remainder.read());
        let joined: Vec<f32> = parts.map(|(p, r)| join(p, r)).collect();
        assert_same(&format!("{len} elements"), &joined, &weights);
    }
}

pub fn muon_skips<D: Device>(rig: &Rig<D>) {
    let len = 37;
    let start = values::<f32>(len, 1, false);
    let momentum = rig.buffer(&start, 0);
    let direction = rig.buffer(&start, 1);
    let master = rig.buffer(&start, 2);
    let param = rig.buffer(&values::<bf16>(len, 5, false), 0);
    let remainder = rig.buffer(&vec![5i16; len], 0);
    let grad = rig.buffer(&start, 0);
    let at = rig.buffer(&[StepScalars::skipped()], 0);
    let rule: Arc<dyn UpdateRule> = Arc::new(Muon::default());
    let args = UpdateArgs {
        weights: Weights::Fp32 {
            master: direction.slice(),
            param_out: None,
        },
        slots: vec![momentum.slice().into()],
        grad: grad.any(),
        scalars: at.slice(),
        weight_decay: 0.1,
        rounding: Rounding::Nearest,
    };
    rig.kernels.update(&rig.stream, &rule, args).unwrap();
    let masters = Weights::Fp32 {
        master: master.slice(),
        param_out: None,
    };
    apply(rig, masters, grad.any(), StepScalars::skipped());
    let remainders = Weights::Remainder {
        param: param.slice(),
        remainder: remainder.slice(),
    };
    apply(rig, remainders, grad.any(), StepScalars::skipped());

    for written in [&momentum, &direction, &master] {
        assert_same("fp32", &written.read(), &start);
    }
    assert_same("bf16", &param.read(), &values::<bf16>(len, 5, false));
    assert_eq!(remainder.read(), vec![5; len]);
}
