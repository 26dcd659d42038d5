//! Encoding, decoding and Adam with moments in blocks: the bits of zero-shard's plain loops, and of
//! the plain loop of Adam between them.

use std::sync::Arc;

use half::{bf16, f16};
use zero_alloc::device::Device;
use zero_kernels::adam::AdamSlices;
use zero_kernels::{
    AverageCodecs, Codec, CodedSlice, EncodeSums, Feedback, Float, Rounding, StepScalars,
    UpdateArgs, UpdateRule, Weights, join, reference, split,
};
use zero_shard::BlockFormat;

use crate::Rig;
use crate::adam::from;
use crate::common::{assert_same, hyper, scalars, squares, values};

/// Values of every kind, in blocks of zeros, of subnormals, of infinities, and of others.
fn mixed<T: Float>(len: usize, seed: u64) -> Vec<T> {
    let mut all: Vec<f32> = values(len, seed, false);
    for (nth, block) in all.chunks_mut(256).enumerate() {
        let special = nth * 11 % 256 % block.len();
        match (nth + seed as usize) % 9 {
            1 => block.fill(0.0),
            2 => block.iter_mut().for_each(|x| *x *= 1e-42),
            3 => block[special] = f32::NAN,
            4 => block[special] = f32::NEG_INFINITY,
            5 => block[special] = -3e4,
            6 => block.iter_mut().for_each(|x| *x *= 4e37),
            _ => {}
        }
    }
    all.into_iter().map(T::from_f32).collect()
}

fn lengths<D: Device>(rig: &Rig<D>) -> Vec<usize> {
    let more = [63, 64, 65, 130, 256, 257, 2049];
    let mut all = rig.lengths();
    if !cfg!(miri) {
        all.extend(more);
    }
    all
}

struct Encoded {
    blocks: Vec<u8>,
    error: Vec<f32>,
    /// Of all values, in another order than the sums of a device.
    sums: EncodeSums,
}

fn plain<S: Float>(format: BlockFormat, src: &[S], error: Option<(&[f32], f32)>) -> Encoded {
    let mut x: Vec<f32> = src.iter().map(|x| x.to_f32()).collect();
    if let Some((error, _)) = error {
        x.iter_mut().zip(error).for_each(|(x, error)| *x += error);
    }
    let mut blocks = vec![0; format.bytes(x.len())];
    format.encode(&x, &mut blocks);
    let mut decoded = vec![0.0; x.len()];
    format.decode(&blocks, &mut decoded);

    let missing = x.iter().zip(&decoded).map(|(x, decoded)| x - decoded);
    let missing = missing.map(|x| if x.is_finite() { x } else { 0.0 });
    let error = match error {
        Some((error, keep)) => {
            let kept = |(e, missing): (&f32, f32)| keep.mul_add(*e, (1.0 - keep) * missing);
            error.iter().zip(missing).map(kept).collect()
        }
        None => Vec::new(),
    };
    let mut sums = EncodeSums::default();
    for (i, (x, decoded)) in x.iter().zip(&decoded).enumerate() {
        let block = &blocks[i / format.elems() * format.block_bytes()..];
        let scale = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
        if !scale.is_nan() {
            sums.error_sq += (f64::from(*x) - f64::from(*decoded)).powi(2);
            sums.bound_sq += (f64::from(format.error_bound()) * f64::from(scale)).powi(2);
            sums.value_sq += f64::from(*x).powi(2);
        }
    }
    Encoded {
        blocks,
        error,
        sums,
    }
}

/// Within the roundings of a sum of `len` terms.
fn near(len: usize, ours: f64, expected: f64) -> bool {
    (ours - expected).abs() <= f64::EPSILON * len as f64 * expected.abs()
}

fn check_encode<D: Device, S: Float>(rig: &Rig<D>) {
    for format in BlockFormat::ALL {
        for (i, len) in lengths(rig).into_iter().enumerate() {
            let keep = [None, Some(0.0), Some(0.75)][(i + format as usize) % 3];
            let with_sums = i % 4 != 3;
            let src = mixed::<S>(len, i as u64);
            let before: Vec<f32> = values(len, 5, false);
            let error = keep.map(|keep| (&before[..], keep));
            let expected = plain(format, &src, error);

            let on_src = rig.buffer(&src, from(i, 0));
            let blocks = rig.poisoned::<u8>(format.bytes(len), 4 * from(i, 1));
            let on_error = rig.buffer(&before, from(i, 2));
            let old = EncodeSums {
                error_sq: 1.0,
                bound_sq: 2.0,
                value_sq: 3.0,
            };
            let sums = rig.buffer(&vec![old; EncodeSums::count(len)], 0);
            let feedback = keep.map(|keep| Feedback {
                error: on_error.slice(),
                keep,
            });
            let to_sums = with_sums.then(|| sums.slice());
            let any = blocks.any();
            let what = format!("{format:?}, {len} of {}, keep {keep:?}", S::DTYPE);
            rig.kernels
                .encode_blocks(&rig.stream, format, on_src.any(), any, feedback, to_sums)
                .unwrap();
            assert_eq!(blocks.read(), expected.blocks, "{what}");
            assert_same(&what, &on_src.read(), &src);
            match keep {
                Some(_) => assert_same(&what, &on_error.read(), &expected.error),
                None => assert_same(&what, &on_error.read(), &before),
            }

            // The host's bits, which are near those of another order.
            let mut on_host = vec![old; EncodeSums::count(len)];
            let mut host_blocks = vec![0; format.bytes(len)];
            let mut host_error = before.clone();
            zero_kernels::host::encode_blocks(
                format,
                slice(&src),
                &mut host_blocks,
                keep.map(|keep| (&mut host_error[..], keep)),
                with_sums.then_some(&mut on_host[..]),
            )
            .unwrap();
            assert_eq!(sums.read(), on_host, "{what}");
            if with_sums {
                let ours = EncodeSums::total(&sums.read());
                let count = EncodeSums::count(len) as f64;
                let expected = expected.sums;
                assert!(
                    near(len, ours.error_sq, expected.error_sq + count),
                    "{what}"
                );
                assert!(
                    near(len, ours.bound_sq, expected.bound_sq + 2.0 * count),
                    "{what}"
                );
                assert!(
                    near(len, ours.value_sq, expected.value_sq + 3.0 * count),
                    "{what}"
                );
                assert!(!format.is_signed() || ours.error_sq <= ours.bound_sq);
            }
        }
    }
}

fn slice<S: Float>(src: &[S]) -> zero_kernels::host::FloatSlice<'_> {
    use zero_alloc::device::DType;
    use zero_kernels::host::FloatSlice;
    match S::DTYPE {
        DType::F32 => FloatSlice::F32(bytemuck::cast_slice(src)),
        DType::Bf16 => FloatSlice::Bf16(bytemuck::cast_slice(src)),
        _ => FloatSlice::F16(bytemuck::cast_slice(src)),
    }
}

pub fn encode_from_every_type<D: Device>(rig: &Rig<D>) {
    check_encode::<D, f32>(rig);
    check_encode::<D, bf16>(rig);
    check_encode::<D, f16>(rig);
}

fn check_decode<D: Device, T: Float>(rig: &Rig<D>) {
    for format in BlockFormat::ALL {
        for (i, len) in lengths(rig).into_iter().enumerate() {
            let parts = [1, 3, 2, 0][i % 4];
            let arrays: Vec<Vec<f32>> = (0..parts).map(|p| mixed(len, p + i as u64)).collect();
            let mut all = Vec::new();
            let mut sum = vec![0.0; len];
            for (nth, array) in arrays.iter().enumerate() {
                let mut blocks = vec![0; format.bytes(len)];
                format.encode(array, &mut blocks);
                let mut decoded = vec![0.0; len];
                format.decode(&blocks, &mut decoded);
                all.extend(blocks);
                match nth {
                    0 => sum = decoded,
                    _ => sum.iter_mut().zip(&decoded).for_each(|(sum, x)| *sum += x),
                }
            }
            let expected: Vec<T> = sum.into_iter().map(T::from_f32).collect();
            let blocks = rig.buffer(&all, 4 * from(i, 0));
            let dst = rig.poisoned::<T>(len, from(i, 1));
            rig.kernels
                .decode_blocks(&rig.stream, format, blocks.any(), parts as usize, dst.any())
                .unwrap();
            let what = format!("{format:?}, {parts} of {len} to {}", T::DTYPE);
            assert_same(&what, &dst.read(), &expected);
            assert_eq!(blocks.read(), all, "{what}");
        }
    }
}

pub fn decode_to_every_type<D: Device>(rig: &Rig<D>) {
    check_decode::<D, f32>(rig);
    check_decode::<D, bf16>(rig);
    check_decode::<D, f16>(rig);
}

/// A moment before a step: its values and their blocks.
fn moment(codec: Codec, values: &[f32]) -> (BlockFormat, Vec<u8>, Vec<f32>) {
    let Codec::Blocks(format) = codec else {
        panic!("{codec:?}")
    };
    let mut blocks = vec![0; format.bytes(values.len())];
    format.encode(values, &mut blocks);
    let mut decoded = vec![0.0; values.len()];
    format.decode(&blocks, &mut decoded);
    (format, blocks, decoded)
}

enum To {
    Master,
    Param,
    Remainder,
}

fn check_adam<D: Device, G: Float, P: Float>(rig: &Rig<D>, averages: AverageCodecs, to: To) {
    for (i, len) in lengths(rig).into_iter().enumerate() {
        let what = format!("{averages:?}, {len}, {} to {}", G::DTYPE, P::DTYPE);
        let start: Vec<f32> = values(len, 1, false);
        let first: Vec<f32> = values(len, 2, false);
        let (first_format, first, mut m) = moment(averages.signed, &first);
        let (second_format, second, mut v) = moment(averages.positive, &squares::<f32>(len, 3));
        let grad = mixed::<G>(len, 4 + i as u64);
        let scalars = scalars(1e-2, 0.37);
        let hyper = hyper(i % 2 == 0);

        let master = rig.buffer(&start, from(i, 0));
        let (high, low): (Vec<bf16>, Vec<i16>) = start.iter().map(|w| split(*w)).unzip();
        let on_high = rig.buffer(&high, from(i, 0));
        let on_low = rig.buffer(&low, from(i, 4));
        let param = rig.poisoned::<P>(len, from(i, 3));
        let on_first = rig.buffer(&first, 4 * from(i, 1));
        let on_second = rig.buffer(&second, 4 * from(i, 2));
        let on_grad = rig.buffer(&grad, from(i, 5));
        let rule: Arc<dyn UpdateRule> = Arc::new(hyper);
        let run = |scalars: StepScalars| {
            let at = rig.buffer(&[scalars], 0);
            let weights = match to {
                To::Remainder => Weights::Remainder {
                    param: on_high.slice(),
                    remainder: on_low.slice(),
                },
                To::Master => Weights::Fp32 {
                    master: master.slice(),
                    param_out: None,
                },
                To::Param => Weights::Fp32 {
                    master: master.slice(),
                    param_out: Some(param.any()),
                },
            };
            let args = UpdateArgs {
                weights,
                slots: vec![
                    CodedSlice::new(averages.signed, on_first.any()),
                    CodedSlice::new(averages.positive, on_second.any()),
                ],
                grad: on_grad.any(),
                scalars: at.slice(),
                weight_decay: hyper.weight_decay,
                rounding: Rounding::Nearest,
            };
            rig.kernels.update(&rig.stream, &rule, args).unwrap();
            at.read();
        };
        run(StepScalars::skipped());
        assert_eq!(on_first.read(), first, "skipped: {what}");
        run(scalars.into());

        let mut weights = start;
        let mut narrow = vec![P::from_f32(f32::NAN); len];
        let slices = AdamSlices {
            weights: &mut weights,
            first_moment: &mut m,
            second_moment: &mut v,
            grad: &grad,
            param_out: Some(&mut narrow[..]),
        };
        reference::adam(slices, &scalars, &hyper).unwrap();
        let ours = match to {
            To::Remainder => {
                let parts = on_high.read().into_iter().zip(on_low.read());
                parts.map(|(high, low)| join(high, low)).collect()
            }
            _ => master.read(),
        };
        assert_same(&what, &ours, &weights);
        if let To::Param = to {
            assert_same(&what, &param.read(), &narrow);
        }
        for (format, on_device, expected) in [
            (first_format, &on_first, &m),
            (second_format, &on_second, &v),
        ] {
            let mut blocks = vec![0; format.bytes(len)];
            format.encode(expected, &mut blocks);
            assert_eq!(on_device.read(), blocks, "{what}: {format:?}");
        }
        assert_same(&what, &on_grad.read(), &grad);
    }
}

fn check_adam_of<D: Device>(rig: &Rig<D>, averages: AverageCodecs) {
    check_adam::<D, f32, f32>(rig, averages, To::Master);
    check_adam::<D, bf16, f32>(rig, averages, To::Master);
    check_adam::<D, f16, f32>(rig, averages, To::Master);
    check_adam::<D, f32, f32>(rig, averages, To::Param);
    check_adam::<D, f32, bf16>(rig, averages, To::Param);
    check_adam::<D, f32, f16>(rig, averages, To::Param);
    check_adam::<D, bf16, f32>(rig, averages, To::Param);
    check_adam::<D, bf16, bf16>(rig, averages, To::Param);
    check_adam::<D, bf16, f16>(rig, averages, To::Param);
    check_adam::<D, f16, f32>(rig, averages, To::Param);
    check_adam::<D, f16, bf16>(rig, averages, To::Param);
    check_adam::<D, f16, f16>(rig, averages, To::Param);
    check_adam::<D, f32, bf16>(rig, averages, To::Remainder);
    check_adam::<D, bf16, bf16>(rig, averages, To::Remainder);
    check_adam::<D, f16, bf16>(rig, averages, To::Remainder);
}

pub fn adam_with_8_bit_moments<D: Device>(rig: &Rig<D>) {
    check_adam_of(rig, AverageCodecs::EIGHT_BITS);
}

pub fn adam_with_4_bit_moments<D: Device>(rig: &Rig<D>) {
    check_adam_of(rig, AverageCodecs::FOUR_BITS);
}
